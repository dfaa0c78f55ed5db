"""Temperature 0 is the lowest-index argmax whatever the coins, and tiny temperatures approach it.

T = 0 is decided by comparing logits, never by a softmax that might tie or overflow.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("greedy")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_greedy(case, backend, device):
    LAW.run(case, backend, device)
