"""Bias and bitmask are not applied in place.

The caller reads the same logits again: for log-probabilities, for the next step, for a replay.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("masks-purity")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_masks_purity(case, backend, device):
    LAW.run(case, backend, device)
