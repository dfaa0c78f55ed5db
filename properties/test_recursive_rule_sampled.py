"""Over coins that are drawn siblings are kept as p/q, renormalised in turn, says.

The case's coins only fix the seeds; the front door or the sampler draws its own.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("recursive-rule-sampled")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_recursive_rule_sampled(case, backend, device):
    LAW.run(case, backend, device)
