"""Two chained verification steps write text with the law of plain sampling, whatever was drafted.

What it is all for: text written step by step has the law of plain sampling, though every step drafts.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("autoregressive")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_autoregressive(case, backend, device):
    LAW.run(case, backend, device)
