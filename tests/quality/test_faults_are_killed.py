"""Contract: every planted fault dies by its named law, in the default number of cases, shrunk to a few nodes.

And the other way round: a right sampler is never flagged, and every law kills something.
"""

import pytest
from faults import FAULTS, KINDS, Sampler

from treeconv.laws import BACKEND_LAWS, law_named, why_not
from treeconv.suite import DEFAULT_MAX_EXAMPLES, check_law, failure_text

ALSO = [
    pytest.param(fault, law, id=f"{fault.name}-by-{law}") for fault in FAULTS for law in fault.killed_by[1:]
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.name}-by-{fault.killed_by[0]}")
def test_fault_is_killed(fault, tmp_path):
    law = fault.killed_by[0]
    outcome = check_law(law_named(law), fault.make(), max_examples=DEFAULT_MAX_EXAMPLES, seed=1)
    assert outcome.broken, f"{fault.name} survived {outcome.cases} cases of {law}"
    case = outcome.broken.case
    assert max(len(request.tree) for request in case.requests) <= 4
    text = failure_text(outcome.broken, tmp_path)
    lines = text.splitlines()
    assert len(lines) <= 30
    assert lines[0] == f"law broken: {law}"
    assert lines[-1] == f"  replay:   treeconv replay {next(tmp_path.iterdir())} --backend {fault.name}"
    assert [line.split(":")[0].strip() for line in lines[1:4]] == ["meaning", "backend", "case"]
    assert any(line.startswith("  got:") for line in lines)
    assert any(line.startswith("  want:") for line in lines)


@pytest.mark.parametrize(("fault", "law"), ALSO)
def test_fault_is_also_killed(fault, law):
    outcome = check_law(law_named(law), fault.make(), max_examples=DEFAULT_MAX_EXAMPLES, seed=1, shrink=False)
    assert outcome.broken, f"{fault.name} survived {outcome.cases} cases of {law}"


#: Those about filters are tried in test_filter_faults_are_killed.py: this sampler takes none.
LAWS = [law for law in BACKEND_LAWS if why_not(law, Sampler()) is None]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_right_sampler_is_not_flagged(law):
    outcome = check_law(law, Sampler(), max_examples=100, seed=1)
    assert not outcome.broken, str(outcome.broken)
    assert outcome.decisions


def test_every_kind_has_a_fault_and_every_law_kills_one():
    assert {fault.kind for fault in FAULTS} == set(KINDS)
    named = {law for fault in FAULTS for law in fault.killed_by}
    assert named == {law.name for law in LAWS}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) > 40
