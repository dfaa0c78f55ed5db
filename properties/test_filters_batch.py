"""A filtered request decides alike alone, padded, permuted and batched.

Filtered, plain and greedy requests side by side, each with its own values.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("filters-batch")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_filters_batch(case, backend, device):
    LAW.run(case, backend, device)
