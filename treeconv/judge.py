"""Hold what a verifier returned against the oracle, and say in plain words what is wrong.

Everything here is about one request under one coin vector; :mod:`treeconv.laws` decides which.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv import oracle
from treeconv.errors import LawBroken
from treeconv.processors import RequestProcessors
from treeconv.tree import DraftTree, RowStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from treeconv.case import Request, VerifyCase
    from treeconv.filters import FilterOrder
    from treeconv.oracle import TargetRows
    from treeconv.rules import RuleName
    from treeconv.tree import VerifyOutput

__all__ = ["Observed", "Violation", "explain", "is_ambiguous", "judge", "observe", "target_rows"]

_MAX_LISTED = 8  # masses listed per node in a picture
_MAX_LINES = 16  # of a picture
_MAX_BESIDE = 3  # requests beside the broken one whose settings are told


@dataclass(frozen=True)
class Observed:
    """What a verifier did with one request; ``broken`` says how its output contradicts itself."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    status: RowStatus
    broken: str | None = None

    def __str__(self) -> str:
        if self.broken:
            return self.broken
        if self.status is not RowStatus.OK:
            return f"status {self.status.name}, nothing emitted"
        nodes = " -> ".join(map(str, self.path))
        return f"path {nodes}, then bonus token {self.tokens[-1]} (emitted {list(self.tokens)})"


@dataclass(eq=False)  # not frozen: Python sets an exception's traceback as it passes a context manager
class Violation(Exception):
    """One wrong decision.

    Args:
        request: index in the case.

        got: what the verifier did; where it is an :class:`Observed`, the picture shows its path.

        want: what the oracle does.

        why: the deciding number: boundary, coin and their distance.

        coins: what was tossed, where not the request's own.

        case: what was judged, where it is not the law's case itself but one made of it.
    """

    request: int
    got: Observed | str
    want: str
    why: str = ""
    coins: tuple[tuple[float, ...], float] | None = field(default=None)
    case: VerifyCase | None = None


def target_rows(
    request: Request, kind: str, filter_order: FilterOrder = "sequential", rule: RuleName = "target_only"
) -> TargetRows:
    """The oracle's view of a request's rows: processors, filters in the case's order, the case's rule."""
    cuts = request.cuts(filter_order)
    held = request.processors
    if held.kinds:
        rows = oracle.TargetRows.from_processed(request.rows, request.tree, held, request.temperature, cuts)
    elif kind == "probs":
        rows = oracle.TargetRows.from_probs(request.rows, cuts)
    else:
        rows = oracle.TargetRows.from_logits(request.rows, request.temperature, cuts)
    return rows if rule == "target_only" else rows.under(rule, request.draft_probs)


def observe(trees: Sequence[DraftTree], output: VerifyOutput, slots: int) -> list[Observed]:
    """Read SGLang's layout back per request, and check that it holds one root path each.

    ``broken`` is set where counts, indices and tokens contradict each other: then no law is kept.
    """
    rows = zip(
        trees,
        output.accept_index.tolist(),
        output.accept_token_num.tolist(),
        output.status.tolist(),
        strict=True,
    )
    predicts = output.predicts.tolist()
    return [
        _observe_one(tree, row, count, status, predicts, request, slots)
        for request, (tree, row, count, status) in enumerate(rows)
    ]


def _observe_one(
    tree: DraftTree,
    row: list[int],
    count: int,
    status: int,
    predicts: list[int],
    request: int,
    slots: int,
) -> Observed:
    base = request * slots

    def broken(what: str) -> Observed:
        return Observed((), (), RowStatus.OK, f"accept_index {row}, accept_token_num {count}: {what}")

    if status not in {known.value for known in RowStatus}:
        return broken(f"status {status} is none of {', '.join(str(known.value) for known in RowStatus)}")
    if status:
        if count or any(index != -1 for index in row):
            return broken(f"status {status} but something was emitted")
        if any(token != -1 for token in predicts[base : base + slots]):
            return broken(f"status {status} but predicts holds tokens")
        return Observed((), (), RowStatus(status))
    if not 0 <= count < len(row):
        return broken(f"the count must be in [0, {len(row) - 1}], the accept slots besides the root")
    used, rest = row[: count + 1], row[count + 1 :]
    if any(index != -1 for index in rest):
        return broken("slots behind the accepted path must be -1")
    path = tuple(index - base for index in used)
    if path[0] != 0:
        return broken(f"must begin at the root's flat index {base}")
    for before, node in pairwise(path):
        if not 0 < node < len(tree) or tree.parents[node] != before:
            return broken(f"flat index {node + base} is no child of {before + base}: not one root path")
    tokens = tuple(predicts[index] for index in used)
    for node, token in zip(path[1:], tokens[:-1], strict=True):
        if token != tree.token_ids[node]:
            return broken(f"predicts says {token} before node {node}, whose token is {tree.token_ids[node]}")
    return Observed(path, tokens, RowStatus.OK)


def is_ambiguous(
    tree: DraftTree, rows: TargetRows, accept: Sequence[float], final: float, depth_cap: int
) -> bool:
    """Whether float32 may rightly decide these coins in more than one way."""
    outcomes: set[tuple[tuple[int, ...], int]] = set()
    for stop in oracle.admissible_stops(tree, rows, accept, depth_cap):
        outcomes |= {(stop.path, token) for token in stop.admitted(final)} or {(stop.path, -1)}
    return len(outcomes) != 1


def judge(
    tree: DraftTree,
    rows: TargetRows,
    accept: Sequence[float],
    final: float,
    depth_cap: int,
    observed: Observed,
) -> tuple[str, str] | None:
    """None if the decision is right, or inside the ambiguity band; else ``(want, why)``."""
    if observed.broken is None:
        for stop in oracle.admissible_stops(tree, rows, accept, depth_cap):
            if stop.status is not observed.status or stop.path != observed.path:
                continue
            if stop.status is not RowStatus.OK:
                return None
            if stop.admits(observed.tokens[-1], final):
                return None
    want = oracle.canonical_walk(tree, rows, accept, final, depth_cap)
    wanted = Observed(want.path, want.tokens, want.status)
    return str(wanted), _deciding_number(tree, rows, accept, final, depth_cap, observed, wanted)


def _deciding_number(
    tree: DraftTree,
    rows: TargetRows,
    accept: Sequence[float],
    final: float,
    depth_cap: int,
    got: Observed,
    want: Observed,
) -> str:
    """Where the two walks part, the coin that decided there, and how far it is from the boundary."""
    if got.broken or not want.path or not got.path:
        return ""
    shared = 0
    while shared < min(len(got.path), len(want.path)) and got.path[shared] == want.path[shared]:
        shared += 1
    node = want.path[shared - 1]
    if rows.rule != "target_only":
        return _deciding_plan(tree, rows, accept, final, node, shared >= depth_cap, got, want)
    tested = oracle.child_tokens(tree, node) if shared < depth_cap else []
    if got.path != want.path:
        coin: float = accept[node]
        what = "coin"
        bounds = rows[node].accept_bounds(tested)
        if not bounds:
            return f"node {node}: no child may be accepted here (accept slots: {depth_cap})"
        if len(got.path) == shared and not rows[node].bonus(tested).may_have_mass:
            return (
                f"node {node}: its children hold all the mass there is. Where rounding, or a coin of 1,"
                f" rejects every one (coin {coin!r}), nothing is left to draw: the last child with mass is"
                " accepted"
            )
    else:
        coin, what = final, "final coin"
        bounds = rows[node].bonus(tested).boundaries()
        token = got.tokens[-1]
        if not rows[node].may_have_mass(token):
            return f"node {node}: token {token} has no mass there (p = 0)"
        if token in tested:
            return f"node {node}: token {token} was tested and rejected there, so it is not in the residual"
        if not bounds:
            return f"node {node}: only token {want.tokens[-1]} is left in the residual"
    return f"node {node}: " + _distance(what, coin, bounds)


def _distance(what: str, coin: float, bounds: Sequence[tuple[Any, Any]]) -> str:
    lower, upper = min(bounds, key=lambda bound: abs(float(bound[0]) - coin))
    distance = coin - float(lower)
    band = float(upper) - float(lower) if upper != lower else 0.0
    return (
        f"{what} {coin!r} against boundary {float(lower)!r}:"
        f" distance {distance:+.3g}, ambiguity band {band:.1g}"
    )


def _deciding_plan(
    tree: DraftTree,
    rows: TargetRows,
    accept: Sequence[float],
    final: float,
    node: int,
    is_capped: bool,
    got: Observed,
    want: Observed,
) -> str:
    """The same for a rule that tests children by their own boundaries, or draws and matches."""
    plan = rows.plans(tree, node, rows[node], is_capped=is_capped)[0]
    if got.path == want.path:
        coin, what = (final, "final coin") if plan.slot is None else (accept[plan.slot], "coin")
        bounds = plan.bonus.boundaries()
        token = got.tokens[-1]
        if token not in plan.bonus.tokens and not plan.tests:
            return f"node {node}: token {token} has no mass there (p = 0)"
        if token not in plan.bonus.tokens:
            return f"node {node}: nothing is left of token {token} (p <= q) in what is drawn from there"
        return f"node {node}: " + (
            _distance(what, coin, bounds) if bounds else "only one token is left there"
        )
    if plan.slot is not None:
        return f"node {node}: " + _distance("coin", accept[plan.slot], plan.bonus.boundaries() or [(0, 0)])
    numbers = []
    for test in plan.tests:
        numbers.append((test, accept[test.slot]))
        if accept[test.slot] < test.best:
            break
    if not numbers:
        return f"node {node}: no child may be accepted here"
    test, coin = min(numbers, key=lambda pair: abs(float(pair[0].best) - pair[1]))
    ratio = f"node {node}: child {test.child} is accepted below p/q = {float(test.best):.9g}; coin of node"
    return f"{ratio} {test.slot}: " + _distance("", coin, [(test.lower, test.upper)]).lstrip()


def _masses(rows: TargetRows, node: int, vocab: int) -> str:
    row = rows[node]
    if row.status is not RowStatus.OK:
        return f"row: {row.status.name}"
    masses = [(token, float(row.mass(token))) for token in range(min(vocab, 4096)) if row.mass(token)]
    if len(masses) > _MAX_LISTED:
        masses = sorted(masses, key=lambda item: -item[1])[:_MAX_LISTED]
        return "p = {" + ", ".join(f"{token}: {mass:.4g}" for token, mass in masses) + ", ...}"
    return "p = {" + ", ".join(f"{token}: {mass:.6g}" for token, mass in masses) + "}"


def _tosses(rule: RuleName, tree: DraftTree, node: int) -> bool:
    """Whether the accept coin of a node's slot is ever looked at."""
    if rule == "recursive":
        return node > 0
    return rule == "draw_and_match" or bool(tree.children[node])


def _draft_masses(row: Any) -> str:
    named = [(token, float(mass)) for token, mass in enumerate(row) if mass != 0]
    shown = sorted(named, key=lambda item: -item[1])[:_MAX_LISTED] if len(named) > _MAX_LISTED else named
    more = ", ..." if len(shown) < len(named) else ""
    return "  q = {" + ", ".join(f"{token}: {mass:.4g}" for token, mass in shown) + more + "}"


def _worth_drawing(
    tree: DraftTree,
    rows: TargetRows,
    accept: Sequence[float],
    final: float,
    depth_cap: int,
    got: Observed | str,
) -> set[int]:
    """All nodes of a small tree; of a large one the two paths and the siblings tested beside them."""
    if len(tree) < _MAX_LINES:
        return set(range(len(tree)))
    keep = set(oracle.canonical_walk(tree, rows, accept, final, depth_cap).path) | {0}
    if isinstance(got, Observed):
        keep |= set(got.path)
    for node in sorted(keep - {0}):
        siblings = tree.children[tree.parents[node]]
        place = siblings.index(node)
        keep |= set(siblings[max(0, place - 1) : place + 2])
    return keep


def _settings(case: VerifyCase, index: int) -> str:
    """What a request asks for beside its tree, each part after a comma; "" where that is nothing."""
    request = case.requests[index]
    cuts = request.cuts(case.filter_order)
    parts = (
        "" if case.kind == "probs" else f"temperature {request.temperature!r}",
        str(request.processors) if request.processors != RequestProcessors() else "",
        str(cuts) if cuts.are_on(case.vocab_size) else "",
    )
    return "".join(f", {part}" for part in parts if part)


def explain(
    law: str,
    meaning: str,
    backend: str,
    case: VerifyCase,
    violation: Violation,
) -> LawBroken:
    """The failure a person reads: law, picture of the tree with its laws and coins, got, want, distance."""
    case = violation.case or case
    request: Any = case.requests[violation.request]
    accept, final = violation.coins or (tuple(request.accept.tolist()), request.final)
    rows = target_rows(request, case.kind, case.filter_order, case.rule)
    draft_probs = request.draft_probs
    keep = _worth_drawing(request.tree, rows, accept, final, case.effective_depth_cap, violation.got)
    cuts = request.cuts(case.filter_order)
    is_filtered = cuts.are_on(case.vocab_size)
    plain = target_rows(replace(request, top_k=None, top_p=1.0, min_p=0.0), case.kind)
    notes = {
        node: _masses(rows, node, case.vocab_size)
        + (f" of {_masses(plain, node, case.vocab_size)} before filters" if is_filtered else "")
        + (
            _draft_masses(draft_probs[node])
            if draft_probs is not None and request.tree.children[node]
            else ""
        )
        + (f"  coin {accept[node]!r}" if _tosses(case.rule, request.tree, node) else "")
        for node in keep
    }
    picture = request.tree.draw(notes, keep).splitlines()
    if len(picture) > _MAX_LINES:
        picture = [*picture[: _MAX_LINES - 1], f"... ({len(request.tree)} nodes in all)"]
    rule = "" if case.rule == "target_only" else f", rule {case.rule}"
    summary = (
        f"request {violation.request} of {len(case.requests)}, vocabulary {case.vocab_size}, {case.kind}"
        f" {case.rows_dtype}{_settings(case, violation.request)}{rule},"
        f" {case.effective_depth_cap} accept slots, final coin {final!r}"
    )
    others = [index for index in range(len(case.requests)) if index != violation.request]
    beside = "; ".join(f"request {index}{_settings(case, index)}" for index in others[:_MAX_BESIDE])
    lines = [
        f"law broken: {law}",
        f"  meaning:  {meaning}",
        f"  backend:  {backend}",
        f"  case:     {summary}",
        *([f"  beside:   {beside}" + ("; ..." if others[_MAX_BESIDE:] else "")] if others else []),
        *("  " + line for line in picture),
        f"  got:      {violation.got}",
        f"  want:     {violation.want}",
    ]
    if violation.why:
        lines.append(f"  because:  {violation.why}")
    if case.kind == "logits" and _overflows(request.rows, request.temperature):
        lines.append(
            "  note:     at this temperature logits / T overflows float32: take (x - max) / T, unclamped"
        )
    return LawBroken("\n".join(lines), law=law, backend=backend, case=case)


def _overflows(rows: NDArray[np.float32], temperature: float) -> bool:
    """Whether the naive quotient of a logit and the temperature is beyond float32."""
    largest = float(np.abs(rows[np.isfinite(rows)]).max(initial=0.0))
    return temperature > 0 and largest > temperature * float(np.finfo(np.float32).max)
