"""Inputs are not written to, and nothing depends on what an earlier call left in a buffer.

A verifier that scribbles on its inputs works once, and not in a CUDA graph.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("purity")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_purity(case, backend, device):
    LAW.run(case, backend, device)
