"""Drawing and matching, the text has the target's law whatever was drafted.

Measured exactly, one call per box of coins.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("match-rule-outcome")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_match_rule_outcome(case, backend, device):
    LAW.run(case, backend, device)
