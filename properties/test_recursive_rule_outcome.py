"""Over all drafts sampled without replacement and all coins the next token has the target's law.

Every draft of a shape is enumerated with its probability, every box of coins with its volume.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("recursive-rule-outcome")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_recursive_rule_outcome(case, backend, device):
    LAW.run(case, backend, device)
