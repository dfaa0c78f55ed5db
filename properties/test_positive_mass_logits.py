"""A token with logit -inf is never emitted, for every coin in [0, 1].

The same from logits, where -inf and masses that underflow are the zeros.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("positive-mass-logits")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_positive_mass_logits(case, backend, device):
    LAW.run(case, backend, device)
