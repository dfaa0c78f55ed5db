"""A request decides alike alone, padded, permuted and batched, whatever its neighbours' temperatures.

Kernels share buffers, strides and launch grids between requests; decisions may share nothing.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("batch-invariance")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_batch_invariance(case, backend, device):
    LAW.run(case, backend, device)
