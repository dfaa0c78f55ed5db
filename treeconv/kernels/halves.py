"""What a row's chunks add up to, each a lane of two vectors of a warp's width: see :mod:`.verify_tree`.

Device functions only. All warps hold both halves, of at most 64 chunks, so no reduction over them leaves a
warp. One over a vector of 64 would: slower by a barrier or two, and on NVIDIA each such reduction in a loop
keeps a register alive around the loop (only some threads load a partial result: to ptxas the others may
still need what was there before), which is then spilled. Where a row has at most 32 chunks, not ``TWO``, the
second half is not looked at.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["before_each", "drawn", "greatest", "least", "summed"]

_BIG = tl.constexpr(1 << 30)  # above every chunk


@triton.jit
def greatest(first, second, TWO: tl.constexpr):
    """The maximum of two halves, [32] each."""
    if TWO:
        first = tl.maximum(first, second)
    return tl.max(first, 0)


@triton.jit
def least(first, second, TWO: tl.constexpr):
    """The minimum of two halves."""
    if TWO:
        first = tl.minimum(first, second)
    return tl.min(first, 0)


@triton.jit
def summed(first, second, TWO: tl.constexpr):
    """The sum of two halves."""
    if TWO:
        first += second
    return tl.sum(first, 0)


@triton.jit
def before_each(first, second):
    """What comes before each, of two halves: their sums up to there, itself not included."""
    return tl.cumsum(first, 0) - first, tl.sum(first, 0) + tl.cumsum(second, 0) - second


@triton.jit
def drawn(residual, residual2, coin, TWO: tl.constexpr):
    """A residual's sum, the chunk on which a coin falls, and the mass before it; in halves, per chunk."""
    lane = tl.arange(0, 32)
    residual_sum = summed(residual, residual2, TWO)
    goal = coin.to(tl.float64) * residual_sum.to(tl.float64)
    prefix = tl.cumsum(residual, 0)
    chunk = tl.where((prefix.to(tl.float64) > goal) & (residual > 0.0), lane, _BIG)
    final = tl.where(residual > 0.0, lane, 0)
    if TWO:
        prefix2 = tl.gather(prefix, tl.full([32], 31, tl.int32), 0) + tl.cumsum(residual2, 0)
        chunk2 = tl.where((prefix2.to(tl.float64) > goal) & (residual2 > 0.0), lane + 32, _BIG)
        chunk = tl.minimum(chunk, chunk2)
        final = tl.maximum(final, tl.where(residual2 > 0.0, lane + 32, 0))
    chunk = tl.min(chunk, 0)
    chunk = tl.where(chunk == _BIG, tl.max(final, 0), chunk)
    ahead = tl.full([1], 0, tl.int32) + chunk - 1
    before = tl.gather(prefix, ahead & 31, 0)
    if TWO:
        before = tl.where(ahead >= 32, tl.gather(prefix2, ahead & 31, 0), before)
    return residual_sum, chunk, tl.sum(tl.where(ahead >= 0, before, 0.0), 0)
