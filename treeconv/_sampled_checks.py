"""What verifiers that draw their own coins make of filters, processors and rules; like ``_rng_checks``.

Only texts are looked at. What a node's text goes on with has a law that the oracle knows, whatever the
settings: the next tokens over many draws are evidence against it. A right sampler fails at most once in
10**12 cases.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv._rng_checks import FALSE_FAIL_RATE, doors_of, draw, generator_of, next_tokens, seeds_of
from treeconv.judge import Violation, target_rows
from treeconv.rules import RATIO_RULES
from treeconv.statistical_testing import EProcess, split_rate
from treeconv.tree import RowStatus

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from treeconv.backends.base import Backend
    from treeconv.case import Request, VerifyCase
    from treeconv.oracle import TargetRows

_FEWEST, _MOST = 256, 4096  # texts of one request
_WORTH_GOING_ON = 3.0  # log of the e-value at which more texts are drawn
# A claim is blurred by more than float32 and the coins' 2**-24 move a mass; then a right sampler's evidence
# grows falsely by no more than exp(blur * texts).
_LEAST_BLUR, _MOST_BLUR = 2.0**-16, 2.0**-12


def sampled_settings(case: VerifyCase, backend: Backend, device: str) -> int:
    """Texts of the whole batch over fresh coins, each node's next tokens counted against their exact law."""
    claims = {
        (index, node): (claim, blur)
        for index, request in enumerate(case.requests)
        for node in range(len(request.tree))
        for claim, blur in _claims(case, request, node)
    }
    if not claims:
        return 0
    count, cap = len(case.requests), case.effective_depth_cap
    door = doors_of(backend)[0]
    seeds = seeds_of(case, 1 + count * (1 + _MOST))
    steps, others, generator = seeds[1 : 1 + count], seeds[1 + count :], generator_of(seeds[0], device)
    evidence = {place: EProcess(claim.tolist()) for place, (claim, _) in claims.items()}
    rate = split_rate(FALSE_FAIL_RATE, len(claims))
    drawn, more = 0, _FEWEST
    while drawn < _MOST:
        if door == "generator":
            observed = draw(case, backend, device, [0] * (more * count), generator=generator)
        else:  # half of the texts are one request's at successive steps, half are many requests' at one step
            half = more // 2
            places = [*np.repeat(np.arange(drawn, drawn + half), count).tolist(), *[0] * (half * count)]
            used = [*steps * half, *others[drawn * count : (drawn + half) * count]]
            observed = draw(case, backend, device, places, seeds=used)
        drawn += more
        for index, request in enumerate(case.requests):
            counts = next_tokens(request.tree, observed[index::count], cap, case.vocab_size)
            for node in range(len(request.tree)):
                if (index, node) not in evidence:
                    continue
                process, blur = evidence[index, node], claims[index, node][1]
                if process.update(counts[node]) <= rate * math.exp(-blur * _MOST):
                    raise _unlikely(case, door, index, node, process, drawn)
        if max(process.log_e_value for process in evidence.values()) < _WORTH_GOING_ON:
            break
        more = drawn
    return drawn * count


def _claims(case: VerifyCase, request: Request, node: int) -> list[tuple[NDArray[np.float64], float]]:
    """The law of a node's next token, and by how much it is blurred; none where float32 may see another."""
    rows = target_rows(request, case.kind, case.filter_order, case.rule)
    depth, cap = request.tree.depths[node], case.effective_depth_cap
    if depth >= cap:
        return []
    first, *rest = rows.alternatives(node)
    if rest or first.status is not RowStatus.OK:
        return []
    if case.rule in RATIO_RULES:
        planned = _by_plan(request, rows, node, is_capped=depth + 1 >= cap)
        if planned is None:
            return []
        law, support, width = planned
    else:  # any exact rule
        law, support = first.masses.astype(np.float64), first.upper > 0
        width = float((first.upper - first.lower).max())
    blur = max(_LEAST_BLUR, 2 * law.size * width)
    if not blur <= _MOST_BLUR:
        return []
    return [((1 - blur) * law / law.sum() + blur * support / support.sum(), blur)]


def _by_plan(
    request: Request, rows: TargetRows, node: int, *, is_capped: bool
) -> tuple[NDArray[np.float64], NDArray[np.bool_], float] | None:
    """The law of a rule that tests in turn, the tokens that may come, and how far float32 may be from it."""
    plan, *others = rows.plans(request.tree, node, rows[node], is_capped=is_capped)
    if others:
        return None
    law, width, left = np.zeros(rows[node].vocab_size), 0.0, 1.0
    support = law > 0
    for test in plan.tests:
        lower, best, upper = (min(1.0, float(edge)) for edge in (test.lower, test.best, test.upper))
        token = request.tree.token_ids[test.child]
        law[token] += left * best
        support[token] |= upper > 0
        width += upper - lower
        left *= 1 - best
    if plan.bonus.may_have_mass:
        tokens = np.asarray(plan.bonus.tokens)
        sums = np.array([float(one) for one in plan.bonus.sums])
        low, high = (np.array([float(edge) for edge in edges]) for edges in plan.bonus.bounds)
        law[tokens] += left * np.diff(sums / sums[-1], prepend=0.0) if sums[-1] > 0 else 0.0
        support[tokens] = True
        width += 2 * left * float((high - low).max())
    return (law, support, width) if law.sum() > 0 else None


def _unlikely(case: VerifyCase, door: str, index: int, node: int, process: EProcess, drawn: int) -> Violation:
    seen, total = process.counts, int(process.counts.sum())
    claim: Any = np.asarray(process.probabilities)
    worst = int(np.abs(seen / total - claim).argmax())
    tree = case.requests[index].tree
    prefix = [tree.token_ids[inner] for inner in tree.path(node)[1:]]
    why = (
        f"node {node}, coins drawn from {door}: so unlikely that a right sampler shows it at most once in"
        f" {1 / process.p_value:.0e} cases"
    )
    return Violation(
        index,
        f"after {prefix}, token {worst} came {seen[worst]} times of {total} ({drawn} texts)",
        f"about {claim[worst] * total:.0f}: its probability there is {claim[worst]:.4g}",
        why,
    )
