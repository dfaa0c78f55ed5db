"""A chunk to one number: along each thread's vectors, over its vectors, then over the program's threads.

Device functions only. Across warps Triton reduces in two trips through shared memory, with three barriers.
With ``PTX`` it is one trip: each warp's number is stored, and every thread reads all four.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["block_greatest", "by_vector", "chunk_count", "chunk_greatest", "chunk_least", "chunk_total"]

_WARPS = tl.constexpr(4)

# The first barrier is for who still reads the numbers of the last reduction here.
_MEET = """{{
    .reg .pred first;
    .reg .b32 thread, lane, slot;
    .reg .b32 mine, other;
    bar.sync 0;
    {within}
    mov.u32 thread, %tid.x;
    and.b32 lane, thread, 31;
    setp.eq.u32 first, lane, 0;
    shr.u32 slot, thread, 5;
    mad.lo.u32 slot, slot, 4, $2;
    @first st.shared.b32 [slot], mine;
    bar.sync 0;
    mov.u32 $0, 0;
}}"""
_TELL = """{{
    .reg .b32 a, b, c, d;
    ld.shared.v4.b32 {{a, b, c, d}}, [$1];
    {op} a, a, c;
    {op} b, b, d;
    {op} $0, a, b;
}}"""
_SHUFFLES = "mov.b32 mine, $1;" + "".join(
    f" shfl.sync.bfly.b32 other, mine, {lanes}, 31, 0xffffffff; add.f32 mine, mine, other;"
    for lanes in (16, 8, 4, 2, 1)
)
_MEET_SUM = tl.constexpr(_MEET.format(within=_SHUFFLES))
_TELL_SUM = tl.constexpr(_TELL.format(op="add.f32"))
_REDUX = "redux.sync.{op}.s32 mine, $1, 0xffffffff;"
_MEET_COUNT = tl.constexpr(_MEET.format(within=_REDUX.format(op="add")))
_TELL_COUNT = tl.constexpr(_TELL.format(op="add.s32"))
_MEET_MAX = tl.constexpr(_MEET.format(within=_REDUX.format(op="max")))
_TELL_MAX = tl.constexpr(_TELL.format(op="max.s32"))
_MEET_MIN = tl.constexpr(_MEET.format(within=_REDUX.format(op="min")))
_TELL_MIN = tl.constexpr(_TELL.format(op="min.s32"))


@triton.jit
def _across(x, MEET: tl.constexpr, TELL: tl.constexpr):
    """``[THREADS]`` int32, one a thread, to one; each call site has 16 bytes of shared memory of its own."""
    box = tl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 box[16]; mov.u32 $0, box; }",
        "=r,r",
        [tl.zeros([], tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.inline_asm_elementwise(MEET, "=r,r,r", [x, box], dtype=tl.int32, is_pure=False, pack=1)
    return tl.inline_asm_elementwise(TELL, "=r,r", [box], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def block_greatest(x, THREADS: tl.constexpr, PTX: tl.constexpr):
    """The maximum of ``[THREADS]`` int32, one a thread."""
    if PTX and THREADS == 32 * _WARPS:
        most = _across(x, _MEET_MAX, _TELL_MAX)
    else:
        most = tl.max(x, 0)
    return most


@triton.jit
def by_vector(x, THREADS: tl.constexpr, VEC: tl.constexpr):
    """A chunk as ``[vectors of a thread, THREADS, VEC]``, the way it lies in registers."""
    return tl.reshape(x, [x.shape[0] // (THREADS * VEC), THREADS, VEC])


@triton.jit
def chunk_total(x, THREADS: tl.constexpr, VEC: tl.constexpr, PTX: tl.constexpr):
    """The sum of float32 masses."""
    x = tl.sum(tl.sum(by_vector(x, THREADS, VEC), 2), 0)
    if PTX and THREADS == 32 * _WARPS:
        bits = _across(x.to(tl.int32, bitcast=True), _MEET_SUM, _TELL_SUM)
        total = bits.to(tl.float32, bitcast=True)
    else:
        total = tl.sum(x, 0)
    return total


@triton.jit
def chunk_count(x, THREADS: tl.constexpr, VEC: tl.constexpr, PTX: tl.constexpr):
    """The sum of int32 counts."""
    x = tl.sum(tl.sum(by_vector(x, THREADS, VEC), 2), 0)
    if PTX and THREADS == 32 * _WARPS:
        count = _across(x, _MEET_COUNT, _TELL_COUNT)
    else:
        count = tl.sum(x, 0)
    return count


@triton.jit
def chunk_greatest(x, THREADS: tl.constexpr, VEC: tl.constexpr, PTX: tl.constexpr):
    """The maximum of int32 numbers."""
    return block_greatest(tl.max(tl.max(by_vector(x, THREADS, VEC), 2), 0), THREADS, PTX)


@triton.jit
def chunk_least(x, THREADS: tl.constexpr, VEC: tl.constexpr, PTX: tl.constexpr):
    """The minimum of int32 numbers."""
    x = tl.min(tl.min(by_vector(x, THREADS, VEC), 2), 0)
    if PTX and THREADS == 32 * _WARPS:
        least = _across(x, _MEET_MIN, _TELL_MIN)
    else:
        least = tl.min(x, 0)
    return least
