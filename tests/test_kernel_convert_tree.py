"""The device converter against the CPU converter, bit for bit; in Triton's interpreter without a GPU."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from treeconv import DraftTree, InvalidArgument, TreeMaskMode, to_draft_trees, to_verify_input, tree_mask
from treeconv.kernels import convert_tree as kernel
from treeconv.kernels.convert_tree import DeviceTrees, convert_tree, full_mask_size

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not kernel.INTERPRETED:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)

FIELDS = ("candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "positions")


def random_tree(rng, size):
    """Parents before children, tokens distinct among siblings; shapes from chains to stars."""
    kind = rng.integers(4)
    parents = [-1]
    for node in range(1, size):
        choice = {0: node - 1, 1: 0, 2: int(rng.integers(node)), 3: max(0, node - int(rng.integers(1, 5)))}
        parents.append(choice[int(kind)])
    return DraftTree(tuple(parents), tuple(int(t) for t in rng.permutation(size)))


def as_tensors(trees, slots, prefixes, junk=True):
    """Device tensors with junk in the padding, which must not matter."""
    parents = torch.full((len(trees), slots), 0 if junk else -1, dtype=torch.int64)
    tokens = torch.full((len(trees), slots), 77 if junk else 0, dtype=torch.int64)
    for b, tree in enumerate(trees):
        parents[b, : len(tree)] = torch.tensor(tree.parents)
        tokens[b, : len(tree)] = torch.tensor(tree.token_ids)
    sizes = torch.tensor([len(tree) for tree in trees])
    return [x.to(DEVICE) for x in (parents, tokens, sizes, torch.tensor(prefixes))]


def poisoned(result):
    """The same outputs filled with rubbish."""
    for name in FIELDS:
        getattr(result.batch, name).fill_(-77)
    if result.mask is not None:
        result.mask.view(torch.uint8).fill_(0x5A)
    return result


def assert_same(got, trees, slots, prefixes, mode):
    want = to_verify_input(trees, slots, prefixes)
    for name in (*FIELDS, "prefix_lens"):
        assert torch.equal(getattr(got.batch, name).cpu(), getattr(want, name)), name
        assert getattr(got.batch, name).dtype == torch.int64
    if mode is None:
        assert got.mask is None
        return
    mask = tree_mask(want, mode)
    assert got.mask.shape == mask.shape
    assert got.mask.dtype == mask.dtype
    assert torch.equal(got.mask.cpu().view(torch.uint8), mask.view(torch.uint8))


MODES = [None, *TreeMaskMode]
# The interpreter is slow: fewer sizes there, each side of every change of word and dtype on a GPU.
SLOTS = [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64, 70] if DEVICE == "cuda" else [1, 9, 32, 33]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("slots", SLOTS)
def test_equal_to_the_cpu_converter(slots, mode):
    rng = np.random.default_rng(slots)
    trees = [random_tree(rng, int(rng.integers(1, slots + 1))) for _ in range(3)] + [random_tree(rng, slots)]
    prefixes = [0, int(rng.integers(1, 40)), 3, 19]
    inputs = as_tensors(trees, slots, prefixes)
    first = convert_tree(*inputs, mode=mode, prefix_sum=sum(prefixes))
    again = convert_tree(*inputs, mode=mode, prefix_sum=sum(prefixes), out=poisoned(first))
    assert_same(again, trees, slots, prefixes, mode)
    assert to_draft_trees(again.batch.to("cpu")) == trees


@pytest.mark.parametrize("mode", [TreeMaskMode.QLEN_ONLY_BITPACKING, TreeMaskMode.FULL_MASK])
def test_a_thousand_nodes(mode):
    rng = np.random.default_rng(5)
    slots = 1024 if DEVICE == "cuda" else 200  # the interpreter is slow
    trees = [random_tree(rng, slots), DraftTree.chain(range(slots - 3))]
    prefixes = [5, 300]
    got = convert_tree(*as_tensors(trees, slots, prefixes), mode=mode, prefix_sum=sum(prefixes))
    assert_same(got, trees, slots, prefixes, mode)


def test_many_small_trees_and_their_offsets():
    """FULL_MASK offsets are sums over the trees before: more of them than one load takes."""
    rng = np.random.default_rng(9)
    trees = [random_tree(rng, int(rng.integers(1, 4))) for _ in range(140)]
    prefixes = rng.integers(0, 30, 140).tolist()
    got = convert_tree(*as_tensors(trees, 3, prefixes), mode=TreeMaskMode.FULL_MASK, prefix_sum=sum(prefixes))
    assert_same(got, trees, 3, prefixes, TreeMaskMode.FULL_MASK)


def test_a_mask_buffer_that_is_not_aligned():
    """A view that begins at an odd byte takes the path without whole words, and nothing around it changes."""
    rng = np.random.default_rng(3)
    trees, prefixes = [random_tree(rng, 5), random_tree(rng, 4)], [21, 9]
    inputs = as_tensors(trees, 5, prefixes)
    size = full_mask_size(5, 2, 30)
    room = torch.ones(size + 11, dtype=torch.bool, device=DEVICE)
    room.view(torch.uint8).fill_(0x5A)
    fields = convert_tree(*inputs).batch
    got = convert_tree(
        *inputs, mode=TreeMaskMode.FULL_MASK, prefix_sum=30, out=DeviceTrees(fields, room[3 : 3 + size])
    )
    assert_same(got, trees, 5, prefixes, TreeMaskMode.FULL_MASK)
    rest = torch.cat([room.view(torch.uint8)[:3], room.view(torch.uint8)[3 + size :]])
    assert (rest == 0x5A).all()


def test_a_mask_buffer_larger_or_smaller_than_the_trees_need():
    """The rest of a larger one is left alone; a smaller one is never overrun."""
    rng = np.random.default_rng(4)
    trees, prefixes = [random_tree(rng, 5), random_tree(rng, 4)], [21, 9]
    inputs = as_tensors(trees, 5, prefixes)
    want = tree_mask(to_verify_input(trees, 5, prefixes), TreeMaskMode.FULL_MASK)
    for total in (50, 7):
        size = full_mask_size(5, 2, total)
        room = torch.ones(size + 64, dtype=torch.bool, device=DEVICE)
        room.view(torch.uint8).fill_(0x5A)
        out = DeviceTrees(convert_tree(*inputs).batch, room[:size])
        convert_tree(*inputs, mode=TreeMaskMode.FULL_MASK, prefix_sum=total, out=out)
        held = min(size, want.numel())
        assert torch.equal(room[:held].cpu(), want[:held])
        assert (room.view(torch.uint8)[held:] == 0x5A).all()


def test_int32_inputs_and_defaults():
    tree = DraftTree((-1, 0, 0, 1), (9, 4, 5, 6))
    parents, tokens, *_ = as_tensors([tree], 4, [0], junk=False)
    got = convert_tree(parents.int(), tokens.int())
    assert_same(got, [tree], 4, [0], None)


def test_malformed_parents_neither_hang_nor_reach():
    """B38: a cycle, a missing parent and a parent out of range leave those nodes unreachable."""
    parents = torch.tensor([[-1, 2, 1, 0], [-1, 0, 5, -9]], device=DEVICE)
    tokens = torch.tensor([[9, 1, 2, 3], [9, 1, 2, 3]], device=DEVICE)
    batch = convert_tree(parents, tokens).batch.to("cpu")
    assert batch.retrieve_next_token.tolist() == [[3, 2, -1, -1], [1, -1, -1, -1]]
    assert batch.retrieve_next_sibling.tolist() == [[-1] * 4, [-1] * 4]
    trees_reach = [[0, 3], [0, 1]]
    for request, reach in enumerate(trees_reach):
        node, found = 0, [0]
        while batch.retrieve_next_token[request, node] != -1:
            node = int(batch.retrieve_next_token[request, node])
            found.append(node)
        assert found == reach


def test_refuses_what_it_cannot_take():
    parents = torch.tensor([[-1, 0]], device=DEVICE)
    with pytest.raises(InvalidArgument, match=r"token_ids.shape=\(1, 3\), but must be \(1, 2\)"):
        convert_tree(parents, torch.zeros((1, 3), dtype=torch.int64, device=DEVICE))
    with pytest.raises(InvalidArgument, match=r"parents.dtype=torch.float32, but must be"):
        convert_tree(parents.float(), parents)
    with pytest.raises(InvalidArgument, match=r"parents.shape=\(2,\)"):
        convert_tree(parents[0], parents)
    with pytest.raises(InvalidArgument, match=r"N=1025, but must be in \[1, 1024\]"):
        convert_tree(*[torch.zeros((1, 1025), dtype=torch.int64, device=DEVICE)] * 2)
    with pytest.raises(InvalidArgument, match=r"prefix_sum=None"):
        convert_tree(
            parents, parents, prefix_lens=torch.tensor([4], device=DEVICE), mode=TreeMaskMode.FULL_MASK
        )
    with pytest.raises(InvalidArgument, match=r"mode=7, but must be"):
        convert_tree(parents, parents, mode=7)
    small = convert_tree(parents, parents)
    with pytest.raises(InvalidArgument, match=r"out.candidates="):
        convert_tree(*[torch.zeros((2, 2), dtype=torch.int64, device=DEVICE)] * 2, out=small)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_in_a_cuda_graph_with_other_trees_each_replay():
    rng = np.random.default_rng(1)
    slots, prefixes = 33, [17, 0, 5]
    inputs = as_tensors([random_tree(rng, slots) for _ in range(3)], slots, prefixes)
    mode = TreeMaskMode.FULL_MASK
    out = convert_tree(*inputs, mode=mode, prefix_sum=64)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        convert_tree(*inputs, mode=mode, prefix_sum=64, out=out)
    for _ in range(50):
        trees = [random_tree(rng, int(rng.integers(1, slots + 1))) for _ in range(3)]
        prefixes = rng.integers(0, 22, 3).tolist()
        for static, fresh in zip(inputs, as_tensors(trees, slots, prefixes), strict=True):
            static.copy_(fresh)
        poisoned(out)
        graph.replay()
        cut = DeviceTrees(out.batch, out.mask[: full_mask_size(slots, 3, sum(prefixes))])
        assert_same(cut, trees, slots, prefixes, mode)
