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
def word(bits, tag):
    """32 bits of payload over 32 bits of tag."""
    return (bits.to(tl.int64) << 32) | (tag.to(tl.int64) & 0xFFFFFFFF)


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
        tl.store(place_ptr + 2 * chunk + 1, word(third, tag))


@triton.jit
def _words_of(place_ptr, half, tag, chunks: tl.constexpr, PTX: tl.constexpr):
    """One half of a place's words: three [32] int32, 0 beyond the chunks, and 1 where one is not there yet."""
    lane = tl.arange(0, 32) + half * 32
    pointers = place_ptr + 2 * lane
    if PTX:
        first, second, third, tags = tl.inline_asm_elementwise(
            """{
            .reg .b64 low, high; .reg .b128 word;
            ld.relaxed.gpu.global.b128 word, [$4];
            mov.b128 {low, high}, word;
            mov.b64 {$0, $1}, low;
            mov.b64 {$2, $3}, high;
            }""",
            "=r,=r,=r,=r,l",
            [pointers.to(tl.int64)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )
    else:
        high = tl.load(pointers + 1, volatile=True)
        low = tl.load(pointers, volatile=True)
        first, second, third, tags = (
            low.to(tl.int32),
            (low >> 32).to(tl.int32),
            (high >> 32).to(tl.int32),
            high.to(tl.int32),
        )
    inside = lane < chunks
    late = tl.where(inside & (tags != tag), 1, 0)
    return tl.where(inside, first, 0), tl.where(inside, second, 0), tl.where(inside, third, 0), late


@triton.jit
def all_words(place_ptr, tag, chunks: tl.constexpr, SHARED: tl.constexpr, PTX: tl.constexpr):
    """All payloads of a place, once every chunk is published: three [32] int32, 0 beyond the chunks, twice.

    Of at most 32 chunks the second half is the first again.
    """
    first, second, third, late = _words_of(place_ptr, 0, tag, chunks, PTX)
    first2, second2, third2 = first, second, third
    if chunks > 32:
        first2, second2, third2, late2 = _words_of(place_ptr, 1, tag, chunks, PTX)
        late = late | late2
    if SHARED:
        while tl.max(late, 0) == 1:
            first, second, third, late = _words_of(place_ptr, 0, tag, chunks, PTX)
            if chunks > 32:
                first2, second2, third2, late2 = _words_of(place_ptr, 1, tag, chunks, PTX)
                late = late | late2
    return first, second, third, first2, second2, third2


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
