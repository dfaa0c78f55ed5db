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
def _read(pointers, PTX: tl.constexpr):
    """Words as they are in memory now. (Triton's volatile loads are of system scope.)"""
    if PTX:
        words = tl.inline_asm_elementwise(
            "ld.relaxed.gpu.global.b64 $0, [$1];",
            "=l,l",
            [pointers.to(tl.int64)],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )
    else:
        words = tl.load(pointers, volatile=True)
    return words


@triton.jit
def _read_pairs(pointers, PTX: tl.constexpr):
    """Words and their successors."""
    if PTX:
        first, second = tl.inline_asm_elementwise(
            "ld.relaxed.gpu.global.v2.b64 {$0, $1}, [$2];",
            "=l,=l,l",
            [pointers.to(tl.int64)],
            dtype=(tl.int64, tl.int64),
            is_pure=False,
            pack=1,
        )
    else:
        first = tl.load(pointers, volatile=True)
        second = tl.load(pointers + 1, volatile=True)
    return first, second


@triton.jit
def publish(words_ptr, KIND: tl.constexpr, chunk, bits, tag):
    """Store one int32 payload under a tag. Kinds 0 and 1 of a chunk are neighbours."""
    place = 2 * _PITCH + chunk if KIND == 2 else 2 * chunk + KIND
    tl.store(words_ptr + place, _word(bits, tag))


@triton.jit
def as_float(bits):
    """A float32 payload."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def first_two(words_ptr, tag, chunks, WORDS: tl.constexpr, PTX: tl.constexpr):
    """The payloads of kinds 0 and 1, once every chunk is published: two [WORDS] int32, 0 beyond the chunks."""
    lane = tl.arange(0, WORDS)
    pointers = words_ptr + 2 * tl.minimum(lane, chunks - 1)
    first, second = _read_pairs(pointers, PTX)
    while tl.max(tl.where((first.to(tl.int32) != tag) | (second.to(tl.int32) != tag), 1, 0), 0) == 1:
        first, second = _read_pairs(pointers, PTX)
    inside = lane < chunks
    return tl.where(inside, (first >> 32).to(tl.int32), 0), tl.where(inside, (second >> 32).to(tl.int32), 0)


@triton.jit
def last_one(words_ptr, tag, chunks, WORDS: tl.constexpr, PTX: tl.constexpr):
    """The same for kind 2."""
    lane = tl.arange(0, WORDS)
    pointers = words_ptr + 2 * _PITCH + tl.minimum(lane, chunks - 1)
    third = _read(pointers, PTX)
    while tl.max(tl.where(third.to(tl.int32) != tag, 1, 0), 0) == 1:
        third = _read(pointers, PTX)
    return tl.where(lane < chunks, (third >> 32).to(tl.int32), 0)


@triton.jit
def command(order_ptr, tag, operation, first, second, third):
    """Tell the other programs what to do in the step of this tag: four int32."""
    lane = tl.arange(0, 4)
    bits = tl.where(lane < 2, tl.where(lane == 0, operation, first), tl.where(lane == 2, second, third))
    tl.store(order_ptr + lane, _word(bits, tag))


@triton.jit
def order(order_ptr, tag, PTX: tl.constexpr):
    """Wait for the step's command: its operation and arguments."""
    lane = tl.arange(0, 4)
    words = _read(order_ptr + lane, PTX)
    while tl.max(tl.where(words.to(tl.int32) != tag, 1, 0), 0) == 1:
        words = _read(order_ptr + lane, PTX)
    bits = (words >> 32).to(tl.int32)
    operation = tl.sum(tl.where(lane == 0, bits, 0), 0)
    first = tl.sum(tl.where(lane == 1, bits, 0), 0)
    second = tl.sum(tl.where(lane == 2, bits, 0), 0)
    third = tl.sum(tl.where(lane == 3, bits, 0), 0)
    return operation, first, second, third
