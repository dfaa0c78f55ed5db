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


def steps_of(backend):
    """Rounds of words that each request's programs exchanged, over all calls: epochs count them."""
    (workspace,) = backend._workspaces.values()
    return workspace.epochs.tolist()


def beside(share):
    """A float32 between its neighbours."""
    return np.nextafter(share, np.float32(0)), share, np.nextafter(share, np.float32(2))


def one_row(V, masses, child, coin, final, cuts, order):
    """A root with one child, over one row of dyadic masses in 2^-12; the child's row is one token."""
    B = len(cuts)
    rows = torch.zeros((B, 2, V), device=DEVICE)
    for token, mass in masses.items():
        rows[:, 0, token] = mass / 2**12
    rows[:, 1, 0] = 1.0
    trees = to_verify_input([DraftTree((-1, 0), (0, child))] * B, 2, device=DEVICE)
    accept = torch.tensor(coin, dtype=torch.float32, device=DEVICE)[:, None].expand(B, 2).contiguous()
    coins = Coins(accept, torch.tensor(final, dtype=torch.float32, device=DEVICE))
    return trees, rows, coins, Filters.of(cuts, V, order, DEVICE)


@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_decisions_by_bounds_are_those_of_the_cut(order):
    """A large token, several others in its chunk and elsewhere; every coin at and beside a boundary."""
    V = 2100  # three chunks
    masses = {5: 64, 40: 3, 41: 3, 1030: 1, 1100: 2056, 1101: 900, 1102: 900, 1500: 100, 2050: 64, 2051: 5}
    assert sum(masses.values()) == 2**12
    edges = np.unique(np.cumsum([masses[token] for token in sorted(masses)]) / 2**12)
    near = np.float32([[np.nextafter(np.float32(e), np.float32(0)), e] for e in edges[:-1]]).ravel()
    some = np.float32(np.linspace(0.001, 0.999, 11))
    cuts = (Cuts(top_k=7, top_p=0.75), Cuts(top_k=4), Cuts(top_k=9, min_p=2**-7), Cuts(top_k=2))
    for cut in cuts[: 1 if INTERPRETED else 4]:
        for child in (1100, 1101, 40, 7)[: 2 if INTERPRETED else 4]:
            for coin, final in ((near, some[np.arange(len(near)) % 11]), (np.full(len(near), 0.9999), near)):
                call = one_row(V, masses, child, coin, final, [cut] * len(near), order)
                want = EagerBackend().verify_probs(*call[:3], 3, call[3])
                assert_alike(TritonBackend().verify_probs(*call[:3], 3, call[3]), want)


def test_a_row_is_searched_only_where_a_decision_depends_on_its_cut():
    """Epochs tell: one exchange a visited row by bounds, more where the cut had to be known."""
    V = 2100
    one_large = {1100: 4000, **dict.fromkeys(range(6, 96), 1), 2000: 6}
    two_large = {1100: 2200, 2050: 16, 2060: 1500, **dict.fromkeys(range(2061, 2099), 10)}
    cases = [  # what is kept is known to lie between the largest tokens and all
        (one_large, 50, 1100, 0.5, 0.5, 0),
        (one_large, 50, 1100, 0.99, 0.5, 1),  # its share of what is kept is 4000 of 4096, or more
        (one_large, 50, 1100, 0.98, 0.5, 1),
        (one_large, 50, 6, 0.5, 0.5, 0),
        (one_large, 50, 6, 0.5, 0.001, 1),  # may be kept or not, and the bonus then
        (one_large, 50, 6, 0.0001, 0.5, 1),  # or accepted
        (two_large, 20, 1100, 0.99, 0.3, 1),  # surely rejected: the largest token is no bonus
        (two_large, 20, 2060, 0.3, 0.3, 0),
        (two_large, 20, 2060, 0.375, 0.3, 1),  # 1500 of 3888 are kept of 4096
        (two_large, 20, 2060, 0.42, 0.3, 0),
    ]
    for masses, k, child, coin, final, searched in cases:
        backend = TritonBackend()
        call = one_row(V, masses, child, [coin], [final], [Cuts(top_k=k)], "sequential")
        got = backend.verify_probs(*call[:3], 3, call[3])
        assert_alike(got, EagerBackend().verify_probs(*call[:3], 3, call[3]))
        steps, visited = steps_of(backend)[0], int(got.accept_token_num[0]) + 1
        assert min(1, steps - visited) == searched, (child, coin, final)


@pytest.mark.parametrize("order", FILTER_ORDERS)
@pytest.mark.parametrize(
    "cut", [Cuts(top_k=3), Cuts(top_k=20), Cuts(top_p=0.75), Cuts(top_p=0.9, min_p=0.02)]
)
def test_chunks_of_both_halves_are_cut_as_eager_cuts_them(cut, order):
    """A row's chunks lie in two halves of a warp's width; its tokens here in chunks 30, 31, 32 and 33."""
    V = 34 * 1024
    rng = np.random.default_rng(3)
    sizes = [1200, 1000, 800] + [60] * 6 + [25] * 10 + [12] * 20
    large = [30 * 1024 + 5, 32 * 1024 + 7, 33 * 1024 + 9]
    others = np.setdiff1d(np.arange(30 * 1024, V), large)
    tokens = large + rng.choice(others, len(sizes) + 2**12 - sum(sizes) - 3, replace=False).tolist()
    masses = dict(zip(tokens, sizes + [1] * (len(tokens) - len(sizes)), strict=True))
    finals = np.float32([0.3, 0.62, 0.998, 0.1, 0.8])[: 3 if INTERPRETED else 5] + 2**-14
    for child in tokens[1], tokens[8]:
        call = one_row(V, masses, child, [0.9999] * len(finals), finals, [cut] * len(finals), order)
        want = EagerBackend().verify_probs(*call[:3], 3, call[3])
        assert_alike(TritonBackend().verify_probs(*call[:3], 3, call[3]), want)


@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_ties_at_a_cut_are_cut_as_eager_cuts_them(order):
    """Children are among the kept ties, at their end and behind it."""
    V, k = 2800, 40  # three chunks
    rng = np.random.default_rng(7)
    sizes = [200, 200, 200] + [60] * 9 + [25] * 14 + [24] * 30 + [8] * 10  # no one peak, so bounds do not do
    tokens = rng.choice(V, len(sizes) + 2**12 - sum(sizes), replace=False).tolist()
    masses = dict(zip(tokens, sizes + [1] * (len(tokens) - len(sizes)), strict=True))
    falling = sorted(masses, key=lambda token: (-masses[token], token))
    kept = sorted(falling[:k])
    held = sum(masses[token] for token in kept)
    ends = np.cumsum([masses[token] for token in kept])[[11, 35] if INTERPRETED else slice(0, k - 1)] / held
    finals = np.float32(
        [[np.nextafter(np.float32(end), np.float32(0)), end + 2**-13] for end in ends]
    ).ravel()
    for cut in (Cuts(top_k=k), Cuts(top_k=k, top_p=0.75), Cuts(top_k=k, top_p=0.9375, min_p=2**-3)):
        for child in (kept[-1], falling[k - 1], falling[k]):
            coins = np.where(np.arange(len(finals)) == 0, masses[child] / held * 0.99, 0.9999)
            call = one_row(V, masses, child, coins, finals, [cut] * len(finals), order)
            backend = TritonBackend()
            got = backend.verify_probs(*call[:3], 3, call[3])
            assert_alike(got, EagerBackend().verify_probs(*call[:3], 3, call[3]))


@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_a_goal_at_the_end_of_a_token_ends_the_search(order):
    """Bounds of wide bins never tell it from one a little behind; 2**24 units to the next token."""
    masses = {3: 1800, 5: 900, 6: 500, 1: 500, 0: 200, 2: 196}
    shares = [near for share in (1800, 2700, 3700) for near in beside(np.float32(share / 2**12))]
    cuts = [Cuts(top_k=top_k, top_p=float(share)) for share in shares for top_k in (None, 5)]
    coins = np.full(len(cuts), np.float32(1 - 2**-13))
    call = one_row(9, masses, 3, coins, coins, cuts, order)
    backend = TritonBackend()
    got = backend.verify_probs(*call[:3], 3, call[3])
    assert_alike(got, EagerBackend().verify_probs(*call[:3], 3, call[3]))
    assert max(steps_of(backend)) <= 16


@pytest.mark.parametrize("top_k", [None, 22])
@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_a_searched_cut_is_exact_at_every_boundary_of_top_p(order, top_k):
    """Tokens fall with their ids, so that the last coin emits the last that is kept."""
    V = 1500  # two chunks
    sizes = np.array([100] * 12 + [88] * 8 + [72] * 4 + [25] * 50 + [12] * 20 + [9] * 6 + [1] * 360)
    assert sizes[:22].sum() == 2048  # so that shares of theirs are dyadic, too
    assert sizes.sum() == 2**12
    ids = np.arange(len(sizes)) * 3  # in both chunks
    held = 2048 if top_k and order == "sequential" else 2**12
    ends = np.cumsum(sizes)[[12, 20] if INTERPRETED else [2, 12, 13, 19, 20, 21, 22]]
    shares = np.float32([near for end in ends for near in beside(np.float32(end / held))])
    cuts = [Cuts(top_k=top_k, top_p=float(share)) for share in shares if share < 1]
    coins = np.full(len(cuts), np.float32(1 - 2**-13))
    call = one_row(V, dict(zip(ids.tolist(), sizes.tolist(), strict=True)), 7, coins, coins, cuts, order)
    backend = TritonBackend()
    got = backend.verify_probs(*call[:3], 3, call[3])
    before = np.cumsum(sizes) - sizes
    for request, cut in enumerate(cuts):
        kept = before < float(cut.top_p) * held
        kept[top_k:] = kept[top_k:] & (top_k is None)
        assert int(got.predicts[2 * request]) == ids[kept][-1], cut
    assert all(steps > 2 for steps in steps_of(backend)[: len(cuts)]), "searched"


@pytest.mark.parametrize("order", FILTER_ORDERS)
@pytest.mark.parametrize("cut", [Cuts(top_k=40), Cuts(top_p=0.9), Cuts(top_k=60, top_p=0.8, min_p=0.001)])
def test_a_row_of_16_bits_is_searched_in_two_rounds(cut, order):
    """One to count its units, one for what is above the cut and at it; epochs tell."""
    V = 2800  # three chunks
    rng = np.random.default_rng(7)
    logits = torch.from_numpy(9 + 1.5 * rng.standard_normal((3, 2, V))).to(DEVICE, torch.bfloat16)
    trees = to_verify_input([DraftTree((-1, 0), (0, 1))] * 3, 2, device=DEVICE)
    coins = Coins(torch.full((3, 2), 0.9999, device=DEVICE), torch.tensor([0.1, 0.6, 0.97], device=DEVICE))
    call = trees, logits, torch.ones(3, device=DEVICE), coins, 2, Filters.of([cut] * 3, V, order, DEVICE)
    backend = TritonBackend()
    got = backend.verify(*call)
    assert got.accept_token_num.tolist() == [0, 0, 0]
    assert_alike(got, EagerBackend().verify(*call))
    assert steps_of(backend)[:3] == [3, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_tokens_mass_is_its_own(dtype):
    """Not its chunk's weight, which makes up for a rounded exponent: by 1e-5 far from zero."""
    T = 2.0**-7
    tree = DraftTree((-1, 0), (1, 0))
    tops = torch.linspace(3.0, 5.5, 24).to(dtype).double()
    rows = torch.stack([tops, tops - 2.5 * T, torch.zeros_like(tops)], dim=1).to(dtype)
    near = rows.double() / T
    shares = (near - near[:, :1]).exp()
    shares = shares[:, 0] / shares.sum(dim=1)
    kept = {
        "alone": (shares * (1 - 2e-6)).float(),
        "and the next": (shares * (1 + 2e-6)).float(),
    }
    below_one = 1 - 2.0**-24
    held = 0
    for what, top_p in kept.items():
        certain = (top_p.double() / shares - 1).abs() > 1e-6
        alone = (top_p.double() < shares).tolist()
        count = len(tops)
        filters = Filters(
            torch.full((count,), 3, device=DEVICE),
            top_p.to(DEVICE),
            torch.zeros(count, device=DEVICE),
            "joint",
        )
        coins = Coins(
            torch.full((count, 2), below_one - 2e-6, device=DEVICE),
            torch.full((count,), below_one, device=DEVICE),
        )
        given = rows[:, None].expand(-1, 2, -1).contiguous().to(DEVICE)
        output = TritonBackend().verify(
            to_verify_input([tree] * count, device=DEVICE),
            given,
            torch.full((count,), T, device=DEVICE),
            coins,
            2,
            filters,
        )
        tokens = output.predicts.view(count, 2).tolist()
        for request in certain.nonzero().flatten().tolist():
            accepted = output.accept_token_num[request].item() == 1
            assert accepted == alone[request], (what, request, float(tops[request]))
            last = tokens[request][1 if accepted else 0]
            assert last == (0 if alone[request] else 1), (what, request)
            held += 1
    assert held > 20
