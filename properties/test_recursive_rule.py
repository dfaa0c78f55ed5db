"""Siblings sampled without replacement are tested in turn, p and q renormalised after each.

Each with the coin of its own slot. Dyadic p and q, at each boundary and its float neighbours.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("recursive-rule")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_recursive_rule(case, backend, device):
    LAW.run(case, backend, device)
