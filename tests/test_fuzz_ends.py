"""Contract: a campaign says PASS only where it judged and found nothing; what it cannot do, it says early."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from treeconv.case import Request, VerifyCase
from treeconv.cli import main
from treeconv.corpus import load_entry, save_entry
from treeconv.fuzzing.crash import record_death, shrink_crash
from treeconv.fuzzing.flight import FlightRecorder
from treeconv.fuzzing.parsers import save_input
from treeconv.fuzzing.session import Config, Session
from treeconv.fuzzing.signature import Signature
from treeconv.fuzzing.store import Discovery, Store
from treeconv.fuzzing.supervise import run_campaign
from treeconv.tree import DraftTree

ROOT = Path(__file__).parents[1]
MINE = f"""
import os, subprocess, sys, time
sys.path.append({str(ROOT / "tests" / "quality")!r})
from faults import *
from treeconv.ledger import Finding, Ledger

class Mended(Sampler if os.environ.get("MENDED") else InclusiveTest):
    pass

class GoesElsewhere(InclusiveTest):
    def draw(self, residual, coin):
        os.chdir({{elsewhere!r}})
        return super().draw(residual, coin)

class StartsAnother(Sampler):
    def __init__(self, *more):
        super().__init__(*more)
        other = subprocess.Popen(["sleep", "300"])
        os.makedirs("started", exist_ok=True)
        open("started/" + str(other.pid), "w").close()

class Waits(Sampler):
    def draw(self, residual, coin):
        time.sleep(1000)

LEDGER = Ledger([Finding(id="known-one", law="oracle-agreement", backend="mine:GoesElsewhere", versions=("",),
                         summary="inclusive", source="here")])
"""
WORDS = ["fuzz", "--workers", "1", "--rounds", "1", "--seed", "5"]
FILES = ["--junit", "junit.xml", "--summary", "summary.md"]


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    (here / "mine.py").write_text(MINE.format(elsewhere=str(elsewhere)))
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return elsewhere


def config(backend, **more):
    return replace(Config("corpus", (backend,), ("bulk",), seconds=60.0, rounds=1, ledger=""), **more)


def test_a_campaign_that_judged_nothing_is_incomplete(capsys):
    assert main([*WORDS, *FILES, "--campaign", "bulk", "--backend", "nosuch:thing"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("could not be done: bulk logits on nosuch:thing")]
    assert lines[-1].startswith("INCOMPLETE 0 cases in ")
    assert lines[-1].endswith(", 0 findings, 0 known faults, 2 jobs could not be done")
    assert Path("summary.md").read_text().startswith("# treeconv fuzz: INCOMPLETE ")
    assert ET.parse("junit.xml").getroot().find("testsuite").get("errors") == "2"


def test_a_campaign_with_nothing_to_judge_is_incomplete(capsys):
    assert main([*WORDS, *FILES, "--seconds", "0.001", "--campaign", "bulk", "--backend", "eager"]) == 2
    assert capsys.readouterr().out.splitlines()[-1].startswith("INCOMPLETE 0 cases in ")
    suite = ET.parse("junit.xml").getroot().find("testsuite")
    assert suite.get("errors") == "1"
    assert suite.find(".//error").get("message") == "nothing was judged"


def test_a_backend_that_goes_to_another_directory_takes_no_finding_along(mine, capsys):
    words = [*WORDS, *FILES, "--campaign", "bulk", "--backend", "mine:GoesElsewhere"]
    assert main([*words, "--ledger", "mine:LEDGER"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert not [line for line in lines if line.startswith("could not be done")]
    assert "known-one" in Path("summary.md").read_text()
    assert "treeconv replay corpus/regressions/" in Path("summary.md").read_text()
    assert list(Path("corpus/regressions").glob("*.json"))
    assert list(mine.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--junit", "nowhere/x.xml"],
            "junit='nowhere/x.xml', but must be a file in a directory that exists",
        ),
        (["--summary", "."], "summary='.', but must be a file in a directory that exists"),
        (
            ["--corpus", "mine.py"],
            "corpus='mine.py', but must be a directory, or a name where one can be made",
        ),
        (["--corpus", "mine.py/below"], "corpus='mine.py/below', but must be a directory"),
        (["--ledger", ":"], "ledger=':', but must be module:attribute"),
        (["--ledger", "mine:"], "ledger='mine:', but must be module:attribute"),
        (["--ledger", "..x:y"], "ledger='..x:y', but must be module:attribute"),
        (["--ledger", "raises:y"], "ledger='raises:y', but must be module:attribute: ZeroDivisionError"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(words, message, capsys):
    Path("raises.py").write_text("1 / 0\n")
    assert main(["fuzz", "--campaign", "bulk", "--backend", "eager", "--seconds", "1", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert not Path("corpus").exists()


# --- what an earlier campaign left --------------------------------------------------------------------


def left_raw(backend="mine:Mended", kind=None):
    """A finding as a campaign leaves it that is killed before it shrinks."""
    result = run_campaign(config(backend))
    store = Store(Path("corpus"))
    found = next(iter(result.findings.values()))
    signature = Signature(found.law, found.backend, kind or found.kind)
    entry = replace(load_entry(Path("corpus") / found.entry), path=None)
    for path in Path("corpus").rglob("*.json"):
        path.unlink()
    raw = replace(found, kind=signature.kind, state="raw", entry="")
    assert store.claim(signature, raw, lambda directory: save_entry(directory, entry))
    return signature.digest, found


def test_a_finding_that_was_mended_is_closed_and_fails_nothing(monkeypatch, capsys):
    digest, _ = left_raw()
    monkeypatch.setenv("MENDED", "1")
    words = [*WORDS, "--ledger", "", "--campaign", "bulk", "--backend", "mine:Mended"]
    assert main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    (closed,) = [line for line in lines if line.startswith("closed: ")]
    assert "oracle-agreement on mine:Mended" in closed
    assert "its law is kept now" in closed
    assert lines[-1].startswith("PASS ")
    assert digest not in Store(Path("corpus")).load()
    assert not list(Path("corpus/.fuzz/raw").iterdir())
    (guard,) = Path("corpus/regressions").glob("*.json")  # replayed from now on
    assert guard.name in closed
    monkeypatch.delenv("MENDED")  # and should it come back, it is found like any other
    assert run_campaign(config("mine:Mended", rounds=0)).unknown


def test_a_finding_that_breaks_otherwise_now_is_recorded_as_it_breaks():
    stale, found = left_raw(kind="broke in some other way")
    result = run_campaign(config("mine:Mended", rounds=0))
    assert result.errors == []
    assert stale not in Store(Path("corpus")).load()
    assert stale not in result.findings
    assert found.kind in {other.kind for other in result.findings.values()}
    assert {other.state for other in result.findings.values()} == {"done"}
    assert not list(Path("corpus/.fuzz/raw").iterdir())


def test_a_stored_input_of_a_parser_is_taken_up():
    signature = Signature("convert-input", "", "kept by now")
    store = Store(Path("corpus"))
    raw = Discovery.of(signature, "parsers", "law broken: it")
    assert store.claim(signature, raw, lambda directory: save_input(directory, "convert-input", "x"))
    result = run_campaign(config("eager", campaigns=("parsers",), rounds=0))
    assert result.errors == []
    assert store.load() == {}
    assert list(Path("corpus/regressions").glob("*.input"))


def test_a_finding_that_is_met_again_is_told_with_its_replay_line(capsys):
    words = [*WORDS, "--ledger", "", "--campaign", "bulk", "--backend", "mine:Mended"]
    assert main(words) == 1
    replays = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  replay:")]
    assert replays
    assert main(words) == 1
    lines = capsys.readouterr().out.splitlines()
    again = [place for place, line in enumerate(lines) if line.startswith("met again: ")]
    assert {lines[place + 1] for place in again} == set(replays)
    assert "oracle-agreement on mine:Mended: " in lines[again[0]]


# --- nothing survives a campaign ----------------------------------------------------------------------


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.02)


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="needs prctl and /proc")
FORKS = """
import sys, time
from treeconv.fuzzing.crash import _in_a_fork

def hang():
    with open(sys.argv[1], "w") as file:
        file.write(str(os.getpid()))
    while True:
        time.sleep(1)

import os
_in_a_fork(hang, 60.0)
"""


@ON_LINUX
def test_a_fork_dies_with_its_parent():
    parent = subprocess.Popen([sys.executable, "-c", FORKS, "pid"])
    wait_until(lambda: Path("pid").exists() and Path("pid").read_text(), 60)
    child = int(Path("pid").read_text())
    try:
        parent.kill()
        parent.wait()
        wait_until(lambda: not is_running(child), 10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


@ON_LINUX
def test_what_a_backend_started_ends_with_its_worker():
    result = run_campaign(config("mine:StartsAnother", seconds=10.0, campaigns=("laws",), rounds=1))
    started = [int(path.name) for path in Path("started").iterdir()]
    assert started
    try:
        wait_until(lambda: not any(map(is_running, started)), 5)
    finally:
        for pid in filter(is_running, started):
            os.kill(pid, signal.SIGKILL)
    assert not result.errors


def test_shrinking_a_crash_ends_at_the_deadline(tmp_path):
    """A smaller case that hangs may not take the timeout of a case, but what is left of the campaign."""
    store = Store(tmp_path / "corpus")
    case = VerifyCase((Request(DraftTree((-1,), (0,)), np.ones((1, 1), np.float32), 1.0, np.zeros(1), 0.5),))
    campaign = Config(str(store.corpus), ("mine:Waits",), ("laws",), timeout=100.0, ledger="")
    how = "ends the process with exit code 3"
    digest = record_death(("laws", "purity", "mine:Waits", case), how, campaign, store).digest
    started = time.monotonic()
    recorder = FlightRecorder(tmp_path / "flight")
    shrink_crash(digest, Session(campaign, store, recorder, time.monotonic() + 2))
    assert time.monotonic() - started < 8


# --- minimise -----------------------------------------------------------------------------------------


def test_minimise_leaves_no_record_of_a_file_that_is_gone(capsys):
    found = next(iter(run_campaign(config("mine:Mended")).findings.values()))
    store, (kept, *others) = Store(Path("corpus")), sorted(Path("corpus/regressions").glob("*.json"))
    for path in others:
        path.unlink()
    entry = load_entry(kept)
    wide = replace(entry.case, requests=entry.case.requests * 2, num_draft_tokens=9)
    larger = save_entry("corpus/regressions", replace(entry, case=wide, path=None))
    for other in store.load().values():
        store.forget(Signature(other.law, other.backend, other.kind))
    signature = Signature(found.law, found.backend, found.kind)
    store.put(signature, replace(found, entry=f"regressions/{larger.name}"))
    crashes = Path("corpus/crashes")
    crashes.mkdir()
    (crashes / "critical-coins-000000000000.json").write_text("{}")
    capsys.readouterr()
    assert main(["corpus", "minimise"]) == 0
    said = capsys.readouterr().out
    assert f"removed:  {larger.name}" in said
    assert "crashes/: 1 cases left as they are: they would end this process" in said
    assert store.get(signature).entry == f"regressions/{kept.name}"


@pytest.mark.parametrize("seconds", ["0", "-1", "nan"])
def test_minimise_needs_time(seconds, capsys):
    assert main(["corpus", "minimise", "--seconds", seconds]) == 2
    assert f"seconds={float(seconds)!r}, but must be > 0" in capsys.readouterr().err
