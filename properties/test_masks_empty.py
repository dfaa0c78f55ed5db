"""A visited node that forbids every token is EMPTY; one that is not visited says nothing.

Its request emits nothing and says so. No other request notices.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("masks-empty")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_masks_empty(case, backend, device):
    LAW.run(case, backend, device)
