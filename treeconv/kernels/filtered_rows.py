"""One step of the walk over a row that top-k, top-p or min-p cut: see :mod:`.verify_tree`.

Device functions only. A row is decided by bounds if they suffice (:mod:`.listed_cuts`), else its cut is
searched for (:mod:`.filter_cuts`). Both are functions of the row's words alone: no other request, and no
number of programs, changes which it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.child_tests import NEVER, first_accepted
from treeconv.kernels.cut_rests import listed_rest, searched_rest
from treeconv.kernels.filter_cuts import find_cut
from treeconv.kernels.listed_cuts import list_largest
from treeconv.kernels.row_chunks import unordered

__all__ = ["decide"]


@triton.jit
def _halves(first, second):
    """Two halves of a row's words, [32] each, as one [64]."""
    return tl.reshape(tl.permute(tl.join(first, second), (1, 0)), [64])


@triton.jit
def decide(
    child_x, nodes, tokens, rest, left, coin, final, tested, row, row_sum, tops, sums, tops2, sums2,
    words_ptr, epoch, step, rank, programs, filtered, top_k, top_p, min_p, greedy, argmax, temperature,
    top_key, before, after, rate, limit, sibling_ptr, candidates_ptr, N, V, chunks: tl.constexpr,
    CHUNK: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr, SHIFT: tl.constexpr,
    FILTERS: tl.constexpr, PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Test the children, if ``tested``, and if none is accepted place the bonus; rows not ``filtered`` too.

    ``tops`` to ``sums2`` are the row's words, in halves.

    Returns the first accepted child, packed with its rank, or ``NEVER``; the last child of positive mass or
    -1; and of a filtered row, if none was accepted, the mass left for the bonus, the chunk where ``final``
    falls, the mass before it there, the cut's unit and highest id; and the step.
    """
    JOINT: tl.constexpr = FILTERS == 2
    top = unordered(top_key)
    exact = 1
    low_sum = row_sum
    high_sum = row_sum
    cut = 0
    cut_ties = 0
    cut_id = 0
    units = tl.zeros([64], tl.int32)
    ties = units
    peaks = tl.zeros([64], tl.float32)
    masses = peaks
    above = peaks
    above_rest = peaks
    goal = tl.zeros([], tl.float64)
    floor = 0
    if filtered:
        exact, cut, cut_id, low_sum, high_sum, units, peaks, masses, goal, floor = list_largest(
            _halves(tops, tops2), _halves(sums, sums2), V, top_key, top_k, top_p, min_p, temperature, before,
            after, rate, limit, chunks, CHUNK, SHIFT, JOINT, PROBS, PTX,
        )  # fmt: skip
    hit = NEVER
    last = -1
    left_sum = 0.0
    chunk = 0
    base = 0.0
    by_bounds = 1
    deciding = 1
    while deciding == 1:  # once, and again if the cut had to be found
        deciding = 0
        hit, last, unsure = first_accepted(
            child_x, nodes, tokens, rest, left, tested, row, coin, low_sum, high_sum, exact, filtered, cut,
            cut_id, greedy, argmax, top, before, after, rate, sibling_ptr, candidates_ptr, N, V, SHIFT,
            PROBS, FILTERS, PTX,
        )  # fmt: skip
        if filtered & (by_bounds == 1) & (hit == NEVER) & (unsure == 0):
            known, left_sum, chunk, base, cut, cut_id = listed_rest(
                row, units, peaks, masses, exact, cut, cut_id, high_sum, tested, final, tokens, rest, left,
                sibling_ptr, candidates_ptr, N, V, CHUNK, SHIFT, PROBS,
            )  # fmt: skip
            unsure = 1 - known
        if unsure == 1:
            cut, cut_ties, cut_id, low_sum, above, above_rest, ties, step = find_cut(
                row, words_ptr, epoch, step, rank, programs, V, N, top_key, top_k, top_p, temperature, units,
                masses, goal, floor, before, after, rate, tokens, rest, left, sibling_ptr, candidates_ptr,
                chunks, CHUNK, THREADS, VEC, SHIFT, JOINT, PROBS, PTX,
            )  # fmt: skip
            high_sum = low_sum
            exact = 1
            by_bounds = 0
            deciding = 1
    if (by_bounds == 0) & (hit == NEVER):
        left_sum, chunk, base = searched_rest(
            row, above, above_rest, ties, cut, cut_ties, cut_id, tested, final, top, before, after, rate,
            tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK, SHIFT, PROBS, PTX,
        )  # fmt: skip
    return hit, last, left_sum, chunk, base, cut, cut_id, step
