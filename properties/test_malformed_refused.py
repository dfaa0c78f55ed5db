"""A malformed tree is refused, and the message names the node.

Duplicate siblings would count a mass twice, and cycles would hang a kernel.
"""

from hypothesis import given

from treeconv.pytest_plugin import judges
from treeconv.strategies import tree_batches
from treeconv.tree_laws import tree_law_named

LAW = tree_law_named("malformed-refused")


@judges(LAW)
@given(batch=tree_batches())
def test_malformed_refused(batch):
    LAW.run(*batch)
