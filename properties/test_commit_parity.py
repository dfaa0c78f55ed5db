"""A drafted token counts like a committed one.

Each walk is taken up again at each node of its path, as a step of its own behind a longer committed text.
It must go on as before, coin for coin: what was drafted leaves no trace.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("commit-parity")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_commit_parity(case, backend, device):
    LAW.run(case, backend, device)
