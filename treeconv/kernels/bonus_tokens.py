"""Where a coin falls in a chunk of masses: the bonus token. Device functions only."""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.chunk_reductions import chunk_greatest, chunk_least

__all__ = ["token_at"]

_BIG = tl.constexpr(1 << 30)  # above every token


@triton.jit
def _rounded_down(x):
    """The largest float32 that is not above a float64 >= 0: a float32 is above both or above neither."""
    nearest = x.to(tl.float32)
    bits = nearest.to(tl.int32, bitcast=True)
    return (bits - tl.where(nearest.to(tl.float64) > x, 1, 0)).to(tl.float32, bitcast=True)


@triton.jit
def token_at(
    goal, mass, start, base, weight, CHUNK: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The first token of positive mass up to which there is more than ``goal``, else the last of positive mass.

    ``goal`` and ``base``, the mass before the chunk, are float64, and compared in it. The chunk's masses
    (float32, some positive) count ``weight`` > 0 times.
    """
    bound = _rounded_down(tl.maximum((goal - base) / weight, 0.0))
    index = start + tl.arange(0, CHUNK)
    found = tl.where((mass > 0.0) & (tl.cumsum(mass, 0) > bound), index, _BIG)
    token = chunk_least(found, THREADS, VEC, PTX)
    if token == _BIG:
        token = chunk_greatest(tl.where(mass > 0.0, index, 0), THREADS, VEC, PTX)
    return token
