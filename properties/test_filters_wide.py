"""Filters over trees of up to 70 nodes and vocabularies of thousands.

Cuts that no single block of a kernel sees whole.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("filters-wide")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_filters_wide(case, backend, device):
    LAW.run(case, backend, device)
