"""Masses of one chunk of a row: what the sampler computes a softmax from, see :mod:`.verify_tree`.

Device functions only. A chunk is a float32 tensor ``[CHUNK]``. Masses are relative to the chunk's own
maximum; :func:`chunk_weight` makes them relative to the row's. Where T is the temperature, ``rate`` is
``log2(e) / (T * before * after)`` with two powers of two of which at least one is 1, and ``limit`` is 0 if
either is not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.chunk_reductions import block_greatest, thread_greatest
from treeconv.kernels.row_values import read

__all__ = [
    "chunk_mass",
    "chunk_weight",
    "exp2",
    "maximum_key",
    "opaque",
    "ordered",
    "prefetch",
    "scales",
    "slow_mass",
    "thread_key",
    "unordered",
    "unusable",
]


@triton.jit
def ordered(value):
    """Float32 -> int32 with the order of the floats; also its own inverse on bit patterns."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def unordered(key):
    """Inverse of :func:`ordered`."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def exp2(x, PTX: tl.constexpr):
    """2^x; a result below 2^-126 may be flushed to zero."""
    if PTX:
        power = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        power = tl.exp2(x)
    return power


@triton.jit
def thread_key(x, THREADS: tl.constexpr, VEC: tl.constexpr):
    """``[THREADS]``: the maximum of what a thread has of a chunk, NaN aside, as an ordered key."""
    return ordered(thread_greatest(x, THREADS, VEC) + 0.0)  # -0.0 and 0.0 are a tie: one key


@triton.jit
def maximum_key(x, THREADS: tl.constexpr, VEC: tl.constexpr, PTX: tl.constexpr):
    """Maximum of a chunk, NaN aside, as an ordered key: integers reduce across a warp in one instruction."""
    return block_greatest(thread_key(x, THREADS, VEC), PTX)


@triton.jit
def opaque(value, PTX: tl.constexpr):
    """``value``, so that nothing computed from it is moved to before this point (rare paths stay rare)."""
    if PTX:
        value = tl.inline_asm_elementwise(
            "mov.u32 $0, $1;", "=r,r", [value], dtype=tl.int32, is_pure=False, pack=1
        )
    return value


@triton.jit
def prefetch(pointers):
    """Ask for the cache lines at ``pointers`` in L2."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [pointers.to(tl.int64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def scales(temperature):
    """``before``, ``after``, ``rate`` and ``limit`` of a temperature; of 0, which needs none, those of 1."""
    greedy = temperature == 0.0
    before = tl.where(temperature > 1.8446744073709552e19, 1.262177448353619e-29, 1.0)  # 2^64, 2^-96
    after = tl.where(temperature < 5.421010862427522e-20, 7.922816251426434e28, 1.0)  # 2^-64, 2^96
    scaled = tl.where(greedy, 1.0, temperature * before * after)
    rate = tl.div_rn(tl.where(greedy, 1.0, 1.4426950408889634), scaled)  # log2(e) / T
    return before, after, rate, tl.where(before * after == 1.0, 1024.0, 0.0)


@triton.jit
def slow_mass(x, top, before, after, rate, PTX: tl.constexpr):
    """``exp((x - top) / T)`` for any T > 0; of the powers of two ``before`` and ``after`` one is 1."""
    return exp2(((x * before - top * before) * after) * rate, PTX)


@triton.jit
def chunk_mass(x, top, before, after, rate, limit, PTX: tl.constexpr):
    """Masses of a chunk relative to its own maximum, see *Arithmetic*."""
    if tl.abs(top) * rate < limit:
        mass = exp2(tl.fma(x, rate, -(top * rate)), PTX)
    else:
        mass = slow_mass(x, tl.where(top == float("-inf"), 0.0, top), before, after, rate, PTX)
    return mass


@triton.jit
def chunk_weight(chunk_top, top, before, after, rate, limit, PTX: tl.constexpr):
    """What turns masses from :func:`chunk_mass` into masses relative to the row's maximum ``top``."""
    fast = tl.abs(chunk_top) * rate < limit
    exponent = tl.fma(top + tl.zeros_like(chunk_top), -rate, chunk_top * rate)
    return tl.where(fast, exp2(exponent, PTX), slow_mass(chunk_top, top, before, after, rate, PTX))


@triton.jit
def unusable(row, start, V, CHUNK: tl.constexpr, PTX: tl.constexpr):
    """2 if a chunk of logits holds NaN, else 1 if +inf, else 0; reads it again to keep registers free."""
    index = opaque(start, PTX) + tl.arange(0, CHUNK)
    x = read(row, index, index < V, 0.0).to(tl.float32)
    return tl.max(tl.where(x == x, tl.where(x == float("inf"), 1, 0), 2), 0)
