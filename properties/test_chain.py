"""A tree of width 1 is a linear draft: keep tokens while coin < p.

A linear DFlash block is the tree of width 1, judged by the chain's own rule.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("chain")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_chain(case, backend, device):
    LAW.run(case, backend, device)
