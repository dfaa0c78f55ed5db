"""Whose scratch a call of the Triton backend takes: by stream, in and out of captures, without a GPU."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from treeconv import BackendUnavailable, Coins, DraftTree, to_verify_input
from treeconv.backends import triton as module
from treeconv.backends.registry import get_backend
from treeconv.backends.triton import TritonBackend
from treeconv.cuda_graph import CudaGraphRunner

DEVICE = torch.device("cuda", 0)


class Streams:
    """Stands for the current stream, and for whether it is being captured."""

    handle, capturing = 1, False

    def workspace(self, backend, handle, *, capturing=False):
        self.handle, self.capturing = handle, capturing
        return backend._workspace(DEVICE)


@pytest.fixture
def streams(monkeypatch):
    made = Streams()
    current = lambda _: SimpleNamespace(cuda_stream=made.handle, synchronize=lambda: None)  # noqa: E731
    monkeypatch.setattr(torch.cuda, "current_stream", current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: made.capturing)
    monkeypatch.setattr(module, "Workspace", lambda _: object())
    return made


def test_each_stream_has_its_own_and_a_capture_takes_what_its_stream_has(streams):
    backend = TritonBackend()
    first = streams.workspace(backend, 1)
    assert streams.workspace(backend, 1) is first
    assert streams.workspace(backend, 1, capturing=True) is first
    second = streams.workspace(backend, 2)
    assert second is not first
    third = streams.workspace(backend, 3, capturing=True)  # the spare
    assert third is not first
    assert third is not second
    assert streams.workspace(backend, 3) is third


def test_a_capture_on_a_new_stream_needs_a_call_outside_before_it(streams):
    """One call lays out one spare; the refusal says which of the two it was, and what to do."""
    backend = TritonBackend()
    with pytest.raises(BackendUnavailable, match="before its first call, but must be called once outside"):
        streams.workspace(backend, 2, capturing=True)
    streams.workspace(backend, 1)
    taken = streams.workspace(backend, 2, capturing=True)
    assert streams.workspace(backend, 2, capturing=True) is taken
    says = "on a new stream, but .* taken by another stream: it must be called once more outside a capture"
    with pytest.raises(BackendUnavailable, match=says):
        streams.workspace(backend, 3, capturing=True)
    streams.workspace(backend, 1)
    assert streams.workspace(backend, 3, capturing=True) is not taken


def test_a_runner_has_scratch_of_its_own():
    """Two of them, or one and a stream of the caller's, may have one handle of torch's pool of streams."""
    shared = get_backend("triton")
    sizes = {"num_draft_tokens": 4, "vocab_size": 8, "depth_cap": 2, "batch_sizes": (1,)}
    device = shared.traits.devices[0]
    runners = [CudaGraphRunner(given, device=device, **sizes) for given in ("triton", shared, "triton")]
    held = [id(backend._workspaces) for backend in (shared, *(runner.backend for runner in runners))]
    assert len(set(held)) == 4
    assert {runner.backend.name for runner in runners} == {"triton"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_runners_replay_on_two_streams_at_once():
    """As many runners as the pool has streams and more, so that some captured on one handle."""
    torch.manual_seed(0)
    slots, vocab = 8, 163840
    batch = to_verify_input([DraftTree.chain(range(slots))] * 2, device="cuda")
    coins = Coins(torch.rand((2, slots), device="cuda"), torch.rand(2, device="cuda"))
    runners, rows, want = [], [], []
    for _ in range(36):
        made = CudaGraphRunner(
            "triton", num_draft_tokens=slots, vocab_size=vocab, depth_cap=4, batch_sizes=(2,)
        )
        made.capture()
        rows.append(torch.randn((2, slots, vocab), device="cuda").bfloat16())
        want.append(made.replay(batch, rows[-1], 1.0, coins).tokens)
        runners.append(made)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for first, second in ((0, 32), (1, 33), (2, 34), (0, 1)):
        for _ in range(50):
            outputs = []
            for stream, which in zip(streams, (first, second), strict=True):
                with torch.cuda.stream(stream):
                    outputs.append(runners[which].replay(batch, None, 1.0, coins))
            torch.cuda.synchronize()
            assert [output.tokens for output in outputs] == [want[first], want[second]]
