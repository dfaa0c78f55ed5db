"""Contract: every wrong filter dies by its named laws in the default number of cases; right ones never do."""

import pytest
from filter_faults import FAULTS, RIGHT

from treeconv.corpus import load_entry
from treeconv.errors import LawBroken
from treeconv.laws import BACKEND_LAWS, law_named
from treeconv.replay import replay_entry
from treeconv.suite import DEFAULT_MAX_EXAMPLES, check_law, failure_text, save_failure

FILTER_LAWS = [law for law in BACKEND_LAWS if law.cases.startswith("filtered")]
PAIRS = [pytest.param(fault, law, id=f"{fault.name}-by-{law}") for fault in FAULTS for law in fault.killed_by]


@pytest.mark.parametrize(("fault", "law"), PAIRS)
def test_wrong_filter_is_killed(fault, law, tmp_path):
    outcome = check_law(law_named(law), fault(), max_examples=DEFAULT_MAX_EXAMPLES, seed=1)
    assert outcome.broken, f"{fault.name} survived {outcome.cases} cases of {law}"
    case = outcome.broken.case
    assert max(len(request.tree) for request in case.requests) <= 3
    assert case.is_filtered
    path = save_failure(outcome.broken, tmp_path)
    with pytest.raises(LawBroken):
        replay_entry(load_entry(path), fault())
    text = failure_text(outcome.broken, tmp_path)
    assert len(text.splitlines()) <= 30
    shown = [str(request.cuts(case.filter_order)) for request in case.requests]
    assert any(cuts in text for cuts in shown), text  # the reader sees which filters were on


@pytest.mark.parametrize("law", FILTER_LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("sampler", RIGHT, ids=lambda sampler: sampler.name)
def test_right_filter_is_not_flagged(sampler, law):
    outcome = check_law(law, sampler(), max_examples=100, seed=1)
    assert not outcome.broken, str(outcome.broken)
    assert outcome.decisions


def test_every_filter_law_kills_something():
    assert {law for fault in FAULTS for law in fault.killed_by} == {law.name for law in FILTER_LAWS}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 20
