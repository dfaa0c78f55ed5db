"""At most depth_cap - 1 drafts are accepted, and at the cap the bonus comes from the full law.

At the cap nothing was tested, so nothing is taken out of the law the bonus is drawn from.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("depth-cap")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_depth_cap(case, backend, device):
    LAW.run(case, backend, device)
