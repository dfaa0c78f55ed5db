"""The Triton sampler against a slow walk in Fractions (probabilities) and float64 (logits).

Without a CUDA device the kernel runs in Triton's interpreter, at small sizes.
"""

from __future__ import annotations

import math
import os
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

import treeconv
from treeconv.backends.registry import get_backend
from treeconv.backends.triton import TritonBackend
from treeconv.convert import to_verify_input
from treeconv.errors import BackendUnavailable, InvalidArgument
from treeconv.filters import Filters
from treeconv.kernels import launch
from treeconv.kernels.verify_tree import INTERPRETED
from treeconv.tree import Coins, DraftTree, RowStatus, VerifyInput

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not INTERPRETED:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)


def gpu(test):
    """Marks a test ``gpu`` and skips it without a CUDA device."""
    return pytest.mark.gpu(pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")(test))


# Programs per request (None: the default); on the CPU they run one after another, so there is one.
PROGRAMS = [1] if DEVICE == "cpu" else [1, None]
BELOW_ONE = 1.0 - 2.0**-24
MANTISSA_STEP = 2.0**-12  # dyadic laws are multiples of it


@pytest.fixture(scope="module")
def backend():
    return TritonBackend()


# ---------------------------------------------------------------------------------------- slow reference


def pointers(parents, N):
    """First child and next sibling, as Python lists padded with -1."""
    child, sibling, tail = [-1] * N, [-1] * N, {}
    for node, parent in enumerate(parents):
        if parent < 0:
            continue
        if parent in tail:
            sibling[tail[parent]] = node
        else:
            child[parent] = node
        tail[parent] = node
    return child, sibling


def slow_walk(child, sibling, tokens, law, coins, final, depth_cap):
    """DESIGN section 2 in Python; ``law(node)`` is a list of masses, or a status.

    Returns (path, predicts by node, status, margin): margin is the least distance of a coin from a
    boundary, relative to the mass compared.
    """
    N = len(tokens)
    good = lambda p: p if 0 <= p < N else -1  # noqa: E731
    node, path, predicts, margin = 0, [0], {}, 1.0
    while True:
        p = law(node)
        if isinstance(p, RowStatus):
            return [], {}, p, margin
        mass = lambda t: p[t] if 0 <= t < len(p) else 0 * p[0]  # noqa: B023, E731
        capped = len(path) >= depth_cap
        kids, kid = [], good(child[node])
        while kid >= 0 and len(kids) < N and not capped:
            kids.append(kid)
            kid = good(sibling[kid])
        acc, taken = 0 * p[0], None
        for kid in kids:
            acc += mass(tokens[kid])
            if mass(tokens[kid]) > 0:
                margin = min(margin, float(abs(acc - coins[node])))
                if coins[node] < acc:
                    taken = kid
                    break
        if taken is None:
            gone = {tokens[kid] for kid in kids}
            residual = [0 * m if t in gone else m for t, m in enumerate(p)]
            total = sum(residual)
            if total > 0:
                cumulative, bonus, goal = 0 * total, None, final * total
                for t, m in enumerate(residual):
                    cumulative += m
                    margin = min(margin, float(abs(cumulative - goal) / total) if m > 0 else 1.0)
                    if bonus is None and m > 0 and cumulative > goal:
                        bonus = t
                if bonus is None:
                    bonus = max(t for t, m in enumerate(residual) if m > 0)
                predicts[node] = bonus
                return path, predicts, RowStatus.OK, margin
            taken = [kid for kid in kids if mass(tokens[kid]) > 0][-1]
        predicts[node] = tokens[taken]
        node = taken
        path.append(node)


def probs_law(rows):
    def law(node):
        p = rows[node]
        if any(math.isnan(m) or m < 0 for m in p):
            return RowStatus.NAN
        if any(m == float("inf") for m in p):
            return RowStatus.POS_INF
        return [Fraction(m) for m in p] if any(p) else RowStatus.EMPTY

    return law


def logits_law(rows, temperature):
    def law(node):
        x = np.asarray(rows[node], dtype=np.float64)
        if np.isnan(x).any():
            return RowStatus.NAN
        if np.isposinf(x).any():
            return RowStatus.POS_INF
        if np.isneginf(x).all():
            return RowStatus.EMPTY
        if temperature == 0:
            p = np.zeros(len(x))
            p[int(np.argmax(x))] = 1
        else:
            with np.errstate(over="ignore"):
                p = np.exp((x - x.max()) / temperature)
            p = np.where(p < 2.0**-126, 0, p)
            p /= p.sum()
        return p.tolist()

    return law


# ------------------------------------------------------------------------------------------- driving it


class Case:
    """A batch as Python lists: per request parents (or raw pointers), tokens, rows, T, coins."""

    def __init__(self, N, V):
        self.N, self.V = N, V
        self.trees, self.rows, self.T, self.coins, self.final = [], [], [], [], []

    def add(self, parents, tokens, rows, *, T=1.0, coins=None, final=0.5, pointer=None):
        n = len(tokens)
        child, sibling = pointer or pointers(parents, self.N)
        self.trees.append((child, sibling, tokens + [0] * (self.N - n)))
        filler = [float("nan")] * self.V  # never looked at
        self.rows.append([*rows, *([filler] * (self.N - len(rows)))])
        self.T.append(T)
        self.coins.append((coins or [0.5] * n) + [0.5] * (self.N - len(coins or [0.5] * n)))
        self.final.append(final)

    def tensors(self, dtype=torch.float32):
        B, N = len(self.trees), self.N
        integers = [torch.tensor([t[i] for t in self.trees], device=DEVICE) for i in (2, 0, 1)]
        batch = VerifyInput(
            candidates=integers[0],
            retrieve_index=torch.arange(B * N, device=DEVICE).view(B, N),
            retrieve_next_token=integers[1],
            retrieve_next_sibling=integers[2],
            positions=torch.zeros((B, N), dtype=torch.int64, device=DEVICE),
            prefix_lens=torch.zeros(B, dtype=torch.int64, device=DEVICE),
        )
        rows = torch.tensor(self.rows, dtype=torch.float32).to(dtype).to(DEVICE)
        T = torch.tensor(self.T, dtype=torch.float32, device=DEVICE)
        coins = Coins(
            torch.tensor(self.coins, dtype=torch.float32, device=DEVICE),
            torch.tensor(self.final, dtype=torch.float32, device=DEVICE),
        )
        return batch, rows, T, coins


def poisoned(batch, depth_cap):
    out = TritonBackend.empty_output(batch, depth_cap)
    for name in out.__dataclass_fields__:
        getattr(out, name).fill_(-77777)
    return out


def run(backend, batch, rows, T, coins, depth_cap, programs=None):
    """One call into poisoned buffers; T None means probabilities."""
    out = poisoned(batch, depth_cap)
    if T is None:
        return backend.verify_probs(batch, rows, coins, depth_cap, out=out, programs=programs)
    return backend.verify(batch, rows, T, coins, depth_cap, out=out, programs=programs)


def tensors_of(batch, rows, T, coins):
    """Every input tensor, in a fixed order."""
    return [*vars(batch).values(), rows, T, coins.accept, coins.final]


def lists(out):
    return [
        getattr(out, name).tolist() for name in ("accept_index", "accept_token_num", "predicts", "status")
    ]


def expected(walks, N, depth_cap):
    accept_index, count, predicts, status = [], [], [], []
    for b, (path, by_node, s, _) in enumerate(walks):
        accept_index.append([b * N + i for i in path] + [-1] * (depth_cap - len(path)))
        count.append(max(len(path) - 1, 0))
        predicts += [by_node.get(i, -1) for i in range(N)]
        status.append(int(s))
    return [accept_index, count, predicts, status]


def check(backend, case, depth_cap, *, probs, dtype=torch.float32, band=0.0):
    """Compare with the slow walk, by every program count; returns how many requests were in the band."""
    batch, rows, T, coins = case.tensors(dtype)
    walks, keep = [], []
    for b, (child, sibling, tokens) in enumerate(case.trees):
        exact = Fraction if probs else float
        law = probs_law(rows[b].tolist()) if probs else logits_law(rows[b].float().tolist(), float(T[b]))
        us = [exact(float(u)) for u in coins.accept[b]]
        walks.append(slow_walk(child, sibling, tokens, law, us, exact(float(coins.final[b])), depth_cap))
        keep.append(walks[-1][3] >= band)
    want = expected(walks, case.N, depth_cap)
    for programs in PROGRAMS:
        got = lists(run(backend, batch, rows, None if probs else T, coins, depth_cap, programs))
        for b, kept in enumerate(keep):
            if kept:
                pick = lambda r: (r[0][b], r[1][b], r[2][b * case.N : (b + 1) * case.N], r[3][b])  # noqa: B023, E731
                assert pick(got) == pick(want), f"request {b}, {programs} programs"
    return len(keep) - sum(keep)


def random_tree(rng, n, V, width=4):
    parents, tokens, used = [-1], [rng.randrange(V)], {}
    while len(parents) < n:
        parent = rng.randrange(max(0, len(parents) - width), len(parents)) if rng.random() < 0.7 else 0
        free = [t for t in range(min(V, 200)) if t not in used.setdefault(parent, set())]
        if not free:
            return parents, tokens
        token = rng.choice(free)
        used[parent].add(token)
        parents.append(parent)
        tokens.append(token)
    return parents, tokens


def dyadic_row(rng, V, tokens=()):
    """Multiples of 2^-12 that sum to 1; mass at the given tokens and a few others, zero elsewhere."""
    places = sorted({*tokens, *(rng.randrange(V) for _ in range(rng.randint(0, 5)))}) or [0]
    cuts = sorted(rng.randrange(4097) for _ in range(len(places) - 1))
    parts = [b - a for a, b in zip([0, *cuts], [*cuts, 4096], strict=True)]
    row = [0.0] * V
    for place, part in zip(places, parts, strict=True):
        row[place] = part * MANTISSA_STEP
    return row


def neighbours(value):
    """A float32 coin in [0, 1] and its two float32 neighbours there."""
    value = np.float32(value)
    around = (np.nextafter(value, np.float32(-1)), value, np.nextafter(value, np.float32(2)))
    return [float(u) for u in around if 0 <= u <= 1]


def kids_of(parents, node):
    return [i for i, p in enumerate(parents) if p == node]


# ------------------------------------------------------------------------------------------------- laws


@pytest.mark.parametrize("V", [5, 37, 1030])
def test_dyadic_laws_are_walked_exactly(backend, V):
    """Random trees, coins on every bucket boundary of the root, both float neighbours, 0 and 1."""
    rng = random.Random(V)
    for _ in range(6 if DEVICE == "cpu" else 60):
        case = Case(N=12, V=V)
        parents, tokens = random_tree(rng, rng.randint(1, 12), V)
        rows = [dyadic_row(rng, V, [tokens[k] for k in kids_of(parents, i)]) for i in range(len(tokens))]
        acc, edges = 0.0, [0.0, 1.0, BELOW_ONE]
        for kid in kids_of(parents, 0):
            acc += rows[0][tokens[kid]]
            edges += neighbours(acc)
        for coin in edges[:12]:
            coins = [coin, *(rng.choice([0.0, 1.0, rng.randrange(4096) * MANTISSA_STEP]) for _ in tokens[1:])]
            final = rng.choice([*neighbours(rng.randrange(4096) * MANTISSA_STEP), 0.0, 1.0, BELOW_ONE])
            case.add(parents, tokens, rows, coins=coins, final=final)
        check(backend, case, rng.choice([1, 2, 3, 12]), probs=True)


def test_the_bonus_boundary_is_decided_exactly(backend):
    """v at cumsum / sum and at both neighbours, for residual sums where float32 v * sum rounds."""
    rng = random.Random(7)
    case = Case(N=2, V=9)
    for _ in range(8 if DEVICE == "cpu" else 100):
        row = dyadic_row(rng, 9, [0, 3, 4, 8])
        residual = [0.0 if t == 3 else p for t, p in enumerate(row)]
        total = sum(residual)
        if total == 0:
            continue
        edge = sum(residual[: rng.randint(1, 8)]) / total
        for v in neighbours(edge):
            case.add([-1, 0], [1, 3], [row, [1.0] + [0.0] * 8], coins=[1.0, 0.5], final=v)
    check(backend, case, 2, probs=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("V", [3, 1027])
def test_logits_agree_with_a_float64_walk(backend, V, dtype):
    rng = random.Random(11)
    gen = np.random.default_rng(11)
    skipped, N = 0, 10
    rounds = 4 if DEVICE == "cpu" else 30
    for _ in range(rounds):
        case = Case(N=N, V=V)
        for _ in range(8):
            parents, tokens = random_tree(rng, rng.randint(1, N), V)
            rows = gen.normal(size=(len(tokens), V)) * 3
            for i in range(len(tokens)):
                for kid in kids_of(parents, i):
                    rows[i, tokens[kid]] += rng.choice([0, 6])
            rows[gen.random(rows.shape) < 0.1] = -np.inf
            rows[:, 0] = 0.0
            coins = [rng.random() for _ in tokens]
            T = rng.choice([0.0, 0.3, 1.0, 2.5])
            case.add(parents, tokens, rows.tolist(), T=T, coins=coins, final=rng.random())
        skipped += check(backend, case, rng.randint(1, N), probs=False, dtype=dtype, band=1e-5)
    assert skipped <= rounds  # of 8 * rounds requests


def test_greedy_is_the_lowest_argmax_whatever_the_coins(backend):
    """K11 B68, B67: ties, also of -0.0 with 0.0 and across chunks, and coin exactly 1."""
    V = 2300  # three chunks
    far = [-0.0] + [-1.0] * (V - 1)
    far[2299] = 0.0
    split = [-1.0] * V
    split[1500] = split[2200] = -0.5
    case = Case(N=3, V=V)
    for coin in (0.0, 0.5, 1.0):
        for row, best in ((far, 0), (split, 1500)):
            case.add([-1, 0], [7, best], [row, row], T=0.0, coins=[coin, coin], final=coin)
            case.add([-1, 0], [7, 2299], [row, row], T=0.0, coins=[coin, coin], final=coin)
    assert check(backend, case, 3, probs=False) == 0
    tie = Case(N=2, V=3)
    tie.add([-1, 0], [2, 0], [[2.0, 2.0, 1.0], [0.0, 0.0, 1.0]], T=0.0)
    out = run(backend, *tie.tensors(), 2)
    assert out.tokens == [[0, 2]]


@pytest.mark.parametrize("T", [1.4e-45, 1e-40, 1e-6, 3.4e38])
def test_extreme_temperatures_are_not_clamped(backend, T):
    """K11 B66: (x - max) / T with 1 / T beyond float32."""
    case = Case(N=1, V=3)
    case.add([-1], [0], [[0.0, 5.0, 4.0]], T=T, final=0.5)
    case.add([-1], [0], [[2.0, 2.0, -float("inf")]], T=T, final=0.75)
    case.add([-1], [0], [[-3e38, 3e38, -float("inf")]], T=T, final=0.05)
    case.add([-1], [0], [[1e-45, 0.0, -float("inf")]], T=T, final=0.72)
    out = run(backend, *case.tensors(), 1)
    # 1e-45 is the least float32: over the least T it is 1, so p = [.731, .269]; else p = [.5, .5].
    fourth = 0 if T == 1.4e-45 else 1
    assert out.tokens == [[1], [1], [0 if T > 1 else 1], [fourth]]


def test_temperature_keeps_ratios(backend):
    """K11 B71: logits [0, .01] at T = .005 are [.1192, .8808]."""
    case = Case(N=1, V=2)
    edge = 1 / (1 + np.exp(2))
    for v in (edge - 1e-5, edge + 1e-5):
        case.add([-1], [0], [[0.0, 0.01]], T=0.005, final=v)
    assert run(backend, *case.tensors(), 1).tokens == [[0], [1]]


def test_unusable_rows_silence_their_own_request_only(backend):
    """K11 B64, B70: NaN before +inf before empty; unvisited rows are not looked at."""
    nan, inf = float("nan"), float("inf")
    fine = [0.0, 1.0, 2.0, -1.0]
    case = Case(N=3, V=4)
    for T in (0.0, 1.0):
        for row in ([nan, 1.0, inf, 0.0], [0.0, inf, 0.0, -inf], [-inf] * 4, [nan] * 4, fine):
            case.add([-1, 0, 0], [0, 2, 1], [row, fine, fine], T=T, coins=[0.99999] * 3)
            case.add([-1, 0], [0, 2], [[-9.0, -9.0, 9.0, -9.0], row], T=T, coins=[0.1, 0.1])
        case.add([-1, 0, 0], [0, 3, 2], [fine, [nan] * 4, fine], T=T, coins=[0.5] * 3)
    assert check(backend, case, 3, probs=False) == 0
    out = run(backend, *case.tensors(), 3)
    assert sorted(set(out.status.tolist())) == [0, 1, 2, 3]


BAD_TEMPERATURES = [-1.0, -0.001, float("nan"), float("inf"), float("-inf")]
BAD_FILTERS = [(0, 1, 0), (-(2**32) + 5, 1, 0), (5, 0, 0), (5, -0.5, 0), (5, 1.5, 0), (5, float("nan"), 0),
               (5, 1, -0.1), (5, 1, 1.1), (5, 1, float("nan"))]  # fmt: skip


def settings_case(count):
    """So many requests of one tree that accepts its child."""
    case = Case(N=2, V=5)
    for _ in range(count):
        case.add([-1, 0], [0, 2], [[0.0, 0.0, 9.0, 0.0, 0.0], [9.0, 1.0, 0.0, 0.0, 0.0]], T=1.0,
                 coins=[0.5, 0.5], final=0.25)  # fmt: skip
    return case.tensors()


def hold_silent(output, count):
    """Every second request has bad settings and emits nothing; the others are as ever."""
    bad = [RowStatus.BAD_SETTINGS if b % 2 else RowStatus.OK for b in range(count)]
    assert output.status.tolist() == bad
    for b, status in enumerate(bad):
        silent = status != RowStatus.OK
        assert output.accept_index[b].tolist() == ([-1, -1] if silent else [2 * b, 2 * b + 1])
        assert output.accept_token_num[b].item() == (0 if silent else 1)
        assert output.predicts[2 * b : 2 * b + 2].tolist() == ([-1, -1] if silent else [2, 0])


def test_settings_out_of_range_silence_their_own_request_only(backend):
    """On a device nobody looks at them before the kernel does."""
    count = 2 * len(BAD_TEMPERATURES)
    batch, rows, T, coins = settings_case(count)
    T = T.clone()
    T[1::2] = torch.tensor(BAD_TEMPERATURES, device=DEVICE)
    for programs in PROGRAMS:
        hold_silent(run(backend, batch, rows, T, coins, 2, programs), count)


@pytest.mark.parametrize("order", ["sequential", "joint"])
def test_filters_out_of_range_silence_their_own_request_only(backend, order):
    count = 2 * len(BAD_FILTERS)
    batch, rows, T, coins = settings_case(count)
    columns = list(zip(*(given for bad in BAD_FILTERS for given in ((4, 1, 0), bad)), strict=True))
    filters = Filters(
        torch.tensor(columns[0], dtype=torch.int64, device=DEVICE),
        *(torch.tensor(column, dtype=torch.float32, device=DEVICE) for column in columns[1:]),
        order=order,
    )
    hold_silent(backend.verify(batch, rows, T, coins, 2, filters), count)
    hold_silent(backend.verify_probs(batch, rows.softmax(2), coins, 2, filters), count)


@pytest.mark.parametrize("order", ["sequential", "joint"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_walk_by_settings_out_of_range_ends(backend, order, dtype):
    """Flat rows, whose cut is searched for: whatever is asked, the search ends, and the others are right."""
    temperatures = [1.0, 0.0, *BAD_TEMPERATURES]
    asked = [(T, *cuts) for T in temperatures for cuts in [(50, 0.9, 0.01), *BAD_FILTERS]]
    V, count = 600, len(asked)
    rng = np.random.default_rng(3)
    case = Case(N=2, V=V)
    for T, *_ in asked:
        case.add([-1, 0], [0, 2], rng.normal(0, 2, (2, V)).tolist(), T=T, coins=[0.5, 0.5], final=0.7)
    batch, rows, T, coins = case.tensors()
    columns = list(zip(*(cuts for _, *cuts in asked), strict=True))
    filters = Filters(
        torch.tensor(columns[0], dtype=torch.int64, device=DEVICE),
        *(torch.tensor(column, dtype=torch.float32, device=DEVICE) for column in columns[1:]),
        order=order,
    )
    output = backend.verify(batch, rows.to(dtype), T, coins, 2, filters)
    fine = [b for b, (T, *cuts) in enumerate(asked) if T in (0.0, 1.0) and cuts == [50, 0.9, 0.01]]
    assert [b for b, status in enumerate(output.status.tolist()) if status == RowStatus.OK] == fine
    assert set(output.status.tolist()) == {RowStatus.OK, RowStatus.BAD_SETTINGS}
    silent = torch.ones(count, dtype=torch.bool, device=DEVICE)
    silent[fine] = False
    assert (output.predicts.view(count, 2)[silent] == -1).all()
    assert (output.predicts.view(count, 2)[~silent, 0] >= 0).all()


@gpu
@pytest.mark.parametrize("name", ["triton", "sgl", "eager"])
def test_settings_on_a_device_through_verify(name):
    if name == "sgl":
        try:
            get_backend(name)
        except BackendUnavailable as error:
            pytest.skip(str(error))
    _, rows, T, coins = settings_case(4)
    batch = to_verify_input([DraftTree((-1, 0), (0, 2))] * 4, device=DEVICE)
    T = T.clone()
    T[1::2] = float("nan")
    call = lambda: treeconv.verify(batch, rows, T, coins, backend=name, depth_cap=2)  # noqa: E731
    if name == "eager":  # it waits for the device anyway
        with pytest.raises(InvalidArgument, match="temperature=nan, but must be finite and >= 0"):
            call()
    else:
        hold_silent(call(), 4)


def test_unusable_probabilities_are_reported(backend):
    nan, inf = float("nan"), float("inf")
    case = Case(N=1, V=4)
    for row in ([nan, inf, 0, 0], [-0.25, 1, 0.25, 0], [0, inf, 0, 0], [0, 0, 0, 0], [0, -0.0, 1, 0]):
        case.add([-1], [0], [list(map(float, row))])
    assert check(backend, case, 1, probs=True) == 0
    batch, rows, _, coins = case.tensors()
    assert run(backend, batch, rows, None, coins, 1).status.tolist() == [1, 1, 2, 3, 0]


def test_known_edges(backend):
    """K1 B01, B02, B04, B05; K2 B13's tree is refused at the front door; K4 B25, B28; K10 B60."""
    case = Case(N=3, V=5)
    e = [[float(i == t) for t in range(5)] for i in range(5)]
    case.add([-1, 0], [4, 2], [e[1]], coins=[0.0, 0.5])  # B01: a child of zero mass, coin 0
    case.add([-1, 0, 0], [4, 0, 1], [[0.25, 0.25, 0.5, 0, 0], e[0], e[3]], coins=[0.25] * 3)  # B02
    case.add([-1], [4], [[0.5, 0.4999, 0, 0, 0]], final=1.0)  # B04: last id with mass
    for v in (0.0, 0.5, BELOW_ONE, 1.0):
        case.add([-1], [4], [e[1]], final=v)  # B05
    case.add([-1, 0, 1], [4, 0, 1], [e[0], e[1], e[2]])  # B25
    case.add([-1, 0, 1], [4, 1, 2], [e[1], e[3], e[0]])  # B28
    case.add([-1], [4], [[0.5, 0.5, 0, 0, 0]], final=0.25)  # B60: no rejected mass from anywhere
    check(backend, case, 3, probs=True)
    batch, rows, _, coins = case.tensors()
    got = run(backend, batch, rows, None, coins, 3).tokens
    assert got == [[1], [1, 3], [1], [1], [1], [1], [1], [0, 1, 2], [1, 3], [0]]


def test_children_that_cover_the_support_leave_no_empty_residual(backend):
    """Coin 1, or a float32 sum below 1: the last child of positive mass is accepted, and the walk goes on."""
    third = float(np.float32(1) / np.float32(3))
    case = Case(N=5, V=6)
    for coin in (BELOW_ONE, 1.0):
        covered, then = [third, third, third, 0, 0, 0], [0, 0, 0, 1.0, 0, 0]
        case.add([-1, 0, 0, 0, 0], [5, 0, 1, 2, 4], [covered, *[then] * 4], coins=[coin] * 5)
    batch, rows, _, coins = case.tensors()
    rows[:, 0, 2] = float(np.nextafter(np.float32(third), np.float32(0)))
    assert run(backend, batch, rows, None, coins, 3).tokens == [[2, 3], [2, 3]]
    logits = Case(N=4, V=4)
    inf = float("inf")
    for coin in (BELOW_ONE, 1.0):
        logits.add(
            [-1, 0, 0, 0], [3, 0, 1, 2], [[0.1, 0.2, 0.3, -inf]] + [[0, 0, 0, 9.0]] * 3, coins=[coin] * 4
        )
    out = run(backend, *logits.tensors(), 2)
    assert [tokens[0] for tokens in out.tokens] == [2, 2]
    assert out.accept_token_num.tolist() == [1, 1]


@pytest.mark.parametrize(("V", "vector"), [(1030, 1), (1040, 4)])
@pytest.mark.parametrize("offset", [0.0, 900.0, -3000.0, 20000.0])
def test_warps_whose_exponents_are_out_of_reach(backend, V, vector, offset):
    """A warp's masses are relative to its own maximum, made anew where |max / T| is 1024 bits or more.

    All of a row is there, or one warp's tokens alone; coins are 1e-4 beside the boundaries.
    """
    gen = np.random.default_rng(17)
    warp = np.arange(V) // vector % 128 // 32
    for low in (0.0, -700.0, -2500.0, -1e9, -math.inf):
        case = Case(N=4, V=V)
        for T in (0.3, 1.0, 7.0):
            row = gen.normal(size=V) * 2 * T + offset
            tokens = [0, 37, 500, 1027]
            row[tokens[1:]] += 6 * T
            row = np.where(warp == 1, row + low, row).astype(np.float32).astype(np.float64)
            p = np.exp((row - row.max()) / np.float64(np.float32(T)))
            ends = np.cumsum(p[tokens[1:]] / p.sum())
            for coin in (*(ends - 1e-4), *(ends + 1e-4)):
                case.add([-1, 0, 0, 0], tokens, [row.tolist()] * 4, T=T, coins=[float(coin)] * 4, final=0.4)
        skipped = check(backend, case, 2, probs=False, band=3e-5)
        assert skipped <= 9  # of 18: the bonus has boundaries everywhere


def test_what_is_left_of_a_chunk_far_below_its_maximum(backend):
    """Coin 1 and a remainder of 2^-140: not lost to a token without mass, though float32 cannot hold it."""
    V, step = 1030, math.log(2.0) * 70
    row = [-math.inf] * V
    row[0], row[32], row[33] = 0.0, -step, -2 * step  # the last two in a warp of their own
    case = Case(N=3, V=V)
    case.add([-1, 0, 0], [9, 0, 32], [row, row, row], coins=[1.0] * 3, final=0.5)
    (tokens,) = run(backend, *case.tensors(), 2).tokens
    assert tokens[0] in (32, 33)


def test_every_accept_slot_and_the_cap(backend):
    """K9 B56: at the cap nothing is tested and the bonus comes from all of p."""
    case = Case(N=5, V=2)
    case.add([-1, 0, 1, 2, 3], [1, 0, 0, 0, 0], [[1.0, 0.0]] * 5)
    batch, rows, _, coins = case.tensors()
    for cap in range(1, 9):
        out = run(backend, batch, rows, None, coins, cap)
        used = min(cap, 5)
        assert out.tokens == [[0] * used]
        assert out.accept_index.tolist() == [[*range(used), *([-1] * (cap - used))]]


def test_more_children_than_one_block(backend):
    """A star of 70 children: sibling blocks carry the running sum and mask every child's mass."""
    rng = random.Random(3)
    V, n = 1100, 71
    tokens = [0, *rng.sample(range(V), n - 1)]
    row = [0.0] * V
    for token in tokens[1:]:
        row[token] = 50 * MANTISSA_STEP
    spare = next(t for t in range(V) if t not in tokens)
    row[spare] = 1.0 - sum(row)
    case = Case(N=n, V=V)
    for k in (1, 31, 32, 33, 64, 69, 70):
        for coin in neighbours(k * 50 * MANTISSA_STEP):
            case.add([-1] + [0] * (n - 1), tokens, [row] * n, coins=[coin] + [0.5] * (n - 1), final=0.0)
    check(backend, case, 2, probs=True)


def test_malformed_pointers_end_the_list(backend):
    """K6 B38: out-of-range pointers count as -1, cycles end, tokens outside the vocabulary weigh nothing."""
    V = 4
    uniform = [[0.25] * V] * 4
    big = 2**40
    bad = [
        ([big, -5, -1, -1], [-1] * 4, [0, 1, 2, 3]),
        ([1, -1, -1, -1], [-1, 2, 1, -1], [0, 1, 2, 3]),  # siblings 1 -> 2 -> 1
        ([1, -1, -1, -1], [-1, 4, -1, -1], [0, 1, 2, 3]),  # sibling N
        ([1, 0, -1, -1], [-1] * 4, [0, 1, 2, 3]),  # child of 1 is 0
        ([1, -1, -1, -1], [-1, 2, -1, -1], [0, V, -3, 3]),
        ([1, -1, -1, -1], [-1, 2, -1, -1], [0, big, 2, 3]),
    ]
    for coin in (0.0, 0.3, 0.8, 1.0):
        case = Case(N=4, V=V)
        for child, sibling, tokens in bad:
            case.add(None, tokens, uniform, coins=[coin] * 4, pointer=(child, sibling))
        batch, rows, _, coins = case.tensors()
        out = run(backend, batch, rows, None, coins, 4)
        assert out.status.tolist() == [0] * len(bad)
        assert all(0 <= t < V for tokens in out.tokens for t in tokens)
        check_these = Case(N=4, V=V)
        for child, sibling, tokens in (bad[0], bad[2], bad[4], bad[5]):
            check_these.add(None, tokens, uniform, coins=[coin] * 4, pointer=(child, sibling))
        check(backend, check_these, 4, probs=True)


def test_a_request_is_the_same_alone_padded_and_permuted(backend):
    rng = random.Random(5)
    gen = np.random.default_rng(5)
    V = 1500
    requests = []
    for _ in range(6):
        parents, tokens = random_tree(rng, rng.randint(2, 9), V)
        rows = gen.normal(size=(len(tokens), V)) * 4
        for i, (parent, token) in enumerate(zip(parents[1:], tokens[1:], strict=True), start=1):
            rows[parent, token] += 25 if i % 3 else 0
        rows = rows.tolist()
        coins = [rng.random() for _ in tokens]
        requests.append((parents, tokens, rows, rng.choice([0.0, 0.7, 1.3]), coins, rng.random()))

    def emitted(order, N):
        case = Case(N=N, V=V)
        for i in order:
            parents, tokens, rows, T, coins, final = requests[i]
            case.add(parents, tokens, rows, T=T, coins=coins, final=final)
        return run(backend, *case.tensors(torch.bfloat16), 5).tokens

    together = emitted(range(6), 9)
    assert emitted(range(6), 40) == together
    assert emitted([5, 3, 1, 0, 2, 4], 9) == [together[i] for i in (5, 3, 1, 0, 2, 4)]
    assert [emitted([i], 17)[0] for i in range(6)] == together
    assert sum(map(len, together)) > 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("stride", "first"), [(1133, 13), (1120, 0), (1120, 16), (1104, 3)])
def test_strided_rows(backend, stride, first, dtype):
    """Rows cut out of a larger tensor: at odd strides, or padded as engines pad a vocabulary.

    Triton lays a chunk out by what it can prove of addresses, and our reductions rest on the layout.
    """
    gen, coins = torch.Generator().manual_seed(1), random.Random(2)
    V, N, B = 1103, 3, 8
    case = Case(N=N, V=V)
    for _ in range(B):
        drawn = [coins.random() for _ in range(4)]
        case.add([-1, 0, 0], [0, 3, 4], [[0.0] * V] * 3, coins=drawn[:3], final=drawn[3])
    batch, _, T, coins = case.tensors()
    wide = torch.randn((B, 5, stride), generator=gen).mul(3).to(dtype).to(DEVICE)
    if first + V > stride:
        wide = torch.randn((B * 5 * stride + first,), generator=gen).mul(3).to(dtype).to(DEVICE)
        view = torch.as_strided(wide, (B, N, V), (5 * stride, stride, 1), stride + first)
    else:
        view = wide[:, 1:4, first : first + V]
    assert lists(run(backend, batch, view, T, coins, 3)) == lists(
        run(backend, batch, view.contiguous(), T, coins, 3)
    )


def test_inputs_are_not_written(backend):
    case = Case(N=3, V=50)
    case.add([-1, 0, 1], [0, 3, 4], [[0.1 * t for t in range(50)]] * 3, coins=[0.0] * 3)
    batch, rows, T, coins = case.tensors()
    given = [batch.candidates, batch.retrieve_next_token, batch.retrieve_next_sibling, rows, T]
    given += [coins.accept, coins.final]
    copies = [t.clone() for t in given]
    run(backend, batch, rows, T, coins, 3)
    assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))


def test_bad_arguments_are_named(backend):
    case = Case(N=2, V=8)
    case.add([-1, 0], [0, 3], [[0.0] * 8] * 2)
    batch, rows, T, coins = case.tensors()
    with pytest.raises(InvalidArgument, match=r"logits\.dtype=torch\.float64, but must be"):
        backend.verify(batch, rows.double(), T, coins, 2)
    with pytest.raises(InvalidArgument, match=r"target_probs\.dtype=torch\.bfloat16, but must be float32"):
        backend.verify_probs(batch, rows.bfloat16(), coins, 2)
    with pytest.raises(InvalidArgument, match=r"logits\.stride\(\)=.*, but must end in 1"):
        backend.verify(batch, rows.transpose(1, 2).contiguous().transpose(1, 2), T, coins, 2)
    with pytest.raises(InvalidArgument, match=r"V=262145, but must be in \[1, 262144\]"):
        backend.verify(batch, torch.empty(1, device=DEVICE).expand(1, 2, 262145), T, coins, 2)
    for cap in (0, 2.5, True):
        with pytest.raises(InvalidArgument, match=f"depth_cap={cap}, but must be an integer >= 1"):
            backend.verify(batch, rows, T, coins, cap)
    with pytest.raises(InvalidArgument, match=r"programs=1\.5, but must be an integer >= 1"):
        backend.verify(batch, rows, T, coins, 2, programs=1.5)
    with pytest.raises(InvalidArgument, match=r"temperature\.shape=\(2,\), but must be \(1,\)"):
        backend.verify(batch, rows, T.repeat(2), coins, 2)
    with pytest.raises(InvalidArgument, match=r"candidates\.dtype=torch\.int32, but must be torch\.int64"):
        backend.verify(
            VerifyInput(**{**vars(batch), "candidates": batch.candidates.int()}), rows, T, coins, 2
        )
    with pytest.raises(InvalidArgument, match=r"candidates\.device=meta, but must be that of logits"):
        backend.verify(batch.to("meta"), rows, T, coins, 2)
    meta = Coins(coins.accept.to("meta"), coins.final.to("meta"))
    with pytest.raises(BackendUnavailable, match=r"logits\.device=meta, but must be a CUDA device"):
        backend.verify(batch.to("meta"), rows.to("meta"), T.to("meta"), meta, 2)
    out = TritonBackend.empty_output(batch, 3)
    with pytest.raises(InvalidArgument, match=r"out\.accept_index=\(1, 3\).*but must be contiguous \(1, 2\)"):
        backend.verify(batch, rows, T, coins, 2, out=out)
    if DEVICE == "cpu":
        with pytest.raises(InvalidArgument, match="programs=2, but must be 1 in the interpreter"):
            backend.verify(batch, rows, T, coins, 2, programs=2)
    else:
        with pytest.raises(
            InvalidArgument, match=r"programs=2, but must be in \[1, 1\], the chunks of a row"
        ):
            backend.verify(batch, rows, T, coins, 2, programs=2)


@pytest.mark.parametrize("V", [1, 50257, 163840, 262144])
@pytest.mark.parametrize("kilobytes", [16, 100, 164, 228])  # none such, sm_89, sm_80, sm_90
def test_the_programs_of_a_launch_fit_the_device(V, kilobytes):
    chunk = launch.chunk_size(V)
    assert launch.MAX_CHUNKS * chunk >= V
    for sms in (16, 132, 148):
        for B in (1, 2, 3, 4, 7, 16, 64, 128, 500, 1024):
            programs = launch.programs_per_request(B, V, sms, kilobytes * 1024)
            each = -(-B * programs // sms)  # on the fullest multiprocessor
            assert programs == 1 or each * launch.SHARED_BYTES <= kilobytes * 1024
            assert programs == 1 or each * launch.WARPS * 32 * launch.REGISTERS <= 65536
            assert 1 <= programs <= -(-V // chunk)


# ----------------------------------------------------------------------------------------- on a GPU only


def big_batch(seed, B, N, V, dtype=torch.bfloat16, accept=0.7):
    """Random trees and peaked logits on the device; several rows visited per request."""
    rng = random.Random(seed)
    case = Case(N=N, V=1)
    trees = []
    for _ in range(B):
        parents, tokens = random_tree(rng, rng.randint(1, N), V, width=N // 2)
        trees.append((parents, tokens))
        case.add(parents, tokens, [[0.0]] * len(tokens), T=rng.choice([0.0, 0.5, 0.8, 1.7]),
                 coins=[rng.random() for _ in tokens], final=rng.random())  # fmt: skip
    batch, _, T, coins = case.tensors()
    gen = torch.Generator(DEVICE).manual_seed(seed)
    rows = torch.empty((B, N, V), dtype=dtype, device=DEVICE)
    for b in range(B):
        rows[b] = torch.randn((N, V), generator=gen, device=DEVICE) * 2
    where = [
        (b, parents[i], tokens[i])
        for b, (parents, tokens) in enumerate(trees)
        for i in range(1, len(tokens))
        if rng.random() < accept
    ]
    if where:
        index = torch.tensor(where, device=DEVICE).T
        rows[index[0], index[1], index[2]] += 14.0
    return batch, rows, T, coins


@gpu
@pytest.mark.parametrize("V", [1000, 50257, 163840, 262144])
def test_any_number_of_programs_gives_the_same_bits(backend, V):
    """Outputs, and the published chunk triples of the root row."""
    B, N = 6, 20
    batch, rows, T, coins = big_batch(V, B, N, V)
    probs = torch.softmax(rows.float(), -1)
    chunks = -(-V // launch.chunk_size(V))
    for temperature, given in ((T, rows), (None, probs)):
        seen = None
        for programs in (1, 2, 3, 7, 16, 40, 64, None):
            if programs and programs > chunks:
                continue
            out = lists(run(backend, batch, given, temperature, coins, 8, programs))
            run(backend, batch, given, temperature, coins, 2, programs)  # two rows: the root's words stay
            roots = backend._workspace(torch.device("cuda", 0)).words[:B, 0, : 2 * chunks]
            triples = roots.contiguous().view(torch.int32).view(B, chunks, 4)[:, :, :3].tolist()
            seen = seen or (out, triples)
            assert out == seen[0], programs
            assert triples == seen[1], programs
        assert sum(seen[0][1]) >= 3  # drafts are accepted: several rows are walked


@gpu
def test_batch_invariance_at_full_size(backend):
    B, N, V = 40, 64, 163840
    batch, rows, T, coins = big_batch(1, B, N, V)
    whole = run(backend, batch, rows, T, coins, 9)
    flat = whole.predicts.view(B, N)
    for members in ([0], [7, 3], [39, 0, 12, 5, 8], list(range(20, 40))):
        pick = torch.tensor(members, device=DEVICE)
        part = VerifyInput(**{name: getattr(batch, name)[pick] for name in vars(batch)})
        out = run(backend, part, rows[pick], T[pick], Coins(coins.accept[pick], coins.final[pick]), 9)
        assert torch.equal(out.predicts.view(-1, N), flat[pick])
        assert torch.equal(out.accept_token_num, whole.accept_token_num[pick])
    wide = torch.full((B, 100, V), float("nan"), dtype=rows.dtype, device=DEVICE)
    wide[:, :N] = rows
    pad = lambda t, v: torch.cat([t, torch.full((B, 36), v, dtype=t.dtype, device=DEVICE)], 1)  # noqa: E731
    padded = VerifyInput(
        candidates=pad(batch.candidates, 0),
        retrieve_index=pad(batch.retrieve_index, 0),  # not read: it is b * N + i
        retrieve_next_token=pad(batch.retrieve_next_token, -1),
        retrieve_next_sibling=pad(batch.retrieve_next_sibling, -1),
        positions=batch.positions,
        prefix_lens=batch.prefix_lens,
    )
    out = run(backend, padded, wide, T, Coins(pad(coins.accept, 0.5), coins.final), 9)
    assert torch.equal(out.predicts.view(B, 100)[:, :N], flat)
    assert torch.equal(out.accept_token_num, whole.accept_token_num)


@gpu
@pytest.mark.parametrize("B", [1, 5, 33, 1024])
def test_replays_equal_eager(backend, B):
    """K10: other trees, rows, temperatures and coins in one captured call, hundreds of times."""
    N, V = 16, 5000 if B < 1000 else 1100
    sets = [big_batch(seed, B, N, V) for seed in range(4)]
    batch, rows, T, coins = sets[0]
    static = [t.clone() for t in tensors_of(batch, rows, T, coins)]
    names = list(vars(batch))
    held = VerifyInput(**dict(zip(names, static[: len(names)], strict=True)))
    out = TritonBackend.empty_output(batch, 6)
    call = lambda: backend.verify(held, static[-4], static[-3], Coins(static[-2], static[-1]), 6, out=out)  # noqa: E731
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    want = [lists(run(backend, *each, 6)) for each in sets]
    for replay in range(200):
        which = replay % 4
        each = sets[which]
        for target, source in zip(static, tensors_of(*each), strict=True):
            target.copy_(source)
        for name in vars(out):
            if isinstance(getattr(out, name), torch.Tensor):
                getattr(out, name).fill_(-77777)
        graph.replay()
        if replay % 7 == 0:  # an eager call of another size between replays
            run(backend, *sets[1], 3)
        assert lists(out) == want[which]


@gpu
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_a_capture_before_any_call_is_refused():
    case = Case(N=2, V=8)
    case.add([-1, 0], [0, 3], [[0.0] * 8] * 2)
    args = case.tensors()
    fresh = TritonBackend()
    out = TritonBackend.empty_output(args[0], 2)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(BackendUnavailable, match="must be called once outside a capture"),
        torch.cuda.graph(graph),
    ):
        fresh.verify(*args, 2, out=out)


@gpu
def test_offsets_past_32_bits(backend):
    """K12 B74, B75: B * N * V past 2^31 and 2^32; everything but the visited rows is NaN."""
    B, N, V = 430, 64, 163840
    rows = torch.full((B, N, V), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    case = Case(N=N, V=1)
    parents, tokens = [-1, 0, 0, 1] + [0] * 59 + [1], [5, 9, 163839, 11, *range(100, 159), 163838]
    for b in range(B):
        case.add(parents, tokens, [[0.0]] * N, T=float(b % 2), coins=[0.5] * N)
    batch, _, T, coins = case.tensors()
    rows[:, 0] = rows[:, 1] = rows[:, 63] = -20.0
    rows[:, 0, 9] = rows[:, 1, 163838] = 20.0
    tail = torch.arange(B, device=DEVICE) * 381 % V
    rows[torch.arange(B, device=DEVICE), 63, tail] = 20.0
    want = [[9, 163838, int(t)] for t in tail]
    for programs in (None, 2):
        assert run(backend, batch, rows, T, coins, 4, programs).tokens == want


@gpu
def test_two_streams_do_not_share_scratch(backend):
    inputs = [big_batch(seed, 3, 12, 163840) for seed in (1, 2)]
    want = [lists(run(backend, *each, 6)) for each in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(50):
        outs = []
        for stream, each in zip(streams, inputs, strict=True):
            with torch.cuda.stream(stream):
                outs.append(run(backend, *each, 6))
        torch.cuda.synchronize()
        assert [lists(out) for out in outs] == want
