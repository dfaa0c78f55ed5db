"""The law at one node, as the oracle sees it: exact numbers, or an enclosure of what float32 computes.

Both kinds of row answer the same questions. Boundaries are ``(lower, upper)`` pairs: below ``lower`` and
at or above ``upper`` a coin's decision is certain; between them (the *ambiguity band*) either neighbour
is right. An :class:`ExactRow` has ``lower == upper`` wherever float32 itself is exact.
"""

from __future__ import annotations

from fractions import Fraction
from functools import cached_property
from math import lcm
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from treeconv.errors import InvalidArgument
from treeconv.oracle._bonus import Bonus
from treeconv.tree import RowStatus, as_float_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from treeconv.oracle._bonus import Number

__all__ = [
    "FLOAT64_SLACK",
    "FLUSH",
    "ROUNDING",
    "EnclosedRow",
    "ExactRow",
    "Row",
    "enclosed_weights",
    "enclosure",
    "is_dyadic",
    "sum_error",
    "unsampled",
]

ROUNDING = 2.0**-24  # unit roundoff of float32: half the distance from 1 to its upper neighbour
FLUSH = 2.0**-120  # masses below this may underflow to 0 in float32
FLOAT64_SLACK = 1e-11  # the enclosure's own float64 error, far below ROUNDING


def is_dyadic(row: NDArray[np.float64]) -> bool:
    """Whether every float32 sum of these masses is exact in any order: multiples of 2**-12, total <= 4."""
    scaled = row * 2.0**12
    return bool((scaled == np.floor(scaled)).all() and row.sum() <= 4)


def sum_error(terms: int) -> float:
    """Relative error of a float32 sum of ``terms`` non-negative numbers: plain up to 32 terms, blocked above.

    A blocked or pairwise sum of V terms errs by the block's additions plus log2 of the number of blocks
    (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2). A plain running sum over a
    large vocabulary is worse than this, and is flagged.
    """
    if terms <= 1:
        return 0.0
    return min(terms - 1, 32 + 2 * float(np.log2(terms))) * ROUNDING


class Row(Protocol):
    """What the walk asks of the law at one node."""

    status: RowStatus
    vocab_size: int

    @property
    def is_exact(self) -> bool:
        """Whether float32 sees these masses exactly."""

    @property
    def masses(self) -> NDArray[Any]:
        """``[V]`` best estimates of p: Fractions (dtype object) where they are exact, else float64."""

    @property
    def lower(self) -> NDArray[np.float64]:
        """``[V]`` what float32 sees at least."""

    @property
    def upper(self) -> NDArray[np.float64]:
        """``[V]`` what float32 sees at most."""

    def mass(self, token: int) -> Number:
        """Best estimate of p(token); 0 outside the vocabulary."""

    def may_have_mass(self, token: int) -> bool:
        """Whether a correct sampler may see positive mass at this token."""

    def must_have_mass(self, token: int) -> bool:
        """Whether every correct sampler sees positive mass at this token."""

    def accept_bounds(self, tokens: Sequence[int]) -> list[tuple[Number, Number]]:
        """``(lower, upper)`` of the accumulated mass after each child, in test order."""

    def residual_may_be_empty(self, rejected: Sequence[int]) -> bool:
        """Whether a correct sampler may find no mass outside the rejected tokens."""

    def bonus(self, rejected: Sequence[int]) -> Bonus:
        """The bonus draw when these tokens were tested and rejected."""


class ExactRow:
    """The law at one node as exact numbers.

    Args:
        values: ``[V]`` floats (taken at their exact values), ints or Fractions, >= 0. The total need not
            be 1: coins are compared with the plain running sum, the bonus draw is relative.
    """

    def __init__(self, values: Any) -> None:
        self._fractions: list[Fraction] | None = None
        self._floats: NDArray[np.float64] | None = None
        self._bonus: dict[tuple[int, ...], Bonus] = {}
        is_list = isinstance(values, (list, tuple))
        if is_list and any(isinstance(value, Fraction) for value in values):
            self._fractions = [Fraction(value) for value in values]
            self.vocab_size = len(values)
            peak: Number = max(self._fractions)
            is_bad = min(self._fractions) < 0
        else:
            row = as_float_array(values).astype(np.float64)
            if row.ndim != 1 or row.size == 0:
                raise InvalidArgument(f"target row has shape {row.shape}, but must be [vocab], vocab >= 1")
            self._floats = row
            self.vocab_size = int(row.size)
            peak = float(row.max())
            is_bad = bool(np.isnan(row).any() or row.min() < 0)
        self.status = (
            RowStatus.NAN
            if is_bad
            else RowStatus.POS_INF
            if peak == np.inf
            else RowStatus.OK
            if peak > 0
            else RowStatus.EMPTY
        )

    @classmethod
    def one_hot(cls, vocab_size: int, token: int) -> ExactRow:
        """All mass on one token: the law at temperature 0."""
        row = np.zeros(vocab_size)
        row[token] = 1
        return cls(row)

    def mass(self, token: int) -> Fraction:
        """p(token), exactly."""
        if not 0 <= token < self.vocab_size:
            return Fraction(0)
        if self._fractions is not None:
            return self._fractions[token]
        assert self._floats is not None
        return Fraction(float(self._floats[token]))

    @cached_property
    def weights(self) -> tuple[list[int], int]:
        """Integer weights of all tokens, and their common denominator."""
        if self._fractions is not None:
            denominator = lcm(*(value.denominator for value in self._fractions))
            scaled = [value.numerator * (denominator // value.denominator) for value in self._fractions]
            return scaled, denominator
        assert self._floats is not None
        mantissas, exponents = np.frexp(self._floats)
        integers = (mantissas * 2.0**53).astype(np.int64)
        shifts = exponents.astype(np.int64) - 53
        least = min(0, int(shifts[integers != 0].min(initial=0)))
        shifted = [
            value << (shift - least) if value else 0
            for value, shift in zip(integers.tolist(), shifts.tolist(), strict=True)
        ]
        return shifted, 1 << -least

    def may_have_mass(self, token: int) -> bool:
        """p(token) > 0."""
        return self.mass(token) > 0

    must_have_mass = may_have_mass

    def accept_bounds(self, tokens: Sequence[int]) -> list[tuple[Number, Number]]:
        """The running sums, exactly; float32 computes them exactly too (dyadic masses)."""
        bounds: list[tuple[Number, Number]] = []
        total = Fraction(0)
        for token in tokens:
            total += self.mass(token)
            bounds.append((total, total))
        return bounds

    def residual_may_be_empty(self, rejected: Sequence[int]) -> bool:
        """Whether nothing but rejected tokens has mass."""
        return not self.bonus(rejected).may_have_mass

    def bonus(self, rejected: Sequence[int]) -> Bonus:
        """The bonus draw; its inner boundaries carry one float32 rounding unless the sum is a power of two.

        A float32 sampler compares a running sum with ``coin * total``: the sums are exact, the product
        is rounded once, which moves the boundary by at most one part in 2**24.
        """
        key = tuple(sorted(rejected))
        if key not in self._bonus:
            banned = set(key)
            tokens: list[int] = []
            sums: list[int] = []
            total = 0
            for token, weight in enumerate(self.weights[0]):
                if weight > 0 and token not in banned:
                    total += weight
                    tokens.append(token)
                    sums.append(total)

            def bounds() -> tuple[list[Fraction], list[Fraction]]:
                slack = self._bonus_slack(total)
                points = [Fraction(value, total) for value in sums]
                inner, last = points[:-1], points[-1:]
                return [p * (1 - slack) for p in inner] + last, [p * (1 + slack) for p in inner] + last

            self._bonus[key] = Bonus(tokens, sums, None, bounds)
        return self._bonus[key]

    def _bonus_slack(self, total: int) -> Fraction:
        return Fraction(0) if total & (total - 1) == 0 else Fraction(1 + 2**20, 2**44)

    @property
    def is_exact(self) -> bool:
        """True: the masses are what they are."""
        return True

    @cached_property
    def masses(self) -> NDArray[Any]:
        """``[V]`` probabilities as Fractions."""
        found = np.empty(self.vocab_size, object)
        found[:] = [self.mass(token) for token in range(self.vocab_size)]
        return found

    @property
    def lower(self) -> NDArray[np.float64]:
        """``[V]`` float64 probabilities."""
        return self.masses.astype(np.float64)

    @property
    def upper(self) -> NDArray[np.float64]:
        """``[V]`` float64 probabilities."""
        return self.lower


class EnclosedRow:
    """What a careful float32 computation may see at one node, enclosed in float64.

    Args:
        weights: ``[V]`` float64 >= 0, the masses up to a common factor.

        errors: ``[V]`` float64, the relative error each float32 mass may have.

        is_normalised: whether the sampler divides by the sum of all weights (a softmax does; a sampler
            that is handed probabilities does not).

        may_have: ``[V]`` bool; False where the mass is exactly zero.

        optional: ``[V]`` bool; tokens that a correct sampler may leave out altogether, or None.

        divisions: how often the sampler may divide by a sum on the way, where it does.
    """

    def __init__(
        self,
        weights: NDArray[np.float64],
        errors: NDArray[np.float64],
        may_have: NDArray[np.bool_],
        *,
        is_normalised: bool,
        optional: NDArray[np.bool_] | None = None,
        divisions: int = 1,
    ) -> None:
        self.status = RowStatus.OK
        self.vocab_size = int(weights.size)
        total = float(weights.sum())
        self._masses = weights / total if is_normalised else weights
        self._errors = errors
        self._may_have = may_have
        # Each division rounds, and so does the sum that divides.
        self._scale_error = (
            float(self._masses @ errors) + divisions * (sum_error(weights.size) + ROUNDING)
            if is_normalised
            else 0.0
        )
        self._may_flush = self._masses < FLUSH * max(1.0, total)
        self._certain_total = 1.0
        if optional is not None:  # like what may underflow, only heavier
            self._may_flush |= optional
            self._certain_total = float(self._masses[~optional].sum())
        self._own_roundings = 4 + 2 * (divisions - 1)  # of a quotient, beyond what cancels
        self._bonus: dict[tuple[int, ...], Bonus] = {}

    def mass(self, token: int) -> float:
        """Best estimate of p(token)."""
        return float(self._masses[token]) if 0 <= token < self.vocab_size else 0.0

    def may_have_mass(self, token: int) -> bool:
        """Whether the logit is above -inf (or the probability above 0)."""
        return 0 <= token < self.vocab_size and bool(self._may_have[token])

    def must_have_mass(self, token: int) -> bool:
        """Whether the mass cannot underflow."""
        return self.may_have_mass(token) and not bool(self._may_flush[token])

    @cached_property
    def _mass_bounds(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        mass = self._masses
        error = (1 + self._errors) * (1 + self._scale_error) - 1 + FLOAT64_SLACK
        must_have = self._may_have & ~self._may_flush
        largest = mass
        if self._certain_total < 1:  # alone with what is certain, its share is the largest
            certain = np.maximum(self._certain_total - np.where(must_have, mass, 0.0), 0.0)
            largest = np.where(mass > 0, mass / np.maximum(mass + certain, 2.0**-1022), 0.0)
        upper = largest * (1 + error) + 2.0**-149
        lower = mass * np.maximum(1 - error, 0.0)
        return np.where(must_have, lower, 0.0), np.where(self._may_have, upper, 0.0)

    def accept_bounds(self, tokens: Sequence[int]) -> list[tuple[Number, Number]]:
        """Enclosures of the running sums: of each mass, and one rounding per addition."""
        bounds: list[tuple[Number, Number]] = []
        lower = upper = 0.0
        lows, highs = self._mass_bounds
        for place, token in enumerate(tokens):
            if self.may_have_mass(token):
                lower, upper = lower + float(lows[token]), upper + float(highs[token])
            rounding = place * ROUNDING
            bounds.append((lower * (1 - rounding), upper * (1 + rounding)))
        return bounds

    def residual_may_be_empty(self, rejected: Sequence[int]) -> bool:
        """Whether all tokens with certain mass were rejected."""
        certain = self._may_have & ~self._may_flush
        return int(certain.sum()) <= sum(bool(certain[token]) for token in set(rejected) if self.mass(token))

    def bonus(self, rejected: Sequence[int]) -> Bonus:
        """The bonus draw; every boundary carries the errors of both sums and of the comparison."""
        key = tuple(sorted(rejected))
        if key not in self._bonus:
            may_have = self._may_have.copy()
            may_have[[token for token in key if 0 <= token < self.vocab_size]] = False
            tokens = np.flatnonzero(may_have)
            masses = self._masses[tokens]
            total = float(masses.sum()) or 1.0
            shares = masses / total
            sums = np.cumsum(shares)
            weighted = np.cumsum(shares * self._errors[tokens])
            flush = self._may_flush[tokens]
            flushed = np.cumsum(np.where(flush, shares, 0.0))
            # The common division by the softmax's sum cancels; each quotient's own rounding does not.
            counts = np.arange(1, tokens.size + 1)
            plain = np.minimum(counts - 1, 32 + 2 * np.log2(counts)) * ROUNDING
            band = weighted + sums * (
                plain
                + (weighted[-1] if tokens.size else 0)
                + sum_error(tokens.size)
                + self._own_roundings * ROUNDING
            )
            band += weighted * weighted[-1:].sum() + FLOAT64_SLACK  # second order: errors may be large
            lower = np.maximum(sums - band - flushed, 0.0)
            upper = sums + band + (2.0**-149 if tokens.size else 0) + flushed[-1:].sum()
            self._bonus[key] = Bonus(tokens, sums, ~flush, lambda: (lower, upper))
        return self._bonus[key]

    @property
    def lower(self) -> NDArray[np.float64]:
        """``[V]`` float64 lower bounds of the probabilities."""
        return self._mass_bounds[0]

    @property
    def upper(self) -> NDArray[np.float64]:
        """``[V]`` float64 upper bounds of the probabilities."""
        return self._mass_bounds[1]

    @property
    def is_exact(self) -> bool:
        """False: float32 rounds."""
        return False

    @property
    def masses(self) -> NDArray[Any]:
        """``[V]`` best estimates."""
        return self._masses


class _BadRow(ExactRow):
    """A row that cannot be sampled from; only its status is ever asked for."""

    def __init__(self, vocab_size: int, status: RowStatus) -> None:
        super().__init__(np.ones(vocab_size))
        self.status = status


def enclosure(logits: Any, temperature: float = 1.0) -> ExactRow | EnclosedRow:
    """The law at a node from its logits' exact values, with the band that float32 arithmetic may use.

    A careful float32 sampler computes ``exp((x - max) / T)``: the subtraction, the division (or a
    reciprocal's product) and the exponential's argument each round, which an argument ``a`` turns into a
    relative error of ``4 |a| u``, and the exponential itself errs by a few units: ``(4 |a| + 8) u``
    in all, with ``u = 2**-24``. Sums err as in a blocked sum. Masses under 2**-120 may underflow to 0.

    Args:
        logits: ``[V]`` float; bfloat16 and float16 values are exact numbers. -inf is exactly no mass.

        temperature: >= 0; 0 gives the exact one-hot law of the lowest-index argmax.

    Returns:
        A row with ``lower`` and ``upper`` (``[V]`` float64), ``accept_bounds`` and ``bonus``; its ``status``
        is not OK where the logits hold NaN, +inf, or only -inf.

    Raises:
        InvalidArgument: logits that are no vector, or a temperature that is negative, NaN or infinite.
    """
    row = as_float_array(logits).astype(np.float64)
    found = unsampled(row, temperature)
    if found is not None:
        return found
    weights, errors = enclosed_weights(row, temperature)
    return EnclosedRow(weights, errors, row > -np.inf, is_normalised=True)


def unsampled(row: NDArray[np.float64], temperature: float) -> ExactRow | None:
    """The row of logits that no softmax is taken of: an unusable one, or any at temperature 0. Else None.

    Raises: as :func:`enclosure`.
    """
    if row.ndim != 1 or row.size == 0:
        raise InvalidArgument(f"logits.shape={row.shape}, but must be [vocab], vocab >= 1")
    if not 0 <= temperature < float("inf"):
        raise InvalidArgument(f"temperature={temperature!r}, but must be finite and >= 0")
    peak = float(row.max())
    if np.isnan(peak):
        return _BadRow(row.size, RowStatus.NAN)
    if np.isinf(peak):
        return _BadRow(row.size, RowStatus.POS_INF if peak > 0 else RowStatus.EMPTY)
    return ExactRow.one_hot(row.size, int(row.argmax())) if temperature == 0 else None


def enclosed_weights(
    row: NDArray[np.float64], temperature: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """``exp((x - max) / T)`` and the relative error that float32 may make in it; see :func:`enclosure`."""
    with np.errstate(over="ignore", under="ignore"):
        # The temperature a backend is handed is a float32; so is the oracle's.
        arguments = (row - row.max()) / float(np.float32(temperature))
        weights = np.exp(arguments)
    errors = np.where(weights > 0, (4 * np.abs(np.maximum(arguments, -1e3)) + 8) * ROUNDING, 0.0)
    return weights, errors
