"""Where top-k, top-p and min-p cut a row that the walk visits, without sorting it: see :mod:`.verify_tree`.

Device functions only. Each filter keeps a prefix of the tokens by falling logit (or probability), ties by
rising id, so what is kept is a *cut*: every token above it and, at it, the tokens up to an id.

**Units.** The order is that of integers: the ordered key of a float32 (:func:`~.row_chunks.ordered`) without
the low bits that say nothing in the rows' dtype, a *unit*. Units and values are one to one, so every
decision about who is above whom is exact.

**Finding it.** What a chunk publishes for its law bounds every other token's mass in it. That is enough where
the kept tokens are a few chunks' maxima and nothing else can be in between, or where no decision depends on
what else is kept, as in a row that is sure of itself: :mod:`.listed_cuts`. Otherwise, here, all programs
search together: the cut is the lowest unit ``t`` with fewer than k tokens, and less mass than top-p's share,
above it. It lies between bounds that the words give (k chunks' maxima are k tokens; V tokens of small mass
are not 1 - p of the row) and the row's maximum. In a round all programs count the tokens in 256 bins of that
interval (:mod:`.unit_histograms`), and each chunk publishes what it has above the interval. A bin of one unit
tells its tokens' mass, count times mass; of a wider one its edges bound it, and the interval shrinks. Bounds
alone may never tell at which of two far tokens the goal lies, so the mass above the interval's middle is
summed, too: it is halved at least. Rows of 16 bits mostly have 256 units or fewer to look at: one round, and
a last one for what is above the cut and at it. All of it is decided in float64, on integers and on sums of
float32 in a fixed order: exact on dyadic probabilities, the same for any number of programs.

Masses are relative to the row's maximum, or probabilities as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.chunk_reductions import chunk_count, chunk_total
from treeconv.kernels.cut_rests import searched_rest
from treeconv.kernels.filter_units import mass_of, unit_of, value_of
from treeconv.kernels.halves import before_each, greatest, least, summed
from treeconv.kernels.published_words import all_words, as_float, fence, place_of, publish
from treeconv.kernels.row_chunks import unordered
from treeconv.kernels.row_values import read, whole
from treeconv.kernels.sibling_lists import without
from treeconv.kernels.unit_histograms import (
    BINS,
    PER_LANE,
    add_chunk,
    bins_of,
    clear,
    cut_up,
    edges,
    histogram_of,
    read_counts,
)

__all__ = ["find_cut"]

_BIG = tl.constexpr(1 << 30)  # above every token
_LOW = tl.constexpr(-0x80000000)  # below every unit
_BY_VALUE = tl.constexpr(3)  # rounds whose bins may be even in logits: where most units lie at zero, in units
_SLACK = tl.constexpr(2.0**-12)  # relative: far above the rounding of a row's sums


@triton.jit
def _chunk_unit(units, units2, chunk, TWO: tl.constexpr):
    """The unit of a chunk's maximum."""
    lane = tl.arange(0, 32)
    here = tl.where(lane == chunk, units, _LOW)
    return greatest(here, tl.where(lane + 32 == chunk, units2, _LOW), TWO)


@triton.jit
def _kth_unit(units, units2, k, low, high, TWO: tl.constexpr):
    """The highest unit in ``[low, high]`` at or above which k of the chunks' maxima are, or low."""
    while low < high:
        middle = (low + (high.to(tl.int64) - low + 1) // 2).to(tl.int32)
        count = summed(tl.where(units >= middle, 1, 0), tl.where(units2 >= middle, 1, 0), TWO)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle - 1)
    return low


@triton.jit
def _guess(lowest, top, temperature, SHIFT: tl.constexpr, PROBS: tl.constexpr):
    """A unit below the kth token's, probably, where k is more than the chunks; of their maxima the lowest."""
    value = value_of(lowest, SHIFT).to(tl.float64)
    if PROBS:
        value = 0.125 * value
    else:
        further = tl.maximum((top - value) * 0.5, 2.0 * temperature.to(tl.float64))
        value = tl.maximum(value - further, -3.4028234663852886e38)
    return tl.minimum(unit_of(value.to(tl.float32), SHIFT), lowest)


@triton.jit
def _count_round(
    row, words_ptr, step, tag, rank, programs, V, units, units2, binning, middle, top_unit, top, before,
    after, rate, chunks: tl.constexpr, CHUNK: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr,
    SHIFT: tl.constexpr, PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """All programs count; returns the bins' counts, how many tokens and how much mass are above them.

    And how much mass is above ``middle``, a unit of the interval, or its highest if nobody wants to know.
    """
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")
    TWO: tl.constexpr = chunks > 32
    base, high, _, _, _ = binning
    histogram_ptr = histogram_of(words_ptr, step)
    place = place_of(words_ptr, step)
    for chunk in range(rank, chunks, programs):
        if _chunk_unit(units, units2, chunk, TWO) >= base:
            x = whole(row, chunk * CHUNK, V, NO_MASS, CHUNK, VEC)
            add_chunk(histogram_ptr, bins_of(x, binning, SHIFT, PROBS), THREADS, PTX)
    fence(PTX)
    for chunk in range(rank, chunks, programs):
        count = tl.zeros([], tl.int32)
        mass = tl.zeros([], tl.float32)
        more = mass
        if (middle < top_unit) & (_chunk_unit(units, units2, chunk, TWO) > middle):
            x = whole(row, chunk * CHUNK, V, NO_MASS, CHUNK, VEC)
            unit = unit_of(x, SHIFT)
            each = mass_of(x, top, before, after, rate, PROBS, PTX)
            if high < top_unit:
                count = chunk_count(tl.where(unit > high, 1, 0), THREADS, VEC, PTX)
                mass = chunk_total(tl.where(unit > high, each, 0.0), THREADS, VEC, PTX)
            more = mass
            if middle < high:
                more = chunk_total(tl.where(unit > middle, each, 0.0), THREADS, VEC, PTX)
        publish(place, chunk, count, mass, more, tag, PTX)
    count, mass, more, count2, mass2, more2 = all_words(place, tag, chunks, PTX)
    fence(PTX)
    count = summed(count, count2, TWO)
    mass = summed(as_float(mass), as_float(mass2), TWO).to(tl.float64)
    more = summed(as_float(more), as_float(more2), TWO).to(tl.float64)
    return read_counts(histogram_ptr, PTX), count, mass, more


@triton.jit
def _masses(
    counts, binning, top, before, after, rate, BOUND: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The masses of bins of one unit; of wider ones their least (``BOUND`` is -1) or their most (1)."""
    masses = ()
    for place in tl.static_range(PER_LANE):
        which = tl.arange(0, 32) * PER_LANE + place
        unit = binning[1] - which
        if BOUND != 0:
            bottom, highest = edges(which, binning, SHIFT, PROBS)
            unit = highest if BOUND > 0 else bottom
        each = mass_of(value_of(unit, SHIFT), top, before, after, rate, PROBS, PTX).to(tl.float64)
        masses += (counts[place] * (each * (1.0 + BOUND * _SLACK)),)
    return masses


@triton.jit
def _total(values):
    """A lane's bins added up."""
    total = values[0]
    for place in tl.static_range(1, PER_LANE):
        total += values[place]
    return total


@triton.jit
def _lighter(masses, mass_above, goal):
    """Above how many bins is less mass than ``goal``: so many, from the top."""
    mass = _total(masses)
    mass = tl.cumsum(mass, 0) - mass + mass_above
    lighter = tl.zeros([32], tl.int32)
    for place in tl.static_range(PER_LANE):
        lighter += tl.where(mass < goal, 1, 0)
        mass += masses[place]
    return tl.sum(lighter, 0)


@triton.jit
def _kth_bin(counts, count_above, k):
    """The bin of the kth token, or how many bins there are."""
    count = _total(counts)
    count = tl.cumsum(count, 0) - count + count_above
    before = tl.zeros([32], tl.int32)
    for place in tl.static_range(PER_LANE):
        count += counts[place]
        before += tl.where(count < k, 1, 0)
    return tl.sum(before, 0)


@triton.jit
def _mass_of_first(counts, masses, count_above, mass_above, bin_k, k):
    """The mass of the first k tokens, the kth in ``bin_k``, where bins are single units."""
    count = tl.zeros([32], tl.int32)
    mass = tl.zeros([32], tl.float64)
    here = count
    mass_here = mass
    for place in tl.static_range(PER_LANE):
        which = tl.arange(0, 32) * PER_LANE + place
        count += tl.where(which < bin_k, counts[place], 0)
        mass += tl.where(which < bin_k, masses[place], 0.0)
        here += tl.where(which == bin_k, counts[place], 0)
        mass_here += tl.where(which == bin_k, masses[place], 0.0)
    ties = tl.sum(here, 0)
    first = tl.minimum(ties, k - count_above - tl.sum(count, 0))
    each = tl.sum(mass_here, 0) / tl.maximum(ties, 1)  # exact: it was multiplied by a small integer
    return mass_above + tl.sum(mass, 0) + first * each


@triton.jit
def _narrowed(
    counts, count_above, mass_above, mass_above_middle, binning, middle, low, top_unit, top_k, limited, top_p,
    waits, goal, floor, top, before, after, rate, SHIFT: tl.constexpr, PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The interval where the cut is, after a round, from the one before it, ``[low, high]``.

    The bins may begin above ``low``. ``limited``: top-k is among what decides. ``waits``: top-p's goal is a
    share of the first k's mass, which must be known first, and until it is the interval is the kth token's.
    Returns the interval, ``limited``, ``waits``, the goal, and a unit below which the cut may not be: a
    middle for the next round.
    """
    base, high, bits, scale, _ = binning
    single = (bits == 0) & (scale == 0.0)
    low_k = low
    high_k = low
    bin_k = 0
    if limited:  # the kth token's bin, or below all of them
        bin_k = _kth_bin(counts, count_above, top_k)
        if bin_k < BINS:
            low_k, high_k = edges(bin_k, binning, SHIFT, PROBS)
        else:
            high_k = tl.maximum(base - 1, low)
    low_p = low
    high_p = low
    beneath_first = low
    if top_p < 1.0:
        lighter = 0  # above so many bins there is, or may be, less mass than the goal
        lightest = 0
        light_all = 0.0 * goal
        heavy_all = light_all
        known_now = False
        if single:
            masses = _masses(counts, binning, top, before, after, rate, 0, SHIFT, PROBS, PTX)
            if waits & ((bin_k < BINS) | (base == low)):
                mass = _mass_of_first(counts, masses, count_above, mass_above, bin_k, top_k)
                goal = top_p.to(tl.float64) * mass
                low_k = tl.maximum(low_k, floor)
                high_k = low_k
                waits = False
                limited = False
                known_now = True
            lighter = _lighter(masses, mass_above, goal)
            lightest = lighter
            if lighter == BINS:
                light_all = tl.sum(_total(masses), 0) + mass_above
                heavy_all = light_all
        elif not waits:
            masses = _masses(counts, binning, top, before, after, rate, -1, SHIFT, PROBS, PTX)
            lighter = _lighter(masses, mass_above, goal)
            light_all = tl.sum(_total(masses), 0) + mass_above
            masses = _masses(counts, binning, top, before, after, rate, 1, SHIFT, PROBS, PTX)
            lightest = _lighter(masses, mass_above, goal)
            heavy_all = tl.sum(_total(masses), 0) + mass_above
        if not waits:
            if known_now & (lighter == 0):  # above all of them, which were the kth token's
                low_p = high + 1
                high_p = top_unit
            else:  # the lowest bin that may have the cut; it is not above the highest of the other
                low_p = edges(tl.maximum(lighter - 1, 0), binning, SHIFT, PROBS)[0]
                high_p = edges(tl.maximum(lightest - 1, 0), binning, SHIFT, PROBS)[1]
                beneath = (lighter == BINS) & (light_all < goal)
                low_p = tl.where(beneath, low, low_p)
                high_p = tl.where(beneath & (base > low) & (heavy_all < goal), base - 1, high_p)
                if not single:
                    beneath_first = edges(tl.maximum(lightest - 1, 0), binning, SHIFT, PROBS)[0] - 1
                    lower = mass_above_middle < goal
                    high_p = tl.where(lower, tl.minimum(high_p, middle), high_p)
                    low_p = tl.where(lower, low_p, tl.maximum(low_p, middle + 1))
                    high_p = tl.maximum(low_p, high_p)  # if rounding orders two sums the other way
    low = tl.maximum(low_k, low_p)
    return low, tl.maximum(high_k, high_p), limited, waits, goal, beneath_first


@triton.jit
def _publish_cut(
    row, place, tag, rank, programs, V, N, units, units2, cut, top, before, after, rate, tokens, rest, left,
    sibling_ptr, candidates_ptr, chunks: tl.constexpr, CHUNK: tl.constexpr, THREADS: tl.constexpr,
    VEC: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Publish each chunk's mass above the cut, the same without the children, and who is above and at it."""
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")
    for chunk in range(rank, chunks, programs):
        mass = tl.zeros([], tl.float32)
        others = mass
        count = tl.zeros([], tl.int32)
        start = chunk * CHUNK
        if _chunk_unit(units, units2, chunk, chunks > 32) >= cut:
            x = whole(row, start, V, NO_MASS, CHUNK, VEC)
            unit = unit_of(x, SHIFT)
            above = tl.where(unit > cut, mass_of(x, top, before, after, rate, PROBS, PTX), 0.0)
            mass = chunk_total(above, THREADS, VEC, PTX)
            counted = tl.where(unit > cut, 1, tl.where(unit == cut, 1 << 16, 0))
            count = chunk_count(counted, THREADS, VEC, PTX)
            above, _ = without(
                above, start, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK, PTX
            )
            others = chunk_total(above, THREADS, VEC, PTX)
        publish(place, chunk, mass, others, count, tag, PTX)


@triton.jit
def _ties_kept(ties, above, above_mass, each, goal, top_k, top_p):
    """How many of the tokens at a cut are kept, ``each`` of that mass: at least one, if there is any."""
    kept = tl.minimum(ties, top_k - above)
    if (top_p < 1.0) & (each > 0.0):  # a tie is kept if less than the goal is before it
        room = tl.maximum(tl.ceil((goal - above_mass) / each), 1.0)
        kept = tl.minimum(kept.to(tl.float64), room).to(tl.int32)
    return kept


@triton.jit
def _nth_tie(row, chunk, cut, nth, V, CHUNK: tl.constexpr, SHIFT: tl.constexpr):
    """The id of a chunk's nth token at the cut, from 1."""
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    x = read(row, index, index < V, float("nan")).to(tl.float32)
    tie = tl.where((unit_of(x, SHIFT) == cut) & (x == x), 1, 0)
    return tl.min(tl.where((tie == 1) & (tl.cumsum(tie, 0) == nth), index, _BIG), 0)


@triton.jit
def find_cut(
    row, words_ptr, epoch, step, rank, programs, V, N, top_key, top_k, top_p, temperature, units, units2,
    row_sum, goal, floor, tested, coin, before, after, rate, tokens, rest, left, sibling_ptr, candidates_ptr,
    chunks: tl.constexpr, CHUNK: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr,
    JOINT: tl.constexpr, PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Where the filters cut a row, by a search of all programs; ``units`` to ``floor`` are what the list had.

    ``tokens``, ``rest`` and ``left`` are the first block of the children. Returns the cut's unit, the highest
    id kept there (or a higher one that is no tie), and the mass that is kept; what of it is left for the
    bonus if no child is accepted, though they are ``tested``, ``coin``'s chunk and the mass before it there;
    and the step.
    """
    TWO: tl.constexpr = chunks > 32
    lane = tl.arange(0, 32)
    top = unordered(top_key)
    top_unit = top_key >> SHIFT
    limited = top_k < V
    waits = False
    low = tl.full([], 1, tl.int32)  # the lowest unit of any mass
    if not PROBS:  # beyond 88 temperatures below the maximum a mass is zero
        low = unit_of(tl.maximum(top - 88.0 * temperature, -3.4028234663852886e38), SHIFT)
    if not JOINT:  # top-p's share is of the first k, whatever min-p leaves of them
        waits = limited & (top_p < 1.0)
    if not waits:
        low = tl.maximum(low, floor)
        if not PROBS:
            if top_p < 1.0:  # all V tokens at this mass would not be what top-p leaves out of a row
                mass = (1.0 - top_p) * row_sum * (1.0 - _SLACK) / V
                height = top.to(tl.float64) + temperature.to(tl.float64) * tl.log(mass)
                lowest = tl.maximum(height, -3.4028234663852886e38).to(tl.float32)
                low = tl.maximum(low, unit_of(lowest, SHIFT) - 1)
    low = tl.minimum(low, top_unit)
    high = top_unit
    base = low  # where the first round begins to count
    if (not limited) & (top_p >= 1.0):
        high = low  # min-p's
    if limited:
        if top_k <= chunks:
            low = _kth_unit(units, units2, top_k, low, high, TWO)
            base = low
        elif high.to(tl.int64) - low >= BINS:
            inside = tl.where(lane < chunks, units, top_unit)
            inside2 = tl.where(lane + 32 < chunks, units2, top_unit)
            base = tl.maximum(low, _guess(least(inside, inside2, TWO), top, temperature, SHIFT, PROBS))
    counted = 0  # whether the last step counted
    turn = 0
    likely = low
    while (low < high) | (waits & (high < top_unit)):  # or only the first k's mass is not known
        step += 1
        binning = cut_up(base, high, turn < _BY_VALUE, SHIFT, PROBS)
        middle = high
        if (top_p < 1.0) & (not waits) & (high.to(tl.int64) - base >= BINS):
            middle = (low + (high.to(tl.int64) - low) // 2).to(tl.int32)
            if (turn % 2 == 1) & (likely >= low) & (likely < high):
                middle = likely
        counts, count_above, mass_above, mass_above_middle = _count_round(
            row, words_ptr, step, epoch + step, rank, programs, V, units, units2, binning, middle, top_unit,
            top, before, after, rate, chunks, CHUNK, THREADS, VEC, SHIFT, PROBS, PTX,
        )  # fmt: skip
        if (counted == 1) & (rank == 0):
            clear(histogram_of(words_ptr, step - 1))
        counted = 1
        low, high, limited, waits, goal, likely = _narrowed(
            counts, count_above, mass_above, mass_above_middle, binning, middle, low, top_unit, top_k,
            limited, top_p, waits, goal, floor, top, before, after, rate, SHIFT, PROBS, PTX,
        )  # fmt: skip
        base = low
        turn += 1

    step += 1
    cut = low
    place = place_of(words_ptr, step)
    _publish_cut(
        row, place, epoch + step, rank, programs, V, N, units, units2, cut, top, before, after, rate, tokens,
        rest, left, sibling_ptr, candidates_ptr, chunks, CHUNK, THREADS, VEC, SHIFT, PROBS, PTX,
    )  # fmt: skip
    first, second, third, first2, second2, third2 = all_words(place, epoch + step, chunks, PTX)
    if (counted == 1) & (rank == 0):
        clear(histogram_of(words_ptr, step - 1))
        fence(PTX)
    above = as_float(first)
    above2 = as_float(first2)
    mass_above = summed(above, above2, TWO).to(tl.float64)
    ties = third >> 16
    ties2 = third2 >> 16
    all_ties = summed(ties, ties2, TWO)
    each = mass_of(value_of(cut, SHIFT), top, before, after, rate, PROBS, PTX).to(tl.float64)
    count = summed(third & 0xFFFF, third2 & 0xFFFF, TWO)
    if waits:  # the first k's mass, where all of them are at the maximum
        goal = top_p.to(tl.float64) * (mass_above + tl.minimum(all_ties, top_k - count).to(tl.float64) * each)
    cut_ties = _ties_kept(all_ties, count, mass_above, each, goal, top_k, top_p)
    kept = mass_above + cut_ties.to(tl.float64) * each
    cut_id = _BIG
    if cut_ties < all_ties:
        earlier, earlier2 = before_each(ties, ties2)
        there = greatest(
            tl.where(earlier < cut_ties, lane, 0), tl.where(earlier2 < cut_ties, lane + 32, 0), TWO
        )
        nth = cut_ties - summed(
            tl.where(lane == there, earlier, 0), tl.where(lane + 32 == there, earlier2, 0), TWO
        )
        cut_id = _nth_tie(row, there, cut, nth, V, CHUNK, SHIFT)
    left_sum, chunk, base_mass = searched_rest(
        row, above, above2, as_float(second), as_float(second2), ties, ties2, cut, cut_ties, cut_id, tested,
        coin, top, before, after, rate, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK, SHIFT,
        PROBS, TWO, PTX,
    )  # fmt: skip
    return cut, cut_id, kept.to(tl.float32), left_sum, chunk, base_mass, step
