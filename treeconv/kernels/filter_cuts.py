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
thresholds) or how much mass (three) it has above some units, and the interval shrinks. All of it is decided
in float64, on sums of float32 in a fixed order: exact on dyadic probabilities, the same for any number of
programs.

Masses are relative to the row's maximum, or probabilities as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.cut_rests import searched_rest
from treeconv.kernels.filter_units import mass_of, unit_of, value_of
from treeconv.kernels.published_words import as_float, publish, row_words, settled
from treeconv.kernels.row_chunks import total, unordered
from treeconv.kernels.row_values import fetch, read, values
from treeconv.kernels.short_lists import SHORT_LIST, cut_of_list, kth_unit, publish_list, ties_kept
from treeconv.kernels.sibling_lists import without

__all__ = ["find_cut"]

_BIG = tl.constexpr(1 << 30)  # above every token
_LOW = tl.constexpr(-0x80000000)  # below every unit
_COUNT = tl.constexpr(0)  # stages of a search: for top-k's cut,
_FIRST_K = tl.constexpr(1)  # for the mass of the first k tokens,
_WEIGH = tl.constexpr(2)  # for top-p's cut,
_LAST = tl.constexpr(3)  # and for what is above the cut and at it;
_LIST = tl.constexpr(4)  # or for all of that at once, from a short list
_DONE = tl.constexpr(5)
_SLACK = tl.constexpr(2.0**-12)  # relative: far above the rounding of a row's sums
_BY_VALUE = tl.constexpr(4)  # rounds whose thresholds are even in logits, not in units, which crowd at zero
_FEW = tl.constexpr(64)  # units


@triton.jit
def _between(low, high, way: tl.constexpr, turn, SHIFT: tl.constexpr, PROBS: tl.constexpr):
    """A unit so much of the way from ``low`` to ``high``, below that, or ``low`` if there is none.

    The way is one in value for the first turns of a search.
    """
    span = high.to(tl.int64) - low
    unit = (low + (span.to(tl.float64) * way).to(tl.int64)).to(tl.int32)
    if not PROBS:
        bottom = value_of(low, SHIFT).to(tl.float64)
        height = value_of(high, SHIFT).to(tl.float64) - bottom
        point = (bottom + height * way).to(tl.float32)
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
def _chunk_unit(units, chunk):
    """The unit of a chunk's maximum."""
    return tl.max(tl.where(tl.arange(0, 64) == chunk, units, _LOW), 0)


@triton.jit
def _publish_counts(
    row, words, tag, rank, programs, V, units, thresholds, chunks: tl.constexpr, CHUNK: tl.constexpr,
    VEC: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr,
):  # fmt: skip
    """Publish how many tokens each chunk has above six rising thresholds, two counts a word."""
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")
    t0, t1, t2, t3, t4, t5 = thresholds
    for chunk in range(rank, chunks, programs):
        n0 = tl.zeros([], tl.int32)
        n1 = n0
        n2 = n0
        if _chunk_unit(units, chunk) > t0:
            index = chunk * CHUNK + tl.arange(0, CHUNK)
            x = values(fetch(row, chunk * CHUNK, index, V, NO_MASS, VEC), row, index, VEC).to(tl.float32)
            unit = unit_of(x, SHIFT)
            n0 = tl.sum(tl.where(unit > t0, 1, 0) + tl.where(unit > t1, 1 << 16, 0), 0)
            n1 = tl.sum(tl.where(unit > t2, 1, 0) + tl.where(unit > t3, 1 << 16, 0), 0)
            n2 = tl.sum(tl.where(unit > t4, 1, 0) + tl.where(unit > t5, 1 << 16, 0), 0)
        publish(words, 0, chunk, n0, tag)
        publish(words, 1, chunk, n1, tag)
        publish(words, 2, chunk, n2, tag)


@triton.jit
def _publish_masses(
    row, words, tag, rank, programs, V, N, units, thresholds, last, counted, top, before, after, rate, tokens,
    rest, left, sibling_ptr, candidates_ptr, chunks: tl.constexpr, CHUNK: tl.constexpr, THREADS: tl.constexpr,
    VEC: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Publish how much mass each chunk has above three rising thresholds.

    If ``last``, above the first, the same without the children, and tokens above beside those at it. If
    ``counted``, above the first two, and how many tokens that are.
    """
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")
    t0, t1, t2 = thresholds
    for chunk in range(rank, chunks, programs):
        m0 = tl.zeros([], tl.float32)
        m1 = m0
        third = tl.zeros([], tl.int32)
        start = chunk * CHUNK
        if _chunk_unit(units, chunk) >= t0:
            index = start + tl.arange(0, CHUNK)
            x = values(fetch(row, start, index, V, NO_MASS, VEC), row, index, VEC).to(tl.float32)
            unit = unit_of(x, SHIFT)
            mass = mass_of(x, top, before, after, rate, PROBS, PTX)
            above = tl.where(unit > t0, mass, 0.0)
            m0 = total(above, THREADS, VEC)
            if last:
                third = tl.sum(tl.where(unit > t0, 1, tl.where(unit == t0, 1 << 16, 0)), 0)
                above, _ = without(
                    above, start, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK, PTX
                )
                m1 = total(above, THREADS, VEC)
            else:
                m1 = total(tl.where(unit > t1, mass, 0.0), THREADS, VEC)
                if counted:
                    third = tl.sum(tl.where(unit > t0, 1, 0) + tl.where(unit > t1, 1 << 16, 0), 0)
                else:
                    m2 = total(tl.where(unit > t2, mass, 0.0), THREADS, VEC)
                    third = m2.to(tl.int32, bitcast=True)
        publish(words, 0, chunk, m0, tag)
        publish(words, 1, chunk, m1, tag)
        publish(words, 2, chunk, third, tag)


@triton.jit
def _listable(listed, listed_counts, counts, threshold, enough):
    """The threshold and counts of a list, replaced if one above this threshold is ``enough`` and short."""
    better = enough & (tl.sum(counts, 0) <= SHORT_LIST)
    return tl.where(better, threshold, listed), tl.where(better, counts, listed_counts)


@triton.jit
def _narrowed(low, high, threshold, holds):
    """The interval of the lowest unit for which something holds, after one threshold."""
    high = tl.where(holds, tl.minimum(high, threshold), high)
    return tl.where(holds, low, tl.maximum(low, threshold + 1)), high


@triton.jit
def _counted(low, high, threshold, counts, k, lowest, listed, listed_counts):
    """The interval of the kth token's unit, and the list, after the counts above one threshold."""
    count = tl.sum(counts, 0)
    low, high = _narrowed(low, high, threshold, count < k)
    enough = (count >= k) | (threshold < lowest)
    listed, listed_counts = _listable(listed, listed_counts, counts, threshold, enough)
    return low, high, listed, listed_counts


@triton.jit
def _nth_tie(row, chunk, cut, nth, V, CHUNK: tl.constexpr, SHIFT: tl.constexpr):
    """The id of a chunk's nth token at the cut, from 1."""
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    x = read(row, index, index < V, float("nan")).to(tl.float32)
    tie = tl.where((unit_of(x, SHIFT) == cut) & (x == x), 1, 0)
    return tl.min(tl.where((tie == 1) & (tl.cumsum(tie, 0) == nth), index, _BIG), 0)


@triton.jit
def find_cut(
    row, words_ptr, epoch, step, rank, programs, V, N, top_key, top_k, top_p, temperature, units, masses,
    goal, floor, tested, coin, before, after, rate, tokens, rest, left, sibling_ptr, candidates_ptr, chunks: tl.constexpr,
    CHUNK: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr,
    JOINT: tl.constexpr, PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Where the filters cut a row, by a search of all programs; ``units`` to ``floor`` are the list's.

    ``tokens``, ``rest`` and ``left`` are the first block of the children. Returns the cut's unit, the highest
    id kept there (or a higher one that is no tie), the mass that is kept; what of it is left for the bonus
    if none of the ``tested`` children is accepted, ``coin``'s chunk and the mass before it there; and the
    step.
    """
    place = tl.arange(0, 64)
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
    depth = tl.full([], 1, tl.int32)  # the lowest unit of any mass
    if not PROBS:  # beyond 88 temperatures below the maximum a mass is zero
        depth = unit_of(tl.maximum(top - 88.0 * temperature, -3.4028234663852886e38), SHIFT)
    tail = depth
    if not PROBS:
        if top_p < 1.0:  # all V tokens at this mass would not be what top-p leaves out of a row
            mass = (1.0 - share) * tl.sum(masses, 0).to(tl.float64) * (1.0 - _SLACK) / V
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
            pivot = kth_unit(units, top_k, low, high)
            low = pivot
        else:
            pivot = tl.maximum(tl.min(tl.where(place < chunks, units, top_unit), 0), low)
    else:
        low = tl.maximum(low, tail)
    listed = low  # a list's threshold, and how many tokens above it each chunk has
    listed_counts = tl.full([64], SHORT_LIST, tl.int32)
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
        words = row_words(words_ptr, step)
        if stage == _COUNT:
            if turn == 0:  # all there can be; then ever further above a bound, on both sides where it is none
                t0 = low - 1
                t1 = _around(low, high, pivot, top_unit, tl.where(tight, 2, -32))
                t2 = _around(low, high, pivot, top_unit, tl.where(tight, 5, -8))
                t3 = _around(low, high, pivot, top_unit, tl.where(tight, 10, 1))
                t4 = _around(low, high, pivot, top_unit, tl.where(tight, 16, 8))
                t5 = _around(low, high, pivot, top_unit, tl.where(tight, 32, 20))
            else:
                t0 = _between(low, high, 1 / 7, turn, SHIFT, PROBS)
                t1 = _between(low, high, 2 / 7, turn, SHIFT, PROBS)
                t2 = _between(low, high, 3 / 7, turn, SHIFT, PROBS)
                t3 = _between(low, high, 4 / 7, turn, SHIFT, PROBS)
                t4 = _between(low, high, 5 / 7, turn, SHIFT, PROBS)
                t5 = _between(low, high, 6 / 7, turn, SHIFT, PROBS)
            _publish_counts(
                row, words, tag, rank, programs, V, units, (t0, t1, t2, t3, t4, t5), chunks, CHUNK, VEC,
                SHIFT, PROBS,
            )  # fmt: skip
            first, second, third = settled(words, tag, chunks)
            lowest = low
            low, high, listed, listed_counts = _counted(
                low, high, t0, first & 0xFFFF, top_k, lowest, listed, listed_counts
            )
            low, high, listed, listed_counts = _counted(
                low, high, t1, first >> 16, top_k, lowest, listed, listed_counts
            )
            low, high, listed, listed_counts = _counted(
                low, high, t2, second & 0xFFFF, top_k, lowest, listed, listed_counts
            )
            low, high, listed, listed_counts = _counted(
                low, high, t3, second >> 16, top_k, lowest, listed, listed_counts
            )
            low, high, listed, listed_counts = _counted(
                low, high, t4, third & 0xFFFF, top_k, lowest, listed, listed_counts
            )
            low, high, listed, listed_counts = _counted(
                low, high, t5, third >> 16, top_k, lowest, listed, listed_counts
            )
            high = tl.maximum(high, low)  # if not even all there can be are k
            turn += 1
            if tl.sum(listed_counts, 0) <= SHORT_LIST:
                stage = _LIST
        elif stage == _LIST:
            publish_list(
                row, words, tag, rank, programs, V, listed, listed_counts, chunks, CHUNK, THREADS, VEC,
                SHIFT, PROBS, PTX,
            )  # fmt: skip
            cut, cut_id, kept, left_sum, chunk, base = cut_of_list(
                row, words, tag, tl.sum(listed_counts, 0), V, N, top_k, top_p, goal, listed + 1, floor,
                top_unit, tested, coin, top, before, after, rate, tokens, rest, left, sibling_ptr, candidates_ptr, chunks, CHUNK,
                SHIFT, JOINT, PROBS, PTX,
            )  # fmt: skip
            stage = _DONE
        else:
            t0 = low
            t1 = low
            t2 = low
            counted = (stage == _WEIGH) & (turn == 0)
            if counted:
                t0 = _between(low, high, 0.45, turn, SHIFT, PROBS)
                t1 = _between(low, high, 0.7, turn, SHIFT, PROBS)
                t2 = t1
            elif stage == _WEIGH:
                t0 = _between(low, high, 1 / 4, turn, SHIFT, PROBS)
                t1 = _between(low, high, 2 / 4, turn, SHIFT, PROBS)
                t2 = _between(low, high, 3 / 4, turn, SHIFT, PROBS)
            _publish_masses(
                row, words, tag, rank, programs, V, N, units, (t0, t1, t2), stage != _WEIGH, counted, top,
                before, after, rate, tokens, rest, left, sibling_ptr, candidates_ptr, chunks, CHUNK, THREADS,
                VEC, SHIFT, PROBS, PTX,
            )  # fmt: skip
            first, second, third = settled(words, tag, chunks)
            above = as_float(first)
            mass_above = tl.sum(above, 0).to(tl.float64)
            above_rest = as_float(second)
            if stage == _WEIGH:
                enough0 = mass_above >= goal
                enough1 = tl.sum(above_rest, 0).to(tl.float64) >= goal
                low, high = _narrowed(low, high, t0, enough0 == 0)
                low, high = _narrowed(low, high, t1, enough1 == 0)
                if counted:
                    listed, listed_counts = _listable(
                        listed, listed_counts, third & 0xFFFF, t0, enough0
                    )
                    listed, listed_counts = _listable(listed, listed_counts, third >> 16, t1, enough1)
                    if tl.sum(listed_counts, 0) <= SHORT_LIST:
                        stage = _LIST
                else:
                    enough2 = tl.sum(as_float(third), 0).to(tl.float64) >= goal
                    low, high = _narrowed(low, high, t2, enough2 == 0)
                low = tl.minimum(low, high)  # if rounding orders two sums the other way
                turn += 1
            else:
                ties = third >> 16
                all_ties = tl.sum(ties, 0)
                each = mass_of(value_of(low, SHIFT), top, before, after, rate, PROBS, PTX).to(tl.float64)
                count = tl.sum(third & 0xFFFF, 0)
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
                        earlier = tl.cumsum(ties, 0) - ties
                        there = tl.max(tl.where(earlier < cut_ties, place, 0), 0)
                        nth = cut_ties - tl.sum(tl.where(place == there, earlier, 0), 0)
                        cut_id = _nth_tie(row, there, cut, nth, V, CHUNK, SHIFT)
                    left_sum, chunk, base = searched_rest(
                        row, above, above_rest, ties, cut, cut_ties, cut_id, tested, coin, top, before,
                        after, rate, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK, SHIFT,
                        PROBS, PTX,
                    )  # fmt: skip
                    stage = _DONE
    return cut, cut_id, kept.to(tl.float32), left_sum, chunk, base, step
