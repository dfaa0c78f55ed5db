"""The law at one node after top-k, top-p and min-p, and every law that float32 may rightly take for it.

Each cut keeps a prefix of the tokens sorted by falling mass, ties by rising id (:mod:`treeconv.filters`), so
a filtered law is a sort and a length. Where float32 may see the length or the order otherwise, the row has
*alternatives*, the exact one first:

* top-p compares a running sum with p, min-p a mass with a product: inside the rounding of those either side
  is right. On dyadic laws nothing rounds unless a sum that divides is no power of two, or the product has
  more than 24 bits; then there is one law.
* Two different logits may give one float32 probability. A sampler that sorts probabilities then sees a tie
  at the cut and keeps the lower id. Equal logits are a tie for everybody: there the lowest id wins, always.

Where there are more alternatives than are worth listing (a top-p cut in a tail of tiny masses), one *loose*
row stands for them: the tokens about the cut may or may not be there, and its band is as wide as their mass.
"""

from __future__ import annotations

from bisect import bisect_left
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv.oracle._rows import FLOAT64_SLACK, FLUSH, ROUNDING, EnclosedRow, ExactRow, sum_error

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from treeconv.filters import Cuts
    from treeconv.oracle._bonus import Number
    from treeconv.oracle._rows import Row

__all__ = ["FilteredRow", "enclosed_alternatives", "exact_alternatives", "exactly_filtered"]

_MAX_LISTED = 32  # alternatives; above, one loose row stands for them
_COMPLEMENT = 2.0**-25  # what `1 - top_p` rounds by: some compare the tail's mass with it


class FilteredRow(ExactRow):
    """What is left of an exact row, divided by its sum.

    Args:
        values: ``[V]``, 0 where a token was cut.

        total: the sum of what is left.

        slack: relative rounding of a normalised running sum; 0 where float32 divides exactly.
    """

    def __init__(self, values: Any, total: Fraction, slack: Fraction = Fraction(0)) -> None:
        super().__init__(values)
        self._total = total
        self._slack = slack

    def mass(self, token: int) -> Fraction:
        """p(token) after the filters, exactly."""
        return super().mass(token) / self._total

    def may_have_mass(self, token: int) -> bool:
        """Whether the token was kept and has mass."""
        return super().mass(token) > 0

    must_have_mass = may_have_mass

    @property
    def is_exact(self) -> bool:
        """Whether no division rounded."""
        return self._slack == 0

    @property
    def lower(self) -> NDArray[np.float64]:
        """``[V]`` float64 probabilities, less their rounding."""
        return super().lower * (1 - float(self._slack))

    @property
    def upper(self) -> NDArray[np.float64]:
        """``[V]`` float64 probabilities, and their rounding."""
        return super().lower * (1 + float(self._slack))

    def accept_bounds(self, tokens: Sequence[int]) -> list[tuple[Number, Number]]:
        """The running sums; with the rounding of the divisions where there is one."""
        exact = super().accept_bounds(tokens)
        return [(lower * (1 - self._slack), upper * (1 + self._slack)) for lower, upper in exact]

    def _bonus_slack(self, total: int) -> Fraction:
        return super()._bonus_slack(total) + self._slack


def _order(values: Sequence[Any]) -> list[int]:
    """Tokens with mass, by falling mass, ties by rising id."""
    return sorted((token for token, value in enumerate(values) if value > 0), key=lambda t: (-values[t], t))


def _exact_length(sorted_values: Sequence[Any], cuts: Cuts) -> int:
    """How many tokens the filters keep, by their definitions."""
    k = len(sorted_values) if cuts.top_k is None else min(cuts.top_k, len(sorted_values))
    measured = sorted_values[:k] if cuts.order == "sequential" else sorted_values
    goal = Fraction(cuts.top_p) * sum(measured)
    least = Fraction(cuts.min_p) * sorted_values[0]
    kept = before = 0
    for value in sorted_values[:k]:
        if (cuts.top_p < 1 and kept and before >= goal) or value < least:
            break
        before += value
        kept += 1
    return kept


def exactly_filtered(values: Any, cuts: Cuts) -> Row:
    """The filtered law of probabilities at their exact values (floats, ints or Fractions), without a band."""
    row = ExactRow(values)
    if row.status != 0 or not cuts.are_on(row.vocab_size):
        return row
    # Their exact values over a common denominator: all that follows is integer arithmetic.
    weights = row.weights[0]
    order = _order(weights)
    kept = order[: _exact_length([weights[token] for token in order], cuts)]
    left = [Fraction(0)] * len(weights)
    for token in kept:
        left[token] = Fraction(weights[token], row.weights[1])
    return FilteredRow(left, sum(left, Fraction(0)))


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


def exact_alternatives(row: NDArray[np.float64], cuts: Cuts) -> list[Callable[[], Row]]:
    """What float32 may see of a dyadic row after the filters; one law where nothing rounds.

    Args:
        row: ``[V]`` multiples of 2**-12 that sum to 4 at most, with positive mass.

        cuts: filters of which one is on.
    """
    present = np.flatnonzero(row)
    order = present[np.lexsort((present, -row[present]))]
    units: list[int] = (row[order] * 2.0**12).astype(np.int64).tolist()
    canonical = _exact_length(units, cuts)
    k = len(units) if cuts.top_k is None else min(cuts.top_k, len(units))
    sums = np.cumsum(units).tolist()
    # Rounding begins where a sampler may have divided by a sum that is no power of two.
    measured = sums[k - 1] if cuts.order == "sequential" else sums[-1]
    is_measured_exactly = _is_power_of_two(sums[-1]) and _is_power_of_two(measured)
    rounding = Fraction(4 * sum_error(len(units)) + 8 * ROUNDING)
    by_p = [k, k]
    if cuts.top_p < 1:
        goal = Fraction(cuts.top_p) * measured
        slack = Fraction(0) if is_measured_exactly else goal * rounding
        before = [-1, *sums[: k - 1]]  # the first is kept, however small p is
        by_p = [bisect_left(before, edge) for edge in (goal - slack, goal + slack)]
    by_min = [k, k]
    if cuts.min_p > 0:
        least = Fraction(cuts.min_p) * units[0]
        is_exact = (
            is_measured_exactly
            and all(_is_power_of_two(sums[length - 1]) for length in range(by_p[0], by_p[1] + 1))
            and float(np.float32(least)) == least
        )
        slack = Fraction(0) if is_exact else least * 8 * Fraction(ROUNDING)
        # What equals the largest mass is kept by every rounding: equal numbers stay equal.
        tops = sum(unit == units[0] for unit in units)
        by_min = [max(tops, sum(unit >= edge for unit in units)) for edge in (least + slack, least - slack)]
    shortest, longest = (min(k, p, m) for p, m in zip(by_p, by_min, strict=True))

    def make(length: int) -> Row:
        kept = order[:length]
        left = np.zeros_like(row)
        left[kept] = row[kept]
        passed = {sums[-1], measured, sums[length - 1], sums[min(k, by_p[1]) - 1]}
        slack = Fraction(0) if all(map(_is_power_of_two, passed)) else rounding
        return FilteredRow(left, Fraction(sums[length - 1], 2**12), slack)

    others = [length for length in range(shortest, longest + 1) if length != canonical]
    return [partial(make, length) for length in [canonical, *others]]


def _sorted_tokens(keys: NDArray[np.float64], may_have: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Tokens that may have mass, by falling key, ties by rising id."""
    tokens = np.flatnonzero(may_have)
    singles = (keys[tokens] + 0.0).astype(np.float32)  # -0.0 is 0.0
    if tokens.size < 1024 or not (singles == keys[tokens]).all():
        return tokens[np.argsort(-keys[tokens], kind="stable")]
    # A float32 and an id fit one integer: sorting those is several times faster than a stable argsort.
    bits = singles.view(np.uint32)
    rising = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))
    packed = ((~rising).astype(np.uint64) << np.uint64(32)) | tokens.astype(np.uint64)
    packed.sort()
    ids: NDArray[np.int64] = (packed & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return ids


class _Sorted:
    """An enclosed row sorted for its cuts: the lengths that float32 may choose, and the sets at each."""

    def __init__(
        self,
        keys: NDArray[np.float64],
        weights: NDArray[np.float64],
        errors: NDArray[np.float64],
        may_have: NDArray[np.bool_],
        cuts: Cuts,
        divisions: int,
    ) -> None:
        self.order = _sorted_tokens(keys, may_have)
        self.keys = keys[self.order]
        masses, relative = weights[self.order], errors[self.order]
        self.size = size = int(masses.size)
        k = size if cuts.top_k is None else min(cuts.top_k, size)
        measured = masses[:k] if cuts.order == "sequential" else masses
        total = float(measured.sum())
        # Tokens behind this place may have underflowed to 0: nobody can order them.
        self.sure = int(np.searchsorted(-masses, -FLUSH * total))
        own = (2 + 2 * divisions) * ROUNDING
        band = relative + own
        # What may stand before and behind a place: not sorted as the masses are where errors differ.
        self._lower = np.minimum.accumulate(masses * np.maximum(1 - band, 0))
        self._upper = np.maximum.accumulate((masses * (1 + band))[::-1])[::-1]
        p_range = m_range = (k, k, k)
        if cuts.top_p < 1:
            before = np.cumsum(masses[: k - 1]) / total
            share = float(measured @ relative[: measured.size]) / total
            slack = share * (2 + share) + 2 * sum_error(size) + 2 * own
            slack += _COMPLEMENT + FLOAT64_SLACK
            p_range = tuple(1 + int(np.searchsorted(before, cuts.top_p + s)) for s in (-slack, 0.0, slack))  # type: ignore[assignment]
        if cuts.min_p > 0:
            least = cuts.min_p * masses[0]
            # Whichever mass a sampler takes for the largest.
            slack = float(relative[self._upper >= self._lower[0]].max()) + own
            # What equals the largest logit is kept by every rounding: equal numbers stay equal.
            tops = int(np.searchsorted(-self.keys, -self.keys[0], side="right"))
            edges = (least * (1 + slack), least, least * (1 - slack) - 2.0**-149)
            found = zip((self._lower, masses, self._upper), edges, strict=True)
            m_range = tuple(  # type: ignore[assignment]
                max(tops, int(np.searchsorted(-values, -edge, side="right"))) for values, edge in found
            )
        self.shortest, self.canonical, self.longest = (
            min(k, p, m) for p, m in zip(p_range, m_range, strict=True)
        )

    def doubtful(self, length: int) -> tuple[int, int]:
        """Places ``[start, stop)`` whose tokens may be on either side of a cut at this length."""
        if length >= self.size:
            return self.size, self.size
        if length >= self.sure:
            return self.sure, self.size
        start = int(np.searchsorted(-self._lower[:length], -self._upper[length]))
        stop = length + int(np.searchsorted(-self._upper[length:], -self._lower[length - 1], side="right"))
        return start, stop

    def lengths(self) -> list[int]:
        """The lengths to look at, the exact one first; one stands for all that reach masses of about 0."""
        reduced = [min(length, self.sure) for length in range(self.shortest, self.longest + 1)]
        return list(dict.fromkeys([min(self.canonical, self.sure), *reduced]))

    def sets(self, length: int) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """``(kept tokens, optional ones among them)`` of every correct order at this length, exact first.

        Stops after more than are worth listing.
        """
        if length >= self.sure:  # masses of about 0 beyond: whether they are there is nobody's business
            yield self.order, self.order[self.sure :]
            return
        start, stop = self.doubtful(length)
        none = self.order[:0]
        yield self.order[:length], none
        # Equal keys are one tie for everybody, so how many of each value are kept says which.
        bounds = [start, *(start + 1 + np.flatnonzero(np.diff(self.keys[start:stop]))).tolist(), stop]
        counts = np.diff(bounds).tolist()
        if len(counts) > _MAX_LISTED:  # takes are at least as many
            yield from [(self.order[:length], none)] * len(counts)
            return
        exact = [min(max(length - low, 0), high - low) for low, high in pairwise(bounds)]
        for taken in _compositions(counts, length - start):
            if list(taken) != exact:
                parts = [self.order[low : low + n] for low, n in zip(bounds, taken, strict=False)]
                yield np.concatenate([self.order[:start], *parts]), none


def _compositions(counts: list[int], total: int) -> Iterator[tuple[int, ...]]:
    """Every way to take ``total`` things from heaps of these sizes."""
    if not counts:
        if total == 0:
            yield ()
        return
    rest = sum(counts[1:])
    for n in range(max(0, total - rest), min(counts[0], total) + 1):
        for others in _compositions(counts[1:], total - n):
            yield (n, *others)


def enclosed_alternatives(
    keys: NDArray[np.float64],
    weights: NDArray[np.float64],
    errors: NDArray[np.float64],
    may_have: NDArray[np.bool_],
    cuts: Cuts,
    *,
    is_normalised: bool,
) -> list[Callable[[], Row]]:
    """What a careful float32 sampler may see of a row after the filters, the exact law first.

    Args:
        keys: ``[V]`` float64, what decides the order exactly: the logits, or the probabilities.

        weights: as for :class:`EnclosedRow`.

        errors: as for :class:`EnclosedRow`.

        may_have: as for :class:`EnclosedRow`.

        cuts: filters of which one is on.

        is_normalised: whether a softmax has divided before the filters do.
    """
    on = (cuts.top_k is not None, cuts.top_p < 1, cuts.min_p > 0)
    divisions = int(is_normalised) + sum(on)
    row = _Sorted(keys, weights, errors, may_have, cuts, divisions)

    def make(kept: NDArray[np.int64], optional: NDArray[np.int64]) -> Row:
        left = np.zeros_like(weights)
        left[kept] = weights[kept]
        is_left = np.zeros_like(may_have)
        is_left[kept] = True
        is_optional = None
        if optional.size:
            is_optional = np.zeros_like(may_have)
            is_optional[optional] = True
        return EnclosedRow(
            left, errors, is_left, is_normalised=True, optional=is_optional, divisions=divisions
        )

    makers: list[Callable[[], Row]] = []
    lengths = row.lengths()
    if len(lengths) <= _MAX_LISTED:
        for kept, optional in (found for length in lengths for found in row.sets(length)):
            makers.append(partial(make, kept, optional))
            if len(makers) > _MAX_LISTED:
                break
        else:
            return makers
    exact = next(row.sets(lengths[0]))
    start, stop = row.doubtful(row.shortest)[0], max(row.doubtful(row.longest)[1], row.longest)
    loose = row.order[:stop], row.order[min(start, row.shortest) : stop]
    return [partial(make, *exact), partial(make, *loose)]
