"""DraftTree, and what VerifyOutput tells of a result."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np
import pytest
import torch

from treeconv import DraftTree, InvalidArgument, InvalidTree, RowStatus, TreeMaskMode, VerifyOutput
from treeconv.tree import as_float_array

#       0
#      / \
#     1   2
#     |   |
#     3   4
TREE = DraftTree(parents=[-1, 0, 0, 1, 2], token_ids=[9, 5, 7, 2, 2])

MALFORMED = [
    ([], [], r"parents=\[\], but a tree must hold at least its root"),
    ([-1, 0], [9], r"len\(parents\)=2 and len\(token_ids\)=1, but must be equal"),
    ([0], [9], r"parents\[0\]=0, but must be -1"),
    ([-1, -1], [9, 5], r"parents\[1\]=-1, but must be in \[0, 0\].*a second root"),
    ([-1, 1], [9, 5], r"parents\[1\]=1, but must be in \[0, 0\].*a cycle or a node out of order"),
    ([-1, 2, 0], [9, 5, 6], r"parents\[1\]=2, but must be in \[0, 0\].*a cycle or a node out of order"),
    ([-1, 0, 7], [9, 5, 6], r"parents\[2\]=7, but must be in \[0, 1\].*out of range"),
    ([-1, 0, -2], [9, 5, 6], r"parents\[2\]=-2, but must be in \[0, 1\]"),
    ([-1, 0], [9, -5], r"token_ids\[1\]=-5, but must be >= 0"),
    ([-1, 0], [-9, 5], r"token_ids\[0\]=-9, but must be >= 0"),
    ([-1, 0, 1, 0], [9, 5, 5, 5], r"token_ids\[3\]=5 repeats its sibling node 1 \(both children of node 0\)"),
    ([-1, 0.5], [9, 5], r"parents=\[-1, 0.5\], but must be a flat sequence of integers"),
    ([-1, 0], [9, "5"], r"token_ids=\[9, '5'\], but must be a flat sequence of integers"),
    ([[-1, 0]], [[9, 5]], "parents=.*flat sequence of integers"),
    (3, [9], "parents=3, but must be a flat sequence of integers"),
]


@pytest.mark.parametrize(("parents", "token_ids", "message"), MALFORMED)
def test_malformed_trees_are_refused(parents, token_ids, message):
    with pytest.raises(InvalidTree, match=message):
        DraftTree(parents, token_ids)


def test_a_token_may_repeat_below_another_parent_and_below_itself():
    assert DraftTree([-1, 0, 1, 0], [5, 5, 5, 6]).token_ids == (5, 5, 5, 6)


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor])
def test_any_integer_sequence_is_kept_as_plain_ints(make):
    tree = DraftTree(make([-1, 0, 0]), make([9, 5, 7]))
    assert (tree.parents, tree.token_ids) == ((-1, 0, 0), (9, 5, 7))
    assert {int} == {type(value) for value in tree.parents + tree.token_ids}


def test_trees_are_values():
    same = DraftTree((-1, 0, 0, 1, 2), (9, 5, 7, 2, 2))
    assert {TREE} == {TREE, same, pickle.loads(pickle.dumps(TREE))}  # noqa: S301
    assert DraftTree((-1, 0, 0, 1, 2), (9, 5, 7, 2, 3)) != TREE
    with pytest.raises(dataclasses.FrozenInstanceError):
        TREE.parents = ()


def test_repr_makes_the_tree_again():
    assert eval(repr(TREE)) == TREE  # noqa: S307


def test_children_are_in_test_order():
    assert TREE.children == ((1, 2), (3,), (4,), (), ())


def test_depths_and_depth():
    assert (TREE.depths, TREE.depth, len(TREE)) == ((0, 1, 1, 2, 2), 2, 5)
    assert DraftTree([-1], [0]).depth == 0


def test_path_runs_from_the_root():
    assert [TREE.path(node) for node in (0, 2, 4)] == [(0,), (0, 2), (0, 2, 4)]


def test_chain_is_the_tree_of_width_one():
    assert DraftTree.chain([9, 5, 5]) == DraftTree([-1, 0, 1], [9, 5, 5])


@pytest.mark.parametrize("tokens", [iter([9, 5]), (token for token in (9, 5)), np.array([9, 5])])
def test_a_chain_of_any_iterable(tokens):
    assert DraftTree.chain(tokens) == DraftTree([-1, 0], [9, 5])


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "at least its root"),
        ([9, -1], r"token_ids\[1\]=-1, but must be >= 0"),
        (5, "token_ids=5, but must be a flat sequence of integers"),
        (None, "token_ids=None, but must be a flat sequence of integers"),
    ],
)
def test_a_malformed_chain_is_refused(tokens, message):
    with pytest.raises(InvalidTree, match=message):
        DraftTree.chain(tokens)


def test_drawing():
    want = """\
node 0: token 9
├─ node 1: token 5   coin .5
│  └─ node 3: token 2
└─ node 2: token 7
   └─ node 4: token 2"""
    assert TREE.draw({1: "coin .5"}) == want


def test_drawing_a_part_counts_the_rest():
    assert TREE.draw(keep={0, 2}).splitlines() == [
        "node 0: token 9",
        "├─ node 2: token 7",
        "│  └─ ... 1 more",
        "└─ ... 1 more",
    ]


def test_mask_modes_are_sglangs_numbers():
    assert [(mode.name, mode.value) for mode in TreeMaskMode] == [
        ("FULL_MASK", 0),
        ("QLEN_ONLY", 1),
        ("QLEN_ONLY_BITPACKING", 2),
    ]


def output(status):
    return VerifyOutput(
        accept_index=torch.tensor([[0, 2, -1], [3, -1, -1], [-1, -1, -1]]),
        accept_token_num=torch.tensor([1, 0, 0]),
        predicts=torch.tensor([7, -1, 8, 1, -1, -1, -1, -1, -1]),
        status=torch.tensor(status),
    )


def test_tokens_are_path_then_bonus_and_nothing_where_the_status_is_bad():
    assert output([0, 0, RowStatus.NAN]).tokens == [[7, 8], [1], []]


@pytest.mark.parametrize(
    ("status", "held"), [(RowStatus.NAN, "NaN"), (RowStatus.POS_INF, r"\+inf"), (RowStatus.EMPTY, "no mass")]
)
def test_raise_for_status_names_request_and_cause(status, held):
    with pytest.raises(InvalidArgument, match=f"request 2: a visited target row holds {held}"):
        output([0, 0, status]).raise_for_status()


def test_raise_for_status_is_silent_where_all_is_well():
    assert output([0, 0, 0]).raise_for_status() is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_any_float_tensor_is_read_exactly(dtype):
    tensor = torch.tensor([0.1, -3.3, float("-inf")], dtype=dtype, requires_grad=True)
    assert as_float_array(tensor).tolist() == tensor.tolist()


def test_integers_are_read_as_float64():
    assert as_float_array([1, 2**40 + 1]).tolist() == [1.0, 2.0**40 + 1]
