"""A filtered row's few largest tokens, passed around and cut by every program: see :mod:`.filter_cuts`.

Device functions only. Once a unit is known at or above which are the k that top-k keeps, or all that other
filters can, and at most ``SHORT_LIST`` tokens in all, these tokens' ids are published: the round that counted
them says where each chunk's begin. Every program then applies all filters to them, without another round.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.filter_units import mass_of, unit_of, value_of
from treeconv.kernels.halves import greatest, least, summed
from treeconv.kernels.published_words import all_words, list_of, publish, word
from treeconv.kernels.row_values import read, whole
from treeconv.kernels.sibling_lists import siblings

__all__ = ["SHORT_LIST", "cut_of_list", "kth_unit", "publish_list", "ties_kept"]

SHORT_LIST = tl.constexpr(64)  # tokens: two halves of a warp's width, as a row's words
_BIG = tl.constexpr(1 << 30)  # above every token
_LOW = tl.constexpr(-0x80000000)  # below every unit


@triton.jit
def kth_unit(units, units2, k, low, high, TWO: tl.constexpr):
    """The highest unit in ``[low, high]`` at or above which k of these values are, or low."""
    while low < high:
        middle = (low + (high.to(tl.int64) - low + 1) // 2).to(tl.int32)
        count = summed(tl.where(units >= middle, 1, 0), tl.where(units2 >= middle, 1, 0), TWO)
        low = tl.where(count >= k, middle, low)
        high = tl.where(count >= k, high, middle - 1)
    return low


@triton.jit
def ties_kept(ties, above, above_mass, each, goal, top_k, top_p):
    """How many of the tokens at a cut are kept, ``each`` of that mass: at least one, if there is any."""
    kept = tl.minimum(ties, top_k - above)
    if (top_p < 1.0) & (each > 0.0):  # a tie is kept if less than the goal is before it
        room = tl.maximum(tl.ceil((goal - above_mass) / each), 1.0)
        kept = tl.minimum(kept.to(tl.float64), room).to(tl.int32)
    return kept


@triton.jit
def _ranks(listed, THREADS: tl.constexpr, VEC: tl.constexpr):
    """Where each of a chunk's listed tokens comes: by thread, and by id within one."""
    each = tl.reshape(listed, [listed.shape[0] // (THREADS * VEC), THREADS, VEC])
    vectors = tl.sum(each, 2)
    threads = tl.sum(vectors, 0)
    before = tl.cumsum(threads, 0) - threads
    before = before[None, :] + tl.cumsum(vectors, 0) - vectors
    return tl.reshape(before[:, :, None] + tl.cumsum(each, 2) - each, [listed.shape[0]])


@triton.jit
def publish_list(
    row, place, tag, rank, programs, V, lowest, counts, counts2, chunks: tl.constexpr, CHUNK: tl.constexpr,
    THREADS: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Publish the ids of the tokens at or above ``lowest``; ``counts`` says how many each chunk has.

    Every chunk publishes that it is done, too, so that no program is ahead of another by more than a step.
    """
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")
    TWO: tl.constexpr = chunks > 32
    lane = tl.arange(0, 32)
    for chunk in range(rank, chunks, programs):
        here = tl.where(lane == chunk, counts, 0)
        if summed(here, tl.where(lane + 32 == chunk, counts2, 0), TWO) > 0:
            index = chunk * CHUNK + tl.arange(0, CHUNK)
            x = whole(row, chunk * CHUNK, V, NO_MASS, CHUNK, VEC)
            listed = tl.where(unit_of(x, SHIFT) >= lowest, 1, 0)
            earlier = tl.where(lane < chunk, counts, 0)
            first = summed(earlier, tl.where(lane + 32 < chunk, counts2, 0), TWO)
            position = first + _ranks(listed, THREADS, VEC)
            tl.store(
                list_of(place) + position, word(index, tag), mask=(listed == 1) & (position < SHORT_LIST)
            )
        nothing = tl.zeros([], tl.int32)
        publish(place, chunk, nothing, nothing, nothing, tag, PTX)


@triton.jit
def _listed_ids(place, tag, count, chunks: tl.constexpr, PTX: tl.constexpr):
    """The ids that all programs published, in halves; _BIG from ``count`` on."""
    lane = tl.arange(0, 32)
    ids = tl.zeros([32], tl.int64)
    ids2 = ids
    all_words(place, tag, chunks, PTX)
    late = 1
    while late == 1:
        ids = tl.load(list_of(place) + lane, mask=lane < count, other=0, volatile=True)
        ids2 = tl.load(list_of(place) + 32 + lane, mask=lane + 32 < count, other=0, volatile=True)
        stale = (lane < count) & (ids.to(tl.int32) != tag)
        stale = stale | ((lane + 32 < count) & (ids2.to(tl.int32) != tag))
        late = tl.max(tl.where(stale, 1, 0), 0)
    ids = tl.where(lane < count, (ids >> 32).to(tl.int32), _BIG)
    return ids, tl.where(lane + 32 < count, (ids2 >> 32).to(tl.int32), _BIG)


@triton.jit
def _mass_above(units, units2, masses, masses2, unit):
    """The mass of the listed tokens above a unit, in float64."""
    above = tl.where(units > unit, masses, 0.0).to(tl.float64)
    return summed(above, tl.where(units2 > unit, masses2, 0.0).to(tl.float64), TWO=True)


@triton.jit
def _around_cut(
    units, units2, masses, masses2, cut, top, before, after, rate, SHIFT: tl.constexpr, PROBS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """How many listed tokens are above a unit and at it, the mass above it, and the mass of one at it."""
    above = summed(tl.where(units > cut, 1, 0), tl.where(units2 > cut, 1, 0), TWO=True)
    ties = summed(tl.where(units == cut, 1, 0), tl.where(units2 == cut, 1, 0), TWO=True)
    each = mass_of(value_of(cut, SHIFT), top, before, after, rate, PROBS, PTX).to(tl.float64)
    return above, ties, _mass_above(units, units2, masses, masses2, cut), each


@triton.jit
def _drawn(ids, ids2, residual, residual2, coin, chunks: tl.constexpr, CHUNK: tl.constexpr):
    """The residual's sum, the chunk on which a coin falls, and the mass before it."""
    residual_sum = summed(residual, residual2, TWO=True)
    goal = coin.to(tl.float64) * residual_sum.to(tl.float64)
    low = 0
    high = chunks
    while low < high:  # the first chunk up to which there is more than the goal
        middle = (low + high) // 2
        end = (middle + 1) * CHUNK
        mass = summed(tl.where(ids < end, residual, 0.0), tl.where(ids2 < end, residual2, 0.0), TWO=True)
        over = mass.to(tl.float64) > goal
        low = tl.where(over, low, middle + 1)
        high = tl.where(over, middle, high)
    if low == chunks:
        last = greatest(tl.where(residual > 0.0, ids, 0), tl.where(residual2 > 0.0, ids2, 0), TWO=True)
        low = last // CHUNK
    start = low * CHUNK
    before = summed(tl.where(ids < start, residual, 0.0), tl.where(ids2 < start, residual2, 0.0), TWO=True)
    return residual_sum, low, before


@triton.jit
def cut_of_list(
    row, place, tag, count, V, N, top_k, top_p, goal, lowest, floor, highest, tested, coin, top, before,
    after, rate, tokens, rest, left, sibling_ptr, candidates_ptr, chunks: tl.constexpr, CHUNK: tl.constexpr,
    SHIFT: tl.constexpr, JOINT: tl.constexpr, PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The cut, from the ``count`` tokens that were published: all that can be kept, and maybe more.

    Their units are from ``lowest`` to ``highest``, the row's maximum. Returns what
    :func:`~.filter_cuts.find_cut` does, but for the step.
    """
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")
    lane = tl.arange(0, 32)
    ids, ids2 = _listed_ids(place, tag, count, chunks, PTX)
    inside = lane < count
    inside2 = lane + 32 < count
    x = read(row, ids, inside, NO_MASS).to(tl.float32)
    x2 = read(row, ids2, inside2, NO_MASS).to(tl.float32)
    units = tl.where(inside, unit_of(x, SHIFT), _LOW)
    units2 = tl.where(inside2, unit_of(x2, SHIFT), _LOW)
    masses = tl.where(inside, mass_of(x, top, before, after, rate, PROBS, PTX), 0.0)
    masses2 = tl.where(inside2, mass_of(x2, top, before, after, rate, PROBS, PTX), 0.0)
    cut = kth_unit(units, units2, top_k, lowest, highest, TWO=True)
    if not JOINT:
        if top_p < 1.0:  # top-p's share is of the first k
            above, ties, above_mass, each = _around_cut(
                units, units2, masses, masses2, cut, top, before, after, rate, SHIFT, PROBS, PTX
            )
            taken = tl.minimum(ties, top_k - above).to(tl.float64)
            goal = top_p.to(tl.float64) * (above_mass + taken * each)
    cut = tl.maximum(cut, floor)
    high = highest
    while cut < high:  # the lowest unit with less than top-p's share above it
        middle = (cut + (high.to(tl.int64) - cut) // 2).to(tl.int32)
        enough = _mass_above(units, units2, masses, masses2, middle) >= goal
        cut = tl.where(enough, middle + 1, cut)
        high = tl.where(enough, high, middle)
    above, ties, above_mass, each = _around_cut(
        units, units2, masses, masses2, cut, top, before, after, rate, SHIFT, PROBS, PTX
    )
    kept_ties = ties_kept(ties, above, above_mass, each, goal, top_k, top_p)
    cut_id = _BIG
    if kept_ties < ties:
        cut_id = -1
        for _ in range(kept_ties):
            behind = tl.where((units == cut) & (ids > cut_id), ids, _BIG)
            cut_id = least(behind, tl.where((units2 == cut) & (ids2 > cut_id), ids2, _BIG), TWO=True)

    kept = (units > cut) | ((units == cut) & (ids <= cut_id))
    kept2 = (units2 > cut) | ((units2 == cut) & (ids2 <= cut_id))
    more = tl.where(tested, 1, 0)
    while more == 1:
        token = tl.min(tl.where(tokens >= 0, tokens, _BIG), 0)
        while token < _BIG:
            kept = kept & (ids != token)
            kept2 = kept2 & (ids2 != token)
            token = tl.min(tl.where(tokens > token, tokens, _BIG), 0)
        more = tl.where(rest >= 0, 1, 0)
        if more == 1:
            _, tokens, rest, left = siblings(sibling_ptr, candidates_ptr, rest, left, N, V)
    residual_sum, chunk, base = _drawn(
        ids, ids2, tl.where(kept, masses, 0.0), tl.where(kept2, masses2, 0.0), coin, chunks, CHUNK
    )
    return cut, cut_id, above_mass + kept_ties.to(tl.float64) * each, residual_sum, chunk, base
