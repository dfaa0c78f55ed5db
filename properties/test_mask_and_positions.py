"""A node sees the prefix, its ancestors and itself; its position is prefix + depth.

What the target model sees when it scores the tree.
"""

from hypothesis import given

from treeconv.pytest_plugin import judges
from treeconv.strategies import tree_batches
from treeconv.tree_laws import tree_law_named

LAW = tree_law_named("mask-and-positions")


@judges(LAW)
@given(batch=tree_batches())
def test_mask_and_positions(batch):
    LAW.run(*batch)
