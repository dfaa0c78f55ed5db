"""The ledger's logic, and each finding against a stand-in for the kernel, faults included."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import fake_sgl_kernel as fake
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fuzz import findings
from fuzz.findings import LEDGER, replay_device_case, stored_case
from treeconv import InvalidArgument, LawBroken, _gpu_checks
from treeconv.backends.base import BackendTraits
from treeconv.backends.sgl import SglBackend, SglKernels
from treeconv.gpu_laws import GPU_LAWS
from treeconv.laws import BACKEND_LAWS, law_named
from treeconv.ledger import Finding, Ledger, NotLaunched
from treeconv.replay import replay_entry

KERNELS = SglKernels(
    "sgl_kernel 0.4.5",
    {"tree_speculative_sampling_target_only": fake.tree_speculative_sampling_target_only},
)
ONE = Finding("a", "greedy", "mine", ("1.0",), "wrong", "here")


def breaks():
    raise LawBroken("law broken: greedy", law="greedy")


def passes():
    return 3


def launched():
    pytest.fail("a quarantined finding was launched")


def test_a_tolerated_finding_must_fail():
    ledger = Ledger([ONE])
    found = ledger.judge("a", "1.0", {"case": breaks, "suite": breaks})
    assert (found.outcome, found.ok) == ("found again", True)
    assert "case: law broken" in found.message
    for attempts in ({"case": passes}, {"case": breaks, "suite": passes}):
        verdict = ledger.judge("a", "1.0", attempts)
        assert (verdict.outcome, verdict.ok) == ("unexpected pass", False)
        assert "broke no law with 1.0" in verdict.message


def test_another_version_may_be_right():
    verdict = Ledger([ONE]).judge("a", "2.0", {"case": passes})
    assert (verdict.outcome, verdict.ok) == ("absent in this version", True)
    assert Ledger([ONE]).judge("a", "2.0", {"case": breaks}).outcome == "found again"
    assert Ledger([ONE]).explains("greedy", "mine", "1.0")
    assert not Ledger([ONE]).explains("greedy", "mine", "2.0")
    assert not Ledger([ONE]).explains("greedy", "other", "1.0")


def test_a_quarantined_finding_is_never_launched():
    ledger = Ledger([replace(ONE, quarantine="hangs the device")])
    verdict = ledger.judge("a", "1.0", {"case": launched})
    assert (verdict.outcome, verdict.ok, verdict.message) == ("quarantined", True, "hangs the device")


def test_nothing_is_launched_where_the_backend_is_not():
    assert Ledger([ONE]).judge("a", None, {"case": launched}).outcome == "not launched"


def test_an_error_is_no_finding():
    def cannot_run():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        Ledger([ONE]).judge("a", "1.0", {"case": cannot_run})
    with pytest.raises(InvalidArgument, match="at least one"):
        Ledger([ONE]).judge("a", "1.0", {})


def test_entries_must_say_something():
    with pytest.raises(InvalidArgument, match="id='a' twice"):
        Ledger([ONE, ONE])
    with pytest.raises(InvalidArgument, match="source=''"):
        replace(ONE, source="")
    with pytest.raises(InvalidArgument, match=r"versions=\(\)"):
        replace(ONE, versions=())


def test_every_finding_names_a_law_and_a_stored_case():
    laws = {law.name for law in (*BACKEND_LAWS, *GPU_LAWS)}
    assert len(LEDGER) == 7
    for finding in LEDGER:
        assert finding.law in laws
        assert stored_case(finding).backend == finding.backend
        assert finding.sees


def test_stored_cases_are_what_the_code_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(findings, "CORPUS", tmp_path)
    assert findings.write_cases() == {finding.id: finding.case for finding in LEDGER}


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    traits = lambda self: BackendTraits(reports_status=not self.raw, graph_safe=True, devices=("cpu",))  # noqa: E731
    monkeypatch.setattr(SglBackend, "traits", property(traits))


def replay(finding, backend):
    entry = stored_case(finding)
    if finding.case.startswith("device/"):
        return replay_device_case(entry, backend, "cpu")
    if finding.law == "bad-rows":  # the raw kernel claims no status: that is the finding
        return law_named("bad-rows").run(entry.case, backend)
    return replay_entry(entry, backend)


# The stand-in keeps its offsets in 64 bits, and 18 GB are too many here.
CASES = [finding for finding in LEDGER if finding.id != "sgl-offsets-wrap"]


@pytest.mark.parametrize("finding", CASES, ids=lambda finding: finding.id)
def test_stored_cases_break_the_raw_kernel_and_not_the_guarded(finding):
    with pytest.raises(LawBroken):
        replay(finding, SglBackend(raw=True, kernels=KERNELS))
    assert replay(finding, SglBackend(kernels=KERNELS)) > 0


def test_what_cannot_be_launched_here_is_no_pass():
    """A finding about tensors of 18 GB on a small card: neither found again nor fixed."""

    def too_small():
        raise NotLaunched("430 x 64 x 163840 does not fit")

    ledger = Ledger([ONE])
    verdict = ledger.judge("a", "1.0", {"case": too_small, "suite": too_small})
    assert (verdict.outcome, verdict.ok) == ("not launched", True)
    assert verdict.message == "case: 430 x 64 x 163840 does not fit\nsuite: 430 x 64 x 163840 does not fit"
    found = ledger.judge("a", "1.0", {"case": breaks, "suite": too_small})
    assert (found.outcome, found.message) == (
        "found again",
        "case: law broken: greedy\nsuite, not launched: 430 x 64 x 163840 does not fit",
    )
    assert ledger.judge("a", "1.0", {"case": passes, "suite": too_small}).outcome == "unexpected pass"


def test_the_offsets_case_says_where_it_does_not_fit(monkeypatch):
    monkeypatch.setattr(_gpu_checks, "free_bytes", lambda _: 2**34)
    entry = stored_case(LEDGER["sgl-offsets-wrap"])
    with pytest.raises(NotLaunched, match=r"430 x 64 x 163840: \d+ bytes do not fit beside the rest"):
        replay_device_case(entry, SglBackend(raw=True, kernels=KERNELS), "cpu")
