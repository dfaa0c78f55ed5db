"""The oracle against brute force, against its own sums, and against several ways to compute in float32."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from fractions import Fraction
from itertools import accumulate, pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from treeconv import Coins, DraftTree, InvalidArgument, RowStatus, oracle, strategies
from treeconv.judge import target_rows

TREES = {
    "root": DraftTree([-1], [9]),
    "star": DraftTree([-1, 0, 0], [9, 2, 0]),
    "chain": DraftTree.chain([9, 1, 1]),
    "fork": DraftTree([-1, 0, 0, 1], [9, 0, 2, 1]),
    "cover": DraftTree([-1, 0, 0, 0, 2], [9, 2, 1, 0, 0]),
}


def random_law(rng, nodes, vocab, parts):
    """``[nodes, vocab]`` Fractions, multiples of ``1 / parts``, many of them zero."""
    law = []
    for _ in range(nodes):
        counts = Counter(rng.choice(vocab, parts, p=rng.dirichlet([0.5] * vocab)).tolist())
        law.append([Fraction(counts[token], parts) for token in range(vocab)])
    return law


def emit(tree, law, accept, final, cap):
    """Lay the masses end to end; a coin points into one. Written without a look at the oracle."""
    node, path, text = 0, [0], []
    while True:
        kids = [kid for kid, parent in enumerate(tree.parents) if parent == node] if len(path) < cap else []
        drafted = [tree.token_ids[kid] for kid in kids]
        passed = sum(edge <= accept[node] for edge in accumulate(law[node][token] for token in drafted))
        if passed < len(kids):
            node = kids[passed]
            path.append(node)
            text.append(drafted[passed])
            continue
        left = [(token, mass) for token, mass in enumerate(law[node]) if token not in drafted]
        total = sum(mass for _, mass in left)
        target = final * total
        for token, mass in left:
            target -= mass
            if target < 0:
                return tuple(path), (*text, token)


def coin_grid(tree, cap, parts):
    """Every vector of coins ``(k + 1/2) / parts``, finer ones for the bonus: never on a boundary."""
    fine = math.lcm(*range(1, parts + 1))
    inner = [node for node in range(len(tree)) if tree.children[node] and tree.depths[node] + 1 < cap]
    ticks = [Fraction(2 * k + 1, 2 * parts) for k in range(parts)]
    for coins in product(ticks, repeat=len(inner)):
        accept = [Fraction(1, 2)] * len(tree)
        for node, coin in zip(inner, coins, strict=True):
            accept[node] = coin
        for k in range(fine):
            yield accept, Fraction(2 * k + 1, 2 * fine)


@pytest.mark.parametrize("cap", [1, 2, None])
@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("seed", range(3))
def test_walk_and_pmf_equal_brute_force(name, cap, seed):
    tree, parts = TREES[name], 4
    cap = cap or tree.depth + 1
    law = random_law(np.random.default_rng(seed), len(tree), 3, parts)
    counts, lengths, total = Counter(), Counter(), 0
    for accept, final in coin_grid(tree, cap, parts):
        want = emit(tree, law, accept, final, cap)
        got = oracle.walk(tree, law, Coins(accept, final), cap)
        assert (got.path, got.tokens) == want
        counts[got.tokens] += 1
        lengths[len(got.path) - 1] += 1
        total += 1
    pmf = {text: Fraction(count, total) for text, count in counts.items()}
    assert {text: p for text, p in oracle.outcome_pmf(tree, law, cap).items() if p} == pmf
    accepted = {length: Fraction(count, total) for length, count in lengths.items()}
    assert {length: p for length, p in oracle.acceptance_pmf(tree, law, cap).items() if p} == accepted
    mean = sum(length * p for length, p in accepted.items())
    assert oracle.expected_accepted_length(tree, law, cap) == mean


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("seed", range(20))
def test_pmf_sums_to_one_and_its_prefixes_have_the_target_law(name, seed):
    tree = TREES[name]
    law = random_law(np.random.default_rng(seed), len(tree), 4, 7)
    pmf = oracle.outcome_pmf(tree, law)
    assert sum(pmf.values()) == 1
    starts = defaultdict(Fraction)
    for text, chance in pmf.items():
        for length in range(1, len(text) + 1):
            starts[text[:length]] += chance
    for node in range(len(tree)):
        path = tree.path(node)
        reach = math.prod(law[before][tree.token_ids[after]] for before, after in pairwise(path))
        prefix = tuple(tree.token_ids[inner] for inner in path[1:])
        for token in range(4):
            assert starts[(*prefix, token)] == reach * law[node][token]


@pytest.mark.parametrize("name", TREES)
def test_cells_partition_the_coin_space(name):
    """Volumes add up, and every cell's corner and centre give the cell's own outcome."""
    tree = TREES[name]
    law = random_law(np.random.default_rng(5), len(tree), 3, 8)
    cells = list(oracle.outcome_cells(tree, law))
    assert sum(cell.measure for cell in cells) == 1
    for cell in cells:
        for weight in (Fraction(0), Fraction(1, 2), Fraction(999, 1000)):
            accept = [Fraction(1, 2)] * len(tree)
            for node, (low, high) in cell.accept.items():
                accept[node] = low + weight * (high - low)
            final = cell.final[0] + weight * (cell.final[1] - cell.final[0])
            got = oracle.walk(tree, law, Coins(accept, final))
            assert (got.path, got.bonus) == (cell.path, cell.bonus)


def test_critical_coins_of_a_small_tree():
    tree = TREES["star"]
    law = [[Fraction(1, 8), Fraction(5, 8), Fraction(1, 4)]] + [[Fraction(1, 2), Fraction(1, 2), 0]] * 2
    critical = oracle.critical_coins(tree, law)
    quarter, three = Fraction(1, 4), Fraction(3, 8)
    assert critical.accept == {0: [(quarter, quarter), (three, three)]}
    assert critical.final == {0: [], 1: [(Fraction(1, 2),) * 2], 2: [(Fraction(1, 2),) * 2]}


@pytest.mark.parametrize(("coin", "path"), [(0.25, (0, 2)), (float(np.nextafter(0.25, 0)), (0, 1))])
def test_buckets_are_half_open(coin, path):
    law = [[0.25, 0.25, 0.5]] * 3
    tree = DraftTree([-1, 0, 0], [9, 0, 1])
    assert oracle.walk(tree, law, Coins([coin] * 3, 0.5)).path == path


@pytest.mark.parametrize(
    ("row", "tokens", "coin", "path"),
    [
        ([0.5, 0.5, 0], (0, 1), 1.0, (0, 2)),
        ([0.5, 0.5, 0], (0, 1, 2), 1.0, (0, 2)),  # the last child has no mass: the one before takes it
        ([0, 1, 0], (0, 2), 0.0, (0,)),
        ([0.25, 0.25, 0], (0, 1), 0.75, (0, 2)),  # unnormalised, and the children cover the support
    ],
)
def test_an_empty_residual_accepts_the_last_child_of_positive_mass(row, tokens, coin, path):
    tree = DraftTree([-1] + [0] * len(tokens), [9, *tokens])
    assert oracle.walk(tree, [row] * len(tree), Coins([coin] * len(tree), 0.5)).path == path


@pytest.mark.parametrize(("final", "token"), [(0.0, 1), (0.25, 2), (1 - 2**-24, 2), (1.0, 2)])
def test_bonus_at_the_edges_has_mass(final, token):
    assert oracle.walk(TREES["root"], [[0, 0.25, 0.75, 0]], Coins([0.5], final)).tokens == (token,)


@pytest.mark.parametrize(
    ("row", "status"),
    [
        ([float("nan"), 1], RowStatus.NAN),
        ([-1e-9, 1], RowStatus.NAN),
        ([float("inf"), 1], RowStatus.POS_INF),
        ([0.0, 0.0], RowStatus.EMPTY),
        ([Fraction(-1, 9), Fraction(1)], RowStatus.NAN),
        ([Fraction(0), Fraction(0)], RowStatus.EMPTY),
    ],
)
def test_an_unusable_row_is_reported_where_visited_and_nowhere_else(row, status):
    tree = DraftTree.chain([9, 1])
    for coin, want in ((0.0, status), (0.9, RowStatus.OK)):
        got = oracle.walk(tree, [[0.5, 0.5], row], Coins([coin, 0.5], 0.5))
        assert (got.status, got.tokens) == (want, () if want else (0,))
    with pytest.raises(InvalidArgument, match=rf"target_probs\[1\] holds {status.name}, but must have"):
        oracle.outcome_pmf(tree, [[0.5, 0.5], row])


HALF = [[0.5, 0.5]] * 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda t: oracle.walk(t, HALF[:1], Coins([0.5] * 2, 0.5)),
            r"len\(target_probs\)=1, but must be >= 2",
        ),
        (lambda t: oracle.walk(t, HALF, Coins([0.5], 0.5)), r"len\(coins.accept\)=1, but must be >= 2"),
        (
            lambda t: oracle.walk(t, HALF, Coins([0.5, 1.5], 0.5)),
            r"coins.accept\[1\]=1.5, but must be in \[0, 1",
        ),
        (
            lambda t: oracle.walk(t, HALF, Coins([0.5, 0.5], float("nan"))),
            r"final=nan, but must be in \[0, 1\]",
        ),
        (lambda t: oracle.walk(t, HALF, Coins([0.5, 0.5], -0.1)), r"final=-0.1, but must be in \[0, 1\]"),
        (lambda t: oracle.walk(t, HALF, Coins([0.5] * 2, 0.5), 0), "depth_cap=0, but must be >= 1"),
        (lambda t: oracle.outcome_pmf(t, HALF[:1]), r"len\(target_probs\)=1, but must be >= 2"),
        (lambda t: oracle.critical_coins(t, HALF[:1]), r"len\(target_probs\)=1, but must be >= 2"),
        (lambda t: oracle.walk(t, [[[0.5]]] * 2, Coins([0.5] * 2, 0.5)), r"target row has shape \(1, 1\)"),
        (lambda _: oracle.enclosure([[0.0]]), r"logits.shape=\(1, 1\), but must be \[vocab\]"),
        (lambda _: oracle.enclosure([]), r"logits.shape=\(0,\), but must be \[vocab\], vocab >= 1"),
        (lambda _: oracle.enclosure([0.0], -1.0), "temperature=-1.0, but must be finite and >= 0"),
        (lambda _: oracle.enclosure([0.0], float("nan")), "temperature=nan, but must be finite and >= 0"),
        (lambda _: oracle.enclosure([0.0], float("inf")), "temperature=inf, but must be finite and >= 0"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call(DraftTree.chain([9, 0]))


# The enclosure: float32 as people compute it falls inside.


def shifted(logits, temperature):
    """``(x - max) / T`` in float32, each step rounded."""
    with np.errstate(over="ignore"):
        return (logits - logits.max()) / np.float32(temperature)


def blocked_total(weights):
    padded = np.zeros(-(-weights.size // 128) * 128, np.float32)
    padded[: weights.size] = weights
    return padded.reshape(-1, 128).sum(axis=1, dtype=np.float32).sum(dtype=np.float32)


def running_sums(masses):
    """Blocks of 128: what a scan on any accelerator does. Plain float32 sums over 1,025 terms drift more."""
    blocks = np.zeros((-(-masses.size // 128), 128), np.float32)
    blocks.ravel()[: masses.size] = masses
    inside = np.cumsum(blocks, axis=1, dtype=np.float32)
    inside[1:] += np.cumsum(inside[:-1, -1], dtype=np.float32)[:, None]
    return inside.ravel()[: masses.size]


def exp2(arguments):
    return np.exp2(arguments * np.float32(np.log2(np.e)))


STYLES = {
    "numpy": lambda x, t: np.exp(shifted(x, t)) / np.exp(shifted(x, t)).sum(),
    "torch": lambda x, t: torch.softmax(torch.from_numpy(shifted(x, t)), 0).numpy(),
    "blocked": lambda x, t: np.exp(shifted(x, t)) / blocked_total(np.exp(shifted(x, t))),
    "reversed": lambda x, t: np.exp(shifted(x, t)) / np.exp(shifted(x, t))[::-1].copy().sum(),
    "reciprocal": lambda x, t: np.exp((x - x.max()) * np.float32(1 / t)) * (1 / np.exp(shifted(x, t)).sum()),
    "exp2": lambda x, t: exp2(shifted(x, t)) / exp2(shifted(x, t)).sum(),
}
LOGITS = {
    "normal": lambda rng, size: rng.normal(0, 4, size),
    "flat": lambda rng, size: rng.normal(0, 0.01, size),
    "peaked": lambda rng, size: rng.normal(-30, 10, size) + 40 * (np.arange(size) == 3),
    "tied": lambda rng, size: np.round(rng.normal(0, 2, size)),
    "far from zero": lambda rng, size: rng.normal(-200, 4, size),
    "masked": lambda rng, size: np.where(rng.random(size) < 0.5, -np.inf, rng.normal(0, 4, size)),
}


@pytest.mark.parametrize("temperature", [0.05, 0.6, 1.0, 2.0, 100.0])
@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("style", STYLES)
def test_float32_in_any_style_falls_inside_the_band(style, kind, temperature):
    rng = np.random.default_rng(11)
    for size in (4, 33, 1025):
        logits = LOGITS[kind](rng, size).astype(np.float32)
        row = oracle.enclosure(logits, temperature)
        probs = STYLES[style](logits, temperature)
        assert (row.lower <= probs).all()
        assert (probs <= row.upper).all()
        drafted = rng.choice(size, 3, replace=False).tolist()
        sums = np.cumsum(probs[drafted], dtype=np.float32)
        for value, (lower, upper) in zip(sums.tolist(), row.accept_bounds(drafted), strict=True):
            assert lower <= value <= upper
        residual = probs.copy()
        residual[drafted] = 0
        bonus = row.bonus(drafted)
        running = running_sums(residual)[bonus.tokens].astype(np.float64)
        if running.size == 0 or running[-1] == 0:  # nothing is left, or all that is left underflowed
            continue
        share = running / running[-1]
        lower, upper = (np.array(bound) for bound in bonus.bounds)
        assert (lower <= share).all()
        assert (share <= upper).all()


def test_a_wrong_temperature_falls_outside_the_band():
    logits = np.random.default_rng(2).normal(0, 4, 100).astype(np.float32)
    row, probs = oracle.enclosure(logits, 1.0), STYLES["numpy"](logits, 1.0 + 2**-12)
    assert ((row.lower <= probs) & (probs <= row.upper)).mean() < 0.1


def test_greedy_is_exactly_one_hot():
    row = oracle.enclosure([2.0, 2.0, 1.0], 0.0)
    assert (row.lower.tolist(), row.upper.tolist()) == ([1, 0, 0], [1, 0, 0])


@pytest.mark.parametrize(
    ("logits", "status"),
    [
        ([0, np.nan, np.inf], RowStatus.NAN),
        ([0, np.inf, -np.inf], RowStatus.POS_INF),
        ([-np.inf, -np.inf], RowStatus.EMPTY),
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_enclosure_reports_unusable_rows(logits, status, temperature):
    assert oracle.enclosure(logits, temperature).status is status


def covered(bounds):
    """The measure of coins in [0, 1) that lie inside some band."""
    total, reached = 0.0, 0.0
    for lower, upper in sorted((float(low), float(high)) for low, high in bounds):
        low, high = max(lower, reached), min(upper, 1.0)
        total += max(0.0, high - low)
        reached = max(reached, high)
    return total


def ambiguous_share(tree, rows):
    """The share of the coin space in which float32 may decide either way: each band, as often as met."""
    critical = oracle.critical_coins(tree, rows)
    reach = [1.0] + [0.0] * (len(tree) - 1)
    share = 0.0
    for node in range(len(tree)):
        row, drafted = rows[node], oracle.child_tokens(tree, node)
        for kid, token in zip(tree.children[node], drafted, strict=True):
            reach[kid] = reach[node] * float(row.mass(token))
        stops = max(0.0, 1 - sum(float(row.mass(token)) for token in drafted))
        share += reach[node] * covered(critical.accept.get(node, ()))
        share += reach[node] * stops * covered(critical.final[node])
    return share


def test_the_bands_share_of_the_coin_space_is_tiny():
    """At most 1e-4 in every case that the default strategies draw."""
    shares = []

    @settings(
        max_examples=150,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(strategies.cases_for("logits"))
    def measure(case):
        shares.extend(
            ambiguous_share(request.tree, target_rows(request, "logits")) for request in case.requests
        )

    measure()
    print(f"ambiguous share: mean {np.mean(shares):.2g}, largest {max(shares):.2g}")  # noqa: T201
    assert 0 < max(shares) <= 1e-4


@pytest.mark.parametrize(("vocab", "most_final"), [(1024, 0.01), (49152, 0.1)])
def test_the_bands_share_at_real_sizes(vocab, most_final):
    """Of the accept coins at most 1e-4 are ambiguous; the bonus has one band per token."""
    logits = np.random.default_rng(4).normal(0, 3, vocab).astype(np.float32)
    row = oracle.enclosure(logits, 0.8)
    drafted = np.argsort(-logits)[:8].tolist()
    accept, final = covered(row.accept_bounds(drafted)), covered(row.bonus(drafted).boundaries())
    print(f"V = {vocab}: ambiguous share of accept coins {accept:.2g}, of final coins {final:.2g}")  # noqa: T201
    assert accept <= 1e-4
    assert final <= most_final


def test_sweep_coins_stand_on_both_sides_of_every_boundary():
    tree = TREES["star"]
    rows = oracle.TargetRows.exact([[0.125, 0.625, 0.25]] * 3)
    swept = {accept[0] for accept, _ in oracle.sweep_coins(tree, rows)}
    for boundary in (0.25, 0.375):
        at = np.float32(boundary)
        beside = {float(np.nextafter(at, np.float32(side))) for side in (0, 1)}
        assert {boundary, *beside} <= swept
    assert {0.0, 1 - 2**-24, 1.0} <= swept


def test_rows_never_visited_are_never_made():
    made = []

    def make(row):
        made.append(row)
        return oracle.ExactRow(row)

    rows = oracle.TargetRows(["a", "b"], lambda name: [lambda: make([1.0, 0.0])] if name == "a" else 1 / 0)
    assert oracle.walk(DraftTree.chain([9, 1]), rows, Coins([0.5] * 2, 0.5)).tokens == (0,)
    assert len(made) == 1


@pytest.mark.parametrize(
    "question",
    [oracle.outcome_pmf, oracle.acceptance_pmf, oracle.expected_accepted_length, oracle.critical_coins],
)
def test_a_cap_without_a_slot_is_refused_by_all(question):
    tree, law = DraftTree([-1, 0], [0, 1]), [[0.5, 0.5], [0.25, 0.75]]
    assert question(tree, law, 1) is not None
    with pytest.raises(InvalidArgument, match="depth_cap=0, but must be >= 1: the root takes one slot"):
        question(tree, law, 0)
