"""A filtered row's few largest tokens, passed around and put in order: see :mod:`.filter_cuts`.

Device functions only. Once a threshold is known with at most ``SHORT_LIST`` tokens above it, but all that the
filters can keep, those tokens' ids are published, chunk by chunk: the counts of the round before say where
each chunk's begin. Every program then cuts them, all filters at once. Code that a call runs once costs what
it takes to fetch, and what of it the compiler computes ahead costs every call: loops, where a sort would do.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.filter_units import mass_of, unit_of, value_of
from treeconv.kernels.published_words import publish, word
from treeconv.kernels.row_chunks import opaque
from treeconv.kernels.row_values import fetch, read, values
from treeconv.kernels.sibling_lists import siblings

__all__ = ["SHORT_LIST", "cut_of_list", "kth_unit", "publish_list", "ties_kept"]

SHORT_LIST = tl.constexpr(128)  # tokens: two of the three kinds of words that a place in scratch has room for
_BIG = tl.constexpr(1 << 30)  # above every token
_LOW = tl.constexpr(-0x80000000)  # below every unit


@triton.jit
def kth_unit(units, k, low, high):
    """The highest unit in ``[low, high]`` at or above which k of these are, or low."""
    while low < high:
        middle = (low + (high.to(tl.int64) - low + 1) // 2).to(tl.int32)
        count = tl.sum(tl.where(units >= middle, 1, 0), 0)
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
def _around_cut(
    units, masses, cut, top, before, after, rate, SHIFT: tl.constexpr, PROBS: tl.constexpr, PTX: tl.constexpr
):  # fmt: skip
    """How many tokens of a list are above a unit and their mass, how many at it, and the mass of one."""
    above = tl.where(units > cut, 1, 0)
    mass = tl.sum(tl.where(units > cut, masses, 0.0).to(tl.float64), 0)
    each = mass_of(value_of(cut, SHIFT), top, before, after, rate, PROBS, PTX).to(tl.float64)
    return tl.sum(above, 0), mass, tl.sum(tl.where(units == cut, 1, 0), 0), each


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
    row, words, tag, rank, programs, V, threshold, counts, chunks: tl.constexpr, CHUNK: tl.constexpr,
    THREADS: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Publish the ids of the tokens above ``threshold``; ``counts`` says how many each chunk has.

    Every chunk publishes that it is done, too, so that no program is ahead of another by more than a step.
    """
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")
    place = tl.arange(0, 64)
    for chunk in range(rank, chunks, programs):
        if tl.sum(tl.where(place == chunk, counts, 0), 0) > 0:
            index = chunk * CHUNK + tl.arange(0, CHUNK)
            x = values(fetch(row, chunk * CHUNK, index, V, NO_MASS, VEC), row, index, VEC).to(tl.float32)
            listed = tl.where(unit_of(x, SHIFT) > threshold, 1, 0)
            first = tl.sum(tl.where(place < chunk, counts, 0), 0)
            position = first + _ranks(listed, THREADS, VEC)
            entry = word(opaque(index, PTX), tag)  # opaque: or half of it is computed, and spilled, on every call
            tl.store(words + position, entry, mask=(listed == 1) & (position < SHORT_LIST))
        publish(words, 2, chunk, tl.zeros([], tl.int32), tag)


@triton.jit
def _listed_ids(words, tag, count, chunks: tl.constexpr):
    """The ids that all programs published, [SHORT_LIST] int32, _BIG from ``count`` on."""
    lane = tl.arange(0, SHORT_LIST)
    place = tl.arange(0, 64)
    ids = tl.zeros([SHORT_LIST], tl.int64)
    late = 1
    while late > 0:
        ids = tl.load(words + lane, mask=lane < count, other=0, volatile=True)
        done = tl.load(words + 128 + place, mask=place < chunks, other=0, volatile=True)
        stale = tl.where((lane < count) & (ids.to(tl.int32) != tag), 1, 0)
        late = tl.max(stale, 0) + tl.max(tl.where((place < chunks) & (done.to(tl.int32) != tag), 1, 0), 0)
    return tl.where(lane < count, (ids >> 32).to(tl.int32), _BIG)


@triton.jit
def _are_children(ids, tokens, rest, left, sibling_ptr, candidates_ptr, N, V):
    """1 where an id is a child's; ``tokens``, ``rest`` and ``left`` are the children's first block."""
    child = tl.zeros([SHORT_LIST], tl.int32)
    more = 1
    while more == 1:
        child = tl.maximum(child, tl.max(tl.where(ids[:, None] == tokens[None, :], 1, 0), 1))
        more = tl.where(rest >= 0, 1, 0)
        if more == 1:
            _, tokens, rest, left = siblings(sibling_ptr, candidates_ptr, rest, left, N, V)
    return child


@triton.jit
def _drawn(ids, residual, coin, chunks: tl.constexpr, CHUNK: tl.constexpr):
    """The residual's sum, the chunk on which a coin falls, and the mass before it."""
    residual_sum = tl.sum(residual, 0)
    goal = coin.to(tl.float64) * residual_sum.to(tl.float64)
    low = 0
    high = chunks
    while low < high:  # the first chunk up to which there is more than the goal
        middle = (low + high) // 2
        over = tl.sum(tl.where(ids < (middle + 1) * CHUNK, residual, 0.0), 0).to(tl.float64) > goal
        low = tl.where(over, low, middle + 1)
        high = tl.where(over, middle, high)
    if low == chunks:
        low = tl.max(tl.where(residual > 0.0, ids, 0), 0) // CHUNK
    return residual_sum, low, tl.sum(tl.where(ids < low * CHUNK, residual, 0.0), 0)


@triton.jit
def cut_of_list(
    row, words, tag, count, V, N, top_k, top_p, goal, lowest, floor, highest, tested, coin, top, before,
    after, rate, tokens, rest, left, sibling_ptr, candidates_ptr, chunks: tl.constexpr, CHUNK: tl.constexpr,
    SHIFT: tl.constexpr, JOINT: tl.constexpr, PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The cut, from the ``count`` tokens that were published: all that may be kept, and maybe more.

    Their units are from ``lowest`` to ``highest``, the row's maximum. Returns what
    :func:`~.filter_cuts.find_cut` does, but for the step.
    """
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")
    lane = tl.arange(0, SHORT_LIST)
    inside = lane < count
    ids = _listed_ids(words, tag, count, chunks)
    x = read(row, ids, inside, NO_MASS).to(tl.float32)
    units = tl.where(inside, unit_of(x, SHIFT), _LOW)
    masses = tl.where(inside, mass_of(x, top, before, after, rate, PROBS, PTX), 0.0)
    cut = lowest
    if top_k < V:
        cut = kth_unit(units, top_k, lowest, highest)
        if not JOINT:
            if top_p < 1.0:  # top-p's share is of the first k
                above, above_mass, ties, each = _around_cut(
                    units, masses, cut, top, before, after, rate, SHIFT, PROBS, PTX
                )
                taken = tl.minimum(ties, top_k - above).to(tl.float64)
                goal = top_p.to(tl.float64) * (above_mass + taken * each)
    cut = tl.maximum(cut, floor)
    high = highest
    while cut < high:  # the lowest unit with less than top-p's share above it
        middle = (cut + (high.to(tl.int64) - cut) // 2).to(tl.int32)
        enough = tl.sum(tl.where(units > middle, masses, 0.0).to(tl.float64), 0) >= goal
        cut = tl.where(enough, middle + 1, cut)
        high = tl.where(enough, high, middle)
    above, above_mass, ties, each = _around_cut(
        units, masses, cut, top, before, after, rate, SHIFT, PROBS, PTX
    )
    kept_ties = ties_kept(ties, above, above_mass, each, goal, top_k, top_p)
    cut_id = _BIG
    if kept_ties < ties:
        cut_id = -1
        for _ in range(0, kept_ties):
            cut_id = tl.min(tl.where((units == cut) & (ids > cut_id), ids, _BIG), 0)

    left_in = (units > cut) | ((units == cut) & (ids <= cut_id))
    if tested:
        child = _are_children(ids, tokens, rest, left, sibling_ptr, candidates_ptr, N, V)
        left_in = left_in & (child == 0)
    left_sum, chunk, base = _drawn(ids, tl.where(left_in, masses, 0.0), coin, chunks, CHUNK)
    return cut, cut_id, above_mass + kept_ties.to(tl.float64) * each, left_sum, chunk, base
