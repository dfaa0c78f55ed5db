"""Contract: the matcher's state at a node is the committed text and the path; it comes back as it came."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treeconv import DraftTree, InvalidArgument
from treeconv.grammar import fill_token_bitmask
from treeconv.strategies import draft_trees


class Language:
    """A matcher of finitely many texts; the last token of each is its stop token. Counts what it is asked."""

    def __init__(self, *texts, committed=()):
        self.texts, self.state, self.asked = texts, tuple(committed), []

    def nexts(self):
        size = len(self.state)
        return {text[size] for text in self.texts if len(text) > size and text[:size] == self.state}

    def accept_token(self, token_id):
        assert not self.is_terminated(), "a terminated matcher was asked to go on"
        if token_id not in self.nexts():
            return False
        self.state += (token_id,)
        return True

    def fill_next_token_bitmask(self, bitmask, index=0):
        assert not self.is_terminated(), "a terminated matcher was asked for a mask"
        self.asked.append(self.state)
        bitmask[index] = 0
        for token in self.nexts():
            bit = token % 32
            bitmask[index, token // 32] |= (1 << bit) - ((1 << 32) if bit == 31 else 0)

    def rollback(self, num_tokens=1):
        assert 0 < num_tokens <= len(self.state)
        self.state = self.state[: len(self.state) - num_tokens]

    def is_terminated(self):
        return self.state in self.texts


def allowed(bitmask, vocab_size):
    """Per slot the allowed tokens."""
    return [
        {token for token in range(vocab_size) if row[token // 32] >> (token % 32) & 1}
        for row in bitmask.tolist()
    ]


ANYTHING = set(range(40))


@given(st.data())
def test_each_row_is_what_the_language_allows_after_the_path(data):
    tree = data.draw(draft_trees(max_nodes=8, vocab_size=3))
    texts = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4).map(tuple), max_size=6))
    # No text begins another: a finished one is over.
    texts = [one for one in texts if not any(other != one and one[: len(other)] == other for other in texts)]
    matcher = Language(*texts)
    rows = allowed(fill_token_bitmask([tree], [matcher], 40)[0], 40)
    assert matcher.state == ()
    asked = []
    for node in range(len(tree)):
        path = tuple(tree.token_ids[inner] for inner in tree.path(node)[1:])
        nexts = {text[len(path)] for text in texts if len(text) > len(path) and text[: len(path)] == path}
        if any(path[:length] in texts for length in range(1, len(path) + 1)):
            assert rows[node] == ANYTHING
        else:
            assert rows[node] == nexts
            asked += [path] if nexts or not node else []
    assert sorted(matcher.asked) == sorted(asked)


def test_a_request_without_a_grammar_and_padding_allow_everything():
    tree = DraftTree([-1, 0], [9, 1])
    bitmask = fill_token_bitmask([tree, tree], [None, Language((1, 2))], 40, num_draft_tokens=3)
    assert (bitmask.shape, bitmask.dtype) == ((2, 3, 2), torch.int32)
    assert allowed(bitmask[0], 40) == [ANYTHING] * 3
    assert allowed(bitmask[1], 40) == [{1}, {2}, ANYTHING]


def test_tokens_at_the_edges_of_words():
    matcher = Language((31, 1), (32, 1), (63, 1))
    star = DraftTree([-1, 0, 0, 0], [9, 31, 32, 63])
    rows = allowed(fill_token_bitmask([star], [matcher], 64)[0], 64)
    assert rows == [{31, 32, 63}, {1}, {1}, {1}]


def test_a_matcher_that_raises_comes_back_as_it_came():
    class Failing(Language):
        def fill_next_token_bitmask(self, bitmask, index=0):
            super().fill_next_token_bitmask(bitmask, index)
            if len(self.state) == 3:
                raise RuntimeError("no memory")

    matcher = Failing((5, 0, 1, 2), committed=(5,))
    with pytest.raises(RuntimeError, match="no memory"):
        fill_token_bitmask([DraftTree.chain([5, 0, 1])], [matcher], 40)
    assert matcher.state == (5,)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([DraftTree([-1], [0])], [], 40), r"len\(matchers\)=0, but must be 1"),
        (([DraftTree([-1], [0])], [None], 0), "vocab_size=0, but must be an integer >= 1"),
        (([DraftTree([-1, 0], [0, 1])], [None], 40, 1), "num_draft_tokens=1, but must be an integer >= 2"),
        ((DraftTree([-1], [0]), [None], 40), "trees is one DraftTree"),
    ],
)
def test_refusals(given, message):
    with pytest.raises(InvalidArgument, match=message):
        fill_token_bitmask(*given)
