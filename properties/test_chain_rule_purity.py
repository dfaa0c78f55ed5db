"""The chain rule writes to neither target rows nor draft laws.

The residual p - q taken in place would spoil the next reader's law.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("chain-rule-purity")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_chain_rule_purity(case, backend, device):
    LAW.run(case, backend, device)
