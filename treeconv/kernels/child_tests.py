"""The walk's test of a node's children: see :mod:`.verify_tree`. Device functions only."""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.filter_units import is_kept
from treeconv.kernels.row_chunks import slow_mass
from treeconv.kernels.row_values import read
from treeconv.kernels.sibling_lists import siblings

__all__ = ["NEVER", "first_accepted"]

NEVER = tl.constexpr(1 << 20)  # above every packed (rank among siblings, node)


@triton.jit
def _mass_of_children(
    child_x, tokens, greedy, argmax, top, before, after, rate, PROBS: tl.constexpr, PTX: tl.constexpr
):
    p = child_x.to(tl.float32)
    if not PROBS:
        p = slow_mass(p, top, before, after, rate, PTX)
        p = tl.where(greedy, tl.where(tokens == argmax, 1.0, 0.0), p)
    return p


@triton.jit
def first_accepted(
    child_x, nodes, tokens, rest, left, tested, row, coin, low_sum, high_sum, exact, filtered, cut, cut_id,
    greedy, argmax, top, before, after, rate, sibling_ptr, candidates_ptr, N, V, SHIFT: tl.constexpr,
    PROBS: tl.constexpr, FILTERS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Test a node's children in order, if ``tested``; ``child_x`` to ``left`` are their first block.

    Returns the first accepted one, packed with its rank, or ``NEVER``; the last child of positive mass or
    -1; and whether another outcome is possible, where the row's sum is not ``exact`` but between ``low_sum``
    and ``high_sum``.
    """
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")
    lane = tl.arange(0, 32)
    hit = NEVER
    last = -1
    unsure = 0
    # The first block's sums here, not in the loop: so their shuffles overlap with those of the row's sum.
    p = _mass_of_children(child_x, tokens, greedy, argmax, top, before, after, rate, PROBS, PTX)
    p_high = p
    if FILTERS:
        kept = is_kept(child_x.to(tl.float32), tokens, cut, cut_id, SHIFT) | (not filtered)
        p_high = tl.where(kept | (exact == 0), p, 0.0)
        p = tl.where(kept, p, 0.0)
    prefix = tl.cumsum(p, 0)
    prefix_high = prefix
    if FILTERS:
        prefix_high = tl.cumsum(p_high, 0)
    testing = tl.where(tested, 1, 0)
    while testing == 1:
        packed = (lane << 10) | nodes
        accepts = prefix.to(tl.float64) > coin.to(tl.float64) * high_sum.to(tl.float64)
        hit = tl.min(tl.where((p > 0.0) & accepts, packed, NEVER), 0)
        if FILTERS:
            may = prefix_high.to(tl.float64) > coin.to(tl.float64) * low_sum.to(tl.float64)
            unsure = tl.where(tl.min(tl.where((p_high > 0.0) & may, packed, NEVER), 0) < hit, 1, 0)
        testing = 0
        if (hit == NEVER) & (unsure == 0):
            block_last = tl.max(tl.where(p > 0.0, packed, -1), 0)
            last = tl.where(block_last >= 0, block_last & 0x3FF, last)
            if rest >= 0:
                testing = 1
                acc = tl.gather(prefix, tl.full([32], 31, tl.int32), 0)
                nodes, tokens, rest, left = siblings(sibling_ptr, candidates_ptr, rest, left, N, V)
                child_x = read(row, tokens, tokens >= 0, NO_MASS)
                p = _mass_of_children(child_x, tokens, greedy, argmax, top, before, after, rate, PROBS, PTX)
                if FILTERS:
                    acc_high = tl.gather(prefix_high, tl.full([32], 31, tl.int32), 0)
                    kept = is_kept(child_x.to(tl.float32), tokens, cut, cut_id, SHIFT) | (not filtered)
                    p_high = tl.where(kept | (exact == 0), p, 0.0)
                    p = tl.where(kept, p, 0.0)
                    prefix_high = acc_high + tl.cumsum(p_high, 0)
                prefix = acc + tl.cumsum(p, 0)
    return hit, last, unsure
