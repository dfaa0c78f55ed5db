"""A visited row of NaN, +inf or only -inf is reported for its own request, and only there.

A NaN is one request's problem, reported and never sampled; an unvisited one is nobody's.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("bad-rows")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_bad_rows(case, backend, device):
    LAW.run(case, backend, device)
