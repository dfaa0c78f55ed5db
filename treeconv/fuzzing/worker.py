"""One worker process: runs its share of the jobs, records what they find, says where it is.

    python -m treeconv.fuzzing.worker RUN_DIRECTORY NUMBER FIRST_JOB [DIGEST]

The supervisor writes RUN_DIRECTORY/config.json and reads the rest. A worker owns the jobs whose number
leaves NUMBER when divided by the workers. DIGEST: a crash that the worker before died of; its case is made
smaller first. When standard input ends the supervisor is gone, and so is the worker.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeconv._drive import encodable
from treeconv.corpus import load_entry
from treeconv.errors import LawBroken, TreeconvError
from treeconv.fuzzing import plan
from treeconv.fuzzing.flight import FlightRecorder
from treeconv.fuzzing.lifeline import die_with
from treeconv.fuzzing.session import Config, Job, Session, TimeIsUp
from treeconv.fuzzing.signature import signature_of
from treeconv.fuzzing.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["main", "run_job"]

_TRACE_COINS = 12  # beside boundaries, of a recorded trace: its rows are 49152 tokens wide


def _replay(job: Job, session: Session) -> str | None:
    """A stored case, trace or input, once more."""
    from treeconv.fuzzing.parsers import load_input  # noqa: PLC0415
    from treeconv.replay import law_of, replay_entry, replay_trace, why_not_judged  # noqa: PLC0415
    from treeconv.traces import load_trace  # noqa: PLC0415
    from treeconv.tree_laws import TreeLaw  # noqa: PLC0415

    path = session.store.corpus / job.subject
    device = session.config.device
    try:
        if path.suffix == ".input":
            parser, value = load_input(path)
            session.begin_case(("parsers", parser.name, None, value))
            parser.run(value)
        elif path.suffix == ".trace":
            backend = session.backend(job.backend)
            if not backend.traits.takes_logits:
                return "the backend takes probabilities only, and a trace holds logits"
            trace = load_trace(path)
            for temperature in trace.temperatures:
                session.begin_case(("replay", job.subject, job.backend, None))
                replay_trace(trace, temperature, backend, device, max_coins=_TRACE_COINS)
        else:
            entry = load_entry(path)
            about_trees = isinstance(law_of(entry), TreeLaw)
            if about_trees and job.backend != session.config.backends[0]:
                return "judged once, with the first backend: a law about trees"
            judged = None if about_trees else session.backend(job.backend)
            reason = why_not_judged(entry, judged)
            if reason is not None:
                return reason
            session.begin_case(("replay", entry.law, job.backend, entry.case))
            replay_entry(entry, judged, device)
    except LawBroken as broken:
        broken.path = path
        signature = signature_of(broken)
        session.learn(signature)
        session.claim("replay", broken)
    finally:
        session.recorder.idle()
    session.recorder.add("cases")
    return None


def _device(job: Job, session: Session) -> str | None:
    """A law of a device's width, at its full size on a GPU."""
    import torch  # noqa: PLC0415

    from treeconv._gpu_checks import Sizes  # noqa: PLC0415
    from treeconv.gpu_laws import gpu_law_named  # noqa: PLC0415

    law, device = gpu_law_named(job.subject), session.config.device
    backend = session.backend(job.backend) if job.backend else None
    reason = law.why_not(backend, device)
    if reason is not None:
        return reason
    sizes = Sizes(trees=10_240, replays=100) if torch.device(device).type == "cuda" else Sizes.small()
    seed = session.number(f"device/{job.subject}/{job.backend}/{job.round}")
    session.begin_case(("device", law.name, job.backend, {"seed": seed}))
    try:
        session.recorder.add("decisions", law.run(backend, device, sizes, seed))
    except LawBroken as broken:
        signature = session.claim("device", broken, seed=seed)
        if signature is not None:
            session.settle("device", signature, broken, seed=seed)
    finally:
        session.recorder.idle()
    session.recorder.add("cases")
    return None


def run_job(job: Job, session: Session) -> str | None:
    """Run one job.

    Returns:
        Why there was nothing to do, or None.

    Raises:
        TimeIsUp: in the middle of it.
        TreeconvError: the backend or a stored file cannot be used; the message says why.
    """
    from treeconv.fuzzing import bulk, guided, search  # noqa: PLC0415

    session.found = []
    if job.campaign == "shrink":
        return search.shrink_stored(job.subject, session)
    if job.campaign == "laws":
        return search.search_law(job.subject, job.backend, session, job.round)
    if job.campaign == "parsers":
        return guided.search_parser(job.subject, session, job.round)
    if job.campaign == "bulk":
        return bulk.bulk_round(job.subject, job.backend, session, job.round)
    return (_replay if job.campaign == "replay" else _device)(job, session)


def _die_with_the_supervisor() -> None:
    """Also where a backend holds the interpreter's lock for ever (Linux); elsewhere, when it lets go."""
    die_with(os.getppid())

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def _log_to(path: Path) -> Callable[[dict[str, Any]], None]:
    def log(event: dict[str, Any]) -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event) + "\n")

    return log


def main(run: Path, number: int, first: int, crash: str = "") -> None:
    """Run jobs until the time is up or none is left."""
    _die_with_the_supervisor()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the supervisor, which ends us
    warnings.simplefilter("ignore")
    document = json.loads((run / "config.json").read_text())
    config = Config.from_json(document["config"])
    if config.workers > 1:
        import torch  # noqa: PLC0415

        torch.set_num_threads(max(1, (os.cpu_count() or 1) // config.workers))
    recorder = FlightRecorder(run / f"worker-{number}.flight")
    session = Session(config, Store(Path(config.corpus)), recorder, document["deadline"])
    with contextlib.suppress(TreeconvError):
        _ = session.ledger  # imported before a backend is called, which may go to another directory
    log = _log_to(run / f"worker-{number}.log")
    if crash:
        from treeconv.fuzzing.crash import shrink_crash  # noqa: PLC0415

        with contextlib.suppress(TimeIsUp):
            shrink_crash(crash, session)
    stored = [Job(**job) for job in document["stored"]]
    dropped = {Job(**job) for job in json.loads((run / "dropped.json").read_text())}
    for place, job in enumerate(plan.jobs(config, stored)):
        if place % config.workers != number or place < first:
            continue
        if session.is_over:
            break
        if Job(job.campaign, job.subject, job.backend) in dropped:
            continue
        recorder.set("job", place)
        before = recorder.counters["cases"]
        event: dict[str, Any] = {"job": vars(job), "place": place, "outcome": "done"}
        started = time.monotonic()
        try:
            reason = run_job(job, session)
            event |= {} if reason is None else {"outcome": "skipped", "why": reason}
        except TimeIsUp:
            event["outcome"] = "cut short"
        except TreeconvError as error:
            event |= {"outcome": "error", "why": encodable(str(error))}
        except Exception:  # noqa: BLE001  # one job must not stop the others; it is reported
            event |= {"outcome": "error", "why": encodable(traceback.format_exc(limit=-4))}
        recorder.idle()
        event |= {
            "cases": recorder.counters["cases"] - before,
            "seconds": time.monotonic() - started,
            "found": session.found,
        }
        log(event)
    recorder.set("done", 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:5])
