"""How the programs of a request tell each other what they summed: *Co-operation* in :mod:`.verify_tree`.

Device functions only. Words are int64, each a 32-bit payload over a 32-bit tag. A request has three kinds of
``MAX_CHUNKS`` words, one a chunk, which its programs write and the first one reads, and four words of one
memory sector by which that one tells the others what to do next: an operation and three arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from treeconv.kernels.launch import MAX_CHUNKS

__all__ = ["as_float", "command", "first_two", "last_one", "order", "publish"]

_PITCH = tl.constexpr(MAX_CHUNKS)


@triton.jit
def _word(bits, tag):
    return (bits.to(tl.int64) << 32) | (tag.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def publish(words_ptr, KIND: tl.constexpr, chunk, bits, tag):
    """Store one int32 payload under a tag."""
    tl.store(words_ptr + KIND * _PITCH + chunk, _word(bits, tag))


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


@triton.jit
def command(order_ptr, tag, operation, first, second, third):
    """Tell the other programs what to do in the step of this tag: four int32."""
    lane = tl.arange(0, 4)
    bits = tl.where(lane < 2, tl.where(lane == 0, operation, first), tl.where(lane == 2, second, third))
    tl.store(order_ptr + lane, _word(bits, tag))


@triton.jit
def order(order_ptr, tag):
    """Wait for the step's command: its operation and arguments."""
    lane = tl.arange(0, 4)
    words = tl.load(order_ptr + lane, volatile=True)
    while tl.max(tl.where(words.to(tl.int32) != tag, 1, 0), 0) == 1:
        words = tl.load(order_ptr + lane, volatile=True)
    bits = (words >> 32).to(tl.int32)
    operation = tl.sum(tl.where(lane == 0, bits, 0), 0)
    first = tl.sum(tl.where(lane == 1, bits, 0), 0)
    second = tl.sum(tl.where(lane == 2, bits, 0), 0)
    third = tl.sum(tl.where(lane == 3, bits, 0), 0)
    return operation, first, second, third
