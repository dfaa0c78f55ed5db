"""The reference walk, written once: exact where the numbers are exact, a set of right answers elsewhere."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from treeconv.errors import InvalidArgument
from treeconv.oracle._target_rows import TargetRows
from treeconv.tree import Coins, DraftTree, RowStatus

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from treeconv.oracle._bonus import Bonus
    from treeconv.oracle._rows import Row
    from treeconv.rules import RuleName

__all__ = ["Stop", "Walk", "admissible_stops", "canonical_walk", "child_tokens", "slots_of", "walk"]


@dataclass(frozen=True)
class Walk:
    """What one verification step decided.

    Args:
        path: accepted nodes, root first; empty where ``status`` is not OK.

        tokens: emitted ids: the path's tokens without the root's, then the bonus; empty likewise.

        status: OK, or what the first unusable visited row held.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    status: RowStatus = RowStatus.OK

    @property
    def bonus(self) -> int | None:
        """The token drawn behind the path; None where nothing was emitted."""
        return self.tokens[-1] if self.tokens else None


@dataclass(frozen=True)
class Stop:
    """One admissible end of the acceptance walk.

    Args:
        path: accepted nodes, root first; empty where ``status`` is not OK.

        rejected: the tokens that cannot be drawn at its end: tested and rejected there (or, where the rule
            draws and matches, drafted there).

        status: OK, or what the unusable row held.

        row: the law it was decided by: the bonus is drawn from this one, not from another alternative.

        draw: what the bonus is drawn from, where that is not the row without ``rejected``.

        coin: what draws it, where that is not the final coin.
    """

    path: tuple[int, ...]
    rejected: tuple[int, ...]
    status: RowStatus = RowStatus.OK
    row: Row | None = field(default=None, compare=False)
    draw: Bonus | None = field(default=None, compare=False)
    coin: float | None = field(default=None, compare=False)

    def admits(self, token: int, final: float) -> bool:
        """Whether a correct sampler that stopped here may draw ``token`` with this final coin."""
        if self.row is None or token in self.rejected:
            return False
        draw = self.draw or self.row.bonus(self.rejected)
        return draw.admits(token, final if self.coin is None else self.coin)

    def admitted(self, final: float) -> list[int]:
        """Every token that a correct sampler may draw here; none where the row is unusable."""
        if self.row is None:
            return []
        draw = self.draw or self.row.bonus(self.rejected)
        tokens = draw.admitted(final if self.coin is None else self.coin)
        return [token for token in tokens if token not in self.rejected]


def child_tokens(tree: DraftTree, node: int) -> list[int]:
    """Tokens of a node's children, in test order."""
    return [tree.token_ids[child] for child in tree.children[node]]


def _choices(row: Row, tokens: Sequence[int], coin: float) -> Iterator[int | None]:
    """Admissible decisions at a node: places of children that may be accepted, None to reject them all."""
    bounds = row.accept_bounds(tokens)
    floor: Any = 0
    for place, ((lower, upper), token) in enumerate(zip(bounds, tokens, strict=True)):
        if floor <= coin < upper and row.may_have_mass(token):
            yield place
        floor = max(floor, lower)
    if floor > coin:
        return
    # All children may be rejected: the bonus comes from what is left...
    bonus = row.bonus(tokens)
    if bonus.may_have_mass:
        yield None
    # ...and where nothing is left (they cover the support), the last child of positive mass is accepted.
    if tokens and row.residual_may_be_empty(tokens):
        for place in reversed(range(len(tokens))):
            if row.may_have_mass(tokens[place]):
                yield place
            if row.must_have_mass(tokens[place]):
                return


def admissible_stops(
    tree: DraftTree, rows: TargetRows, accept: Sequence[float], depth_cap: int
) -> Iterator[Stop]:
    """Every end of the acceptance walk that a correct float32 sampler may reach with these coins.

    Outside the ambiguity band that is one. Both answers are followed inside it, and every law that a
    filter may leave where its cut is decided there; a stop says which law it was.
    """
    if rows.rule != "target_only":
        yield from _stops_by_plan(tree, rows, accept, depth_cap)
        return
    pending: list[tuple[int, ...]] = [(0,)]
    while pending:
        path = pending.pop()
        node = path[-1]
        accepted = set()
        tokens = child_tokens(tree, node) if len(path) < depth_cap else []
        for row in rows.alternatives(node):
            if row.status is not RowStatus.OK:
                yield Stop((), (), row.status)
                continue
            if len(path) >= depth_cap:
                yield Stop(path, (), row=row)
                continue
            for place in set(_choices(row, tokens, float(accept[node]))):
                if place is None:
                    yield Stop(path, tuple(tokens), row=row)
                else:
                    accepted.add(place)
        pending.extend((*path, tree.children[node][place]) for place in accepted)


def _stops_by_plan(
    tree: DraftTree, rows: TargetRows, accept: Sequence[float], depth_cap: int
) -> Iterator[Stop]:
    pending: list[tuple[int, ...]] = [(0,)]
    while pending:
        path = pending.pop()
        node = path[-1]
        accepted: set[int] = set()
        for row in rows.alternatives(node):
            if row.status is not RowStatus.OK:
                yield Stop((), (), row.status)
                continue
            for plan in rows.plans(tree, node, row, is_capped=len(path) >= depth_cap):
                for test in plan.tests:
                    coin = float(accept[test.slot])
                    if coin < test.upper:
                        accepted.add(test.child)
                    if coin < test.lower:
                        break
                else:
                    own = None if plan.slot is None else float(accept[plan.slot])
                    drawn = set() if own is None else set(plan.bonus.admitted(own))
                    accepted |= {plan.follow[token] for token in drawn & set(plan.follow)}
                    if own is None or drawn - set(plan.follow):
                        yield Stop(path, tuple(plan.follow), row=row, draw=plan.bonus, coin=own)
        pending.extend((*path, child) for child in accepted)


def _walk_by_plan(
    tree: DraftTree, rows: TargetRows, accept: Sequence[float], final: float, depth_cap: int
) -> Walk:
    path = [0]
    while True:
        node = path[-1]
        row = rows[node]
        if row.status is not RowStatus.OK:
            return Walk((), (), row.status)
        plan = rows.plans(tree, node, row, is_capped=len(path) >= depth_cap)[0]
        child = next((test.child for test in plan.tests if accept[test.slot] < test.best), None)
        if child is None:
            bonus = plan.bonus.draw(final if plan.slot is None else accept[plan.slot])
            child = plan.follow.get(bonus)
            if child is None:
                return Walk(tuple(path), (*(tree.token_ids[node] for node in path[1:]), bonus))
        path.append(child)


def canonical_walk(
    tree: DraftTree, rows: TargetRows, accept: Sequence[float], final: float, depth_cap: int
) -> Walk:
    """The walk as defined, decided at each boundary's best estimate.

    At node ``i``, with ``acc = 0``: for each child ``c`` in order ``acc += p_i(c)``; accept ``c`` iff
    ``p_i(c) > 0 and coin_i < acc``. None accepted, or the depth cap reached: the bonus is the smallest
    ``t`` with ``cumsum(residual)(t) > v * sum(residual)``, the residual being ``p_i`` without the children
    tested and rejected. No such ``t``: the last one of positive residual. Empty residual: accept the last
    child of positive mass. Other rules (``rows.rule``): :mod:`treeconv.rules`.
    """
    if rows.rule != "target_only":
        return _walk_by_plan(tree, rows, accept, final, depth_cap)
    path = [0]
    while True:
        node = path[-1]
        row = rows[node]
        if row.status is not RowStatus.OK:
            return Walk((), (), row.status)
        rejected: list[int] = []
        accepted = None
        if len(path) < depth_cap:
            coin = accept[node]
            acc: Any = 0
            last_with_mass = None
            for child in tree.children[node]:
                token = tree.token_ids[child]
                mass = row.mass(token)
                acc += mass
                if mass > 0:
                    last_with_mass = child
                    if coin < acc:
                        accepted = child
                        break
                rejected.append(token)
            if accepted is None and not row.bonus(rejected).may_have_mass:
                accepted = last_with_mass
        if accepted is None:
            bonus = row.bonus(rejected).draw(final)
            return Walk(tuple(path), (*(tree.token_ids[node] for node in path[1:]), bonus))
        path.append(accepted)


def slots_of(tree: DraftTree, depth_cap: int | None) -> int:
    """The accept slots that a depth cap means, the root's included; InvalidArgument if there are none."""
    if depth_cap is None:
        return tree.depth + 1
    if depth_cap < 1:
        raise InvalidArgument(f"depth_cap={depth_cap!r}, but must be >= 1: the root takes one slot")
    return depth_cap


def walk(
    tree: DraftTree,
    target_probs: Any,
    coins: Coins,
    depth_cap: int | None = None,
    *,
    rule: RuleName = "target_only",
    draft_probs: Any = None,
) -> Walk:
    """Verify one tree exactly, in rational arithmetic.

    Args:
        tree: n nodes.

        target_probs: ``[n, V]`` floats (exact values), ints or Fractions: the target law at each node
            *after* temperature. Rows need not sum to 1.

        coins: ``accept [n]`` (or longer) and ``final``, in [0, 1]; floats are taken at their exact
            values, Fractions are welcome.

        depth_cap: accept slots, root included; default: tree depth + 1.

        rule: one of :data:`treeconv.rules.RULES`.

        draft_probs: ``[n, V]``, the laws that each node's children were sampled from, for ``chain`` and
            ``recursive``.

    Returns:
        The :class:`Walk`; its ``status`` says so where a visited row cannot be sampled from.

    Raises:
        InvalidArgument: fewer rows or coins than nodes, coins outside [0, 1], ``depth_cap`` < 1, draft laws
            that are missing, or a second child with ``chain``.
    """
    if len(target_probs) < len(tree):
        raise InvalidArgument(
            f"len(target_probs)={len(target_probs)}, but must be >= {len(tree)}, one a node"
        )
    accept = coins.accept.tolist() if hasattr(coins.accept, "tolist") else list(coins.accept)
    final = coins.final.tolist() if hasattr(coins.final, "tolist") else coins.final
    final = final[0] if isinstance(final, (list, tuple)) else final
    if len(accept) < len(tree):
        raise InvalidArgument(f"len(coins.accept)={len(accept)}, but must be >= {len(tree)}, one per node")
    for name, coin in [
        *((f"coins.accept[{node}]", coin) for node, coin in enumerate(accept)),
        ("final", final),
    ]:
        if not 0 <= coin <= 1:
            raise InvalidArgument(f"{name}={coin!r}, but must be in [0, 1]")
    cap = slots_of(tree, depth_cap)
    rows = target_probs if isinstance(target_probs, TargetRows) else TargetRows.exact(target_probs)
    if rule != "target_only":
        rows = rows.under(rule, draft_probs)
    return canonical_walk(tree, rows, accept, final, cap)
