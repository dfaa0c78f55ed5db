"""Known faults K6 and K7: tree building, layout conversion, masks and positions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from treeconv import (
    DraftTree,
    EagleDraft,
    InvalidArgument,
    InvalidTree,
    TreeMaskMode,
    build_draft_tree,
    from_eagle,
    to_draft_trees,
    to_verify_input,
    tree_mask,
    verify_probs,
)

HALVES = [[0.0, 0.0]] * 2  # two depths, tokens 0 and 1 at .5 each


def tree_of(parents: list[int]) -> DraftTree:
    return DraftTree(parents, list(range(len(parents))))


def mask_rows(tree: DraftTree) -> list[str]:
    square = tree_mask(to_verify_input([tree]), TreeMaskMode.QLEN_ONLY)[0].int().tolist()
    return ["".join(map(str, row)) for row in square]


def test_b13_duplicate_siblings_are_refused_in_a_tree():
    with pytest.raises(InvalidTree, match=r"token_ids\[2\]=1 repeats its sibling node 1 .*distinct tokens"):
        DraftTree([-1, 0, 0], [9, 1, 1])


def test_b13_duplicate_siblings_are_refused_by_every_backend(backend):
    """The public kernel accepts node 2 at coin .45: P(1) = .6 instead of .3."""
    good = to_verify_input([DraftTree([-1, 0, 0], [9, 1, 2])])
    bad = replace(good, candidates=torch.tensor([[9, 1, 1]]))
    with pytest.raises(InvalidTree, match="request 0, node 2: token 1 repeats a sibling's"):
        verify_probs(bad, torch.tensor([[[0.2, 0.3, 0.4, 0.1]] * 3]), backend=backend)


@pytest.mark.parametrize(
    ("parents", "named"), [([-1, 0, 5, 2], r"parents\[2\]=5"), ([-1, 2, 1], r"parents\[1\]=2")]
)
def test_b38_a_missing_parent_or_a_cycle_is_refused(parents, named):
    with pytest.raises(InvalidTree, match=named + ".*but must be in"):
        tree_of(parents)


def test_b38_a_parent_that_was_not_selected_is_refused():
    """EAGLE's kernel reads the next request's row there."""
    draft = EagleDraft(
        parent_list=torch.tensor([[-1, 0, 1]]),
        top_scores_index=torch.tensor([[0, 5]]),  # candidate 5 hangs from candidate 1, which is not taken
        draft_tokens=torch.tensor([[3, 4]]),
        root_token_ids=torch.tensor([9]),
        topk=2,
    )
    with pytest.raises(InvalidTree, match="node 2: its parent is candidate 1, which is not"):
        from_eagle(draft)


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("first", "sibling"),
    [
        ([1, 2, 1], [-1, -1, -1]),
        ([1, -1, -1], [-1, 2, 1]),
        ([1, -1, -1], [-1, 1, -1]),
        ([0, -1, -1], [-1] * 3),
    ],
)
def test_b38_a_cycle_of_pointers_ends(first, sibling, backend):
    batch = replace(
        to_verify_input([DraftTree.chain([0, 1, 1])]),
        retrieve_next_token=torch.tensor([first]),
        retrieve_next_sibling=torch.tensor([sibling]),
    )
    with pytest.raises(InvalidTree, match="reached twice"):
        to_draft_trees(batch)
    with pytest.raises(InvalidTree, match="reached twice"):
        verify_probs(batch, torch.full((1, 3, 2), 0.5), backend=backend)


def test_b39_ties_give_one_optimal_tree():
    tree = build_draft_tree(HALVES, tree_budget=3, root_token_id=9)
    weights = [math.prod([0.5] * depth) for depth in tree.depths[1:]]
    assert (tree.parents, tree.token_ids, sum(weights)) == ((-1, 0, 0, 1), (9, 0, 1, 0), 1.25)


@pytest.mark.parametrize(("logits", "budget"), [(HALVES, 0), (np.zeros((0, 2)), 3)])
def test_b39_an_empty_draft_is_the_root_and_one_token(logits, budget, sampler):
    tree = build_draft_tree(logits, budget, root_token_id=9)
    decision = sampler(tree, [[0.0, 1.0]])
    assert (DraftTree([-1], [9]), (0,), (1,)) == (tree, decision.path, decision.tokens)


@pytest.mark.parametrize(
    ("parents", "first", "sibling"),
    [
        ([-1, 0, 0, 0, 0], [1, -1, -1, -1, -1], [-1, 2, 3, 4, -1]),
        ([-1, 0, 1, 2], [1, 2, 3, -1], [-1, -1, -1, -1]),
    ],
    ids=["star", "chain"],
)
def test_b40_stars_and_chains_convert(parents, first, sibling):
    batch = to_verify_input([tree_of(parents)])
    assert [first] == batch.retrieve_next_token.tolist()
    assert [sibling] == batch.retrieve_next_sibling.tolist()
    assert [tree_of(parents)] == to_draft_trees(batch)


def test_b41_capacity_counts_the_root():
    path = tree_of([-1, 0, 1, 2, 3])
    with pytest.raises(InvalidArgument, match="num_draft_tokens=4, but must be >= 5"):
        to_verify_input([path], num_draft_tokens=4)
    assert [path] == to_draft_trees(to_verify_input([path], num_draft_tokens=5))


def test_b42_position_is_prefix_plus_depth():
    batch = to_verify_input([tree_of([-1, 0, 0, 1])], prefix_lens=[10])
    assert batch.positions.tolist() == [[10, 11, 11, 12]]


def test_b43_padding_takes_nothing_from_the_prefix():
    batch = to_verify_input([tree_of([-1, 0, 0])], num_draft_tokens=4, prefix_lens=[5])
    rows = tree_mask(batch, TreeMaskMode.FULL_MASK).reshape(4, 5 + 4).int().tolist()
    assert [[1] * 5 + tree for tree in ([1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0])] == rows[:3]
    assert rows[3] == [0] * 5 + [0, 0, 0, 1]


def test_b44_below_the_diagonal_is_masked_too():
    assert mask_rows(tree_of([-1, 0, 0, 1, 2])) == ["10000", "11000", "10100", "11010", "10101"]


def test_b45_each_tree_has_its_own_mask():
    batch = to_verify_input([tree_of([-1, 0, 0]), tree_of([-1, 0, 1])])
    mask = tree_mask(batch, TreeMaskMode.QLEN_ONLY)
    assert mask[:, 2].int().tolist() == [[1, 0, 1], [1, 1, 1]]
