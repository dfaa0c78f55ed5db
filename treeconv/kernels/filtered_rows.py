"""One step of the walk over a row that top-k, top-p or min-p cut: see :mod:`.verify_tree`.

Device functions only. A row is decided by bounds if they suffice (:mod:`.listed_cuts`), else its cut is
searched for (:mod:`.filter_cuts`). Both are functions of the row's words alone: no other request, and no
number of programs, changes which it is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.child_tests import NEVER, first_accepted
from treeconv.kernels.cut_rests import listed_rest
from treeconv.kernels.filter_cuts import find_cut
from treeconv.kernels.halves import summed
from treeconv.kernels.listed_cuts import limits, list_largest, weighed
from treeconv.kernels.published_words import all_words, place_of
from treeconv.kernels.row_chunks import unordered
from treeconv.kernels.row_values import read
from treeconv.kernels.tree_tables import first_siblings

__all__ = ["decide"]


@triton.jit(noinline=True)
def _searched(
    row, words_ptr, epoch, step, rank, programs, tree, node, coin, final, tested, top_key, top_k, top_p,
    min_p, temperature, before, after, rate, limit, child_ptr, sibling_ptr, candidates_ptr, N, V,
    chunks: tl.constexpr, CHUNK: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr,
    SLOTS: tl.constexpr, SHIFT: tl.constexpr, JOINT: tl.constexpr, FILTERS: tl.constexpr,
    PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """:func:`decide` by a search, of a filtered row; what it returns.

    Not inlined: what a call that searches for nothing would have to keep and to spill for it costs more
    than to read the row's words and ``node``'s children again. Such a function takes scalars alone.
    """
    NO_MASS: tl.constexpr = 0.0 if PROBS else float("-inf")
    tops, sums, _, tops2, sums2, _ = all_words(place_of(words_ptr, step), epoch + step, chunks, PTX)
    top = unordered(top_key)
    units, _, masses = weighed(tops, sums, 0, top, before, after, rate, limit, chunks, SHIFT, PROBS, PTX)
    units2, _, masses2 = weighed(tops2, sums2, 1, top, before, after, rate, limit, chunks, SHIFT, PROBS, PTX)
    row_sum = summed(masses, masses2, chunks > 32)
    goal, floor, _ = limits(row_sum, top, top_p, min_p, temperature, SHIFT, PROBS)
    nodes, tokens, rest, left = first_siblings(
        tree, child_ptr, sibling_ptr, candidates_ptr, node, N, V, SLOTS, PTX
    )
    cut, cut_id, kept, left_sum, chunk, base, step = find_cut(
        row, words_ptr, epoch, step, rank, programs, V, N, top_key, top_k, top_p, temperature, units, units2,
        row_sum, goal, floor, tested, final, before, after, rate, tokens, rest, left, sibling_ptr,
        candidates_ptr, chunks, CHUNK, THREADS, VEC, SHIFT, JOINT, PROBS, PTX,
    )  # fmt: skip
    child_x = read(row, tokens, tokens >= 0, NO_MASS)
    hit, last, _ = first_accepted(
        child_x, nodes, tokens, rest, left, tested, row, coin, kept, kept, exact=1, filtered=True, cut=cut,
        cut_id=cut_id, greedy=False, argmax=0, top=top, before=before, after=after, rate=rate,
        sibling_ptr=sibling_ptr, candidates_ptr=candidates_ptr, N=N, V=V, SHIFT=SHIFT, PROBS=PROBS,
        FILTERS=FILTERS, PTX=PTX,
    )  # fmt: skip
    return hit, last, left_sum, chunk, base, cut, cut_id, step


@triton.jit
def decide(
    tree, node, child_x, nodes, tokens, rest, left, coin, final, tested, row, row_sum, tops, sums, tops2,
    sums2, words_ptr, epoch, step, rank, programs, filtered, top_k, top_p, min_p, greedy, argmax, temperature,
    top_key, before, after, rate, limit, child_ptr, sibling_ptr, candidates_ptr, N, V, chunks: tl.constexpr,
    CHUNK: tl.constexpr, THREADS: tl.constexpr, VEC: tl.constexpr, SLOTS: tl.constexpr, SHIFT: tl.constexpr,
    FILTERS: tl.constexpr, PROBS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Test the children, if ``tested``, and if none is accepted place the bonus; rows not ``filtered`` too.

    ``tops`` to ``sums2`` are the row's words, in halves; ``child_x`` to ``left`` the first block of
    ``node``'s children.

    Returns the first accepted child, packed with its rank, or ``NEVER``; the last child of positive mass or
    -1; and of a filtered row, if none was accepted, the mass left for the bonus, the chunk where ``final``
    falls, the mass before it there, the cut's unit and highest id; and the step.
    """
    JOINT: tl.constexpr = FILTERS == 2
    exact = 1
    low_sum = row_sum
    high_sum = row_sum
    cut = 0
    cut_id = 0
    top = unordered(top_key)
    units, peaks, masses = weighed(tops, sums, 0, top, before, after, rate, limit, chunks, SHIFT, PROBS, PTX)
    units2, peaks2, masses2 = weighed(
        tops2, sums2, 1, top, before, after, rate, limit, chunks, SHIFT, PROBS, PTX
    )
    if filtered:
        exact, cut, cut_id, low_sum, high_sum = list_largest(
            units, units2, peaks, peaks2, masses, masses2, V, top_key, top_k, top_p, min_p, temperature,
            chunks, CHUNK, SHIFT, JOINT, PROBS,
        )  # fmt: skip
    left_sum = 0.0
    chunk = 0
    base = 0.0
    hit, last, unsure = first_accepted(
        child_x, nodes, tokens, rest, left, tested, row, coin, low_sum, high_sum, exact, filtered, cut,
        cut_id, greedy, argmax, top, before, after, rate, sibling_ptr, candidates_ptr, N, V,
        SHIFT, PROBS, FILTERS, PTX,
    )  # fmt: skip
    if filtered & (hit == NEVER) & (unsure == 0):
        known, left_sum, chunk, base, cut, cut_id = listed_rest(
            row, units, units2, peaks, peaks2, masses, masses2, exact, cut, cut_id, high_sum, tested, final,
            tokens, rest, left, sibling_ptr, candidates_ptr, N, V, CHUNK, SHIFT, PROBS, chunks > 32,
        )  # fmt: skip
        unsure = 1 - known
    if unsure == 1:
        hit, last, left_sum, chunk, base, cut, cut_id, step = _searched(
            row, words_ptr, epoch, step, rank, programs, tree, node, coin, final, tested, top_key, top_k,
            top_p, min_p, temperature, before, after, rate, limit, child_ptr, sibling_ptr, candidates_ptr, N,
            V, chunks, CHUNK, THREADS, VEC, SLOTS, SHIFT, JOINT, FILTERS, PROBS, PTX,
        )  # fmt: skip
    return hit, last, left_sum, chunk, base, cut, cut_id, step
