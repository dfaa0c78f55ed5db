"""The recursive rule on processed rows: p, in tests and residuals, is the law after all processors.

q is what the drafter sampled from, whether or not it knew the processors; greedy requests are among them.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("recursive-rule-processors")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_recursive_rule_processors(case, backend, device):
    LAW.run(case, backend, device)
