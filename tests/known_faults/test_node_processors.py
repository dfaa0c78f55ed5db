"""Known faults K13: grammar masks and penalties on nodes, B76 to B83 and B86, on each CPU backend."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from treeconv import Coins, DraftTree, RowStatus, oracle, to_verify_input, verify
from treeconv.grammar import fill_token_bitmask
from treeconv.processors import RequestProcessors

V = 10


class Rules:
    """A grammar as a table: text so far -> tokens that may come next; a stop token ends it."""

    def __init__(self, nexts, committed=(), stop=None):
        self.nexts, self.stop = nexts, stop
        self.text = list(committed)
        self.asked = []

    def allowed(self):
        return self.nexts(tuple(self.text))

    def accept_token(self, token_id):
        assert not self.is_terminated(), "a terminated matcher was asked to go on"
        if token_id not in self.allowed():
            return False
        self.text.append(token_id)
        return True

    def fill_next_token_bitmask(self, bitmask, index=0):
        assert not self.is_terminated(), "a terminated matcher was asked for a mask"
        self.asked.append(tuple(self.text))
        bitmask[index] = sum(1 << token for token in self.allowed())

    def rollback(self, num_tokens=1):
        assert len(self.text) >= num_tokens
        del self.text[len(self.text) - num_tokens :]

    def is_terminated(self):
        return self.stop is not None and self.stop in self.text


def table(*texts):
    """Exactly these texts."""
    return lambda text: {t[len(text)] for t in texts if len(t) > len(text) and t[: len(text)] == text}


def masks(tree, matcher):
    """Per node the tokens that its row allows."""
    rows = fill_token_bitmask([tree], [matcher], V)[0, :, 0].tolist()
    return [{token for token in range(V) if row >> token & 1} for row in rows]


def processed(tree, rows, processors):
    """The oracle's processed logits, node by node."""
    view = oracle.TargetRows.from_processed(np.array(rows, np.float32), tree, processors, 1.0)
    return [view._rows[node][0].tolist() for node in range(len(tree))]


def decide(backend, tree, rows, temperature=1.0, accept=0.5, final=0.5, **processors):
    """``(path, emitted tokens, status)`` of one tree."""
    full = np.full((len(tree), len(rows[0])), np.nan, np.float32)
    full[: len(rows)] = rows
    output = verify(
        to_verify_input([tree]),
        full[None],
        temperature,
        Coins([[accept] * len(tree)], [final]),
        backend=backend,
        **processors,
    )
    path = [index for index in output.accept_index[0].tolist() if index != -1]
    return path, output.tokens[0], RowStatus(output.status[0].item())


def one_hot(token):
    row = np.full(V, -20.0)
    row[token] = 20.0
    return row


def test_b76_a_sibling_does_not_advance_the_grammar(backend):
    """Grammar "0 1" or "2 3": node 2 (token 2) allows {3}; wrong samplers mask it as after "0 2"."""
    tree = DraftTree([-1, 0, 0, 1, 2], [9, 0, 2, 1, 3])
    matcher = Rules(table((9, 0, 1), (9, 2, 3)), committed=(9,))
    assert masks(tree, matcher)[:3] == [{0, 2}, {1}, {3}]
    assert matcher.text == [9]
    bitmask = fill_token_bitmask([tree], [matcher], V)
    rows = [one_hot(2), one_hot(1), one_hot(5)]  # 5 would be likely at node 2, but is forbidden there
    rows[2][3] = 0.0
    path, tokens, status = decide(backend, tree, rows + [one_hot(7)] * 2, token_bitmask=bitmask)
    # Node 4 (token 3) is accepted: it is all that is allowed. Nothing follows it.
    assert (path, tokens, status) == ([], [], RowStatus.EMPTY)
    capped, tokens, status = decide(
        backend, tree, rows + [one_hot(7)] * 2, token_bitmask=bitmask, depth_cap=2
    )
    assert (capped, tokens, status) == ([0, 2], [2, 3], RowStatus.OK)


def test_b77_a_refused_token_is_not_rolled_back():
    """Grammar "4 0 1", 4 committed: 7 refused, the node of 0 allows {1}; wrong: back before 4, 0 refused."""
    tree = DraftTree([-1, 0, 0], [4, 7, 0])
    matcher = Rules(table((4, 0, 1)), committed=(4,))
    assert masks(tree, matcher) == [{0}, set(), {1}]
    assert matcher.text == [4]


def test_b81_a_refused_node_allows_nothing_nor_does_its_subtree(backend):
    """Wrong: everything is allowed under 7."""
    tree = DraftTree([-1, 0, 0, 1], [4, 7, 0, 3])
    matcher = Rules(table((4, 0, 1)), committed=(4,))
    assert masks(tree, matcher) == [{0}, set(), {1}, set()]
    bitmask = fill_token_bitmask([tree], [matcher], V)
    path, tokens, _ = decide(
        backend, tree, [one_hot(7), one_hot(3), one_hot(1)], accept=0.0, token_bitmask=bitmask
    )
    assert (path, tokens) == ([0, 2], [0, 1])


def test_b83_a_constraint_that_starts_inside_the_window(backend):
    """Marker 5 switches grammar {0} on: node 1 allows {0}, so 3 is refused; wrong: 3 unconstrained."""

    def nexts(text):
        return {0} if 5 in text else set(range(V))

    tree = DraftTree([-1, 0, 1], [9, 5, 3])
    matcher = Rules(nexts, committed=(9,))
    assert masks(tree, matcher) == [set(range(V)), {0}, set()]
    bitmask = fill_token_bitmask([tree], [matcher], V)
    path, tokens, _ = decide(backend, tree, [one_hot(5), one_hot(3)], token_bitmask=bitmask)
    assert (path, tokens) == ([0, 1], [5, 0])


def test_b86_a_matcher_is_not_asked_after_its_stop(backend):
    """Stop 2 is legal at the root: the mask is asked for at node 0 only; wrong: at node 1 too, and abort."""
    tree = DraftTree([-1, 0, 1], [9, 2, 5])
    matcher = Rules(lambda _text: {0, 2}, committed=(9,), stop=2)
    assert masks(tree, matcher) == [{0, 2}, set(range(V)), set(range(V))]
    assert matcher.asked == [(9,)]
    # The text up to the stop is emitted, and not lost to a row that allows nothing.
    bitmask = fill_token_bitmask([tree], [Rules(lambda _text: {0, 2}, committed=(9,), stop=2)], V)
    _, tokens, status = decide(backend, tree, [one_hot(2)] * 3, token_bitmask=bitmask)
    assert (tokens[:1], status) == ([2], RowStatus.OK)


def test_b78_the_root_is_counted_once_below_it(backend):
    """Output [5] (5 is the root), child 6, frequency .5, zero logits: 5 and 6 get -.5; wrong: 5 gets -1."""
    tree = DraftTree([-1, 0], [5, 6])
    rows = processed(tree, np.zeros((2, 8)), RequestProcessors(frequency_penalty=0.5))
    assert [rows[1][token] for token in (4, 5, 6, 7)] == [0, -0.5, -0.5, 0]
    # At T = 0 with 5 half a point and a bit above the rest: penalised once it wins, twice it loses.
    lead = np.zeros(8)
    lead[5] = 0.75
    reach = np.zeros(8)
    reach[6] = 9.0
    _, tokens, _ = decide(backend, tree, [reach, lead], 0.0, frequency_penalty=0.5)
    assert tokens == [6, 5]


def test_b79_the_root_is_in_the_history(backend):
    """Output [5], root 6: at the root {5: 1, 6: 1}; wrong: {5: 1}."""
    tree = DraftTree([-1], [6])
    held = RequestProcessors(frequency_penalty=0.5, committed_tokens=(5,))
    (row,) = processed(tree, np.zeros((1, 8)), held)
    assert [row[token] for token in (4, 5, 6, 7)] == [0, -0.5, -0.5, 0]
    lead = [0, 0, 0, 0, 0, 0.2, 0.25, 0.125]  # without penalties 6, then 5
    for committed, want in (([[5]], 7), ([[]], 5)):
        _, tokens, _ = decide(backend, tree, [lead], 0.0, frequency_penalty=0.5, committed_tokens=committed)
        assert tokens == [want]


@pytest.mark.parametrize("temperature", [0.0, 0.001])
def test_b82_penalties_reach_the_verifier(backend, temperature):
    """Logits [2, 1.9], history {0: 1}, frequency .5, child 0: [1.5, 1.9], reject, emit 1; wrong: accept 0."""
    tree = DraftTree([-1, 0], [0, 0])
    path, tokens, _ = decide(backend, tree, [[2, 1.9]], temperature, frequency_penalty=0.5)
    assert (path, tokens) == ([0], [1])
    # The same with the history committed and a root outside the vocabulary (an image's placeholder).
    tree = DraftTree([-1, 0], [9, 0])
    path, tokens, _ = decide(
        backend, tree, [[2, 1.9]], temperature, frequency_penalty=0.5, committed_tokens=[[0]]
    )
    assert (path, tokens) == ([0], [1])
    assert decide(backend, tree, [[2, 1.9], [0, 5]], 0.0)[:2] == ([0, 1], [0, 1])


def test_b82_the_sampled_law_is_penalised_too(backend):
    """log 3 less log 3 is no lead: at T = 1 both tokens get half, draft or not."""
    grid = 8
    rows = np.log(np.array([[3.0, 1.0], [1.0, 1.0]]))
    penalty = float(np.float32(np.log(3.0)))
    for parents in ([-1], [-1, 0]):
        tree = DraftTree(parents, [0] * len(parents))
        law = [Fraction(0)] * 2
        for coin in range(grid):
            for final in range(grid):
                _, tokens, _ = decide(
                    backend,
                    tree,
                    rows[: len(tree)],
                    accept=(coin + 0.5) / grid,
                    final=(final + 0.5) / grid,
                    presence_penalty=penalty,
                )
                law[tokens[0]] += Fraction(1, grid**2)
        assert law == [Fraction(1, 2)] * 2


def test_b76_b83_inputs_come_back_unchanged(backend):
    logits = torch.zeros(1, 2, 8)
    bias, mask = torch.ones(1, 8), torch.full((1, 2, 1), 0b111, dtype=torch.int32)
    committed = torch.tensor([[3, -1]])
    before = [tensor.clone() for tensor in (logits, bias, mask, committed)]
    verify(
        to_verify_input([DraftTree([-1, 0], [5, 2])]),
        logits,
        backend=backend,
        logit_bias=bias,
        token_bitmask=mask,
        repetition_penalty=1.5,
        committed_tokens=committed,
    )
    assert all(map(torch.equal, before, (logits, bias, mask, committed)))
