"""top-k, top-p and min-p keep exactly the tokens they must.

Laws of dyadic masses, cuts on and beside their running sums: where no division rounds, one set of
tokens is right. Drafts are tested against, and the bonus drawn from, what is left, renormalised.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("filters")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_filters(case, backend, device):
    LAW.run(case, backend, device)
