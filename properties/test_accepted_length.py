"""The expected number of accepted drafts is the sum of the masses of the paths to the nodes.

Speed is a promise too: a verifier that rejects too much is lossless and slow.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("accepted-length")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_accepted_length(case, backend, device):
    LAW.run(case, backend, device)
