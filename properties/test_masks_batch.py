"""One request's bias and bitmask never reach another's rows.

Alone, padded, in the batch and in the reversed batch a request decides alike.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("masks-batch")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_masks_batch(case, backend, device):
    LAW.run(case, backend, device)
