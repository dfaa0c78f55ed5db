"""What the rules besides target-only do at one node: tests of children in turn, then a draw.

See :mod:`treeconv.rules` for the rules. Exact rows and draft laws give Fractions. Others give what float32
may see: an interval for each mass of p, and for everything computed of it. Below the lower end of a
boundary, and at or above its upper one, a coin's decision is certain.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv.errors import InvalidArgument
from treeconv.oracle._bonus import Bonus
from treeconv.oracle._rows import FLOAT64_SLACK, ROUNDING, ExactRow, is_dyadic, sum_error
from treeconv.tree import as_float_array

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from treeconv.oracle._bonus import Number
    from treeconv.oracle._rows import Row
    from treeconv.rules import RuleName
    from treeconv.tree import DraftTree

__all__ = ["ChildTest", "Plan", "draft_law", "plans"]

_EXACT_ROUNDING = Fraction(2**24 - 1, 2**24)
_MOST = 2.0**25  # a mass divided by 1 - q, which float32 has no smaller than 2^-24, is below
_NOMINAL = 1e-5  # a draft law whose sum is this close to 1 may be divided by 1 - q instead of a sum


@dataclass(frozen=True)
class ChildTest:
    """``child`` is accepted iff the coin of ``slot`` is below the boundary.

    Args:
        child: the node.

        slot: which of ``coins.accept`` is tossed.

        lower, best, upper: the boundary: what float32 sees at least, the definition's, and at most.
    """

    child: int
    slot: int
    lower: Number
    best: Number
    upper: Number


@dataclass(frozen=True)
class Plan:
    """What a rule does at one node.

    Args:
        tests: in turn, until one accepts.

        bonus: what is drawn if none does.

        slot: the accept coin that draws it; None for the final coin.

        follow: token -> child that a draw of this token leads on to, instead of ending the walk.
    """

    tests: tuple[ChildTest, ...]
    bonus: Bonus
    slot: int | None = None
    follow: dict[int, int] = field(default_factory=dict)


def draft_law(values: Any) -> NDArray[Any]:
    """A draft row as Fractions (dtype object) where it holds some, else float64; no mass where it is no mass.

    Negative and non-finite numbers say nothing about what was sampled: they count as 0.
    """
    if isinstance(values, (list, tuple)) and any(isinstance(value, Fraction) for value in values):
        exact = np.empty(len(values), object)
        exact[:] = [max(Fraction(value), Fraction(0)) for value in values]
        return exact
    row = as_float_array(values).astype(np.float64)
    return np.where(np.isfinite(row) & (row > 0), row, 0.0)


def _as_fractions(row: NDArray[Any]) -> NDArray[Any]:
    exact = np.empty(row.size, object)
    exact[:] = [Fraction(value) for value in row.tolist()]
    return exact


def _positive_part(values: NDArray[Any]) -> NDArray[Any]:
    found: NDArray[Any] = np.where(values > 0, values, values * 0)
    return found


def _sums_before(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Per place the sum of what is before it."""
    return np.concatenate([np.zeros(1), np.cumsum(values[:-1])])


def _sums_behind(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The same of what is behind it: a difference of running sums would lose it beside a large mass."""
    return _sums_before(values[::-1])[::-1]


@dataclass(frozen=True)
class _Law:
    """Masses: the definition's (Fractions or float64), and what float32 sees at least and at most."""

    best: NDArray[Any]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    is_exact: bool = False

    @classmethod
    def of(cls, row: Row) -> _Law:
        return cls(row.masses, row.lower, row.upper, row.is_exact)

    def excess(self, q: _Law) -> _Law:
        """``relu(p - q)``. Exact where both are dyadic, else one rounding of what may be left."""
        best = _positive_part(self.best - q.best)
        if self.is_exact and q.is_exact and is_dyadic(self.low) and is_dyadic(q.low):
            exact = best.astype(np.float64)
            return _Law(best, exact, exact, is_exact=True)
        low = _positive_part(self.low - q.high) * (1 - ROUNDING)
        return _Law(best, low, _positive_part(self.high - q.low) * (1 + ROUNDING))

    def divided(self) -> _Law:
        """By its sum, which is positive; as uncertain as the sum is."""
        error = sum_error(self.low.size) + 2 * ROUNDING + FLOAT64_SLACK
        most, least = (_sums_before(of) + _sums_behind(of) for of in (self.high, self.low))  # of the others
        with np.errstate(divide="ignore", invalid="ignore"):
            low = np.where(self.low > 0, self.low / (self.low + most), 0.0) * (1 - error)
            high = np.where(self.high > 0, self.high / (self.high + least), 0.0) * (1 + error)
        total = self.best.sum()
        return _Law(self.best / total if total > 0 else self.best, low, high)

    def without(self, token: int) -> _Law:
        """Renormalised without one token; as it is where nothing else has mass."""
        best, low, high = self.best.copy(), self.low.copy(), self.high.copy()
        best[token], low[token], high[token] = best[token] * 0, 0.0, 0.0
        if not high.any():
            return _Law(best, low, high)
        # Some divide by the sum of what is left, others by 1 - q: both are right for a law that sums to 1.
        off = max(abs(1 - float(self.low.sum())), abs(1 - float(self.high.sum())))
        error = sum_error(low.size) + 2 * ROUNDING + FLOAT64_SLACK
        if float(self.low.sum()) < 1 + _NOMINAL and float(self.high.sum()) > 1 - _NOMINAL:
            left = float(low.sum())
            error += (off + ROUNDING) / left if left > 0 else inf
        most, least = (_sums_before(of) + _sums_behind(of) for of in (high, low))  # of the others
        with np.errstate(divide="ignore", invalid="ignore"):
            low = np.where(low > 0, low / (low + most), 0.0) * max(1 - error, 0.0)
            high = np.where(high > 0, high / (high + least) * (1 + error), 0.0)
        total = best.sum()
        return _Law(best / total if total > 0 else best, low, np.minimum(high, _MOST))

    def bonus(self) -> Bonus:
        """The draw from these masses."""
        if self.is_exact:
            return ExactRow(self.best.tolist()).bonus(())
        tokens = np.flatnonzero(self.high > 0)
        best, low, high = self.best[tokens], self.low[tokens], self.high[tokens]

        def bounds() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
            least, most = np.cumsum(low), np.cumsum(high)
            error = 2 * sum_error(tokens.size) + 4 * ROUNDING + FLOAT64_SLACK
            with np.errstate(divide="ignore", invalid="ignore"):
                lower = np.where(least > 0, least / (least + _sums_behind(high)), 0.0)
                upper = most / (most + _sums_behind(low))
            return lower * (1 - error), upper * (1 + error)

        return Bonus(tokens, np.cumsum(best).tolist(), low > 0, bounds)


def _test(child: int, slot: int, p: _Law, q: _Law, token: int) -> ChildTest:
    """Accept iff ``coin * q < p``; a q of 0 accepts whatever has mass."""

    def ratio(mass: Any, by: Any) -> Any:
        return mass / by if by > 0 else (inf if mass > 0 else 0)

    best = ratio(p.best[token], q.best[token])
    if p.is_exact and q.is_exact:
        # Nothing rounds but `coin * q` (or `p / q`), and only if q is no power of two. Rounding is monotone:
        # a coin at p / q or above gives p at least, so only a coin just below may be taken for one there.
        is_rounded = isinstance(best, Fraction) and q.best[token].numerator & (q.best[token].numerator - 1)
        lower, upper = best * _EXACT_ROUNDING if is_rounded else best, best
    else:
        lower = ratio(p.low[token], q.high[token]) * (1 - 2 * ROUNDING)
        upper = ratio(p.high[token], q.low[token]) * (1 + 2 * ROUNDING)
    # Who compares with min(1, p / q) rejects at a coin of exactly 1, where no coin should be.
    return ChildTest(child, slot, min(lower, 1), best, upper)


def _after_rejection(p: _Law, q: _Law) -> list[_Law]:
    """What may be left of p once a token sampled from q was rejected, the definition's first, undivided.

    ``relu(p - q)``; p itself where that is empty, which rounding (or a coin of 1) alone can bring about.
    """
    left = p.excess(q)
    may_be_empty, may_be_full = not (left.low > 0).any(), bool((left.high > 0).any())
    found = ([left] if may_be_full else []) + ([p] if may_be_empty else [])
    return found if left.best.any() else found[::-1]


def plans(
    rule: RuleName, row: Row, draft: NDArray[Any] | None, tree: DraftTree, node: int, *, is_capped: bool
) -> list[Plan]:
    """What the rule does at a node; several where float32 may find a residual empty, the definition's first.

    Args:
        rule: any but ``target_only``.

        row: the target's law there.

        draft: ``[V]`` as :func:`draft_law` gives it; None for ``draw_and_match``.

        tree: with one child a node for ``chain``.

        node: which.

        is_capped: whether no child may be accepted any more.
    """
    children = () if is_capped else tree.children[node]
    if rule == "draw_and_match":
        follow = {tree.token_ids[child]: child for child in children}
        return [Plan((), row.bonus(()), node, follow)]
    if not children:
        return [Plan((), row.bonus(()))]
    if draft is None:
        raise InvalidArgument(f"draft_probs=None, but must be [n, V] with rule={rule!r}")
    if rule == "chain" and len(children) > 1:
        raise InvalidArgument(
            f"node {node} has {len(children)} children, but must have one at most with rule='chain'"
        )
    p = _Law.of(row)
    exact = p.best.dtype == object
    q_best = _as_fractions(draft) if exact and draft.dtype != object else draft
    q_float = draft.astype(np.float64)
    q = _Law(q_best if exact else q_float, q_float, q_float, is_exact=True)
    slots = [node] if rule == "chain" else list(children)
    return list(_in_turn(row, p, q, tree, children, slots, ()))


def _in_turn(
    row: Row,
    p: _Law,
    q: _Law,
    tree: DraftTree,
    children: Sequence[int],
    slots: Sequence[int],
    tests: tuple[ChildTest, ...],
) -> Iterator[Plan]:
    """Test the first child; what may be left of p once it was rejected goes on to the next one."""
    token = tree.token_ids[children[0]]
    tests = (*tests, _test(children[0], slots[0], p, q, token))
    for left in _after_rejection(p, q):
        is_untouched = left is p
        if len(children) == 1:
            yield Plan(tests, row.bonus(()) if is_untouched and len(tests) == 1 else left.bonus())
        else:
            r = p if is_untouched else left.divided()
            yield from _in_turn(row, r, q.without(token), tree, children[1:], slots[1:], tests)
