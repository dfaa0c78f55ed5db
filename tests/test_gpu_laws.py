"""The device laws at small size on the CPU: right samplers keep them, wrong ones break their own."""

from __future__ import annotations

import os

import fake_sgl_kernel as fake
import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from treeconv import LawBroken, to_draft_trees
from treeconv._gpu_checks import Sizes
from treeconv._scale import random_batch
from treeconv.backends.base import BackendTraits
from treeconv.backends.eager import EagerBackend
from treeconv.backends.reference import ReferenceBackend
from treeconv.backends.sgl import SglBackend, SglKernels
from treeconv.cuda_graph import CudaGraphRunner
from treeconv.gpu_laws import GPU_LAWS, gpu_law_named
from treeconv.tree import VerifyInput, VerifyOutput

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


class Wrong(ReferenceBackend):
    """A right sampler with one fault put in between."""

    name = "wrong"

    def __init__(self, fault):
        self.fault = fault
        self.calls = 0

    def verify(self, batch, logits, temperature, coins, depth_cap):
        self.calls += 1
        return self.fault(self, batch, logits, temperature, coins, depth_cap)

    def right(self, batch, logits, temperature, coins, depth_cap):
        return ReferenceBackend.verify(self, batch, logits, temperature, coins, depth_cap)


def last_request_reads_the_first_ones_row(self, batch, logits, *rest):
    """What a wrapped offset does."""
    logits = logits.clone()
    logits[-1] = logits[0]
    return self.right(batch, logits, *rest)


def ignores_temperature(self, batch, logits, temperature, *rest):
    return self.right(batch, logits, torch.ones_like(temperature), *rest)


def moves_with_the_batch(self, batch, logits, temperature, coins, depth_cap):
    noise = 0.4 * (len(temperature) % 3)
    return self.right(batch, logits.float() + noise * torch.arange(logits.shape[2]) / logits.shape[2], temperature, coins, depth_cap)  # noqa: E501  # fmt: skip


def every_fifth_call_differs(self, batch, logits, temperature, coins, depth_cap):
    out = self.right(batch, logits, temperature, coins, depth_cap)
    return VerifyOutput(**{**vars(out), "predicts": out.predicts + (self.calls % 5 == 0)})


def keeps_the_last_output(self, *call):
    """Old results shine through where nothing new was written."""
    out = self.right(*call)
    old, self.old = getattr(self, "old", None), out
    if old is None or old.predicts.shape != out.predicts.shape:
        return out
    return VerifyOutput(
        **{**vars(out), "predicts": torch.where(out.predicts < 0, old.predicts, out.predicts)}
    )


def drops_a_bad_request_and_its_neighbour(self, batch, logits, temperature, coins, depth_cap):
    logits = torch.where(
        logits.isnan().any(dim=2, keepdim=True).any(dim=1, keepdim=True).any(), torch.nan, logits
    )
    return self.right(batch, logits, temperature, coins, depth_cap)


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (last_request_reads_the_first_ones_row, "offsets-64-bit"),
        (ignores_temperature, "float64-agreement"),
        (moves_with_the_batch, "wide-batch-invariance"),
        (every_fifth_call_differs, "wide-determinism"),
        (every_fifth_call_differs, "graph-replay"),
        (keeps_the_last_output, "poisoned-buffers"),
        (drops_a_bad_request_and_its_neighbour, "graph-replay"),
    ],
)
def test_wrong_samplers_break(fault, name):
    with pytest.raises(LawBroken, match=f"law broken: {name}") as caught:
        gpu_law_named(name).run(Wrong(fault), "cpu", SMALL)
    assert "got:" in str(caught.value)
    assert "seed 0" in str(caught.value)


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
    batch: VerifyInput = wide.batch
    size = (batch.retrieve_next_token >= 0).sum(1) + (batch.retrieve_next_sibling >= 0).sum(1) + 1
    assert size.tolist() == [len(tree) for tree in to_draft_trees(batch)]
