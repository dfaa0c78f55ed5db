"""The evidence runner without a GPU: what it would run, and that nothing a check does takes the run down."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "ci"))

import gpu_evidence  # noqa: E402
from device_faults import FAULTS  # noqa: E402

from fuzz.findings import LEDGER  # noqa: E402
from treeconv.gpu_laws import GPU_LAWS  # noqa: E402
from treeconv.laws import BACKEND_LAWS  # noqa: E402


def test_every_law_meets_every_backend_and_every_finding_is_launched():
    shared, alone = gpu_evidence.all_tasks(7)
    tasks = shared + alone
    generated = {(t["law"], t["backend"]) for t in tasks if t["kind"] == "generated" and t["backend"]}
    assert generated == {(law.name, name) for law in BACKEND_LAWS for name in ("eager", "triton", "sgl")}
    device = {t["law"] for t in tasks if t["kind"] == "device"}
    assert device == {law.name for law in GPU_LAWS}
    assert {t["finding"] for t in tasks if t["kind"] == "ledger"} == {finding.id for finding in LEDGER}
    assert {t["fault"] for t in tasks if t["kind"] == "fault"} == {fault.name for fault in FAULTS}
    assert all(t.get("law") in gpu_evidence.ALONE or t["kind"] == "ledger" for t in alone)


def test_what_fails_a_run():
    for result in ("kept", "does not apply", "not here", "found again", "quarantined", "killed"):
        assert not gpu_evidence.is_bad({"result": result})
    for result in ("broken", "error", "unexpected pass", "survived"):
        assert gpu_evidence.is_bad({"result": result})


def test_a_worker_outlives_what_its_tasks_do():
    """Away backends, exceptions, hangs and a dead process are all results, and the next task still runs."""
    away = {"kind": "device", "law": "covered-support", "backend": "sgl"}
    fine = {"kind": "generated", "law": "round-trip", "backend": None, "max_examples": 3}
    worker = gpu_evidence.Worker(60.0)
    try:
        assert worker.run(away)["result"] in ("not here", "kept")
        wrong = worker.run({"kind": "generated", "law": "no such law", "backend": None, "max_examples": 1})
        assert (wrong["result"], "no such law" in wrong["message"]) == ("error", True)
        worker._process.kill()
        died = worker.run(fine)
        assert (died["result"], "died" in died["message"]) == ("error", True)
        assert worker.run(fine)["result"] == "kept"
        worker._limit_s = 0.0
        assert "it hangs" in worker.run(fine)["message"]
    finally:
        worker.stop()


def test_without_a_device_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "ci" / "gpu_evidence.py")],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert done.returncode == 2
    assert "needs a CUDA device" in done.stderr


def test_the_campaign_log_names_every_fault_that_was_found_by_hand():
    log = (ROOT / "ci" / "evidence" / "sgl-raw-campaign.txt").read_text()
    assert "backends: sgl-raw" in log
    by_hand = {finding.id for finding in LEDGER} - {"sgl-unreported-rows"}  # sgl-raw claims no status
    assert {name for name in by_hand if f"known:    {name}, in the ledger" in log} == by_hand
