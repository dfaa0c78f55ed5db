"""A child sampled from q is kept iff coin * q < p, else the bonus comes from relu(p - q).

Dyadic p and q, at each boundary p / q and its float neighbours; draft laws with NaN, without mass, or
equal to p, where no residual is left.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("chain-rule")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_chain_rule(case, backend, device):
    LAW.run(case, backend, device)
