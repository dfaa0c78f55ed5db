"""Smaller cases that break the same law: an explicit case with parts left out or made plain, step by step.

Hypothesis shrinks what it drew itself, but deletes only what was drawn in one piece, and a node is a token,
a row and a coin. Cases that it did not draw (of the bulk engine, of another campaign's journal) are shrunk
by this alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from treeconv.errors import InvalidArgument, InvalidTree, LawBroken
from treeconv.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    from treeconv.case import Request, VerifyCase

__all__ = ["shrink"]


def shrink(
    error: LawBroken,
    run: Callable[[VerifyCase], object],
    *,
    values: bool = False,
    should_stop: Callable[[], bool] = lambda: False,
) -> LawBroken:
    """The broken law on the smallest case that still breaks it.

    Args:
        error: the broken law; its ``case`` is where to start from.

        run: judges a case by the same law; whatever it raises but :class:`LawBroken` counts as kept.

        values: also leave out tokens, and make rows, coins and temperatures plain; without it only padding,
            requests and nodes go.

        should_stop: asked before each attempt.
    """
    smaller = _smaller(error.case, values=values)
    while not should_stop() and (case := next(smaller, None)) is not None:
        try:
            run(case)
        except LawBroken as still:
            error, smaller = still, _smaller(case, values=values)
        except Exception:  # noqa: BLE001, S112  (a crash is no smaller failure, and must not lose the one there is)
            continue
    return error


def _smaller(case: VerifyCase, *, values: bool) -> Iterator[VerifyCase]:
    """The case without padding, without requests, and without each node: with its subtree, or alone."""
    requests = case.requests
    if case.num_draft_tokens not in (None, max(len(request.tree) for request in requests)):
        yield replace(case, num_draft_tokens=None)
    yield from _fewer_requests(case)
    for index, request in enumerate(requests):
        yield from (_with(case, index, path) for path in _paths(request))
        for gone in _parts(request.tree):
            less = _without(request, gone)
            if less:
                yield _with(case, index, less)
                if values and case.kind == "probs" and len(gone) == 1:
                    yield from (_with(case, index, other) for other in _handed_on(request, gone[0], less))
    if values:
        yield from _fewer_tokens(case)
        yield from _plainer(case)


def _parts(tree: DraftTree) -> Iterator[list[int]]:
    """Nodes that may go: long runs of a large tree first, then each with its subtree, then each alone."""
    nodes = range(len(tree))
    run = len(tree) // 2
    while run > 1:
        yield from (list(nodes[start : start + run]) for start in range(1, len(tree), run))
        run //= 2
    for node in nodes[1:]:
        yield [other for other in nodes if node in tree.path(other)]
        yield [node]


def _paths(request: Request) -> Iterator[Request]:
    """One path alone, followed for certain: without the siblings in between, whose mass its coins skipped."""
    for node in range(1, len(request.tree)):
        path = request.tree.path(node)
        gone = [other for other in range(len(request.tree)) if other not in path]
        less = _without(request, gone) if gone else None
        if less:
            yield less.with_coins(np.where(np.arange(len(path)) < len(path) - 1, 0, less.accept), less.final)


def _handed_on(request: Request, node: int, less: Request) -> Iterator[Request]:
    """``less``, which is without a node, its mass handed to a sibling: the boundaries of later ones stay."""
    parent, token = request.tree.parents[node], request.tree.token_ids[node]
    for sibling in request.tree.children[parent]:
        if sibling == node:
            continue
        rows = less.rows.copy()
        row = rows[parent]  # a parent comes before its child, so its place stays
        row[request.tree.token_ids[sibling]] += row[token]
        row[token] = 0
        yield replace(less, rows=rows)


def _fewer_requests(case: VerifyCase) -> Iterator[VerifyCase]:
    """Without runs of requests: half of them first, then less, down to one at a time."""
    requests = case.requests
    run = len(requests) // 2
    while run:
        for start in range(0, len(requests), run):
            others = requests[:start] + requests[start + run :]
            if others:
                yield replace(case, requests=others)
        run //= 2


def _with(case: VerifyCase, index: int, request: Request) -> VerifyCase:
    return replace(case, requests=(*case.requests[:index], request, *case.requests[index + 1 :]))


def _without(request: Request, gone: Sequence[int]) -> Request | None:
    """The request without some nodes; their children move up. None where two siblings then share a token."""
    kept = [node for node in range(len(request.tree)) if node not in gone]
    place = {-1: -1} | {old: new for new, old in enumerate(kept)}
    parents = []
    for node in kept:
        parent = request.tree.parents[node]
        while parent not in place:
            parent = request.tree.parents[parent]
        parents.append(place[parent])
    try:
        tree = DraftTree(tuple(parents), tuple(request.tree.token_ids[node] for node in kept))
    except InvalidTree:
        return None
    draft_probs = None if request.draft_probs is None else request.draft_probs[kept]
    return replace(
        request,
        tree=tree,
        rows=request.rows[kept],
        accept=request.accept[kept],
        draft_probs=draft_probs,
        processors=request.processors.at_nodes(kept),
    )


def _fewer_tokens(case: VerifyCase) -> Iterator[VerifyCase]:
    """Without runs of the vocabulary that no node holds: half of it first, then less, down to one token."""
    size = case.vocab_size
    held = {token for request in case.requests for token in request.tree.token_ids}
    run = size // 2
    while run:
        for start in range(0, size, run):
            gone = sorted(set(range(start, min(start + run, size))) - held)
            kept = [token for token in range(size) if token not in gone]
            if gone and kept:
                yield _without_tokens(case, gone, kept)
        run //= 2


def _without_tokens(case: VerifyCase, gone: Sequence[int], kept: Sequence[int]) -> VerifyCase:
    """Ids close up. Probabilities keep their sum: what goes is added to the largest that stays."""

    def folded(law: NDArray[np.float32]) -> NDArray[np.float32]:
        less = law[:, kept]
        less[np.arange(len(less)), less.argmax(axis=1)] += law[:, gone].sum(axis=1)
        return less

    place = {old: new for new, old in enumerate(kept)}
    requests = []
    for request in case.requests:
        rows = folded(request.rows) if case.kind == "probs" else request.rows[:, kept]
        draft_probs = None if request.draft_probs is None else folded(request.draft_probs)
        names = tuple(place.get(token, 0) for token in request.tree.token_ids)
        tree = DraftTree(request.tree.parents, names)
        held = request.processors.at_tokens(kept, case.vocab_size)
        requests.append(replace(request, tree=tree, rows=rows, draft_probs=draft_probs, processors=held))
    return replace(case, requests=tuple(requests))


def _plainer(case: VerifyCase) -> Iterator[VerifyCase]:
    """Temperature 1, coins of 0.5, processors off, rows of zeros or one token, round logits: what is not."""
    for index, request in enumerate(case.requests):
        if request.temperature not in (0.0, 1.0):
            yield _with(case, index, replace(request, temperature=1.0))
        if request.final != 0.5:
            yield _with(case, index, request.with_coins(request.accept, 0.5))
        for held in request.processors.plainer():
            yield _with(case, index, replace(request, processors=held))
        for node in range(len(request.tree)):
            if request.accept[node] != 0.5:
                accept = request.accept.copy()
                accept[node] = 0.5
                yield _with(case, index, request.with_coins(accept, request.final))
            row = request.rows[node]
            plain = np.zeros_like(row)
            if case.kind == "probs":
                plain[0] = 1.0
            candidates = [plain]
            if case.kind == "logits":
                candidates.append(np.round(row))
            for candidate in candidates:
                if candidate.tobytes() == row.tobytes() or (candidate is not plain and not row.any()):
                    continue
                rows = request.rows.copy()
                rows[node] = candidate
                try:
                    yield _with(case, index, replace(request, rows=rows))
                except InvalidArgument:
                    continue
