"""The bonus: where in a chunk the running sum of the residual passes its goal, see :mod:`.verify_tree`.

Device functions only.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.filter_cuts import is_kept
from treeconv.kernels.row_chunks import chunk_mass
from treeconv.kernels.sibling_lists import without

__all__ = ["draw_bonus"]

_BIG = tl.constexpr(1 << 30)  # above every token


@triton.jit
def _residual(
    row_ptr, start, V, chunk_top, before, after, rate, limit, filtered, cut, cut_id, tested, tokens, rest, left,
    sibling_ptr, candidates_ptr, low_bytes, high_bytes, low, high, low_token, high_token, N, WIDTH: tl.constexpr, SHIFT: tl.constexpr,
    JUMP: tl.constexpr, PROBS: tl.constexpr, FILTERS: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """Masses of tokens ``start ..`` relative to their chunk's maximum, without what was cut or rejected."""
    index = start + tl.arange(0, WIDTH)
    x = tl.load(row_ptr + index, mask=index < V, other=0.0 if PROBS else float("-inf")).to(tl.float32)
    mass = x
    if not PROBS:
        mass = chunk_mass(x, chunk_top, before, after, rate, limit, PTX)
    if FILTERS:
        mass = tl.where(is_kept(x, index, cut, cut_id, SHIFT) | (not filtered), mass, 0.0)
    if tested:
        mass, _ = without(
            mass, start, tokens, rest, left, sibling_ptr, candidates_ptr, low_bytes, high_bytes, low, high, low_token, high_token,
            N, V, WIDTH, JUMP, PTX,
        )  # fmt: skip
    return mass


@triton.jit
def draw_bonus(
    row_ptr, start, V, chunk_top, base, weight, goal, before, after, rate, limit, filtered, cut, cut_id, tested,
    tokens, rest, left, sibling_ptr, candidates_ptr, low_bytes, high_bytes, low, high, low_token, high_token, N, CHUNK: tl.constexpr,
    VEC: tl.constexpr, SHIFT: tl.constexpr, JUMP: tl.constexpr, PROBS: tl.constexpr, FILTERS: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The first token of a chunk whose running sum, ``base + weight * (the chunk's)``, is above the goal.

    Where rounding leaves none, the last token of positive mass. Sums are of vectors, one lane's load each,
    then of the tokens in one; running ones in float64, where taking a summand out again loses nothing.
    """
    mass = _residual(
        row_ptr, start, V, chunk_top, before, after, rate, limit, filtered, cut, cut_id, tested, tokens, rest,
        left, sibling_ptr, candidates_ptr, low_bytes, high_bytes, low, high, low_token, high_token, N, CHUNK, SHIFT, JUMP, PROBS,
        FILTERS, PTX,
    )  # fmt: skip
    blocks: tl.constexpr = CHUNK // (32 * VEC)
    vectors = tl.sum(tl.reshape(mass, [blocks, 32, VEC]), 2).to(tl.float64)
    of_blocks = tl.sum(vectors, 1)
    sums = (tl.cumsum(of_blocks, 0) - of_blocks)[:, None] + tl.cumsum(vectors, 1)
    number = tl.arange(0, blocks)[:, None] * 32 + tl.arange(0, 32)[None, :]
    over = (vectors > 0.0) & (base + weight * sums > goal)
    hit = tl.min(tl.min(tl.where(over, number, _BIG), 1), 0)
    final = tl.max(tl.max(tl.where(vectors > 0.0, number, 0), 1), 0)
    vector = tl.where(hit == _BIG, final, hit)
    earlier = tl.sum(tl.sum(tl.where(number == vector, sums - vectors, 0.0), 1), 0)

    first = start + vector * VEC
    mass = _residual(
        row_ptr, first, V, chunk_top, before, after, rate, limit, filtered, cut, cut_id, tested, tokens, rest,
        left, sibling_ptr, candidates_ptr, low_bytes, high_bytes, low, high, low_token, high_token, N, 32, SHIFT, JUMP, PROBS,
        FILTERS, PTX,
    )  # fmt: skip
    token = first + tl.arange(0, 32)
    positive = (mass > 0.0) & (token < first + VEC)
    sums = earlier + tl.cumsum(mass, 0).to(tl.float64)
    bonus = tl.min(tl.where(positive & (base + weight * sums > goal), token, _BIG), 0)
    return tl.where(bonus == _BIG, tl.max(tl.where(positive, token, 0), 0), bonus)
