"""Children of a node in a first-child / next-sibling layout, as vectors of one warp's width.

Device functions only. Any pointer is survived: one outside ``[0, N)`` counts as -1, and a list longer than N
as a cycle, which ends it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.row_chunks import opaque

__all__ = ["follow", "siblings", "without"]

_BIG = tl.constexpr(1 << 30)  # above every token


@triton.jit
def follow(pointer, node, N):
    """``pointer[node]``, or -1 where that is no node."""
    target = tl.load(pointer + node)
    return tl.where((target >= 0) & (target < N), target, -1).to(tl.int32)


@triton.jit
def _tokens_of(nodes, candidates_ptr, V):
    """Tokens of nodes; -1 of no node, and one outside [0, V) becomes -1."""
    tokens = tl.load(candidates_ptr + nodes, mask=nodes >= 0, other=-1)
    return tl.where((tokens >= 0) & (tokens < V), tokens, -1).to(tl.int32)


@triton.jit
def siblings(sibling_ptr, candidates_ptr, child, left, N, V):
    """The next up to 32 nodes of a sibling list, ``child`` first, one by one.

    Returns nodes and tokens ([32] int32, -1 in unused lanes), the node after them or -1, and how many more
    may be visited before the list is taken for a cycle.
    """
    lane = tl.arange(0, 32)
    nodes = tl.full([32], -1, tl.int32)
    taken = 0
    while (child >= 0) & (taken < 32):
        nodes = tl.where(lane == taken, child, nodes)
        child = follow(sibling_ptr, child, N)
        taken += 1
        left -= 1
        child = tl.where(left > 0, child, -1)
    return nodes, _tokens_of(nodes, candidates_ptr, V), child, left


@triton.jit
def without(
    mass, start, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK: tl.constexpr,
    PTX: tl.constexpr,
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
            _, tokens, rest, left = siblings(sibling_ptr, candidates_ptr, rest, left, N, V)
    return mass, found
