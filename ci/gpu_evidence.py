"""Run the laws, the ledger and the benchmark on the CUDA device here, and write down what came of it.

    python ci/gpu_evidence.py [--out DIR] [--max-examples 60] [--workers 12] [--skip bench]

``ci/gpu.sh`` is the front door. Law x backend checks run in worker processes that share the device; those
that fill its memory run alone, and the benchmark last, on a quiet device. Exit status 1 where a law is
broken, or a finding was not found again.
"""
# ruff: noqa: PLC0415  (a worker imports what its task needs, once the device is known to be there)

from __future__ import annotations

import argparse
import concurrent.futures
import json
import multiprocessing
import os
import platform
import queue
import re
import subprocess
import sys
import time
import traceback
from dataclasses import replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

BACKENDS = ("eager", "triton", "sgl")
ALONE = ("offsets-64-bit", "wide-batch-invariance", "wide-determinism")


class Claiming:
    """A backend held to a claim that it does not make: that it reports unusable rows."""

    def __init__(self, backend: Any) -> None:
        self.name = backend.name
        self.traits = replace(backend.traits, reports_status=True)
        self.verify, self.verify_probs = backend.verify, backend.verify_probs


def environment() -> dict[str, Any]:
    """The machine, the versions and the commit."""
    import torch

    about = torch.cuda.get_device_properties(0)
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for package in ("torch", "triton", "numpy", "hypothesis"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    from treeconv.backends.registry import available_backends, get_backend

    reasons = available_backends()
    if reasons["sgl"] is None:
        versions["sgl"] = get_backend("sgl").kernels.version
    return {
        "device": about.name,
        "capability": f"{about.major}.{about.minor}",
        "multiprocessors": about.multi_processor_count,
        "memory_gib": round(about.total_memory / 2**30, 1),
        "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0],
        "versions": versions,
        "backends": {name: reason or "available" for name, reason in reasons.items()},
        "commit": os.environ.get("TREECONV_COMMIT") or _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def run_task(task: dict[str, Any]) -> dict[str, Any]:
    """One law on one backend, or one finding; never raises: an error is a result too."""
    started = time.perf_counter()
    try:
        result = {"ledger": _ledger, "fault": _fault}.get(task["kind"], _law)(task)
    except Exception:  # noqa: BLE001  (anything at all must end up in the evidence)
        result = {"result": "error", "message": traceback.format_exc()[-3000:]}
    return {**task, **result, "seconds": round(time.perf_counter() - started, 2)}


def _law(task: dict[str, Any]) -> dict[str, Any]:
    from treeconv import suite
    from treeconv._gpu_checks import Sizes
    from treeconv.backends.registry import get_backend
    from treeconv.errors import BackendUnavailable, LawBroken
    from treeconv.gpu_laws import gpu_law_named

    try:
        backend = None if task["backend"] is None else get_backend(task["backend"])
    except BackendUnavailable as error:
        return {"result": "not here", "message": str(error)}
    if task["kind"] == "generated":
        (law,) = suite.laws_named([task["law"]])
        outcome = suite.check_law(law, backend, "cuda", max_examples=task["max_examples"])
        counts = {"cases": outcome.cases, "decisions": outcome.decisions}
        if outcome.skipped:
            return {"result": "does not apply", "message": outcome.skipped}
        if outcome.broken:
            return {"result": "broken", "message": str(outcome.broken), **counts}
        return {"result": "kept", **counts}
    law = gpu_law_named(task["law"])
    reason = law.why_not(backend, "cuda")
    if reason:
        return {"result": "does not apply", "message": reason}
    try:
        decisions = law.run(backend, "cuda", Sizes())
    except LawBroken as broken:
        return {"result": "broken", "message": str(broken), "cases": 1}
    left_out = f"not judged: {'; '.join(decisions.left_out)}" if decisions.left_out else ""
    if not decisions:
        return {"result": "does not apply", "message": left_out or "nothing to judge here (no sgl_kernel)"}
    kept = {"result": "kept", "cases": 1, "decisions": int(decisions)}
    return kept | {"message": left_out} if left_out else kept


def _ledger(task: dict[str, Any]) -> dict[str, Any]:
    """Launch a finding's stored case, and let the suite look for the fault by itself."""
    from fuzz.findings import LEDGER, replay_device_case, stored_case
    from treeconv import suite
    from treeconv._gpu_checks import Sizes
    from treeconv.backends.registry import get_backend
    from treeconv.errors import BackendUnavailable
    from treeconv.gpu_laws import GPU_LAWS
    from treeconv.laws import law_named
    from treeconv.ledger import NotLaunched
    from treeconv.replay import replay_entry

    finding = LEDGER[task["finding"]]
    device_laws = {law.name: law for law in GPU_LAWS}
    try:
        backend: Any = get_backend(finding.backend)
        version = backend.kernels.version
    except BackendUnavailable:
        backend = version = None

    def stored() -> object:
        entry = stored_case(finding)
        fresh = backend.fresh()
        if finding.case.startswith("device/"):
            return replay_device_case(entry, fresh, "cuda")
        if finding.law == "bad-rows":
            return law_named("bad-rows").run(entry.case, Claiming(fresh), "cuda")
        return replay_entry(entry, fresh, "cuda")

    def found_by_the_suite() -> object:
        if finding.law in device_laws:
            judged = device_laws[finding.law].run(backend.fresh(), "cuda", Sizes())
            if judged.left_out:  # nothing is broken in what did fit: the fault may be in the rest
                raise NotLaunched("; ".join(judged.left_out))
            return judged
        subject = Claiming(backend) if finding.law == "bad-rows" else backend
        outcome = suite.check_law(law_named(finding.law), subject, "cuda", max_examples=500)
        if outcome.broken:
            raise outcome.broken
        return outcome.decisions

    attempts = {"the stored case": stored, "the suite by itself": found_by_the_suite}
    verdict = LEDGER.judge(finding.id, version, attempts)
    return {
        "law": finding.law,
        "backend": finding.backend,
        "versions": list(finding.versions),
        "summary": finding.summary,
        "sees": finding.sees,
        "result": verdict.outcome,
        "ok": verdict.ok,
        "message": verdict.message,
    }


def _fault(task: dict[str, Any]) -> dict[str, Any]:
    """A planted fault, which its law must kill here too."""
    import device_faults

    from treeconv._gpu_checks import Sizes
    from treeconv.backends.registry import get_backend
    from treeconv.errors import BackendUnavailable

    fault = next(fault for fault in device_faults.FAULTS if fault.name == task["fault"])
    try:
        backends = {} if fault.around == "converter" else {fault.around: get_backend(fault.around)}
    except BackendUnavailable as error:
        return {"result": "not here", "message": str(error)}
    message = device_faults.broken_by(fault, backends, "cuda", Sizes())
    return (
        {"result": "survived", "message": ""} if message is None else {"result": "killed", "message": message}
    )


def all_tasks(max_examples: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Tasks that may share the device, the long ones first, and those that need it alone."""
    import device_faults

    from fuzz.findings import LEDGER
    from treeconv.gpu_laws import GPU_LAWS
    from treeconv.laws import BACKEND_LAWS
    from treeconv.tree_laws import TREE_LAWS

    def device_task(law: Any, backend: str | None) -> dict[str, Any]:
        return {"kind": "device", "law": law.name, "backend": backend}

    shared: list[dict[str, Any]] = []
    for law in GPU_LAWS:
        subjects = [None] if law.subject == "converter" else list(BACKENDS)
        if law.name not in ALONE:
            shared += [device_task(law, subject) for subject in subjects]
    for finding in LEDGER:
        if finding.law not in ALONE:
            shared.append({"kind": "ledger", "finding": finding.id})
    for backend in reversed(BACKENDS):
        for law in BACKEND_LAWS:
            shared.append(
                {"kind": "generated", "law": law.name, "backend": backend, "max_examples": max_examples}
            )
    shared += [
        {"kind": "generated", "law": law.name, "backend": None, "max_examples": max_examples}
        for law in TREE_LAWS
    ]
    # Triton compiles the sampler anew for each shape and kind of filter: those that meet most begin first.
    shared.sort(
        key=lambda task: task.get("backend") != "triton" or not re.search("wide|filters", task["law"])
    )
    faults = [{"kind": "fault", "fault": fault.name, "law": fault.law} for fault in device_faults.FAULTS]
    shared += [task for task in faults if task["law"] not in ALONE]
    alone = [device_task(law, name) for law in GPU_LAWS if law.name in ALONE for name in BACKENDS]
    alone += [{"kind": "ledger", "finding": f.id} for f in LEDGER if f.law in ALONE]
    alone += [task for task in faults if task["law"] in ALONE]
    return shared, alone


def _say(result: dict[str, Any]) -> None:
    what = result.get("law") or result["finding"]
    name = result.get("finding") or result.get("fault") or result.get("backend") or "-"
    count = f"{result.get('decisions', '')!s:>8}"
    print(f"{what:<24} {name:<24} {count} {result['seconds']:>7.1f} s  {result['result']}", flush=True)
    if is_bad(result) or (result["result"] == "kept" and "message" in result):
        print("\n".join("    " + line for line in result["message"].splitlines()[:40]), flush=True)


def serve(pipe: Any) -> None:
    """A worker process: answers tasks until there are no more."""
    while (task := pipe.recv()) is not None:
        pipe.send(run_task(task))


class Worker:
    """A process that runs one task at a time, and is replaced when it hangs, dies or loses its device."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._process: Any = None
        self._pipe: Any = None

    def run(self, task: dict[str, Any]) -> dict[str, Any]:
        """The task's result, whatever happens."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        started = time.perf_counter()
        try:
            self._pipe.send(task)
            if self._pipe.poll(self._limit_s):
                result: dict[str, Any] = self._pipe.recv()
                # An illegal access leaves every later call of that process failing.
                if "CUDA error" in result.get("message", ""):
                    self.stop()
                return result
            message = f"no answer after {self._limit_s:.0f} s: it hangs"
        except (EOFError, OSError):
            message = f"the process died with exit code {self._process.exitcode}"
        self.stop()
        seconds = round(time.perf_counter() - started, 2)
        return {**task, "result": "error", "message": message, "seconds": seconds}

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None


def run_laws(max_examples: int, workers: int, only: str, task_limit_s: float) -> list[dict[str, Any]]:
    """Every law and finding. A check that hangs or loses the device takes no other with it."""
    shared, alone = (
        [task for task in tasks if re.search(only, " ".join(map(str, task.values())))]
        for tasks in all_tasks(max_examples)
    )
    results: list[dict[str, Any]] = []

    def drain(tasks: queue.SimpleQueue[dict[str, Any]]) -> None:
        worker = Worker(task_limit_s)
        try:
            while True:
                result = worker.run(tasks.get_nowait())
                _say(result)
                results.append(result)
        except queue.Empty:
            worker.stop()

    for tasks, count in ((shared, workers), (alone, 1)):
        waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        for task in tasks:
            waiting.put(task)
        with concurrent.futures.ThreadPoolExecutor(count) as threads:
            for done in [threads.submit(drain, waiting) for _ in range(count)]:
                done.result()
    return results


def is_bad(result: dict[str, Any]) -> bool:
    """Whether a result fails the run."""
    return result["result"] in ("broken", "error", "unexpected pass", "survived")


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or ROOT / "ci" / "evidence"))
    parser.add_argument("--max-examples", type=int, default=60, help="generated cases a law")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--task-seconds", type=float, default=240.0, help="a check that takes longer hangs")
    parser.add_argument("--bench-seconds", type=float, default=150.0)
    parser.add_argument("--only", default="", help="checks whose kind, law or backend matches this pattern")
    parser.add_argument("--skip", nargs="*", choices=("laws", "bench"), default=[])
    options = parser.parse_args()
    import torch

    if not torch.cuda.is_available():
        print("ci/gpu_evidence.py needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    about = environment()
    print(json.dumps(about, indent=1), flush=True)
    name = re.sub(r"[^a-z0-9]+", "-", about["device"].lower()).strip("-")
    options.out.mkdir(parents=True, exist_ok=True)
    evidence: dict[str, Any] = {"environment": about}
    started = time.monotonic()
    if "laws" not in options.skip:
        results = run_laws(options.max_examples, options.workers, options.only, options.task_seconds)
        of_kind = {kind: [r for r in results if r["kind"] == kind] for kind in ("ledger", "fault")}
        evidence["laws"] = sorted(
            (result for result in results if result["kind"] not in of_kind),
            key=lambda result: (result["kind"], result["law"], result["backend"] or ""),
        )
        evidence["ledger"] = sorted(of_kind["ledger"], key=lambda result: result["finding"])
        evidence["faults"] = sorted(of_kind["fault"], key=lambda result: result["fault"])
        evidence["laws_seconds"] = round(time.monotonic() - started, 1)
        print(f"laws and ledger: {evidence['laws_seconds']} s", flush=True)
        _write(options.out / f"{name}.json", evidence)
    if "bench" not in options.skip:
        from treeconv.bench import BenchGrid, format_table, run_bench, save_plot

        report = run_bench(BenchGrid(budget_s=options.bench_seconds))
        evidence["bench"] = report.to_json()
        print(format_table(report), flush=True)
        _write(options.out / f"{name}.json", evidence)
        try:
            save_plot(report, options.out / f"{name}.png")
        except Exception as error:  # noqa: BLE001  (the figures are written; a plot is not worth a run)
            print(f"no plot: {error}", flush=True)
    results = [result for kind in ("laws", "ledger", "faults") for result in evidence.get(kind, [])]
    bad = [result for result in results if is_bad(result)]
    print(f"{len(results)} checks, {len(bad)} failed; {options.out / name}.json", flush=True)
    return 1 if bad else 0


def _write(path: Path, evidence: dict[str, Any]) -> None:
    path.write_text(json.dumps(evidence, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
