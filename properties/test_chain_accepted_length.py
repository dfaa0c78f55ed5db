"""A sampled chain keeps the sum over drafts of prod min(p, q) tokens on average.

One minus the total variation distance for one draft (Leviathan et al., 2023).
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("chain-accepted-length")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_chain_accepted_length(case, backend, device):
    LAW.run(case, backend, device)
