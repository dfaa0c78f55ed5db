"""Behind any draft the filtered law is the one of plain sampling with the same filters.

A root alone is a plain sampler; both laws are measured exactly, over boxes of coins.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("filter-parity")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_filter_parity(case, backend, device):
    LAW.run(case, backend, device)
