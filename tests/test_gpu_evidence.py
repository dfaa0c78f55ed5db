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

import fake_sgl_kernel as fake  # noqa: E402
import gpu_evidence  # noqa: E402
from device_faults import FAULTS  # noqa: E402

from fuzz.findings import LEDGER  # noqa: E402
from treeconv import _gpu_checks, gpu_laws  # noqa: E402
from treeconv._gpu_checks import Sizes  # noqa: E402
from treeconv.backends import registry  # noqa: E402
from treeconv.backends.eager import EagerBackend  # noqa: E402
from treeconv.backends.sgl import SglBackend, SglKernels  # noqa: E402
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


@pytest.fixture
def small_card(monkeypatch):
    """A card on which the first shape of the offsets fits, and the second does not; on the CPU, small."""
    sizes = Sizes(**{**vars(Sizes.small()), "offset_shapes": ((9, 4, 50), (9, 4, 60))})
    law = next(law for law in GPU_LAWS if law.name == "offsets-64-bit")

    class Here:
        name, subject, why_not = law.name, law.subject, staticmethod(lambda *_: None)

        @staticmethod
        def run(backend, device, sizes_of_a_gpu):
            del device, sizes_of_a_gpu
            return law.run(backend, "cpu", sizes)

    monkeypatch.setattr(_gpu_checks, "free_bytes", lambda _: _gpu_checks.ROOM + 9.2 * 9 * 4 * 50 + 1)
    monkeypatch.setattr(gpu_laws, "gpu_law_named", lambda _: Here)
    monkeypatch.setattr(gpu_laws, "GPU_LAWS", (Here,))
    kernels = SglKernels(
        "sgl_kernel 0.4.5",
        {"tree_speculative_sampling_target_only": fake.tree_speculative_sampling_target_only},
    )
    held = {"sgl-raw": SglBackend(raw=True, kernels=kernels), "eager": EagerBackend()}
    monkeypatch.setattr(registry, "_loaded", held)


@pytest.mark.usefixtures("small_card")
def test_shapes_that_do_not_fit_are_named_beside_what_was_kept(capsys):
    whole = gpu_evidence.run_task({"kind": "device", "law": "offsets-64-bit", "backend": "eager"})
    assert (whole["result"], whole["decisions"], "message" in whole) == ("kept", 18, False)
    result = gpu_evidence.run_task({"kind": "device", "law": "offsets-64-bit", "backend": "sgl-raw"})
    assert (result["result"], result["decisions"]) == ("kept", 9)
    assert result["message"] == "not judged: 9 x 4 x 60: 19872 bytes do not fit beside the rest"
    gpu_evidence._say(result)
    assert "not judged: 9 x 4 x 60" in capsys.readouterr().out


@pytest.mark.usefixtures("small_card")
def test_a_finding_that_does_not_fit_is_no_unexpected_pass():
    result = gpu_evidence.run_task({"kind": "ledger", "finding": "sgl-offsets-wrap"})
    assert (result["result"], result["ok"]) == ("not launched", True)
    assert "430 x 64 x 163840" in result["message"]
    assert "9 x 4 x 60" in result["message"]


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
