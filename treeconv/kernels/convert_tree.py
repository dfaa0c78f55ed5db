"""Parents on the device -> first-child / next-sibling layout, positions and tree mask, in one launch.

**Contract.** Bit for bit what :func:`treeconv.to_verify_input` and :func:`treeconv.tree_mask` give on the
CPU, padding included. Nothing is read back, so a drafter that leaves its tree on the device can go on to
the verifier without waiting, inside a CUDA graph too.

**How.** A program takes 16 rows (nodes) of one tree. First child and next sibling are minima over all
nodes that name the row, or its parent, as their parent: compared tile by tile, with no order to keep. The
ancestors of all 16 rows are walked up at once, one load a level, into one bit set a row, from which all
three masks are written. A parent that is not before its child (or is missing) ends the walk there; such a
node is unreachable from the root. Prefixes are cut to what the mask's buffer can hold, and sizes to N: no
input makes the kernel hang or leave its buffers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from treeconv._validate import check_int
from treeconv.errors import BackendUnavailable, InvalidArgument
from treeconv.tree import TreeMaskMode, VerifyInput

__all__ = ["INTERPRETED", "MAX_NODES", "DeviceTrees", "convert_tree", "full_mask_size", "mask_shape"]

MAX_NODES = 1024

_ROWS = tl.constexpr(16)
_TILE = tl.constexpr(64)  # nodes compared with the rows at once
_NO_MASK = tl.constexpr(3)  # behind TreeMaskMode's values
_ONES = tl.constexpr(0x0101010101010101)  # eight times True


@triton.jit
def _fill_prefix(mask_ptr, start, prefix, mask_size, is_node, WIDE: tl.constexpr):
    """Write ``prefix`` bytes of ``is_node`` from byte ``start`` of each row: whole words, then the ends."""
    end = start + prefix
    few = tl.arange(0, 8)[None, :]
    if WIDE:
        first = tl.minimum((start + 7) // 8 * 8, end)  # where the first whole word begins
        last = tl.maximum(end // 8 * 8, first)
        words = mask_ptr.to(tl.pointer_type(tl.int64))
        value = tl.where(is_node, _ONES, 0).to(tl.int64)
        lane = tl.arange(0, 32)[None, :]
        for done in range(0, (prefix + 7) // 8, 32):
            word = (first // 8 + done)[:, None] + lane
            inside = (word * 8 + 8 <= last[:, None]) & (word * 8 + 8 <= mask_size)
            tl.store(words + word, tl.broadcast_to(value[:, None], word.shape), mask=inside)
        head = start[:, None] + few
        bit = tl.broadcast_to(is_node[:, None].to(tl.int8), head.shape)
        tl.store(mask_ptr + head, bit, mask=(head < first[:, None]) & (head < mask_size))
        tail = last[:, None] + few
        tl.store(mask_ptr + tail, bit, mask=(tail < end[:, None]) & (tail < mask_size))
    else:
        for done in range(0, prefix, 8):
            byte = start[:, None] + done + few
            bit = tl.broadcast_to(is_node[:, None].to(tl.int8), byte.shape)
            tl.store(mask_ptr + byte, bit, mask=(byte < end[:, None]) & (byte < mask_size))


@triton.jit
def _convert_tree_kernel(
    parents_ptr,
    tokens_ptr,
    sizes_ptr,
    prefix_ptr,
    candidates_ptr,
    index_ptr,
    child_ptr,
    sibling_ptr,
    positions_ptr,
    lens_ptr,
    mask_ptr,
    mask_size,
    N,
    WORDS: tl.constexpr,
    MODE: tl.constexpr,
    WIDE: tl.constexpr,
):
    tree = tl.program_id(0)
    row = tl.program_id(1) * _ROWS + tl.arange(0, _ROWS)
    base = tree.to(tl.int64) * N
    size = tl.maximum(tl.minimum(tl.load(sizes_ptr + tree), N), 0).to(tl.int32)
    is_node = row < size
    # A node's parent comes before it; the root's, and any other number, counts as none.
    parent = tl.load(parents_ptr + base + row, mask=is_node, other=-1)
    parent = tl.where((parent >= 0) & (parent < row), parent, -1).to(tl.int32)

    child = tl.full((_ROWS,), 0, tl.int32) + N
    sibling = tl.full((_ROWS,), 0, tl.int32) + N
    for start in range(0, N, _TILE):
        node = start + tl.arange(0, _TILE)
        theirs = tl.load(parents_ptr + base + node, mask=node < size, other=-1)
        theirs = tl.where((theirs >= 0) & (theirs < node), theirs, -1).to(tl.int32)
        named = theirs[None, :] == row[:, None]
        child = tl.minimum(child, tl.min(tl.where(named, node[None, :], N), 1))
        beside = (theirs[None, :] == parent[:, None]) & (theirs[None, :] >= 0)
        beside &= node[None, :] > row[:, None]
        sibling = tl.minimum(sibling, tl.min(tl.where(beside, node[None, :], N), 1))

    word = tl.arange(0, WORDS)[None, :]
    seen = tl.where(word == (row // 32)[:, None], 1 << (row % 32)[:, None], 0)
    depth = tl.zeros((_ROWS,), tl.int32)
    above = parent
    while tl.max(above, 0) >= 0:
        found = above >= 0
        depth += found.to(tl.int32)
        at = tl.where(found, above, 0)
        hit = (word == (at // 32)[:, None]) & found[:, None]
        seen |= tl.where(hit, 1 << (at % 32)[:, None], 0)
        above = tl.load(parents_ptr + base + at, mask=found, other=-1)
        above = tl.where((above >= 0) & (above < at), above, -1).to(tl.int32)

    prefix = tl.load(prefix_ptr + tree).to(tl.int64)
    inside = row < N
    token = tl.load(tokens_ptr + base + row, mask=is_node, other=0)
    tl.store(candidates_ptr + base + row, token.to(tl.int64), mask=inside)
    tl.store(index_ptr + base + row, base + row, mask=inside)
    tl.store(child_ptr + base + row, tl.where(child < N, child, -1).to(tl.int64), mask=inside)
    tl.store(sibling_ptr + base + row, tl.where(sibling < N, sibling, -1).to(tl.int64), mask=inside)
    tl.store(positions_ptr + base + row, prefix + depth, mask=inside)
    tl.store(lens_ptr + tree, prefix, mask=tl.program_id(1) == 0)

    if MODE == 2:  # QLEN_ONLY_BITPACKING
        at = (base + row)[:, None] * ((N + 31) // 32) + word
        bits = seen.to(tl.uint32, bitcast=True).to(mask_ptr.dtype.element_ty)
        tl.store(mask_ptr + at, bits, mask=inside[:, None] & (word * 32 < N))
    elif MODE != _NO_MASK:
        if MODE == 0:  # FULL_MASK: the trees before this one end where it begins
            before = tl.zeros((128,), tl.int64)
            for start in range(0, tree, 128):
                other = start + tl.arange(0, 128)
                length = tl.load(prefix_ptr + other, mask=other < tree, other=0).to(tl.int64)
                before += tl.maximum(length, 0)
            # None longer than the mask: all behind the first row of a longer one lies outside anyway.
            prefix = tl.minimum(tl.maximum(prefix, 0), mask_size)
            at = N * (tl.sum(before, 0) + base) + row * (prefix + N)
            # A row past the tree's slots writes nothing, nor one so far out that its offset wrapped.
            at = tl.where(inside & (at >= 0) & (at < mask_size), at, mask_size)
            _fill_prefix(mask_ptr, at, prefix, mask_size, is_node, WIDE)
            at += prefix
        else:
            at = (base + row) * N
        for part in tl.static_range(0, WORDS):
            bits = tl.sum(tl.where(word == part, seen, 0), 1)
            node = part * 32 + tl.arange(0, 32)
            sees = (bits[:, None] >> tl.arange(0, 32)[None, :]) & 1
            target = at[:, None] + node[None, :]
            keep = inside[:, None] & (node < N)[None, :] & (target < mask_size)
            tl.store(mask_ptr + target, sees.to(tl.int8), mask=keep)


INTERPRETED = not isinstance(_convert_tree_kernel, triton.JITFunction)  # TRITON_INTERPRET=1 at import time


@dataclass(frozen=True)
class DeviceTrees:
    """What :func:`convert_tree` wrote.

    Args:
        batch: the layout that verifiers take.

        mask: the tree mask in the mode asked for, or None.
    """

    batch: VerifyInput
    mask: torch.Tensor | None


def full_mask_size(num_draft_tokens: int, batch_size: int, prefix_sum: int) -> int:
    """Elements of a FULL_MASK: ``sum_b N * (prefix_b + N)``, given the sum of the prefix lengths."""
    return num_draft_tokens * (prefix_sum + batch_size * num_draft_tokens)


def mask_shape(
    mode: TreeMaskMode, batch_size: int, num_draft_tokens: int, prefix_sum: int | None
) -> tuple[tuple[int, ...], torch.dtype]:
    """Shape and dtype of a mask; see :class:`TreeMaskMode`.

    Raises:
        InvalidArgument: FULL_MASK without the sum of the prefix lengths.
    """
    B, N = batch_size, num_draft_tokens
    if mode == TreeMaskMode.FULL_MASK:
        if prefix_sum is None:
            raise InvalidArgument(
                "prefix_sum=None, but must be the sum of prefix_lens for FULL_MASK: its size depends on it,"
                " and reading it back would wait for the device"
            )
        return (full_mask_size(N, B, prefix_sum),), torch.bool
    if mode == TreeMaskMode.QLEN_ONLY:
        return (B, N, N), torch.bool
    if N > 32:
        return (B, N, math.ceil(N / 32)), torch.uint32
    return (B, N), torch.uint8 if N <= 8 else torch.uint16 if N <= 16 else torch.uint32


def _check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise InvalidArgument(f"{name} is a {type(tensor).__name__}, but must be a torch.Tensor")


def _checked(name: str, tensor: torch.Tensor, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    _check_tensor(name, tensor)
    if tuple(tensor.shape) != shape:
        raise InvalidArgument(f"{name}.shape={tuple(tensor.shape)}, but must be {shape}")
    if tensor.dtype not in (torch.int64, torch.int32):
        raise InvalidArgument(f"{name}.dtype={tensor.dtype}, but must be torch.int64 or torch.int32")
    if tensor.device != device:
        raise InvalidArgument(f"{name}.device={tensor.device}, but must be {device}, the device of parents")
    return tensor.contiguous()


def convert_tree(
    parents: torch.Tensor,
    token_ids: torch.Tensor,
    sizes: torch.Tensor | None = None,
    prefix_lens: torch.Tensor | None = None,
    mode: TreeMaskMode | None = None,
    prefix_sum: int | None = None,
    out: DeviceTrees | None = None,
) -> DeviceTrees:
    """Convert a batch of trees that is on the device already. Never waits for it.

    Args:
        parents: ``[B, N]`` int64 or int32, N <= 1024; ``parents[b, 0] == -1`` and
            ``0 <= parents[b, i] < i`` for the tree's other nodes. The contents are not checked: a node
            without such a parent is unreachable, as padding is.

        token_ids: ``[B, N]`` int64 or int32; distinct among siblings.

        sizes: ``[B]`` nodes of each tree; slots behind them are padding, whatever they hold. Default: N.

        prefix_lens: ``[B]`` int64 or int32 committed tokens before each root, >= 0. Default: 0.

        mode: which mask to write; None for none.

        prefix_sum: FULL_MASK only: the sum of ``prefix_lens``, or more: the mask holds
            ``N * (prefix_sum + B * N)`` elements, and those behind the last tree's are not written.

        out: tensors to write into, as an earlier call returned them, ``prefix_lens`` too; nothing is
            allocated then.

    Returns:
        The converted batch and its mask: equal to :func:`treeconv.to_verify_input` and
        :func:`treeconv.tree_mask` on the same trees, bit for bit.

    Raises:
        InvalidArgument: no tensor, a shape, dtype or device that breaks the rules above, N above 1024, an
            unknown mode, or a ``prefix_sum`` that is no integer >= 0.
        BackendUnavailable: a CPU tensor without Triton's interpreter.
    """
    _check_tensor("parents", parents)
    if parents.ndim != 2 or 0 in parents.shape:
        raise InvalidArgument(f"parents.shape={tuple(parents.shape)}, but must be [B, N] with B, N >= 1")
    if prefix_sum is not None:
        prefix_sum = check_int(prefix_sum, "prefix_sum", 0)
    if mode is not None and mode not in set(TreeMaskMode):
        raise InvalidArgument(f"mode={mode!r}, but must be None or one of {[m.name for m in TreeMaskMode]}")
    device = parents.device
    if device.type != "cuda" and not (device.type == "cpu" and INTERPRETED):
        raise BackendUnavailable(
            f"parents.device={device}, but must be a CUDA device (or the CPU with TRITON_INTERPRET=1 set"
            " before treeconv is imported)"
        )
    B, N = parents.shape
    if N > MAX_NODES:
        raise InvalidArgument(f"N={N}, but must be in [1, {MAX_NODES}]")
    parents = _checked("parents", parents, (B, N), device)
    token_ids = _checked("token_ids", token_ids, (B, N), device)
    if sizes is None:
        sizes = torch.full((B,), N, dtype=torch.int64, device=device)
    if prefix_lens is None:
        prefix_lens = torch.zeros(B, dtype=torch.int64, device=device)
        prefix_sum = 0 if prefix_sum is None else prefix_sum
    sizes = _checked("sizes", sizes, (B,), device)
    prefix_lens = _checked("prefix_lens", prefix_lens, (B,), device)
    out = _outputs(out, mode, B, N, device, prefix_sum)
    batch, mask = out.batch, out.mask
    # Without a mask the kernel never touches this pointer.
    target = batch.positions if mask is None else mask
    if target.dtype == torch.bool:
        target = target.view(torch.int8)
    # Words that the mask really has, so that the kernel's bit sets fit: a power of two, as Triton asks.
    _convert_tree_kernel[(B, triton.cdiv(N, _ROWS.value))](
        parents,
        token_ids,
        sizes,
        prefix_lens,
        batch.candidates,
        batch.retrieve_index,
        batch.retrieve_next_token,
        batch.retrieve_next_sibling,
        batch.positions,
        batch.prefix_lens,
        target,
        0 if mask is None else mask.numel(),
        N,
        WORDS=triton.next_power_of_2(triton.cdiv(N, 32)),
        MODE=_NO_MASK.value if mode is None else int(mode),
        WIDE=target.data_ptr() % 8 == 0,
        num_warps=1,
    )
    return out


def _outputs(
    out: DeviceTrees | None,
    mode: TreeMaskMode | None,
    B: int,
    N: int,
    device: torch.device,
    prefix_sum: int | None,
) -> DeviceTrees:
    """The tensors to write into: new ones, or the given ones once they fit."""
    names = ("candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "positions")
    shape, dtype = (None, None) if mode is None else mask_shape(mode, B, N, prefix_sum)
    if out is None:
        fields = torch.empty((len(names), B, N), dtype=torch.int64, device=device)
        lens = torch.empty(B, dtype=torch.int64, device=device)
        batch = VerifyInput(**dict(zip(names, fields, strict=True)), prefix_lens=lens)
        return DeviceTrees(batch, None if mode is None else torch.empty(shape, dtype=dtype, device=device))
    if not isinstance(out, DeviceTrees):
        raise InvalidArgument(f"out is a {type(out).__name__}, but must be DeviceTrees, as a call returned")
    wanted = {name: (getattr(out.batch, name), (B, N), torch.int64) for name in names}
    wanted["prefix_lens"] = (out.batch.prefix_lens, (B,), torch.int64)
    if mode is not None:
        wanted["mask"] = (out.mask, shape, dtype)
    for name, (tensor, want, want_dtype) in wanted.items():
        fits = tensor is not None and tuple(tensor.shape) == want and tensor.dtype == want_dtype
        if not fits or tensor.device != device or not tensor.is_contiguous():
            got = None if tensor is None else f"{tuple(tensor.shape)} {tensor.dtype} on {tensor.device}"
            raise InvalidArgument(f"out.{name}={got}, but must be contiguous {want} {want_dtype} on {device}")
    if mode is None:
        return DeviceTrees(out.batch, None)
    return out
