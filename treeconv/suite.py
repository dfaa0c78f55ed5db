"""One law against one backend: choose backends, generate cases, shrink, save and print what breaks.

Shared by the pytest plugin and the command line, so that both judge the very same cases: a run is fixed
by its seed, the law's name and the number of examples.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import time
import traceback
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
from hypothesis import HealthCheck, Phase

from treeconv.backends.registry import BACKENDS, BY_NAME_ONLY, get_backend
from treeconv.corpus import CorpusEntry, save_entry
from treeconv.errors import BackendUnavailable, InvalidArgument, LawBroken
from treeconv.laws import BACKEND_LAWS, Law, why_not
from treeconv.shrink import shrink
from treeconv.strategies import cases_for, tree_batches
from treeconv.tree_laws import TREE_LAWS, TreeLaw

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from treeconv.backends.base import Backend
    from treeconv.case import VerifyCase

__all__ = [
    "DEFAULT_MAX_EXAMPLES",
    "Outcome",
    "broken_law",
    "check_device",
    "check_law",
    "failure_text",
    "laws_named",
    "load_backend",
    "save_failure",
    "seed_of_the_day",
    "select_backends",
    "suite_settings",
    "with_settings",
]

DEFAULT_MAX_EXAMPLES = 200
FAILURES = Path(".treeconv") / "failures"  # under the current directory


def seed_of_the_day() -> int:
    """The date in UTC as an integer, 20261129: the same for everybody all day, another one tomorrow.

    So a red run is red again when repeated, here or on a colleague's machine, and still every day's run
    explores new cases.
    """
    return int(datetime.now(timezone.utc).strftime("%Y%m%d"))


def check_device(device: str) -> str:
    """The device as torch spells it.

    Raises:
        InvalidArgument: no device, not the CPU or CUDA, or not there; the message says which.
    """
    import torch  # noqa: PLC0415

    try:
        parsed = torch.device(device)
    except RuntimeError:
        raise InvalidArgument(f"device={device!r}, but must be cpu, cuda or cuda:<index>") from None
    if parsed.type not in ("cpu", "cuda"):
        raise InvalidArgument(f"device={device!r}, but must be cpu, cuda or cuda:<index>")
    if parsed.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise InvalidArgument(
                f"device={device!r}, but torch {torch.__version__} sees no CUDA device here"
            )
        if (parsed.index or 0) >= count:
            raise InvalidArgument(f"device={device!r}, but must be below cuda:{count}: torch sees {count}")
    return str(parsed)


def load_backend(name: str, device: str = "cpu") -> Backend:
    """A backend by its name or ``module:callable``, the current directory importable.

    Returns:
        The backend, ``name`` being what was asked for: failures and replay lines repeat it.

    Raises:
        BackendUnavailable: unknown, not importable, failing while imported, or not for this device.
    """
    if ":" in name and "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        backend = get_backend(name)
    except Exception as error:  # a stranger's module or constructor may raise anything
        cause = error.__cause__ if isinstance(error, BackendUnavailable) else error
        if cause is None or isinstance(cause, ImportError):
            raise
        at = traceback.extract_tb(cause.__traceback__)[-1]
        raise BackendUnavailable(
            f"backend={name!r} failed while it was loaded: {type(cause).__name__}: {cause}"
            f" ({at.filename}:{at.lineno})"
        ) from error
    if backend.name != name:  # a subclass of ours, say, that kept its parent's name
        backend = copy.copy(backend)
        with contextlib.suppress(AttributeError):
            backend.name = name
    kind = device.partition(":")[0]
    if kind not in backend.traits.devices:
        raise BackendUnavailable(
            f"backend={name!r} runs on {' and '.join(backend.traits.devices)}, not on {kind}"
        )
    return backend


def select_backends(names: Sequence[str], device: str) -> tuple[list[Backend], dict[str, str]]:
    """The backends to judge on a device, and why each registered one besides is not among them.

    Args:
        names: what was asked for; empty for every registered backend that can run there.

        device: as :func:`check_device` returns it.

    Raises:
        BackendUnavailable: one that was asked for cannot run; or none can.
    """
    if names:
        return [load_backend(name, device) for name in dict.fromkeys(names)], {}
    backends, reasons = [], {}
    for name in BACKENDS:
        if name in BY_NAME_ONLY:
            reasons[name] = "judged only where it is asked for by name: its faults are known"
            continue
        try:
            backend = load_backend(name, device)
        except BackendUnavailable as error:
            reasons[name] = str(error).removeprefix(f"backend={name!r} ")
            continue
        if backend.traits.is_interpreted:
            reasons[name] = "judged only where it is asked for by name: it runs in an interpreter here"
        else:
            backends.append(backend)
    if not backends:
        raise BackendUnavailable(f"no backend can run on {device}: {reasons}")
    return backends, reasons


def laws_named(names: Sequence[str]) -> list[Law | TreeLaw]:
    """The laws of those names, in the suite's order; all where there are none.

    Raises:
        InvalidArgument: an unknown name; the message lists the known ones.
    """
    laws: list[Law | TreeLaw] = [*TREE_LAWS, *BACKEND_LAWS]
    unknown = set(names) - {law.name for law in laws}
    if unknown:
        raise InvalidArgument(
            f"law={min(unknown)!r}, but must be one of {', '.join(law.name for law in laws)}"
        )
    return [law for law in laws if not names or law.name in names]


def suite_settings(max_examples: int = DEFAULT_MAX_EXAMPLES, *, shrink: bool = True) -> hypothesis.settings:
    """Hypothesis's settings for a law: nothing remembered between runs, no clock, one failure a law.

    The database is off because it would make a run depend on earlier ones; what broke is saved as a file.
    """
    if max_examples < 1:
        raise InvalidArgument(f"max_examples={max_examples!r}, but must be >= 1")
    return hypothesis.settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        print_blob=False,
        report_multiple_bugs=False,
        # Not `explain`: it would run a broken law some hundred times more to comment on its arguments.
        phases=[Phase.explicit, Phase.generate, Phase.target, *([Phase.shrink] if shrink else [])],
        suppress_health_check=[
            HealthCheck.too_slow,
            HealthCheck.data_too_large,
            HealthCheck.large_base_example,
        ],
    )


def with_settings(
    test: Callable[..., Any], law: str, max_examples: int, seed: int | str, *, shrink: bool = True
) -> Callable[..., Any]:
    """A ``@given`` test fixed by the seed and the law: the same cases in pytest and on the command line."""
    seeded = hypothesis.seed(f"{seed}/{law}")(test)
    settled: Callable[..., Any] = suite_settings(max_examples, shrink=shrink)(seeded)
    return settled


def broken_law(error: BaseException, run: Callable[[VerifyCase], object] | None = None) -> LawBroken | None:
    """The broken law inside an exception that left a ``@given`` test, or None.

    Args:
        error: what was raised.

        run: judges a case by the same law; then nodes and requests that do not matter are left out of the
            failure. (Hypothesis deletes what was drawn in one piece; a node is a token, a row and a coin.)

    Hypothesis wraps it where the shrunk case did not break again (Flaky): a verifier that depends on
    something besides its inputs. That is then said in the message.
    """
    if isinstance(error, LawBroken):
        return error if run is None or error.path else shrink(error, run)
    for inner in getattr(error, "exceptions", ()):
        found = broken_law(inner)
        if found is not None:
            text = f"{found}\n  flaky:    the same case was decided rightly when asked again"
            return LawBroken(
                text, law=found.law, backend=found.backend, case=found.case, parameters=found.parameters
            )
    return None


def save_failure(error: LawBroken, directory: Path = FAILURES) -> Path | None:
    """Store the shrunk case of a broken law for ``treeconv replay``; None where nothing can be stored.

    Raises:
        OSError: the disk refuses.
    """
    if error.path is not None:  # it came from a file
        return Path(error.path)
    if error.case is None:
        return None
    entry = CorpusEntry(
        law=error.law,
        case=error.case,
        note="shrunk by Hypothesis",
        backend=error.backend or "",
        parameters=error.parameters,
    )
    return save_entry(directory, entry)


def failure_text(error: LawBroken, directory: Path = FAILURES) -> str:
    """What a person reads: the failure, and the command that judges its case, saved here, again."""
    try:
        path = save_failure(error, directory)
    except OSError as refused:
        return f"{error}\n  replay:   the case could not be saved: {refused}"
    if path is None:
        return str(error)
    backend = f" --backend {error.backend}" if error.backend else ""
    return f"{error}\n  replay:   treeconv replay {path}{backend}"


@dataclass(frozen=True)
class Outcome:
    """What became of one law on one backend.

    Args:
        law: its name.

        backend: the backend's name; None for laws about trees alone.

        cases: generated cases judged; up to the first that broke the law.

        decisions: decisions judged in them.

        seconds: how long it took, shrinking included.

        skipped: why the law does not apply, or None.

        broken: the failure with its shrunk case, or None.
    """

    law: str
    backend: str | None
    cases: int = 0
    decisions: int = 0
    seconds: float = 0.0
    skipped: str | None = None
    broken: LawBroken | None = None


def check_law(
    law: Law | TreeLaw,
    backend: Backend | None,
    device: str = "cpu",
    *,
    max_examples: int = DEFAULT_MAX_EXAMPLES,
    seed: int | str = 0,
    shrink: bool = True,
    on_case: Callable[[], None] | None = None,
) -> Outcome:
    """Generate cases and judge them until one breaks the law; that one is shrunk.

    Args:
        law: what to hold the backend to.

        backend: the verifier; None for a law about trees alone.

        device: where its tensors live.

        max_examples: cases, >= 1.

        seed: fixes the cases, together with the law's name.

        shrink: make the failing case small; False is faster, where only the verdict matters.

        on_case: called after each case that was judged (not while shrinking).

    Raises:
        InvalidArgument: ``max_examples`` below 1.
    """
    name = None if backend is None else backend.name
    if isinstance(law, Law):
        assert backend is not None
        reason = why_not(law, backend)
        if reason:
            return Outcome(law.name, name, skipped=reason)
    cases = decisions = 0
    shrinking = False

    def judge(case: Any) -> None:
        nonlocal cases, decisions, shrinking
        if not shrinking:
            cases += 1
        try:
            judged = law.run(*case) if isinstance(law, TreeLaw) else law.run(case, backend, device)  # type: ignore[arg-type]
        except LawBroken:
            shrinking = True
            raise
        if not shrinking:
            decisions += judged
            if on_case:
                on_case()

    strategy = tree_batches() if isinstance(law, TreeLaw) else cases_for(law.cases)
    test = with_settings(hypothesis.given(case=strategy)(judge), law.name, max_examples, seed, shrink=shrink)
    started = time.perf_counter()
    broken = None
    try:
        test()
    except Exception as error:
        again = (lambda case: law.run(case, backend, device)) if shrink and isinstance(law, Law) else None  # type: ignore[arg-type]
        broken = broken_law(error, again)
        if broken is None:
            raise
    return Outcome(law.name, name, cases, decisions, time.perf_counter() - started, broken=broken)
