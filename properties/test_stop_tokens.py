"""Behind the first emitted stop token nothing is emitted, kept or counted; a refused one ends nothing.

Text after an accepted stop token is text that plain decoding would never have written.
"""

from hypothesis import given

from treeconv.pytest_plugin import judges
from treeconv.strategies import tree_batches
from treeconv.tree_laws import tree_law_named

LAW = tree_law_named("stop-tokens")


@judges(LAW)
@given(batch=tree_batches())
def test_stop_tokens(batch):
    LAW.run(*batch)
