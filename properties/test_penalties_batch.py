"""One request's text and penalties never reach another's rows.

Committed texts of several lengths, padded: padding is no token.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("penalties-batch")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_penalties_batch(case, backend, device):
    LAW.run(case, backend, device)
