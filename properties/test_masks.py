"""Forbidden tokens have no mass, biased ones their biased mass, at each node its own.

Bitmasks that forbid drafts, biases of -inf and of 1e8, NaN where a token is forbidden, bits set behind the
vocabulary: drafts are tested against, and the bonus drawn from, what is left.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("masks")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_masks(case, backend, device):
    LAW.run(case, backend, device)
