"""Hypothesis strategies for calls that hold rows nothing can be sampled from, whatever else is in play."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import strategies as st

from treeconv.case import UNUSABLE
from treeconv.processor_strategies import processed_cases
from treeconv.rule_strategies import draft_laws, shapes_for
from treeconv.rules import RATIO_RULES, RULES
from treeconv.strategies import verify_cases

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import DrawFn, SearchStrategy

    from treeconv.case import VerifyCase

__all__ = ["STATUS_CASES", "bad_row_cases"]


@st.composite
def bad_row_cases(draw: DrawFn) -> VerifyCase:
    """Batches in which some rows are NaN, hold +inf, or hold no mass; some visited, some not.

    From logits or from probabilities (there negative ones too), with filters or without, by any rule.
    Shrinks towards logits without filters, verified target-only.
    """
    kind = draw(st.sampled_from(["logits", "logits", "probs"]), label="kind")
    rule = draw(st.sampled_from([RULES[0], RULES[0], *RULES[1:]]), label="rule")
    allow_filters = draw(st.booleans(), label="filters?")
    case = draw(
        verify_cases(kind=kind, max_requests=3, max_nodes=6, allow_filters=allow_filters, **shapes_for(rule))
    )
    requests = []
    for request in case.requests:
        # q is the drafter's own: it knows nothing of what the target's rows hold.
        laws = draw(draft_laws(request, kind=kind)) if rule in RATIO_RULES else None
        rows = request.rows.copy()
        for node in range(len(request.tree)):
            what = draw(st.sampled_from(["fine", "fine", *UNUSABLE[kind]]), label="row")
            if what == "fine":
                continue
            value, is_whole = UNUSABLE[kind][what]
            last = case.vocab_size - 1  # in the tail of the last block, often
            rows[node, :] = value if is_whole else rows[node]
            if not is_whole:
                rows[node, draw(st.one_of(st.integers(0, last), st.just(last)))] = value
        requests.append(replace(request, rows=rows, draft_probs=laws))
    return replace(case, requests=tuple(requests), rule=rule)


#: kind of case -> its strategy; part of what ``strategies.cases_for`` knows
STATUS_CASES: dict[str, Callable[[], SearchStrategy[VerifyCase]]] = {
    "bad_rows": bad_row_cases,
    "forbidden_rows": lambda: processed_cases(
        ("penalties", "bias", "bitmask"), max_requests=3, allow_empty=True, allow_filters=True
    ),
}
