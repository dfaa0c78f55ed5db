"""From logits, over coins that are drawn, each next token comes as often as the target's law says.

At every temperature, greedy included.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("sampled-law-logits")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_sampled_law_logits(case, backend, device):
    LAW.run(case, backend, device)
