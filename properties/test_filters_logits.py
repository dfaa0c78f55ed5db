"""From logits, filters keep what the exact law keeps, but where float32 cannot tell a cut.

Every law that rounding may leave is followed; outside of that the tolerance is zero.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("filters-logits")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_filters_logits(case, backend, device):
    LAW.run(case, backend, device)
