"""What the laws about acceptance rules do to a backend; like :mod:`treeconv._law_checks`."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv import _law_checks as plain
from treeconv import oracle
from treeconv._drive import (
    as_views,
    bytes_of,
    decide,
    input_tensors,
    judge_made,
    measure,
    outcome_coins,
    submit,
)
from treeconv._planted_cases import each_greedy, with_settings
from treeconv.judge import Observed, Violation, judge, observe, target_rows
from treeconv.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from treeconv.backends.base import Backend
    from treeconv.case import Request, VerifyCase

    Text = tuple[int, ...]


def decisions(case: VerifyCase, backend: Backend, device: str) -> int:
    """The whole batch at its coins and at spread ones, then every boundary; where processed, greedily too."""
    judged = plain.oracle_agreement(case, backend, device)
    judged += judge_made(each_greedy(case), backend, device, 2)
    return judged + plain.critical_coins(case, backend, device)


def purity(case: VerifyCase, backend: Backend, device: str) -> int:
    """What is handed over comes back as it was; asked again, with views, it decides rightly too.

    The case as it is, and with filters and processors on every request.
    """
    judged = _purity(case, backend, device)
    for made in with_settings(case, backend.traits):
        try:
            judged += _purity(made, backend, device)
        except Violation as violation:
            raise replace(violation, case=made) from None
    return judged


def _purity(case: VerifyCase, backend: Backend, device: str) -> int:
    tensors = case.tensors(device)
    named = input_tensors(tensors)
    before = {name: bytes_of(tensor) for name, tensor in named.items()}
    trees = [request.tree for request in case.requests]
    again = as_views(tensors) if backend.traits.takes_views else tensors
    for handed in (tensors, again):
        outcomes = observe(trees, submit(handed, case.kind, backend), case.slots)
        for name, tensor in named.items():
            if bytes_of(tensor) != before[name]:
                raise Violation(0, f"{name} was written to", "inputs unchanged: later readers share them")
        for index, (request, observed) in enumerate(zip(case.requests, outcomes, strict=True)):
            rows = target_rows(request, case.kind, case.filter_order, case.rule)
            coins = request.accept.tolist(), request.final
            wrong = judge(request.tree, rows, *coins, case.effective_depth_cap, observed)
            if wrong:
                raise Violation(index, observed, *wrong)
    return 2 * len(trees)


class _Markov:
    """A case's target and drafter as Markov chains: the laws after token t are those of row ``t % n``."""

    def __init__(self, case: VerifyCase) -> None:
        self.case, self.subject = case, case.requests[0]
        self.vocab = case.vocab_size
        rows = oracle.TargetRows.exact(self.subject.rows)
        size = len(self.subject.tree)
        self._p = [[Fraction(rows[node].mass(token)) for token in range(self.vocab)] for node in range(size)]
        assert self.subject.draft_probs is not None
        self._q = [list(map(Fraction, row.tolist())) for row in self.subject.draft_probs]

    def target(self, token: int) -> list[Fraction]:
        return self._p[token % len(self._p)]

    def drafter(self, token: int) -> list[Fraction]:
        return self._q[token % len(self._q)]

    def drafts(self) -> Iterator[tuple[Fraction, Request]]:
        """Every draft of the tree's shape, siblings sampled without replacement, with its probability.

        Where q has no token left for a sibling the drafter proposes none, nor anything below it.
        """
        shape = self.subject.tree.parents
        root = self.subject.tree.token_ids[0]
        pending: list[tuple[Fraction, Text, tuple[int, ...]]] = [(Fraction(1), (root,), (0,))]
        for node in range(1, len(shape)):
            grown = []
            for chance, tokens, slots in pending:
                if shape[node] not in slots:
                    grown.append((chance, tokens, slots))
                    continue
                law = self.drafter(tokens[slots.index(shape[node])])
                placed = zip(tokens, slots, strict=True)
                taken = {token for token, slot in placed if slot and shape[slot] == shape[node]}
                left = {token: q for token, q in enumerate(law) if q and token not in taken}
                total = sum(left.values())
                grown += [
                    (chance * q / total, (*tokens, token), (*slots, node)) for token, q in left.items()
                ] or [(chance, tokens, slots)]
            pending = grown
        for chance, tokens, slots in pending:  # the drafted nodes' tokens, and their places in the shape
            parents = [-1, *(slots.index(shape[slot]) for slot in slots[1:])]
            yield chance, self._request(DraftTree(tuple(parents), tokens))

    def _request(self, tree: DraftTree) -> Request:
        assert self.subject.draft_probs is not None
        where = [token % len(self._p) for token in tree.token_ids]
        return replace(
            self.subject,
            tree=tree,
            rows=self.subject.rows[where],
            draft_probs=self.subject.draft_probs[where],
            accept=np.full(len(tree), 0.5, np.float32),
        )

    def measured(self, backend: Backend, device: str) -> list[tuple[Fraction, Observed]]:
        """The backend's outcome in every box of coins of every draft, with their joint probability."""
        chances, requests = [], []
        for chance, request in self.drafts():
            for volume, coins in outcome_coins(self.case, request):
                chances.append(chance * volume)
                requests.append(request.with_coins(*coins))
        many = self.case.replace_requests(requests)
        outcomes = decide(many, backend, device)
        for request, observed in zip(requests, outcomes, strict=True):
            if observed.broken:
                alone = many.replace_requests([request])
                raise Violation(0, observed, "one root path and its bonus token", case=alone)
        return list(zip(chances, outcomes, strict=True))


def outcome_over_drafts(case: VerifyCase, backend: Backend, device: str) -> int:
    """Over all drafts and all coins the next token, wherever it is shown, has the target's law: exactly.

    A sampled draft is random itself, so what is lossless is the two together: given the text so far, and that
    it goes on in this step, the next token is distributed as the target says.
    """
    markov = _Markov(case)
    root = markov.subject.tree.token_ids[0]
    starts: dict[Text, Fraction] = defaultdict(Fraction)
    goes_on: dict[Text, Fraction] = defaultdict(Fraction)
    for weight, observed in markov.measured(backend, device):
        for length in range(len(observed.tokens)):
            goes_on[observed.tokens[:length]] += weight
            starts[observed.tokens[: length + 1]] += weight
    judged = 0
    for text, chance in goes_on.items():
        for token, mass in enumerate(markov.target(text[-1] if text else root)):
            got = starts.get((*text, token), Fraction(0))
            if got != chance * mass:
                shown = f"P(next token is {token} | text {list(text)}, {case.rule})"
                why = f"off by {float(got / chance - mass):+.3g}, over all drafts from q and all coins"
                raise Violation(0, f"{shown} = {float(got / chance):.6g}", f"p = {float(mass):.6g}", why)
            judged += 1
    return judged


def _overlap(markov: _Markov, token: int, depth: int) -> Fraction:
    """Expected accepted drafts below a token: the sum over drafted texts of the product of min(p, q)."""
    if depth == 0:
        return Fraction(0)
    both = [min(p, q) for p, q in zip(markov.target(token), markov.drafter(token), strict=True)]
    return sum((m * (1 + _overlap(markov, next_, depth - 1)) for next_, m in enumerate(both)), Fraction(0))


def accepted_over_drafts(case: VerifyCase, backend: Backend, device: str) -> int:
    """E[accepted drafts] of a sampled chain, measured exactly, against ``sum of prod min(p, q)``.

    One draft is accepted with ``sum_t min(p(t), q(t))``, one minus the total variation distance (Leviathan et
    al., 2023, theorem 3.5 and corollary 3.6).
    """
    markov = _Markov(case)
    outcomes = markov.measured(backend, device)
    got = sum((weight * (len(observed.path) - 1) for weight, observed in outcomes), Fraction(0))
    want = _overlap(markov, markov.subject.tree.token_ids[0], len(markov.subject.tree) - 1)
    if got != want:
        raise Violation(
            0, f"{float(got):.9g} accepted drafts expected over sampled drafts", f"{float(want):.9g}"
        )
    return len(outcomes)


def _first_token(outcomes: Sequence[tuple[Fraction, Observed]]) -> dict[int, Fraction]:
    law: dict[int, Fraction] = defaultdict(Fraction)
    for weight, observed in outcomes:
        law[observed.tokens[0]] += weight
    return law


def fixed_draft(case: VerifyCase, backend: Backend, device: str) -> int:
    """Forced on q's own top-k, the rule shows its bias, to the digit: why ``verify`` refuses that pairing.

    The first token's law is compared with the exact one of accepting with min(1, p/q) there, which is not the
    target's unless p gives the children at most what q does.
    """
    subject = case.requests[0]
    rows = target_rows(subject, case.kind, case.filter_order, case.rule)
    want: dict[int, Fraction] = defaultdict(Fraction)
    for text, chance in oracle.outcome_pmf(subject.tree, rows, case.effective_depth_cap).items():
        want[text[0]] += chance
    got = _first_token(measure(case, subject, backend, device))
    for token in range(case.vocab_size):
        if got.get(token, 0) != want.get(token, 0):
            target = Fraction(rows[0].mass(token))
            why = f"forced on a fixed draft, min(1, p/q) is biased by that much; the target says {target}"
            shown = f"P(first token is {token}) = {got.get(token, Fraction(0))}"
            raise Violation(0, shown, f"{want.get(token, Fraction(0))}", why)
    return case.vocab_size


def _zero_and_renormalise(tree: DraftTree, rows: oracle.TargetRows) -> Fraction:
    """E[accepted drafts] where each child is tested with its share of what is left, misses zeroed (X2)."""
    expected = Fraction(0)
    reach = {0: Fraction(1)}
    for node in range(len(tree)):
        missed, left = reach.get(node, Fraction(0)), Fraction(1)
        for child in tree.children[node]:
            mass = Fraction(rows[node].mass(tree.token_ids[child])) if missed else Fraction(0)
            share = mass / left if left else Fraction(0)
            reach[child] = missed * share
            expected += reach[child]
            missed, left = missed * (1 - share), left - mass
    return expected


def most_accepted(case: VerifyCase, backend: Backend, device: str) -> int:
    """On a fixed tree no exact rule accepts more than target-only: measured where the backend has the rule.

    An accepted child is the next token, so any exact rule accepts one with at most its siblings' mass.
    """
    subject = case.requests[0]
    rows: Any = target_rows(subject, case.kind, case.filter_order)

    def expected(rule: str, request: Request) -> Fraction:
        by_rule = replace(case, requests=(request,), rule=rule)  # type: ignore[arg-type]
        outcomes = measure(by_rule, request, backend, device)
        return sum((weight * (len(observed.path) - 1) for weight, observed in outcomes), Fraction(0))

    most = expected("target_only", subject)
    others = {"zeroing and renormalising (computed)": _zero_and_renormalise(subject.tree, rows)}
    claimed = backend.traits.rules
    if "draw_and_match" in claimed:
        others["draw_and_match (measured)"] = expected("draw_and_match", subject)
    if "chain" in claimed and all(len(children) < 2 for children in subject.tree.children):
        # What a fixed child was sampled from is the law that is sure of it: then min(1, p/q) is exact.
        sure = np.zeros_like(subject.rows)
        for node, children in enumerate(subject.tree.children):
            sure[node, [subject.tree.token_ids[child] for child in children]] = 1
        others["chain with one-hot q (measured)"] = expected("chain", replace(subject, draft_probs=sure))
    for name, length in others.items():
        if length > most:
            why = "both are exact, and no exact rule accepts more than target-only on a fixed tree"
            got = f"target_only accepts {float(most):.9g} drafts, {name} {float(length):.9g}"
            raise Violation(0, got, "target_only accepts at least as many", why)
    return len(others)
