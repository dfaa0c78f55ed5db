"""Several programs a request decide as one does, in the interpreter too: see :mod:`concurrent_programs`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("on a device programs run side by side anyway", allow_module_level=True)
os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from treeconv.kernels.verify_tree import INTERPRETED

if not INTERPRETED:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)
if not hasattr(os, "fork"):
    pytest.skip("this system cannot fork", allow_module_level=True)
sys.path.insert(0, str(Path(__file__).resolve().parent))

import concurrent_programs
from concurrent_programs import programs_a_request

from treeconv.backends import triton as backend
from treeconv.backends.triton import TritonBackend
from treeconv.convert import to_verify_input
from treeconv.filters import Cuts, Filters
from treeconv.kernels import launch
from treeconv.tree import Coins, DraftTree

OUTPUTS = ("accept_index", "accept_token_num", "predicts", "status")
TREES = [DraftTree((-1, 0, 0, 1), (3, 17, 2050, 5)), DraftTree((-1, 0, 1, 2), (0, 1100, 7, 2090))]


def call(rng, V, dtype, peak):
    """Two requests whose rows have a peak at a drafted child, more or less of the mass."""
    logits = rng.normal(size=(2, 4, V)) * 2
    logits[0, 0, 17] += peak
    logits[1, 0, 1100] += peak
    logits[1, 1, 7] += peak
    coins = Coins(*(torch.from_numpy(rng.random(shape, np.float32)) for shape in ((2, 4), (2,))))
    return to_verify_input(TREES), torch.from_numpy(logits).to(dtype), coins


@pytest.mark.parametrize(
    ("cut", "order"),
    [
        (None, "sequential"),
        (Cuts(top_k=40), "sequential"),
        (Cuts(top_p=0.9), "joint"),
        (Cuts(top_k=2, top_p=0.7, min_p=0.01), "sequential"),
    ],
    ids=str,
)
@pytest.mark.parametrize(("V", "dtype"), [(2100, torch.float32), (4099, torch.bfloat16)])
def test_any_number_of_programs_decides_alike(monkeypatch, cut, order, V, dtype):
    """Searched rows and rows decided by bounds; the second call finds the first one's words."""
    rng = np.random.default_rng(V)
    chunks = -(-V // 1024)
    one, many = TritonBackend(), TritonBackend()
    for peak in (0.0, 14.0):
        batch, logits, coins = call(rng, V, dtype, peak)
        filters = None if cut is None else Filters.of([cut, cut], V, order)
        given = (batch, logits, torch.tensor([0.8, 1.0]), coins, 4, filters)
        want = one.verify(*given)
        with programs_a_request(monkeypatch, chunks):
            got = many.verify(*given)
        for name in OUTPUTS:
            assert getattr(got, name).tolist() == getattr(want, name).tolist(), (peak, name)


def test_a_wait_without_end_is_found(monkeypatch):
    """The harness itself: programs that end before they publish leave the first one waiting."""
    fork = os.fork

    def stillborn():
        child = fork()
        if child == 0:
            os._exit(0)
        return child

    monkeypatch.setattr(concurrent_programs, "_LIMIT_S", 3)
    monkeypatch.setattr(os, "fork", stillborn)
    batch, logits, coins = call(np.random.default_rng(0), 2100, torch.float32, 0.0)
    with programs_a_request(monkeypatch, 3), pytest.raises(TimeoutError, match="3 programs a request wait"):
        TritonBackend().verify(batch, logits, torch.ones(2), coins, 4)


def test_only_where_programs_can_wait_do_they_share_a_request(monkeypatch):
    for hip, capability, can in ((None, (9, 0), True), (None, (7, 5), False), ("6.4", (9, 0), False)):
        monkeypatch.setattr(torch.version, "hip", hip)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, answer=capability: answer)
        assert launch.speaks_ptx.__wrapped__(torch.device("cuda", 0)) is can
    monkeypatch.setattr(backend, "INTERPRETED", False)
    monkeypatch.setattr(backend, "speaks_ptx", lambda _: False)
    assert TritonBackend.programs_for(1, 163840, torch.device("cuda", 0)) == 1
