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


def resized(size, slots):
    """A batch of that shape, which to_verify_input never makes."""
    names = ("candidates", "retrieve_next_token", "retrieve_next_sibling")
    empty = torch.zeros((size, slots), dtype=torch.int64)
    return replace(to_verify_input([SMALL]), **dict.fromkeys(names, empty))


def with_prefix(length):
    return replace(to_verify_input([SMALL]), prefix_lens=torch.tensor([length]))


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
    (lambda: to_verify_input(None), "trees=None, but must be a sequence of DraftTrees"),
    (lambda: to_verify_input([SMALL], device="foo"), "device='foo', but must be a device that torch can use"),
    (lambda: to_verify_input([SMALL], device="cuda:99"), "device='cuda:99', but must be a device that torch"),
    (lambda: to_verify_input([SMALL], device=1.5), "device=1.5, but must be a device that torch can use"),
    (lambda: to_verify_input([SMALL], None, 3), "prefix_lens=3, but must be a sequence of 1 integers"),
    (
        lambda: to_verify_input([SMALL], 99999999999),
        "num_draft_tokens=99999999999, but must be <= 1048576 slots per tree",
    ),
    (lambda: to_draft_trees([SMALL]), "verify_input=list, but must be a VerifyInput"),
    (
        lambda: to_draft_trees(resized(1, 0)),
        r"candidates.shape=\(1, 0\), but must be \[B, N\] with B, N >= 1",
    ),
    (lambda: tree_mask(resized(0, 4)), r"candidates.shape=\(0, 4\), but must be \[B, N\] with B, N >= 1"),
    (
        lambda: to_draft_trees(replace(to_verify_input([SMALL]), candidates=torch.zeros(1, 2).long())),
        r"retrieve_next_token.shape=\(1, 4\), but must be \(1, 2\), as candidates",
    ),
    (
        lambda: tree_mask(replace(to_verify_input([SMALL]), retrieve_next_token=torch.zeros(1, 4))),
        "retrieve_next_token.dtype=torch.float32, but must be an integer type",
    ),
    (lambda: tree_mask(with_prefix(-2)), r"prefix_lens\[0\]=-2, but must be an integer >= 0"),
    (lambda: tree_mask(with_prefix(2**60)), r"but the FULL_MASK must hold <= 68719476736 values"),
    (
        lambda: tree_mask(to_verify_input([SMALL], 2**17)),
        r"candidates.shape=\(1, 131072\), but B \* N \* N must be <= 4294967296",
    ),
    (
        lambda: from_tree_mask(torch.ones(1, 3).byte(), [[1, 2]], TreeMaskMode.QLEN_ONLY_BITPACKING),
        r"mask holds 3 values, but QLEN_ONLY_BITPACKING must hold \(1, 2\)",
    ),
    (
        lambda: from_tree_mask(torch.ones(1, 2), [[1, 2]], TreeMaskMode.QLEN_ONLY_BITPACKING),
        "mask holds float32, but QLEN_ONLY_BITPACKING must hold integers",
    ),
    (lambda: from_tree_mask(torch.ones(4), [[1, 2]], 9), r"mode=9, but must be one of \['FULL_MASK'"),
    (lambda: from_tree_mask(torch.ones(4), [[1, 2]], None), "mode=None, but must be one of"),
    (lambda: from_tree_mask(None, [[1, 2]]), "mask=None, but must be an array of numbers"),
    (lambda: from_tree_mask([[1], [1, 1]], [[1, 2]]), "mask=list, but must be an array of numbers"),
    (lambda: from_tree_mask(torch.ones(1), [["a"]]), "token_ids holds <U1, but must be an array of integers"),
    (lambda: from_tree_mask(torch.ones(1), [1]), r"token_ids.shape=\(1,\), but must have 2 dimension"),
    (
        lambda: from_tree_mask(torch.ones(0), torch.zeros(0, 4).long()),
        r"token_ids.shape=\(0, 4\), but must be \[B, N\] with B, N >= 1",
    ),
    (lambda: from_tree_mask(torch.ones(1), [[1]], prefix_lens=2), "prefix_lens=2, but must be a sequence"),
    (lambda: from_tree_mask(torch.ones(1), [[1]], prefix_lens=[-1]), r"prefix_lens\[0\]=-1, but must be an"),
    (lambda: from_eagle([SMALL]), "draft=list, but must be an EagleDraft"),
    (
        lambda: from_eagle(replace(to_eagle([SMALL]), root_token_ids=torch.tensor([9, 9]))),
        r"parent_list.shape=\(1, 3\), but must be \[2, ...\]: a row for each root_token_ids",
    ),
    (
        lambda: from_eagle(replace(to_eagle([SMALL]), draft_tokens=torch.tensor([[5, 7]]))),
        r"draft_tokens.shape=\(1, 2\), but must be \(1, 3\), as top_scores_index",
    ),
    (
        lambda: from_eagle(replace(to_eagle([SMALL]), parent_list=torch.tensor([-1, 0]))),
        r"parent_list.shape=\(2,\), but must have 2 dimension",
    ),
    (
        lambda: from_eagle(replace(to_eagle([SMALL]), top_scores_index=[[0], [1, 2]])),
        "top_scores_index=list, but must be an array of integers",
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
    if "points at" in message or "reached twice" in message or "must have none" in message:
        with pytest.raises(InvalidTree, match=message):
            tree_mask(batch)


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


def edited(mode, change, slots=6, prefixes=(2, 3)):
    """The mask of two small trees with two slots of padding, changed, and what its trees are made of."""
    batch = to_verify_input([SMALL, SMALL], slots, prefixes)
    mask = tree_mask(batch, mode).long()  # torch has no arithmetic of uint16 and uint32
    change(mask)
    return mask, batch.candidates, mode, prefixes


def put(*place, value):
    return lambda mask: mask.__setitem__(place, value)


def add(*place, value):
    return lambda mask: mask.__setitem__(place, mask[place] + value)


FULL, SQUARE, PACKED = MODES
FIRST = 6 * (2 + 6)  # values of request 0 in the full mask; then rows of 3 + 6


@pytest.mark.parametrize(
    ("mode", "change", "message"),
    [
        (
            SQUARE,
            put(1, 3, 0, value=0),
            r"request 1, row 3 \(padding\): sees slot 1, but a row must hold its",
        ),
        (SQUARE, put(1, 4, 1, value=1), r"request 1, row 4 \(padding\): sees slot 1, but"),
        (SQUARE, put(0, 4, 5, value=1), r"request 0, row 4 \(padding\): sees slot 5, but"),
        (SQUARE, put(1, 5, 5, value=0), r"request 1, row 5 \(padding\): does not see slot 5, but"),
        (SQUARE, put(1, slice(None), 0, value=0), r"request 1: parents=\[\], but a tree must hold"),
        (SQUARE, put(1, 3, 4, value=1), "request 1, node 3: its mask row .* is not the row of an"),
        (FULL, put(FIRST + 9 * 2 + 1, value=0), r"row 2 \(a node\): does not see token 1 of the prefix, but"),
        (FULL, put(FIRST + 9 * 5 + 2, value=1), r"row 5 \(padding\): sees token 2 of the prefix, but"),
        (FULL, put(FIRST + 9 * 5 + 4, value=1), r"request 1, row 5 \(padding\): sees slot 1, but"),
        (
            PACKED,
            add(1, 2, value=2**6),
            r"request 1, row 2 \(a node\): sees by a bit behind its last slot 5, but",
        ),
        (
            PACKED,
            add(1, 5, value=2**7),
            r"request 1, row 5 \(padding\): sees by a bit behind its last slot 5, but",
        ),
        (
            PACKED,
            add(1, 2, value=2**40),
            r"request 1, row 2 \(a node\): sees by a bit behind its last slot 5, but",
        ),
        (PACKED, put(1, 4, value=0), r"request 1, row 4 \(padding\): does not see slot 4, but"),
    ],
)
def test_masks_of_no_tree_are_refused(mode, change, message):
    with pytest.raises(InvalidTree, match=message):
        from_tree_mask(*edited(mode, change))


@pytest.mark.parametrize("slots", [33, 40, 64])  # of 64 slots it is the last one's own
def test_a_last_words_last_bit_in_padding_is_refused(slots):
    mask, tokens, mode, prefixes = edited(PACKED, add(0, 5, 1, value=2**31), slots)
    seen = "slot 63" if slots == 64 else f"by a bit behind its last slot {slots - 1}"
    with pytest.raises(InvalidTree, match=rf"request 0, row 5 \(padding\): sees {seen}, but"):
        from_tree_mask(mask, tokens, mode, prefixes)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slots", [4, 8, 16, 32, 33])
@pytest.mark.parametrize("form", [np.asarray, lambda mask: mask.tolist()], ids=["array", "list"])
def test_masks_in_arrays_and_lists_are_taken(mode, slots, form):
    batch = to_verify_input([SMALL, CHAIN], slots, [1, 0])
    mask = tree_mask(batch, mode)
    assert from_tree_mask(form(mask), form(batch.candidates), mode, [1, 0]) == [SMALL, CHAIN]


@pytest.mark.parametrize(("slots", "signed"), [(8, torch.int8), (16, torch.int16), (32, torch.int32)])
def test_packed_words_with_a_sign_hold_the_same_bits(slots, signed):
    batch = to_verify_input([DraftTree.chain(range(slots))])
    assert from_tree_mask(tree_mask(batch, PACKED).view(signed), batch.candidates, PACKED) == [
        DraftTree.chain(range(slots))
    ]


def test_duplicate_siblings_under_a_mask_name_the_request():
    batch = to_verify_input([CHAIN, DraftTree([-1, 0, 0], [9, 5, 7])])
    tokens = batch.candidates.clone()
    tokens[1, 2] = 5
    with pytest.raises(InvalidTree, match=r"request 1: token_ids\[2\]=5 repeats its sibling node 1"):
        from_tree_mask(tree_mask(batch), tokens)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("name", "slot", "pointer"),
    [
        ("retrieve_next_sibling", 5, 1),
        ("retrieve_next_token", 5, 1),
        ("retrieve_next_token", 4, 5),
        ("retrieve_next_sibling", 4, 4),
        ("retrieve_next_token", 5, 0),
        ("retrieve_next_token", 4, 99),
        ("retrieve_next_sibling", 5, -7),
    ],
)
def test_pointers_of_unreachable_slots_change_nothing(mode, name, slot, pointer):
    plain = to_verify_input([CHAIN, SMALL], 6, [1, 2])
    changed = getattr(plain, name).clone()
    changed[1, slot] = pointer
    batch = replace(plain, **{name: changed})
    assert torch.equal(tree_mask(batch, mode), tree_mask(plain, mode))
    assert to_draft_trees(batch) == [CHAIN, SMALL]


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
