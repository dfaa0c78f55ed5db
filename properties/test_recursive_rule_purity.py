"""The recursive rule writes to neither target rows nor draft laws.

q loses a token after each rejection: in the rule's own copy, not in the caller's.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("recursive-rule-purity")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_recursive_rule_purity(case, backend, device):
    LAW.run(case, backend, device)
