"""What the laws about top-k, top-p and min-p do to a backend; like :mod:`treeconv._law_checks`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv import _law_checks as plain
from treeconv import oracle
from treeconv._drive import as_probs, decide, measure
from treeconv._planted_cases import deep_cuts, kept_alone
from treeconv.filters import FILTER_ORDERS
from treeconv.judge import Violation, judge, target_rows
from treeconv.tree import DraftTree

if TYPE_CHECKING:
    from treeconv.backends.base import Backend
    from treeconv.case import Request, VerifyCase
    from treeconv.oracle import TargetRows


_MAX_SETTINGS = 16  # filters of one row that are tried, in each order


def filters(case: VerifyCase, backend: Backend, device: str) -> int:
    """The whole case at its coins and at spread ones, then every boundary of every request's filtered law.

    From logits also where a single token is kept of a row far from zero.
    """
    judged = plain.oracle_agreement(case, backend, device)
    judged += plain.critical_coins(case, backend, device)
    if case.kind == "probs":
        return judged
    made = kept_alone(case)
    try:
        return judged + plain.critical_coins(made, backend, device)
    except Violation as violation:
        raise replace(violation, case=made) from None


def wide(case: VerifyCase, backend: Backend, device: str) -> int:
    """The whole case at its coins and at spread ones; then cuts deep in a flat row."""
    judged = plain.oracle_agreement(case, backend, device)
    made = deep_cuts(case)
    for index, observed in enumerate(decide(made, backend, device)):
        request = made.requests[index]
        rows = target_rows(request, made.kind, made.filter_order)
        wrong = judge(request.tree, rows, request.accept.tolist(), request.final, 1, observed)
        if wrong:
            raise Violation(index, observed, *wrong, case=made)
    return judged + len(made.requests)


def _settings(row: np.ndarray[Any, Any]) -> list[dict[str, Any]]:
    """Filters at every place where a cut of this row flips, beside those, and where the two orders part.

    Top-p is always a multiple of 2**-24: then 1 - top_p is one too, and comparing with either is right.
    """
    law = np.sort(row[row > 0].astype(np.float64))[::-1]
    law /= law.sum()
    sums = np.concatenate([[0.0], np.cumsum(law)])
    step = 2.0**-24

    def beside(value: float) -> list[float]:
        at = round(value / step)
        return [p * step for p in (at - 1, at, at + 1) if 0 < p <= 2**24]

    found: list[dict[str, Any]] = []
    for k in range(1, law.size + 1):
        share = np.float32(law[k - 1] / law[0])
        shares = {float(np.nextafter(share, np.float32(0))), float(share)}
        shares |= {float(np.nextafter(share, np.float32(1)))}
        found += [{"top_k": k}, {"top_k": k, "min_p": float(share)}, *({"min_p": m} for m in sorted(shares))]
        found += [{"top_p": p} for p in beside(sums[k])]
        for kept in range(1, k):  # between the boundary of the joint order and that of the sequential one
            between = round(sums[kept] * (1 + 1 / sums[k]) / 2 / step) * step
            for p in {between, *beside(sums[kept]), *beside(sums[kept] / sums[k])}:
                found += [{"top_k": k, "top_p": p}, {"min_p": float(share), "top_p": p}]
    return found


def critical_cuts(case: VerifyCase, backend: Backend, device: str) -> int:
    """One row under many filters in one batch, in both orders, each at every boundary of the law left."""
    subject = case.requests[0]
    settings = _settings(subject.rows[0])
    stride = -(-len(settings) // _MAX_SETTINGS)
    settings = settings[int(subject.final * stride) % stride :: stride]
    judged = 0
    for order in FILTER_ORDERS:
        requests, views = [], []
        for setting in settings:
            filtered = replace(subject, **setting)
            rows = target_rows(filtered, case.kind, order)
            for accept, final in oracle.sweep_coins(subject.tree, rows):
                requests.append(filtered.with_coins(accept, final))
                views.append(rows)
        many = replace(case.replace_requests(requests), filter_order=order)
        for place, observed in enumerate(decide(many, backend, device)):
            request = requests[place]
            coins = request.accept.tolist(), request.final
            wrong = judge(subject.tree, views[place], *coins, many.effective_depth_cap, observed)
            if wrong:
                alone = many.replace_requests([request])
                raise Violation(0, observed, *wrong, coins=(tuple(coins[0]), coins[1]), case=alone)
        judged += len(requests)
    return judged


def _has_one_law(rows: TargetRows, size: int) -> bool:
    """Whether no node's filter is decided by rounding: then float32 leaves one law, known exactly."""
    return all(len(list(rows.alternatives(node))) == 1 for node in range(size))


def parity(case: VerifyCase, backend: Backend, device: str) -> int:
    """A root alone is the plain sampler: its law, measured, is what the first token has behind any draft."""
    subject = case.requests[0]
    rows = target_rows(subject, case.kind, case.filter_order)
    if not _has_one_law(rows, len(subject.tree)):
        return 0
    root = DraftTree(subject.tree.parents[:1], subject.tree.token_ids[:1])
    alone = case.replace_requests([_cut_to(subject, root)])
    laws: dict[str, dict[int, Fraction]] = {}
    for name, where in (("plain sampler", alone), ("verifier", case)):
        law: dict[int, Fraction] = defaultdict(Fraction)
        for weight, observed in measure(where, where.requests[0], backend, device):
            law[observed.tokens[0]] += weight
        laws[name] = law
    for token in range(case.vocab_size):
        want = Fraction(rows[0].mass(token))
        got = {name: law.get(token, Fraction(0)) for name, law in laws.items()}
        for name, share in got.items():
            if share != want:
                other = ", ".join(f"{name}: {float(share):.6g}" for name, share in got.items())
                why = f"the law after the filters, {subject.cuts(case.filter_order)}; measured: {other}"
                text = f"{name}: P(the text goes on with {token}) = {share} ({float(share):.6g})"
                raise Violation(0, text, f"{want} ({float(want):.6g})", why)
    return case.vocab_size + plain.outcome_law(case, backend, device)


def _cut_to(request: Request, root: DraftTree) -> Request:
    return replace(request, tree=root, rows=request.rows[:1], accept=request.accept[:1])


def purity(case: VerifyCase, backend: Backend, device: str) -> int:
    """Neither logits nor probabilities are filtered in place, nor are the filters written to."""
    judged = plain.purity(case, backend, device)
    if case.kind == "logits" and backend.traits.takes_probs:
        judged += plain.purity(as_probs(case), backend, device)
    return judged
