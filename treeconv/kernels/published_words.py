"""How the programs of a request tell each other what they summed: *Co-operation* in :mod:`.verify_tree`.

Device functions only. A *place* is ``[192]`` int64. It holds a word of 128 bits for each of at most 64
chunks, three payloads of 32 bits (for a row its maximum as an ordered key, its sum, and its sum without the
children) beside a tag; then, of 64 bits each, the ids of a short list. Words are read as two halves of a
warp's 32 lanes, so that no reduction over them leaves a warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "all_words",
    "as_float",
    "keys_of",
    "list_of",
    "masses_of",
    "place_of",
    "publish",
    "word",
]


@triton.jit
def word(high, low):
    """Two times 32 bits."""
    return (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def publish(place_ptr, chunk, first, second, third, tag, PTX: tl.constexpr):
    """Store a chunk's three payloads, int32 or float32, and their tag, in one store: seen all or none.

    Without ``PTX`` it is two, and whoever sees the second sees the first (as on an x86 host).
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
        tl.store(place_ptr + 2 * chunk, word(second, first))
        tl.store(place_ptr + 2 * chunk + 1, word(tag, third))


@triton.jit
def all_words(place_ptr, tag, chunks: tl.constexpr, PTX: tl.constexpr):
    """All payloads of a place, once every chunk is published: three [32] int32, 0 beyond the chunks, twice.

    One warp waits and tells the others: what every warp reads, every warp waits for. All of the program's
    own stores to the place are seen.
    """
    lane = tl.arange(0, 32)
    inside = lane < chunks
    inside2 = lane + 32 < chunks
    if PTX:
        first, second, third, first2, second2, third2 = tl.inline_asm_elementwise(
            """{
            .reg .pred others, near, far, late, late2; .reg .b32 thread, box, tag; .reg .b32 word<4>, word2_<4>;
            .reg .b64 low, high; .reg .b128 all;
            .shared .align 16 .b8 words[1024];
            bar.sync 0;
            mov.u32 thread, %tid.x;
            shl.b32 box, thread, 4;
            and.b32 box, box, 511;
            mov.u32 tag, words;
            add.u32 box, box, tag;
            setp.ge.u32 others, thread, 32;
            setp.ne.u32 near, $8, 0;
            setp.ne.u32 far, $9, 0;
            @others bra TOLD;
            WAIT:
            ld.relaxed.gpu.global.b128 all, [$6];
            mov.b128 {low, high}, all;
            mov.b64 {word0, word1}, low;
            mov.b64 {word2, word3}, high;
            ld.relaxed.gpu.global.b128 all, [$6 + 512];
            mov.b128 {low, high}, all;
            mov.b64 {word2_0, word2_1}, low;
            mov.b64 {word2_2, word2_3}, high;
            setp.ne.and.u32 late, word3, $7, near;
            setp.ne.and.u32 late2, word2_3, $7, far;
            or.pred late, late, late2;
            vote.sync.any.pred late, late, 0xffffffff;
            @late bra WAIT;
            st.shared.v4.b32 [box], {word0, word1, word2, word3};
            st.shared.v4.b32 [box + 512], {word2_0, word2_1, word2_2, word2_3};
            TOLD:
            bar.sync 0;
            ld.shared.v4.b32 {$0, $1, $2, tag}, [box];
            ld.shared.v4.b32 {$3, $4, $5, tag}, [box + 512];
            }""",
            "=&r,=&r,=&r,=&r,=&r,=&r,l,r,r,r",
            [(place_ptr + 2 * lane).to(tl.int64), tag, inside.to(tl.int32), inside2.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        tl.debug_barrier()
        first, second, third, late = _halves_of(place_ptr, lane, tag, inside)
        first2, second2, third2, late2 = _halves_of(place_ptr, lane + 32, tag, inside2)
        while tl.max(late | late2, 0) == 1:
            first, second, third, late = _halves_of(place_ptr, lane, tag, inside)
            first2, second2, third2, late2 = _halves_of(place_ptr, lane + 32, tag, inside2)
    return (
        tl.where(inside, first, 0),
        tl.where(inside, second, 0),
        tl.where(inside, third, 0),
        tl.where(inside2, first2, 0),
        tl.where(inside2, second2, 0),
        tl.where(inside2, third2, 0),
    )


@triton.jit
def _halves_of(place_ptr, chunk, tag, inside):
    """Some chunks' words in two loads, and 1 where one is not there yet; the half with the tag first."""
    high = tl.load(place_ptr + 2 * chunk + 1, volatile=True)
    low = tl.load(place_ptr + 2 * chunk, volatile=True)
    late = tl.where(inside & ((high >> 32).to(tl.int32) != tag), 1, 0)
    return low.to(tl.int32), (low >> 32).to(tl.int32), high.to(tl.int32), late


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
    return words_ptr + (step & 1) * 192


@triton.jit
def list_of(place_ptr):
    """Where a place's short list is."""
    return place_ptr + 128


@triton.jit
def as_float(bits):
    """A float32 payload."""
    return bits.to(tl.float32, bitcast=True)
