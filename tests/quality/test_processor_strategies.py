"""Do the strategies find the rare processors, and do they shrink to none?"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from test_strategies import finds, minimal

from treeconv.oracle import TargetRows
from treeconv.processor_strategies import PROCESSOR_CASES
from treeconv.strategies import cases_for


def any_request(test):
    return lambda case: any(map(test, case.requests))


def processed(request):
    """Its processed logits."""
    rows = TargetRows.from_processed(request.rows, request.tree, request.processors, 1.0)._rows
    return [rows[node][0] for node in range(len(rows))]


def forbids(request, node, token):
    mask = request.processors.token_bitmask
    return mask is not None and not mask[node, token // 32] >> token % 32 & 1


def drafts(request):
    """``(parent, token)`` of each drafted node."""
    return zip(request.tree.parents[1:], request.tree.token_ids[1:], strict=True)


def has_penalties(request):
    return "penalties" in request.processors.kinds


def ties_at_the_top(request):
    """Only the processors make two tokens the largest."""
    for raw, row in zip(request.rows, processed(request), strict=True):
        if (row == row.max()).sum() > 1 and not np.isnan(raw).any() and (raw == raw.max()).sum() == 1:
            return True
    return False


MASKED = {
    "a draft that is forbidden": any_request(lambda r: any(forbids(r, *draft) for draft in drafts(r))),
    "the only allowed token is a draft": any_request(
        lambda r: any(
            not forbids(r, *draft) and (processed(r)[draft[0]] > -np.inf).sum() == 1 for draft in drafts(r)
        )
    ),
    "NaN where a token is forbidden": any_request(lambda r: np.isnan(r.rows).any()),
    "bits set behind the vocabulary": lambda case: any(
        r.processors.token_bitmask is not None
        and case.vocab_size % 32
        and (r.processors.token_bitmask[0, -1] >> (case.vocab_size % 32)) & 1
        for r in case.requests
    ),
    "a draft biased to -inf": any_request(
        lambda r: (
            r.processors.logit_bias is not None
            and any(r.processors.logit_bias[token] == -np.inf for _, token in drafts(r))
        )
    ),
    "a bias that dwarfs the logits": any_request(
        lambda r: r.processors.logit_bias is not None and (r.processors.logit_bias >= 1e8).any()
    ),
    "greedy, the argmax moved": any_request(
        lambda r: (
            r.temperature == 0
            and len(r.rows[0]) > 1
            and not np.isnan(r.rows).any()
            and r.rows[0].argmax() != processed(r)[0].argmax()
        )
    ),
}
PENALISED = {
    "a draft that repeats its own path": any_request(
        lambda r: (
            has_penalties(r)
            and any(
                r.tree.token_ids[n] in [r.tree.token_ids[i] for i in r.tree.path(n)[:-1]]
                for n in range(len(r.tree))
            )
        )
    ),
    "a draft that was committed": any_request(
        lambda r: has_penalties(r) and bool({t for _, t in drafts(r)} & set(r.processors.committed_tokens))
    ),
    "an id outside the vocabulary": lambda case: any(
        max(r.processors.committed_tokens, default=0) >= case.vocab_size for r in case.requests
    ),
    "a token committed twice": any_request(
        lambda r: (
            has_penalties(r) and len(set(r.processors.committed_tokens)) < len(r.processors.committed_tokens)
        )
    ),
    "padding before a text": any_request(
        lambda r: (
            has_penalties(r) and r.processors.committed_tokens[:1] == (-1,) != r.processors.committed_tokens
        )
    ),
    "padding within a text": any_request(
        lambda r: has_penalties(r) and -1 in r.processors.committed_tokens[1:-1]
    ),
    "padding behind a text": any_request(
        lambda r: has_penalties(r) and r.processors.committed_tokens[1:][-1:] == (-1,)
    ),
    "a reward": any_request(lambda r: r.processors.frequency_penalty < 0),
    "a repetition reward": any_request(lambda r: r.processors.repetition_penalty < 1),
    "all processors": any_request(lambda r: len(r.processors.kinds) == 3),
    "a tie that they make": any_request(lambda r: has_penalties(r) and ties_at_the_top(r)),
    "two penalised requests, one text longer": lambda case: (
        len({len(r.processors.committed_tokens) for r in case.requests if has_penalties(r)}) > 1
    ),
    "a penalised request beside a plain one": lambda case: (
        {has_penalties(r) for r in case.requests} == {True, False}
    ),
}
WIDE = {
    "a vocabulary that is no multiple of 32": lambda case: case.vocab_size % 32 != 0,
    "a draft forbidden in the last word": lambda case: any(
        token // 32 == case.vocab_size // 32 and forbids(case.requests[0], parent, token)
        for parent, token in drafts(case.requests[0])
    ),
}


@pytest.mark.parametrize(
    ("kind", "condition"),
    [
        pytest.param(kind, condition, id=name)
        for kind, conditions in (("masked", MASKED), ("penalised", PENALISED), ("masked_wide", WIDE))
        for name, condition in conditions.items()
    ],
)
def test_cases_find(kind, condition):
    assert finds(cases_for(kind), condition, examples=400)


UNUSABLE = {
    "NaN in a bias": any_request(
        lambda r: r.processors.logit_bias is not None and np.isnan(r.processors.logit_bias).any()
    ),
    "+inf in a bias": any_request(
        lambda r: r.processors.logit_bias is not None and (r.processors.logit_bias == np.inf).any()
    ),
    "nothing left of a penalised root": any_request(
        lambda r: has_penalties(r) and processed(r)[0].max() == -np.inf
    ),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_rows_that_processors_spoil_are_found_where_they_are_meant(name):
    assert finds(cases_for("forbidden_rows"), UNUSABLE[name], examples=200)
    if "bias" in name:
        assert not finds(cases_for("penalised"), UNUSABLE[name], examples=100)


def test_a_token_committed_more_often_than_a_byte_counts_is_found():
    def often(case):
        return any(
            has_penalties(r) and max(Counter(r.processors.committed_tokens).values(), default=0) > 256
            for r in case.requests
        )

    assert finds(cases_for("penalised_wide"), often, examples=20)


def test_every_token_forbidden_is_found_where_it_is_meant():
    def nothing_left(case):
        return any(row.max() == -np.inf for r in case.requests for row in processed(r))

    assert finds(cases_for("forbidden_rows"), nothing_left, examples=200)
    assert not finds(cases_for("masked"), nothing_left, examples=200)


@pytest.mark.parametrize("kind", [kind for kind in PROCESSOR_CASES if not kind.endswith("wide")])
def test_cases_shrink_to_no_processors(kind):
    fewest = {"chain_processed": 2, "recursive_processed": 3, "match_processed": 2}.get(kind, 1)

    def is_least(case):
        return not case.processor_kinds and {len(request.tree) for request in case.requests} == {fewest}

    assert is_least(minimal(cases_for(kind), is_least=is_least))


def test_one_penalty_shrinks_alone():
    case = minimal(
        cases_for("penalised"),
        any_request(lambda r: r.processors.presence_penalty),
        is_least=lambda case: len(case.requests) == len(case.requests[0].tree) == 1,
    )
    (one,) = case.requests
    assert one.processors.kinds == {"penalties"}
    assert one.processors.committed_tokens == ()
    assert len(one.tree) == 1
