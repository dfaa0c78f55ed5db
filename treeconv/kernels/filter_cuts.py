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
are not 1 - p of the row) and the row's maximum. In a round each chunk publishes how many tokens (six
thresholds) or how much mass (three) it has above some units, and the interval shrinks. Where a count says
that few tokens can be kept, these are passed around, which ends the search (:mod:`.short_lists`). All of it
is decided in float64, on sums of float32 in a fixed order: exact on dyadic probabilities, the same for any
number of programs.

Masses are relative to the row's maximum, or probabilities as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.chunk_reductions import chunk_count, chunk_total
from treeconv.kernels.cut_rests import searched_rest
from treeconv.kernels.filter_units import mass_of, unit_of, value_of
from treeconv.kernels.halves import before_each, greatest, least, summed
from treeconv.kernels.published_words import all_words, as_float, place_of, publish
from treeconv.kernels.row_chunks import unordered
from treeconv.kernels.row_values import read, whole
from treeconv.kernels.short_lists import SHORT_LIST, cut_of_list, kth_unit, publish_list, ties_kept
from treeconv.kernels.sibling_lists import without

__all__ = ["find_cut"]

_BIG = tl.constexpr(1 << 30)  # above every token
_LOW = tl.constexpr(-0x80000000)  # below every unit
_COUNT = tl.constexpr(0)  # stages of a search: for top-k's cut,
_FIRST_K = tl.constexpr(1)  # for the mass of the first k tokens,
_WEIGH = tl.constexpr(2)  # for top-p's cut,
_LAST = tl.constexpr(3)  # and for what is above the cut and at it;
_LIST = tl.constexpr(4)  # or, after the first, for all of that at once, from a short list
_DONE = tl.constexpr(5)
_SLACK = tl.constexpr(2.0**-12)  # relative: far above the rounding of a row's sums
_BY_VALUE = tl.constexpr(4)  # rounds whose thresholds are even in logits, not in units, which crowd at zero
_FEW = tl.constexpr(64)  # units


@triton.jit
def _even(low, high, which, count, turn, SHIFT: tl.constexpr, PROBS: tl.constexpr):
    """One of ``count`` rising units in ``[low, high)``, or ``low`` if that is empty.

    They cut the interval evenly, in value for the first turns of a search.
    """
    span = high.to(tl.int64) - low
    unit = (low + (which + 1) * span // (count + 1)).to(tl.int32)
    if not PROBS:
        bottom = value_of(low, SHIFT).to(tl.float64)
        height = value_of(high, SHIFT).to(tl.float64) - bottom
        point = (bottom + height * ((which + 1) / (count + 1))).to(tl.float32)
        by_value = tl.minimum(tl.maximum(unit_of(point, SHIFT), low), tl.maximum(high - 1, low))
        unit = tl.where((turn < _BY_VALUE) & (span > _FEW), by_value, unit)
    return unit


@triton.jit
def _around(low, high, pivot, top_unit, sixty_fourths):
    """A unit in ``[low, high)``, or ``low``, so much of the way from ``pivot`` to the row's maximum."""
    way = (top_unit.to(tl.int64) - pivot) * sixty_fourths
    unit = tl.maximum(pivot + (way >> 6), low.to(tl.int64))
    return tl.minimum(unit, tl.maximum(high - 1, low).to(tl.int64)).to(tl.int32)


@triton.jit
def _chunk_unit(units, units2, chunk, TWO: tl.constexpr):
    """The unit of a chunk's maximum."""
    lane = tl.arange(0, 32)
    here = tl.where(lane == chunk, units, _LOW)
    return greatest(here, tl.where(lane + 32 == chunk, units2, _LOW), TWO)


@triton.jit
def _counted_above(unit, low, high, THREADS: tl.constexpr, VEC: tl.constexpr, PTX: tl.constexpr):
    """How many of a chunk's tokens are above each of two thresholds, in 16 bits each."""
    above = tl.where(unit > low, 1, 0) + tl.where(unit > high, 1 << 16, 0)
    return chunk_count(above, THREADS, VEC, PTX)


@triton.jit
def _publish_counts(
    row, place, tag, rank, programs, V, units, units2, thresholds, chunks: tl.constexpr, CHUNK: tl.constexpr,
    THREADS: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Publish how many tokens each chunk has above six rising thresholds, two counts a payload."""
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")
    t0, t1, t2, t3, t4, t5 = thresholds
    for chunk in range(rank, chunks, programs):
        n0 = tl.zeros([], tl.int32)
        n1 = n0
        n2 = n0
        if _chunk_unit(units, units2, chunk, chunks > 32) > t0:
            x = whole(row, chunk * CHUNK, V, NO_MASS, CHUNK, VEC)
            unit = unit_of(x, SHIFT)
            n0 = _counted_above(unit, t0, t1, THREADS, VEC, PTX)
            n1 = _counted_above(unit, t2, t3, THREADS, VEC, PTX)
            n2 = _counted_above(unit, t4, t5, THREADS, VEC, PTX)
        publish(place, chunk, n0, n1, n2, tag, PTX)


@triton.jit
def _publish_masses(
    row, place, tag, rank, programs, V, N, units, units2, thresholds, last, top, before, after, rate, tokens,
    rest, left, sibling_ptr, candidates_ptr, chunks: tl.constexpr, CHUNK: tl.constexpr, THREADS: tl.constexpr,
    VEC: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Publish how much mass each chunk has above three rising thresholds.

    If ``last``, above the first, the same without the children, and tokens above beside those at it.
    """
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")
    t0, t1, t2 = thresholds
    for chunk in range(rank, chunks, programs):
        m0 = tl.zeros([], tl.float32)
        m1 = m0
        m2 = m0
        count = tl.zeros([], tl.int32)
        start = chunk * CHUNK
        if _chunk_unit(units, units2, chunk, chunks > 32) >= t0:
            x = whole(row, start, V, NO_MASS, CHUNK, VEC)
            unit = unit_of(x, SHIFT)
            mass = mass_of(x, top, before, after, rate, PROBS, PTX)
            above = tl.where(unit > t0, mass, 0.0)
            m0 = chunk_total(above, THREADS, VEC, PTX)
            if last:
                counted = tl.where(unit > t0, 1, tl.where(unit == t0, 1 << 16, 0))
                count = chunk_count(counted, THREADS, VEC, PTX)
                above, _ = without(
                    above, start, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK, PTX
                )
                m1 = chunk_total(above, THREADS, VEC, PTX)
            else:
                m1 = chunk_total(tl.where(unit > t1, mass, 0.0), THREADS, VEC, PTX)
                m2 = chunk_total(tl.where(unit > t2, mass, 0.0), THREADS, VEC, PTX)
        publish(place, chunk, m0, m1, tl.where(last, count, m2.to(tl.int32, bitcast=True)), tag, PTX)


@triton.jit
def _narrowed(low, high, threshold, holds):
    """The interval of the lowest unit for which something holds, after one threshold."""
    high = tl.where(holds, tl.minimum(high, threshold), high)
    return tl.where(holds, low, tl.maximum(low, threshold + 1)), high


@triton.jit
def _counted(low, high, counts, counts2, threshold, above, above2, k, TWO: tl.constexpr):
    """The interval of the kth token's unit, and the counts at or above its low end, after one threshold's."""
    count = summed(above, above2, TWO)
    # Below the low end only that all there can be are counted, be they k or not.
    raised = ((count >= k) & (threshold >= low)) | (threshold == low - 1)
    counts = tl.where(raised, above, counts)
    counts2 = tl.where(raised, above2, counts2)
    low, high = _narrowed(low, high, threshold, count < k)
    return low, high, counts, counts2


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
    share = top_p.to(tl.float64)
    limited = top_k < V
    cut = top_unit
    cut_id = _BIG
    kept = tl.zeros([], tl.float64)
    left_sum = tl.zeros([], tl.float32)
    chunk = 0
    base = left_sum
    counts = tl.full([32], SHORT_LIST, tl.int32)  # per chunk, tokens at or above low: not known yet
    counts2 = counts
    depth = tl.full([], 1, tl.int32)  # the lowest unit of any mass
    if not PROBS:  # beyond 88 temperatures below the maximum a mass is zero
        depth = unit_of(tl.maximum(top - 88.0 * temperature, -3.4028234663852886e38), SHIFT)
    tail = depth
    if not PROBS:
        if top_p < 1.0:  # all V tokens at this mass would not be what top-p leaves out of a row
            mass = (1.0 - share) * row_sum.to(tl.float64) * (1.0 - _SLACK) / V
            height = top.to(tl.float64) + temperature.to(tl.float64) * tl.log(mass)
            lowest = tl.maximum(height, -3.4028234663852886e38).to(tl.float32)
            tail = tl.maximum(depth, unit_of(lowest, SHIFT) - 1)
    low = tl.maximum(floor, depth)
    high = top_unit
    pivot = high
    tight = True
    turn = 0
    stage = _LAST
    if top_p < 1.0:
        stage = _WEIGH
    if limited:
        stage = _COUNT
        if not JOINT:  # top-p's share is of the first k, whatever min-p leaves of them
            low = tl.where(top_p < 1.0, depth, low)
        tight = top_k <= chunks
        if tight:
            pivot = kth_unit(units, units2, top_k, low, high, TWO)
            low = pivot
        else:
            inside = tl.where(lane < chunks, units, top_unit)
            inside2 = tl.where(lane + 32 < chunks, units2, top_unit)
            pivot = tl.maximum(least(inside, inside2, TWO), low)
    else:
        low = tl.maximum(low, tail)
    while stage != _DONE:
        if (stage == _COUNT) & (low >= high):
            if top_p < 1.0:
                high = top_unit
                stage = _WEIGH if JOINT else _FIRST_K
                if JOINT:
                    low = tl.maximum(low, tl.minimum(tail, high))
            else:
                stage = _LAST
        if (stage == _WEIGH) & (low >= high):
            stage = _LAST
        step += 1
        tag = epoch + step
        place = place_of(words_ptr, step)
        if stage == _COUNT:
            if turn == 0:  # all there can be; then ever further above a bound, on both sides where it is none
                t0 = tl.where(low > depth, low - 1, _around(low, high, pivot, top_unit, -64))
                t1 = _around(low, high, pivot, top_unit, tl.where(tight, 2, -16))
                t2 = _around(low, high, pivot, top_unit, tl.where(tight, 4, -4))
                t3 = _around(low, high, pivot, top_unit, tl.where(tight, 8, 4))
                t4 = _around(low, high, pivot, top_unit, 16)
                t5 = _around(low, high, pivot, top_unit, 32)
            else:
                t0 = _even(low, high, 0, 6, turn, SHIFT, PROBS)
                t1 = _even(low, high, 1, 6, turn, SHIFT, PROBS)
                t2 = _even(low, high, 2, 6, turn, SHIFT, PROBS)
                t3 = _even(low, high, 3, 6, turn, SHIFT, PROBS)
                t4 = _even(low, high, 4, 6, turn, SHIFT, PROBS)
                t5 = _even(low, high, 5, 6, turn, SHIFT, PROBS)
            _publish_counts(
                row, place, tag, rank, programs, V, units, units2, (t0, t1, t2, t3, t4, t5), chunks, CHUNK,
                THREADS, VEC, SHIFT, PROBS, PTX,
            )  # fmt: skip
            first, second, third, first2, second2, third2 = all_words(place, tag, chunks, PTX)
            low, high, counts, counts2 = _counted(
                low, high, counts, counts2, t0, first & 0xFFFF, first2 & 0xFFFF, top_k, TWO
            )
            low, high, counts, counts2 = _counted(
                low, high, counts, counts2, t1, first >> 16, first2 >> 16, top_k, TWO
            )
            low, high, counts, counts2 = _counted(
                low, high, counts, counts2, t2, second & 0xFFFF, second2 & 0xFFFF, top_k, TWO
            )
            low, high, counts, counts2 = _counted(
                low, high, counts, counts2, t3, second >> 16, second2 >> 16, top_k, TWO
            )
            low, high, counts, counts2 = _counted(
                low, high, counts, counts2, t4, third & 0xFFFF, third2 & 0xFFFF, top_k, TWO
            )
            low, high, counts, counts2 = _counted(
                low, high, counts, counts2, t5, third >> 16, third2 >> 16, top_k, TWO
            )
            high = tl.maximum(high, low)  # if not even all there can be are k
            turn += 1
            if summed(counts, counts2, TWO) <= SHORT_LIST:
                stage = _LIST
        elif stage == _LIST:
            publish_list(
                row, place, tag, rank, programs, V, low, counts, counts2, chunks, CHUNK, THREADS, VEC, SHIFT,
                PROBS, PTX,
            )  # fmt: skip
            cut, cut_id, kept, left_sum, chunk, base = cut_of_list(
                row, place, tag, summed(counts, counts2, TWO), V, N, top_k, top_p, goal, low, floor, top_unit,
                tested, coin, top, before, after, rate, tokens, rest, left, sibling_ptr, candidates_ptr,
                chunks, CHUNK, SHIFT, JOINT, PROBS, PTX,
            )  # fmt: skip
            stage = _DONE
        else:
            t0 = low
            t1 = low
            t2 = low
            if stage == _WEIGH:
                t0 = _even(low, high, 0, 3, turn, SHIFT, PROBS)
                t1 = _even(low, high, 1, 3, turn, SHIFT, PROBS)
                t2 = _even(low, high, 2, 3, turn, SHIFT, PROBS)
            _publish_masses(
                row, place, tag, rank, programs, V, N, units, units2, (t0, t1, t2), stage != _WEIGH, top,
                before, after, rate, tokens, rest, left, sibling_ptr, candidates_ptr, chunks, CHUNK, THREADS,
                VEC, SHIFT, PROBS, PTX,
            )  # fmt: skip
            first, second, third, first2, second2, third2 = all_words(place, tag, chunks, PTX)
            above = as_float(first)
            above2 = as_float(first2)
            mass_above = summed(above, above2, TWO).to(tl.float64)
            above_rest = as_float(second)
            above_rest2 = as_float(second2)
            if stage == _WEIGH:
                low, high = _narrowed(low, high, t0, mass_above < goal)
                mass = summed(above_rest, above_rest2, TWO)
                low, high = _narrowed(low, high, t1, mass.to(tl.float64) < goal)
                mass = summed(as_float(third), as_float(third2), TWO)
                low, high = _narrowed(low, high, t2, mass.to(tl.float64) < goal)
                low = tl.minimum(low, high)  # if rounding orders two sums the other way
                turn += 1
            else:
                ties = third >> 16
                ties2 = third2 >> 16
                all_ties = summed(ties, ties2, TWO)
                each = mass_of(value_of(low, SHIFT), top, before, after, rate, PROBS, PTX).to(tl.float64)
                count = summed(third & 0xFFFF, third2 & 0xFFFF, TWO)
                if stage == _FIRST_K:
                    first_k = tl.minimum(all_ties, top_k - count).to(tl.float64)
                    goal = share * (mass_above + first_k * each)
                    low = tl.maximum(low, floor)
                    stage = _WEIGH
                    turn = 0
                else:
                    cut = low
                    cut_ties = ties_kept(all_ties, count, mass_above, each, goal, top_k, top_p)
                    kept = mass_above + cut_ties.to(tl.float64) * each
                    if cut_ties < all_ties:
                        earlier, earlier2 = before_each(ties, ties2)
                        there = greatest(
                            tl.where(earlier < cut_ties, lane, 0),
                            tl.where(earlier2 < cut_ties, lane + 32, 0),
                            TWO,
                        )
                        nth = cut_ties - summed(
                            tl.where(lane == there, earlier, 0),
                            tl.where(lane + 32 == there, earlier2, 0),
                            TWO,
                        )
                        cut_id = _nth_tie(row, there, cut, nth, V, CHUNK, SHIFT)
                    left_sum, chunk, base = searched_rest(
                        row, above, above2, above_rest, above_rest2, ties, ties2, cut, cut_ties, cut_id,
                        tested, coin, top, before, after, rate, tokens, rest, left, sibling_ptr,
                        candidates_ptr, N, V, CHUNK, SHIFT, PROBS, TWO, PTX,
                    )  # fmt: skip
                    stage = _DONE
    return cut, cut_id, kept.to(tl.float32), left_sum, chunk, base, step
