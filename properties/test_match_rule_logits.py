"""From logits, draw-and-match within the ambiguity band of float32.

Exact whatever was drafted: the token drawn is emitted either way.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("match-rule-logits")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_match_rule_logits(case, backend, device):
    LAW.run(case, backend, device)
