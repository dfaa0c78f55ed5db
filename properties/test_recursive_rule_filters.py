"""The recursive rule with top-k, top-p and min-p: p is the law they leave.

From logits: a cut inside the band leaves several laws, each right as a whole.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("recursive-rule-filters")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_recursive_rule_filters(case, backend, device):
    LAW.run(case, backend, device)
