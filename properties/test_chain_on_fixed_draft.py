"""Forced on a draft that was not sampled from q, min(1, p/q) shows its bias, to the digit.

A drafter that takes its argmax and reports a soft q: why ``verify`` refuses the pairing.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("chain-on-fixed-draft")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_chain_on_fixed_draft(case, backend, device):
    LAW.run(case, backend, device)
