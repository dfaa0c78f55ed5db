"""Filters: what is cut exactly, what float32 may see of it, what is refused, and who is handed them."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from treeconv import (
    BackendUnavailable,
    Coins,
    DraftTree,
    InvalidArgument,
    LawBroken,
    RowStatus,
    VerifyCase,
    oracle,
    to_verify_input,
    verify,
    verify_probs,
)
from treeconv._drive import decide, judge_all
from treeconv.backends import registry
from treeconv.backends.base import BackendTraits, FunctionBackend
from treeconv.backends.eager import EagerBackend
from treeconv.backends.registry import get_backend
from treeconv.case import Request
from treeconv.corpus import CorpusEntry
from treeconv.filters import FILTER_ORDERS, Cuts, Filters
from treeconv.judge import Violation, explain, judge, observe, target_rows
from treeconv.laws import law_named
from treeconv.replay import replay_entry, why_not_judged
from treeconv.sampling import filtered_probs

ROOT = DraftTree([-1], [0])
BACKENDS = ["reference", "eager"]


def by_definition(values, cuts):
    """The kept tokens, said once more and slowly: one token at a time, in Fractions."""
    left = sorted((t for t in range(len(values)) if values[t] > 0), key=lambda t: (-values[t], t))
    top = left if cuts.top_k is None else left[: cuts.top_k]
    measured = top if cuts.order == "sequential" else left
    total = sum(Fraction(values[t]) for t in measured)
    kept = set()
    for token in top:
        before = sum((Fraction(values[t]) for t in top[: top.index(token)]), Fraction(0))
        if cuts.top_p < 1 and before >= Fraction(cuts.top_p) * total:
            continue
        if Fraction(values[token]) < Fraction(cuts.min_p) * Fraction(values[left[0]]):
            continue
        kept.add(token)
    return kept


def random_cuts(rng, vocab):
    return Cuts(
        top_k=None if rng.random() < 0.4 else int(rng.integers(1, vocab + 2)),
        top_p=1.0 if rng.random() < 0.4 else int(rng.integers(1, 2**6)) / 2**6,
        min_p=0.0 if rng.random() < 0.4 else int(rng.integers(0, 2**4)) / 2**4,
        order="joint" if rng.random() < 0.5 else "sequential",
    )


def dyadic(rng, vocab, bits=6):
    cuts = np.sort(rng.integers(0, 2**bits + 1, vocab - 1))
    return (np.diff([0, *cuts, 2**bits]) / 2**bits).astype(np.float32)


def test_every_statement_of_the_cut_agrees_with_its_definition():
    rng = np.random.default_rng(0)
    sizes = set()
    for _ in range(600):
        vocab = int(rng.integers(2, 9))
        row, cuts = dyadic(rng, vocab), random_cuts(rng, vocab)
        kept = by_definition(row.tolist(), cuts)
        sizes.add(len(kept))
        total = sum(Fraction(float(row[t])) for t in kept)
        want = [Fraction(float(row[t])) / total if t in kept else 0 for t in range(vocab)]
        for make in (oracle.TargetRows.exact, oracle.TargetRows.from_probs):
            assert [make([row], cuts)[0].mass(token) for token in range(vocab)] == want
        exactly = [Fraction(float(value)) for value in row]
        assert [oracle.TargetRows.exact([exactly], cuts)[0].mass(token) for token in range(vocab)] == want
        assert set(np.flatnonzero(filtered_probs(row, cuts))) == kept
        with np.errstate(divide="ignore"):
            logits = np.log(row)
        seen = oracle.TargetRows.from_logits([logits], 1.0, cuts)
        # Logits round: the cut of the exact law is among those that float32 may see.
        laws = [{t for t in range(vocab) if law.may_have_mass(t)} for law in seen.alternatives(0)]
        assert kept in laws
    assert len(sizes) > 5


# --- what float32 may see -----------------------------------------------------------------------------


def alternatives(row, temperature=None, **cuts):
    """The kept sets that the oracle allows, the exact one first."""
    rows = (
        oracle.TargetRows.from_probs([row], Cuts(**cuts))
        if temperature is None
        else oracle.TargetRows.from_logits(np.array([row], np.float32), temperature, Cuts(**cuts))
    )
    found = rows.alternatives(0)
    return [[token for token in range(len(row)) if law.may_have_mass(token)] for law in found]


def test_dyadic_laws_have_one_law_at_and_beside_a_boundary():
    row = [0.5, 0.25, 0.125, 0.125]
    step = 2.0**-24
    for top_p, kept in ((0.75, 2), (0.75 - step, 2), (0.75 + step, 3), (0.5, 1), (0.5 + step, 2)):
        assert alternatives(row, top_p=top_p) == [list(range(kept))]
    for min_p, kept in ((0.5, 2), (0.5 + step, 1), (0.25, 4), (1.0, 1), (step, 4)):
        assert alternatives(row, min_p=min_p) == [list(range(kept))]


def test_a_sum_that_is_no_power_of_two_leaves_both_laws_at_its_boundary_only():
    row = [0.375, 0.1875, 0.1875, 0.25]  # the top three sum to 13/16; the first to 6/13 of that
    at = float(np.float32(6 / 13))
    cuts = {"top_k": 3, "order": "sequential"}
    assert sorted(map(len, alternatives(row, top_p=at, **cuts))) == [1, 2]
    assert alternatives(row, top_p=at + 1e-4, **cuts) == [[0, 3]]
    assert alternatives(row, top_p=at - 1e-4, **cuts) == [[0]]
    # The joint order measures a law that sums to 1: nothing rounds.
    assert alternatives(row, top_k=3, top_p=0.375, order="joint") == [[0]]
    assert alternatives(row, top_k=3, top_p=0.375 + 2.0**-24, order="joint") == [[0, 3]]


def test_equal_logits_are_a_tie_for_everybody():
    assert alternatives([1, 3, 3, 3, 0], 1.0, top_k=2) == [[1, 2]]
    assert alternatives([0.0] * 4000, 1.0, top_k=7) == [list(range(7))]
    assert alternatives([-0.0, 0.0, 0.0], 1.0, top_k=1) == [[0]]
    assert alternatives([0.0, -0.0, 0.0], 1.0, min_p=1.0) == [[0, 1, 2]]


def test_logits_that_one_float32_probability_may_hold_are_a_tie_for_some():
    """At T = 1e30 all masses are equal in float32, so a sampler may keep the lower ids."""
    found = alternatives([0, 2, 1], 1e30, top_k=1)
    assert found[0] == [1]
    assert sorted(found) == [[0], [1], [2]]
    assert alternatives([0, 2, 1], 1.0, top_k=1) == [[1]]


def test_a_cut_in_a_tail_of_tiny_masses_has_one_loose_row():
    """Hundreds of lengths lie inside the band; all of them differ by less than the band in mass."""
    row = np.zeros(4096, np.float32)
    row[1:] = -16.0
    at = float(np.float32(1 - 2048 * np.exp(-16.0)))
    rows = oracle.TargetRows.from_logits([row], 1.0, Cuts(top_p=at))
    exact, loose = rows.alternatives(0)
    assert exact.must_have_mass(1)
    assert sum(exact.may_have_mass(token) for token in range(4096)) < 4096
    assert loose.must_have_mass(0)
    assert not loose.must_have_mass(4095)
    width = [upper - lower for lower, upper in (row.accept_bounds([0])[0] for row in (exact, loose))]
    assert width[0] <= width[1] < 1e-3


def test_greedy_and_unusable_rows_are_what_they_were():
    cuts = Cuts(top_k=2, top_p=0.5, min_p=0.5)
    row = oracle.TargetRows.from_logits([[1.0, 3.0, 3.0]], 0.0, cuts)[0]
    assert [row.mass(token) for token in range(3)] == [0, 1, 0]
    for values, status in (([np.nan, 1], RowStatus.NAN), ([-np.inf] * 2, RowStatus.EMPTY)):
        assert oracle.TargetRows.from_logits([values], 1.0, cuts)[0].status is status
    assert oracle.TargetRows.from_probs([[0.5, -0.5]], cuts)[0].status is RowStatus.NAN


def test_the_judge_follows_every_law_but_mixes_none():
    """Two laws at a cut: a bonus of either is right with its own boundaries, not with the other's."""
    row = [0.375, 0.1875, 0.1875, 0.25]
    cuts = {"top_k": 3, "top_p": float(np.float32(6 / 13))}
    request = Request(ROOT, np.array([row], np.float32), 1.0, [0.5], 0.5, **cuts)
    rows = target_rows(request, "probs")
    assert len(list(rows.alternatives(0))) == 2
    batch, slots = to_verify_input([ROOT]), 1

    def judged(token, final):
        output = EagerBackend().verify_probs(
            batch, torch.tensor([[row]]), Coins(torch.tensor([[0.5]]), torch.tensor([final])), 1
        )
        output = replace(output, predicts=torch.tensor([token], dtype=torch.int32))
        return judge(ROOT, rows, [0.5], final, 1, observe([ROOT], output, slots)[0])

    assert judged(0, 0.9) is None  # token 3 was cut: all mass on 0
    assert judged(3, 0.9) is None  # it was kept: above .6
    assert judged(0, 0.3) is None
    assert judged(3, 0.3) is not None  # no law has it there
    assert judged(1, 0.9) is not None


# --- arguments ----------------------------------------------------------------------------------------

LOGITS = torch.tensor([[[3.0, 2.0, 1.0, 0.0]], [[3.0, 2.0, 1.0, 0.0]]])
BATCH = to_verify_input([ROOT, ROOT])
LAST = Coins(torch.full((2, 1), 0.5), torch.full((2,), 1 - 2.0**-24))


def last_tokens(backend="eager", **filters):
    """The last token with mass in each request: final coins just below 1."""
    return [tokens[-1] for tokens in verify(BATCH, LOGITS, 1.0, LAST, backend=backend, **filters).tokens]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("filters", "tokens"),
    [
        ({}, [3, 3]),
        ({"top_k": 2}, [1, 1]),
        ({"top_k": [2, None]}, [1, 3]),
        ({"top_k": (None, 1)}, [3, 0]),
        ({"top_k": np.array([3, 2])}, [2, 1]),
        ({"top_k": torch.tensor([3, 2**30])}, [2, 3]),
        ({"top_p": 0.5}, [0, 0]),
        ({"top_p": [1, 0.7]}, [3, 1]),
        ({"min_p": 0.1}, [2, 2]),
        ({"min_p": [0, 1]}, [3, 0]),
        ({"top_k": 3, "top_p": 0.9}, [1, 1]),
        ({"top_k": 3, "top_p": 0.9, "filter_order": "joint"}, [2, 2]),
        ({"top_k": np.int64(3), "top_p": np.float32(1.0), "min_p": torch.tensor(0.0)}, [2, 2]),
    ],
)
def test_each_form_of_each_filter(backend, filters, tokens):
    assert last_tokens(backend, **filters) == tokens


@pytest.mark.parametrize(
    ("filters", "message"),
    [
        ({"top_k": 0}, "top_k=0, but must be an integer >= 1, or None for no cut"),
        ({"top_k": -1}, "top_k=-1, but must be"),
        ({"top_k": 2.0}, r"top_k=2\.0, but must be"),
        ({"top_k": True}, "top_k=True, but must be"),
        ({"top_k": [1, 0]}, r"top_k=0, but must be .*request 1"),
        ({"top_k": [1]}, r"top_k=\[1\], but must be one number, or 2, one per request"),
        ({"top_p": 0}, r"top_p=0, but must be in \(0, 1\]"),
        ({"top_p": 1.5}, r"top_p=1\.5, but must be in \(0, 1\]"),
        ({"top_p": 1 + 1e-12}, r"top_p=1\.000000000001, but must be"),
        ({"top_p": 1e-60}, "top_p=1e-60, but must be"),  # it would round to 0, which keeps nothing
        ({"top_p": float("nan")}, "top_p=nan, but must be"),
        ({"top_p": "x"}, "top_p='x', but must be a number"),
        ({"min_p": -0.1}, r"min_p=-0\.1, but must be in \[0, 1\]"),
        ({"min_p": [0, 2]}, r"min_p=2, but must be in \[0, 1\] .*request 1"),
        ({"top_p": "0.5"}, "top_p='0.5', but must be a number"),
        ({"min_p": "0.5"}, "min_p='0.5', but must be a number"),
        ({"top_p": b"1"}, "top_p=b'1', but must be a number"),
        ({"top_p": np.array(["1", "1"])}, "top_p='1', but must be a number"),
        ({"top_p": True}, "top_p=True, but must be a number"),
        ({"min_p": [True, 0]}, "min_p=True, but must be a number"),
        ({"min_p": 1j}, "min_p=1j, but must be a number"),
        ({"top_p": 10**400}, "top_p=10+, but must be in"),
        ({"top_p": [[0.5], [0.5]]}, r"top_p=\[0.5\], but must be a number"),
        ({"filter_order": np.array(["joint", "joint"])}, "filter_order=array.*, but must be 'sequential'"),
        ({"filter_order": np.array(["joint"])}, "filter_order=array.*, but must be 'sequential'"),
        ({"filter_order": "last"}, "filter_order='last', but must be 'sequential' or 'joint'"),
    ],
)
def test_wrong_filters_are_refused(filters, message):
    with pytest.raises(InvalidArgument, match=message):
        verify(BATCH, LOGITS, **filters)
    with pytest.raises(InvalidArgument, match=message):
        verify_probs(BATCH, LOGITS.softmax(-1), **filters)


def test_a_backend_without_filters_is_refused_with_them_and_asked_without():
    def mine(batch, logits, temperature, coins, depth_cap):
        return EagerBackend().verify(batch, logits, temperature, coins, depth_cap)

    backend = FunctionBackend(mine, "mine")
    for off in ({}, {"top_k": 4, "top_p": 1.0, "min_p": 0.0}, {"top_k": [None, 9], "filter_order": "joint"}):
        assert last_tokens(backend, **off) == [3, 3]
    with pytest.raises(BackendUnavailable, match="backend='mine' takes no filters"):
        last_tokens(backend, top_k=3)
    with pytest.raises(BackendUnavailable, match="backend='mine' takes no filters"):
        last_tokens(backend, top_k=[None, 3])


@pytest.mark.parametrize("takes", [False, True])
def test_auto_passes_over_a_gpu_backend_without_filters_where_one_is_on(monkeypatch, takes):
    class Fast(EagerBackend):
        name = "triton"
        traits = BackendTraits(takes_filters=takes)

    monkeypatch.setitem(registry._loaded, "triton", Fast())
    cuda = torch.device("cuda")
    assert registry.choose_backend(cuda).name == "triton"
    assert registry.choose_backend(cuda, takes_filters=True).name == ("triton" if takes else "eager")
    assert registry.choose_backend(torch.device("cpu"), takes_filters=True).name == "eager"


def test_a_function_that_takes_filters_is_handed_them_or_none():
    handed = []

    def mine(batch, target_probs, coins, depth_cap, filters):
        handed.append(filters)
        return EagerBackend().verify_probs(batch, target_probs, coins, depth_cap, filters)

    backend = FunctionBackend(mine, "mine")
    assert backend.traits.takes_filters
    probs = LOGITS.softmax(-1)
    verify_probs(BATCH, probs, LAST, backend=backend)
    output = verify_probs(BATCH, probs, LAST, backend=backend, top_k=[1, None], filter_order="joint")
    assert output.tokens == [[0], [3]]
    assert handed[0] is None
    assert handed[1].cuts() == [Cuts(1, order="joint"), Cuts(4, order="joint")]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_request_without_filters_is_decided_as_if_nobody_had_any(backend):
    """Probabilities that sum to 3/4 show it: compared as they are, where a filter would divide by the sum."""
    tree = DraftTree([-1, 0], [0, 1])
    batch = to_verify_input([tree, tree])
    probs = torch.tensor([[[0.25, 0.5, 0.0]] * 2] * 2)
    coins = Coins(torch.full((2, 2), 0.6), torch.full((2,), 0.5))
    output = verify_probs(batch, probs, coins, backend=backend, top_k=[2, None])
    assert output.accept_token_num.tolist() == [1, 0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_unusable_rows_are_reported_beside_filtered_ones(backend):
    rows = [[float("nan"), 1, 2], [1, float("inf"), 0], [-float("inf")] * 3, [0, 2, 1]]
    batch = to_verify_input([ROOT] * 4)
    output = verify(batch, torch.tensor(rows)[:, None], [1, 1, 1, 0.5], backend=backend, top_k=1, min_p=0.5)
    assert output.status.tolist() == [RowStatus.NAN, RowStatus.POS_INF, RowStatus.EMPTY, RowStatus.OK]
    assert output.tokens == [[], [], [], [1]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_ties_at_every_place_of_a_row_go_to_the_lowest_id(backend, dtype):
    """The vectorised and the scalar exponential of one row may differ in the last bit; ties must not."""
    vocab = 1037
    logits = torch.full((1, 1, vocab), -1.3, dtype=dtype)
    logits[..., 0] = 0.1
    batch, last_coins = to_verify_input([ROOT]), Coins([[0.5]], [1 - 2.0**-24])

    def last(**filters):
        return verify(batch, logits, 0.7, last_coins, backend=backend, **filters).tokens[0][0]

    assert [last(top_k=k) for k in (1, 2, 517, 1036)] == [0, 1, 516, 1035]
    for step in range(60):  # some of these differ in the last bit between the middle and the end of a row
        temperature = 0.5 + step / 64
        two = verify(batch, logits, temperature, last_coins, backend=backend, top_k=2)
        assert two.tokens == [[1]]
    for top_p in (0.2, 0.9):
        law = oracle.TargetRows.from_logits(logits[0].float().numpy(), 0.7, Cuts(top_p=top_p))
        kept = [[t for t in range(vocab) if row.may_have_mass(t)] for row in law.alternatives(0)]
        assert last(top_p=top_p) in {max(tokens) for tokens in kept}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("seed", range(6))
def test_large_vocabularies_full_of_ties(backend, seed):
    """Dyadic masses of few values over 5000 tokens: cuts inside ties, within and beyond any short list."""
    rng = np.random.default_rng(seed)
    vocab = 5000
    requests = []
    for top_k in (1, 700, 1024, 1025, 1500, 4999, None):
        row = rng.multinomial(4096, rng.dirichlet([[0.05, 0.3, 1.0, 30.0][seed % 4]] * vocab)) / 4096
        top_p = 1.0 if rng.random() < 0.3 else int(rng.integers(1, 2**12)) / 2**12
        min_p = 0.0 if rng.random() < 0.5 else 2.0 ** -int(rng.integers(1, 6))
        settings = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
        requests.append(Request(ROOT, [row.astype(np.float32)], 1.0, [0.5], 0.5, **settings))
    for order in FILTER_ORDERS:
        case = VerifyCase(tuple(requests), kind="probs", filter_order=order)
        coins = [([0.5], (k + 0.5) / 40) for k in range(40)] + [([0.5], 0.0), ([0.5], 1 - 2.0**-24)]
        for index in range(len(requests)):
            judge_all(case, get_backend(backend), "cpu", coins, index)
        # And all in one batch: some lanes are decided by the short list, some are not.
        batched = decide(case, get_backend(backend), "cpu")
        for request, observed in zip(requests, batched, strict=True):
            rows = target_rows(request, "probs", order)
            assert judge(ROOT, rows, [0.5], request.final, 1, observed) is None


# --- data ---------------------------------------------------------------------------------------------


def test_filters_are_float32_and_compare():
    cuts = Cuts(np.int64(3), 0.9, 0.1)
    assert (cuts.top_k, cuts.top_p, cuts.min_p) == (3, float(np.float32(0.9)), float(np.float32(0.1)))
    assert type(cuts.top_k) is int
    assert Cuts(min_p=-0.0).min_p.hex() == "0x0.0p+0"
    request = Request(ROOT, [[1.0, 2.0]], 1.0, [0.5], 0.5)
    assert request == replace(request, top_k=None, top_p=1, min_p=0)
    assert request != replace(request, top_p=0.5)
    assert request.with_coins([0.1], 0.2).cuts() == request.cuts()
    with pytest.raises(InvalidArgument, match="top_k=0"):
        replace(request, top_k=0)


@pytest.mark.parametrize(
    ("cuts", "is_on"),
    [
        (Cuts(), False),
        (Cuts(top_k=8), False),
        (Cuts(top_k=7), True),
        (Cuts(top_p=1.0), False),
        (Cuts(top_p=1 - 2.0**-24), True),
        (Cuts(min_p=2.0**-149), True),
        (Cuts(order="joint"), False),
    ],
)
def test_when_filters_are_on(cuts, is_on):
    assert cuts.are_on(8) == is_on


def test_filters_of_a_batch_come_back_per_request():
    given = [Cuts(3, 0.5, 0.25, "joint"), Cuts(order="joint"), Cuts(2**40, order="joint")]
    filters = Filters.of(given, 8, "joint")
    assert [t.dtype for t in (filters.top_k, filters.top_p, filters.min_p)] == [
        torch.int64,
        torch.float32,
        torch.float32,
    ]
    assert filters.cuts() == [given[0], Cuts(8, order="joint"), Cuts(8, order="joint")]


def test_a_case_hands_filters_over_only_where_one_is_on():
    request = Request(ROOT, [[1.0, 2.0]], 1.0, [0.5], 0.5)
    assert VerifyCase((request, replace(request, top_k=2))).tensors().filters is None
    filters = VerifyCase((request, replace(request, top_k=1)), filter_order="joint").tensors().filters
    assert filters.top_k.tolist() == [2, 1]
    assert filters.order == "joint"
    with pytest.raises(InvalidArgument, match="filter_order='x'"):
        VerifyCase((request,), filter_order="x")


def test_a_stored_case_with_filters_says_nothing_about_a_backend_without():
    def mine(batch, logits, temperature, coins, depth_cap):
        return EagerBackend().verify(batch, logits, temperature, coins, depth_cap)

    backend = FunctionBackend(mine, "mine")
    case = VerifyCase((Request(ROOT, [[1.0, 2.0]], 1.0, [0.5], 0.5, top_k=1),))
    for law in ("oracle-agreement", "filters-logits"):
        entry = CorpusEntry(law, case)
        assert "filters" in why_not_judged(entry, backend)
        assert why_not_judged(entry, EagerBackend()) is None
        assert replay_entry(entry, EagerBackend()) > 0


def test_a_case_is_judged_without_the_filters_that_a_backend_does_not_claim():
    """And so is what a failure stores, or its replay line would judge nothing."""

    def mine(batch, logits, temperature, coins, depth_cap):
        output = EagerBackend().verify(batch, logits, temperature, coins, depth_cap)
        return output if right else replace(output, predicts=1 - output.predicts)

    case = VerifyCase((Request(ROOT, [[1.0, 2.0]], 1.0, [0.5], 0.1, top_k=1),))
    backend, right = FunctionBackend(mine, "mine"), True
    assert law_named("oracle-agreement").run(case, backend) > 0
    right = False
    with pytest.raises(LawBroken) as broken:
        law_named("oracle-agreement").run(case, backend)
    assert not broken.value.case.is_filtered
    assert why_not_judged(CorpusEntry("oracle-agreement", broken.value.case), backend) is None


def test_a_failure_says_which_filters_were_on():
    request = Request(ROOT, [[1.0, 2.0]], 1.0, [0.5], 0.5, top_k=1, top_p=0.5)
    case = VerifyCase((request,), filter_order="joint")
    text = str(explain("filters", "m", "b", case, Violation(0, "got", "want")))
    assert ", temperature 1.0, top_k 1, top_p 0.5, joint order, 1 accept slots" in text
    assert "p = {1: 1}" in text  # the law after the filters
    off = VerifyCase((replace(request, top_k=None, top_p=1),))
    assert "top_" not in str(explain("filters", "m", "b", off, Violation(0, "got", "want")))
