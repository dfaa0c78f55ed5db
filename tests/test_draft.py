"""DDTree's builder: optimal, prefix-closed, ordered, deterministic."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch

from treeconv import DraftTree, InvalidArgument, build_draft_tree

INF = float("inf")


def softmax(logits):
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return weights / weights.sum(axis=1, keepdims=True)


def weights_of(tree, probs):
    """Each node's weight: the product of its prefix's marginals."""
    weights = [1.0]
    for node in range(1, len(tree)):
        weights.append(weights[tree.parents[node]] * probs[tree.depths[node] - 1][tree.token_ids[node]])
    return weights[1:]


def best_total(probs, budget):
    """The largest sum of weights over all prefix-closed sets of ``budget`` prefixes, by brute force."""
    depth, vocab = probs.shape
    prefixes = [()]
    for _ in range(depth):
        prefixes += [(*prefix, token) for prefix in prefixes for token in range(vocab)]
    prefixes = sorted({prefix for prefix in prefixes if prefix}, key=len)
    weight = {prefix: math.prod(probs[d][t] for d, t in enumerate(prefix)) for prefix in prefixes}
    best = 0.0
    for chosen in combinations(prefixes, min(budget, len(prefixes))):
        held = {(), *chosen}
        if all(prefix[:-1] in held for prefix in chosen):
            best = max(best, sum(weight[prefix] for prefix in chosen))
    return best


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5])
@pytest.mark.parametrize(("depth", "vocab"), [(1, 4), (2, 3), (3, 2)])
@pytest.mark.parametrize("seed", range(4))
def test_no_tree_of_that_size_weighs_more(budget, depth, vocab, seed):
    logits = np.random.default_rng(seed).normal(0, 2, (depth, vocab))
    tree = build_draft_tree(logits, budget, root_token_id=9)
    probs = softmax(logits)
    available = sum(vocab**d for d in range(1, depth + 1))
    assert len(tree) == 1 + min(budget, available)
    assert sum(weights_of(tree, probs)) == pytest.approx(best_total(probs, budget), rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_nodes_come_by_falling_weight(seed):
    logits = np.random.default_rng(seed).normal(0, 3, (6, 40))
    tree = build_draft_tree(logits, 63, root_token_id=9)
    weights = weights_of(tree, softmax(logits))
    assert len(weights) == 63
    assert all(earlier >= later * (1 - 1e-12) for earlier, later in pairwise(weights))


def test_siblings_come_by_falling_weight_so_that_the_likeliest_is_tested_first():
    logits = [[0.0, 3.0, 1.0, 2.0]]
    assert build_draft_tree(logits, 4, 9) == DraftTree([-1, 0, 0, 0, 0], [9, 1, 3, 2, 0])


def test_ties_take_the_earlier_parent_then_the_lower_token():
    tree = build_draft_tree(np.zeros((2, 3)), 6, 9)
    assert tree == DraftTree([-1, 0, 0, 0, 1, 1, 1], [9, 0, 1, 2, 0, 1, 2])


def test_the_same_logits_give_the_same_tree():
    logits = np.round(np.random.default_rng(0).normal(0, 1, (5, 30)), 1)  # many ties
    trees = {build_draft_tree(logits.copy(), 40, 9) for _ in range(5)}
    assert len(trees) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_tensors_of_any_float_dtype_are_taken(dtype):
    logits = torch.tensor([[0.0, 2.0], [1.0, 0.0]], dtype=dtype)
    assert build_draft_tree(logits, 2, 9) == DraftTree([-1, 0, 1], [9, 1, 0])


@pytest.mark.parametrize(
    ("logits", "budget", "want"),
    [
        ([[0.0, 1.0]], 0, DraftTree([-1], [9])),
        (np.zeros((0, 5)), 4, DraftTree([-1], [9])),
        ([[7.0], [7.0], [7.0]], 9, DraftTree.chain([9, 0, 0, 0])),
        ([[0.0, 1.0]], 9, DraftTree([-1, 0, 0], [9, 1, 0])),
        ([[-INF, 1.0, -INF]], 9, DraftTree([-1, 0], [9, 1])),
        ([[0.0, -INF], [-INF, -INF], [0.0, 0.0]], 9, DraftTree([-1, 0], [9, 0])),
        ([[-INF, -INF], [0.0, 0.0]], 9, DraftTree([-1], [9])),
        ([[1e30, -1e30], [3.0, 3.0]], 3, DraftTree([-1, 0, 1, 1], [9, 0, 0, 1])),
    ],
    ids=[
        "budget 0",
        "depth 0",
        "one token",
        "prefixes run out",
        "-inf",
        "empty row",
        "empty first row",
        "huge",
    ],
)
def test_edges(logits, budget, want):
    assert build_draft_tree(logits, budget, 9) == want


@pytest.mark.parametrize(
    ("logits", "budget", "root", "message"),
    [
        ([0.0, 1.0], 1, 9, r"draft_logits.shape=\(2,\), but must be \[depth, vocab\]"),
        (
            [[0, 1], [1]],
            3,
            0,
            r"draft_logits=\[\[0, 1\], \[1\]\], but must be numbers of shape \[depth, vocab\]",
        ),
        ([["a"]], 3, 0, r"draft_logits=\[\['a'\]\], but must be numbers of shape"),
        ([[{}]], 3, 0, r"draft_logits=\[\[\{\}\]\], but must be numbers of shape"),
        (np.zeros((2, 0)), 1, 9, r"draft_logits.shape=\(2, 0\), but must be"),
        ([[0.0, float("nan")]], 1, 9, r"draft_logits\[0, 1\]=nan, but must be finite or -inf"),
        ([[0.0, 1.0], [INF, 0.0]], 1, 9, r"draft_logits\[1, 0\]=inf, but must be finite or -inf"),
        ([[0.0, 1.0]], -1, 9, "tree_budget=-1, but must be an integer >= 0"),
        ([[0.0, 1.0]], 1.5, 9, "tree_budget=1.5, but must be an integer >= 0"),
        ([[0.0, 1.0]], 1, -9, "root_token_id=-9, but must be an integer >= 0"),
    ],
)
def test_bad_arguments(logits, budget, root, message):
    with pytest.raises(InvalidArgument, match=message):
        build_draft_tree(logits, budget, root)
