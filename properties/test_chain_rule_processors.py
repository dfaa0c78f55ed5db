"""The chain rule on processed rows: p, in test and residual, is the law after bias, bitmask and penalties.

q is what the drafter sampled from, whether or not it knew the processors; greedy requests are among them.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("chain-rule-processors")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_chain_rule_processors(case, backend, device):
    LAW.run(case, backend, device)
