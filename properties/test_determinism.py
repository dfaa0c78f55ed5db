"""The same call gives the same bits.

Same inputs, same coins, same bits.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("determinism")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_determinism(case, backend, device):
    LAW.run(case, backend, device)
