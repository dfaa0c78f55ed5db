"""What the laws about top-k, top-p and min-p do to a backend; like :mod:`treeconv._law_checks`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from treeconv import _law_checks as plain
from treeconv._drive import as_probs, measure
from treeconv.judge import Violation, target_rows
from treeconv.tree import DraftTree

if TYPE_CHECKING:
    from treeconv.backends.base import Backend
    from treeconv.case import Request, VerifyCase
    from treeconv.oracle import TargetRows


def filters(case: VerifyCase, backend: Backend, device: str) -> int:
    """The whole case at its coins and at spread ones, then every boundary of every request's filtered law."""
    judged = plain.oracle_agreement(case, backend, device)
    return judged + plain.critical_coins(case, backend, device)


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
