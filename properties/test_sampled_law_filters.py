"""Over coins that are drawn, filtered requests go on as their filtered laws say.

The case's coins only fix the seeds; the front door or the sampler draws its own.
"""

from hypothesis import given

from treeconv.laws import law_named
from treeconv.pytest_plugin import judges
from treeconv.strategies import cases_for

LAW = law_named("sampled-law-filters")


@judges(LAW)
@given(case=cases_for(LAW.cases))
def test_sampled_law_filters(case, backend, device):
    LAW.run(case, backend, device)
