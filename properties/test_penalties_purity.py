"""Penalties are not applied in place, nor is the committed text grown.

Two calls on the same tensors decide alike, another call in between.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("penalties-purity")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_penalties_purity(case, backend, device):
    LAW.run(case, backend, device)
