"""Contract: a search goes on behind what is known, loses none of several findings, and ends in time."""

import time

import numpy as np
import pytest
from hypothesis import strategies as st

from treeconv.case import Request, VerifyCase
from treeconv.errors import LawBroken
from treeconv.fuzzing.flight import FlightRecorder
from treeconv.fuzzing.plan import CAMPAIGNS, check_campaigns, jobs, stored_jobs
from treeconv.fuzzing.search import aims, explore
from treeconv.fuzzing.session import Config, Job, Session, TimeIsUp
from treeconv.fuzzing.store import Store
from treeconv.tree import DraftTree


def session(tmp_path, seconds=60.0):
    config = Config(str(tmp_path), ("eager",), ("laws",), ledger="")
    recorder = FlightRecorder(tmp_path / "flight")
    return Session(config, Store(tmp_path), recorder, time.monotonic() + seconds)


def failure(kind, value):
    text = f"law broken: a-law\n  meaning:  m\n  got:      {kind} {value}\n  want:     nothing"
    return LawBroken(text, law="a-law")


def two_faults(value):
    """A common one, and a rare one that begins among the values of the other."""
    if value > 500 and value % 8 == 3:
        raise failure("rare", value)
    if value > 20:
        raise failure("common", value)
    return 1


def explored(subject, run, round_number, examples=200, strategy=None):
    explore(
        run,
        st.integers(0, 10_000) if strategy is None else strategy,
        campaign="laws",
        subject="a-law",
        meaning="m",
        backend=None,
        session=subject,
        round_number=round_number,
        examples=examples,
    )


def test_both_faults_are_found_and_neither_is_shrunk_into_the_other(tmp_path):
    subject = session(tmp_path)
    for round_number in range(3):
        explored(subject, two_faults, round_number)
    found = {record.kind.split()[0]: record for record in subject.store.load().values()}
    assert set(found) == {"common", "rare"}
    assert {record.state for record in found.values()} == {"done"}
    assert "got:      common 21\n" in found["common"].text
    assert subject.recorder.counters["repeats"] > 0


def test_a_known_failure_does_not_stop_the_search(tmp_path):
    subject = session(tmp_path)
    explored(subject, two_faults, 0, strategy=st.integers(0, 400))
    before = subject.recorder.counters["cases"]
    explored(subject, two_faults, 1, strategy=st.integers(0, 400))
    assert subject.recorder.counters["cases"] - before >= 200
    assert len(subject.store.load()) == 1


def test_an_error_of_ours_is_a_finding_about_us(tmp_path):
    subject = session(tmp_path)

    def raises(value):
        return [][value]

    explored(subject, raises, 0)
    (record,) = subject.store.load().values()
    assert "IndexError" in record.kind
    assert "a verdict: this is treeconv's own fault" in record.text


def test_it_ends_when_the_time_is_up(tmp_path):
    subject = session(tmp_path, seconds=0.3)
    started = time.monotonic()
    with pytest.raises(TimeIsUp):
        explored(subject, lambda _: time.sleep(0.01), 0, examples=100_000)
    assert time.monotonic() - started < 5


def test_what_a_search_climbs_towards():
    tree = DraftTree((-1, 0, 1), (0, 1, 2))
    rows = np.array([[0.25, 0.5, 0.25, 0.0]] * 3, np.float32)

    def at(coin, final=0.9):
        request = Request(tree, rows, 1.0, np.array([coin, 0.9, 0.9], np.float32), final)
        return aims(VerifyCase((request,), kind="probs"))

    near, far = at(0.5 + 2**-12), at(0.75)
    assert near["nearest boundary"] == pytest.approx(12)
    assert far["nearest boundary"] < 4
    assert (near["depth"], at(0.25)["depth"]) == (1, 2)
    assert near["ties"] == 1
    assert at(0.75, final=0.5 - 2**-10)["nearest boundary"] == pytest.approx(10, abs=1)
    rows[:] = np.nan  # rows that nothing can be drawn from are no reason to stop
    assert np.isfinite(list(at(0.5).values())).all()


def test_every_piece_of_work_has_a_seed_of_its_own(tmp_path):
    subject = session(tmp_path)
    numbers = {subject.number(f"device/{law}/{round_number}") for law in "ab" for round_number in range(50)}
    assert len(numbers) == 100
    assert subject.number("x") == session(tmp_path).number("x") < 2**48


def test_jobs_are_fixed_by_the_configuration_and_meet_everything(tmp_path):
    config = Config(str(tmp_path), ("eager", "reference"), ("laws", "bulk"), rounds=2)
    planned = list(jobs(config, [Job("replay", "x.json", "eager")]))
    assert planned == list(jobs(config, [Job("replay", "x.json", "eager")]))
    assert planned[0] == Job("replay", "x.json", "eager")
    subjects = {(job.campaign, job.subject, job.backend, job.round) for job in planned[1:]}
    assert len(subjects) == len(planned) - 1
    assert {("bulk", "probs", "eager", 1), ("laws", "purity", "reference", 0)} <= subjects
    assert {job.campaign for job in planned[1:9]} == {"laws", "bulk"}  # in turns
    assert check_campaigns([], "cpu") == tuple(name for name in CAMPAIGNS if name != "device")
    assert check_campaigns(["all"], "cuda:0") == tuple(CAMPAIGNS)
    store = Store(tmp_path)
    (tmp_path / "regressions").mkdir()
    for name in ("a.json", "b.input", "c.trace", "d.txt"):
        (tmp_path / "regressions" / name).touch()
    names = [(job.subject.split("/")[1], job.backend) for job in stored_jobs(store, config.backends)]
    both = [(name, backend) for name in ("a.json", "c.trace") for backend in ("eager", "reference")]
    assert sorted(names) == sorted([*both, ("b.input", "")])
