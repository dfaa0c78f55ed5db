"""Each visited node's own coin draws from its law, and a drafted token is followed.

The reference DDTree's way; the final coin is not used. Dyadic laws, at each boundary and beside it.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("match-rule")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_match_rule(case, backend, device):
    LAW.run(case, backend, device)
