"""Known faults K2 about rules that read q, and thresholds: exact laws over drafts and coins, on each backend.

A fault of a *drafter* (it reports another law than it drew from) is shown twice: the biased law that comes
out of a right sampler, to the digit of the report, and the right one once q is what the draft followed.
"""

from __future__ import annotations

from fractions import Fraction
from itertools import product
from math import log

import numpy as np
import pytest
import torch
from conftest import CPU_BACKENDS

from treeconv import Coins, DraftTree, InvalidArgument, oracle, to_verify_input, verify, verify_probs
from treeconv.backends.registry import get_backend
from treeconv.oracle import TargetRows

_PARTS = 6  # of each side of a box of coins
RULED = [name for name in CPU_BACKENDS if "chain" in get_backend(name).traits.rules]
LOSSY = [name for name in CPU_BACKENDS if get_backend(name).traits.takes_thresholds]


@pytest.fixture(params=RULED)
def backend(request):
    return request.param


def tenths(*numerators: float) -> list[Fraction]:
    return [Fraction(str(n)) / 10 for n in numerators]


def star(*tokens: int) -> DraftTree:
    return DraftTree([-1] + [0] * len(tokens), [9, *tokens])


def decide(backend, rule, tree, p, q, accept, final):
    """Emitted tokens under each coin vector; the same rows at every node."""
    size, many = len(tree), len(accept)
    rows = torch.tensor([float(x) for x in p]).expand(many, size, len(p))
    given = {}
    if q is not None:
        laws = torch.tensor([float(x) for x in q]).expand(many, size, len(q))
        given = {"draft_probs": laws, "drafting": "sampled"}
    batch = to_verify_input([tree] * many)
    output = verify_probs(batch, rows, Coins(accept, final), backend=backend, rule=rule, **given)
    return [
        (count, tokens) for count, tokens in zip(output.accept_token_num.tolist(), output.tokens, strict=True)
    ]


def outcomes(backend, rule, tree, p, q):
    """``(probability, accepted drafts, tokens)`` over the oracle's boxes of coins, each cut into many.

    Exact for a sampler whose boundaries are the oracle's; one with boundaries of its own shows inside a box.
    """
    rows = TargetRows.exact([p] * len(tree)).under(rule, None if q is None else [q] * len(tree))
    volumes, accept, final = [], [], []
    for cell in oracle.outcome_cells(tree, rows):
        slots, intervals = list(cell.accept), [*cell.accept.values(), cell.final]
        steps = [Fraction(2 * k + 1, 2 * _PARTS) for k in range(_PARTS)]
        for places in product(steps, repeat=len(intervals)):
            tossed = [
                float(low + at * (high - low)) for at, (low, high) in zip(places, intervals, strict=True)
            ]
            coins = dict(zip(slots, tossed[:-1], strict=True))
            volumes.append(cell.measure / _PARTS ** len(intervals))
            accept.append([coins.get(slot, 0.5) for slot in range(len(tree))])
            final.append(tossed[-1])
    made = decide(backend, rule, tree, p, q, accept, final)
    return [(volume, *done) for volume, done in zip(volumes, made, strict=True)]


def first_token(backend, p, q, drafted):
    """The exact law of the first token; ``drafted``: what the child follows, ``q``: what is reported."""
    law = [Fraction(0)] * len(p)
    for token, chance in enumerate(drafted):
        if chance:
            for volume, _, tokens in outcomes(backend, "chain", DraftTree.chain([9, token]), p, q):
                law[tokens[0]] += chance * volume
    return law


def accepted(backend, rule, tree, p, q=None):
    return sum(volume for volume, count, _ in outcomes(backend, rule, tree, p, q) if count)


def test_b06_the_pairing_is_refused_and_biased_if_forced(backend):
    """Fixed children 0, 1 through min(1, p/q): the first child alone gets .8333 instead of .5."""
    p, q = tenths(5, 3, 2), tenths(6, 3, 1)
    law = [Fraction(0)] * 3
    for volume, _, tokens in outcomes(backend, "recursive", star(0, 1), p, q):
        law[tokens[0]] += volume
    assert law[0] == Fraction(5, 6)
    rows = torch.tensor([[[0.5, 0.3, 0.2]] * 3])
    for rule in ("chain", "recursive"):
        with pytest.raises(InvalidArgument, match=r"\.8333 instead of \.5"):
            verify_probs(to_verify_input([star(0, 1)]), rows, backend=backend, rule=rule, draft_probs=rows)


def test_b07_an_argmax_draft_with_a_soft_q(backend):
    """p = [.6, .4], draft 0 always: .6667 with q = [.9, .1], right with the law it follows, sure of 0."""
    always = tenths(10, 0)
    assert first_token(backend, tenths(6, 4), tenths(9, 1), always)[0] == Fraction(2, 3)
    assert first_token(backend, tenths(6, 4), always, always) == tenths(6, 4)


def test_b08_a_draft_sampled_after_filtering_with_the_raw_q(backend):
    p, drafted, raw = tenths(5, 5, 0), tenths(6.25, 3.75, 0), tenths(5, 3, 2)
    assert first_token(backend, p, raw, drafted) == drafted
    assert first_token(backend, p, drafted, drafted) == p


def test_b09_a_draft_drawn_in_bfloat16(backend):
    """Both models' logits are (8, 8.03), which bfloat16 cannot tell apart: .5 comes out instead of .4925."""
    logits = torch.tensor([8.0, 8.03])
    p = [Fraction(x) for x in logits.softmax(-1).tolist()]
    drafted = [Fraction(x) for x in logits.bfloat16().float().softmax(-1).tolist()]
    assert drafted == tenths(5, 5)
    assert round(float(first_token(backend, p, p, drafted)[0]), 4) == 0.5
    assert round(float(first_token(backend, p, drafted, drafted)[0]), 4) == 0.4925


def test_b10_one_test_accepts_what_q_is_sure_of(backend):
    """A match with the target's own draw or a passed ratio test would accept with .75."""
    assert accepted(backend, "chain", star(0), tenths(5, 5), tenths(10, 0)) == Fraction(1, 2)


def test_b11_the_residual_subtracts_q_everywhere(backend):
    """Subtracting it at the drafted id alone would give [.2, .4125, .3875]."""
    p, q = tenths(2, 3, 5), tenths(5, 3, 2)
    assert first_token(backend, p, q, q) == p


def test_b12_a_reduced_draft_vocabulary_is_mapped_first(backend):
    """d2t = [2, 0, 1]: local 0 is id 2, accepted with .1/.8; read by local ids it would be always."""
    d2t, local = [2, 0, 1], tenths(8, 1, 1)
    q = [Fraction(0)] * 3
    for draft, target in enumerate(d2t):
        q[target] = local[draft]
    p = tenths(5, 4, 1)
    assert accepted(backend, "chain", star(2), p, q) == Fraction(1, 8)
    assert accepted(backend, "chain", star(2), p, local) == 1
    with pytest.raises(InvalidArgument, match=r"draft_probs.shape=\(1, 2, 2\), but must be \(1, 2, 3\)"):
        verify_probs(
            to_verify_input([star(2)]),
            torch.ones(1, 2, 3),
            backend=backend,
            rule="chain",
            draft_probs=torch.ones(1, 2, 2),
            drafting="sampled",
        )


@pytest.mark.parametrize(("coin", "count"), [(0.41, 1), (0.42, 0), (0.83, 0)])
def test_b14_the_second_sibling_is_tested_with_its_conditional_q(coin, count, backend):
    """q = [.5, .3, .2], 0 then 1: .3/(1 - .5) = .6. With p = [.1, .4, .5], .25/.6 = .4167; .3 gives .8333."""
    p, q = tenths(1, 4, 5), tenths(5, 3, 2)
    ((got, _),) = decide(backend, "recursive", star(0, 1), p, q, [[0.5, 0.9, coin]], [0.5])
    assert got == count


@pytest.mark.parametrize("final", [0.0, 0.46, 0.75, 1 - 2**-24])
def test_b24_the_residual_is_divided_by_its_sum(final, backend):
    """p - q leaves token 0 alone; a softmax over the clamped difference would give it .4519."""
    p, q = tenths(7, 2, 1), tenths(2, 7, 1)
    assert decide(backend, "chain", star(1), p, q, [[0.5, 0.5]], [final]) == [(0, [0])]


def test_b31_what_rejected_does_not_recover(backend):
    """The draft's own noise would recover token 1 with 5/36; a fresh coin does with 1/4."""
    p, q = tenths(2, 4, 4), tenths(6, 3, 1)
    assert first_token(backend, p, q, q) == p
    made = outcomes(backend, "chain", star(0), p, q)
    rejected = sum(volume for volume, count, _ in made if not count)
    assert sum(v for v, count, tokens in made if (count, tokens) == (0, [1])) / rejected == Fraction(1, 4)


@pytest.mark.parametrize("rule", ["chain", "recursive"])
def test_b65_a_nan_draft_row_takes_nothing_from_p(rule, backend):
    """p = [0, .97, .03], draft 0, q NaN: emit 1, not the rejected 0."""
    nan = [float("nan")] * 3
    made = decide(backend, rule, star(0), tenths(0, 9.7, 0.3), nan, [[0.5, 0.5]], [0.5])
    assert made == [(0, [1])]
    # One NaN among numbers: the others still take their part, so token 1 alone is left.
    some = [0.5, float("nan"), 0.25]
    made = decide(backend, rule, star(0), tenths(2.5, 5, 2.5), some, [[0.9, 0.9]] * 2, [0.0, 0.9])
    assert made == [(0, [1])] * 2


def test_b73_small_ratios_are_not_lost(backend):
    """q/p = 2**-25: log(1 - q/p) = -2.98e-8 of p is left, exactly; p - q loses nothing where both are near.

    Float32 cannot hold 1 - 2**-25, in either form: one rounding, which a coin of 24 bits cannot see. Where
    p - q is small the difference is exact: a bonus drawn from it flips exactly where the oracle says.
    """
    p, q = [Fraction(1, 2), Fraction(1, 2)], [Fraction(1, 2**26), 1 - Fraction(1, 2**26)]
    draw = TargetRows.exact([p] * 2).under("chain", [q] * 2)
    plan = draw.plans(star(1), 0, draw[0], is_capped=False)[0]
    assert list(plan.bonus.tokens) == [0]
    left = p[0] - q[0]
    assert float(left / p[0]) == 1 - 2.0**-25
    assert round(log(float(left / p[0])) * 1e8, 2) == -2.98
    near = [Fraction(1, 2) + Fraction(3, 2**20), Fraction(1, 4) + Fraction(1, 2**20), Fraction(1, 4)]
    drafter = [Fraction(1, 2), Fraction(1, 4), Fraction(1, 4) + Fraction(1, 2**18)]
    accept = [[1 - 2**-24, 0.5]] * 2
    finals = [float(np.nextafter(np.float32(0.75), np.float32(0))), 0.75]
    made = decide(backend, "chain", star(2), near, drafter, accept, finals)
    assert made == [(0, [0]), (0, [1])]


def test_x1_drawing_and_matching_is_exact(backend):
    """p = [.5, .3, .2], draft 0: out = p, accept .5. Reports call it biased."""
    p = tenths(5, 3, 2)
    law = [Fraction(0)] * 3
    for volume, _, tokens in outcomes(backend, "draw_and_match", star(0), p, None):
        law[tokens[0]] += volume
    assert law == p
    assert accepted(backend, "draw_and_match", star(0), p) == Fraction(1, 2)


@pytest.mark.parametrize("rule", ["chain", "recursive"])
@pytest.mark.parametrize(("final", "token"), [(0.0, 0), (0.49, 0), (0.5, 1), (1.0, 1)])
def test_x4_no_residual_is_left_where_p_is_q(rule, final, token, backend):
    """p = q = [.5, .5], 0 rejected by a coin of 1: emit from p; no NaN, nothing uniform over V."""
    half = tenths(5, 5, 0)
    assert decide(backend, rule, star(0), half, half, [[1.0, 1.0]], [final]) == [(0, [token])]


@pytest.mark.parametrize("backend", LOSSY)
def test_x6_thresholds_below_1_are_lossy(backend):
    """p(child) = .3: threshold_acc = .5 accepts .6, threshold_single = .3 always; at 1 nothing changes."""
    coins = [(k + 0.5) / 100 for k in range(100)]
    batch = to_verify_input([star(0)] * 100)
    rows = torch.tensor([0.3, 0.5, 0.2]).expand(100, 2, 3)

    def accepts(**thresholds):
        given = Coins([[coin, 0.5] for coin in coins], [0.5] * 100)
        both = (
            verify_probs(batch, rows, given, backend=backend, **thresholds),
            verify(batch, rows.log(), 1.0, given, backend=backend, **thresholds),
        )
        counts = {int(output.accept_token_num.sum()) for output in both}
        assert len(counts) == 1
        return counts.pop()

    assert accepts() == accepts(threshold_acc=1.0, threshold_single=1.0) == 30
    assert accepts(threshold_acc=0.5) == 60
    assert accepts(threshold_acc=0.25) == 100
    assert accepts(threshold_single=float(np.float32(0.29))) == 100
    assert accepts(threshold_single=0.31) == 30


@pytest.mark.parametrize("backend", LOSSY)
def test_x6_even_a_threshold_of_0_accepts_no_zero_mass(backend):
    """B01 again: what the target forbids is never accepted, coin 0 or not."""
    rows = torch.tensor([[[0.0, 1.0, 0.0]] * 2])
    output = verify_probs(
        to_verify_input([star(2)]), rows, Coins([[0.0, 0.0]], [0.0]), backend=backend, threshold_single=0.0
    )
    assert output.tokens == [[1]]
