"""Where a filter's cut flips, and just beside, exactly the right tokens are kept.

One row under many filters at once: every top-k, top-p on and beside each running sum and between the two
orders' sums, min-p on and beside each share. What is kept shows at the boundaries of the law left.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("critical-cuts")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_critical_cuts(case, backend, device):
    LAW.run(case, backend, device)
