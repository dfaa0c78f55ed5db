"""The order in which filters keep a row's tokens, as integers: see :mod:`.filter_cuts`. Device functions."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from treeconv.kernels.row_chunks import ordered, slow_mass, unordered

__all__ = ["is_kept", "mass_of", "unit_of", "unit_shift", "value_of"]


def unit_shift(dtype: torch.dtype) -> int:
    """Low bits of a float32's ordered key that say nothing where it was converted from this dtype."""
    return {torch.bfloat16: 16, torch.float16: 13}.get(dtype, 0)


@triton.jit
def unit_of(x, SHIFT: tl.constexpr):
    """The unit of a logit or probability."""
    return ordered(x + 0.0) >> SHIFT


@triton.jit
def value_of(unit, SHIFT: tl.constexpr):
    """The one value that has this unit."""
    return unordered((unit << SHIFT) | tl.where(unit < 0, (1 << SHIFT) - 1, 0))


@triton.jit
def mass_of(x, top, before, after, rate, PROBS: tl.constexpr, PTX: tl.constexpr):
    """A logit's mass relative to the row's maximum; a probability is its own."""
    if PROBS:
        mass = x
    else:
        mass = slow_mass(x, top, before, after, rate, PTX)
    return mass


@triton.jit
def is_kept(x, token, cut, cut_id, SHIFT: tl.constexpr):
    """Whether tokens of these logits, or probabilities, are kept."""
    unit = unit_of(x, SHIFT)
    return (unit > cut) | ((unit == cut) & (token <= cut_id))
