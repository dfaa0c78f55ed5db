"""An emitted token has p > 0 for every coin in [0, 1].

Coins of 0, one bit, 1 - 2^-24 and exactly 1, on laws full of zeros: where inclusive tests and empty
residuals show.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("positive-mass")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_positive_mass(case, backend, device):
    LAW.run(case, backend, device)
