"""Temperature, top-k, top-p and min-p come after bias, bitmask and penalties.

A filter counts and weighs what the processors left.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("processors-filtered")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_processors_filtered(case, backend, device):
    LAW.run(case, backend, device)
