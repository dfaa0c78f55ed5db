"""The chain rule with top-k, top-p and min-p: p is the law they leave.

Dyadic p and q; q is the drafter's own, whatever filters it had. As HF's assisted decoding does.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("chain-rule-filters")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_chain_rule_filters(case, backend, device):
    LAW.run(case, backend, device)
