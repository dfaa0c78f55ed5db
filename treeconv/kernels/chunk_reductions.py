"""A chunk to one number: along each thread's vectors, over its vectors, then over the program's four warps.

Device functions only. Across warps Triton reduces in two trips through shared memory, with three barriers.
With ``PTX`` it is one trip, for up to four numbers at once: each warp's are stored, and every thread reads
those of all four warps.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "block_greatest",
    "block_least",
    "by_vector",
    "chunk_count",
    "chunk_greatest",
    "chunk_least",
    "chunk_total",
    "thread_greatest",
    "thread_total",
    "warp_greatest",
    "warp_numbers",
]


def _over_lanes(name: str, kind: str) -> str:
    """PTX: a number of each of a warp's lanes to one: a "sum" of float32, or "add", "max", "min" of int32."""
    if kind != "sum":
        return f"redux.sync.{kind}.s32 {name}, {name}, 0xffffffff;"
    return "".join(
        f"shfl.sync.bfly.b32 other, {name}, {lanes}, 31, 0xffffffff; add.f32 {name}, {name}, other;"
        for lanes in (16, 8, 4, 2, 1)
    )


def _meet(*kinds: str) -> str:
    """PTX: one to four numbers a thread, from $1 on, to one a warp, each warp's at the address after them.

    A warp has 16 bytes there. A kind is as for :func:`_over_lanes`, or empty where the lanes agree. The
    first barrier is for who still reads what was left here last.
    """
    names = "abcd"[: len(kinds)]
    moves = " ".join(f"mov.b32 {name}, ${place};" for place, name in enumerate(names, start=1))
    within = " ".join(_over_lanes(name, kind) for name, kind in zip(names, kinds, strict=True) if kind)
    return f"""{{
    .reg .pred first;
    .reg .b32 thread, lane, slot, other, a, b, c, d;
    {moves}
    {within}
    mov.u32 thread, %tid.x;
    and.b32 lane, thread, 31;
    setp.eq.u32 first, lane, 0;
    shr.u32 slot, thread, 5;
    mad.lo.u32 slot, slot, 16, ${len(kinds) + 1};
    bar.sync 0;
    @first st.shared.v4.b32 [slot], {{a, b, c, d}};
    bar.sync 0;
    mov.u32 $0, 0;
}}"""


def _tell(*kinds: str) -> str:
    """PTX: what :func:`_meet` left at the address that comes last, over the warps."""
    text = "{ .reg .b32 " + ", ".join(f"{name}{warp}" for name in "abcd" for warp in range(4)) + ";\n"
    for warp in range(4):
        registers = ", ".join(f"{name}{warp}" for name in "abcd")
        text += f"ld.shared.v4.b32 {{{registers}}}, [${len(kinds)} + {16 * warp}];\n"
    for place, (name, kind) in enumerate(zip("abcd", kinds, strict=False)):
        op = "add.f32" if kind == "sum" else f"{kind}.s32"
        text += f"{op} {name}0, {name}0, {name}2; {op} {name}1, {name}1, {name}3;"
        text += f"{op} ${place}, {name}0, {name}1;\n"
    return text + "}"


def _both(*kinds: str) -> tuple[tl.constexpr, tl.constexpr]:
    return tl.constexpr(_meet(*kinds)), tl.constexpr(_tell(*kinds))


_MEET_SUM, _TELL_SUM = _both("sum")
_MEET_COUNT, _TELL_COUNT = _both("add")
_MEET_MAX, _TELL_MAX = _both("max")
_MEET_MIN, _TELL_MIN = _both("min")
_MEET_WARPS = tl.constexpr(_meet("", "", "sum", "sum"))
_TELL_WARPS = tl.constexpr(
    "".join(
        f"ld.shared.v4.b32 {{${warp}, ${4 + warp}, ${8 + warp}, ${12 + warp}}}, [$16 + {16 * warp}];\n"
        for warp in range(4)
    )
)


@triton.jit
def _box():
    """The address of 64 bytes of shared memory, each call site's its own."""
    return tl.inline_asm_elementwise(
        "{ .shared .align 16 .b8 box[64]; mov.u32 $0, box; }",
        "=r,r",
        [tl.zeros([], tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _one(x, MEET: tl.constexpr, TELL: tl.constexpr):
    """``[THREADS]`` int32, one a thread, to one."""
    box = _box()
    tl.inline_asm_elementwise(MEET, "=r,r,r", [x, box], dtype=tl.int32, is_pure=False, pack=1)
    return tl.inline_asm_elementwise(TELL, "=r,r", [box], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def block_greatest(x, PTX: tl.constexpr):
    """The maximum of ``[THREADS]`` int32, one a thread."""
    if PTX:
        most = _one(x, _MEET_MAX, _TELL_MAX)
    else:
        most = tl.max(x, 0)
    return most


@triton.jit
def block_least(x, PTX: tl.constexpr):
    """The minimum of ``[THREADS]`` int32, one a thread."""
    if PTX:
        least = _one(x, _MEET_MIN, _TELL_MIN)
    else:
        least = tl.min(x, 0)
    return least


@triton.jit
def warp_greatest(x, THREADS: tl.constexpr, PTX: tl.constexpr):
    """The maximum over each thread's warp of ``[THREADS]`` int32, one a thread."""
    if PTX:
        most = tl.inline_asm_elementwise(
            "redux.sync.max.s32 $0, $1, 0xffffffff;", "=r,r", [x], dtype=tl.int32, is_pure=False, pack=1
        )
    else:
        most = tl.max(tl.reshape(x, [THREADS // 32, 32]), 1)
        most = tl.reshape(tl.broadcast_to(most[:, None], [THREADS // 32, 32]), [THREADS])
    return most


@triton.jit
def warp_numbers(key, shift, x, y):
    """PTX: the numbers of all four warps, of ``[THREADS]`` each.

    ``key`` (int32) and ``shift`` (float32) are such that a warp's lanes agree; ``x`` and ``y`` (float32) are
    summed over them. Returns the four keys, the four shifts, the sums of ``x`` and those of ``y``.
    """
    box = _box()
    tl.inline_asm_elementwise(
        _MEET_WARPS, "=r,r,f,f,f,r", [key, shift, x, y, box], dtype=tl.int32, is_pure=False, pack=1
    )
    return tl.inline_asm_elementwise(
        _TELL_WARPS,
        "=&r,=&r,=&r,=&r,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r",
        [box],
        dtype=(
            tl.int32, tl.int32, tl.int32, tl.int32, tl.float32, tl.float32, tl.float32, tl.float32,
            tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32, tl.float32,
        ),
        is_pure=False,
        pack=1,
    )  # fmt: skip


@triton.jit
def by_vector(x, THREADS: tl.constexpr, VEC: tl.constexpr):
    """A chunk as ``[vectors of a thread, THREADS, VEC]``, the way it lies in registers."""
    return tl.reshape(x, [x.shape[0] // (THREADS * VEC), THREADS, VEC])


@triton.jit
def thread_total(x, THREADS: tl.constexpr, VEC: tl.constexpr):
    """A chunk to ``[THREADS]``, the sum of what each thread has."""
    return tl.sum(tl.sum(by_vector(x, THREADS, VEC), 2), 0)


@triton.jit
def thread_greatest(x, THREADS: tl.constexpr, VEC: tl.constexpr):
    """A chunk to ``[THREADS]``, the maximum of what each thread has, NaN aside."""
    return tl.max(tl.max(by_vector(x, THREADS, VEC), 2), 0)


@triton.jit
def chunk_total(x, THREADS: tl.constexpr, VEC: tl.constexpr, PTX: tl.constexpr):
    """The sum of float32 masses."""
    x = thread_total(x, THREADS, VEC)
    if PTX:
        bits = _one(x.to(tl.int32, bitcast=True), _MEET_SUM, _TELL_SUM)
        total = bits.to(tl.float32, bitcast=True)
    else:
        total = tl.sum(x, 0)
    return total


@triton.jit
def chunk_count(x, THREADS: tl.constexpr, VEC: tl.constexpr, PTX: tl.constexpr):
    """The sum of int32 counts."""
    x = thread_total(x, THREADS, VEC)
    if PTX:
        count = _one(x, _MEET_COUNT, _TELL_COUNT)
    else:
        count = tl.sum(x, 0)
    return count


@triton.jit
def chunk_greatest(x, THREADS: tl.constexpr, VEC: tl.constexpr, PTX: tl.constexpr):
    """The maximum of int32 numbers."""
    return block_greatest(thread_greatest(x, THREADS, VEC), PTX)


@triton.jit
def chunk_least(x, THREADS: tl.constexpr, VEC: tl.constexpr, PTX: tl.constexpr):
    """The minimum of int32 numbers."""
    return block_least(tl.min(tl.min(by_vector(x, THREADS, VEC), 2), 0), PTX)
