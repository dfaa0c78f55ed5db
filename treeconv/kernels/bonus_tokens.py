"""The bonus token: where a coin falls in the chunk that is known to hold it. Device functions only.

First the quarter of the chunk is found, from the quarters' sums, then the token in it: code that runs once is
slow by its length, and most of what finds a token is then needed for a quarter of them alone.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.chunk_reductions import (
    block_greatest,
    block_least,
    block_total,
    by_vector,
    piece_totals,
    running_total,
)
from treeconv.kernels.filter_units import is_kept
from treeconv.kernels.row_chunks import chunk_mass, chunk_weight
from treeconv.kernels.row_values import read, whole
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
    VECTORS: tl.constexpr = CHUNK // (THREADS * VEC)
    mass = whole(row, start, V, NO_MASS, CHUNK, VEC)
    if FILTERS:
        kept = is_kept(mass, start + tl.arange(0, CHUNK), cut, cut_id, SHIFT) | (not filtered)
    weight = tl.full([], 1.0, tl.float32)
    if not PROBS:
        mass = chunk_mass(mass, chunk_top, before, after, rate, limit, PTX)
        weight = chunk_weight(chunk_top, top, before, after, rate, limit, PTX)
    if FILTERS:
        mass = tl.where(kept, mass, 0.0)
    if tested:
        mass, _ = without(mass, start, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK, PTX)
    base = base.to(tl.float64)
    weight = weight.to(tl.float64)

    # Which of the threads' first vectors, second ones, and so on: side by side they are a piece of the chunk.
    sums = tl.sum(by_vector(mass, THREADS, VEC), 2)
    totals = piece_totals(sums, VECTORS, THREADS, PTX)
    piece = 0
    ahead = tl.zeros([], tl.float32)
    end = ahead
    found = 0
    for which in tl.static_range(VECTORS):
        seen = (found == 0) & (totals[which] > 0.0)
        piece = tl.where(seen, which, piece)
        ahead = tl.where(seen, end, ahead)
        end += totals[which]
        found = tl.where(seen & (base + end.to(tl.float64) * weight > goal), 1, found)

    # Which thread's vector.
    sums = tl.sum(tl.where((tl.arange(0, VECTORS) == piece)[:, None], sums, -0.0), 0)
    ends = running_total(sums, THREADS, PTX)
    threads = tl.arange(0, THREADS)
    beyond = (sums > 0.0) & (base + (ahead + ends).to(tl.float64) * weight > goal)
    thread = block_least(tl.where(beyond, threads, _BIG), THREADS, PTX)
    if thread == _BIG:
        thread = block_greatest(tl.where(sums > 0.0, threads, 0), THREADS, PTX)
    ahead += block_total(tl.where(threads == thread, ends - sums, 0.0), THREADS, PTX)

    # Which token of it.
    lane = tl.arange(0, 32)
    start += (piece * THREADS + thread) * VEC
    index = start + lane
    x = read(row, index, (lane < VEC) & (index < V), NO_MASS).to(tl.float32)
    mass = x
    if not PROBS:
        mass = chunk_mass(mass, chunk_top, before, after, rate, limit, PTX)
    if FILTERS:
        mass = tl.where(is_kept(x, index, cut, cut_id, SHIFT) | (not filtered), mass, 0.0)
    if tested:
        mass, _ = without(mass, start, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, 32, PTX)
    beyond = (mass > 0.0) & (base + (ahead + tl.cumsum(mass, 0)).to(tl.float64) * weight > goal)
    token = tl.min(tl.where(beyond, index, _BIG), 0)
    return tl.where(token < _BIG, token, tl.max(tl.where(mass > 0.0, index, 0), 0))
