"""Coins of other seeds, steps, calls and requests, and of one text, are drawn independently.

Revealed by trees whose text shows which sixteenth a coin fell into.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("fresh-coins")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_fresh_coins(case, backend, device):
    LAW.run(case, backend, device)
