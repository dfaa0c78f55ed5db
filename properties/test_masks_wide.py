"""Bias and bitmask over vocabularies of thousands.

Trees of up to 70 nodes, a bitmask row a node, and a last word that holds fewer than 32 tokens.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("masks-wide")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_masks_wide(case, backend, device):
    LAW.run(case, backend, device)
