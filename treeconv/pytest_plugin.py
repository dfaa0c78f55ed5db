"""Options, report header and failure text of a treeconv suite, for pytest.

Installed with treeconv and silent in projects that have no such suite: nothing heavy is imported, no
Hypothesis setting is touched, and an option name that a project's own conftest takes is left to it (ours
then answers to ``--treeconv-...`` alone).

A suite's test is thin::

    LAW = law_named("critical-coins")

    @judges(LAW)
    @given(case=cases_for(LAW.cases))
    def test_critical_coins(case, backend, device):
        LAW.run(case, backend, device)
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator

    from treeconv.backends.base import Backend
    from treeconv.case import VerifyCase
    from treeconv.laws import Law
    from treeconv.tree_laws import TreeLaw

__all__ = ["HAS_SUITE", "each_backend", "judges"]

#: Set by a suite's conftest in ``config.stash``: the report header is wanted.
HAS_SUITE = pytest.StashKey[bool]()

#: Run a test once for each selected backend: it takes ``backend`` and ``device``.
each_backend = pytest.mark.treeconv()


def judges(law: Law | TreeLaw) -> pytest.MarkDecorator:
    """Mark a ``@given`` test as one law's: seed and examples are the suite's, once for each backend.

    Skipped, with the reason, for a backend that does not claim what the law is about.
    """
    return pytest.mark.treeconv(law=law)


@dataclass(frozen=True)
class _Suite:
    backends: list[Backend]
    unused: dict[str, str]
    device: str
    max_examples: int
    seed: int | str


_SUITE = pytest.StashKey[_Suite]()


def _taken(parser: pytest.Parser) -> set[str]:
    groups = [*getattr(parser, "_groups", ()), parser._anonymous]  # noqa: SLF001  # no public list
    return {name for group in groups for option in group.options for name in option.names()}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_load_initial_conftests(parser: pytest.Parser) -> Generator[None, None, None]:
    """Add the options after the conftests had their say: installing treeconv must break no one's suite."""
    yield
    group = parser.getgroup("treeconv", "treeconv: is tree speculative sampling lossless?")
    taken = _taken(parser)

    def add(name: str, **attributes: Any) -> None:
        names = [option for option in (f"--{name}", f"--treeconv-{name}") if option not in taken]
        group.addoption(*names, dest=f"treeconv_{name.replace('-', '_')}", **attributes)

    add(
        "backend",
        action="append",
        default=[],
        metavar="NAME|module:callable",
        help="verifier to judge (repeatable); module:callable is yours, importable from the current"
        " directory. Default: every backend that can run on the device",
    )
    add("device", default=None, metavar="cpu|cuda[:n]", help="where the verifiers run; default: cpu")
    add(
        "max-examples",
        type=int,
        default=None,
        metavar="N",
        help="cases per law and backend; default: 200. The cases are fixed by --hypothesis-seed, which by"
        " default is the date in UTC",
    )


def _options(config: pytest.Config) -> tuple[list[str], str | None, int | None]:
    return (
        config.getoption("treeconv_backend", []),
        config.getoption("treeconv_device", None),
        config.getoption("treeconv_max_examples", None),
    )


def _seed(config: pytest.Config) -> int | str:
    worker: dict[str, Any] = getattr(config, "workerinput", {})
    if "treeconv_seed" in worker:  # the controller's: the day may end during a run
        seed: int | str = worker["treeconv_seed"]
        return seed
    given = config.getoption("--hypothesis-seed", None)
    if given is not None:
        return int(given) if given.isdigit() else str(given)
    from treeconv.suite import seed_of_the_day  # noqa: PLC0415

    return seed_of_the_day()


def _narrow_gpus(device: str | None) -> None:
    """One GPU for each xdist worker, where there are several; before anything touches CUDA."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "")
    if device != "cuda" or not worker.startswith("gw"):
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        gpus = [gpu for gpu in visible.split(",") if gpu]
    else:
        gpus = [str(index) for index in range(len(list(Path("/dev").glob("nvidia[0-9]*"))))]
    if len(gpus) > 1:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus[int(worker[2:]) % len(gpus)]


def _suite(config: pytest.Config) -> _Suite:
    """What the options ask for, resolved once.

    Raises:
        pytest.UsageError: an option asks for what is not there; the message says why.
    """
    if _SUITE in config.stash:
        return config.stash[_SUITE]
    names, device, max_examples = _options(config)
    _narrow_gpus(device)
    import torch  # noqa: PLC0415

    from treeconv import suite  # noqa: PLC0415
    from treeconv.errors import TreeconvError  # noqa: PLC0415

    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)  # the workers are the parallelism; more threads only fight for the cores
    try:
        device = suite.check_device(device or "cpu")
        backends, unused = suite.select_backends(names, device)
        if max_examples is None:
            max_examples = suite.DEFAULT_MAX_EXAMPLES
        suite.suite_settings(max_examples)
    except TreeconvError as error:
        raise pytest.UsageError(str(error)) from None
    config.stash[_SUITE] = _Suite(backends, unused, device, max_examples, _seed(config))
    return config.stash[_SUITE]


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker; refuse options that cannot be met before anything is collected."""
    config.addinivalue_line(
        "markers", "treeconv(law=None): run for each selected backend (treeconv's plugin)"
    )
    if any(value not in ([], None) for value in _options(config)):
        config.stash[HAS_SUITE] = True
        _suite(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Hand xdist's workers the controller's seed."""
    if HAS_SUITE in node.config.stash:
        node.workerinput["treeconv_seed"] = _suite(node.config).seed


def pytest_report_header(config: pytest.Config) -> list[str]:
    """Name versions, device, seed, backends, and why others are not judged; nothing without a suite."""
    if HAS_SUITE not in config.stash:
        return []
    suite = _suite(config)
    import hypothesis  # noqa: PLC0415
    import torch  # noqa: PLC0415

    import treeconv  # noqa: PLC0415

    return [
        f"treeconv {treeconv.__version__}, torch {torch.__version__}, hypothesis {hypothesis.__version__}",
        f"treeconv: {suite.max_examples} cases per law on {suite.device}, --hypothesis-seed={suite.seed}",
        f"treeconv: backends {', '.join(backend.name for backend in suite.backends)}",
        *(f"treeconv: not {name}: {reason}" for name, reason in suite.unused.items()),
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a marked test its backends, and a law's test the suite's seed and number of examples."""
    marker = metafunc.definition.get_closest_marker("treeconv")
    if marker is None:
        return
    suite = _suite(metafunc.config)
    law = marker.kwargs.get("law")
    if law is not None:
        from treeconv.suite import with_settings  # noqa: PLC0415

        with_settings(metafunc.function, law.name, suite.max_examples, suite.seed)  # in place
    if "backend" in metafunc.fixturenames:
        parameters = list(_parameters(suite, law))
        metafunc.parametrize(("backend", "device"), parameters)


def _parameters(suite: _Suite, law: Law | None) -> Iterator[Any]:
    from treeconv.laws import why_not  # noqa: PLC0415

    for backend in suite.backends:
        reason = why_not(law, backend) if law is not None else None
        marks = [pytest.mark.skip(reason=f"{backend.name}: {reason}")] if reason else []
        yield pytest.param(backend, suite.device, id=backend.name, marks=marks)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Print a broken law as its own text with a line that replays it: no traceback, no dump of arrays."""
    try:
        return (yield)
    except Exception as error:
        text = _failure_text(pyfuncitem, error)
        if text is None:
            raise
    raise pytest.fail.Exception(text, pytrace=False)


def _failure_text(item: pytest.Function, error: Exception) -> str | None:
    if "treeconv.laws" not in sys.modules and "treeconv.tree_laws" not in sys.modules:
        return None  # no law was run, and treeconv.suite is slow to import
    from treeconv.suite import broken_law, failure_text  # noqa: PLC0415

    marker, arguments = item.get_closest_marker("treeconv"), item.funcargs
    law = marker.kwargs.get("law") if marker else None
    run = None
    if law is not None and "backend" in arguments:

        def run(case: VerifyCase) -> object:
            return law.run(case, arguments["backend"], arguments["device"])

    broken = broken_law(error, run)
    return None if broken is None else failure_text(broken)
