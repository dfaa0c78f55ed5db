"""The device laws at small size on the CPU: right samplers keep them, wrong ones break their own."""

from __future__ import annotations

import os

import fake_sgl_kernel as fake
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from device_faults import FAULTS, broken_by

from treeconv import LawBroken, _gpu_checks, to_draft_trees
from treeconv._gpu_checks import Sizes
from treeconv._scale import random_batch
from treeconv.backends.base import BackendTraits
from treeconv.backends.eager import EagerBackend
from treeconv.backends.reference import ReferenceBackend
from treeconv.backends.sgl import SglBackend, SglKernels
from treeconv.cuda_graph import CudaGraphRunner
from treeconv.gpu_laws import GPU_LAWS, gpu_law_named

SMALL = Sizes.small()
KERNELS = SglKernels(
    "fake",
    {name: getattr(fake, name) for name in ("tree_speculative_sampling_target_only", "verify_tree_greedy")},
)
NAMES = [law.name for law in GPU_LAWS if law.subject in ("backend", "graph") and law.name != "sgl-agreement"]


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    """The stand-in kernel runs on the CPU."""
    traits = lambda self: BackendTraits(reports_status=not self.raw, graph_safe=True, devices=("cpu",))  # noqa: E731
    monkeypatch.setattr(SglBackend, "traits", property(traits))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("backend", [EagerBackend(), ReferenceBackend()], ids=lambda backend: backend.name)
def test_right_samplers_keep(name, backend):
    law = gpu_law_named(name)
    assert law.why_not(backend, "cpu") is None
    assert law.run(backend, "cpu", SMALL) > 0


@pytest.mark.parametrize("name", [*NAMES, "duplicate-siblings", "greedy-operator"])
def test_guarded_sgl_keeps(name):
    assert gpu_law_named(name).run(SglBackend(kernels=KERNELS), "cpu", SMALL) > 0


@pytest.mark.parametrize(
    "name", ["graph-replay", "covered-support", "duplicate-siblings", "poisoned-buffers"]
)
def test_raw_sgl_breaks(name):
    with pytest.raises(LawBroken, match=f"law broken: {name}"):
        gpu_law_named(name).run(SglBackend(raw=True, kernels=KERNELS), "cpu", SMALL)


def test_device_converter():
    pytest.importorskip("triton")
    small = Sizes(**{**vars(SMALL), "wide_batch": 2})
    assert gpu_law_named("device-converter").run(None, "cpu", small) > 0


def small_backends():
    """What the faults are put around here: the eager sampler, and the stand-in for SGLang's kernels."""
    operators = {
        name: getattr(fake, name)
        for name in (
            "tree_speculative_sampling_target_only",
            "verify_tree_greedy",
            "build_tree_kernel_efficient",
        )
    }
    return {"triton": EagerBackend(), "sgl": SglBackend(kernels=SglKernels("fake", operators))}


@pytest.mark.parametrize(
    "fault", [fault for fault in FAULTS if not fault.takes_width], ids=lambda fault: fault.name
)
def test_every_device_law_kills_its_faults(fault, monkeypatch):
    pytest.importorskip("triton")
    raw = SglBackend(raw=True, kernels=KERNELS)
    monkeypatch.setattr(_gpu_checks, "get_backend", lambda name: {"sgl-raw": raw}[name])
    sizes = Sizes(**{**vars(SMALL), "wide_batch": 2}) if fault.around == "converter" else SMALL
    message = broken_by(fault, small_backends(), "cpu", sizes)
    assert message is not None, f"{fault.name} survives {fault.law}"
    assert "got:" in message
    assert "seed 0" in message


@pytest.mark.parametrize("name", ["sgl-agreement", "sgl-build-tree"])
def test_right_samplers_keep_the_laws_about_sgl(name, monkeypatch):
    raw = SglBackend(raw=True, kernels=KERNELS)
    monkeypatch.setattr(_gpu_checks, "get_backend", lambda name: {"sgl-raw": raw}[name])
    assert gpu_law_named(name).run(small_backends()["sgl"], "cpu", SMALL) > 0


def test_every_device_law_has_a_fault():
    assert {fault.law for fault in FAULTS} == {law.name for law in GPU_LAWS}


def test_stale_coins_break_graph_coins(monkeypatch):
    call = CudaGraphRunner._call

    def stale(self, size, *, draws):
        if draws:
            self._generator.manual_seed(1)
        call(self, size, draws=draws)

    monkeypatch.setattr(CudaGraphRunner, "_call", stale)
    with pytest.raises(LawBroken, match="drew the same coins"):
        gpu_law_named("graph-coins").run(EagerBackend(), "cpu", SMALL)


def test_laws_say_where_they_do_not_apply():
    law = gpu_law_named("graph-replay")
    assert law.why_not(EagerBackend(), "cuda") == "the backend waits for the device: no graph can hold it"
    assert law.why_not(ReferenceBackend(), "cuda") == "the backend does not run on cuda"
    assert gpu_law_named("device-converter").why_not(EagerBackend(), "cpu")
    assert gpu_law_named("duplicate-siblings").why_not(EagerBackend(), "cpu") == "about SGLang's own kernels"
    assert gpu_law_named("graph-replay").why_not(None, "cpu") == "a law about a backend"


def test_padding_is_found_by_the_poison():
    """The slots that poisoned_buffers fills are exactly those behind the trees."""
    wide = random_batch(np.random.default_rng(0), 20, 6, 12, "cpu")
    batch = wide.batch
    size = (batch.retrieve_next_token >= 0).sum(1) + (batch.retrieve_next_sibling >= 0).sum(1) + 1
    assert size.tolist() == [len(tree) for tree in to_draft_trees(batch)]


def test_offsets_say_which_shapes_were_not_judged(monkeypatch):
    """A card too small for a shape that passes 2**32 has not kept the law there."""
    law = gpu_law_named("offsets-64-bit")
    sizes = Sizes(**{**vars(SMALL), "offset_shapes": ((9, 4, 50), (9, 4, 60))})
    assert law.run(EagerBackend(), "cpu", sizes).left_out == ()
    monkeypatch.setattr(_gpu_checks, "free_bytes", lambda _: _gpu_checks.ROOM + 2.4 * 9 * 4 * 50)
    judged = law.run(EagerBackend(), "cpu", sizes)
    assert (judged, judged.left_out) == (9, ("9 x 4 x 60: 4968 bytes do not fit beside the rest",))
    monkeypatch.setattr(_gpu_checks, "free_bytes", lambda _: 0)
    judged = law.run(EagerBackend(), "cpu", sizes)
    assert (judged, len(judged.left_out)) == (0, 2)
