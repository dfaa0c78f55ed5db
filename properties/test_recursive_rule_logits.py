"""From logits, the recursive rule within the ambiguity band of float32.

The band grows with every residual: its sum divides, and its masses are differences.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("recursive-rule-logits")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_recursive_rule_logits(case, backend, device):
    LAW.run(case, backend, device)
