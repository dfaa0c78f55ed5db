"""A seed and a position fix a request's text, in any batch, at any place, under any padding.

From a generator: its state does.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("seeded-text")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_seeded_text(case, backend, device):
    LAW.run(case, backend, device)
