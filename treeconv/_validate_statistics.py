"""What the arguments of :mod:`treeconv.statistical_testing` must be."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

MOST_SAMPLES = 2**40  # a discrepancy that needs more is refused; so is evidence about more, see EProcess
_MOST_COUNT = 2**53


def _holds(rule: Callable[[], Any]) -> bool:
    """Whether a rule holds; what cannot be compared at all (None, a string, a list) breaks it."""
    try:
        return bool(rule())
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return False


def check_rate(name: str, rate: float) -> float:
    """A rate in (0, 1)."""
    if not _holds(lambda: 0 < rate < 1):
        raise InvalidArgument(f"{name}={rate!r}, but must be in (0, 1)")
    return rate


def check_count(name: str, count: int, at_least: int = 0) -> int:
    """A count as an int."""
    if not _holds(lambda: count >= at_least and count == int(count)):
        raise InvalidArgument(f"{name}={count!r}, but must be an integer >= {at_least}")
    if count > _MOST_COUNT:
        raise InvalidArgument(f"{name}={count!r}, but must be at most 2**53: doubles skip integers beyond")
    return int(count)


def check_counts(counts: Sequence[int] | NDArray[np.int64], size: int, size_is: str) -> list[int]:
    """So many counts, one per outcome."""
    listed = counts.tolist() if isinstance(counts, np.ndarray) else counts
    if not _holds(lambda: len(listed) >= 0) or isinstance(listed, (str, bytes)):
        raise InvalidArgument(f"counts={counts!r}, but must be a list of integers, one per outcome")
    checked = [check_count("counts", count) for count in listed]
    if len(checked) != size:
        raise InvalidArgument(f"len(counts)={len(checked)}, but must be {size_is}")
    return checked


def check_evidence(name: str, total: int) -> None:
    """No more samples than the evidence can be computed for."""
    if total > MOST_SAMPLES:
        raise InvalidArgument(
            f"{name}={total!r}, but must be at most 2**40: beyond, what cancels in the evidence leaves too"
            " few digits"
        )


def check_share(name: str, share: float) -> float:
    """A probability, 0 and 1 included."""
    if not _holds(lambda: 0 <= share <= 1):
        raise InvalidArgument(f"{name}={share!r}, but must be in [0, 1]")
    return float(share)


def check_law(probabilities: Sequence[float] | NDArray[np.float64]) -> NDArray[np.float64]:
    """Probabilities as an array."""
    try:
        law = np.asarray(probabilities, np.float64)
    except (TypeError, ValueError):
        law = np.zeros(0)
    if law.ndim != 1 or not law.size or (law < 0).any() or not math.isclose(law.sum(), 1, abs_tol=1e-9):
        raise InvalidArgument(f"probabilities={probabilities!r}, but must be >= 0 and sum to 1")
    return law
