"""Draw-and-match on processed rows: each node draws from its law after bias, bitmask and penalties.

Greedy requests are among them: another rule must not fall back on the raw row.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("match-rule-processors")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_match_rule_processors(case, backend, device):
    LAW.run(case, backend, device)
