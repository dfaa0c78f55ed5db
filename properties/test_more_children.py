"""One more child never loses an acceptance under the same coins.

Target-only verification adds a sibling's mass; it takes none away.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("more-children")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_more_children(case, backend, device):
    LAW.run(case, backend, device)
