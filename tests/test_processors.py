"""Processors: what is refused, what is counted, and how far the oracle lets float32 stray."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import Phase, find, given, settings
from hypothesis import strategies as st

from treeconv import (
    BackendUnavailable,
    Coins,
    DraftTree,
    InvalidArgument,
    Request,
    RowStatus,
    VerifyCase,
    oracle,
    to_verify_input,
    verify,
)
from treeconv._drive import as_probs
from treeconv.backends.base import BackendTraits, FunctionBackend
from treeconv.backends.eager import EagerBackend
from treeconv.backends.registry import choose_backend, get_backend
from treeconv.corpus import CorpusEntry, load_entry, save_entry
from treeconv.judge import target_rows
from treeconv.laws import law_named, why_not
from treeconv.oracle._processors import ProcessedLogits, processed_alternatives
from treeconv.processors import PENALTIES, PROCESSORS, Processors, RequestProcessors, pack_bitmask
from treeconv.replay import replay_entry
from treeconv.sampling import processed_logits
from treeconv.shrink import shrink
from treeconv.strategies import cases_for

CHAIN = DraftTree.chain([3, 1, 3])
BATCH = to_verify_input([DraftTree([-1, 0], [5, 6])])
ZEROS = torch.zeros(1, 2, 40)


def request(processors, tree=CHAIN, rows=None, temperature=1.0):
    rows = np.zeros((len(tree), 5), np.float32) if rows is None else np.array(rows, np.float32)
    return Request(tree, rows, temperature, [0.5] * len(tree), 0.5, processors=processors)


# What is refused.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"repetition_penalty": 0}, r"repetition_penalty=0, but must be a finite float32 > 0"),
        ({"repetition_penalty": [-1.0]}, r"repetition_penalty=-1.0, but must be a finite float32 > 0"),
        ({"frequency_penalty": float("nan")}, r"frequency_penalty=nan, but must be a finite float32"),
        ({"presence_penalty": 1e39}, r"presence_penalty=1e\+39, but must be a finite float32"),
        ({"presence_penalty": "much"}, r"presence_penalty='much', but must be a finite float32"),
        ({"presence_penalty": [1.0, 2.0]}, r"presence_penalty=\[1.0, 2.0\], but must be one number, or 1"),
        ({"logit_bias": torch.zeros(1, 39)}, r"logit_bias.shape=\(1, 39\), but must be \(1, 40\)"),
        (
            {"logit_bias": torch.zeros(1, 40).double()},
            "logit_bias.dtype=torch.float64, but must be torch.float32",
        ),
        ({"logit_bias": "none"}, "logit_bias=str, but must be an array"),
        (
            {"token_bitmask": torch.zeros(1, 2, 1).int()},
            r"token_bitmask.shape=\(1, 2, 1\), but must be \(1, 2, 2\)",
        ),
        (
            {"token_bitmask": torch.zeros(1, 2, 2).bool()},
            "token_bitmask.dtype=torch.bool, but must be torch.int32",
        ),
        (
            {"presence_penalty": 1, "committed_tokens": [1, 2]},
            r"committed_tokens=\[1, 2\], but must be 1 lists",
        ),
        (
            {"presence_penalty": 1, "committed_tokens": [[-1]]},
            "committed_tokens holds -1, but must hold token ids",
        ),
        (
            {"presence_penalty": 1, "committed_tokens": torch.zeros(2, 3).long()},
            r"committed_tokens.shape=\(2, 3\)",
        ),
        (
            {"logit_bias": np.ones((1, 40)) * 1j},
            "logit_bias.dtype=torch.complex128, but must be real numbers",
        ),
        ({"logit_bias": [[1e300] * 40]}, r"logit_bias holds 1e\+300, but must hold what float32 can"),
        (
            {"logit_bias": np.full((1, 40), -1e39)},
            r"logit_bias holds -1e\+39, but must hold what float32 can",
        ),
        ({"logit_bias": [[10**400] * 40]}, "logit_bias=list, but must be an array"),
        ({"logit_bias": torch.zeros(1, 40).to_sparse()}, "logit_bias.layout=torch.sparse_coo, but must be"),
        *(
            ({name: value}, f"{name}={value!r}, but must be a finite float32")
            for name in PENALTIES
            for value in ("1.5", b"2", True)
        ),
        ({"presence_penalty": [False]}, "presence_penalty=False, but must be a finite float32"),
        ({"presence_penalty": np.array(["1"])}, "presence_penalty='1', but must be a finite float32"),
        *(
            ({"committed_tokens": value, **on}, message)
            for on in ({}, {"presence_penalty": 1})  # nothing is on: looked at all the same
            for value, message in (
                ([["a"]], "committed_tokens holds 'a', but must hold integers"),
                ([[float("nan")]], "committed_tokens holds nan, but must hold integers"),
                ([[float("inf")]], "committed_tokens holds inf, but must hold integers"),
                ([[2**63]], "committed_tokens holds 9223372036854775808, but must hold token ids below"),
                ([[1.5]], "committed_tokens holds 1.5, but must hold integers"),
                ([[True]], "committed_tokens holds True, but must hold integers"),
                ([[np.True_]], "committed_tokens holds .*True_?, but must hold integers"),
                ([None], r"committed_tokens=\[None\], but must be 1 lists"),
                (["12"], r"committed_tokens=\['12'\], but must be 1 lists"),
                ([b"12"], r"committed_tokens=\[b'12'\], but must be 1 lists"),
                ("7", "committed_tokens='7', but must be 1 lists"),
                ("garbage!", "committed_tokens='garbage!', but must be 1 lists"),
                (7, "committed_tokens=7, but must be 1 lists"),
                (
                    torch.tensor([[-7]]),
                    "committed_tokens holds -7, but must hold token ids >= 0, or -1 in pad",
                ),
                (np.array([[1.5]]), "committed_tokens.dtype=torch.float64, but must be torch.int64"),
                (torch.tensor([1]), r"committed_tokens.shape=\(1,\), but must be \(1, 'L'\)"),
            )
        ),
    ],
)
def test_refusals(given, message):
    with pytest.raises(InvalidArgument, match=message):
        verify(BATCH, ZEROS, backend="reference", **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logit_bias": np.zeros(4)}, r"logit_bias.shape=\(4,\), but must be \(5,\)"),
        (
            {"token_bitmask": np.zeros((2, 1), np.int32)},
            r"token_bitmask.shape=\(2, 1\), but must be \(3, 1\)",
        ),
        ({"token_bitmask": np.zeros((3, 1))}, "token_bitmask.dtype=float64, but must be int32"),
        ({"committed_tokens": (1, -2)}, "committed_tokens holds -2, but must hold token ids >= 0"),
        ({"committed_tokens": (1.5,)}, "committed_tokens holds 1.5, but must hold integers"),
        ({"committed_tokens": "12"}, "committed_tokens='12', but must be a list of token ids"),
        ({"committed_tokens": 12}, "committed_tokens=12, but must be a list of token ids"),
        (
            {"committed_tokens": (2**63,)},
            r"committed_tokens holds 9223372036854775808, but must hold token ids",
        ),
        ({"logit_bias": np.ones(5) * 1j}, "logit_bias.dtype=complex128, but must be numbers"),
        ({"logit_bias": ["1"] * 5}, "logit_bias.dtype=<U1, but must be numbers"),
        ({"logit_bias": [[1], [1, 2]]}, "logit_bias=list, but must be an array"),
        ({"logit_bias": [1e300] * 5}, r"logit_bias holds 1e\+300, but must hold what float32 can"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0, but must be a finite float32 > 0"),
    ],
)
def test_a_request_refuses(given, message):
    with pytest.raises(InvalidArgument, match=message):
        request(RequestProcessors(**given))


@pytest.mark.parametrize(
    "text", [[3], (3,), np.array([3]), torch.tensor([3]), [np.int32(3)], [torch.tensor(3)], iter([3])]
)
def test_what_a_text_may_be(text):
    given = {"presence_penalty": np.float32(1), "temperature": 0}
    rows = ZEROS.clone()
    rows[..., 3] = 0.5
    assert verify(BATCH, rows, committed_tokens=[text], **given).tokens == [[0]]


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_minus_one_is_padding_wherever_it_is(backend):
    rows = ZEROS.clone()
    rows[..., 3] = 0.5
    for text in ([-1, 3], [3, -1], [-1, -1, 3, -1]):
        given = {"presence_penalty": 1, "temperature": 0, "committed_tokens": torch.tensor([text])}
        assert verify(BATCH, rows, backend=backend, **given).tokens == [[0]]


def test_probabilities_have_no_processors():
    with pytest.raises(InvalidArgument, match="kind='probs', but must be 'logits'"):
        VerifyCase((request(RequestProcessors(presence_penalty=1)),), kind="probs")


def test_a_backend_without_the_claim_is_refused_by_name():
    def mine(batch, logits, temperature, coins, depth_cap, processors):
        return EagerBackend().verify(batch, logits, temperature, coins, depth_cap, processors=processors)

    mine.takes_processors = ("bias",)
    backend = FunctionBackend(mine, "mine")
    assert verify(BATCH, ZEROS, backend=backend, logit_bias=torch.zeros(1, 40)).status.tolist() == [0]
    with pytest.raises(
        BackendUnavailable, match="'mine' takes no penalties; of the processors it takes bias"
    ):
        verify(BATCH, ZEROS, backend=backend, presence_penalty=1.0)
    assert "bitmask" in why_not(law_named("masks"), backend)
    assert "penalties" in why_not(law_named("penalties"), backend)


def test_auto_passes_over_a_triton_that_lacks_them(monkeypatch):
    class Some:
        name = "triton"
        traits = BackendTraits(takes_processors=("bias", "bitmask"))
        verify = verify_probs = None

    monkeypatch.setitem(__import__("treeconv.backends.registry").backends.registry._loaded, "triton", Some())
    cuda = torch.device("cuda")
    assert choose_backend(cuda, takes_processors={"bias"}).name == "triton"
    assert choose_backend(cuda, takes_processors={"bias", "penalties"}).name == "eager"


def test_what_is_off_is_not_handed_over():
    def mine(batch, logits, temperature, coins, depth_cap):
        return EagerBackend().verify(batch, logits, temperature, coins, depth_cap)

    off = {"repetition_penalty": [1.0], "frequency_penalty": 0, "committed_tokens": [[3]]}
    verify(BATCH, ZEROS, backend=FunctionBackend(mine, "mine"), **off)
    assert Processors.of([RequestProcessors(committed_tokens=(1,))], 1, 4) is None


# What is computed.


def test_the_steps_in_their_order():
    row = np.array([2, -2, 1, 1, np.nan, 4], np.float32)
    got = processed_logits(
        row,
        [0, 1, 1, 9],
        2.0,
        0.5,
        0.25,
        np.array([0, 0, 8, -np.inf, 0, 0], np.float32),
        np.array([-1 ^ 48], np.int32),
    )
    assert got.tolist() == [2 / 2 - 0.5 - 0.25, -2 * 2 - 1 - 0.25, 9, -np.inf, -np.inf, -np.inf]
    assert row[0] == 2  # not in place


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_bias_that_cannot_be_added_is_a_status(backend):
    bias = torch.zeros(3, 40)
    bias[0, 1], bias[1, 2], bias[2] = float("nan"), float("inf"), -float("inf")
    batch = to_verify_input([DraftTree([-1], [0])] * 3)
    output = verify(batch, torch.zeros(3, 1, 40), backend=backend, logit_bias=bias)
    assert output.status.tolist() == [RowStatus.NAN, RowStatus.POS_INF, RowStatus.EMPTY]
    # At a forbidden token even NaN is nobody's business.
    mask = torch.from_numpy(pack_bitmask(np.arange(40)[None] == 7))[None].expand(3, 1, 2)
    output = verify(batch, torch.zeros(3, 1, 40), backend=backend, logit_bias=bias, token_bitmask=mask)
    assert output.status.tolist() == [0, 0, RowStatus.EMPTY]
    assert output.tokens == [[7], [7], []]


@pytest.mark.parametrize("backend", ["reference", "eager"])
def test_a_sampler_of_probabilities_gets_the_processed_law(backend):
    held = RequestProcessors(np.array([0, 1, 0, -1, -np.inf]), None, 2.0, 0.5, 0.0, (1, 4))
    case = VerifyCase((request(held, rows=np.arange(15).reshape(3, 5) / 4),))
    law = as_probs(case)
    assert (law.kind, law.processor_kinds) == ("probs", frozenset())
    want = target_rows(case.requests[0], "logits")
    for node in range(3):
        masses = [want[node].mass(token) for token in range(5)]
        assert law.requests[0].rows[node] == pytest.approx(masses, rel=1e-6)
    assert law_named("oracle-agreement").run(
        case, __import__("treeconv").backends.registry.get_backend(backend)
    )


# How far float32 may stray.


def doubt_of(**given):
    rows = given.pop("rows", [[1.5, -1.5, 0.25, 0.375, 0]] * 3)
    return ProcessedLogits(np.array(rows, np.float32), CHAIN, RequestProcessors(**given))[2]


@pytest.mark.parametrize(
    "given",
    [
        {"frequency_penalty": 0.5, "presence_penalty": -0.25},
        {"repetition_penalty": 2.0},
        {"logit_bias": np.array([0.5, 1, 100, 0, -np.inf])},
        {"repetition_penalty": 0.5, "frequency_penalty": 2, "logit_bias": np.array([0.5, 1, 100, 0, 1])},
    ],
)
def test_sums_that_float32_holds_leave_no_doubt(given):
    keys, doubt = doubt_of(**given)
    assert not doubt.any()
    assert np.isfinite(keys[:4]).all()


@given(
    st.lists(st.floats(-50, 50, width=32), min_size=5, max_size=5),
    st.sampled_from([1.0, 1.1, 2.0, 0.7]),
    st.floats(-3, 3, width=32),
    st.floats(-3, 3, width=32),
    st.lists(st.floats(-50, 50, width=32), min_size=5, max_size=5),
)
def test_every_float32_order_of_summing_lies_within_the_doubt(row, repetition, frequency, presence, bias):
    held = RequestProcessors(np.array(bias, np.float32), None, repetition, frequency, presence)
    rows = np.array([row] * 3, np.float32)
    keys, doubt = ProcessedLogits(rows, CHAIN, held)[2]
    single, counts = np.float32, [0, 1, 0, 2, 0]
    for token, count in enumerate(counts):
        x, r = rows[2, token], single(held.repetition_penalty)
        exact = Fraction(float(x))
        scaled = [x]
        if count:
            exact = exact / Fraction(float(r)) if x > 0 else exact * Fraction(float(r))
            scaled = [x / r, x * (single(1) / r)] if x > 0 else [x * r]
        f = single(held.frequency_penalty) * single(count)
        p = single(held.presence_penalty) * single(count > 0)
        exact += Fraction(bias[token]) - Fraction(held.frequency_penalty) * count
        exact -= Fraction(held.presence_penalty) * (count > 0)
        b = single(bias[token])
        found = [
            way for s in scaled for way in (s - f - p + b, s - (f + p) + b, s + (b - p - f), s + b - p - f)
        ]
        assert all(abs(Fraction(float(value)) - exact) <= Fraction(float(doubt[token])) for value in found)
        assert abs(Fraction(float(keys[token])) - exact) <= Fraction(float(doubt[token]))


def test_a_quotient_by_the_reciprocal_lies_within_the_doubt_and_not_far_within():
    """Of 20,000 logits, every token seen: both ways to divide; the doubt is at most thrice the worst."""
    size = 20_000
    x = np.random.default_rng(0).uniform(0.5, 8, size).astype(np.float32)
    root = DraftTree([-1], [0])
    for repetition in (1.1, 1.3, 1.5):
        held = RequestProcessors(repetition_penalty=repetition, committed_tokens=tuple(range(size)))
        keys, doubt = ProcessedLogits(x[None], root, held)[0]
        r = np.float32(repetition)
        for divided in (x / r, x * (np.float32(1) / r)):
            assert (np.abs(divided.astype(np.float64) - keys) <= doubt).all()
        worst = (np.abs((x * (np.float32(1) / r)).astype(np.float64) - keys) / np.abs(keys)).max()
        assert (doubt / np.abs(keys)).max() <= 3 * max(worst, 2.0**-24)


def test_a_quotient_that_only_one_way_of_dividing_holds_exactly_is_in_doubt():
    keys, doubt = doubt_of(repetition_penalty=1.5, rows=[[0, 3.0, 0, -3.0, 0]] * 3)
    assert (keys[1], keys[3]) == (pytest.approx(2.0, abs=1e-8), -4.5)
    assert doubt[1] > 0
    assert doubt[3] == 0  # a product is a product


def test_at_temperature_zero_only_rounding_may_choose_another_winner():
    def winners(keys, doubt):
        rows = processed_alternatives(np.array(keys), np.array(doubt), 0.0, None)
        return [next(t for t in range(len(keys)) if make().mass(t)) for make in rows]

    assert winners([1.0, 1.0, 0.5], [0, 0, 0]) == [0]  # a tie for everybody: the lowest id
    assert winners([1.0, 1.0, 0.5], [0, 1e-7, 0]) == [0, 1]
    assert winners([1.0, 1.0 - 1e-6, 0.5], [1e-7, 1e-7, 0]) == [0]
    assert winners([1.0, 1.0 + 1e-7, 0.5], [1e-7, 1e-7, 0]) == [1, 0]
    loose = processed_alternatives(np.ones(40), np.full(40, 1e-7), 0.0, None)
    assert len(loose) == 2
    assert loose[1]().may_have_mass(39)


def test_doubt_beyond_a_temperature_lets_either_win():
    keys, doubt = np.array([1.0, 1.0 + 1e-7, -5.0]), np.array([1e-7, 1e-7, 0])
    calm = processed_alternatives(keys, doubt, 1.0, None)
    assert len(calm) == 1
    (lower, upper), _ = calm[0]().accept_bounds([0, 1])
    assert 0 < upper - lower < 1e-5
    cold = processed_alternatives(keys, doubt, 1e-8, None)
    assert len(cold) == 2
    assert cold[1]().accept_bounds([0])[0] == (0.0, pytest.approx(1.0, rel=1e-5))
    assert not cold[1]().must_have_mass(2)


def test_the_extra_band_is_mostly_empty():
    """Of the generated rows: most are exact, so that a wrong count or order cannot hide in a band."""
    exact = []

    @given(cases_for("penalised"))
    def look(case):
        for one in case.requests:
            if "penalties" in one.processors.kinds:
                rows = ProcessedLogits(one.rows, one.tree, one.processors)
                exact.extend(not rows[node][1].any() for node in range(len(rows)))

    look()
    assert len(exact) > 100
    assert np.mean(exact) > 0.5


# What stores and shrinks them.

HELD = RequestProcessors(
    np.array([0, 0.1, -np.inf, 0, 5], np.float32),
    np.array([[-1], [3], [-(2**31)]], np.int32),
    1.25,
    -0.5,
    0.1,
    (4, 2**40),
)


def test_the_corpus_keeps_them(tmp_path):
    case = VerifyCase(
        (request(HELD), request(RequestProcessors(presence_penalty=1)), request(RequestProcessors()))
    )
    path = save_entry(tmp_path, CorpusEntry(law="penalties", case=case, note="n"))
    assert load_entry(path).case == case
    assert '"schema": 3' in path.read_text()
    plain = VerifyCase((request(RequestProcessors()),))
    assert (
        "processors" not in save_entry(tmp_path, CorpusEntry(law="masks", case=plain, note="n")).read_text()
    )


def test_smaller_trees_and_vocabularies_keep_what_is_left():
    less = HELD.at_nodes([0, 2], [1])
    assert less.token_bitmask.tolist() == [[-1], [-(2**31)]]
    assert less.committed_tokens == (4, 2**40, 1)
    held = replace(HELD, token_bitmask=pack_bitmask(np.array([[1, 0, 0, 1, 1]], bool)))
    padded = replace(HELD, committed_tokens=(-1, 4, 3, -1)).at_tokens([1, 4], 5)
    assert padded.committed_tokens == (-1, 1, -1)
    less = held.at_tokens([1, 4], 5)
    assert less.logit_bias.tolist() == [np.float32(0.1), 5]
    assert less.token_bitmask.tolist() == [[0b10]]
    assert less.committed_tokens == (1, 2)  # 4 is 1 now, the placeholder stays outside
    assert {one.kinds for one in HELD.plainer()} == {
        frozenset(PROCESSORS),
        frozenset(PROCESSORS) - {"bias"},
        frozenset(PROCESSORS) - {"bitmask"},
    }


def test_a_failure_is_shrunk_to_the_processor_that_matters():
    from treeconv.errors import LawBroken  # noqa: PLC0415

    def run(case):
        if any(one.processors.presence_penalty for one in case.requests):
            raise LawBroken("broken", law="penalties", case=case)

    case = VerifyCase((request(HELD), request(HELD)))
    small = shrink(LawBroken("broken", law="penalties", case=case), run, values=True).case
    (one,) = small.requests
    assert one.processors == RequestProcessors(presence_penalty=0.1)
    assert len(one.tree) == 1


def test_they_say_what_they_are():
    assert str(HELD) == (
        "bias {1: 0.1, 2: -inf, 4: 5}, a bitmask, repetition penalty 1.25, frequency penalty -0.5,"
        " presence penalty 0.1, committed [4, 1099511627776]"
    )
    assert str(RequestProcessors()) == "no processors"
    assert replace(HELD) == HELD
    assert replace(HELD, committed_tokens=(4,)) != HELD


def test_coins_of_one_node_at_the_processed_boundary():
    """exp(1) : 1 becomes 1 : 1 by a presence penalty of 1: the boundary is at 1/2, exactly."""
    tree = DraftTree([-1, 0], [0, 0])
    batch = to_verify_input([tree] * 2)
    rows = torch.tensor([[[1.0, 0.0]] * 2] * 2)
    coins = Coins([[float(np.nextafter(np.float32(0.5), np.float32(0))), 0.5], [0.5, 0.5]], [0.25, 0.25])
    for backend in ("reference", "eager"):
        output = verify(batch, rows, 1.0, coins, backend=backend, presence_penalty=1.0)
        assert output.accept_token_num.tolist() == [1, 0]
    assert (
        oracle.TargetRows.from_processed(rows[0].numpy(), tree, RequestProcessors(presence_penalty=1), 1.0)[
            0
        ].mass(0)
        == 0.5
    )


@pytest.mark.parametrize("rule", ["chain", "recursive", "match"])
def test_a_case_by_another_rule_on_processed_rows_is_stored_and_judged_again(rule, tmp_path):
    def has_all(case):
        return case.processor_kinds == set(PROCESSORS)

    kind = cases_for(f"{rule}_processed")
    case = find(kind, has_all, settings=settings(max_examples=200, database=None, phases=[Phase.generate]))
    entry = CorpusEntry(law=f"{rule}-rule-processors", case=case, note="drawn")
    stored = load_entry(save_entry(tmp_path, entry))
    assert stored == entry
    assert replay_entry(stored, get_backend("eager"))
