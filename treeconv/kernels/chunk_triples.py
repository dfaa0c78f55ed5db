"""What one chunk of a row publishes: its maximum, its sum and its sum without the children of the row's node.

Device functions only; :mod:`.verify_tree` says what they are for, :mod:`.row_chunks` how masses are made.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.chunk_reductions import (
    chunk_greatest,
    chunk_least,
    chunk_total,
    thread_total,
    warp_greatest,
    warp_numbers,
)
from treeconv.kernels.row_chunks import (
    chunk_mass,
    exp2,
    maximum_key,
    opaque,
    thread_key,
    unordered,
    unusable,
)
from treeconv.kernels.row_values import fetch, whole
from treeconv.kernels.sibling_lists import siblings, without

__all__ = ["EMPTY_KEY", "INF_KEY", "NAN_KEY", "chunk_triple"]

NAN_KEY = tl.constexpr(0x7FFFFFFF)  # above every float in the order of ordered
INF_KEY = tl.constexpr(0x7F800000)
EMPTY_KEY = tl.constexpr(-0x7F800001)  # -inf

_NOWHERE = tl.constexpr(-1e30)  # a shift below all others, of a warp without mass
_LEAST = tl.constexpr(2.0**-100)  # what is left of a chunk is none below: its masses, made again, may be zero
_BIG = tl.constexpr(1 << 30)  # above every token


@triton.jit
def _at_once(
    x, start, V, N, filtered, rate, limit, tokens, rest, left, sibling_ptr, candidates_ptr,
    CHUNK: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """:func:`chunk_triple` of logits where T > 0, but for NaN and +inf; a sum of NaN where it cannot tell.

    Each warp's masses are relative to its own maximum, and added up relative to the chunk's: so the warps
    meet once. It cannot where a warp's shift ``k`` is not below ``limit`` (*Arithmetic* in
    :mod:`.verify_tree`).
    """
    own = warp_greatest(thread_key(x, THREADS, VEC), THREADS, PTX)
    shift = unordered(own) * rate
    shift = tl.where(tl.abs(shift) < limit, shift, tl.where(own == EMPTY_KEY, _NOWHERE, float("nan")))
    shifts = tl.broadcast_to(shift[None, :, None], [CHUNK // (THREADS * VEC), THREADS, VEC])
    mass = exp2(tl.fma(x, rate, -tl.reshape(shifts, [CHUNK])), PTX)
    sums = thread_total(mass, THREADS, VEC)
    rests = sums
    if not filtered:
        nearest = tl.min(tl.where((tokens >= start) & (tokens < start + CHUNK), tokens, _BIG), 0)
        if (nearest < _BIG) | (rest >= 0):
            mass, _ = without(mass, start, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK, PTX)
            rests = thread_total(mass, THREADS, VEC)
    if PTX:
        k0, k1, k2, k3, h0, h1, h2, h3, s0, s1, s2, s3, r0, r1, r2, r3 = warp_numbers(own, shift, sums, rests)
        key = tl.maximum(tl.maximum(k0, k1), tl.maximum(k2, k3))
        most = tl.maximum(tl.maximum(h0, h1), tl.maximum(h2, h3))
        w0 = exp2(h0 - most, PTX)
        w1 = exp2(h1 - most, PTX)
        w2 = exp2(h2 - most, PTX)
        w3 = exp2(h3 - most, PTX)
        chunk_sum = (s0 * w0 + s1 * w1) + (s2 * w2 + s3 * w3)
        rest_sum = (r0 * w0 + r1 * w1) + (r2 * w2 + r3 * w3)
    else:
        key = tl.max(own, 0)
        weight = exp2(shift - tl.max(shift, 0), PTX)
        chunk_sum = tl.sum(sums * weight, 0)
        rest_sum = tl.sum(rests * weight, 0)
    return key, chunk_sum, tl.where(rest_sum < _LEAST, 0.0, rest_sum)


@triton.jit(noinline=True)
def _carefully(
    row, start, V, N, filtered, key, before, after, rate, limit, child, sibling_ptr, candidates_ptr,
    CHUNK: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The sums of :func:`chunk_triple` where :func:`_at_once` has none, and 1 or 2 if of +inf or NaN.

    Rarely needed, so not inlined: such a function takes scalars alone. ``child`` is the node's first child.
    """
    bad = unusable(row, start, V, CHUNK, PTX)
    chunk_sum = 0.0
    rest_sum = 0.0
    if bad == 0:
        x = whole(row, start, V, float("-inf"), CHUNK, VEC)
        mass = chunk_mass(x, unordered(key), before, after, rate, limit, PTX)
        chunk_sum = chunk_total(mass, THREADS, VEC, PTX)
        rest_sum = chunk_sum
        if not filtered:
            _, tokens, rest, left = siblings(sibling_ptr, candidates_ptr, child, N, N, V)
            mass, _ = without(mass, start, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK, PTX)
            rest_sum = chunk_total(mass, THREADS, VEC, PTX)
    return chunk_sum, rest_sum, bad


@triton.jit
def chunk_triple(
    mass, row, start, V, N, greedy, filtered, before, after, rate, limit, child, tokens, rest, left,
    sibling_ptr, candidates_ptr, fetched, following, CHUNK: tl.constexpr, THREADS: tl.constexpr,
    VEC: tl.constexpr, PROBS: tl.constexpr, FILTERS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The maximum as an ordered key, the sum, and the sum without the children, of values in float32.

    A chunk with NaN (for probabilities, negative ones too) has the key ``NAN_KEY``, else one with +inf
    ``INF_KEY``, and one of no mass ``EMPTY_KEY``. Where ``greedy`` the sum's bits are the lowest index of the
    maximum. ``child`` is the first child; ``tokens``, ``rest`` and ``left`` are the children's first block.

    Returns these three and ``fetched``, what is in flight of the chunk that begins at ``following``.
    """
    bad = 0
    if PROBS:
        kinds = tl.where(mass >= 0.0, tl.where(mass == float("inf"), 1, 0), 2)
        bad = chunk_greatest(kinds, THREADS, VEC, PTX)
        chunk_sum = chunk_total(mass, THREADS, VEC, PTX)
        key = tl.where(chunk_sum > 0.0, 0, EMPTY_KEY)
        rest_sum = chunk_sum
        if not filtered:
            mass, found = without(
                mass, start, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK, PTX
            )
            if found == 1:
                rest_sum = chunk_total(mass, THREADS, VEC, PTX)
        if FILTERS:
            if filtered:
                key = tl.where(chunk_sum > 0.0, maximum_key(mass, THREADS, VEC, PTX), EMPTY_KEY)
    else:
        if greedy:  # the lowest index of the maximum; -1 where there is NaN
            key = maximum_key(mass, THREADS, VEC, PTX)
            top = unordered(key)
            index = opaque(start, PTX) + tl.arange(0, CHUNK)
            # Opaque, or NaN would be looked for in the row's dtype, and each chunk kept in both.
            mass = opaque(mass.to(tl.int32, bitcast=True), PTX).to(tl.float32, bitcast=True)
            found = tl.where(mass == top, index, tl.where(mass == mass, _BIG, -1))
            lowest = chunk_least(found, THREADS, VEC, PTX)
            bad = tl.where(lowest < 0, 2, tl.where(top == float("inf"), 1, 0))
            chunk_sum = lowest.to(tl.float32, bitcast=True)
            rest_sum = chunk_sum
        else:
            key, chunk_sum, rest_sum = _at_once(
                mass, start, V, N, filtered, rate, limit, tokens, rest, left, sibling_ptr, candidates_ptr,
                CHUNK, THREADS, VEC, PTX,
            )  # fmt: skip
            if chunk_sum != chunk_sum:
                chunk_sum, rest_sum, bad = _carefully(
                    row, start, V, N, filtered, key, before, after, rate, limit, child, sibling_ptr,
                    candidates_ptr, CHUNK, THREADS, VEC, PTX,
                )  # fmt: skip
                if (row[1] is not None) or (row[2] is not None):  # or it were spilled, call or no call
                    fetched = fetch(row, following, V, float("-inf"), CHUNK, VEC)
    key = tl.where(bad == 2, NAN_KEY, tl.where(bad == 1, INF_KEY, key))
    return key, chunk_sum, rest_sum, fetched
