"""Contract: with the real xgrammar a node's bitmask is its grammar's after committed text and path.

Bit for bit. Two things tell what is right, neither of them :mod:`treeconv.grammar`: an automaton written out
by hand, and a new matcher that is given a node's whole text from the start. Runs where the ``peers`` extra is
installed (``make peers``).
"""

import importlib.util

import pytest
import torch
from hypothesis import example, given, settings

from treeconv import Coins, DraftTree, verify
from treeconv.convert import to_verify_input
from treeconv.grammar import fill_token_bitmask
from treeconv.strategies import draft_trees

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("xgrammar") is None, reason="xgrammar is not installed: make peers"
)

PIECES = ["a", "b", "c", "d", "ab", "bc", "bcd", "cd", "x", '"', "</s>"]
STOP = PIECES.index("</s>")
WIDTHS = (40, 64, 70)  # no multiple of 32 but one
ABCD = 'root ::= "a" ("b" | "c")* "d"'
#: state -> byte -> state; state 2 is a whole text
AUTOMATON = {0: {"a": 1}, 1: {"b": 1, "c": 1, "d": 2}, 2: {}}
ANYTHING = -1  # an int32 word


def ids(width):
    """Ids of the pieces: beside the edges of the words, and the last ones there are."""
    return [0, 1, 2, 30, 31, 32, 33, width - 4, width - 3, width - 2, width - 1]


def compiled(grammar, width=40):
    import xgrammar  # noqa: PLC0415

    vocab = [f"<{token}>" for token in range(width)]
    for token, piece in zip(ids(width), PIECES, strict=True):
        vocab[token] = piece
    stop = ids(width)[STOP]
    info = xgrammar.TokenizerInfo(vocab, xgrammar.VocabType.RAW, vocab_size=width, stop_token_ids=[stop])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    return getattr(compiler, "compile_json_schema" if grammar[0] == "{" else "compile_grammar")(grammar)


def matcher_after(grammar, tokens):
    """A new matcher behind these tokens; None where it refuses one, or goes on behind the stop token."""
    import xgrammar  # noqa: PLC0415

    matcher = xgrammar.GrammarMatcher(grammar)
    for token in tokens:
        if matcher.is_terminated() or not matcher.accept_token(token):
            return None
    return matcher


def row_of(matcher, width):
    row = torch.full((1, -(-width // 32)), ANYTHING, dtype=torch.int32)
    matcher.fill_next_token_bitmask(row, 0)
    return row[0].tolist()


def allowed(row, width):
    return {token for token in range(width) if row[token // 32] >> (token % 32) & 1}


def with_ids(tree, width, first="a"):
    """A tree over pieces as one over their ids, its root the text's first token."""
    tokens = (PIECES.index(first), *tree.token_ids[1:])
    return DraftTree(tree.parents, tuple(ids(width)[token] for token in tokens))


def text(tree, node):
    return [tree.token_ids[inner] for inner in tree.path(node)]


def by_hand(pieces):
    """The pieces that may come next, or None behind a text that is refused or over."""
    state = 0
    for piece in pieces:
        for byte in piece:
            state = AUTOMATON.get(state, {}).get(byte)
    if state is None:
        return None
    found = set()
    for piece in PIECES[:STOP]:
        after = state
        for byte in piece:
            after = AUTOMATON.get(after, {}).get(byte)
        found |= {piece} if after is not None else set()
    return found | ({"</s>"} if state == 2 else set())


pieces_trees = draft_trees(max_nodes=9, vocab_size=len(PIECES))


@pytest.mark.parametrize("width", WIDTHS)
def test_rows_are_the_automatons(width):
    grammar = compiled(ABCD, width)

    @settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @given(tree=pieces_trees)
    def check(tree):
        tree = with_ids(tree, width)
        matcher = matcher_after(grammar, tree.token_ids[:1])
        bitmask = fill_token_bitmask([tree], [matcher], width)[0].tolist()
        names = dict(zip(ids(width), PIECES, strict=True))
        for node, row in enumerate(bitmask):
            pieces = [names[token] for token in text(tree, node)]
            before = pieces[: pieces.index("</s>")] if "</s>" in pieces else pieces
            nexts = by_hand(before) or set()
            if "</s>" not in pieces:
                assert {names[token] for token in allowed(row, width)} == nexts
            else:  # over, or refused
                assert set(row) == ({ANYTHING} if "</s>" in nexts else {0})
        assert row_of(matcher, width) == bitmask[0]  # it came back as it was handed in

    check()


@pytest.mark.parametrize(
    ("source", "whole"),
    [
        (ABCD, ["a", "d", "</s>"]),
        ('root ::= "x" [b-d]* "a" ("b" | "c" "d")', ["x", "a", "b", "</s>"]),
        ('{"enum": ["a", "ab", "bcd", "bcbc"]}', ['"', "a", '"', "</s>"]),
    ],
    ids=["regular", "switched on", "JSON schema"],
)
def test_rows_are_a_new_matchers_and_xgrammars_own(source, whole):
    """The rows of ``GrammarMatcher.traverse_draft_tree`` too, wherever a walk may come.

    It fills them differently where none should: below a refused node it leaves what the buffer held, and at
    a stop token it allows nothing, which would lose the text before it (xgrammar 0.2.9).
    """
    width, kinds = 70, set()
    grammar = compiled(source, width)
    beyond = DraftTree.chain([PIECES.index(piece) for piece in [*whole, "a"]])

    @settings(max_examples=200, deadline=None, database=None, derandomize=True)
    @given(tree=pieces_trees)
    @example(tree=beyond)
    def check(tree):
        tree = with_ids(tree, width, whole[0])
        root = matcher_after(grammar, tree.token_ids[:1])
        ours = fill_token_bitmask([tree], [root], width)[0]
        batch = to_verify_input([tree], len(tree))
        theirs = torch.full_like(ours, 0x55555555)
        pointers = (batch.retrieve_next_token[0], batch.retrieve_next_sibling[0], batch.candidates[0])
        assert root.traverse_draft_tree(*pointers, theirs)
        for node in range(len(tree)):
            tokens = text(tree, node)
            matcher = matcher_after(grammar, tokens)
            row = ours[node].tolist()
            before = matcher_after(grammar, tokens[:-1])
            if matcher is not None and not matcher.is_terminated():
                assert row == theirs[node].tolist() == row_of(matcher, width)
                kinds.add("open")
            elif matcher is not None:
                assert (set(row), set(theirs[node].tolist())) == ({ANYTHING}, {0})
                kinds.add("stopped")
            elif before is not None and not before.is_terminated():
                assert set(row) == set(theirs[node].tolist()) == {0}
                kinds.add("refused")
            else:
                stopped = any(
                    prefix is not None and prefix.is_terminated()
                    for prefix in (matcher_after(grammar, tokens[:length]) for length in range(len(tokens)))
                )
                assert (set(row), set(theirs[node].tolist())) == ({ANYTHING if stopped else 0}, {0x55555555})
                kinds.add("below stopped" if stopped else "below refused")

    check()
    assert kinds == {"open", "stopped", "refused", "below stopped", "below refused"}


#: id -> grammar, parents, pieces, node -> what may come next (None: nothing is asked, everything allowed)
KNOWN = {
    "B76": (
        'root ::= "x" ("ab" | "cd" "</s>"?)',
        [-1, 0, 0, 1, 2],
        ["x", "a", "c", "b", "d"],
        {0: {"a", "ab", "c", "cd"}, 1: {"b"}, 2: {"d"}},
    ),
    "B77": ('root ::= "x" "a" "b"', [-1, 0, 0], ["x", "d", "a"], {0: {"a", "ab"}, 2: {"b"}}),
    "B81": ('root ::= "x" "a" "b"', [-1, 0, 1, 0], ["x", "d", "a", "a"], {1: set(), 2: set(), 3: {"b"}}),
    "B83": (
        'root ::= "x" [b-d]* "a" "b"',
        [-1, 0, 1, 2],
        ["x", "c", "a", "d"],
        {1: {"a", "ab", "b", "c", "d", "bc", "bcd", "cd"}, 2: {"b"}, 3: set()},
    ),
    "B86": ('root ::= "x"', [-1, 0, 1], ["x", "</s>", "a"], {0: {"</s>"}, 1: None, 2: None}),
}


@pytest.mark.parametrize("known", KNOWN)
def test_known_faults(known):
    source, parents, pieces, wanted = KNOWN[known]
    width = 70
    place = dict(zip(PIECES, ids(width), strict=True))
    tree = DraftTree(parents, [place[piece] for piece in pieces])
    matcher = matcher_after(compiled(source, width), tree.token_ids[:1])
    rows = fill_token_bitmask([tree], [matcher], width)[0].tolist()
    for node, nexts in wanted.items():
        if nexts is None:
            assert rows[node] == [ANYTHING] * len(rows[node])
        else:
            assert allowed(rows[node], width) == {place[piece] for piece in nexts}, node
    assert row_of(matcher, width) == rows[0]


def test_what_verify_emits_is_in_the_grammar():
    """To the stop token, whatever was drafted; from logits that know no grammar."""
    width, seen = 70, set()
    grammar = compiled(ABCD, width)
    generator = torch.Generator().manual_seed(1)
    trees = [
        with_ids(DraftTree([-1, 0, 0, 1, 2], [0, *tokens]), width)
        for tokens in ([1, 3, 2, STOP], [8, 1, 1, 3], [6, 2, STOP, 1], [3, 7, STOP, STOP])
    ]
    place = {token: piece for piece, token in zip(PIECES, ids(width), strict=True)}
    for _ in range(100):
        matchers = [matcher_after(grammar, tree.token_ids[:1]) for tree in trees]
        bitmask = fill_token_bitmask(trees, matchers, width)
        logits = torch.randn((len(trees), 5, width), generator=generator)
        coins = Coins(torch.rand((len(trees), 5), generator=generator), torch.rand(4, generator=generator))
        batch = to_verify_input(trees, 5)
        output = verify(batch, logits, torch.ones(4), coins, token_bitmask=bitmask)
        assert not output.status.any()
        for tree, emitted in zip(trees, output.tokens, strict=True):
            tokens = [tree.token_ids[0], *emitted]
            stop = tokens.index(ids(width)[STOP]) if ids(width)[STOP] in tokens else len(tokens)
            nexts = by_hand([place[token] for token in tokens[:stop]])
            assert nexts is not None
            assert stop == len(tokens) or "</s>" in nexts
            seen |= {len(emitted), "stopped" if stop < len(tokens) else "goes on"}
    assert {1, 2, "stopped", "goes on"} <= seen
