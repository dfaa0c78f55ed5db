"""How the programs of a request tell each other what they summed: *Co-operation* in :mod:`.verify_tree`.

Device functions only. A row's words are ``[3, MAX_CHUNKS]`` int64: three kinds, each one 32-bit payload per
chunk over a 32-bit tag.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.launch import MAX_CHUNKS

__all__ = ["as_float", "first_two", "last_one", "publish", "row_words"]

_PITCH = tl.constexpr(MAX_CHUNKS)


@triton.jit
def row_words(words_ptr, step):
    """Where a step's words are, in a request's two places."""
    return words_ptr + (step & 1) * (3 * _PITCH)


@triton.jit
def publish(words_ptr, KIND: tl.constexpr, chunk, bits, tag):
    """Store one payload, int32 or float32, under a tag."""
    word = (bits.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (tag.to(tl.int64) & 0xFFFFFFFF)
    tl.store(words_ptr + KIND * _PITCH + chunk, word)


@triton.jit
def as_float(bits):
    """A float32 payload."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _late(words, inside, tag):
    return tl.where(inside & (words.to(tl.int32) != tag), 1, 0)


@triton.jit
def first_two(words_ptr, tag, chunks, WORDS: tl.constexpr):
    """The payloads of kinds 0 and 1, once every chunk is published: two [WORDS] int32, 0 beyond the chunks."""
    lane = tl.arange(0, WORDS)
    inside = lane < chunks
    first = tl.load(words_ptr + lane, mask=inside, other=0, volatile=True)
    second = tl.load(words_ptr + _PITCH + lane, mask=inside, other=0, volatile=True)
    while tl.max(_late(first, inside, tag) | _late(second, inside, tag), 0) == 1:
        first = tl.load(words_ptr + lane, mask=inside, other=0, volatile=True)
        second = tl.load(words_ptr + _PITCH + lane, mask=inside, other=0, volatile=True)
    return (first >> 32).to(tl.int32), (second >> 32).to(tl.int32)


@triton.jit
def last_one(words_ptr, tag, chunks, WORDS: tl.constexpr):
    """The same for kind 2."""
    lane = tl.arange(0, WORDS)
    inside = lane < chunks
    third = tl.load(words_ptr + 2 * _PITCH + lane, mask=inside, other=0, volatile=True)
    while tl.max(_late(third, inside, tag), 0) == 1:
        third = tl.load(words_ptr + 2 * _PITCH + lane, mask=inside, other=0, volatile=True)
    return (third >> 32).to(tl.int32)
