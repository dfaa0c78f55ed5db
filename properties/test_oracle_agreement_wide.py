"""The same over trees of up to 70 nodes and vocabularies of thousands.

Sizes that small cases cannot show: siblings beyond a warp, vocabularies beyond any block.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("oracle-agreement-wide")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_oracle_agreement_wide(case, backend, device):
    LAW.run(case, backend, device)
