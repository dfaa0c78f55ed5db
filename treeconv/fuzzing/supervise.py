"""The supervisor: starts the workers, watches them, and goes on where one dies or hangs.

It calls no backend itself. Whatever is found is on the disk before anything else happens with it, so this
process can be ended at any moment, too.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeconv.fuzzing import plan
from treeconv.fuzzing.crash import HANG, how_it_ended, record_death
from treeconv.fuzzing.flight import COUNTERS, read_payload, read_status, reset
from treeconv.fuzzing.lifeline import end_group
from treeconv.fuzzing.session import Job
from treeconv.fuzzing.store import Discovery, Store

if TYPE_CHECKING:
    from collections.abc import Callable

    from treeconv.fuzzing.session import Config

__all__ = ["JobResult", "Progress", "Result", "run_campaign"]

_POLL = 0.1
_GRACE = 8.0  # seconds that a worker gets beyond the deadline, to finish a call and leave
_DEATHS = 3  # of one subject on one backend, after which it is dropped for the rest of the campaign
_RESTARTS = 10  # of one worker at one job: it does not get anywhere


@dataclass(frozen=True)
class JobResult:
    """All rounds of one subject on one backend.

    Args:
        job: its first round.

        rounds, cases, seconds: in all.

        found: digests of the findings met.

        skipped: why it did not apply, or "".

        errors: why it could not be done, of each round that could not.
    """

    job: Job
    rounds: int
    cases: int
    seconds: float
    found: tuple[str, ...]
    skipped: str
    errors: tuple[str, ...]


@dataclass
class Progress:
    """What a progress line says."""

    seconds: float = 0.0
    job: str = ""
    counters: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTERS, 0))
    found: int = 0
    known: int = 0
    deaths: int = 0

    @property
    def per_second(self) -> float:
        """Cases a second."""
        return self.counters["cases"] / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Result:
    """What became of a campaign.

    Args:
        config: what was asked.

        findings: digest -> record of everything met, found now or before.

        new: the digests that no campaign had recorded before.

        jobs: one a subject and backend.

        progress: the last counters.

        interrupted: whether Ctrl-C ended it.
    """

    config: Config
    findings: dict[str, Discovery]
    new: frozenset[str]
    jobs: list[JobResult]
    progress: Progress
    interrupted: bool

    @property
    def unknown(self) -> dict[str, Discovery]:
        """Findings that no entry of the ledger explains: they fail a run."""
        return {digest: found for digest, found in self.findings.items() if not found.known}

    @property
    def errors(self) -> list[tuple[Job, str]]:
        """What could not be done, and why."""
        return [(job.job, error) for job in self.jobs for error in job.errors]

    @property
    def is_incomplete(self) -> bool:
        """Whether something could not be judged, or nothing was."""
        return bool(self.errors) or not (self.progress.counters["cases"] or self.findings)


class _Worker:
    """One worker process and the files that it leaves."""

    def __init__(self, run: Path, number: int) -> None:
        self.run = run
        self.number = number
        self.flight = run / f"worker-{number}.flight"
        self.log = run / f"worker-{number}.log"
        self.process: subprocess.Popen[bytes] | None = None
        self.is_given_up = False
        self._is_ended = False
        self._starts: dict[int, int] = {}

    def start(self, first: int, crash: str = "") -> None:
        reset(self.flight)
        self._starts[first] = self._starts.get(first, 0) + 1
        self.is_given_up = self._starts[first] > _RESTARTS
        command = [
            sys.executable,
            "-m",
            "treeconv.fuzzing.worker",
            str(self.run),
            str(self.number),
            str(first),
        ]
        with (self.run / f"worker-{self.number}.stderr").open("ab") as errors:
            self.process = subprocess.Popen(  # noqa: S603
                [*command, *([crash] if crash else [])],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )
        self._is_ended = False

    def end(self) -> None:
        if self.process is None or self._is_ended:  # its number may be another's by now
            return
        self._is_ended = True
        if self.process.poll() is None:
            self.process.kill()
        end_group(self.process.pid)  # its forks, too, and what a backend started
        self.process.wait()
        if self.process.stdin is not None:
            self.process.stdin.close()


def _nothing(*_: object) -> None:
    pass


def run_campaign(
    config: Config,
    on_progress: Callable[[Progress], None] = _nothing,
    on_finding: Callable[[str, Discovery], None] = _nothing,
) -> Result:
    """Run a campaign to its end, or to Ctrl-C.

    Args:
        config: what to run.

        on_progress: called several times a second.

        on_finding: called for each finding that was not recorded before, and again once it is shrunk.

    Raises:
        OSError: the corpus directory cannot be written to.
    """
    asked = config  # reports name the corpus so; whoever calls os.chdir must not move it
    config = replace(config, corpus=str(Path(config.corpus).absolute()))
    store = Store(Path(config.corpus))
    before = frozenset(store.load())
    stored = plan.stored_jobs(store, config.backends)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="treeconv-fuzz-") as name:
        run = Path(name)
        document = {
            "config": config.to_json(),
            "deadline": started + config.seconds,
            "stored": [vars(job) for job in stored],
        }
        (run / "config.json").write_text(json.dumps(document), encoding="utf-8")
        campaign = _Campaign(config, store, run, stored, started, before, on_finding)
        interrupted = False
        try:
            campaign.watch(on_progress)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            for worker in campaign.workers:
                worker.end()
        campaign.report_new()
        jobs = campaign.job_results()
        met = campaign.met | {digest for job in jobs for digest in job.found}
        findings = {
            digest: found for digest, found in store.load().items() if digest in met or digest not in before
        }
        return Result(asked, findings, frozenset(findings) - before, jobs, campaign.progress, interrupted)


class _Campaign:
    def __init__(
        self,
        config: Config,
        store: Store,
        run: Path,
        stored: list[Job],
        started: float,
        before: frozenset[str],
        on_finding: Callable[[str, Discovery], None],
    ) -> None:
        self.config, self.store, self.run, self.stored = config, store, run, stored
        self.started, self.before, self.on_finding = started, before, on_finding
        self.progress = Progress()
        self.workers = [_Worker(run, number) for number in range(config.workers)]
        self.met: set[str] = set()
        self._deaths: dict[Job, int] = {}
        self._dropped: list[Job] = []
        self._reported: dict[str, str] = {}
        self._names: dict[int, str] = {}
        self._plan = enumerate(plan.jobs(config, stored))
        self._planned: dict[int, Job] = {}

    def _job(self, place: int) -> Job:
        while place not in self._planned:
            number, job = next(self._plan, (place, Job("", "nothing")))
            self._planned[number] = job
        return self._planned[place]

    def watch(self, on_progress: Callable[[Progress], None]) -> None:
        self._write_dropped()
        for worker in self.workers:
            worker.start(0)
        until = self.started + self.config.seconds + _GRACE
        while time.monotonic() < until:
            busy = [worker for worker in self.workers if not self._is_done(worker)]
            self._refresh()
            on_progress(self.progress)
            if not busy:
                return
            time.sleep(_POLL)

    def _is_done(self, worker: _Worker) -> bool:
        """Whether a worker has nothing left; one that died or hangs is replaced."""
        assert worker.process is not None
        counters, running = read_status(worker.flight)
        code = worker.process.poll()
        if code is None and running <= self.config.timeout:
            return False
        if code is None:
            worker.end()
            self._bury(worker, counters["job"], HANG)
            return False
        worker.end()
        if counters["done"] or worker.is_given_up:
            return True
        self._bury(worker, counters["job"], how_it_ended(code))
        return False

    def _bury(self, worker: _Worker, place: int, how: str) -> None:
        """Record what a worker was at, and start another behind that job."""
        self.progress.deaths += 1
        job = self._job(place)
        payload = None
        with contextlib.suppress(Exception):  # cut off in the middle: nothing was under way yet
            payload = read_payload(worker.flight)
        digest = ""
        if payload is not None:
            digest = record_death(payload, how, self.config, self.store).digest
            self.met.add(digest)
        elif time.monotonic() < self.started + self.config.seconds:
            stderr = (self.run / f"worker-{worker.number}.stderr").read_text(errors="replace")[-2000:]
            why = f"the worker {how} between two cases: {stderr}"
            self._log(worker, job, {"outcome": "error", "why": why})
        subject = Job(job.campaign, job.subject, job.backend)
        self._deaths[subject] = self._deaths.get(subject, 0) + 1
        if self._deaths[subject] >= _DEATHS:
            self._dropped.append(subject)
            self._write_dropped()
        self._log(worker, job, {"outcome": "died", "found": [digest] if digest else []})
        worker.start(place + 1, digest if digest not in self.before else "")

    def _write_dropped(self) -> None:
        (self.run / "dropped.json").write_text(json.dumps([vars(job) for job in self._dropped]))

    def _log(self, worker: _Worker, job: Job, event: dict[str, Any]) -> None:
        full = {"job": vars(job), "cases": 0, "seconds": 0.0, "found": [], **event}
        with worker.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(full) + "\n")

    def _refresh(self) -> None:
        progress = self.progress
        progress.seconds = time.monotonic() - self.started
        counters = [read_status(worker.flight)[0] for worker in self.workers]
        progress.counters = {
            name: (max if name == "features" else sum)(one[name] for one in counters) for name in COUNTERS
        }
        progress.job = str(self._job(counters[0]["job"]))
        self.report_new()

    def report_new(self) -> None:
        """Tell of findings that are new, or were shrunk since."""
        records = self.store.load()
        new = {digest: found for digest, found in records.items() if digest not in self.before}
        self.progress.found, self.progress.known = len(new), sum(bool(found.known) for found in new.values())
        for digest, found in new.items():
            if self._reported.get(digest) != found.entry + found.state:
                self._reported[digest] = found.entry + found.state
                self.on_finding(digest, found)

    def job_results(self) -> list[JobResult]:
        """What the workers logged, by subject and backend."""
        merged: dict[Job, JobResult] = {}
        for worker in self.workers:
            if not worker.log.exists():
                continue
            for line in worker.log.read_text(encoding="utf-8").splitlines():
                try:
                    event = json.loads(line)
                except ValueError:  # the last one, cut off with its worker
                    continue
                job = Job(**event["job"])
                key = Job(job.campaign, job.subject, job.backend)
                so_far = merged.get(key, JobResult(key, 0, 0, 0.0, (), "", ()))
                why = event.get("why", "")
                merged[key] = JobResult(
                    key,
                    so_far.rounds + 1,
                    so_far.cases + event["cases"],
                    so_far.seconds + event["seconds"],
                    tuple(dict.fromkeys([*so_far.found, *event["found"]])),
                    why if event["outcome"] == "skipped" else so_far.skipped,
                    (*so_far.errors, why) if event["outcome"] == "error" else so_far.errors,
                )
        return list(merged.values())
