"""Where top-k, top-p and min-p cut a row that the walk visits, without sorting it: see :mod:`.verify_tree`.

Device functions only. Each filter keeps a prefix of the tokens by falling logit (or probability), ties by
rising id, so what is kept is a *cut*: every token above it and, at it, the tokens up to an id.

**Units.** The order is that of integers: the ordered key of a float32 (:func:`~.row_chunks.ordered`) without
the low bits that say nothing in the rows' dtype, a *unit*. Units and values are one to one, so every
decision about who is above whom is exact.

**Finding it.** What a chunk publishes for its law, its maximum and its sum, bounds every other token's mass
in it. That is enough where the kept tokens are a few chunks' maxima and nothing else can be in between, or
where no decision depends on what else is kept, as in a row that is sure of itself: :mod:`.listed_cuts`.
Otherwise, here, all programs search together: the cut is the lowest unit ``t`` with fewer than k tokens, and
less mass than top-p's share, above it. In a round each chunk publishes how many tokens (six thresholds) or
how much mass (three) it has above some units, and the interval shrinks sevenfold or fourfold. All of it is
decided in float64, on sums of float32 in a fixed order: exact on dyadic probabilities, the same for any
number of programs.

Masses are relative to the row's maximum, or probabilities as they are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.filter_units import mass_of, unit_of, value_of
from treeconv.kernels.published_words import as_float, publish, row_words, settled
from treeconv.kernels.row_chunks import total, unordered
from treeconv.kernels.row_values import fetch, read, values
from treeconv.kernels.sibling_lists import siblings, without

__all__ = ["find_cut", "rest_of_cut"]

_BIG = tl.constexpr(1 << 30)  # above every token
_BLOCK = tl.constexpr(1024)  # tokens at a time, where speed is not all
_COUNT = tl.constexpr(0)  # stages of a search: for top-k's cut,
_FIRST_K = tl.constexpr(1)  # for the mass of the first k tokens,
_WEIGH = tl.constexpr(2)  # for top-p's cut,
_LAST = tl.constexpr(3)  # and for what is above the cut and at it
_DONE = tl.constexpr(4)


@triton.jit
def _threshold(low, span, which, count):
    """One of ``count`` units that cut ``[low, low + span]`` evenly; span is int64."""
    return (low + (which + 1) * span // (count + 1)).to(tl.int32)


@triton.jit
def _publish_tails(
    row, words_ptr, tag, rank, programs, V, low, span, stage, top, before, after, rate,
    chunks: tl.constexpr, CHUNK: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr,
    SHIFT: tl.constexpr, PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Publish what each chunk has above some units.

    At ``_COUNT`` tokens above six thresholds, two a word; at ``_WEIGH`` masses above three; else, with span
    0, the mass above ``low``, the same, and tokens above ``low`` beside those at it.
    """
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")
    BLOCK: tl.constexpr = _BLOCK
    for chunk in range(rank, chunks, programs):
        n0 = tl.zeros([BLOCK], tl.int32)
        n1 = n0
        n2 = n0
        m0 = tl.zeros([BLOCK], tl.float32)
        m1 = m0
        m2 = m0
        index = chunk * CHUNK + tl.arange(0, BLOCK)
        fetched = fetch(row, chunk * CHUNK, index, V, NO_MASS, VEC)
        for block in range(CHUNK // BLOCK):
            x = values(fetched, row, index, VEC).to(tl.float32)
            unit = unit_of(x, SHIFT)
            mass = mass_of(x, top, before, after, rate, PROBS, PTX)
            index += BLOCK
            fetched = fetch(row, chunk * CHUNK + (block + 1) * BLOCK, index, V, NO_MASS, VEC)
            if stage == _COUNT:
                n0 += tl.where(unit > _threshold(low, span, 0, 6), 1, 0)
                n0 += tl.where(unit > _threshold(low, span, 1, 6), 1 << 16, 0)
                n1 += tl.where(unit > _threshold(low, span, 2, 6), 1, 0)
                n1 += tl.where(unit > _threshold(low, span, 3, 6), 1 << 16, 0)
                n2 += tl.where(unit > _threshold(low, span, 4, 6), 1, 0)
                n2 += tl.where(unit > _threshold(low, span, 5, 6), 1 << 16, 0)
            else:
                m0 += tl.where(unit > _threshold(low, span, 0, 3), mass, 0.0)
                m1 += tl.where(unit > _threshold(low, span, 1, 3), mass, 0.0)
                m2 += tl.where(unit > _threshold(low, span, 2, 3), mass, 0.0)
                n2 += tl.where(unit > low, 1, tl.where(unit == low, 1 << 16, 0))
        first = total(m0, THREADS, VEC).to(tl.int32, bitcast=True)
        second = total(m1, THREADS, VEC).to(tl.int32, bitcast=True)
        third = total(m2, THREADS, VEC).to(tl.int32, bitcast=True)
        publish(words_ptr, 0, chunk, tl.where(stage == _COUNT, tl.sum(n0, 0), first), tag)
        publish(words_ptr, 1, chunk, tl.where(stage == _COUNT, tl.sum(n1, 0), second), tag)
        publish(words_ptr, 2, chunk, tl.where(stage == _WEIGH, third, tl.sum(n2, 0)), tag)


@triton.jit
def _narrowed(low, high, threshold, holds):
    """The interval of the lowest unit for which something holds, after one threshold."""
    high = tl.where(holds, tl.minimum(high, threshold), high)
    return tl.where(holds, low, tl.maximum(low, threshold + 1)), high


@triton.jit
def _kth(units, k, low, high):
    """The highest unit in ``[low, high]`` at or above which k of these values are, or low."""
    while low < high:
        middle = (low + (high.to(tl.int64) - low + 1) // 2).to(tl.int32)
        count = tl.sum(tl.where(units >= middle, 1, 0), 0)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle - 1)
    return low


@triton.jit
def _nth_tie(row, chunk, cut, nth, V, CHUNK: tl.constexpr, SHIFT: tl.constexpr):
    """The id of a chunk's nth token at the cut, from 1."""
    index = chunk * CHUNK + tl.arange(0, CHUNK)
    x = read(row, index, index < V, float("nan")).to(tl.float32)
    tie = tl.where((unit_of(x, SHIFT) == cut) & (x == x), 1, 0)
    return tl.min(tl.where((tie == 1) & (tl.cumsum(tie, 0) == nth), index, _BIG), 0)


@triton.jit
def find_cut(
    row, words_ptr, epoch, step, rank, programs, V, top_key, top_k, top_p, units, goal, floor, depth, before,
    after, rate, chunks: tl.constexpr, CHUNK: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr,
    SHIFT: tl.constexpr, JOINT: tl.constexpr, PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Where the filters cut a row, by a search of all programs; ``units`` to ``depth`` are the list's.

    Returns the cut's unit, how many tokens at it are kept, the last one's id (or a higher one that is no
    tie), the mass that is kept, and the step.
    """
    place = tl.arange(0, 64)
    top = unordered(top_key)
    top_unit = top_key >> SHIFT
    share = top_p.to(tl.float64)
    limited = top_k < V
    cut = top_unit
    cut_ties = 0
    cut_id = _BIG
    kept = tl.zeros([], tl.float64)
    low = tl.maximum(floor, depth)
    high = top_unit
    stage = _LAST
    if top_p < 1.0:
        stage = _WEIGH
    if limited:
        stage = _COUNT
        if not JOINT:  # top-p's share is of the first k, whatever min-p leaves of them
            low = tl.where(top_p < 1.0, depth, low)
        low = _kth(units, top_k, low, high)
    while stage != _DONE:
        if (stage == _COUNT) & (low >= high):
            if top_p < 1.0:
                high = top_unit
                stage = _WEIGH if JOINT else _FIRST_K
            else:
                stage = _LAST
        if (stage == _WEIGH) & (low >= high):
            stage = _LAST
        step += 1
        tag = epoch + step
        words = row_words(words_ptr, step)
        span = tl.where((stage == _COUNT) | (stage == _WEIGH), high.to(tl.int64) - low, 0)
        _publish_tails(
            row, words, tag, rank, programs, V, low, span, stage, top, before, after, rate,
            chunks, CHUNK, THREADS, VEC, SHIFT, PROBS, PTX,
        )  # fmt: skip
        first, second, third = settled(words, tag, chunks)
        if stage == _COUNT:
            start = low
            for which in tl.static_range(6):
                word = first if which < 2 else (second if which < 4 else third)
                count = tl.sum((word >> (16 * (which % 2))) & 0xFFFF, 0)
                low, high = _narrowed(low, high, _threshold(start, span, which, 6), count < top_k)
        else:
            if stage == _WEIGH:
                start = low
                for which in tl.static_range(3):
                    word = first if which == 0 else (second if which == 1 else third)
                    mass = tl.sum(as_float(word), 0).to(tl.float64)
                    low, high = _narrowed(low, high, _threshold(start, span, which, 3), mass < goal)
                low = tl.minimum(low, high)  # if rounding orders two sums the other way
            else:
                mass_above = tl.sum(as_float(first), 0).to(tl.float64)
                ties = third >> 16
                all_ties = tl.sum(ties, 0)
                each = mass_of(value_of(low, SHIFT), top, before, after, rate, PROBS, PTX).to(tl.float64)
                cut_ties = tl.minimum(all_ties, top_k - tl.sum(third & 0xFFFF, 0))
                if stage == _FIRST_K:
                    goal = share * (mass_above + cut_ties.to(tl.float64) * each)
                    low = tl.maximum(low, floor)
                    stage = _WEIGH
                else:
                    cut = low
                    if (top_p < 1.0) & (each > 0.0):  # a tie is kept if less than the goal is before it
                        room = tl.maximum(tl.ceil((goal - mass_above) / each), 1.0)
                        cut_ties = tl.minimum(cut_ties.to(tl.float64), room).to(tl.int32)
                    kept = mass_above + cut_ties.to(tl.float64) * each
                    cut_id = _BIG
                    if cut_ties < all_ties:
                        earlier = tl.cumsum(ties, 0) - ties
                        chunk = tl.max(tl.where(earlier < cut_ties, place, 0), 0)
                        nth = cut_ties - tl.sum(tl.where(place == chunk, earlier, 0), 0)
                        cut_id = _nth_tie(row, chunk, cut, nth, V, CHUNK, SHIFT)
                    stage = _DONE
    return cut, cut_ties, cut_id, kept.to(tl.float32), step


@triton.jit
def rest_of_cut(
    row, words_ptr, epoch, step, rank, programs, V, N, cut, cut_ties, cut_id, tested, coin, top, before,
    after, rate, tokens, rest, left, sibling_ptr, candidates_ptr, chunks: tl.constexpr,
    CHUNK: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr, JUMP: tl.constexpr,
    PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """What a cut row leaves for the bonus: its sum, ``coin``'s chunk, the mass before it; and the step.

    Without the children if they were ``tested``; ``tokens``, ``rest`` and ``left`` are their first block.
    """
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")
    place = tl.arange(0, 64)
    step += 1
    tag = epoch + step
    words = row_words(words_ptr, step)
    for chunk in range(rank, chunks, programs):
        count = tl.zeros([_BLOCK], tl.int32)
        mass = tl.zeros([_BLOCK], tl.float32)
        for start in range(chunk * CHUNK, chunk * CHUNK + CHUNK, _BLOCK):
            index = start + tl.arange(0, _BLOCK)
            x = values(fetch(row, start, index, V, NO_MASS, VEC), row, index, VEC).to(tl.float32)
            unit = unit_of(x, SHIFT)
            count += tl.where(unit == cut, 1, 0)
            above = tl.where(unit > cut, mass_of(x, top, before, after, rate, PROBS, PTX), 0.0)
            if tested:
                above, _ = without(
                    above, start, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, _BLOCK, JUMP, PTX
                )
            mass += above
        ties = tl.sum(count, 0)
        publish(words, 0, chunk, total(mass, THREADS, VEC), tag)
        publish(words, 1, chunk, ties, tag)
        publish(words, 2, chunk, ties, tag)

    # Kept children at the cut, by chunk: whole tokens, so that their mass is not lost in a difference.
    gone = tl.zeros([64], tl.int32)
    more = tl.where(tested, 1, 0)
    while more == 1:
        child_x = read(row, tokens, tokens >= 0, NO_MASS).to(tl.float32)
        at_cut = (tokens >= 0) & (tokens <= cut_id) & (unit_of(child_x, SHIFT) == cut)
        token = tl.min(tl.where(at_cut, tokens, _BIG), 0)
        while token < _BIG:
            gone += tl.where(place == token // CHUNK, 1, 0)
            token = tl.min(tl.where(at_cut & (tokens > token), tokens, _BIG), 0)
        more = tl.where(rest >= 0, 1, 0)
        if more == 1:
            _, tokens, rest, left = siblings(sibling_ptr, candidates_ptr, rest, left, N, V, JUMP)

    masses, ties, _ = settled(words, tag, chunks)
    kept_ties = tl.minimum(tl.maximum(cut_ties - (tl.cumsum(ties, 0) - ties), 0), ties)
    each = mass_of(value_of(cut, SHIFT), top, before, after, rate, PROBS, PTX)
    residual = as_float(masses) + (kept_ties - gone).to(tl.float32) * each
    residual_sum = tl.sum(residual, 0)
    prefix = tl.cumsum(residual, 0)
    over = (prefix.to(tl.float64) > coin.to(tl.float64) * residual_sum.to(tl.float64)) & (residual > 0.0)
    chunk = tl.min(tl.where(over, place, _BIG), 0)
    chunk = tl.where(chunk == _BIG, tl.max(tl.where(residual > 0.0, place, 0), 0), chunk)
    base = tl.sum(tl.where(place == chunk - 1, prefix, 0.0), 0)
    return residual_sum, chunk, base, step
