"""Contract: no law flags a right sampler, however odd; each law judges something of each that claims it.

The long run, a hundred times the default, is ``ci/no_false_alarms.py``.
"""

import numpy as np
import pytest
from right_samplers import RIGHT, InBfloat16

from treeconv.case import Request, VerifyCase
from treeconv.laws import BACKEND_LAWS, law_named, why_not
from treeconv.suite import DEFAULT_MAX_EXAMPLES, check_law
from treeconv.tree import DraftTree

PAIRS = [
    pytest.param(sampler, law, id=f"{sampler.__module__}-{sampler.__name__}-{law.name}")
    for sampler in RIGHT
    for law in BACKEND_LAWS
    if why_not(law, sampler()) is None
]


def examples(sampler, law):
    """Few, but of what is slow fewer."""
    if (sampler.name, law.name) == ("pivot", "filters-wide"):  # looks at every pair of thousands of tokens
        return 2
    return (
        5
        if law.cases in ("wide", "filtered_wide")
        or law.name.startswith(("sampled", "fresh"))
        or law.name.endswith("sampled")
        else 15
    )


@pytest.mark.parametrize(("sampler", "law"), PAIRS)
def test_a_right_sampler_is_not_flagged(sampler, law):
    outcome = check_law(law, sampler(), max_examples=examples(sampler, law), seed=1, shrink=False)
    assert not outcome.broken, str(outcome.broken)
    assert outcome.decisions


def test_a_near_tie_is_judged_in_the_dtype_that_was_handed_over():
    """X3: in float32 token 1 wins; in bfloat16 both are 23.5 and the lowest id wins."""
    row = np.array([[23.5, 23.56]], np.float32)
    case = VerifyCase((Request(DraftTree([-1], [0]), row, 0.0, np.array([0.5], np.float32), 0.5),))
    assert law_named("oracle-agreement").run(case, InBfloat16()) > 0
    assert law_named("greedy").run(case, InBfloat16()) > 0


@pytest.mark.parametrize("max_examples", [DEFAULT_MAX_EXAMPLES, 1000])
def test_the_chancy_laws_together_alarm_falsely_in_less_than_one_run_of_a_million(
    max_examples,
):
    from treeconv._rng_checks import FALSE_FAIL_RATE  # noqa: PLC0415

    chancy = [law for law in BACKEND_LAWS if "sampled" in law.name or law.name == "fresh-coins"]
    assert len(chancy) == 8
    backends = 10
    assert len(chancy) * max_examples * backends * FALSE_FAIL_RATE <= 1e-6
    assert DEFAULT_MAX_EXAMPLES * FALSE_FAIL_RATE <= 1e-9  # of one law
