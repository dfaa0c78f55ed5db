"""A tree comes back exactly from its converted layout, from its mask and from EAGLE's tensors.

Whatever tree was drafted is the tree that is verified.
"""

from hypothesis import given

from treeconv.pytest_plugin import judges
from treeconv.strategies import tree_batches
from treeconv.tree_laws import tree_law_named

LAW = tree_law_named("round-trip")


@judges(LAW)
@given(batch=tree_batches())
def test_round_trip(batch):
    LAW.run(*batch)
