"""Trees to and from the layouts: pointers, masks, EAGLE's tensors."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from treeconv import (
    DraftTree,
    EagleDraft,
    InvalidArgument,
    InvalidTree,
    TreeMaskMode,
    from_eagle,
    from_tree_mask,
    to_draft_trees,
    to_eagle,
    to_verify_input,
    tree_mask,
)

SMALL = DraftTree([-1, 0, 0, 1], [9, 5, 7, 2])
CHAIN = DraftTree.chain([0, 0])
MODES = list(TreeMaskMode)


def random_tree(rng, size):
    parents = [-1] + [int(rng.integers(0, node)) for node in range(1, size)]
    return DraftTree(parents, list(range(100, 100 + size)))


def test_layout_of_a_padded_batch():
    batch = to_verify_input([SMALL, CHAIN], num_draft_tokens=5, prefix_lens=[3, 8])
    assert batch.candidates.tolist() == [[9, 5, 7, 2, 0], [0, 0, 0, 0, 0]]
    assert batch.retrieve_index.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert batch.retrieve_next_token.tolist() == [[1, 3, -1, -1, -1], [1, -1, -1, -1, -1]]
    assert batch.retrieve_next_sibling.tolist() == [[-1, 2, -1, -1, -1], [-1] * 5]
    assert batch.positions.tolist() == [[3, 4, 4, 5, 3], [8, 9, 8, 8, 8]]
    assert batch.prefix_lens.tolist() == [3, 8]
    assert (batch.batch_size, batch.num_draft_tokens, batch.device) == (2, 5, torch.device("cpu"))


def test_every_tensor_is_int64_and_contiguous():
    batch = to_verify_input([SMALL, CHAIN])
    tensors = [getattr(batch, field.name) for field in fields(batch)]
    assert [(tensor.dtype, tensor.is_contiguous()) for tensor in tensors] == [(torch.int64, True)] * 6


def test_defaults_are_the_largest_tree_and_no_prefix():
    batch = to_verify_input([CHAIN, SMALL])
    assert (batch.num_draft_tokens, batch.prefix_lens.tolist()) == (4, [0, 0])


def test_device_is_where_the_tensors_go():
    assert to_verify_input([SMALL], device="meta").device == torch.device("meta")
    assert to_verify_input([SMALL]).to("meta").positions.device == torch.device("meta")


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 200])
def test_round_trips_of_random_trees(size):
    rng = np.random.default_rng(size)
    trees = [random_tree(rng, size), DraftTree.chain(range(size)), random_tree(rng, max(1, size // 2))]
    prefixes = [0, 3, 5]
    batch = to_verify_input(trees, size + 2, prefixes)
    assert to_draft_trees(batch) == trees
    for mode in MODES:
        assert from_tree_mask(tree_mask(batch, mode), batch.candidates, mode, prefixes) == trees
    for tree in trees:
        assert from_eagle(to_eagle([tree])) == [tree]


@pytest.mark.parametrize(
    ("slots", "dtype", "shape"),
    [
        (4, torch.uint8, (1, 4)),
        (8, torch.uint8, (1, 8)),
        (9, torch.uint16, (1, 9)),
        (16, torch.uint16, (1, 16)),
        (17, torch.uint32, (1, 17)),
        (32, torch.uint32, (1, 32)),
        (33, torch.uint32, (1, 33, 2)),
        (65, torch.uint32, (1, 65, 3)),
    ],
)
def test_bit_packed_masks_use_the_narrowest_word(slots, dtype, shape):
    packed = tree_mask(to_verify_input([SMALL], slots), TreeMaskMode.QLEN_ONLY_BITPACKING)
    assert (packed.dtype, tuple(packed.shape)) == (dtype, shape)
    first_words = packed.to(torch.int64).reshape(slots, -1)[:4, 0].tolist()
    assert first_words == [0b0001, 0b0011, 0b0101, 0b1011]


def test_full_mask_is_prefix_then_tree_per_request():
    batch = to_verify_input([CHAIN, DraftTree([-1], [4])], 2, [1, 2])
    want = [
        *(1, 1, 0),  # request 0: prefix of 1, node 0
        *(1, 1, 1),
        *(1, 1, 1, 0),  # request 1: prefix of 2, the root
        *(0, 0, 0, 1),  # padding sees itself only
    ]
    assert tree_mask(batch).int().tolist() == want


BAD_CONVERSIONS = [
    (lambda: to_verify_input([]), r"trees=\[\], but must hold at least one DraftTree"),
    (lambda: to_verify_input(SMALL), "trees is one DraftTree, but must be a sequence"),
    (lambda: to_verify_input([SMALL, [9, 5]]), r"trees\[1\]=\[9, 5\], but must be a DraftTree"),
    (
        lambda: to_verify_input([CHAIN, SMALL], 3),
        "num_draft_tokens=3, but must be >= 4: tree 1 has that many",
    ),
    (lambda: to_verify_input([SMALL], 4.0), r"num_draft_tokens=4.0, but must be an integer >= 1"),
    (
        lambda: to_verify_input([SMALL], num_draft_tokens=True),
        "num_draft_tokens=True, but must be an integer >= 1",
    ),
    (lambda: to_verify_input([SMALL], None, [1, 2]), r"len\(prefix_lens\)=2, but must be 1"),
    (lambda: to_verify_input([SMALL], None, [-1]), r"prefix_lens\[0\]=-1, but must be an integer >= 0"),
    (lambda: tree_mask(to_verify_input([SMALL]), 3), r"mode=3, but must be one of \['FULL_MASK'"),
    (
        lambda: from_tree_mask(torch.ones(5), torch.tensor([[1, 2]])),
        "mask holds 5 values, but FULL_MASK must hold 4",
    ),
    (
        lambda: from_tree_mask(torch.ones(5), torch.tensor([[1, 2]]), TreeMaskMode.QLEN_ONLY),
        r"mask holds 5 values, but QLEN_ONLY must hold \(1, 2, 2\)",
    ),
    (lambda: to_eagle([SMALL, CHAIN]), r"tree sizes \[2, 4\], but EAGLE's layout takes trees of one size"),
    (lambda: to_eagle([SMALL], topk=1), "topk=1, but must be an integer >= 2"),
]


@pytest.mark.parametrize(("convert", "message"), BAD_CONVERSIONS)
def test_bad_conversions_name_argument_value_and_rule(convert, message):
    with pytest.raises(InvalidArgument, match=message):
        convert()


BAD_POINTERS = [
    ([1, 2, 9, -1], [-1] * 4, "request 1, node 2: points at child 9, but must be -1 or in"),
    ([1, -2, -1, -1], [-1] * 4, "request 1, node 1: points at child -2, but must be -1 or in"),
    ([1, -1, -1, -1], [-1, 7, -1, -1], "request 1, node 0: points at child 7, but must be -1 or in"),
    ([1, -1, -1, -1], [2, -1, -1, -1], "request 1, node 0: next sibling 2, but the root must have none"),
    ([1, 2, 1, -1], [-1] * 4, "request 1, node 1: reached twice"),
    ([1, 3, 3, -1], [-1, 2, -1, -1], "request 1, node 3: reached twice"),
    ([1, -1, -1, -1], [-1, 2, 3, 1], "request 1, node 1: reached twice"),
    ([2, -1, -1, -1], [-1] * 4, "request 1, node 1: not reachable from the root, but a later node is"),
    ([2, 3, -1, -1], [-1, -1, 1, -1], "request 1, node 2: its next sibling is node 1, but siblings must be"),
    ([3, -1, 1, 2], [-1] * 4, r"request 1: parents\[1\]=2, but must be in"),
]


@pytest.mark.timeout(10)
@pytest.mark.parametrize(("first", "sibling", "message"), BAD_POINTERS)
def test_malformed_pointers_are_refused(first, sibling, message):
    batch = replace(
        to_verify_input([SMALL, SMALL]),
        retrieve_next_token=torch.tensor([[1, 3, -1, -1], first]),
        retrieve_next_sibling=torch.tensor([[-1, 2, -1, -1], sibling]),
    )
    with pytest.raises(InvalidTree, match=message):
        to_draft_trees(batch)


@pytest.mark.parametrize(
    ("row", "values"),
    [(1, [1, 0, 0, 0]), (2, [0, 0, 1, 0]), (3, [1, 1, 1, 1]), (2, [1, 0, 1, 1])],
    ids=["blind to itself", "blind to the root", "two parents", "sees the future"],
)
def test_rows_that_are_no_tree_mask_are_refused(row, values):
    batch = to_verify_input([SMALL])
    mask = tree_mask(batch, TreeMaskMode.QLEN_ONLY).int()
    mask[0, row] = torch.tensor(values)
    with pytest.raises(InvalidTree, match=r"request 0, node [0-3]: its mask row .* is not the row of an"):
        from_tree_mask(mask, batch.candidates, TreeMaskMode.QLEN_ONLY)


def test_eagles_tensors_of_a_small_tree():
    """Beam 0 is the root; candidate c is child c % topk of beam c // topk."""
    draft = to_eagle([SMALL])
    assert draft.topk == 2
    assert draft.parent_list.tolist() == [[-1, 0, -1]]
    assert draft.top_scores_index.tolist() == [[0, 1, 2]]
    assert draft.draft_tokens.tolist() == [[5, 7, 2]]
    assert draft.root_token_ids.tolist() == [9]


@pytest.mark.parametrize("topk", [2, 3, 10])
def test_a_wider_beam_holds_the_same_tree(topk):
    assert from_eagle(to_eagle([SMALL], topk)) == [SMALL]


def test_a_root_alone_passes_through_eagles_tensors():
    root = DraftTree([-1], [4])
    assert from_eagle(to_eagle([root, root])) == [root, root]


@pytest.mark.parametrize(
    ("parents", "numbers", "message"),
    [
        ([-1, 0, -1], [0, 9, 2], "request 0, node 2: top_scores_index=9 names beam 4, but parent_list holds"),
        ([-1, 0, -1], [0, -1, 2], "request 0, node 2: top_scores_index=-1 names beam -1"),
        ([-1, 1, -1], [0, 2, 3], "request 0, node 2: its parent is candidate 1, which is not in"),
        ([-1, 3, -1], [0, 2, 3], r"request 0: parents\[2\]=3, but must be in"),
        ([-1, 2, -1], [0, 2, 3], r"request 0: parents\[2\]=2, but must be in"),
    ],
)
def test_malformed_eagle_tensors_are_refused(parents, numbers, message):
    draft = EagleDraft(
        parent_list=torch.tensor([parents]),
        top_scores_index=torch.tensor([numbers]),
        draft_tokens=torch.tensor([[5, 7, 2]]),
        root_token_ids=torch.tensor([9]),
        topk=2,
    )
    with pytest.raises(InvalidTree, match=message):
        from_eagle(draft)


def test_duplicate_siblings_in_eagles_tensors_are_refused():
    with pytest.raises(InvalidTree, match=r"request 0: token_ids\[2\]=5 repeats its sibling node 1"):
        from_eagle(replace(to_eagle([SMALL]), draft_tokens=torch.tensor([[5, 5, 2]])))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_masks_of_pointers_in_narrow_integers(dtype):
    batch = to_verify_input([SMALL, CHAIN])
    names = ("retrieve_next_token", "retrieve_next_sibling")
    narrow = replace(batch, **{name: getattr(batch, name).to(dtype) for name in names})
    assert torch.equal(tree_mask(narrow), tree_mask(batch))
