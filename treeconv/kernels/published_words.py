"""How the programs of a request tell each other what they summed: *Co-operation* in :mod:`.verify_tree`.

Device functions only. A *place* is ``[128]`` int64. It holds a word of 128 bits for each of at most 64
chunks: three payloads of 32 bits (of a row its maximum as an ordered key, its sum, and its sum without the
children) and a tag. Words are read as two halves of a warp's 32 lanes, so that no reduction over them leaves
a warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "OWN",
    "PLACE",
    "all_words",
    "as_float",
    "fence",
    "keys_of",
    "masses_of",
    "place_of",
    "publish",
]


PLACE = tl.constexpr(128)  # int64, of a place
OWN = tl.constexpr(5 * 128)  # of a request: two places, and three histograms (:mod:`.unit_histograms`)


@triton.jit
def _word(high, low):
    """Two times 32 bits."""
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def publish(place_ptr, chunk, first, second, third, tag, PTX: tl.constexpr):
    """Store a chunk's three payloads, int32 or float32, and their tag, seen all or none.

    Without ``PTX`` in two stores: whoever sees the second, the tag's, sees the first, as on an x86 host.
    """
    first = first.to(tl.int32, bitcast=True)
    second = second.to(tl.int32, bitcast=True)
    third = third.to(tl.int32, bitcast=True)
    if PTX:
        tl.inline_asm_elementwise(
            """{
            .reg .pred writes; .reg .b32 thread; .reg .b64 low, high; .reg .b128 word;
            mov.u32 thread, %tid.x;
            setp.eq.u32 writes, thread, 0;
            mov.b64 low, {$2, $3};
            mov.b64 high, {$4, $5};
            mov.b128 word, {low, high};
            @writes st.relaxed.gpu.global.b128 [$1], word;
            mov.u32 $0, 0;
            }""",
            "=r,l,r,r,r,r",
            [(place_ptr + 2 * chunk).to(tl.int64), first, second, third, tag],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        tl.store(place_ptr + 2 * chunk, _word(second, first))
        tl.store(place_ptr + 2 * chunk + 1, _word(tag, third))


@triton.jit
def _settled(place_ptr, tag, near, far):
    """Both halves of a place's payloads, six [32] int32, once all words but those switched off are there.

    One warp polls, and hands them on through shared memory: words that every warp of every program reads
    come late to all of them. The first barrier is for who still reads what was handed on last.
    """
    return tl.inline_asm_elementwise(
        """{
        .reg .pred listens, near, far, late, late2;
        .reg .b32 thread, slot, base, a0, a1, a2, a3, b0, b1, b2, b3;
        .reg .b64 low, high;
        .reg .b128 word;
        .shared .align 16 .b8 words[1024];
        bar.sync 0;
        mov.u32 thread, %tid.x;
        shl.b32 slot, thread, 4;
        and.b32 slot, slot, 511;
        mov.u32 base, words;
        add.u32 slot, slot, base;
        setp.ge.u32 listens, thread, 32;
        setp.ne.u32 near, $8, 0;
        setp.ne.u32 far, $9, 0;
        @listens bra TOLD;
        WAIT:
        ld.relaxed.gpu.global.b128 word, [$6];
        mov.b128 {low, high}, word;
        mov.b64 {a0, a1}, low;
        mov.b64 {a2, a3}, high;
        ld.relaxed.gpu.global.b128 word, [$6 + 512];
        mov.b128 {low, high}, word;
        mov.b64 {b0, b1}, low;
        mov.b64 {b2, b3}, high;
        setp.ne.and.u32 late, a3, $7, near;
        setp.ne.and.u32 late2, b3, $7, far;
        or.pred late, late, late2;
        vote.sync.any.pred late, late, 0xffffffff;
        @late bra WAIT;
        st.shared.v4.b32 [slot], {a0, a1, a2, a3};
        st.shared.v4.b32 [slot + 512], {b0, b1, b2, b3};
        TOLD:
        bar.sync 0;
        ld.shared.v4.b32 {$0, $1, $2, a3}, [slot];
        ld.shared.v4.b32 {$3, $4, $5, b3}, [slot + 512];
        }""",
        "=&r,=&r,=&r,=&r,=&r,=&r,l,r,r,r",
        [(place_ptr + 2 * tl.arange(0, 32)).to(tl.int64), tag, near.to(tl.int32), far.to(tl.int32)],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def _seen(place_ptr, chunk, tag, inside):
    """Some words in two loads, the tag's half first: three [32] int32, and 1 where one is not there yet."""
    high = tl.load(place_ptr + 2 * chunk + 1, volatile=True)
    low = tl.load(place_ptr + 2 * chunk, volatile=True)
    late = tl.where(inside & ((high >> 32).to(tl.int32) != tag), 1, 0)
    return low.to(tl.int32), (low >> 32).to(tl.int32), high.to(tl.int32), late


@triton.jit
def all_words(place_ptr, tag, chunks: tl.constexpr, PTX: tl.constexpr):
    """All payloads of a place, once they are published: three [32] int32 a half, 0 beyond the chunks."""
    lane = tl.arange(0, 32)
    near = lane < chunks
    far = lane + 32 < chunks
    if PTX:
        first, second, third, first2, second2, third2 = _settled(place_ptr, tag, near, far)
    else:
        tl.debug_barrier()  # this program's own stores
        first, second, third, late = _seen(place_ptr, lane, tag, near)
        first2, second2, third2, late2 = _seen(place_ptr, lane + 32, tag, far)
        while tl.max(late | late2, 0) == 1:
            first, second, third, late = _seen(place_ptr, lane, tag, near)
            first2, second2, third2, late2 = _seen(place_ptr, lane + 32, tag, far)
    return (
        tl.where(near, first, 0),
        tl.where(near, second, 0),
        tl.where(near, third, 0),
        tl.where(far, first2, 0),
        tl.where(far, second2, 0),
        tl.where(far, third2, 0),
    )


@triton.jit
def keys_of(tops, half, chunks: tl.constexpr):
    """The maxima of one half in the order of :func:`ordered`; below all of them in unused lanes."""
    return tl.where(tl.arange(0, 32) + half * 32 < chunks, tops, -0x80000000)


@triton.jit
def masses_of(sums, weight):
    """Float payloads times their chunks' weights; zero in unused lanes, whose payloads are zero."""
    return as_float(sums) * weight


@triton.jit
def place_of(words_ptr, step):
    """Where a step's words are, in a request's two places."""
    return words_ptr + (step & 1) * PLACE


@triton.jit
def fence(PTX: tl.constexpr):
    """Between what this program stored or added and what it publishes; or what it saw and what it reads."""
    tl.debug_barrier()
    if PTX:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; mov.u32 $0, 0;",
            "=r,r",
            [tl.zeros([], tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def as_float(bits):
    """A float32 payload."""
    return bits.to(tl.float32, bitcast=True)
