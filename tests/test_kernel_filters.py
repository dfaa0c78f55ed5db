"""Filters inside the Triton sampler, beside ``eager``, which the laws judge.

Without a CUDA device the kernel runs in Triton's interpreter, at small sizes; the filter laws judge it on
a GPU.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from treeconv.backends.eager import EagerBackend
from treeconv.backends.triton import TritonBackend
from treeconv.convert import to_verify_input
from treeconv.filters import FILTER_ORDERS, Cuts, Filters
from treeconv.kernels.verify_tree import INTERPRETED
from treeconv.tree import Coins, DraftTree

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not INTERPRETED:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)


def batch(rng, B, V):
    """Trees of one to six nodes, coins off every boundary, and filters of every kind, some off."""
    trees, cuts = [], []
    for _ in range(B):
        n = int(rng.integers(1, 7))
        parents = [-1] + [int(rng.integers(0, node)) for node in range(1, n)]
        trees.append(DraftTree(tuple(parents), tuple(int(t) for t in rng.choice(V, n, replace=False))))
        cuts.append(
            Cuts(
                top_k=rng.choice([None, 1, 2, 3, V // 2, V]),
                top_p=float(rng.choice([1.0, 0.9, 0.5, 0.1])),
                min_p=float(rng.choice([0.0, 0.05, 0.5, 1.0])),
            )
        )
    coins = (rng.integers(0, 2**12, (B, 6)) + 0.37) / 2**12, (rng.integers(0, 2**12, B) + 0.37) / 2**12
    tensors = [torch.tensor(c, dtype=torch.float32, device=DEVICE) for c in coins]
    return to_verify_input(trees, 6, device=DEVICE), Coins(*tensors), cuts


def assert_alike(got, want):
    for name in ("accept_index", "accept_token_num", "predicts", "status"):
        assert getattr(got, name).tolist() == getattr(want, name).tolist(), name


@pytest.mark.parametrize("order", FILTER_ORDERS)
@pytest.mark.parametrize("V", [9, 1500])
def test_dyadic_laws_are_cut_as_eager_cuts_them(order, V):
    """Few masses, so that ties at a cut are the rule; rows of one large mass, and of many small ones."""
    rng = np.random.default_rng([V, len(order)])
    B = 400 if DEVICE == "cuda" else 24 if V < 100 else 8
    trees, coins, cuts = batch(rng, B, V)
    rows = rng.integers(0, 3, (B, 6, V)) * (rng.random((B, 6, 1)) < 0.5)
    rows = np.where(rng.random(rows.shape) < 4 / V, 64, rows)
    rows[..., 0] += 1
    probs = torch.tensor(rows / 2**12, dtype=torch.float32, device=DEVICE)
    filters = Filters.of(cuts, V, order, DEVICE)
    want = EagerBackend().verify_probs(trees, probs, coins, 7, filters)
    assert_alike(TritonBackend().verify_probs(trees, probs, coins, 7, filters), want)


@pytest.mark.parametrize("order", FILTER_ORDERS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_logits_are_cut_as_eager_cuts_them(order, dtype):
    """Peaked rows, flat ones and ties; greedy, filtered and plain requests side by side."""
    V = 1100
    rng = np.random.default_rng(len(order))
    B = 400 if DEVICE == "cuda" else 12
    trees, coins, cuts = batch(rng, B, V)
    rows = rng.normal(size=(B, 6, V)) * rng.choice([0.0, 0.1, 3.0], (B, 6, 1))
    rows[rng.random(rows.shape) < 3 / V] += 12
    rows[rng.random(rows.shape) < 0.1] = -np.inf
    rows[..., 0] = 0.5
    logits = torch.tensor(rows, dtype=torch.float32).to(dtype).to(DEVICE)
    T = torch.tensor(rng.choice([0.0, 0.6, 1.0, 2.0], B), dtype=torch.float32, device=DEVICE)
    filters = Filters.of(cuts, V, order, DEVICE)
    want = EagerBackend().verify(trees, logits, T, coins, 7, filters)
    assert_alike(TritonBackend().verify(trees, logits, T, coins, 7, filters), want)
