"""What a row says of its tokens: the logit, with the request's bias, and -inf where the node forbids one.

Device functions, and what a launch hands them. A *row* is a tuple ``(row_ptr, bias_ptr, mask_ptr)``: a
node's V logits or probabilities, its request's V biases (float32) and its node's words of 32 tokens each
(xgrammar's layout), the last two None where the launch has none: then nothing of them is compiled. With a
bias or a mask values are float32, as :mod:`treeconv.processors` defines them: the bias is added to the
converted logit, then forbidden tokens are -inf, whatever they were. Every reading of a row comes through
here, so that all of them see the same value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

if TYPE_CHECKING:
    import torch

__all__ = ["fetch", "read", "readable", "values", "whole"]

# Elements of 16 bits in one load. Fetched as pairs they take half as many registers while in flight.
_PAIRED = tl.constexpr(8)


@triton.jit
def read(row, index, inside, other):
    """The values of any tokens, ``other`` where not ``inside``: float32, or the rows' dtype without both."""
    row_ptr, bias_ptr, mask_ptr = row
    x = tl.load(row_ptr + index, mask=inside, other=other)
    if bias_ptr is not None:
        x = x.to(tl.float32) + tl.load(bias_ptr + index, mask=inside, other=0.0)
    if mask_ptr is not None:
        words = tl.load(mask_ptr + (index >> 5), mask=inside, other=-1)
        x = tl.where(((words >> (index & 31)) & 1) == 1, x.to(tl.float32), float("-inf"))
    return x


@triton.jit
def fetch(row, start, V, other, CHUNK: tl.constexpr, VEC: tl.constexpr):
    """What :func:`values` of a chunk, from ``start``, come from, not waited for; ``other`` from V on.

    ``start`` is a multiple of 32. A thread has ``VEC`` tokens side by side: one word of the mask serves them.
    """
    row_ptr, _, mask_ptr = row
    index = start + tl.arange(0, CHUNK)
    x = tl.load(row_ptr + index, mask=index < V, other=other)
    if VEC == _PAIRED:
        low, high = tl.split(tl.reshape(x.to(tl.int16, bitcast=True), [CHUNK // 2, 2]))
        x = (high.to(tl.int32) << 16) | (low.to(tl.int32) & 0xFFFF)
    fetched = (x,)
    if mask_ptr is not None:
        first = start + tl.arange(0, CHUNK // VEC) * VEC
        fetched += (tl.load(mask_ptr + (first >> 5), mask=first < V, other=-1),)
    return fetched


@triton.jit
def values(fetched, row, start, V, CHUNK: tl.constexpr, VEC: tl.constexpr):
    """The values of a chunk that :func:`fetch` asked for, in float32, as :func:`read` gives them.

    The bias is not fetched ahead: with it in flight, more would be kept than there are registers.
    """
    row_ptr, bias_ptr, mask_ptr = row
    x = fetched[0]
    if VEC == _PAIRED:
        if row_ptr.dtype.element_ty == tl.bfloat16:
            low = (x << 16).to(tl.float32, bitcast=True)
            high = (x & -0x10000).to(tl.float32, bitcast=True)
        else:
            low = x.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
            high = (x >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        x = tl.interleave(low, high)
    x = x.to(tl.float32)
    if bias_ptr is not None:
        index = start + tl.arange(0, CHUNK)
        x += tl.load(bias_ptr + index, mask=index < V, other=0.0)
    if mask_ptr is not None:
        first = start + tl.arange(0, CHUNK // VEC) * VEC
        words = fetched[1] >> (first & 31)  # bit 0 is the first of a thread's tokens
        allowed = (words[:, None] >> tl.arange(0, VEC)[None, :]) & 1
        x = tl.where(tl.reshape(allowed, [CHUNK]) == 1, x, float("-inf"))
    return x


@triton.jit
def whole(row, start, V, other, CHUNK: tl.constexpr, VEC: tl.constexpr):
    """The values of a chunk, in float32, now."""
    return values(fetch(row, start, V, other, CHUNK, VEC), row, start, V, CHUNK, VEC)


def readable(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """A bias or a bitmask whose last dimension is contiguous; copies only one that is not."""
    if tensor is None or tensor.shape[-1] == 1 or tensor.stride(-1) == 1:
        return tensor
    return tensor.contiguous()
