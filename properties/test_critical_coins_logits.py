"""From logits, decisions flip within the ambiguity band of float32 around each exact boundary.

A sampler computes its softmax in float32: it may decide either way inside the band, whose edges are
swept, and nowhere else.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("critical-coins-logits")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_critical_coins_logits(case, backend, device):
    LAW.run(case, backend, device)
