"""How many of a row's tokens are in each of 256 bins of an interval of units: see :mod:`.filter_cuts`.

Device functions only. An interval ``[base, high]`` of units is cut into *bins*, numbered from its top: a unit
each where it has 256 or fewer, else evenly in logits (units crowd at zero), else, for probabilities, evenly
in units. Which bin a token is in falls with its unit, and a bin's *edges* are units between which all of its
tokens' surely are.

Each program counts its chunks' tokens in shared memory and adds them to the request's histogram in scratch.
Sums of integers come out alike in any order, so all programs read the same counts, however many they are. A
request has three histograms, which are zero when nobody counts: :func:`clear` says when one may be cleared.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.filter_units import unit_of, value_of
from treeconv.kernels.published_words import PLACE

__all__ = [
    "BINS",
    "PER_LANE",
    "add_chunk",
    "bins_of",
    "clear",
    "cut_up",
    "edges",
    "histogram_of",
    "read_counts",
]

BINS = tl.constexpr(256)
PER_LANE = tl.constexpr(8)  # of a warp that holds them all
_HISTOGRAMS = tl.constexpr(3)
_SPREAD = tl.constexpr(2.0**100)  # logits: heights from its inverse up to it are cut up in float32
_ROUNDING = tl.constexpr(2.0**-21)  # relative: above that of the three steps from a logit to its bin


@triton.jit
def histogram_of(words_ptr, step):
    """Where a step counts: 256 int32, behind a request's places."""
    offset = 2 * PLACE + step % _HISTOGRAMS * (BINS // 2)
    return (words_ptr + offset).to(tl.pointer_type(tl.int32))


@triton.jit
def cut_up(base, high, by_value, SHIFT: tl.constexpr, PROBS: tl.constexpr):
    """How ``[base, high]`` is cut: ``(base, high, bits, rate, wide)``.

    A bin has ``2**bits`` units, or, if ``by_value`` and ``rate`` is not 0, ``wide = 1 / rate`` logits.
    """
    span = high.to(tl.int64) - base
    bits = 0
    while (span >> bits) >= BINS:
        bits += 1
    rate = tl.full([], 0.0, tl.float32)
    wide = tl.full([], 0.0, tl.float64)
    if not PROBS:
        if by_value & (bits > 0):
            height = value_of(high, SHIFT).to(tl.float64) - value_of(base, SHIFT).to(tl.float64)
            even = (height < _SPREAD) & (height > 1.0 / _SPREAD)
            rate = tl.where(even, BINS / height, 0.0).to(tl.float32)
            wide = tl.where(even, 1.0 / rate.to(tl.float64), 0.0)
    return base, high, bits, rate, wide


@triton.jit
def bins_of(x, binning, SHIFT: tl.constexpr, PROBS: tl.constexpr):
    """The bins of logits or probabilities; -1 outside the interval."""
    base, high, bits, rate, _ = binning
    unit = unit_of(x, SHIFT)
    inside = (unit >= base) & (unit <= high)
    which = ((high - unit).to(tl.uint32, bitcast=True) >> bits).to(tl.int32, bitcast=True)
    if not PROBS:
        if rate > 0.0:
            ceiling = value_of(high, SHIFT)
            down = (ceiling - tl.where(inside, x, ceiling)) * rate
            which = tl.minimum(down.to(tl.int32), BINS - 1)
    return tl.where(inside, which, -1)


@triton.jit
def edges(which, binning, SHIFT: tl.constexpr, PROBS: tl.constexpr):
    """Units at or between which those of a bin's tokens are: the lowest, the highest."""
    base, high, bits, rate, wide = binning
    last = high.to(tl.int64) - (which.to(tl.int64) << bits)
    first = last - (tl.full([], 1, tl.int64) << bits) + 1
    if not PROBS:
        if rate > 0.0:
            ceiling = value_of(high, SHIFT).to(tl.float64)
            above = ceiling - which.to(tl.float64) * wide * (1.0 - _ROUNDING)
            below = ceiling - (which + 1).to(tl.float64) * wide * (1.0 + _ROUNDING)
            # A unit to spare: float64 to float32 rounds.
            last = unit_of(above.to(tl.float32), SHIFT).to(tl.int64) + 1
            first = unit_of(below.to(tl.float32), SHIFT).to(tl.int64) - 1
            first = tl.where(which == BINS - 1, base.to(tl.int64), first)
    first = tl.minimum(tl.maximum(first, base.to(tl.int64)), high.to(tl.int64)).to(tl.int32)
    return first, tl.maximum(tl.minimum(last, high.to(tl.int64)), base.to(tl.int64)).to(tl.int32)


@triton.jit
def add_chunk(histogram_ptr, which, THREADS: tl.constexpr, PTX: tl.constexpr):
    """Count a chunk's bins, of :func:`bins_of`; :func:`~.published_words.fence` before it is told."""
    if PTX:
        tl.static_assert(2 * THREADS == BINS)
        counts = tl.inline_asm_elementwise(
            """{
            .shared .align 16 .b8 counts[1024];
            .reg .b32 slot;
            mov.u32 $0, counts;
            mov.u32 slot, %tid.x;
            mad.lo.u32 slot, slot, 8, $0;
            st.shared.v2.b32 [slot], {0, 0};
            bar.sync 0;
            }""",
            "=&r,r",
            [tl.zeros([], tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.inline_asm_elementwise(
            """{
            .reg .pred inside; .reg .b32 slot;
            setp.ge.s32 inside, $1, 0;
            mad.lo.u32 slot, $1, 4, $2;
            @inside red.shared.add.u32 [slot], 1;
            mov.u32 $0, 0;
            }""",
            "=&r,r,r",
            [which, counts],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
        tl.inline_asm_elementwise(
            """{
            .reg .pred some; .reg .b32 thread, slot, a, b; .reg .b64 there;
            mov.u32 thread, %tid.x;
            mad.lo.u32 slot, thread, 8, $1;
            mad.wide.u32 there, thread, 8, $2;
            bar.sync 0;
            ld.shared.v2.b32 {a, b}, [slot];
            setp.ne.u32 some, a, 0;
            @some red.relaxed.gpu.global.add.u32 [there], a;
            setp.ne.u32 some, b, 0;
            @some red.relaxed.gpu.global.add.u32 [there + 4], b;
            mov.u32 $0, 0;
            }""",
            "=&r,r,l",
            [counts, histogram_ptr.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.atomic_add(histogram_ptr + tl.maximum(which, 0), 1, mask=which >= 0)


@triton.jit
def read_counts(histogram_ptr, PTX: tl.constexpr):
    """All counts, once every program has told that it counted, and a fence: eight ``[32]``.

    A lane has eight bins, so that no reduction over them leaves a warp: see :mod:`.halves`.
    """
    pointers = histogram_ptr + tl.arange(0, 32) * PER_LANE
    if PTX:
        counts = tl.inline_asm_elementwise(
            """
            ld.volatile.global.v4.b32 {$0, $1, $2, $3}, [$8];
            ld.volatile.global.v4.b32 {$4, $5, $6, $7}, [$8 + 16];
            """,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,l",
            [pointers.to(tl.int64)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        counts = ()
        for place in tl.static_range(PER_LANE):
            counts += (tl.load(pointers + place, volatile=True),)
    return counts


@triton.jit
def clear(histogram_ptr):
    """For whoever counts there next, who waits for what this program publishes next, after a fence.

    To be called once all programs have published the step after the one that counted: by then all have read.
    """
    tl.store(histogram_ptr + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
