"""What counts as one number, where an argument is one: no text and no truth value, whatever float() says."""

from __future__ import annotations

import math
from decimal import Decimal
from numbers import Real
from typing import Any

__all__ = ["as_number"]


def as_number(value: Any) -> float:
    """A real number as a float, NaN where ``value`` is none; one too large becomes infinite.

    NumPy's numbers and arrays or CPU tensors without dimensions are numbers too. Text, bytes, truth values,
    complex numbers and arrays of one element are not.
    """
    is_scalar = hasattr(value, "tolist") and getattr(value, "ndim", None) == 0
    if is_scalar and getattr(getattr(value, "device", None), "type", "cpu") == "cpu":  # else it would wait
        value = value.tolist()
    is_real = isinstance(value, (Real, Decimal)) and not isinstance(value, bool)
    if not is_real:
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
    except ValueError:  # Decimal's signalling NaN
        return math.nan
