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
from treeconv.oracle._walk import child_tokens
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

        accept: node -> ``(low, high)``, the half-open interval of each visited node's coin.

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
    cap = tree.depth + 1 if depth_cap is None else depth_cap
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


def outcome_pmf(
    tree: DraftTree, target_probs: Any, depth_cap: int | None = None
) -> dict[tuple[int, ...], Fraction]:
    """The exact law of what one verification step emits, over uniform coins.

    Args:
        tree: n nodes; meant for small ones (every outcome is listed).

        target_probs: ``[n, V]`` floats (exact values), ints or Fractions: the target law at each node.

        depth_cap: accept slots, root included; default: tree depth + 1.

    Returns:
        Emitted tokens (path without the root, then bonus) -> probability. Where rows sum to 1, so does
        the result.

    Raises:
        InvalidArgument: fewer rows than nodes, or a reachable row without mass, with NaN or +inf.
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
    cap = tree.depth + 1 if depth_cap is None else depth_cap
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
        accept: node -> one pair per child, in test order: the accumulated mass after it.

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
        InvalidArgument: fewer rows than nodes.
    """
    rows = _rows(tree, target_probs)
    cap = tree.depth + 1 if depth_cap is None else depth_cap
    accept, final = {}, {}
    for node, depth in enumerate(tree.depths):
        if depth >= cap or rows[node].status is not RowStatus.OK:
            continue
        tokens = child_tokens(tree, node) if depth + 1 < cap else []
        if tokens:
            accept[node] = rows[node].accept_bounds(tokens)
        final[node] = rows[node].bonus(tokens).boundaries()
    return CriticalCoins(accept, final)


def _inside(low: Any, high: Any) -> float | None:
    """A float32 strictly inside ``[low, high)`` if there is one: its middle."""
    coin = float(np.float32(float(low) + (float(high) - float(low)) / 2))
    return coin if low <= coin < high and coin < 1 else None


def _beside(lower: Any, upper: Any) -> list[float]:
    """The float32 values at both edges of a boundary, and their outer neighbours, within [0, 1]."""
    coins = set()
    for edge in (lower, upper):
        at = np.float32(float(edge))
        coins |= {float(at), float(np.nextafter(at, np.float32(-1))), float(np.nextafter(at, np.float32(2)))}
    return sorted(coin for coin in coins if 0 <= coin <= 1)


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
    cap = tree.depth + 1 if depth_cap is None else depth_cap
    extremes = [0.0, float(np.float32(1 - 2**-24)), 1.0]
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
            for coin in extremes:
                vector(coin, 0.25)
            reject = _inside(floor, 1)
        if reject is None or not row.bonus(tokens).may_have_mass:
            continue
        bounds = row.bonus(tokens).boundaries()
        step = max(1, len(bounds) // max_final)
        for lower, upper in bounds[::step]:
            for coin in _beside(lower, upper):
                vector(reject, coin)
        for coin in extremes:
            vector(reject, coin)
    return vectors
