"""The command line: ``treeconv verify | replay | fuzz | corpus | convert | bench | doctor``.

Exit codes: 0 all well, 1 a law is broken, 2 the question could not be answered (bad input, a backend that
is not there), 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeconv import __version__
from treeconv.convert import to_verify_input, tree_mask
from treeconv.errors import InvalidArgument, LawBroken, TreeconvError
from treeconv.fuzzing.command import add_commands
from treeconv.tree import TreeMaskMode
from treeconv.tree_documents import parse_trees

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from treeconv.backends.base import Backend
    from treeconv.suite import Outcome
    from treeconv.tree import DraftTree, VerifyInput

__all__ = ["main"]

_LAYOUT = ("candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "positions")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="treeconv",
        description="Checks that tree speculative sampling is lossless at every temperature.",
    )
    parser.add_argument("--version", action="version", version=f"treeconv {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
        # The help line is the first sentence, the command's own help all of it.
        sub = commands.add_parser(name, help=text.partition(".")[0].lower(), description=text)
        sub.set_defaults(run=run)
        return sub

    verify = command(
        "verify",
        _verify,
        "Judge verifiers by every law. Cases are generated, and one that breaks a law is shrunk, printed and"
        " saved for `treeconv replay`. Exit code 1 if any law is broken; the last line is the result.",
    )
    _add_backend(verify, "default: every backend that can run on the device")
    verify.add_argument(
        "--law", action="append", default=[], metavar="NAME", help="only this law (repeatable)"
    )
    verify.add_argument(
        "--max-examples", type=int, default=200, metavar="N", help="cases per law and backend (default: 200)"
    )
    verify.add_argument(
        "--seed",
        metavar="SEED",
        help="fixes the cases, as pytest's --hypothesis-seed does (default: the date in UTC, so that a day's"
        " runs agree and every day explores)",
    )
    replay = command(
        "replay",
        _replay,
        "Judge a saved case again. Prints the failure, or `kept`. Exit code 1 if its law is broken.",
    )
    replay.add_argument(
        "file", type=Path, help="a .json case, .trace or .input, as found in corpus/ and .treeconv/"
    )
    _add_backend(replay, "default: the one it was found on, else every one that can run")
    convert = command(
        "convert",
        _convert,
        "Convert draft trees to the first-child / next-sibling layout. Also draws each tree and its mask.",
    )
    convert.add_argument(
        "file",
        help='JSON: {"parents": [-1, 0, 0], "token_ids": [9, 5, 7]}, a list of those, or {"trees": [...]};'
        ' "prefix_lens" and "num_draft_tokens" may stand beside. - reads standard input',
    )
    convert.add_argument("--json", action="store_true", help="print the layout as JSON")
    bench = command(
        "bench",
        _bench,
        "Time the deployed path, eager and triton side by side. CUDA graph replays on a CUDA device, beside"
        " the bytes that the visited rows hold at the copy rate measured in the same run.",
    )
    for name, of_what in (
        ("vocab", "vocabulary sizes"),
        ("nodes", "nodes per tree"),
        ("batch", "requests per call"),
    ):
        bench.add_argument(f"--{name}", type=int, nargs="+", metavar="N", help=of_what)
    bench.add_argument("--temperature", type=float, nargs="+", metavar="T", help="temperatures")
    bench.add_argument(
        "--path",
        nargs="+",
        default=["deployed", "eager", "triton"],
        metavar="PATH",
        help="what to time (default: deployed eager triton)",
    )
    bench.add_argument("--seconds", type=float, default=240, help="begin no shape after this long")
    bench.add_argument("--json", type=Path, metavar="FILE", help="write every figure there")
    bench.add_argument("--plot", type=Path, metavar="FILE", help="draw them there (PNG; needs matplotlib)")
    add_commands(command, _add_backend)
    command("doctor", _doctor, "Show versions, devices and backends. Says why a backend cannot be used here.")
    return parser


def _add_backend(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--backend",
        action="append",
        default=[],
        metavar="NAME|module:callable",
        help=f"verifier to judge (repeatable); your own is importable from the current directory ({default})",
    )
    parser.add_argument(
        "--device", default="cpu", metavar="cpu|cuda[:n]", help="where it runs (default: cpu)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        arguments: as on the command line; default ``sys.argv``.

    Returns:
        The exit code, see the module.
    """
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except TreeconvError as error:
        print(f"treeconv: error: {error}", file=sys.stderr)  # noqa: T201
        return 2
    except KeyboardInterrupt:
        print("treeconv: interrupted", file=sys.stderr)  # noqa: T201
        return 130
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _say(text: str = "") -> None:
    print(text)  # noqa: T201


# --- verify -------------------------------------------------------------------------------------------


def _verify(options: argparse.Namespace) -> int:
    from treeconv import suite  # noqa: PLC0415
    from treeconv.laws import Law  # noqa: PLC0415

    warnings.simplefilter("ignore")  # the verdict is the output; a stranger's deprecations are not
    device = suite.check_device(options.device)
    backends, unused = suite.select_backends(options.backend, device)
    laws = suite.laws_named(options.law)
    suite.suite_settings(options.max_examples)
    seed = suite.seed_of_the_day() if options.seed is None else options.seed
    _say(f"treeconv {__version__}: {options.max_examples} cases per law on {device}, --seed {seed}")
    _say(f"backends: {', '.join(backend.name for backend in backends)}")
    for name, reason in unused.items():
        _say(f"not {name}: {reason}")
    jobs: list[tuple[Any, Backend | None]] = [
        (law, backend) for law in laws for backend in (backends if isinstance(law, Law) else [None])
    ]
    outcomes = _judge(jobs, device, options.max_examples, seed)
    _print_table(outcomes, [backend.name for backend in backends])
    for outcome in outcomes:
        if outcome.broken:
            _say(suite.failure_text(outcome.broken))
            _say()
    broken = sum(outcome.broken is not None for outcome in outcomes)
    cases = sum(outcome.cases for outcome in outcomes)
    if not cases:
        raise InvalidArgument("no law applies to these backends, so nothing was judged")
    verdict = "FAIL" if broken else "PASS"
    judged = {outcome.law for outcome in outcomes if not outcome.skipped}
    if len(judged) < len(laws):
        _say(f"{len(laws) - len(judged)} laws skipped")
    _say(f"{verdict} {len(judged)} laws, {len(backends)} backends, {cases} cases, {broken} broken")
    return 1 if broken else 0


def _judge(
    jobs: Sequence[tuple[Any, Backend | None]], device: str, max_examples: int, seed: int | str
) -> list[Outcome]:
    from rich.console import Console  # noqa: PLC0415
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn  # noqa: PLC0415

    from treeconv.suite import check_law  # noqa: PLC0415

    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes = []
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=max_examples * len(jobs))
        for done, (law, backend) in enumerate(jobs, start=1):
            progress.update(task, description=f"{law.name} {backend.name if backend else ''}")
            outcomes.append(
                check_law(
                    law,
                    backend,
                    device,
                    max_examples=max_examples,
                    seed=seed,
                    on_case=lambda: progress.advance(task),
                )
            )
            progress.update(task, completed=max_examples * done)  # skipped, broken or exhausted early
            if not console.is_terminal:  # a log wants to see that something happens
                said = f"{law.name} {backend.name if backend else ''}".rstrip()
                cell = re.sub(r"\[.*?\]", "", _cell(outcomes[-1]))
                print(f"{done}/{len(jobs)} {said}: {cell}", file=sys.stderr, flush=True)  # noqa: T201
    return outcomes


def _print_table(outcomes: Sequence[Outcome], backends: Sequence[str]) -> None:
    from rich.console import Console  # noqa: PLC0415
    from rich.table import Table  # noqa: PLC0415

    trees = any(outcome.backend is None for outcome in outcomes)
    judged = [name for name in backends if any(outcome.backend == name for outcome in outcomes)]
    table = Table(box=None, pad_edge=False)
    table.add_column("law")
    columns = [*([None] if trees else []), *judged]
    for column in columns:
        table.add_column("trees" if column is None else column)
    cells = {(outcome.law, outcome.backend): _cell(outcome) for outcome in outcomes}
    for law in dict.fromkeys(outcome.law for outcome in outcomes):
        table.add_row(law, *(cells.get((law, column), "") for column in columns))
    console = Console()
    if not console.is_terminal:  # a log has no width to fit into
        console = Console(width=26 + 30 * len(columns))
    console.print(table)
    for reason in dict.fromkeys((o.backend, o.skipped) for o in outcomes if o.skipped):
        _say(f"skipped on {reason[0]}: {reason[1]}")
    _say()


def _cell(outcome: Outcome) -> str:
    if outcome.skipped:
        return "skipped"
    word = "[bold red]BROKEN[/]" if outcome.broken else "[green]kept[/]"
    return f"{word} {outcome.cases:>5} cases {outcome.seconds:>5.1f} s"


# --- replay -------------------------------------------------------------------------------------------


def _replay(options: argparse.Namespace) -> int:
    from treeconv import suite  # noqa: PLC0415
    from treeconv.corpus import load_entry, load_trace  # noqa: PLC0415
    from treeconv.replay import law_of, replay_entry, replay_trace, why_not_judged  # noqa: PLC0415
    from treeconv.tree_laws import TreeLaw  # noqa: PLC0415

    if options.file.suffix == ".input":
        return _replay_input(options.file)
    warnings.simplefilter("ignore")
    device = suite.check_device(options.device)
    found_on: list[str] = []
    entry = trace = None
    backends: Sequence[Backend | None]
    if options.file.suffix == ".trace":
        trace = load_trace(options.file)
        what = f"trace {trace.name}"
    else:
        entry = load_entry(options.file)
        what = law_of(entry).name
        found_on = [entry.backend] if entry.backend else []
    if entry and isinstance(law_of(entry), TreeLaw):
        backends = [None]
    else:
        backends = suite.select_backends(options.backend or found_on, device)[0]
    judged = broken = 0
    for backend in backends:
        on = f" on {backend.name}" if backend else ""
        try:
            if entry:
                reason = why_not_judged(entry, backend)
                if reason:
                    _say(f"not judged: {what}{on}: {reason}")
                    continue
                decisions = replay_entry(entry, backend, device)
            else:
                assert trace is not None
                assert backend is not None
                decisions = sum(
                    replay_trace(trace, temperature, backend, device) for temperature in trace.temperatures
                )
        except LawBroken as error:
            error.path = options.file
            _say(suite.failure_text(error))
            broken += 1
        else:
            _say(f"kept: {what}{on}, {decisions} decisions")
        judged += 1
    if not judged:
        raise InvalidArgument(f"{options.file}: nothing was judged")
    return 1 if broken else 0


def _replay_input(path: Path) -> int:
    from treeconv.fuzzing.parsers import load_input  # noqa: PLC0415

    parser, value = load_input(path)
    try:
        parser.run(value)
    except LawBroken as error:
        _say(f"{error}\n  replay:   treeconv replay {path}")
        return 1
    _say(f"kept: {parser.name}")
    return 0


# --- convert ------------------------------------------------------------------------------------------


def _convert(options: argparse.Namespace) -> int:
    trees, prefix_lens, num_draft_tokens = _read_trees(options.file)
    batch = to_verify_input(trees, num_draft_tokens, prefix_lens)
    mask = tree_mask(batch, TreeMaskMode.QLEN_ONLY)
    if options.json:
        layout = {name: getattr(batch, name).tolist() for name in (*_LAYOUT, "prefix_lens")}
        layout["tree_mask"] = mask.int().tolist()
        _say(json.dumps(layout))
        return 0
    for request, tree in enumerate(trees):
        _say(
            f"request {request}: {len(tree)} nodes, depth {tree.depth},"
            f" prefix {int(batch.prefix_lens[request])}"
        )
        _say(tree.draw())
        _say()
        _print_layout(batch, request, mask[request].tolist())
    return 0


def _print_layout(batch: VerifyInput, request: int, mask: list[list[bool]]) -> None:
    """One line per slot: its layout, and which slots it sees."""
    titles = ("slot", "token", "index", "next_token", "next_sibling", "position")
    _say("  ".join(titles) + "  sees slots (besides the prefix)")
    columns = [getattr(batch, name)[request].tolist() for name in _LAYOUT]
    for slot, values in enumerate(zip(*columns, strict=True)):
        numbers = "  ".join(
            f"{value:>{len(title)}}" for title, value in zip(titles, (slot, *values), strict=True)
        )
        _say(f"{numbers}  {''.join('#' if seen else '.' for seen in mask[slot])}")
    _say()


def _read_trees(name: str) -> tuple[list[DraftTree], list[int] | None, int | None]:
    """Trees, prefix lengths and slots from a file or from standard input."""
    where = "standard input" if name == "-" else name
    try:
        raw = sys.stdin.read() if name == "-" else Path(name).read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{where}: cannot be read: {error.strerror or error}") from None
    return parse_trees(raw, where)


# --- doctor -------------------------------------------------------------------------------------------


def _doctor(options: argparse.Namespace) -> int:
    import platform  # noqa: PLC0415
    from importlib import metadata  # noqa: PLC0415

    from treeconv.backends.registry import available_backends, get_backend  # noqa: PLC0415

    del options
    _say(f"treeconv      {__version__}  ({Path(__file__).parent})")
    _say(f"python        {platform.python_version()} on {platform.platform()}, {os.cpu_count()} CPUs")
    for package in (
        "torch",
        "numpy",
        "hypothesis",
        "pytest",
        "pytest-xdist",
        "triton",
        "sgl-kernel",
        "sglang-kernel",
    ):
        try:
            found = metadata.version(package)
        except metadata.PackageNotFoundError:
            found = "not installed"
        _say(f"{package:<13} {found}")
    has_torch, has_cuda = _say_devices()
    for name, reason in available_backends().items():
        if reason is None:
            kinds = get_backend(name).traits.devices
            here = "available" if has_torch and ("cpu" in kinds or has_cuda) else "not usable here"
            _say(f"backend       {name}: {here}, runs on {' and '.join(kinds)}")
        else:
            _say(f"backend       {name}: not available: {reason.removeprefix(f'backend={name!r} ')}")
    return 0 if has_torch else 2


def _say_devices() -> tuple[bool, bool]:
    """Print what torch sees, or that there is none; whether there is torch, and a CUDA device."""
    try:
        import torch  # noqa: PLC0415
    except (ImportError, OSError) as error:  # not installed, or one of its libraries is missing
        _say(f"device        none: torch cannot be imported here ({error})")
        _say("              treeconv cannot verify anything without it. In a clone: make setup, then")
        _say(f"              .venv/bin/treeconv. Elsewhere: {sys.executable} -m pip install torch")
        return False, False
    _say(f"device        cpu, {torch.get_num_threads()} threads")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(index)
            memory = f"{about.total_memory / 2**30:.0f} GiB"
            _say(f"device        cuda:{index}, {about.name}, {memory}, sm_{about.major}{about.minor}")
    else:
        built = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built without CUDA"
        _say(f"device        no CUDA device: torch is {built}")
    return True, torch.cuda.is_available()


# --- bench --------------------------------------------------------------------------------------------


def _bench(options: argparse.Namespace) -> int:
    from treeconv import bench  # noqa: PLC0415  # imports torch

    asked = {
        "vocab_sizes": options.vocab,
        "num_draft_tokens": options.nodes,
        "batch_sizes": options.batch,
        "temperatures": options.temperature,
        "budget_s": options.seconds,
    }
    grid = bench.BenchGrid(**{name: _tuple(value) for name, value in asked.items() if value is not None})
    report = bench.run_bench(grid, options.path)
    if options.json:
        options.json.write_text(json.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    if options.plot:
        bench.save_plot(report, options.plot)
    _say(bench.format_table(report))
    return 0


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
