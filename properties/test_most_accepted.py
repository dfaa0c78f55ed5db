"""No other exact rule accepts more drafts on a fixed tree than target-only.

An accepted child is the next token, so an exact rule accepts one with at most its siblings' mass. Measured
over coin boxes, for every rule the backend has; the zero-and-renormalise form is computed.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("most-accepted")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_most_accepted(case, backend, device):
    LAW.run(case, backend, device)
