"""The bonus token: where a coin falls in the chunk that is known to hold it. Device functions only.

The chunk is gone through in blocks of a vector a thread, until one ends beyond the coin; only in that one is
the token looked for. All of the chunk at once is a longer chain of instructions, and no faster on average.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.chunk_reductions import chunk_greatest, chunk_least, chunk_total
from treeconv.kernels.filter_units import is_kept
from treeconv.kernels.row_chunks import chunk_mass, chunk_weight
from treeconv.kernels.row_values import whole
from treeconv.kernels.sibling_lists import without

__all__ = ["bonus_token"]

_BIG = tl.constexpr(1 << 30)  # above every token


@triton.jit
def bonus_token(
    row, start, chunk_top, top, base, goal, tested, filtered, cut, cut_id, before, after, rate, limit, tokens,
    rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK: tl.constexpr, THREADS: tl.constexpr,
    VEC: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr, FILTERS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The first token of positive mass up to which there is more than ``goal``, or as good as that the last.

    The chunk begins at ``start``, its maximum is ``chunk_top``, the row's ``top``; before it there is the
    mass ``base``. Children, the first block of them ``tokens`` to ``left``, have no mass if ``tested``. Some
    token of the chunk has. Masses are float32, compared with ``goal`` in float64.
    """
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")
    BLOCK: tl.constexpr = THREADS * VEC
    weight = tl.full([], 1.0, tl.float32)
    if not PROBS:
        weight = chunk_weight(chunk_top, top, before, after, rate, limit, PTX)
    end = start + CHUNK
    ahead = tl.zeros([], tl.float32)  # of the chunk
    last = start  # the last block that has mass, and what is ahead of it
    last_ahead = ahead
    mass = tl.zeros([BLOCK], tl.float32)
    looking = 1
    while looking > 0:
        mass = whole(row, start, V, NO_MASS, BLOCK, VEC)
        if FILTERS:
            kept = is_kept(mass, start + tl.arange(0, BLOCK), cut, cut_id, SHIFT) | (not filtered)
        if not PROBS:
            mass = chunk_mass(mass, chunk_top, before, after, rate, limit, PTX)
        if FILTERS:
            mass = tl.where(kept, mass, 0.0)
        if tested:
            mass, _ = without(mass, start, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, BLOCK, PTX)
        total = chunk_total(mass, THREADS, VEC, PTX)
        beyond = base.to(tl.float64) + (ahead + total).to(tl.float64) * weight > goal
        if (looking == 2) | ((total > 0.0) & beyond):
            looking = 0
        else:
            last = tl.where(total > 0.0, start, last)
            last_ahead = tl.where(total > 0.0, ahead, last_ahead)
            ahead += total
            start += BLOCK
            if start == end:  # rounding had more in the chunk than its blocks have
                looking = 2
                start = last
                ahead = last_ahead
    index = start + tl.arange(0, BLOCK)
    prefix = base.to(tl.float64) + (ahead + tl.cumsum(mass, 0)).to(tl.float64) * weight
    token = chunk_least(tl.where((mass > 0.0) & (prefix > goal), index, _BIG), THREADS, VEC, PTX)
    if token == _BIG:
        token = chunk_greatest(tl.where(mass > 0.0, index, 0), THREADS, VEC, PTX)
    return token
