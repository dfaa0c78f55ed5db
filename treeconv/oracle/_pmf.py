"""Exact outcome laws, and the coins at which a decision flips."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv.errors import InvalidArgument
from treeconv.oracle._rows import ExactRow
from treeconv.oracle._target_rows import TargetRows
from treeconv.oracle._walk import child_tokens, slots_of
from treeconv.tree import DraftTree, RowStatus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from treeconv.oracle._rows import Row

__all__ = [
    "Cell",
    "CriticalCoins",
    "acceptance_pmf",
    "critical_coins",
    "expected_accepted_length",
    "outcome_cells",
    "outcome_pmf",
    "sweep_coins",
]


def _rows(tree: DraftTree, target_probs: Any) -> TargetRows:
    if len(target_probs) < len(tree):
        raise InvalidArgument(
            f"len(target_probs)={len(target_probs)}, but must be >= {len(tree)}, one a node"
        )
    return target_probs if isinstance(target_probs, TargetRows) else TargetRows.exact(target_probs)


def _usable(row: Row, node: int) -> ExactRow:
    if row.status is not RowStatus.OK:
        raise InvalidArgument(f"target_probs[{node}] holds {row.status.name}, but must have positive mass")
    assert isinstance(row, ExactRow)
    return row


def _buckets(row: ExactRow, tokens: list[int]) -> tuple[list[tuple[Fraction, Fraction]], bool]:
    """Half-open coin interval of each child, empty ones included, and whether rejection leaves a residual."""
    intervals = []
    low = Fraction(0)
    for token in tokens:
        high = min(Fraction(1), low + row.mass(token))
        intervals.append((low, high))
        low = high
    left = row.bonus(tokens).may_have_mass
    if not left and low < 1:  # only for rows that sum to less than 1: the rest falls to the last child
        last = max(place for place, token in enumerate(tokens) if row.may_have_mass(token))
        intervals[last] = (intervals[last][0], Fraction(1))
    return intervals, left


@dataclass(frozen=True)
class Cell:
    """A box of coins that all give one outcome.

    Args:
        measure: its volume: the probability of the outcome's coins falling in this box.

        path: accepted nodes, root first.

        bonus: the bonus token.

        accept: slot of ``coins.accept`` -> ``(low, high)``, the half-open interval of each coin tossed.

        final: the interval of the final coin.
    """

    measure: Fraction
    path: tuple[int, ...]
    bonus: int
    accept: dict[int, tuple[Fraction, Fraction]]
    final: tuple[Fraction, Fraction]


def outcome_cells(tree: DraftTree, target_probs: Any, depth_cap: int | None = None) -> Iterator[Cell]:
    """Partition the coin space into boxes of one outcome each: a verifier is a step function of its coins.

    Args, Raises: as for :func:`outcome_pmf`.
    """
    rows = _rows(tree, target_probs)
    cap = slots_of(tree, depth_cap)
    if rows.rule != "target_only":
        yield from _cells_by_plan(tree, rows, cap)
        return
    pending: list[tuple[tuple[int, ...], Fraction, dict[int, tuple[Fraction, Fraction]]]] = [
        ((0,), Fraction(1), {})
    ]
    while pending:
        path, reach, coins = pending.pop()
        node = path[-1]
        row = _usable(rows[node], node)
        rejected: list[int] = []
        if len(path) < cap:
            rejected = child_tokens(tree, node)
            intervals, left = _buckets(row, rejected)
            for child, (low, high) in zip(tree.children[node], intervals, strict=True):
                if high > low:
                    pending.append(((*path, child), reach * (high - low), {**coins, node: (low, high)}))
            top = intervals[-1][1] if intervals else Fraction(0)
            if not left or top >= 1:
                continue
            reach *= 1 - top
            if rejected:
                coins = {**coins, node: (top, Fraction(1))}
        bonus = row.bonus(rejected)
        low = Fraction(0)
        for token, so_far in zip(bonus.tokens, bonus.sums, strict=True):
            high = Fraction(so_far) / Fraction(bonus.sums[-1])
            yield Cell(reach * (high - low), path, token, coins, (low, high))
            low = high


def _cells_by_plan(tree: DraftTree, rows: TargetRows, cap: int) -> Iterator[Cell]:
    everywhere = Fraction(0), Fraction(1)
    pending: list[tuple[tuple[int, ...], Fraction, dict[int, tuple[Fraction, Fraction]]]] = [
        ((0,), Fraction(1), {})
    ]
    while pending:
        path, reach, coins = pending.pop()
        node = path[-1]
        plan = rows.plans(tree, node, _usable(rows[node], node), is_capped=len(path) >= cap)[0]
        for test in plan.tests:
            edge = Fraction(min(Fraction(1), test.best))
            if edge > 0:
                pending.append(((*path, test.child), reach * edge, {**coins, test.slot: (Fraction(0), edge)}))
            reach *= 1 - edge
            coins = {**coins, test.slot: (edge, Fraction(1))}
        low = Fraction(0)
        for token, so_far in zip(plan.bonus.tokens, plan.bonus.sums, strict=True):
            high = Fraction(so_far) / Fraction(plan.bonus.sums[-1])
            measure, bucket = reach * (high - low), (low, high)
            low = high
            if not measure:
                continue
            if plan.slot is None:
                yield Cell(measure, path, int(token), coins, bucket)
            elif token in plan.follow:
                pending.append(((*path, plan.follow[int(token)]), measure, {**coins, plan.slot: bucket}))
            else:
                yield Cell(measure, path, int(token), {**coins, plan.slot: bucket}, everywhere)


def outcome_pmf(
    tree: DraftTree, target_probs: Any, depth_cap: int | None = None
) -> dict[tuple[int, ...], Fraction]:
    """The exact law of what one verification step emits, over uniform coins.

    Args:
        tree: n nodes; meant for small ones (every outcome is listed).

        target_probs: ``[n, V]`` floats (exact values), ints or Fractions: the target law at each node. Or
            :class:`TargetRows`, which another rule may decide: :meth:`TargetRows.under`.

        depth_cap: accept slots, root included; default: tree depth + 1.

    Returns:
        Emitted tokens (path without the root, then bonus) -> probability. Where rows sum to 1, so does
        the result.

    Raises:
        InvalidArgument: fewer rows than nodes, ``depth_cap`` < 1, or a reachable row without mass, with NaN
            or +inf.
    """
    pmf: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for cell in outcome_cells(tree, target_probs, depth_cap):
        tokens = (*(tree.token_ids[node] for node in cell.path[1:]), cell.bonus)
        pmf[tokens] += cell.measure
    return dict(pmf)


def acceptance_pmf(tree: DraftTree, target_probs: Any, depth_cap: int | None = None) -> dict[int, Fraction]:
    """The exact law of the number of accepted drafts."""
    pmf: dict[int, Fraction] = defaultdict(Fraction)
    for cell in outcome_cells(tree, target_probs, depth_cap):
        pmf[len(cell.path) - 1] += cell.measure
    return dict(pmf)


def expected_accepted_length(tree: DraftTree, target_probs: Any, depth_cap: int | None = None) -> Fraction:
    """E[accepted drafts] in closed form: the sum over non-root nodes of the mass of the path to each.

    Target-only verification accepts a prefix exactly when the target draws it, so a node within the cap
    is on the accepted path with probability ``prod p_parent(token)``.
    """
    rows = _rows(tree, target_probs)
    cap = slots_of(tree, depth_cap)
    reach = [Fraction(1)] + [Fraction(0)] * (len(tree) - 1)
    for node in range(1, len(tree)):
        parent = tree.parents[node]
        if tree.depths[node] < cap and reach[parent] > 0:
            reach[node] = reach[parent] * _usable(rows[parent], parent).mass(tree.token_ids[node])
    return sum(reach[1:], Fraction(0))


@dataclass(frozen=True)
class CriticalCoins:
    """Where decisions flip, as ``(lower, upper)`` pairs: equal where the oracle is exact.

    Args:
        accept: slot of ``coins.accept`` -> its boundaries; with target-only verification one a child, in test
            order: the accumulated mass after it.

        final: node -> one pair per boundary between two bonus tokens, for a walk that ends there.
    """

    accept: dict[int, list[tuple[Any, Any]]]
    final: dict[int, list[tuple[Any, Any]]]


def critical_coins(tree: DraftTree, target_probs: Any, depth_cap: int | None = None) -> CriticalCoins:
    """Every coin at which the decision at a usable node flips, reachable or not.

    Args:
        tree: n nodes.

        target_probs: ``[n, V]`` probabilities taken exactly, or :class:`TargetRows`.

        depth_cap: accept slots, root included; default: tree depth + 1.

    Raises:
        InvalidArgument: fewer rows than nodes, or ``depth_cap`` < 1.
    """
    rows = _rows(tree, target_probs)
    cap = slots_of(tree, depth_cap)
    accept: dict[int, list[tuple[Any, Any]]] = {}
    final = {}
    for node, depth in enumerate(tree.depths):
        if depth >= cap or rows[node].status is not RowStatus.OK:
            continue
        if rows.rule != "target_only":
            plan = rows.plans(tree, node, rows[node], is_capped=depth + 1 >= cap)[0]
            accept |= {test.slot: [(test.lower, test.upper)] for test in plan.tests}
            if plan.slot is None:
                final[node] = plan.bonus.boundaries()
            else:
                accept[plan.slot] = plan.bonus.boundaries()
            continue
        tokens = child_tokens(tree, node) if depth + 1 < cap else []
        if tokens:
            accept[node] = rows[node].accept_bounds(tokens)
        final[node] = rows[node].bonus(tokens).boundaries()
    return CriticalCoins(accept, final)


_EXTREMES = [0.0, float(np.float32(1 - 2**-24)), 1.0]


def _inside(low: Any, high: Any) -> float | None:
    """A float32 strictly inside ``[low, high)`` if there is one: its middle."""
    if low >= high:
        return None
    coin = float(np.float32(float(low) + (float(high) - float(low)) / 2))
    return coin if low <= coin < high and coin < 1 else None


def _beside(lower: Any, upper: Any) -> list[float]:
    """The float32 values at both edges of a boundary, and their outer neighbours, within [0, 1]."""
    coins = set()
    for edge in (lower, upper):
        at = np.float32(min(float(edge), 2.0))  # a ratio p / q may be too large for float32
        coins |= {float(at), float(np.nextafter(at, np.float32(-1))), float(np.nextafter(at, np.float32(2)))}
    return sorted(coin for coin in coins if 0 <= coin <= 1)


def _sweep_by_plan(
    tree: DraftTree, rows: TargetRows, cap: int, max_final: int
) -> list[tuple[list[float], float]]:
    vectors: list[tuple[list[float], float]] = []
    pending: list[tuple[tuple[int, ...], list[float]]] = [((0,), [0.5] * len(tree))]

    def at(coins: list[float], slot: int, coin: float) -> list[float]:
        return [*coins[:slot], coin, *coins[slot + 1 :]]

    while pending:
        path, coins = pending.pop()
        node = path[-1]
        row = rows[node]
        if row.status is not RowStatus.OK:
            vectors.append((coins, 0.5))
            continue
        plan = rows.plans(tree, node, row, is_capped=len(path) >= cap)[0]
        for test in plan.tests:
            tried = [*_beside(test.lower, test.upper), *_EXTREMES]
            vectors += [(at(coins, test.slot, coin), 0.5) for coin in tried]
            accepting, rejecting = _inside(0, min(1, test.lower)), _inside(test.upper, 1)
            if accepting is not None:
                pending.append(((*path, test.child), at(coins, test.slot, accepting)))
            if rejecting is None:
                break
            coins = at(coins, test.slot, rejecting)
        else:
            bounds = plan.bonus.boundaries()
            step = max(1, len(bounds) // max_final)
            tried = [coin for edges in bounds[::step] for coin in _beside(*edges)] + _EXTREMES
            if plan.slot is None:
                vectors += [(coins, coin) for coin in tried]
                continue
            vectors += [(at(coins, plan.slot, coin), 0.5) for coin in tried]
            edges = [(0, 0), *bounds, (1, 1)]
            for place, token in enumerate(plan.bonus.tokens):
                middle = _inside(edges[place][1], edges[place + 1][0])
                if token in plan.follow and middle is not None:
                    pending.append(((*path, plan.follow[int(token)]), at(coins, plan.slot, middle)))
    return vectors


def sweep_coins(
    tree: DraftTree,
    rows: TargetRows,
    depth_cap: int | None = None,
    max_final: int = 64,
) -> list[tuple[list[float], float]]:
    """Coin vectors that test every reachable boundary from both sides, and the extremes 0 and 1.

    The coins above a node are set to the middle of the bucket that leads there. Ambiguous rows
    (NaN and the like) end the sweep below them.

    Args:
        tree: n nodes.

        rows: the target law.

        depth_cap: accept slots, root included; default: tree depth + 1.

        max_final: bonus boundaries swept per node; evenly spaced ones are taken where there are more.

    Returns:
        ``(accept [n], final)`` pairs of float32 values.
    """
    cap = slots_of(tree, depth_cap)
    if rows.rule != "target_only":
        return _sweep_by_plan(tree, rows, cap, max_final)
    vectors: list[tuple[list[float], float]] = []
    pending: list[tuple[tuple[int, ...], list[float]]] = [((0,), [0.5] * len(tree))]
    while pending:
        path, coins = pending.pop()
        node = path[-1]
        row = rows[node]

        def vector(coin: float | None, final: float, coins: list[float] = coins, node: int = node) -> None:
            accept = coins.copy()
            if coin is not None:
                accept[node] = coin
            vectors.append((accept, final))

        if row.status is not RowStatus.OK:
            vector(None, 0.5)
            continue
        tokens = child_tokens(tree, node) if len(path) < cap else []
        reject: float | None = coins[node]
        if tokens:
            floor: Any = 0
            for child, (lower, upper) in zip(tree.children[node], row.accept_bounds(tokens), strict=True):
                for coin in _beside(lower, upper):
                    vector(coin, 0.5)
                middle = _inside(floor, lower)
                if middle is not None and upper > floor:
                    steered = coins.copy()
                    steered[node] = middle
                    pending.append(((*path, child), steered))
                floor = max(floor, upper)
            for coin in _EXTREMES:
                vector(coin, 0.25)
            reject = _inside(floor, 1)
        if reject is None or not row.bonus(tokens).may_have_mass:
            continue
        bounds = row.bonus(tokens).boundaries()
        step = max(1, len(bounds) // max_final)
        for lower, upper in bounds[::step]:
            for coin in _beside(lower, upper):
                vector(reject, coin)
        for coin in _EXTREMES:
            vector(reject, coin)
    return vectors
