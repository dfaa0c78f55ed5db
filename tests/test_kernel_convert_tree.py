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


@pytest.mark.parametrize("mode", [None, TreeMaskMode.FULL_MASK])
def test_buffers_of_an_earlier_call_take_this_calls_prefixes(mode):
    """Coins drawn by seeds and default depth caps read ``prefix_lens``: an old one repeats the coins."""
    rng = np.random.default_rng(6)
    trees = [random_tree(rng, 5), random_tree(rng, 3)]
    parents, tokens, sizes, first = as_tensors(trees, 5, [7, 2])
    second = torch.tensor([2, 7], device=DEVICE)
    out = convert_tree(parents, tokens, sizes, first, mode, 9)
    held = out.batch.prefix_lens
    got = convert_tree(parents, tokens, sizes, second, mode, 9, out)
    assert_same(got, trees, 5, [2, 7], mode)
    assert got.batch.prefix_lens.data_ptr() == held.data_ptr()  # where a captured graph writes, too
    assert (first.tolist(), second.tolist()) == ([7, 2], [2, 7])
    assert_same(convert_tree(parents, tokens, sizes, out=out), trees, 5, [0, 0], None)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_prefixes_are_copied_as_int64(dtype):
    """Written to later, the caller's tensor changes no batch; and ``verify`` takes int64 alone."""
    tree = DraftTree((-1, 0), (9, 4))
    parents, tokens, sizes, prefixes = as_tensors([tree], 2, [31])
    prefixes = prefixes.to(dtype)
    got = convert_tree(parents, tokens, sizes, prefixes)
    prefixes.fill_(5)
    assert_same(got, [tree], 2, [31], None)


def guarded_mask(trees, slots, prefixes, total):
    """A FULL_MASK buffer between two strips of rubbish, converted into from these prefixes."""
    parents, tokens, sizes, _ = as_tensors(trees, slots, [0] * len(trees))
    size = full_mask_size(slots, len(trees), total)
    room = torch.ones(size + 4096, dtype=torch.bool, device=DEVICE)
    room.view(torch.uint8).fill_(0x5A)
    out = DeviceTrees(convert_tree(parents, tokens, sizes).batch, room[2048 : 2048 + size])
    lens = torch.tensor(prefixes, device=DEVICE)
    convert_tree(parents, tokens, sizes, lens, TreeMaskMode.FULL_MASK, total, out)
    words = room.view(torch.uint8).cpu()
    return words[:2048], words[2048 : 2048 + size], words[2048 + size :]


@pytest.mark.parametrize(
    "prefixes",
    [[-1, 3], [3, -900], [-(2**40), 3], [-(2**63), -(2**63)], [2**40, 3], [2**62, 2**62], [2**63 - 1] * 2],
)
def test_prefixes_that_no_mask_has_room_for_stay_inside_it(prefixes):
    """Negative ones wrote before the mask, and huge ones took a loop over their length."""
    trees = [DraftTree.chain(range(5)), DraftTree((-1, 0, 0), (9, 1, 2))]
    before, _, after = guarded_mask(trees, 5, prefixes, 6)
    assert (before == 0x5A).all()
    assert (after == 0x5A).all()


def test_a_tree_before_a_negative_prefix_is_converted_as_ever():
    trees = [DraftTree.chain(range(5)), DraftTree((-1, 0, 0), (9, 1, 2))]
    _, mask, _ = guarded_mask(trees, 5, [4, -3], 4)
    want = tree_mask(to_verify_input(trees, 5, [4, 0]), TreeMaskMode.FULL_MASK)
    assert torch.equal(mask, want.view(torch.uint8))


def test_sizes_out_of_range_read_no_other_memory():
    """Counted as 0 or N, whatever 32 bits would make of them: nodes behind the slots are not read."""
    parents, tokens = (torch.tensor([[-1, 0, 1]], device=DEVICE) for _ in range(2))
    for size, nodes in ((-1, 0), (-(2**32) + 3, 0), (-(2**63) + 2**31 - 1, 0), (2**62, 3)):
        got = convert_tree(parents, tokens, torch.tensor([size], device=DEVICE), mode=TreeMaskMode.QLEN_ONLY)
        assert got.batch.retrieve_next_token.tolist() == [[1, 2, -1] if nodes else [-1] * 3], size
        assert got.mask.sum() == (6 if nodes else 3), size


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
    with pytest.raises(InvalidArgument, match="parents is a list, but must be a torch"):
        convert_tree([[-1, 0]], parents)
    with pytest.raises(InvalidArgument, match="token_ids is a list, but must be a torch"):
        convert_tree(parents, [[9, 1]])
    with pytest.raises(InvalidArgument, match="sizes is a list, but must be a torch"):
        convert_tree(parents, parents, sizes=[2])
    with pytest.raises(InvalidArgument, match="out is a VerifyInput, but must be DeviceTrees"):
        convert_tree(parents, parents, out=small.batch)
    for wrong in (3.5, -50, "4"):
        with pytest.raises(InvalidArgument, match=f"prefix_sum={wrong!r}, but must be an integer >= 0"):
            convert_tree(parents, parents, mode=TreeMaskMode.FULL_MASK, prefix_sum=wrong)


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
