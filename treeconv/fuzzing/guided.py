"""Parsers under coverage: atheris feeds bytes to Hypothesis, which makes inputs of them.

    python -m treeconv.fuzzing.guided PARSER SEED RUNS SECONDS CORPUS

is the process that atheris (libFuzzer) takes over: treeconv's modules are instrumented while they are
imported, and the bytes that reached new code are kept in CORPUS/.fuzz/parsers/PARSER/, for later rounds and
campaigns.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeconv.fuzzing.lifeline import die_with

if TYPE_CHECKING:
    from treeconv.fuzzing.session import Session

__all__ = ["has_atheris", "search_parser"]

_STATUS = re.compile(r"^#(\d+)\t.*cov: (\d+) ft: (\d+)", re.MULTILINE)
_RUNS = 2000  # inputs of a parser a round
_SECONDS = 20  # a round takes at most
_INSTRUMENTED = (
    "treeconv.convert",
    "treeconv.corpus",
    "treeconv.traces",
    "treeconv.tree",
    "treeconv.tree_documents",
    "treeconv._corpus_cases",
    "treeconv._corpus_codec",
    "treeconv._validate",
)


def has_atheris() -> bool:
    """Whether coverage can guide."""
    return importlib.util.find_spec("atheris") is not None


def search_parser(name: str, session: Session, round_number: int) -> str | None:
    """One parser for one round.

    Returns:
        None; something to do there always is.
    """
    if has_atheris():
        _search_guided(name, session, round_number)
        return None
    from treeconv.fuzzing.parsers import parser_named  # noqa: PLC0415
    from treeconv.fuzzing.search import examples_in, explore  # noqa: PLC0415

    parser = parser_named(name)
    explore(
        parser.run,
        parser.inputs(),
        campaign="parsers",
        subject=name,
        meaning=parser.meaning,
        backend=None,
        session=session,
        round_number=round_number,
        examples=4 * examples_in(round_number),
        working_set=session.store.work / "examples" / f"parser-{name}",
    )
    return None


def _search_guided(name: str, session: Session, round_number: int) -> None:
    """Let atheris have a process of its own, and watch it."""
    seed = session.number(f"{name}/{round_number}")
    kept = session.store.work / "parsers" / name
    kept.mkdir(parents=True, exist_ok=True)
    before = {name: session.recorder.counters[name] for name in ("cases", "entries")}
    entries = len(os.listdir(kept))  # noqa: PTH208
    left = max(1, min(_SECONDS, int(session.deadline - time.monotonic())))
    with tempfile.TemporaryFile("w+b") as output:
        command = [sys.executable, "-m", "treeconv.fuzzing.guided", name, str(seed % 2**31), str(_RUNS)]
        process = subprocess.Popen(  # noqa: S603
            [*command, str(left), str(session.store.corpus), session.config.seed],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
        try:
            while process.poll() is None:
                session.recorder.under_way(("parsers", name, None, None))
                time.sleep(0.2)
                text = os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")
                _count(text, session, before, len(os.listdir(kept)) - entries)  # noqa: PTH208
                if time.monotonic() > session.deadline + 10:
                    break
        finally:
            process.kill()
            process.wait()
            session.recorder.idle()
        output.seek(0)
        text = output.read().decode(errors="replace")
    if process.returncode not in (0, -9):
        raise RuntimeError(f"atheris ended with code {process.returncode}: {text[-1500:]}")
    _count(text, session, before, len(os.listdir(kept)) - entries)  # noqa: PTH208
    for line in re.findall(r"^found ([0-9a-f]{12})$", text, re.MULTILINE):
        if line not in session.found:
            session.found.append(line)


def _count(text: str, session: Session, before: dict[str, int], entries: int) -> None:
    """What libFuzzer's own lines say, so far."""
    recorder = session.recorder
    for line in reversed(_STATUS.findall(text)):
        recorder.set("cases", before["cases"] + int(line[0]))
        recorder.set("features", max(recorder.counters["features"], int(line[2])))
        recorder.set("entries", before["entries"] + max(0, entries))
        break


def _run_atheris(name: str, seed: int, runs: int, seconds: int, corpus: Path, campaign_seed: str) -> None:
    """In the process of its own; never returns."""
    die_with(os.getppid())
    import atheris  # noqa: PLC0415

    with atheris.instrument_imports(include=list(_INSTRUMENTED), enable_loader_override=False):
        from treeconv.fuzzing import parsers  # noqa: PLC0415
    import hypothesis  # noqa: PLC0415
    from hypothesis import HealthCheck  # noqa: PLC0415

    from treeconv.errors import LawBroken  # noqa: PLC0415
    from treeconv.fuzzing.flight import FlightRecorder  # noqa: PLC0415
    from treeconv.fuzzing.session import Config, Session  # noqa: PLC0415
    from treeconv.fuzzing.signature import signature_of  # noqa: PLC0415
    from treeconv.fuzzing.store import Store  # noqa: PLC0415

    parser = parsers.parser_named(name)
    store = Store(corpus)
    folder = tempfile.TemporaryDirectory(prefix="treeconv-guided-")
    config = Config(str(corpus), (), ("parsers",), seed=campaign_seed)
    session = Session(
        config, store, FlightRecorder(Path(folder.name) / "flight"), time.monotonic() + seconds + 5
    )
    reported: set[str] = set()

    def judged(value: Any) -> None:
        try:
            parser.run(value)
        except LawBroken as broken:
            signature = signature_of(broken)
            if signature.digest not in reported:
                reported.add(signature.digest)
                print(f"found {signature.digest}", flush=True)  # noqa: T201
            claimed = session.claim("parsers", broken)
            if claimed is not None:
                smaller = parsers.shrink_input(parser, broken, claimed, lambda: session.is_over)
                session.settle("parsers", claimed, smaller)

    settings = hypothesis.settings(
        database=None, deadline=None, suppress_health_check=list(HealthCheck), max_examples=1
    )
    test = settings(hypothesis.given(value=parser.inputs())(judged))
    kept = corpus / ".fuzz" / "parsers" / name
    atheris.Setup(
        [
            sys.argv[0],
            str(kept),
            f"-seed={seed or 1}",
            f"-runs={runs}",
            f"-max_total_time={seconds}",
            "-print_final_stats=1",
            "-max_len=2048",
        ],
        test.hypothesis.fuzz_one_input,  # type: ignore[attr-defined]
    )
    atheris.Fuzz()


if __name__ == "__main__":
    _run_atheris(
        sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]), sys.argv[6]
    )
