"""Contract: wrong processors die by their named laws in the default number of cases, right ones never."""

import pytest
from processor_faults import FAULTS, RIGHT

from treeconv.corpus import load_entry
from treeconv.errors import LawBroken
from treeconv.laws import BACKEND_LAWS, law_named
from treeconv.replay import replay_entry
from treeconv.suite import DEFAULT_MAX_EXAMPLES, check_law, failure_text, save_failure

KINDS = ("masked", "forbidden", "penalised", "processed")
PROCESSOR_LAWS = [law for law in BACKEND_LAWS if law.cases.startswith(KINDS)]
PAIRS = [pytest.param(fault, law, id=f"{fault.name}-by-{law}") for fault in FAULTS for law in fault.killed_by]
SHOWN = ["FlatOrderHistory", "RawArgmaxAtZero", "MaskRowsOfRequestZero", "UnmaskedWhereAllIsForbidden"]


@pytest.mark.parametrize(("fault", "law"), PAIRS)
def test_wrong_processor_is_killed(fault, law):
    outcome = check_law(law_named(law), fault(), max_examples=DEFAULT_MAX_EXAMPLES, seed=1, shrink=False)
    assert outcome.broken, f"{fault.name} survived {outcome.cases} cases of {law}"


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if fault.name in SHOWN], ids=lambda fault: fault.name
)
def test_the_failure_is_small_and_says_which_processors_were_on(fault, tmp_path):
    law = law_named(fault.killed_by[0])
    broken = check_law(law, fault(), max_examples=DEFAULT_MAX_EXAMPLES, seed=1).broken
    assert max(len(request.tree) for request in broken.case.requests) <= 4
    path = save_failure(broken, tmp_path)
    with pytest.raises(LawBroken):
        replay_entry(load_entry(path), fault())
    text = failure_text(broken, tmp_path)
    assert len(text.splitlines()) <= 30
    assert any(name in text for name in ("bias {", "a bitmask", " penalty "))
    assert text.splitlines()[-1] == f"  replay:   treeconv replay {path} --backend {fault.name}"


@pytest.mark.parametrize("law", PROCESSOR_LAWS, ids=lambda law: law.name)
@pytest.mark.parametrize("sampler", RIGHT, ids=lambda sampler: sampler.name)
def test_right_processor_is_not_flagged(sampler, law):
    outcome = check_law(law, sampler(), max_examples=40, seed=1)
    assert not outcome.broken, str(outcome.broken)
    assert outcome.decisions


def test_every_processor_law_kills_something():
    assert {law for fault in FAULTS for law in fault.killed_by} == {law.name for law in PROCESSOR_LAWS}
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30
