"""What a row that filters cut leaves for the bonus: see :mod:`.verify_tree`. Device functions only.

All of it follows from published words. The tested children are taken out as whole tokens, so that their mass
is not lost in a difference of sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.filter_units import is_kept, mass_of, unit_of, value_of
from treeconv.kernels.listed_cuts import SUM_SLACK
from treeconv.kernels.row_values import read
from treeconv.kernels.sibling_lists import siblings

__all__ = ["listed_rest", "searched_rest"]

_BIG = tl.constexpr(1 << 30)  # above every token


@triton.jit
def _kept_children(
    row, tested, cut, cut_id, tokens, rest, left, sibling_ptr, candidates_ptr, N, V,
    CHUNK: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr, AT: tl.constexpr,
):  # fmt: skip
    """Per chunk, how many tested children are kept; if ``AT``, of those at the cut."""
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")
    place = tl.arange(0, 64)
    count = tl.zeros([64], tl.int32)
    more = tl.where(tested, 1, 0)
    while more == 1:
        x = read(row, tokens, tokens >= 0, NO_MASS).to(tl.float32)
        kept = (tokens >= 0) & is_kept(x, tokens, cut, cut_id, SHIFT)
        if AT:
            kept = kept & (unit_of(x, SHIFT) == cut)
        token = tl.min(tl.where(kept, tokens, _BIG), 0)
        while token < _BIG:
            count += tl.where(place == token // CHUNK, 1, 0)
            token = tl.min(tl.where(kept & (tokens > token), tokens, _BIG), 0)
        more = tl.where(rest >= 0, 1, 0)
        if more == 1:
            _, tokens, rest, left = siblings(sibling_ptr, candidates_ptr, rest, left, N, V)
    return count


@triton.jit
def _drawn(residual, coin):
    """A residual's sum, the chunk on which a coin falls, and the mass before it."""
    place = tl.arange(0, 64)
    residual_sum = tl.sum(residual, 0)
    prefix = tl.cumsum(residual, 0)
    over = (prefix.to(tl.float64) > coin.to(tl.float64) * residual_sum.to(tl.float64)) & (residual > 0.0)
    chunk = tl.min(tl.where(over, place, _BIG), 0)
    chunk = tl.where(chunk == _BIG, tl.max(tl.where(residual > 0.0, place, 0), 0), chunk)
    return residual_sum, chunk, tl.sum(tl.where(place == chunk - 1, prefix, 0.0), 0)


@triton.jit
def searched_rest(
    row, above, above_rest, ties, cut, cut_ties, cut_id, tested, coin, top, before, after, rate, tokens, rest,
    left, sibling_ptr, candidates_ptr, N, V, CHUNK: tl.constexpr, SHIFT: tl.constexpr,
    PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """What is left of a row, from what :func:`~.filter_cuts.find_cut` returned, without ``tested`` children.

    ``tokens``, ``rest`` and ``left`` are their first block. Returns the mass that is left, ``coin``'s chunk
    and the mass before it there.
    """
    gone = _kept_children(
        row, tested, cut, cut_id, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK, SHIFT,
        PROBS, AT=True,
    )  # fmt: skip
    kept_ties = tl.minimum(tl.maximum(cut_ties - (tl.cumsum(ties, 0) - ties), 0), ties)
    each = mass_of(value_of(cut, SHIFT), top, before, after, rate, PROBS, PTX)
    residual = tl.where(tested, above_rest, above) + (kept_ties - gone).to(tl.float32) * each
    return _drawn(residual, coin)


@triton.jit
def listed_rest(
    row, units, peaks, masses, found, cut, cut_id, high_sum, tested, coin, tokens, rest, left, sibling_ptr,
    candidates_ptr, N, V, CHUNK: tl.constexpr, SHIFT: tl.constexpr, PROBS: tl.constexpr,
):  # fmt: skip
    """The same from what :func:`~.listed_cuts.list_largest` returned, as far as it tells.

    Returns whether the bonus is known; the mass that is left, as far as it matters; ``coin``'s chunk and the
    mass before it there; and the cut to draw under: the row's if that was ``found``, else one that leaves
    the largest token alone.
    """
    place = tl.arange(0, 64)
    gone = _kept_children(  # a listed token is its chunk's maximum
        row, tested, cut, cut_id, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK, SHIFT,
        PROBS, AT=False,
    )  # fmt: skip
    listed = (units > cut) | ((units == cut) & (place * CHUNK <= cut_id))
    listed = listed & (gone == 0)
    residual_sum, chunk, base = _drawn(tl.where(listed, peaks, 0.0), coin)
    known = found
    if found == 0:  # the largest token, if the coin falls on it however much else is kept, and wherever
        largest = tl.max(units, 0)
        chunk = tl.min(tl.where(units == largest, place, _BIG), 0)
        here = place == chunk
        peak = tl.sum(tl.where(here, peaks, 0.0), 0).to(tl.float64)
        others = tl.maximum(masses - peaks, 0.0) + masses * SUM_SLACK
        ahead = tl.sum(tl.where(place < chunk, masses, tl.where(here, others, 0.0)), 0).to(tl.float64)
        at_least = coin.to(tl.float64) * peak * (1.0 - SUM_SLACK)
        at_most = coin.to(tl.float64) * high_sum.to(tl.float64)
        inside = (at_least > ahead * (1.0 + SUM_SLACK)) & (at_most < peak * (1.0 - SUM_SLACK))
        there = tl.sum(tl.where(here & listed, 1, 0), 0) == 1
        known = tl.where(inside & there, 1, 0)
        cut = tl.where(known == 1, largest, cut)
        cut_id = tl.where(known == 1, _BIG, cut_id)
        residual_sum = tl.where(known == 1, peak.to(tl.float32), residual_sum)
        base = tl.where(known == 1, 0.0, base)
    return known, residual_sum, chunk, base, cut, cut_id
