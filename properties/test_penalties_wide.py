"""Penalties over vocabularies of thousands.

Trees of up to 70 nodes behind 40 committed tokens.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("penalties-wide")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_penalties_wide(case, backend, device):
    LAW.run(case, backend, device)
