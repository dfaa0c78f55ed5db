"""The text starts with s exactly as often as the target's own law says, for every s it can show.

By enumeration, in fractions: the box of coins of every outcome is measured exactly.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("outcome-law")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_outcome_law(case, backend, device):
    LAW.run(case, backend, device)
