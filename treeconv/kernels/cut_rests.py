"""What a row that filters cut leaves for the bonus: see :mod:`.verify_tree`. Device functions only.

All of it follows from published words. The tested children are taken out as whole tokens, so that their mass
is not lost in a difference of sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.filter_units import is_kept, mass_of, unit_of, value_of
from treeconv.kernels.halves import before_each, drawn, greatest, least, summed
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
    """Per chunk, in halves, how many tested children are kept; if ``AT``, of those at the cut."""
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")
    lane = tl.arange(0, 32)
    count = tl.zeros([32], tl.int32)
    count2 = count
    more = tl.where(tested, 1, 0)
    while more == 1:
        x = read(row, tokens, tokens >= 0, NO_MASS).to(tl.float32)
        kept = (tokens >= 0) & is_kept(x, tokens, cut, cut_id, SHIFT)
        if AT:
            kept = kept & (unit_of(x, SHIFT) == cut)
        token = tl.min(tl.where(kept, tokens, _BIG), 0)
        while token < _BIG:
            count += tl.where(lane == token // CHUNK, 1, 0)
            count2 += tl.where(lane + 32 == token // CHUNK, 1, 0)
            token = tl.min(tl.where(kept & (tokens > token), tokens, _BIG), 0)
        more = tl.where(rest >= 0, 1, 0)
        if more == 1:
            _, tokens, rest, left = siblings(sibling_ptr, candidates_ptr, rest, left, N, V)
    return count, count2


@triton.jit
def searched_rest(
    row, above, above2, above_rest, above_rest2, ties, ties2, cut, cut_ties, cut_id, tested, coin, top,
    before, after, rate, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK: tl.constexpr,
    SHIFT: tl.constexpr, PROBS: tl.constexpr, TWO: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """What is left of a row whose cut a search found, without ``tested`` children.

    In halves, per chunk: ``above`` is the mass above the cut, ``above_rest`` the same without the children,
    ``ties`` how many tokens are at it. Of those, ``cut_ties`` are kept, up to ``cut_id``. ``tokens``,
    ``rest`` and ``left`` are the children's first block. Returns the mass that is left, ``coin``'s chunk and
    the mass before it there.
    """
    gone, gone2 = _kept_children(
        row, tested, cut, cut_id, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK, SHIFT,
        PROBS, AT=True,
    )  # fmt: skip
    earlier, earlier2 = before_each(ties, ties2)
    kept_ties = tl.minimum(tl.maximum(cut_ties - earlier, 0), ties) - gone
    kept_ties2 = tl.minimum(tl.maximum(cut_ties - earlier2, 0), ties2) - gone2
    each = mass_of(value_of(cut, SHIFT), top, before, after, rate, PROBS, PTX)
    residual = tl.where(tested, above_rest, above) + kept_ties.to(tl.float32) * each
    residual2 = tl.where(tested, above_rest2, above2) + kept_ties2.to(tl.float32) * each
    return drawn(residual, residual2, coin, TWO)


@triton.jit
def listed_rest(
    row, units, units2, peaks, peaks2, masses, masses2, found, cut, cut_id, high_sum, tested, coin, tokens,
    rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK: tl.constexpr, SHIFT: tl.constexpr,
    PROBS: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """The same from what :func:`~.listed_cuts.list_largest` was given and returned, as far as it tells.

    Returns whether the bonus is known; the mass that is left, as far as it matters; ``coin``'s chunk and the
    mass before it there; and the cut to draw under: the row's if that was ``found``, else one that leaves
    the largest token alone.
    """
    lane = tl.arange(0, 32)
    gone, gone2 = _kept_children(  # a listed token is its chunk's maximum
        row, tested, cut, cut_id, tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK, SHIFT,
        PROBS, AT=False,
    )  # fmt: skip
    listed = ((units > cut) | ((units == cut) & (lane * CHUNK <= cut_id))) & (gone == 0)
    listed2 = ((units2 > cut) | ((units2 == cut) & ((lane + 32) * CHUNK <= cut_id))) & (gone2 == 0)
    residual_sum, chunk, base = drawn(tl.where(listed, peaks, 0.0), tl.where(listed2, peaks2, 0.0), coin, TWO)
    known = found
    if found == 0:  # the largest token, if the coin falls on it however much else is kept, and wherever
        largest = greatest(units, units2, TWO)
        chunk = least(
            tl.where(units == largest, lane, _BIG), tl.where(units2 == largest, lane + 32, _BIG), TWO
        )
        here = lane == chunk
        here2 = lane + 32 == chunk
        peak = summed(tl.where(here, peaks, 0.0), tl.where(here2, peaks2, 0.0), TWO).to(tl.float64)
        others = tl.maximum(masses - peaks, 0.0) + masses * SUM_SLACK
        others2 = tl.maximum(masses2 - peaks2, 0.0) + masses2 * SUM_SLACK
        ahead = summed(
            tl.where(lane < chunk, masses, tl.where(here, others, 0.0)),
            tl.where(lane + 32 < chunk, masses2, tl.where(here2, others2, 0.0)),
            TWO,
        ).to(tl.float64)
        at_least = coin.to(tl.float64) * peak * (1.0 - SUM_SLACK)
        at_most = coin.to(tl.float64) * high_sum.to(tl.float64)
        inside = (at_least > ahead * (1.0 + SUM_SLACK)) & (at_most < peak * (1.0 - SUM_SLACK))
        there = summed(tl.where(here & listed, 1, 0), tl.where(here2 & listed2, 1, 0), TWO) == 1
        known = tl.where(inside & there, 1, 0)
        cut = tl.where(known == 1, largest, cut)
        cut_id = tl.where(known == 1, _BIG, cut_id)
        residual_sum = tl.where(known == 1, peak.to(tl.float32), residual_sum)
        base = tl.where(known == 1, 0.0, base)
    return known, residual_sum, chunk, base, cut, cut_id
