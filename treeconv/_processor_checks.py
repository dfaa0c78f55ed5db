"""What the laws about bias, bitmask and penalties do to a backend; like :mod:`treeconv._law_checks`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from treeconv import _law_checks as plain
from treeconv import oracle
from treeconv._drive import decide, judge_made, spread_coins
from treeconv._planted_cases import forbidden_top, repeated_top
from treeconv.judge import Observed, Violation, is_ambiguous, target_rows
from treeconv.tree import DraftTree, RowStatus

if TYPE_CHECKING:
    from treeconv.backends.base import Backend
    from treeconv.case import Request, VerifyCase
    from treeconv.oracle import TargetRows

_MAX_COINS = 24  # coin vectors whose walks are taken up again at each of their nodes


def processed(case: VerifyCase, backend: Backend, device: str) -> int:
    """The whole case at its coins and at spread ones, then every boundary of each request's processed law."""
    judged = plain.oracle_agreement(case, backend, device)
    judged += plain.critical_coins(case, backend, device)
    return judged + judge_made([*forbidden_top(case), *repeated_top(case)], backend, device, 8)


def _starting_at(request: Request, node: int) -> tuple[Request, list[int]]:
    """The step whose root is ``node``, the path to it committed; and its nodes, as this tree counts them."""
    tree = request.tree
    nodes = [inner for inner in range(len(tree)) if node in tree.path(inner)]
    place = {old: new for new, old in enumerate(nodes)}
    below = DraftTree(
        tuple(place.get(tree.parents[old], -1) for old in nodes),
        tuple(tree.token_ids[old] for old in nodes),
    )
    committed = [tree.token_ids[inner] for inner in tree.path(node)[:-1]]
    step = replace(
        request,
        tree=below,
        rows=request.rows[nodes],
        accept=request.accept[nodes],
        processors=request.processors.at_nodes(nodes, committed),
    )
    return step, nodes


def _alone(request: Request) -> Request:
    """Its root without drafts: plain sampling."""
    root = DraftTree((-1,), request.tree.token_ids[:1])
    held = request.processors.at_nodes([0])
    return replace(request, tree=root, rows=request.rows[:1], accept=request.accept[:1], processors=held)


def _coins(request: Request, rows: TargetRows, cap: int) -> list[tuple[list[float], float]]:
    """The request's own coins; above temperature 0 also spread ones, and some that lead to every node."""
    if request.temperature == 0:
        return [(request.accept.tolist(), request.final)]
    sweep = oracle.sweep_coins(request.tree, rows, cap, max_final=4)
    own = (request.accept.tolist(), request.final)
    spread = [(list(accept), final) for accept, final in spread_coins(7, len(request.tree))]
    return [own, *spread, *sweep[:: -(-len(sweep) // _MAX_COINS)]]


def commit_parity(case: VerifyCase, backend: Backend, device: str) -> int:
    """Every walk is taken up again at each node of its path, as a step of its own behind a committed path.

    The decisions from there on must be the same, coin for coin. Where the node is a leaf that step is plain
    sampling. At temperature 0 plain sampling at any node must say what the walk said.
    """
    subject, cap = case.requests[0], case.effective_depth_cap
    greedy = replace(subject, temperature=0.0)
    return _taken_up(case, subject, cap, backend, device) + _taken_up(case, greedy, cap, backend, device)


def _taken_up(case: VerifyCase, subject: Request, cap: int, backend: Backend, device: str) -> int:
    rows = target_rows(subject, case.kind, case.filter_order)
    coins = _coins(subject, rows, cap)
    many = case.replace_requests([subject.with_coins(*coin) for coin in coins])
    # depth -> (the step taken up again, what it must do)
    steps: dict[int, list[tuple[Request, Observed]]] = defaultdict(list)
    for request, walk in zip(many.requests, decide(many, backend, device), strict=True):
        accept = request.accept.tolist()
        if walk.status is not RowStatus.OK or walk.broken:
            continue  # another law's business
        if is_ambiguous(subject.tree, rows, accept, request.final, cap):
            continue
        for depth, node in enumerate(walk.path):
            step, nodes = _starting_at(request, node)
            if depth:
                path = tuple(map(nodes.index, walk.path[depth:]))
                steps[depth].append((step, Observed(path, walk.tokens[depth:], walk.status)))
            if subject.temperature == 0:
                said = Observed((0,), walk.tokens[depth : depth + 1], walk.status)
                steps[depth].append((_alone(step), said))
    for depth, taken_up in steps.items():
        again = replace(
            case, requests=tuple(step for step, _ in taken_up), num_draft_tokens=None, depth_cap=cap - depth
        )
        for (step, want), got in zip(taken_up, decide(again, backend, device), strict=True):
            if got != want:
                why = f"with {depth} tokens before this root drafted, not committed, and drafts behind it"
                raise Violation(0, got, str(want), why, case=replace(again, requests=(step,)))
    return len(coins)
