"""Do the strategies find the rare filters, and do they shrink to none?"""

from __future__ import annotations

import numpy as np
import pytest
from test_strategies import finds, minimal

from treeconv import oracle
from treeconv import strategies as S  # noqa: N812
from treeconv.filters import Cuts
from treeconv.judge import target_rows


def law_of(request, node=0):
    return np.sort(request.rows[node].astype(float))[::-1]


def has_tie_at_the_cut(request):
    law = law_of(request)
    k = request.top_k
    return k is not None and k < len(law) and law[k - 1] == law[k] > 0


def cuts_at_a_sum(request):
    sums = np.cumsum(law_of(request))
    return request.top_p < 1 and bool((sums == request.top_p).any())


def cuts_beside_a_sum(request):
    sums = np.cumsum(law_of(request))
    return bool((np.abs(sums - request.top_p) == 2.0**-24).any())


def kept(case, request):
    row = target_rows(request, case.kind, case.filter_order)[0]
    return [token for token in range(case.vocab_size) if row.may_have_mass(token)]


def loses_all_children(case):
    for request in case.requests:
        tokens = oracle.child_tokens(request.tree, 0)
        had = [token for token in tokens if request.rows[0, token] > 0]
        if len(had) > 1 and not set(had) & set(kept(case, request)):
            return True
    return False


def orders_differ(case):
    request = case.requests[0]
    laws = [oracle.TargetRows.exact(request.rows, request.cuts(order)) for order in ("sequential", "joint")]
    return any(laws[0][0].mass(token) != laws[1][0].mass(token) for token in range(case.vocab_size))


def any_of(test):
    return lambda case: any(map(test, case.requests))


DYADIC = {
    "a tie at the top-k cut": any_of(has_tie_at_the_cut),
    "top_p on a running sum": any_of(cuts_at_a_sum),
    "top_p one step beside a running sum": any_of(cuts_beside_a_sum),
    "top_k of 1": any_of(lambda request: request.top_k == 1),
    "top_k of the vocabulary or more": lambda case: any(
        request.top_k is not None and request.top_k >= case.vocab_size for request in case.requests
    ),
    "the least top_p": any_of(lambda request: request.top_p == 2.0**-24),
    "a top_p that is off by a step": any_of(lambda request: request.top_p == 1 - 2.0**-24),
    "min_p of 1": any_of(lambda request: request.min_p == 1),
    "all three": any_of(lambda request: request.top_k and request.top_p < 1 and request.min_p > 0),
    "the joint order": lambda case: case.filter_order == "joint",
    "children with mass that are all cut": loses_all_children,
    "a law that the orders filter differently": orders_differ,
    "a filtered and a plain request": lambda case: (
        len({request.cuts().are_on(case.vocab_size) for request in case.requests}) == 2
    ),
    "a cut that rounding decides": lambda case: any(
        len(list(target_rows(request, case.kind, case.filter_order).alternatives(0))) > 1
        for request in case.requests
    ),
}


@pytest.mark.parametrize("name", DYADIC)
def test_dyadic_cases_find(name):
    assert finds(S.cases_for("filtered"), DYADIC[name], examples=400)


BATCHES = {
    "greedy beside filters": lambda case: any(
        request.temperature == 0 and request.cuts().are_on(case.vocab_size) for request in case.requests
    ),
    "three filters in one batch": lambda case: len({request.cuts() for request in case.requests}) >= 3,
    "filtered, plain and greedy together": lambda case: (
        {
            "greedy" if not request.temperature else request.cuts().are_on(case.vocab_size)
            for request in case.requests
        }
        == {"greedy", True, False}
    ),
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_find(name):
    assert finds(S.cases_for("filtered_batches"), BATCHES[name], examples=400)


@pytest.mark.parametrize("kind", ["filtered", "filtered_small", "filtered_logits", "filtered_batches"])
def test_cases_shrink_to_no_filters(kind):
    case = minimal(S.cases_for(kind))
    assert not case.has_filter_settings
    assert {len(request.tree) for request in case.requests} == {1}


def test_one_filter_shrinks_alone():
    case = minimal(S.cases_for("filtered"), lambda case: any(r.min_p > 0 for r in case.requests))
    assert [request.cuts() for request in case.requests if request.min_p] == [
        Cuts(min_p=case.requests[0].min_p)
    ]
    assert case.filter_order == "sequential"


def test_top_p_of_dyadic_laws_has_an_exact_complement():
    def inexact(case):
        return any(float(np.float32(1) - np.float32(r.top_p)) != 1 - float(r.top_p) for r in case.requests)

    assert not finds(S.cases_for("filtered"), inexact)
