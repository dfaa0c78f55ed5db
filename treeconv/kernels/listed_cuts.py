"""What a filtered row's published words tell without another look at the row: see :mod:`.filter_cuts`.

Device functions only. The words give each chunk's maximum and mass, and so bounds on all its other tokens.
The largest tokens are *listed* as long as each is surely the largest but those before it. If the list holds
all kept tokens, the row is known exactly: its kept mass, and what the bonus is drawn from. If not, the kept
mass lies between the list's and the row's, and the tokens off the list may be kept or not: a decision that
comes out alike for all of that is the exact one. :mod:`.verify_tree` has the others searched for.

Every bound has a slack far above rounding, so a decision by bounds is never another than that by the cut.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.filter_units import unit_of
from treeconv.kernels.published_words import as_float, row_words, settled
from treeconv.kernels.row_chunks import chunk_weight, ordered, unordered

__all__ = ["list_largest"]

_BIG = tl.constexpr(1 << 30)  # above every token
_NONE = tl.constexpr(0x7FFFFFFF)  # above every unit
_LOW = tl.constexpr(-0x80000000)  # below every unit
_LOWEST = tl.constexpr(-0x7F800000)  # the key of the lowest finite float32
_SLACK = tl.constexpr(2.0**-14)  # relative: far above the rounding of masses and of their sums
_LISTED = tl.constexpr(8)  # tokens that are looked at one by one


@triton.jit
def list_largest(
    words_ptr, epoch, step, V, top_key, top_k, top_p, min_p, temperature, before, after, rate, limit,
    chunks: tl.constexpr, CHUNK: tl.constexpr, SHIFT: tl.constexpr, JOINT: tl.constexpr, PROBS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The largest tokens of a row whose words are published, as far as they are surely those.

    Returns whether they are all that the filters keep; the unit of the last that surely is kept, how many
    are at it, and the highest id there; bounds of the kept mass, equal if it is known; per chunk the unit
    and the mass of its maximum, and the mass of all; and for the search, the units of the other half chunks'
    maxima, top-p's goal, min-p's lowest unit, the lowest unit of any mass, and a unit that top-p's cut is not
    below if its share is of the whole row.
    """
    place = tl.arange(0, 64)
    keys, sums, half_keys = settled(row_words(words_ptr, step), epoch + step, chunks)
    keys = tl.where(place < chunks, keys, _LOW)
    units = tl.where(place < chunks, keys >> SHIFT, _LOW)
    half_units = tl.where(place < chunks, half_keys >> SHIFT, _LOW)
    top = unordered(top_key)
    if PROBS:
        peaks = tl.where(keys > 0, unordered(keys), 0.0)
        masses = as_float(sums)
    else:
        peaks = chunk_weight(unordered(keys), top, before, after, rate, limit, PTX)
        peaks = tl.where(place < chunks, peaks, 0.0)
        masses = as_float(sums) * peaks
    row_sum = tl.sum(masses, 0)
    # No token of a chunk but its maximum has more mass than this.
    others = tl.maximum(masses - peaks, 0.0) + masses * _SLACK
    share = top_p.to(tl.float64)
    goal = tl.where(top_p < 1.0, share * row_sum.to(tl.float64), float("inf"))
    limited = top_k < V
    if PROBS:
        least = top.to(tl.float64) * min_p.to(tl.float64)
        least_mass = least
        floor = tl.full([], 1, tl.int32)
        depth = floor
    else:
        least_mass = min_p.to(tl.float64)
        least = top.to(tl.float64) + temperature.to(tl.float64) * tl.log(min_p.to(tl.float64))
        floor = tl.full([], _LOWEST >> SHIFT, tl.int32)
        # Beyond 88 temperatures below the maximum a mass is zero.
        depth = unit_of(tl.maximum(top - 88.0 * temperature, -3.4028234663852886e38), SHIFT)
    tail = depth
    if not PROBS:
        if top_p < 1.0:  # all V tokens at this mass would not be what top-p leaves out
            mass = (1.0 - share) * row_sum.to(tl.float64) * (1.0 - 4.0 * _SLACK) / V
            height = top.to(tl.float64) + temperature.to(tl.float64) * tl.log(mass)
            lowest = tl.maximum(height, -3.4028234663852886e38).to(tl.float32)
            tail = tl.maximum(depth, unit_of(lowest, SHIFT) - 1)
    single = least.to(tl.float32)
    key = ordered(single + 0.0) + tl.where(single.to(tl.float64) < least, 1, 0)
    floor = tl.maximum(floor, (key + tl.where(key < 0, 0, (1 << SHIFT) - 1)) >> SHIFT)

    ahead = units
    taken = 0
    kept = tl.zeros([], tl.float64)
    kept_before = kept
    cut = top_key >> SHIFT
    cut_ties = 0
    chunk = 0
    mass = kept  # of the last
    hidden = tl.zeros([], tl.float32)  # no other token of those chunks has more mass
    sure_mass = kept
    sure_cut = tl.full([], _NONE, tl.int32)
    sure_chunk = 0
    found = 0
    looking = 1
    while looking == 1:
        following = tl.max(ahead, 0)
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
            chunk = tl.min(tl.where(ahead == following, place, _BIG), 0)
            here = place == chunk
            mass = tl.sum(tl.where(here, peaks, 0.0), 0).to(tl.float64)
            if (bound >= mass) | (taken == _LISTED) | (following < floor):
                looking = 0
            else:
                kept_before = kept
                kept += mass
                cut_ties = tl.where(following == cut, cut_ties + 1, 1)
                cut = following
                taken += 1
                hidden = tl.maximum(hidden, tl.max(tl.where(here, others, 0.0), 0))
                ahead = tl.where(here, _LOW, ahead)
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
        low = sure_mass.to(tl.float32) * (1.0 - _SLACK)
        high = row_sum * (1.0 + _SLACK)
    cut_id = chunk * CHUNK + CHUNK - 1
    return found, cut, cut_ties, cut_id, low, high, units, peaks, masses, half_units, goal, floor, depth, tail

