"""At each bucket boundary and its float neighbours the decision flips exactly where the oracle says.

Laws of dyadic masses: every float32 sum is exact, so there is no ambiguity at all, and a bias of
one bit in one bucket is seen.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("critical-coins")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_critical_coins(case, backend, device):
    LAW.run(case, backend, device)
