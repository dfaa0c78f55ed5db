"""Filters are not applied in place: rows and filters come back as they were.

Neither logits nor probabilities; the next reader of the same rows sees the unfiltered law.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("filters-purity")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_filters_purity(case, backend, device):
    LAW.run(case, backend, device)
