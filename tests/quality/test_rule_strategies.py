"""Contract: the rule strategies find what the laws are about, and shrink to what a person can read."""

import numpy as np
import pytest
from hypothesis import Phase, find, settings

from treeconv.errors import InvalidArgument
from treeconv.rule_strategies import RULE_CASES, fixed_draft_cases, rule_cases, sampled_draft_cases
from treeconv.strategies import cases_for

MINIMAL = settings(max_examples=200, database=None)
SETTINGS = settings(max_examples=500, database=None, phases=[Phase.generate])


def drafted(request):
    """``(p, q)`` at each drafted token."""
    tree = request.tree
    for node in range(1, len(tree)):
        where = tree.parents[node], tree.token_ids[node]
        yield float(request.rows[where]), float(request.draft_probs[where])


FOUND = {
    "a draft law that holds NaN": lambda r: np.isnan(r.draft_probs).any(),
    "a draft law that is p": lambda r: len(r.tree) > 1 and np.array_equal(r.draft_probs[0], r.rows[0]),
    "a drafted token that q forbids and p allows": lambda r: any(p > 0 == q for p, q in drafted(r)),
    "a drafted token that p forbids and q allows": lambda r: any(q > 0 == p for p, q in drafted(r)),
    "a boundary p/q below 1": lambda r: any(0 < p < q for p, q in drafted(r)),
    "two children at one node": lambda r: any(len(kids) > 1 for kids in r.tree.children),
    "three levels": lambda r: r.tree.depth >= 3,
}


@pytest.mark.parametrize("what", FOUND)
def test_recursive_cases_find(what):
    assert find(rule_cases("recursive"), lambda case: any(map(FOUND[what], case.requests)), settings=SETTINGS)


@pytest.mark.parametrize("kind", sorted(RULE_CASES))
def test_every_kind_is_known_to_cases_for_and_shrinks_to_little(kind):
    least = find(cases_for(kind), lambda _: True, settings=MINIMAL)
    assert len(least.requests) == 1
    assert len(least.requests[0].tree) <= 2
    assert least.rule == {"match": "draw_and_match"}.get(kind.split("_")[0], kind.split("_")[0])


def test_sampled_drafts_hold_what_tells_wrong_rules_apart():
    """A fourth token behind two siblings; a drafter that is sure; one that never proposes what p wants."""

    def has_choice(case):
        request = case.requests[0]
        law = request.draft_probs[request.tree.token_ids[0] % len(request.tree)]  # the one behind the root
        return case.vocab_size == 4 and len(request.tree.children[0]) == 2 and (law > 0).all()

    assert find(sampled_draft_cases("recursive"), has_choice, settings=SETTINGS)
    sure = find(
        sampled_draft_cases("chain"),
        lambda case: len(case.requests[0].tree) == 4 and (case.requests[0].draft_probs[0] == 1).any(),
        settings=SETTINGS,
    )
    assert all(len(kids) < 2 for kids in sure.requests[0].tree.children)


def test_fixed_drafts_are_the_top_of_q_and_are_biased_now_and_then():
    def is_biased(case):
        request = case.requests[0]
        kids = [request.tree.token_ids[kid] for kid in request.tree.children[0]]
        p, q = request.rows[0], request.draft_probs[0]
        return len(kids) == 2 and q[kids[0]] >= q[kids[1]] and 0 < p[kids[0]] < q[kids[0]]

    assert find(fixed_draft_cases("recursive"), is_biased, settings=SETTINGS)


def test_an_unknown_kind_is_refused():
    with pytest.raises(InvalidArgument, match="kind='chain_of_thought', but must be one of logits"):
        cases_for("chain_of_thought")
