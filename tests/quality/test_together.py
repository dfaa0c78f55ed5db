"""Contract: judged together, every sampler gets the verdict that the law gives it alone, right or wrong.

So the long run (``ci/no_false_alarms.py``), which judges many at once, lets nobody off.
"""

import hypothesis
import pytest
import together
from registry import LAWS, all_faults
from right_samplers import RIGHT
from rng_faults import Generated

from treeconv.backends.registry import get_backend
from treeconv.laws import BACKEND_LAWS, Law, why_not
from treeconv.strategies import cases_for
from treeconv.suite import with_settings

BY_CHANCE = {"seed-ignored", "generator-ignored"}  # decide otherwise whenever they are asked
FAULTS = [
    fault
    for fault in all_faults()
    if isinstance(LAWS[fault.killed_by[0]], Law)
    and hasattr(fault.made, "verify")
    and fault.name not in BY_CHANCE
]


def drawn(law, count):
    cases = []

    def keep(case):
        cases.append(case)

    with_settings(hypothesis.given(case=cases_for(law.cases))(keep), law.name, count, "together")()
    return cases


def verdict(law, case, sampler):
    """Decisions, and what a failure says."""
    try:
        return law.run(case, sampler), "None"
    except Exception as error:  # noqa: BLE001
        return 0, str(error)


def verdicts(law, case, samplers):
    found = {}
    for sampler, decisions, error in together.judged(law, case, samplers):
        assert sampler not in found
        found[sampler] = decisions, str(error)
    assert set(found) == set(samplers)
    return found


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_wrong_sampler_among_right_ones_is_flagged_where_it_is_alone_and_nobody_else(fault):
    law = LAWS[fault.killed_by[0]]
    right = [made() for made in RIGHT if made.name != "pivot" and why_not(law, made()) is None]
    wrong, alone = fault.made(), fault.made()  # some keep state from call to call
    for turn, case in enumerate(drawn(law, 4)):
        found = verdicts(law, case, [right[0], wrong, *right[1:2]] if turn % 2 else [wrong, *right[:2]])
        assert found.pop(wrong) == verdict(law, case, alone)
        assert {text for _, text in found.values()} == {"None"}


@pytest.mark.parametrize("law", BACKEND_LAWS, ids=lambda law: law.name)
def test_right_samplers_are_judged_on_as_many_decisions_as_alone(law):
    samplers = [made() for made in RIGHT[::2] if why_not(law, made()) is None]
    samplers += [get_backend("reference"), get_backend("eager")]
    for case in drawn(law, 3):
        assert verdicts(law, case, samplers) == {one: verdict(law, case, one) for one in samplers}


def test_samplers_that_draw_their_own_coins_do_not_share_a_generator():
    law = LAWS["seeded-text"]
    for case in drawn(law, 5):
        samplers = [Generated(), Generated(), Generated()]
        assert verdicts(law, case, samplers) == {one: verdict(law, case, one) for one in samplers}
