"""Do the strategies find the rare things, and what do they shrink to?"""

from __future__ import annotations

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis.errors import NoSuchExample

from treeconv import DraftTree, InvalidArgument, to_draft_trees
from treeconv import strategies as S  # noqa: N812

QUIET = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck), "derandomize": True}
LAST_COIN = 1 - 2**-24


def minimal(strategy, condition=lambda _: True, is_least=lambda _: True):
    """What the strategy shrinks to under a condition.

    A shrinker is greedy, and where it starts depends on what else was imported: from one of a few starts it
    must come to what ``is_least``.
    """
    found = find(strategy, condition, settings=settings(max_examples=200, **QUIET))
    few = settings(max_examples=200, **{**QUIET, "derandomize": False})
    for start in range(6):
        if is_least(found):
            break
        found = find(strategy, condition, settings=few, random=Random(start))
    return found


def finds(strategy, condition, examples=200):
    """Whether the condition turns up among that many examples, without a hint."""
    once = settings(max_examples=examples, phases=[Phase.generate], **QUIET)
    try:
        find(strategy, condition, settings=once)
    except NoSuchExample:
        return False
    return True


def never(strategy, condition):
    return not finds(strategy, condition, examples=60)


def any_row(test):
    return lambda case: any(test(request, row) for request in case.requests for row in request.rows)


def any_request(test):
    return lambda case: any(test(request) for request in case.requests)


def is_chain(tree):
    return len(tree) >= 4 and tree.parents == tuple(range(-1, len(tree) - 1))


def is_star(tree):
    return len(tree) >= 4 and set(tree.parents[1:]) == {0}


def is_comb(tree):
    kids = [len(kids) for kids in tree.children]
    return len(tree) >= 7 and max(kids) == 2 and tree.depth >= 3


def is_bushy(tree):
    """As many grandchildren below the first child as children: the beginning of a full k-ary tree."""
    return len(tree) >= 7 and len(tree.children[0]) == len(tree.children[1]) >= 2


TREES = {
    "a root alone": lambda tree: len(tree) == 1,
    "a chain": is_chain,
    "a star": is_star,
    "a comb": is_comb,
    "a bushy tree": is_bushy,
    "a node with a younger child than its sibling's": lambda t: any(a > b for a, b in pairwise(t.parents)),
    "ten nodes": lambda tree: len(tree) == 10,
    "depth nine": lambda tree: tree.depth == 9,
    "token 0 as a draft": lambda tree: 0 in tree.token_ids[1:],
    "the last token as a draft": lambda tree: 7 in tree.token_ids[1:],
    "children that use up the vocabulary": lambda tree: any(len(kids) == 8 for kids in tree.children),
    "a token below itself": lambda t: any(
        t.token_ids[t.parents[i]] == t.token_ids[i] for i in range(1, len(t))
    ),
    "siblings in falling token order": lambda t: any(
        t.token_ids[a] > t.token_ids[b] for kids in t.children for a, b in pairwise(kids)
    ),
}


@pytest.mark.parametrize("condition", TREES.values(), ids=list(TREES))
def test_trees_find(condition):
    assert finds(S.draft_trees(), condition)


LOGITS = {
    "a tie at the top": any_row(lambda _, row: (row == row.max()).sum() >= 2),
    "-inf": any_row(lambda _, row: (row == -np.inf).any()),
    "-inf at a draft's token": any_request(
        lambda r: any(
            r.rows[r.tree.parents[i], r.tree.token_ids[i]] == -np.inf for i in range(1, len(r.tree))
        )
    ),
    "only one finite logit of several": any_row(lambda _, row: len(row) > 1 and np.isfinite(row).sum() == 1),
    "huge logits": any_row(lambda _, row: np.abs(row[np.isfinite(row)]).max() >= 30000),
    "T = 0": any_request(lambda r: r.temperature == 0),
    "tiny T": any_request(lambda r: 0 < r.temperature < 1e-30),
    "huge T": any_request(lambda r: r.temperature > 1e20),
    "T = 0 beside T = 2": lambda c: {0.0, 2.0} <= {r.temperature for r in c.requests},
    "a ragged batch": lambda c: len({len(r.tree) for r in c.requests}) > 1,
    "a vocabulary of one": lambda c: c.vocab_size == 1,
    "a vocabulary that is no multiple of 4": lambda c: c.vocab_size in (5, 6, 7, 9),
    "a cap below the depth": lambda c: c.effective_depth_cap <= max(r.tree.depth for r in c.requests),
    "a cap of 1 over a tree": lambda c: c.depth_cap == 1 and any(r.tree.depth for r in c.requests),
    "bfloat16": lambda c: c.rows_dtype == "bfloat16",
    "float16": lambda c: c.rows_dtype == "float16",
    "a final coin of exactly 1": any_request(lambda r: r.final == 1),
    "a final coin of 0": any_request(lambda r: r.final == 0),
}


@pytest.mark.parametrize("condition", LOGITS.values(), ids=list(LOGITS))
def test_calls_with_logits_find(condition):
    assert finds(S.verify_cases(max_requests=3), condition, examples=1000)


DYADIC = {
    "a child without mass": any_request(
        lambda r: any(r.rows[r.tree.parents[i], r.tree.token_ids[i]] == 0 for i in range(1, len(r.tree)))
    ),
    "all mass on one of several tokens": any_row(lambda _, row: len(row) > 1 and row.max() == 1),
    "children that cover the support": any_request(
        lambda r: any(
            kids and r.rows[node, [r.tree.token_ids[kid] for kid in kids]].sum() == 1
            for node, kids in enumerate(r.tree.children)
        )
    ),
    "the last token without mass": any_row(lambda _, row: row[-1] == 0),
    "the first token without mass": any_row(lambda _, row: row[0] == 0),
    "equal masses": any_row(lambda _, row: len(row) > 1 and len(set(row.tolist())) == 1),
    "a mass of 2**-12": any_row(lambda _, row: (row == 2**-12).any()),
}


@pytest.mark.parametrize("condition", DYADIC.values(), ids=list(DYADIC))
def test_dyadic_calls_find(condition):
    assert finds(S.verify_cases(kind="probs"), condition, examples=1000)


@pytest.mark.parametrize("target", [np.isnan, np.isposinf], ids=["NaN", "+inf"])
def test_bad_rows_find(target):
    cases = S.cases_for("bad_rows")
    assert finds(cases, any_row(lambda _, row: target(row).any()))
    assert finds(cases, any_row(lambda _, row: (row == -np.inf).all()))
    assert finds(cases, any_request(lambda r: target(r.rows[1:]).any() and np.isfinite(r.rows[0]).all()))


@pytest.mark.parametrize("coin", [0.0, 0.5, LAST_COIN, 1.0, 0.3])
def test_coins_find_their_edges(coin):
    want = float(np.float32(coin))
    below = float(np.nextafter(np.float32(want), np.float32(-1)))
    assert finds(S.coins(near=[0.3]), lambda drawn: drawn == want)
    assert finds(S.coins(near=0.3), lambda drawn: drawn == below) == (coin in (LAST_COIN, 1.0, 0.3))


def test_batches_find_padding_and_prefixes():
    assert finds(S.tree_batches(), lambda batch: batch[1] > max(map(len, batch[0])))
    assert finds(S.tree_batches(), lambda batch: len(set(batch[2])) == 3)
    assert finds(S.verify_inputs(), lambda batch: batch.batch_size == 4 and batch.num_draft_tokens >= 8)


def test_wide_cases_find_more_siblings_than_a_warp_and_walks_that_go_deep():
    wide = S.cases_for("wide")
    assert finds(wide, any_request(lambda r: max(map(len, r.tree.children)) > 32))
    assert finds(wide, lambda c: c.vocab_size == 4099)
    assert finds(wide, any_request(lambda r: r.tree.depth > 32))


# What is drawn is what was asked for.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_logits_are_exact_in_their_dtype(dtype):
    import torch  # noqa: PLC0415

    def moved(rows):
        tensor = torch.from_numpy(rows)
        return (
            not torch.equal(tensor.to(getattr(torch, dtype)).float(), tensor)
            or rows.max(axis=1).min() == -np.inf
        )

    assert never(S.target_logits(dtype=dtype), moved)


def test_dyadic_rows_sum_to_one_in_multiples():
    def broken(rows):
        return (rows.sum(axis=1) != 1).any() or (rows * 16 % 1).any() or (rows < 0).any()

    assert never(S.dyadic_rows(3, 5, max_bits=4), broken)


def test_sizes_are_kept():
    assert never(S.draft_trees(min_nodes=3, max_nodes=6, vocab_size=2), lambda t: not 3 <= len(t) <= 6)
    assert never(S.draft_trees(vocab_size=3), lambda t: max(t.token_ids) > 2)
    assert never(S.temperatures(min_temperature=0.5, max_temperature=1.0), lambda t: not 0.5 <= t <= 1)
    assert never(S.temperatures(), lambda t: float(np.float32(t)) != t)
    for low, high in ((5, 6), (0.003, 0.0031), (4.001, 4.002), (1e-40, 2e-40), (0.1, 0.1000001)):
        narrow = S.temperatures(min_temperature=low, max_temperature=high)
        assert never(narrow, lambda t, low=low, high=high: not low <= t <= high)
    assert never(S.target_logits(allow_neg_inf=False), lambda rows: np.isinf(rows).any())
    assert never(S.verify_cases(min_requests=2, max_requests=3), lambda c: not 2 <= len(c.requests) <= 3)
    assert never(S.verify_cases(allow_depth_cap=False), lambda c: c.depth_cap is not None)
    assert never(S.coins(near=[0.3]), lambda coin: not 0 <= coin <= 1 or float(np.float32(coin)) != coin)


@pytest.mark.parametrize("shape", ["chain", "star"])
def test_a_shape_is_that_shape(shape):
    parent = {"chain": lambda i: i - 1, "star": lambda _: 0}[shape]
    off = lambda t: any(t.parents[i] != parent(i) for i in range(1, len(t)))  # noqa: E731
    assert never(S.draft_trees(shapes=[shape], vocab_size=20), off)


# What is minimal: tiny, and readable.


def test_minimal_trees():
    assert minimal(S.draft_trees()) == DraftTree([-1], [0])
    assert minimal(S.draft_trees(), lambda t: len(t) == 4) == DraftTree.chain([0, 0, 0, 0])
    assert minimal(S.draft_trees(), lambda t: len(t.children[0]) == 2) == DraftTree([-1, 0, 0], [0, 0, 1])


def test_minimal_values():
    assert minimal(S.temperatures()) == 1.0
    assert minimal(S.coins(near=[0.3])) == 0.5
    assert minimal(S.coins(), lambda coin: coin < 0.5) == 0.0
    assert minimal(S.target_logits(2, 3)).tolist() == [[0.0] * 3] * 2
    assert minimal(S.dyadic_rows(2, 3)).tolist() == [[1.0, 0.0, 0.0]] * 2


def test_minimal_batches():
    assert minimal(S.tree_batches()) == ([DraftTree([-1], [0])], 1, [0])
    batch = minimal(S.verify_inputs(), lambda batch: batch.num_draft_tokens == 3)
    assert to_draft_trees(batch) in ([DraftTree([-1], [0])], [DraftTree.chain([0, 0, 0])])


@pytest.mark.parametrize("kind", ["logits", "dyadic", "dyadic_small", "zero_mass", "chains", "bad_rows"])
def test_minimal_cases_are_one_root_over_one_token(kind):
    def is_least(case):
        sizes = len(case.requests), case.vocab_size, case.slots
        return sizes == (1, 1, 1) and case.requests[0].final == case.requests[0].accept[0] == 0.5

    case = minimal(S.cases_for(kind), is_least=is_least)
    (request,) = case.requests
    row = [0.0] if case.kind == "logits" else [1.0]
    assert (request.tree, request.rows.tolist()) == (DraftTree([-1], [0]), [row])
    assert (request.temperature, request.accept.tolist(), request.final) == (1.0, [0.5], 0.5)
    assert (case.effective_depth_cap, case.rows_dtype, case.vocab_size) == (1, "float32", 1)


def test_a_failure_about_one_child_has_one_child():
    case = minimal(
        S.verify_cases(kind="probs"),
        any_request(
            lambda r: any(
                0 < r.rows[r.tree.parents[i], r.tree.token_ids[i]] < 1 for i in range(1, len(r.tree))
            )
        ),
    )
    (request,) = case.requests
    assert (request.tree, case.vocab_size, request.rows[0].tolist()) == (
        DraftTree.chain([0, 0]),
        2,
        [0.5, 0.5],
    )


def test_a_failure_about_two_temperatures_has_two_roots():
    pairs = S.verify_cases(min_requests=2, max_requests=3, max_nodes=3, max_vocab=3)
    case = minimal(pairs, lambda c: len({r.temperature for r in c.requests}) == 2)
    assert [r.tree for r in case.requests] == [DraftTree([-1], [0])] * 2
    assert sorted(r.temperature for r in case.requests) == [0.0, 1.0]


BAD_ARGUMENTS = [
    (lambda: S.draft_trees(min_nodes=0), "min_nodes=0, but must be >= 1"),
    (lambda: S.draft_trees(min_nodes=5, max_nodes=4), "max_nodes=4, but must be >= min_nodes=5"),
    (lambda: S.draft_trees(shapes=["ring"]), r"shapes=\['ring'\], but must be some of chain, star"),
    (lambda: S.draft_trees(shapes=[]), r"shapes=\[\], but must be some of chain, star"),
    (
        lambda: S.temperatures(min_temperature=-1.0),
        "min_temperature=-1.0, .* but must be finite with 0 <= min",
    ),
    (
        lambda: S.temperatures(min_temperature=2.0, max_temperature=1.0),
        "max_temperature=1.0, but must be finite",
    ),
    (lambda: S.temperatures(max_temperature=float("inf")), "max_temperature=inf, but must be finite"),
    (lambda: S.temperatures(min_temperature=float("nan")), "min_temperature=nan, .* but must be finite"),
    (
        lambda: S.temperatures(min_temperature=5.00000001, max_temperature=5.00000002),
        "min_temperature=5.00000001, .* but must have a float32 between them",
    ),
    (lambda: S.verify_cases(min_requests=0), "min_requests=0, but must be >= 1"),
    (lambda: S.verify_cases(min_requests=3, max_requests=2), "max_requests=2, but must be >= min_requests=3"),
    (lambda: S.cases_for("logit"), "kind='logit', but must be one of logits, dyadic"),
]


@pytest.mark.parametrize(("make", "message"), BAD_ARGUMENTS)
def test_bad_arguments(make, message):
    with pytest.raises(InvalidArgument, match=message):
        minimal(make())
