"""A node has seen the committed text and the path to it, each token as often as it is there.

Repetition, frequency and presence penalties, negative ones among them, with bias and bitmask behind; ties
that the penalties make, and drafts that repeat themselves.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("penalties")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_penalties(case, backend, device):
    LAW.run(case, backend, device)
