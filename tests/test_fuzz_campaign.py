"""Contract: a campaign finds what is planted, loses nothing of it, and goes on past crashes and hangs.

Workers are real processes here. Counts of rounds, not seconds, end the reproducible ones.
"""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from treeconv.cli import main
from treeconv.corpus import load_corpus, load_entry, save_entry
from treeconv.errors import LawBroken
from treeconv.fuzzing.report import junit_xml, markdown_summary, verdict_line
from treeconv.fuzzing.session import Config
from treeconv.fuzzing.store import Store
from treeconv.fuzzing.supervise import run_campaign
from treeconv.replay import replay_entry
from treeconv.suite import load_backend

ROOT = Path(__file__).parents[1]
PLANTED = f"""
import ctypes, os, sys, time
sys.path.append({str(ROOT / "tests" / "quality")!r})
import numpy as np
from faults import *
from treeconv.ledger import Finding, Ledger

class ExitsTheProcess(Sampler):
    def draw(self, residual, coin):
        if residual.size > 2 and residual[0] == 0:
            os._exit(3)
        return super().draw(residual, coin)

class Segfaults(Sampler):
    def draw(self, residual, coin):
        if residual.size > 2 and residual[0] == 0:
            ctypes.string_at(0)
        return super().draw(residual, coin)

class Hangs(Sampler):
    def draw(self, residual, coin):
        if residual.size > 2 and residual[0] == 0:
            time.sleep(1000)
        return super().draw(residual, coin)

class SaysASurrogate(Sampler):
    def draw(self, residual, coin):
        raise ValueError("\\ud800 is no character")

class Slow(InclusiveTest):
    def draw(self, residual, coin):
        time.sleep(0.002)
        return super().draw(residual, coin)

class Versioned(InclusiveTest):
    version = "1.0"

def known(law):
    return Ledger([Finding(id="known-one", law=law, backend="planted:Versioned", versions=("1.0",),
                           summary="inclusive", source="here")])

LEDGER = known("critical-coins")
"""


@pytest.fixture(autouse=True)
def planted(tmp_path, monkeypatch):
    (tmp_path / "planted.py").write_text(PLANTED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


def config(*backends, **more):
    named = tuple(f"planted:{name}" if ":" not in name and name[0].isupper() else name for name in backends)
    base = Config("corpus", named, ("bulk",), seconds=120.0, rounds=1, ledger="")
    return replace(base, **more)


def command(*backends, seconds=200, **more):
    words = [sys.executable, "-m", "treeconv", "fuzz", "--corpus", "corpus", "--seconds", str(seconds)]
    words += [word for name in backends for word in ("--backend", f"planted:{name}")]
    return words + [str(word) for name, value in more.items() for word in (f"--{name}", value)]


def broken_again(path):
    entry = load_entry(path)
    with pytest.raises(LawBroken) as caught:
        replay_entry(entry, load_backend(entry.backend))
    return caught.value


def leftovers():
    return [path.name for path in Path("corpus").rglob("*.tmp")]


def test_a_finding_is_shrunk_saved_and_replays():
    seen = []
    result = run_campaign(config("InclusiveTest"), on_finding=lambda *event: seen.append(event))
    assert result.new == set(result.findings) == {digest for digest, _ in seen}
    assert 1 <= len(result.findings) <= 3
    for found in result.findings.values():
        assert (found.law, found.backend) == ("oracle-agreement", "planted:InclusiveTest")
        assert found.kind.endswith("exactly at a boundary")
        assert found.state == "done"
        path = Path("corpus") / found.entry
        (request,) = load_entry(path).case.requests
        assert len(request.tree) <= 3
        assert str(broken_again(path)) == found.text
    assert not list((Path("corpus") / ".fuzz" / "raw").iterdir())
    assert leftovers() == []
    assert not [job for job in result.jobs if job.errors]


def test_the_same_seed_finds_the_same():
    def texts(corpus, seed):
        result = run_campaign(config("RatioTest", corpus=corpus, seed=seed))
        return {digest: found.text for digest, found in result.findings.items()}

    first = texts("one", "7")
    assert first
    assert texts("two", "7") == first
    assert texts("three", "8") != first


def test_a_second_campaign_finds_nothing_new():
    first = run_campaign(config("ResidualUnmasked"))
    assert first.new
    files = sorted(Path("corpus").glob("regressions/*"))
    second = run_campaign(config("ResidualUnmasked", rounds=0))
    assert set(second.findings) == set(first.findings)
    assert second.new == frozenset()
    assert second.unknown
    assert second.progress.counters["repeats"] >= len(files)
    assert sorted(Path("corpus").glob("regressions/*")) == files
    assert "0 of them new" in verdict_line(second)


@pytest.mark.parametrize(
    ("sampler", "campaign"),
    [
        ("LostThirdSibling", "bulk"),
        ("TemperatureIgnored", "bulk"),
        ("RowsOfRequestZero", "bulk"),
        ("DropsTailOfVocabulary", "bulk"),
        ("DepthCapIgnored", "laws"),
        ("NanSanitised", "laws"),
        ("StaleResidual", "laws"),
    ],
)
def test_planted_faults_are_found_from_an_empty_corpus(sampler, campaign):
    result = run_campaign(config(sampler, campaigns=(campaign,), rounds=2, workers=2, seconds=100))
    assert result.unknown, result.jobs
    assert not [job for job in result.jobs if job.errors]


def test_a_right_sampler_passes():
    result = run_campaign(config("Sampler", campaigns=("laws", "bulk"), workers=2, seconds=400))
    assert result.findings == {}
    assert result.progress.counters["cases"] > 15_000
    assert not [job for job in result.jobs if job.errors]
    laws = {job.job.subject for job in result.jobs if job.job.campaign == "laws" and job.cases}
    assert {"round-trip", "critical-coins", "batch-invariance"} <= laws
    skipped = {job.job.subject for job in result.jobs if job.skipped and job.job.backend == "planted:Sampler"}
    assert "critical-cuts" in skipped


def test_a_fault_that_needs_other_requests_keeps_them():
    result = run_campaign(config("RowsOfRequestZero"))
    (path, *_) = sorted(Path("corpus").glob("regressions/*.json"))
    assert 2 <= len(load_entry(path).case.requests) <= 3
    assert broken_again(path)
    assert result.unknown


# --- killed, interrupted, several ----------------------------------------------------------------------


def wait_for(condition, seconds=60):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "nothing happened"
        time.sleep(0.02)


def children(pid):
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(sys.platform != "linux", reason="looks for orphans in /proc")
def test_kill_9_loses_nothing_and_the_next_campaign_resumes():
    process = subprocess.Popen(command("Slow", campaign="bulk", workers=1, seed=3), stdout=subprocess.DEVNULL)
    records = Path("corpus/.fuzz/findings")
    wait_for(lambda: records.exists() and list(records.glob("*.json")))
    workers = children(process.pid)
    os.kill(process.pid, signal.SIGKILL)  # in the middle of shrinking
    process.wait()
    wait_for(lambda: not any(map(is_running, workers)), 10)
    (raw,) = Store(Path("corpus")).load().values()
    assert raw.state == "raw"
    assert broken_again(Path("corpus") / raw.entry)  # the case as it was met, whole
    assert not list(Path("corpus").glob("regressions/*"))

    result = run_campaign(config("Slow", rounds=0))
    (found,) = result.findings.values()
    assert (found.state, found.kind) == ("done", raw.kind)
    assert len(load_entry(Path("corpus") / found.entry).case.requests[0].tree) <= 3
    assert not list((Path("corpus") / ".fuzz" / "raw").iterdir())


@pytest.fixture
def heeded_sigint():
    """A shell's background job is born with SIGINT ignored, and so would be what we start in one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.skipif(sys.platform != "linux", reason="looks for orphans in /proc")
@pytest.mark.usefixtures("heeded_sigint")
def test_ctrl_c_ends_all_and_reports():
    process = subprocess.Popen(
        command("Slow", campaign="bulk", workers=2, seed=3, summary="summary.md", junit="junit.xml"),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: list(Path("corpus").glob(".fuzz/findings/*.json")))
        workers = children(process.pid)
        assert len(workers) == 2
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    finally:  # what is left running would fail another test
        process.kill()
    assert process.returncode == 130
    assert output.splitlines()[-1].startswith("FAIL")
    assert "**interrupted**" in Path("summary.md").read_text()
    assert ET.parse("junit.xml").getroot().find("testsuite").get("failures") != "0"
    wait_for(lambda: not any(map(is_running, workers)), 10)


def test_two_campaigns_on_one_corpus_share_what_they_find():
    shared = {"campaign": "bulk", "rounds": 1, "workers": 1}
    calls = [command("RatioTest", "InclusiveTest", **shared, seed=seed) for seed in (1, 2)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    processes = [subprocess.Popen(call, **quiet) for call in calls]
    assert [process.wait(timeout=200) for process in processes] == [1, 1]
    records = Store(Path("corpus")).load()
    assert {found.state for found in records.values()} == {"done"}
    entries, errors = load_corpus("corpus")
    assert errors == []
    stored = {entry.path.relative_to("corpus").as_posix() for entry in entries}
    assert {found.entry for found in records.values()} == stored
    kinds = [(found.law, found.backend, found.kind) for found in records.values()]
    assert len(set(kinds)) == len(kinds)
    assert {found.backend for found in records.values()} == {"planted:RatioTest", "planted:InclusiveTest"}
    assert leftovers() == []


# --- crashes and hangs --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampler", "kind"),
    [
        ("ExitsTheProcess", "ends the process with exit code 3"),
        ("Segfaults", "takes the process down by SIGSEGV"),
        ("Hangs", "does not come back"),
    ],
)
def test_a_backend_that_ends_or_holds_its_process_is_recorded_and_the_others_go_on(sampler, kind):
    result = run_campaign(
        config(sampler, "InclusiveTest", campaigns=("laws",), seconds=60, timeout=6.0, rounds=1)
    )
    deaths = [found for found in result.findings.values() if found.backend == f"planted:{sampler}"]
    assert {found.kind for found in deaths} == {kind}
    assert any(found.law == "critical-coins" for found in result.findings.values())
    sizes = []
    for found in deaths:
        entry = load_entry(Path("corpus") / found.entry)
        assert found.entry.startswith("crashes/")
        assert (entry.law, entry.backend) == (found.law, found.backend)
        sizes.append(sum(len(request.tree) for request in entry.case.requests))
        assert f"got:      it {kind}" in found.text
    if kind != "does not come back":
        assert min(sizes) <= 3  # shrunk in forks
    assert result.progress.deaths >= len(deaths)


def test_a_backend_that_dies_while_it_is_imported_is_an_error_of_its_own():
    Path("dies.py").write_text("import os\nos._exit(5)\n")
    result = run_campaign(config("dies:sampler", "InclusiveTest", seconds=60))
    (dead,) = [found for found in result.findings.values() if found.backend == "dies:sampler"]
    assert (dead.law, dead.kind) == ("load", "ends the process with exit code 5")
    assert any(found.backend == "planted:InclusiveTest" for found in result.findings.values())


# --- what is known, and what is said -------------------------------------------------------------------


def test_known_findings_are_said_to_be_known():
    result = run_campaign(
        config("Versioned", campaigns=("laws",), seconds=100, ledger="planted:LEDGER", workers=2)
    )
    known = {found.law: found.known for found in result.findings.values()}
    assert known["critical-coins"] == "known-one"
    assert all(found.law == "critical-coins" for found in result.findings.values() if found.known)
    text = markdown_summary(result)
    assert "## Known faults, met again" in text
    case = ET.fromstring(junit_xml(result)).find(".//testcase[@name='critical-coins[planted:Versioned]']")
    assert case.find("failure") is None
    assert case.find("skipped").get("message") == "known: known-one"


def test_the_command(capsys):
    words = ["fuzz", "--campaign", "bulk", "--rounds", "1", "--workers", "1", "--seed", "5", "--ledger", ""]
    files = ["--junit", "junit.xml", "--summary", "summary.md"]
    assert main([*words, *files, "--backend", "planted:InclusiveTest"]) == 1
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0].endswith("bulk on cpu, --seed 5, 1 workers")
    assert lines[1] == "backends: planted:InclusiveTest; corpus: corpus"
    assert lines[-1].startswith("FAIL ")
    replays = [line.split("treeconv ")[1] for line in lines if line.startswith("  replay:")]
    assert main(replays[0].split()) == 1
    assert "cases" in captured.err
    suite = ET.parse("junit.xml").getroot().find("testsuite")
    assert int(suite.get("failures")) >= 1
    assert "law broken: oracle-agreement" in suite.find(".//failure").text
    summary = Path("summary.md").read_text()
    assert "treeconv replay corpus/regressions/oracle-agreement-" in summary
    assert "| bulk | probs | planted:InclusiveTest | 1 |" in summary
    capsys.readouterr()
    assert main([*words, "--backend", "eager", "--corpus", "other"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("PASS ")


def test_a_message_that_no_file_can_hold_is_a_finding_all_the_same(capsys):
    words = ["fuzz", "--campaign", "laws", "--seconds", "12", "--workers", "1", "--seed", "5", "--ledger", ""]
    files = ["--junit", "junit.xml", "--summary", "summary.md"]
    assert main([*words, *files, "--backend", "planted:SaysASurrogate"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("FAIL ")
    assert [line for line in lines if "got:      ValueError: \\ud800 is no character" in line]
    assert not [line for line in lines if line.startswith("could not be done")]
    assert "ValueError: \\ud800" in ET.parse("junit.xml").getroot().find(".//failure").text
    assert "ValueError: \\ud800" in Path("summary.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--campaign", "nothing"],
            "campaign='nothing', but must be all or one of laws, parsers, bulk, device",
        ),
        (["--seconds", "0"], "seconds=0.0, but must be > 0"),
        (["--workers", "0"], "workers=0, but must be >= 1"),
        (["--backend", "nobody"], "backend='nobody', but must be one of"),
        (["--ledger", "planted:nothing"], "ledger='planted:nothing', but must be module:attribute"),
        (["--ledger", "planted:PLANTED"], "ledger='planted:PLANTED', but must be module:attribute"),
    ],
)
def test_bad_arguments_are_refused_in_words(words, message, capsys):
    assert main(["fuzz", *words]) == 2
    assert message in capsys.readouterr().err
    assert not Path("corpus").exists()


def test_minimise_keeps_one_case_of_those_that_break_alike(capsys):
    run_campaign(config("ResidualUnmasked"))
    (kept, *_) = sorted(Path("corpus/regressions").glob("*.json"))
    # The same failure by a larger case of a campaign's, and by one that a person wrote about.
    entry = load_entry(kept)
    request = entry.case.requests[0]
    wide = replace(entry.case, requests=(request, request), num_draft_tokens=9)
    larger = save_entry("corpus/regressions", replace(entry, case=wide, path=None))
    seen = replace(entry, case=wide, path=None, note="seen in the wild")
    described = save_entry("corpus/regressions", seen)
    before = sorted(Path("corpus/regressions").glob("*.json"))
    assert main(["corpus", "minimise", "--dry-run"]) == 0
    assert sorted(Path("corpus/regressions").glob("*.json")) == before
    assert f"removed:  {larger.name}" in capsys.readouterr().out
    assert main(["corpus", "minimise"]) == 0
    assert not larger.exists()
    assert described.exists()
