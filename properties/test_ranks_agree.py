"""Every rank draws the same coins from the same seed, and so commits the same tokens.

Ranks differ by their environment and their global generators.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("ranks-agree")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_ranks_agree(case, backend, device):
    LAW.run(case, backend, device)
