"""On every coin the verifier decides as the exact oracle does.

Every request under its own coins, and under coins spread evenly over the whole coin space.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("oracle-agreement")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_oracle_agreement(case, backend, device):
    LAW.run(case, backend, device)
