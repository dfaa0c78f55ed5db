"""How the programs of a request tell each other what they summed: *Co-operation* in :mod:`.verify_tree`.

Device functions only. A row's words are ``[3, 64]`` int64: per chunk its maximum (an ordered key), its sum
and its sum without the children, each 32 bits over a 32-bit tag. They are read as two halves of a warp's 32
lanes, so that no reduction over them leaves a warp.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "all_words",
    "as_float",
    "keys_of",
    "masses_of",
    "publish",
    "row_words",
    "settled",
    "word",
]


@triton.jit
def word(bits, tag):
    """One published word: 32 bits of payload over 32 bits of tag."""
    return (bits.to(tl.int64) << 32) | (tag.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def _words_of(row_words_ptr, half, chunks: tl.constexpr):
    """One half of a row's words, three [32] int64: maxima, sums, sums without the children."""
    lane = tl.arange(0, 32) + half * 32
    inside = lane < chunks
    tops = tl.load(row_words_ptr + lane, mask=inside, other=0, volatile=True)
    sums = tl.load(row_words_ptr + 64 + lane, mask=inside, other=0, volatile=True)
    rests = tl.load(row_words_ptr + 128 + lane, mask=inside, other=0, volatile=True)
    return tops, sums, rests


@triton.jit
def _waiting(tops, sums, rests, half, tag, chunks: tl.constexpr):
    """Nonzero in the lanes of one half whose chunk is not published under ``tag`` yet."""
    stale = (tops.to(tl.int32) ^ tag) | (sums.to(tl.int32) ^ tag) | (rests.to(tl.int32) ^ tag)
    return tl.where((tl.arange(0, 32) + half * 32 < chunks) & (stale != 0), 1, 0)


@triton.jit
def all_words(row_words_ptr, tag, chunks: tl.constexpr, SHARED: tl.constexpr):
    """A row's words, once every chunk is published, in two halves: maxima, sums, sums without the children.

    Of at most 32 chunks the second half is the first again.
    """
    tops, sums, rests = _words_of(row_words_ptr, 0, chunks)
    tops2, sums2, rests2 = tops, sums, rests
    late = _waiting(tops, sums, rests, 0, tag, chunks)
    if chunks > 32:
        tops2, sums2, rests2 = _words_of(row_words_ptr, 1, chunks)
        late = late | _waiting(tops2, sums2, rests2, 1, tag, chunks)
    if SHARED:
        while tl.max(late, 0) == 1:
            tops, sums, rests = _words_of(row_words_ptr, 0, chunks)
            late = _waiting(tops, sums, rests, 0, tag, chunks)
            if chunks > 32:
                tops2, sums2, rests2 = _words_of(row_words_ptr, 1, chunks)
                late = late | _waiting(tops2, sums2, rests2, 1, tag, chunks)
    return tops, sums, rests, tops2, sums2, rests2


@triton.jit
def keys_of(tops, half, chunks: tl.constexpr):
    """The maxima of one half in the order of :func:`ordered`; below all of them in unused lanes."""
    return tl.where(tl.arange(0, 32) + half * 32 < chunks, (tops >> 32).to(tl.int32), -0x80000000)


@triton.jit
def masses_of(words, weight):
    """Float payloads times their chunks' weights; zero in unused lanes, whose words are zero."""
    return (words >> 32).to(tl.int32).to(tl.float32, bitcast=True) * weight


@triton.jit
def row_words(words_ptr, step):
    """Where a step's words are, in a request's two places."""
    return words_ptr + (step & 1) * 192


@triton.jit
def publish(row_words_ptr, KIND: tl.constexpr, chunk, bits, tag):
    """Store one payload, int32 or float32, under a tag."""
    tl.store(row_words_ptr + KIND * 64 + chunk, word(bits.to(tl.int32, bitcast=True), tag))


@triton.jit
def as_float(bits):
    """A float32 payload."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def settled(row_words_ptr, tag, chunks: tl.constexpr):
    """All payloads of a row, once every chunk is published: three [32] int32, 0 beyond the chunks, twice."""
    first, second, third, first2, second2, third2 = all_words(row_words_ptr, tag, chunks, SHARED=True)
    return (
        (first >> 32).to(tl.int32),
        (second >> 32).to(tl.int32),
        (third >> 32).to(tl.int32),
        (first2 >> 32).to(tl.int32),
        (second2 >> 32).to(tl.int32),
        (third2 >> 32).to(tl.int32),
    )
