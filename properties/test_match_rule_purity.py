"""Draw-and-match writes to none of its inputs.

A running sum taken in place would spoil the next reader's law.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("match-rule-purity")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_match_rule_purity(case, backend, device):
    LAW.run(case, backend, device)
