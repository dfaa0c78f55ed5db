"""What a filtered row's published words tell without another look at the row: see :mod:`.filter_cuts`.

Device functions only. The words give each chunk's maximum and mass, and so bounds on all its other tokens.
The largest tokens are *listed* as long as each is surely the largest but those before it. If the list holds
all kept tokens, the row is known exactly: its kept mass, and what the bonus is drawn from. If not, the kept
mass lies between the list's and the row's, and the tokens off the list may be kept or not: a decision that
comes out alike for all of that is the exact one. :mod:`.filtered_rows` has the others searched for.

Every bound has a slack above rounding, so a decision by bounds is never another than that by the cut.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.halves import greatest, least, summed
from treeconv.kernels.published_words import as_float
from treeconv.kernels.row_chunks import chunk_weight, ordered, slow_mass, unordered

__all__ = ["SUM_SLACK", "limits", "list_largest", "weighed"]

_BIG = tl.constexpr(1 << 30)  # above every token
_NONE = tl.constexpr(0x7FFFFFFF)  # above every unit
_LOW = tl.constexpr(-0x80000000)  # below every unit
_LOWEST = tl.constexpr(-0x7F800000)  # the key of the lowest finite float32
_SLACK = tl.constexpr(2.0**-14)  # relative: above the rounding of any mass, however small, at most 2^-15
SUM_SLACK = tl.constexpr(2.0**-16)  # the same of a row's sums, at most 2^-17
_LISTED = tl.constexpr(8)  # tokens that are looked at one by one


@triton.jit
def weighed(
    tops, sums, half, top, before, after, rate, limit, chunks: tl.constexpr, SHIFT: tl.constexpr,
    PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Per chunk the unit and the mass of its maximum, and the mass of all, of one half of a row's words."""
    inside = tl.arange(0, 32) + half * 32 < chunks
    keys = tl.where(inside, tops, _LOW)
    units = tl.where(inside, keys >> SHIFT, _LOW)
    sums = as_float(sums)
    if PROBS:
        peaks = tl.where(keys > 0, unordered(keys), 0.0)
        masses = sums
    else:
        # A weight makes up for how its chunk's exponents were rounded: it is not the maximum's own mass.
        maxima = unordered(keys)
        peaks = tl.where(inside, slow_mass(maxima, top, before, after, rate, PTX), 0.0)
        masses = sums * tl.where(inside, chunk_weight(maxima, top, before, after, rate, limit, PTX), 0.0)
    return units, peaks, masses


@triton.jit
def limits(row_sum, top, top_p, min_p, temperature, SHIFT: tl.constexpr, PROBS: tl.constexpr):
    """The mass that top-p wants, before top-k; min-p's lowest unit, and its least mass."""
    goal = tl.where(top_p < 1.0, top_p.to(tl.float64) * row_sum.to(tl.float64), float("inf"))
    least_mass = min_p.to(tl.float64)
    if PROBS:
        floor = tl.full([], 1, tl.int32)
        lowest = top.to(tl.float64) * least_mass
        least_mass = lowest
    else:
        floor = tl.full([], _LOWEST >> SHIFT, tl.int32)
        lowest = tl.full([], float("-inf"), tl.float64)
        if min_p > 0.0:
            lowest = top.to(tl.float64) + temperature.to(tl.float64) * tl.log(least_mass)
    single = lowest.to(tl.float32)
    key = ordered(single + 0.0) + tl.where(single.to(tl.float64) < lowest, 1, 0)
    floor = tl.maximum(floor, (key + tl.where(key < 0, 0, (1 << SHIFT) - 1)) >> SHIFT)
    return goal, floor, least_mass


@triton.jit
def list_largest(
    units, units2, peaks, peaks2, masses, masses2, V, top_key, top_k, top_p, min_p, temperature,
    chunks: tl.constexpr, CHUNK: tl.constexpr, SHIFT: tl.constexpr, JOINT: tl.constexpr, PROBS: tl.constexpr,
):  # fmt: skip
    """The largest tokens of a row, as far as they are surely those, from its words as :func:`weighed`.

    Returns whether they are all that the filters keep; the unit of the last that surely is kept, and the
    highest id there; and bounds of the kept mass, equal if it is known.
    """
    TWO: tl.constexpr = chunks > 32
    lane = tl.arange(0, 32)
    row_sum = summed(masses, masses2, TWO)
    goal, floor, least_mass = limits(row_sum, unordered(top_key), top_p, min_p, temperature, SHIFT, PROBS)
    # No token of a chunk but its maximum has more mass than this.
    others = tl.maximum(masses - peaks, 0.0) + masses * _SLACK
    others2 = tl.maximum(masses2 - peaks2, 0.0) + masses2 * _SLACK
    share = top_p.to(tl.float64)
    limited = top_k < V

    ahead = units
    ahead2 = units2
    taken = 0
    kept = tl.zeros([], tl.float64)
    kept_before = kept
    cut = top_key >> SHIFT
    chunk = 0
    mass = kept  # of the last
    hidden = tl.zeros([], tl.float32)  # no other token of those chunks has more mass
    sure_mass = kept
    sure_cut = tl.full([], _NONE, tl.int32)
    sure_chunk = 0
    found = 0
    looking = 1
    while looking == 1:
        following = greatest(ahead, ahead2, TWO)
        bound = hidden.to(tl.float64) * (1.0 + 2.0 * _SLACK)
        below = (following < floor) & (bound < least_mass)
        if (taken > 0) & ((taken >= top_k) | (kept >= goal) | below):
            looking = 0
            # In the sequential order top-p's share is of the first k: this much of it is known.
            known = True
            if not JOINT:
                known = (not limited) | (top_p >= 1.0) | (kept_before < share * kept)
            found = tl.where((bound < mass) & known, 1, 0)
        else:
            chunk = least(
                tl.where(ahead == following, lane, _BIG), tl.where(ahead2 == following, lane + 32, _BIG), TWO
            )
            here = lane == chunk
            here2 = lane + 32 == chunk
            mass = summed(tl.where(here, peaks, 0.0), tl.where(here2, peaks2, 0.0), TWO).to(tl.float64)
            if (bound >= mass) | (taken == _LISTED) | (following < floor):
                looking = 0
            else:
                kept_before = kept
                kept += mass
                cut = following
                taken += 1
                other = summed(tl.where(here, others, 0.0), tl.where(here2, others2, 0.0), TWO)
                hidden = tl.maximum(hidden, other)
                ahead = tl.where(here, _LOW, ahead)
                ahead2 = tl.where(here2, _LOW, ahead2)
                sure = hidden.to(tl.float64) * (1.0 + 2.0 * _SLACK) < mass
                if not JOINT:
                    enough = kept_before < share * kept * (1.0 - _SLACK)
                    sure = sure & ((not limited) | (top_p >= 1.0) | enough)
                sure_mass = tl.where(sure, kept, sure_mass)
                sure_cut = tl.where(sure, cut, sure_cut)
                sure_chunk = tl.where(sure, chunk, sure_chunk)
    low = kept.to(tl.float32)
    high = low
    if found == 0:
        cut = sure_cut
        chunk = sure_chunk
        low = sure_mass.to(tl.float32) * (1.0 - SUM_SLACK)
        high = row_sum * (1.0 + SUM_SLACK)
    cut_id = chunk * CHUNK + CHUNK - 1
    return found, cut, cut_id, low, high
