"""``treeconv fuzz`` and ``treeconv corpus``: options and what is printed; light until one of them runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from treeconv.errors import InvalidArgument

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    Run = Callable[[argparse.Namespace], int]
    AddCommand = Callable[[str, Run, str], argparse.ArgumentParser]
    AddBackend = Callable[[argparse.ArgumentParser, str], None]

__all__ = ["add_commands"]


def add_commands(command: AddCommand, add_backend: AddBackend) -> None:
    """Add both commands to the command line."""
    fuzz = command(
        "fuzz",
        _fuzz,
        "Search for faults for as long as you like. Replays the corpus, then searches; what is found is saved"
        " at once, shrunk into CORPUS/regressions/ and printed with a replay line. Ctrl-C and kill lose"
        " nothing; several may run on one corpus. Exit code 1 if anything was found that no ledger explains,"
        " 2 if something could not be judged; the last line is the verdict: PASS, FAIL or INCOMPLETE.",
    )
    add_backend(fuzz, "default: every backend that can run on the device")
    fuzz.add_argument("--seconds", type=float, default=60.0, metavar="N", help="how long (default: 60)")
    fuzz.add_argument(
        "--campaign",
        action="append",
        default=[],
        metavar="NAME",
        help="laws, parsers, bulk, device (repeatable), or all (default; device only on cuda)",
    )
    fuzz.add_argument("--corpus", type=Path, default=Path("corpus"), metavar="DIR", help="default: corpus")
    fuzz.add_argument("--workers", type=int, metavar="N", help="processes (default: CPUs; 1 on cuda)")
    fuzz.add_argument("--seed", metavar="SEED", help="fixes the search (default: the date in UTC)")
    fuzz.add_argument(
        "--rounds",
        type=int,
        metavar="N",
        help="end after so many rounds, if that comes before the time is up",
    )
    fuzz.add_argument(
        "--timeout", type=float, default=120.0, metavar="N", help="seconds until a case hangs (default: 120)"
    )
    fuzz.add_argument(
        "--ledger",
        default="fuzz.findings:LEDGER",
        metavar="module:attribute",
        help="known findings: reported as such, and no failure (default: this project's, in its checkout)",
    )
    fuzz.add_argument("--junit", type=Path, metavar="FILE", help="write JUnit XML there")
    fuzz.add_argument("--summary", type=Path, metavar="FILE", help="write a Markdown summary there")

    corpus = command(
        "corpus",
        _corpus,
        "Keep a corpus small. `minimise` makes each case that a campaign found smaller, where its backend"
        " still breaks on it, and keeps the smallest of those that break alike. Published cases stay, and"
        " so does crashes/: backends run in this process, and those cases would end it.",
    )
    corpus.add_argument("action", choices=["minimise"])
    corpus.add_argument("--corpus", type=Path, default=Path("corpus"), metavar="DIR", help="default: corpus")
    corpus.add_argument("--device", default="cpu", metavar="cpu|cuda[:n]", help="where backends run")
    corpus.add_argument("--seconds", type=float, default=300.0, metavar="N", help="at most so long")
    corpus.add_argument("--dry-run", action="store_true", help="say what would be done")


def _fuzz(options: argparse.Namespace) -> int:
    from treeconv import __version__, suite  # noqa: PLC0415
    from treeconv.fuzzing import guided, plan, report  # noqa: PLC0415
    from treeconv.fuzzing.session import Config, load_ledger  # noqa: PLC0415
    from treeconv.fuzzing.supervise import run_campaign  # noqa: PLC0415

    device = suite.check_device(options.device)
    _check_positive(options, "seconds", "timeout")
    for name in ("workers", "rounds"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InvalidArgument(f"{name}={value!r}, but must be >= 1")
    campaigns = plan.check_campaigns(options.campaign, device)
    load_ledger(options.ledger)
    _check_corpus(options.corpus)
    for name in ("junit", "summary"):
        _check_report(name, getattr(options, name))
    needs_backend = set(campaigns) != {"parsers"}
    backends = _backend_names(options.backend, device) if needs_backend else ()
    workers = options.workers or (1 if device.startswith("cuda") else os.cpu_count() or 1)
    seed = str(suite.seed_of_the_day() if options.seed is None else options.seed)
    config = Config(
        corpus=str(options.corpus),
        backends=backends,
        campaigns=campaigns,
        device=device,
        seed=seed,
        seconds=options.seconds,
        rounds=options.rounds,
        workers=workers,
        timeout=options.timeout,
        ledger=options.ledger,
    )
    print(f"treeconv {__version__}: {', '.join(campaigns)} on {device}, --seed {seed}, {workers} workers")  # noqa: T201
    print(f"backends: {', '.join(backends) or 'none needed'}; corpus: {options.corpus}")  # noqa: T201
    if "parsers" in campaigns and not guided.has_atheris():
        print("parsers: plain Hypothesis, not guided by coverage: pip install 'treeconv[fuzz]'")  # noqa: T201
    display = report.Display(str(options.corpus))
    result = run_campaign(config, display.progress, display.finding)
    display.clear()
    for line in report.lines_about_before(result):
        print(line)  # noqa: T201
    for job, error in result.errors:
        print(f"could not be done: {job}: {error}")  # noqa: T201
    try:
        report.write_reports(result, options.junit, options.summary)
    except OSError as error:  # the directory was there when we began
        print(f"could not be written: {error}")  # noqa: T201
        code = 2
    else:
        code = 2 if result.is_incomplete else 0
    print(report.verdict_line(result))  # noqa: T201
    return 130 if result.interrupted else 1 if result.unknown else code


def _check_positive(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        if not getattr(options, name) > 0:
            raise InvalidArgument(f"{name}={getattr(options, name)!r}, but must be > 0")


def _check_corpus(path: Path) -> None:
    """Whether the corpus is a directory that can be written to, or can become one."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise InvalidArgument(
            f"corpus={str(path)!r}, but must be a directory, or a name where one can be made"
        )


def _check_report(name: str, path: Path | None) -> None:
    """Whether a report can be written: said before the campaign, not after it."""
    if path is None:
        return
    can = os.access(path, os.W_OK) if path.exists() else os.access(path.absolute().parent, os.W_OK)
    if path.is_dir() or not path.absolute().parent.is_dir() or not can:
        raise InvalidArgument(
            f"{name}={str(path)!r}, but must be a file in a directory that exists and may be written to"
        )


def _backend_names(names: list[str], device: str) -> tuple[str, ...]:
    """Names to judge. A stranger's backend is not loaded here: it may take the process down."""
    from treeconv import suite  # noqa: PLC0415
    from treeconv.backends.registry import BACKENDS  # noqa: PLC0415
    from treeconv.errors import BackendUnavailable  # noqa: PLC0415

    if not names:
        return tuple(backend.name for backend in suite.select_backends([], device)[0])
    for name in names:
        if name in BACKENDS:  # ours: whether it can run here is said before anything starts
            suite.load_backend(name, device)
        elif ":" not in name:
            raise BackendUnavailable(
                f"backend={name!r}, but must be one of {', '.join(BACKENDS)}, or module:callable for your own"
            )
    return tuple(dict.fromkeys(names))


def _corpus(options: argparse.Namespace) -> int:
    from treeconv import suite  # noqa: PLC0415
    from treeconv.fuzzing.minimise import minimise  # noqa: PLC0415

    device = suite.check_device(options.device)
    _check_positive(options, "seconds")
    for line in minimise(options.corpus, device, options.seconds, dry_run=options.dry_run):
        print(line)  # noqa: T201
    return 0
