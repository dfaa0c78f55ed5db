"""What one chunk of a row publishes: its maximum, its sum and its sum without the children of the row's node.

Device functions only; :mod:`.verify_tree` says what they are for, :mod:`.row_chunks` how masses are made.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.chunk_reductions import chunk_greatest, chunk_least, chunk_total
from treeconv.kernels.row_chunks import chunk_mass, maximum_key, opaque, unordered, unusable
from treeconv.kernels.sibling_lists import without

__all__ = ["EMPTY_KEY", "INF_KEY", "NAN_KEY", "chunk_triple"]

NAN_KEY = tl.constexpr(0x7FFFFFFF)  # above every float in the order of ordered
INF_KEY = tl.constexpr(0x7F800000)
EMPTY_KEY = tl.constexpr(-0x7F800001)  # -inf

_BIG = tl.constexpr(1 << 30)  # above every token


@triton.jit
def chunk_triple(
    mass, row, start, V, N, greedy, filtered, before, after, rate, limit, tokens, rest, left, sibling_ptr,
    candidates_ptr, CHUNK: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr,
    PROBS: tl.constexpr, FILTERS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The maximum as an ordered key, the sum, and the sum without the children, of values in float32.

    A chunk with NaN (for probabilities, negative ones too) has the key ``NAN_KEY``, else one with +inf
    ``INF_KEY``, and one of no mass ``EMPTY_KEY``. Where ``greedy`` the sum's bits are the lowest index of the
    maximum. ``tokens``, ``rest`` and ``left`` are the children's first block.
    """
    bad = 0
    if PROBS:
        kinds = tl.where(mass >= 0.0, tl.where(mass == float("inf"), 1, 0), 2)
        bad = chunk_greatest(kinds, THREADS, VEC, PTX)
        chunk_sum = chunk_total(mass, THREADS, VEC, PTX)
        key = tl.where(chunk_sum > 0.0, 0, EMPTY_KEY)
        if FILTERS:
            if filtered:
                key = tl.where(chunk_sum > 0.0, maximum_key(mass, THREADS, VEC, PTX), EMPTY_KEY)
    else:
        key = maximum_key(mass, THREADS, VEC, PTX)
        top = unordered(key)
        if greedy:  # the lowest index of the maximum; -1 where there is NaN
            index = opaque(start, PTX) + tl.arange(0, CHUNK)
            # Opaque, or NaN would be looked for in the row's dtype, and each chunk kept in both.
            mass = opaque(mass.to(tl.int32, bitcast=True), PTX).to(tl.float32, bitcast=True)
            found = tl.where(mass == top, index, tl.where(mass == mass, _BIG, -1))
            lowest = chunk_least(found, THREADS, VEC, PTX)
            bad = tl.where(lowest < 0, 2, tl.where(top == float("inf"), 1, 0))
            chunk_sum = lowest.to(tl.float32, bitcast=True)
        else:
            mass = chunk_mass(mass, top, before, after, rate, limit, PTX)
            chunk_sum = chunk_total(mass, THREADS, VEC, PTX)
            if (chunk_sum != chunk_sum) | (top == float("inf")):
                bad = unusable(row, start, V, CHUNK, PTX)
    key = tl.where(bad == 2, NAN_KEY, tl.where(bad == 1, INF_KEY, key))
    rest_sum = chunk_sum
    if (not greedy) & (not filtered):
        mass, found = without(mass, start, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK, PTX)
        if found == 1:
            rest_sum = chunk_total(mass, THREADS, VEC, PTX)
    return key, chunk_sum, rest_sum
