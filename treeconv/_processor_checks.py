"""What the laws about bias, bitmask and penalties do to a backend; like :mod:`treeconv._law_checks`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING

from treeconv import _law_checks as plain
from treeconv import oracle
from treeconv._drive import decide, spread_coins
from treeconv.judge import Observed, Violation, is_ambiguous, target_rows
from treeconv.tree import DraftTree, RowStatus

if TYPE_CHECKING:
    from treeconv.backends.base import Backend
    from treeconv.case import Request, VerifyCase
    from treeconv.oracle import TargetRows

_MAX_COINS = 24  # coin vectors whose walks are taken up again at each of their nodes


def processed(case: VerifyCase, backend: Backend, device: str) -> int:
    """The whole case at its coins and at spread ones, then every boundary of every request's processed law."""
    judged = plain.oracle_agreement(case, backend, device)
    return judged + plain.critical_coins(case, backend, device)


def _starting_at(request: Request, node: int) -> tuple[Request, list[int]]:
    """The step whose root is ``node``, the path to it committed; and its nodes, as the first tree counts them."""
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


def _coins(request: Request, rows: TargetRows, cap: int) -> list[tuple[list[float], float]]:
    """The request's own coins, spread ones, and some of those that lead to every reachable node."""
    sweep = oracle.sweep_coins(request.tree, rows, cap, max_final=4)
    own = (request.accept.tolist(), request.final)
    spread = [(list(accept), final) for accept, final in spread_coins(7, len(request.tree))]
    return [own, *spread, *sweep[:: -(-len(sweep) // _MAX_COINS)]]


def commit_parity(case: VerifyCase, backend: Backend, device: str) -> int:
    """Every walk is taken up again at each node of its path, as a step of its own behind a committed path.

    The decisions from there on must be the same, coin for coin. Where the node is a leaf that step is plain
    sampling; at temperature 0 plain sampling at any node must say what the walk said.
    """
    subject, cap = case.requests[0], case.effective_depth_cap
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
            want = Observed(tuple(map(nodes.index, walk.path[depth:])), walk.tokens[depth:], walk.status)
            if depth:
                steps[depth].append((step, want))
            if subject.temperature == 0:
                alone, _ = _starting_at(request, node)
                root = DraftTree((-1,), alone.tree.token_ids[:1])
                alone = replace(
                    alone,
                    tree=root,
                    rows=alone.rows[:1],
                    accept=alone.accept[:1],
                    processors=alone.processors.at_nodes([0]),
                )
                steps[depth].append((alone, Observed((0,), walk.tokens[depth : depth + 1], walk.status)))
    for depth, taken_up in steps.items():
        again = replace(
            case,
            requests=tuple(step for step, _ in taken_up),
            num_draft_tokens=None,
            depth_cap=cap - depth,
        )
        for (step, want), got in zip(taken_up, decide(again, backend, device), strict=True):
            if got != want:
                why = f"the same walk, {depth} nodes of its path being drafts, went on so"
                alone = replace(again, requests=(step,))
                raise Violation(0, got, str(want), why, case=alone)
    return len(coins)
