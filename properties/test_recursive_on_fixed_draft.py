"""Forced on q's own top-k, recursive rejection shows its bias, to the digit.

A fixed set makes up for nothing that min(1, p/q) accepts too much: .8333 instead of .5 with p = [.5, .3,
.2], q = [.6, .3, .1]. Why ``verify`` refuses the pairing.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("recursive-on-fixed-draft")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_recursive_on_fixed_draft(case, backend, device):
    LAW.run(case, backend, device)
