"""Contract: the wide float64 oracle is the exact one, request by request; and it sees what is planted.

Outside the ambiguity band the two agree on path, tokens and status; inside it the wide one takes a decision
that the exact one admits, and never calls a request sure that is not. On dyadic laws they agree everywhere.
"""

import numpy as np
import pytest
import torch
from faults import FAULTS, Sampler

from treeconv import oracle, to_draft_trees, to_verify_input
from treeconv.backends.base import BackendTraits
from treeconv.backends.registry import get_backend
from treeconv.errors import InvalidArgument
from treeconv.fuzzing.bulk import Launch, launch
from treeconv.judge import Observed, Violation, is_ambiguous, judge, target_rows
from treeconv.tree import RowStatus, VerifyOutput
from treeconv.wide import random_calls
from treeconv.wide_oracle import decide

FORMS = [("logits", "float32"), ("logits", "bfloat16"), ("logits", "float16"), ("probs", "float32")]


def decided(calls):
    temperature = calls.temperature if calls.kind == "logits" else None
    coins = calls.coins
    return decide(
        calls.parents,
        calls.batch.candidates,
        calls.rows,
        temperature,
        coins.accept,
        coins.final,
        calls.depth_cap,
    )


def one(decisions, request):
    used = decisions.nodes[request] >= 0
    path, tokens = (tuple(part[request][used].tolist()) for part in (decisions.nodes, decisions.tokens))
    return path, tokens, int(decisions.status[request])


@pytest.mark.parametrize("cap", [None, 1, 3])
@pytest.mark.parametrize(("slots", "vocab"), [(9, 9), (16, 64), (5, 67)])
@pytest.mark.parametrize(("kind", "dtype"), FORMS)
def test_decisions_are_the_exact_oracles(kind, dtype, slots, vocab, cap):
    seed = 1000 * slots + 10 * (cap or 0) + FORMS.index((kind, dtype))
    calls = random_calls(
        seed, 120, num_slots=slots, vocab_size=vocab, kind=kind, rows_dtype=dtype, depth_cap=cap, call_size=50
    )
    decisions = decided(calls)
    ambiguous = 0
    for request, subject in enumerate(calls.case(range(len(calls))).requests):
        rows = target_rows(subject, kind)
        coins = (subject.accept.tolist(), subject.final)
        want = oracle.canonical_walk(subject.tree, rows, *coins, calls.depth_cap)
        got = one(decisions, request)
        is_open = is_ambiguous(subject.tree, rows, *coins, calls.depth_cap)
        if is_open:
            ambiguous += 1
            assert bool(decisions.unsure[request])
            observed = Observed(*got[:2], RowStatus(got[2]))
            assert judge(subject.tree, rows, *coins, calls.depth_cap, observed) is None
        if kind == "probs" or not is_open:
            assert got == (want.path, want.tokens, int(want.status))
    assert ambiguous < 0.2 * len(calls)


@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_unusable_rows_are_reported_where_they_are_visited(kind):
    calls = random_calls(3, 300, num_slots=6, vocab_size=8, kind=kind)
    bad = {"logits": (np.nan, np.inf, -np.inf), "probs": (np.nan, np.inf, 0.0, -0.25)}[kind]
    generator = np.random.default_rng(0)
    for request in range(0, 300, 2):
        node = int(generator.integers(0, int((calls.parents[request] > -2).sum())))
        value = bad[request // 2 % len(bad)]
        whole = value in (-np.inf, 0.0)
        calls.rows[request, node, : 8 if whole else 3] = value
    decisions = decided(calls)
    reported = 0
    for request, subject in enumerate(calls.case(range(300)).requests):
        rows = target_rows(subject, kind)
        coins = (subject.accept.tolist(), subject.final)
        if is_ambiguous(subject.tree, rows, *coins, calls.depth_cap):
            continue
        want = oracle.canonical_walk(subject.tree, rows, *coins, calls.depth_cap)
        assert one(decisions, request) == (want.path, want.tokens, int(want.status))
        reported += want.status is not RowStatus.OK
    assert reported > 40


def test_the_trees_are_converted_as_the_converter_does():
    calls = random_calls(1, 500, num_slots=12, vocab_size=30, call_size=500)
    trees = [request.tree for request in calls.case(range(500)).requests]
    assert to_draft_trees(calls.batch) == trees
    converted = to_verify_input(trees, 12)
    for name in converted.__dataclass_fields__:
        assert torch.equal(getattr(converted, name), getattr(calls.batch, name)), name


def test_calls_begin_their_flat_indices_anew():
    calls = random_calls(1, 25, num_slots=4, vocab_size=9, call_size=10)
    for start, size in ((0, 10), (10, 10), (20, 5)):
        call = calls.call(start)
        assert len(call) == size
        assert torch.equal(call.batch.retrieve_index, torch.arange(4 * size).view(size, 4))
        assert call.case([0]) == calls.case([start])


def test_the_rare_is_common():
    calls = random_calls(2, 2000)
    sizes = (calls.parents > -2).sum(1)
    depth = calls.batch.positions.amax(1)
    decisions = decided(calls)
    lengths = (decisions.nodes >= 0).sum(1)
    share = {
        "one node": (sizes == 1).float().mean(),
        "chain": ((depth + 1 == sizes) & (sizes > 3)).float().mean(),
        "star": ((depth == 1) & (sizes > 3)).float().mean(),
        "greedy": (calls.temperature == 0).float().mean(),
        "three or more accepted": (lengths > 3).float().mean(),
        "a child of the last token": (calls.batch.candidates[:, 1:] == 63).any(1).float().mean(),
        "a child of token 0": ((calls.batch.candidates == 0) & (calls.parents >= 0)).any(1).float().mean(),
        "masked rows": (calls.rows == -torch.inf).any(2).any(1).float().mean(),
        "a coin of 0": (calls.coins.accept[:, 0] == 0).float().mean(),
        "a final coin of 1": (calls.coins.final == 1).float().mean(),
    }
    assert {name: float(value) for name, value in share.items() if value < 0.008} == {}
    dyadic = random_calls(2, 500, kind="probs").rows
    dyadic = dyadic[~dyadic.isnan().any(2)]
    assert torch.equal(dyadic.double().sum(1), torch.ones(len(dyadic), dtype=torch.float64))
    assert torch.equal((dyadic * 2**12).floor(), dyadic * 2**12)
    assert (dyadic == 0).any(1).float().mean() > 0.3


def test_a_seed_fixes_everything():
    first, again, other = (random_calls(seed, 64) for seed in (4, 4, 5))
    for name in ("parents", "temperature"):
        assert torch.equal(getattr(first, name), getattr(again, name))
    assert first.rows.view(torch.int32).equal(again.rows.view(torch.int32))
    assert not torch.equal(first.coins.accept, other.coins.accept)


def test_coins_are_planted_beside_boundaries():
    """On dyadic laws at the boundary itself and one float32 below it, more often than chance would."""
    calls = random_calls(6, 3000, kind="probs")
    law = calls.rows[:, 0].double()
    is_child = calls.parents == 0
    sums = torch.where(is_child, law.gather(1, calls.batch.candidates), 0.0).cumsum(1)
    coin = calls.coins.accept[:, :1].double()
    at = (is_child & (sums == coin) & (coin > 0) & (coin < 1)).any(1)
    below = torch.nextafter(sums.float(), torch.tensor(-1.0)).double()
    beside = (is_child & (below == coin) & (coin > 0)).any(1)
    assert at.float().mean() > 0.03
    assert beside.float().mean() > 0.03


# --- what it kills ------------------------------------------------------------------------------------


def surely_wrong(sampler, kind, seed=3, count=1024, **shape):
    done = launch(Launch(seed, count, kind, **shape), sampler, "cpu")
    return int((done.differing & ~done.decisions.unsure).sum())


class HalfOpenOffByOneUlp(Sampler):
    """Buckets closed one unit too late."""

    def hits(self, coin, acc, mass):
        return mass > 0 and np.nextafter(coin, np.float32(-1)) < acc


class CoinZeroAcceptsZeroMass(Sampler):
    def hits(self, coin, acc, mass):
        return (mass > 0 and coin < acc) or coin == 0


class OnlyForTokenZero(Sampler):
    """Token 0 is never accepted."""

    def test(self, walk, path, kids, p):
        accepted, rejected = super().test(walk, path, kids, p)
        if accepted is not None and walk.tokens[accepted] == 0:
            return None, [walk.tokens[kid] for kid in kids]
        return accepted, rejected


class OnlyBehindTheFirstRequest(Sampler):
    def temperature(self, walk):
        return 1.0 if walk.index and walk.temperature == 2 else walk.temperature


class BucketsOffByAMillionth(Sampler):
    """An absolute bias of 2e-5 in one bucket."""

    def hits(self, coin, acc, mass):
        return mass > 0 and coin < acc - np.float32(2e-5)


@pytest.mark.parametrize(
    ("sampler", "kind"),
    [
        (HalfOpenOffByOneUlp, "probs"),
        (CoinZeroAcceptsZeroMass, "probs"),
        (CoinZeroAcceptsZeroMass, "logits"),
        (OnlyForTokenZero, "probs"),
        (OnlyBehindTheFirstRequest, "logits"),
        (BucketsOffByAMillionth, "logits"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_one_launch_kills(sampler, kind):
    assert surely_wrong(sampler(), kind) > 0


#: Faults of the library that a call of usable rows under its own coins can show.
KILLED = [
    "inclusive-test",
    "coin-zero-accepts-zero-mass",
    "bonus-test-inclusive",
    "falls-back-to-last-id",
    "empty-residual-emits-last-id",
    "ratio-test",
    "match-or-ratio",
    "shares-coin-among-children",
    "temperature-ignored",
    "temperature-twice",
    "always-greedy",
    "bonus-without-temperature",
    "residual-unmasked",
    "bonus-from-parent-row",
    "softmax-of-residual",
    "coin-reused-one-level-down",
    "final-coin-is-accept-coin",
    "coin-of-the-child",
    "own-coins",
    "first-child-only",
    "lost-third-sibling",
    "siblings-tested-in-reverse",
    "siblings-reversed-in-output",
    "token-zero-means-none",
    "rows-shifted-by-one",
    "parent-row-from-depth-three",
    "temperature-of-request-zero",
    "mixed-temperatures-are-sampled",
    "rows-of-request-zero",
    "counts-the-bonus",
    "last-tie-wins",
    "temperature-clamped",
    "sums-in-half-precision",
    "offset-wraps",
]


def planted(name):
    return next(fault for fault in FAULTS if fault.name == name).made()


@pytest.mark.parametrize("name", KILLED)
def test_one_launch_of_each_kind_kills_planted_faults(name):
    assert any(surely_wrong(planted(name), kind) for kind in ("logits", "probs"))


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("drops-tail-of-vocabulary", {"vocab_size": 67}),
        ("depth-cap-ignored", {"depth_cap": 3}),
        ("rejects-at-the-cap", {"depth_cap": 3}),
    ],
)
def test_the_shapes_of_a_round_reach_the_others(name, shape):
    assert any(surely_wrong(planted(name), kind, **shape) for kind in ("logits", "probs"))


@pytest.mark.parametrize("kind", ["logits", "probs"])
@pytest.mark.parametrize("backend", ["eager", "reference", "planted faults' own"])
def test_right_samplers_are_surely_right(backend, kind):
    sampler = Sampler() if backend.startswith("planted") else get_backend(backend)
    for seed, cap in ((1, None), (2, 3)):
        done = launch(Launch(seed, 2048, kind, depth_cap=cap), sampler, "cpu")
        assert not bool((done.differing & ~done.decisions.unsure).any())
        assert float(done.differing.float().mean()) < (0.02 if kind == "logits" else 1e-9)


def test_every_part_of_an_output_is_compared():
    calls = random_calls(8, 64, num_slots=6, vocab_size=10, call_size=64)
    decisions = decided(calls)
    right = submit_to_eager(calls)
    sure = ~decisions.unsure
    assert not bool((decisions.differing(right, 6, 64) & sure).any())
    base = (torch.arange(64) * 6)[:, None]
    at = torch.where(right.accept_index >= 0, right.accept_index, base)
    predicts = right.predicts.clone()
    predicts[at[:, 0].long()] += 1
    wrong = {
        "accept_index": right.accept_index + 1,
        "accept_token_num": right.accept_token_num + 1,
        "predicts": predicts,
        "status": right.status + 1,
    }
    for name, value in wrong.items():
        output = VerifyOutput(**{**vars(right), name: value})
        assert bool(decisions.differing(output, 6, 64).all()), name


def submit_to_eager(calls):
    return get_backend("eager").verify(
        calls.batch, calls.rows, calls.temperature, calls.coins, calls.depth_cap
    )


def test_a_backend_that_raises_is_a_violation():
    class Raises(Sampler):
        traits = BackendTraits(devices=("cpu",))

        def run(self, *_):
            raise InvalidArgument("no")

    with pytest.raises(Violation):
        launch(Launch(1, 8), Raises(), "cpu")
