"""Known faults K2, K3 and K5 that are statements about laws, shown exactly by enumerating coins."""

from __future__ import annotations

from fractions import Fraction
from itertools import product

import numpy as np
import pytest
import torch

from treeconv import (
    Coins,
    DraftTree,
    InvalidArgument,
    draw_coins,
    oracle,
    to_verify_input,
    verify,
    verify_probs,
)
from treeconv.backends.base import BackendTraits
from treeconv.backends.eager import EagerBackend
from treeconv.judge import Observed, judge
from treeconv.sampling import target_probs
from treeconv.tree import RowStatus

ROOT = DraftTree([-1], [9])


def star(*tokens: int) -> DraftTree:
    return DraftTree([-1] + [0] * len(tokens), [9, *tokens])


def parts(*numerators: int) -> list[Fraction]:
    return [Fraction(n, sum(numerators)) for n in numerators]


class CoinSpy(EagerBackend):
    """Keeps the coins that the front door drew."""

    name = "spy"
    traits = BackendTraits()

    def __init__(self) -> None:
        self.coins: list[float] = []

    def verify_probs(self, batch, target_probs, coins, depth_cap):
        self.coins += [*coins.accept.flatten().tolist(), *coins.final.tolist()]
        return super().verify_probs(batch, target_probs, coins, depth_cap)


def test_b06_fixed_children_keep_the_target_law(sampler):
    """min(1, p/q) would accept the first child with .8333."""
    rows = [[0.5, 0.3, 0.2]] * 3
    assert parts(5, 3, 2) == sampler.first_token_law(star(0, 1), rows, 10)
    decisions = sampler.decisions(star(0, 1), rows, 10)
    assert Fraction(1, 2) == sum(chance for made, chance in decisions.items() if made.path == (0, 1))


def test_b07_an_argmax_draft_keeps_the_target_law(sampler):
    assert parts(6, 4) == sampler.first_token_law(star(0), [[0.6, 0.4]] * 2, 10)


def test_b10_one_test_accepts_a_fixed_draft(sampler):
    """A match with the target's own draw or a passed ratio test would accept with .75."""
    decisions = sampler.decisions(star(0), [[0.5, 0.5]] * 2, 8)
    assert Fraction(1, 2) == sum(chance for made, chance in decisions.items() if made.path == (0, 1))


@pytest.mark.parametrize(
    ("logits", "temperature", "want"),
    [([2, 0], 0.5, [0.9820, 0.0180]), ([0, 0.01], 0.005, [0.1192, 0.8808]), ([1, 3], 0.0, [0, 1])],
    ids=["B16 B21", "B71", "B72"],
)
def test_b16_b21_b71_b72_the_law_at_a_temperature(logits, temperature, want):
    backend_law = target_probs(logits, temperature)
    oracle_row = oracle.enclosure(logits, temperature)
    assert want == [round(float(p), 4) for p in backend_law]
    assert want == [round(float(oracle_row.mass(token)), 4) for token in range(2)]


def test_b29_the_final_coin_is_not_the_one_that_rejected(sampler):
    """Reusing it would give P(1) = .0833: coins under 1/4 accept, so only 1/4 to 1/3 would draw 1."""
    assert parts(1, 1, 2) == sampler.first_token_law(star(0), [[0.25, 0.25, 0.5]] * 2, 12)


def test_b30_each_position_has_its_own_coin(sampler):
    decisions = sampler.decisions(DraftTree.chain([9, 0, 0]), [[0.5, 0.5]] * 3, 4)
    assert Fraction(1, 4) == sum(chance for made, chance in decisions.items() if made.path == (0, 1, 2))


@pytest.mark.parametrize("generator", [None, 7], ids=["default", "seeded"])
def test_b29_b30_b34_the_front_door_never_reuses_a_coin(generator):
    """Two requests, 16 steps: every coin of every (request, step, node) and every final one is new."""
    torch.manual_seed(3)
    source = None if generator is None else torch.Generator().manual_seed(generator)
    spy = CoinSpy()
    for _ in range(16):
        verify_probs(
            to_verify_input([star(0)] * 2), torch.full((2, 2, 2), 0.5), generator=source, backend=spy
        )
    assert (len(spy.coins), len(set(spy.coins))) == (16 * 2 * 3, 16 * 2 * 3)


def test_b34_two_requests_are_independent(backend):
    """Over all pairs of coins two requests agree on one token half the time, so 2**-16 over 16 steps."""
    ticks = [(k + 0.5) / 8 for k in range(8)]
    pairs = list(product(ticks, repeat=2))
    output = verify_probs(
        to_verify_input([ROOT] * 2 * len(pairs)),
        torch.full((2 * len(pairs), 1, 2), 0.5),
        Coins([[0.5]] * 2 * len(pairs), [coin for pair in pairs for coin in pair]),
        backend=backend,
    )
    emitted = [tokens[0] for tokens in output.tokens]
    same = sum(one == two for one, two in zip(emitted[::2], emitted[1::2], strict=True))
    assert Fraction(1, 2**16) == Fraction(same, len(pairs)) ** 16


def test_b33_every_row_is_drawn_whatever_its_neighbours_seed(backend):
    batch, rows = to_verify_input([ROOT, ROOT]), torch.tensor([[[0.0, 1.0, 0.0]]] * 2)
    coins = draw_coins(seeds=[7, 8], positions=[0, 0], num_draft_tokens=1)
    assert verify_probs(batch, rows, coins, backend=backend).tokens == [[1], [1]]
    assert verify_probs(batch, rows, backend=backend).tokens == [[1], [1]]


def test_b33_a_row_without_a_seed_is_refused():
    with pytest.raises(InvalidArgument, match=r"seeds\[1\]=None, but must be an integer"):
        draw_coins(seeds=[7, None], positions=[0, 0], num_draft_tokens=1)


# Non-bugs: what a checker must not flag.


def test_x1_draw_and_match_has_the_target_law():
    """Draw from p, accept on match and emit that same draw either way: exact, and p(child) accepted."""
    rows = [[Fraction(5, 10), Fraction(3, 10), Fraction(2, 10)]] * 2
    want = oracle.outcome_pmf(star(1), rows)
    emitted: dict[int, Fraction] = dict.fromkeys(range(3), Fraction(0))
    accepted = Fraction(0)
    for tick in range(10):
        drawn = [0, 0, 0, 0, 0, 1, 1, 1, 2, 2][tick]
        emitted[drawn] += Fraction(1, 10)
        accepted += Fraction(drawn == 1, 10)
    marginal = {token: sum(p for tokens, p in want.items() if tokens[0] == token) for token in range(3)}
    assert marginal == emitted
    assert accepted == oracle.acceptance_pmf(star(1), rows)[1]


def test_x2_zero_and_renormalise_is_exact(sampler):
    """Children 0, 1 of [.5, .3, .2]: accept with .5, then with .3/.5 = .6 of what is left."""
    rows = [[0.5, 0.3, 0.2]] * 3
    ends: dict[tuple[int, ...], Fraction] = {}
    for made, chance in sampler.decisions(star(0, 1), rows, 10).items():
        ends[made.path] = ends.get(made.path, Fraction(0)) + chance
    second = ends[0, 2] / (1 - ends[0, 1])
    assert (Fraction(1, 2), Fraction(3, 5)) == (ends[0, 1], second)
    assert parts(5, 3, 2) == sampler.first_token_law(star(0, 1), rows, 10)


@pytest.mark.parametrize(("dtype", "top"), [(torch.float32, 1), (torch.bfloat16, 0)])
def test_x3_near_ties_are_judged_by_the_dtype_used(dtype, top, sampler):
    """23.5 and 23.56 are one number in bfloat16, where the lower index wins."""
    got = sampler(ROOT, [[23.5, 23.56]], temperature=0.0, dtype=dtype)
    assert (top,) == got.tokens
    handed = torch.tensor([[23.5, 23.56]], dtype=dtype)
    rows = oracle.TargetRows.from_logits(handed, 0.0)
    assert judge(ROOT, rows, [0.5], 0.5, 1, Observed(got.path, got.tokens, RowStatus.OK)) is None


@pytest.mark.parametrize("coin", [float(np.float32(1 - 2**-24)), 1.0])
@pytest.mark.parametrize("mass", [[0.5, 0.5], [1 / 3, 1 / 3, 1 / 3], [0.1] * 10], ids=len)
def test_x4_an_empty_residual_after_rounding_is_no_fault(mass, coin, sampler):
    """Children cover the support and rounding leaves nothing: a child is accepted, not V - 1 made up.

    The target-only form of the report: its p = q needs a rule that knows q.
    """
    tree = star(*range(len(mass)))
    got = sampler(tree, [mass] * len(tree), accept=coin)
    assert (len(mass), 2) == (got.path[1], len(got.tokens))
    rows = oracle.TargetRows.from_probs(np.array([mass] * len(tree), np.float32))
    observed = Observed(got.path, got.tokens, got.status)
    assert judge(tree, rows, [coin] * len(tree), 0.5, 2, observed) is None


def test_x5_log_softmax_first_changes_nothing(sampler):
    """softmax(log_softmax(l) / T) is softmax(l / T); both give .9820 for l = [2, 0], T = .5."""
    logits = torch.tensor([[2.0, 0.0]] * 2)
    normalised = logits.log_softmax(-1)
    for coin, path in ((0.98, (0, 1)), (0.984, (0,))):
        for rows in (logits, normalised):
            got = sampler(star(0), rows.tolist(), temperature=0.5, accept=coin)
            law = oracle.TargetRows.from_logits(logits, 0.5)
            observed = Observed(got.path, got.tokens, RowStatus.OK)
            assert path == got.path
            assert judge(star(0), law, [coin] * 2, 0.5, 2, observed) is None


def test_b70_a_tolerant_decoder_gives_nan_no_mass():
    """If NaN is tolerated it is -inf: the law of [-inf, 1, 3] at T = 1."""
    assert [round(float(p), 4) for p in target_probs([-np.inf, 1, 3], 1.0)] == [0.0, 0.1192, 0.8808]
    with pytest.raises(InvalidArgument, match="logits hold NAN"):
        target_probs([np.nan, 1, 3], 1.0)


def test_b70_the_report_names_request_and_cause(backend):
    output = verify(to_verify_input([ROOT]), [[[np.nan, 1, 3]]], 1.0, backend=backend)
    with pytest.raises(InvalidArgument, match="request 0: a visited target row holds NaN"):
        output.raise_for_status()
