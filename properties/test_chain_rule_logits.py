"""From logits, the chain rule within the ambiguity band of float32.

The boundary p / q and the residual relu(p - q) are enclosed from the logits' exact values.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("chain-rule-logits")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_chain_rule_logits(case, backend, device):
    LAW.run(case, backend, device)
