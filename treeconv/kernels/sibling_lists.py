"""Children of a node in a first-child / next-sibling layout, as vectors of one warp's width.

Device functions only. Any pointer is survived: one outside ``[0, N)`` counts as -1, and a list longer than N
as a cycle, which ends it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.row_chunks import opaque

__all__ = ["first_child", "siblings", "tables", "without"]

_BIG = tl.constexpr(1 << 30)  # above every token


@triton.jit
def _follow(pointer, node, N):
    """``pointer[node]``, or -1 where that is no node."""
    target = tl.load(pointer + node)
    return tl.where((target >= 0) & (target < N), target, -1).to(tl.int32)


@triton.jit
def _jump(low, high, nodes):
    """A table of 64 entries, as two halves of a warp's 32 lanes, at ``nodes``; -1 stays -1."""
    near = tl.gather(low, nodes & 31, 0)
    far = tl.gather(high, nodes & 31, 0)
    return tl.where(nodes >= 0, tl.where(nodes >= 32, far, near), -1)


@triton.jit
def tables(child_ptr, sibling_ptr, candidates_ptr, N, V, JUMP: tl.constexpr):
    """A tree of up to 64 nodes in registers, in two halves of 32: see :func:`siblings`; made once a launch.

    Where 1, 2, 4 and 8 hops along the siblings lead, a byte each; where 16 do, and the first child, likewise;
    the token, or -1. Without ``JUMP``, which is for N up to 64, nothing is.
    """
    lane = tl.arange(0, 32)
    low_bytes = tl.full([32], -1, tl.int32)
    high_bytes = low_bytes
    low = low_bytes
    high = low_bytes
    low_token = low_bytes
    high_token = low_bytes
    if JUMP:
        low_child = tl.load(child_ptr + lane, mask=lane < N, other=-1)
        high_child = tl.load(child_ptr + 32 + lane, mask=lane + 32 < N, other=-1)
        low = tl.load(sibling_ptr + lane, mask=lane < N, other=-1)
        high = tl.load(sibling_ptr + 32 + lane, mask=lane + 32 < N, other=-1)
        low_token = tl.load(candidates_ptr + lane, mask=lane < N, other=-1)
        high_token = tl.load(candidates_ptr + 32 + lane, mask=lane + 32 < N, other=-1)
        low = tl.where((low >= 0) & (low < N), low, -1).to(tl.int32)
        high = tl.where((high >= 0) & (high < N), high, -1).to(tl.int32)
        low_bytes = low & 0xFF
        high_bytes = high & 0xFF
        for bit in tl.static_range(1, 5):
            low, high = _jump(low, high, low), _jump(low, high, high)
            if bit < 4:
                low_bytes = low_bytes | ((low & 0xFF) << (8 * bit))
                high_bytes = high_bytes | ((high & 0xFF) << (8 * bit))
        low_child = tl.where((low_child >= 0) & (low_child < N), low_child, -1).to(tl.int32)
        high_child = tl.where((high_child >= 0) & (high_child < N), high_child, -1).to(tl.int32)
        low = (low & 0xFF) | ((low_child & 0xFF) << 8)
        high = (high & 0xFF) | ((high_child & 0xFF) << 8)
        low_token = tl.where((low_token >= 0) & (low_token < V), low_token, -1).to(tl.int32)
        high_token = tl.where((high_token >= 0) & (high_token < V), high_token, -1).to(tl.int32)
    return low_bytes, high_bytes, low, high, low_token, high_token


@triton.jit
def _hop(low, high, nodes, BYTE: tl.constexpr):
    """One byte of a table of bytes at ``nodes``: 0xFF stands for -1."""
    target = (_jump(low, high, nodes) >> (8 * BYTE)) & 0xFF
    return tl.where(target == 0xFF, -1, target)


@triton.jit
def first_child(child_ptr, low, high, node, N, JUMP: tl.constexpr):
    """A node's first child, or -1."""
    if JUMP:
        child = tl.max(_hop(low, high, tl.zeros([32], tl.int32) + node, 1), 0)
    else:
        child = _follow(child_ptr, node, N)
    return child


@triton.jit
def siblings(
    sibling_ptr, candidates_ptr, low_bytes, high_bytes, low, high, low_token, high_token, child, left, N, V, JUMP: tl.constexpr
):
    """The next up to 32 nodes of a sibling list, ``child`` first; the tables are those of :func:`tables`.

    Returns nodes and tokens ([32] int32, -1 in unused lanes; a token outside [0, V) becomes -1), the node
    after them or -1, and how many more may be visited before the list is taken for a cycle.
    """
    lane = tl.arange(0, 32)
    if JUMP:  # lane k makes k hops by powers of two
        nodes = tl.where(lane < left, child, -1)
        for bit in tl.static_range(4):
            nodes = tl.where(((lane >> bit) & 1) == 1, _hop(low_bytes, high_bytes, nodes, bit), nodes)
        ahead = _hop(low, high, nodes, 0)
        beyond = tl.max(tl.where(lane == 16, _hop(low, high, ahead, 0), -1), 0)  # 32 hops from the first
        nodes = tl.where(lane >= 16, ahead, nodes)
        left -= 32
        child = tl.where(left > 0, beyond, -1)
        tokens = _jump(low_token, high_token, nodes)
    else:
        nodes = tl.full([32], -1, tl.int32)
        taken = 0
        while (child >= 0) & (taken < 32):
            nodes = tl.where(lane == taken, child, nodes)
            child = _follow(sibling_ptr, child, N)
            taken += 1
            left -= 1
            child = tl.where(left > 0, child, -1)
        tokens = tl.load(candidates_ptr + nodes, mask=nodes >= 0, other=-1)
        tokens = tl.where((tokens >= 0) & (tokens < V), tokens, -1).to(tl.int32)
    return nodes, tokens, child, left


@triton.jit
def without(
    mass, start, tokens, rest, left, sibling_ptr, candidates_ptr, low_bytes, high_bytes, low, high, low_token, high_token, N, V,
    CHUNK: tl.constexpr, JUMP: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """A chunk's masses with the children's zeroed, and whether the chunk holds any of them.

    ``tokens``, ``rest`` and ``left`` are the first block of the sibling list, as from :func:`siblings`.
    """
    found = 0
    more = 1
    while more == 1:
        token = tl.min(tl.where((tokens >= start) & (tokens < start + CHUNK), tokens, _BIG), 0)
        while token < _BIG:
            mass = tl.where(opaque(start, PTX) + tl.arange(0, CHUNK) == token, 0.0, mass)
            found = 1
            token = tl.min(tl.where((tokens > token) & (tokens < start + CHUNK), tokens, _BIG), 0)
        more = tl.where(rest >= 0, 1, 0)
        if more == 1:
            _, tokens, rest, left = siblings(
                sibling_ptr, candidates_ptr, low_bytes, high_bytes, low, high, low_token, high_token, rest, left, N, V, JUMP
            )
    return mass, found
