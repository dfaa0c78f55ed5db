"""Contract: no test fails a right sampler more often than it says, nor passes a wrong one more often.

Both rates are computed exactly, by enumerating all outcomes of small samples, but where a test draws numbers
from a fixed seed.
"""

import math
from itertools import product

import numpy as np
import pytest
from scipy import stats

from treeconv import InvalidArgument
from treeconv.statistical_testing import (
    EProcess,
    binomial_p_value,
    confidence_sequence,
    dkwm_bound,
    dkwm_distance,
    min_discrepancy_of_binomial,
    min_discrepancy_of_dkwm,
    min_discrepancy_of_multinomial,
    min_num_samples_for_binomial,
    min_num_samples_for_dkwm,
    min_num_samples_for_e_process,
    min_num_samples_for_multinomial,
    multinomial_p_value,
    split_rate,
)

RATES = [0.3, 0.05, 1e-3, 1e-9]
SHARES = [0.0, 1 / 7, 0.5, 0.9, 1.0]


def chance(k, n, p):
    return math.comb(n, k) * p**k * (1 - p) ** (n - k)


def compositions(total, parts):
    return [c for c in product(range(total + 1), repeat=parts) if sum(c) == total]


@pytest.mark.parametrize("p", SHARES)
@pytest.mark.parametrize("n", [0, 1, 2, 5, 13])
def test_binomial_fails_a_right_sampler_at_most_at_the_rate(n, p):
    for rate in RATES:
        fails = sum(chance(k, n, p) for k in range(n + 1) if binomial_p_value(k, n, p) <= rate)
        assert fails <= rate * (1 + 1e-12)


def test_binomial_p_value_is_twice_the_smaller_tail():
    assert binomial_p_value(3, 4, 0.5) == pytest.approx(2 * 5 / 16)
    assert binomial_p_value(2, 4, 0.5) == 1
    assert binomial_p_value(1, 10, 0.0) == 0
    # Far out, where 1 - P(X < k) would be 0:
    assert binomial_p_value(200, 200, 0.5) == pytest.approx(2.0**-199, rel=1e-9)


@pytest.mark.parametrize("law", [(0.5, 0.25, 0.25), (0.9, 0.1, 0.0), (1.0,)])
@pytest.mark.parametrize("n", [1, 4, 9])
def test_multinomial_fails_a_right_sampler_at_most_at_the_rate(n, law):
    for rate in RATES:
        fails = 0.0
        for counts in compositions(n, len(law)):
            if multinomial_p_value(counts, law) <= rate:
                fails += stats.multinomial.pmf(counts, n, law)
        assert fails <= rate * (1 + 1e-9)


def test_an_outcome_without_probability_fails_at_once():
    assert multinomial_p_value([999, 1], [1.0, 0.0]) == 0


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("discrepancy", [0.3, 0.05])
@pytest.mark.parametrize("rates", [(0.05, 0.01), (1e-9, 1e-6)])
def test_so_many_samples_see_the_discrepancy(p, discrepancy, rates):
    fail, miss = rates
    n = min_num_samples_for_binomial(p, discrepancy, fail, miss)
    # From that far on in each direction, further off included.
    others = [q for off in (discrepancy, discrepancy * 1.5) for q in (p - off, p + off) if 0 <= q <= 1]
    passed = np.array([binomial_p_value(k, n, p) > fail for k in range(n + 1)])
    for q in others:
        assert stats.binom.pmf(np.arange(n + 1), n, q)[passed].sum() <= miss * (1 + 1e-9)
    if n > 1:  # and they are not wantonly many: a tenth fewer do not suffice
        fewer = int(n * 0.9)
        passed = np.array([binomial_p_value(k, fewer, p) > fail for k in range(fewer + 1)])
        near = [q for q in (p - discrepancy, p + discrepancy) if 0 <= q <= 1]
        assert max(stats.binom.pmf(np.arange(fewer + 1), fewer, q)[passed].sum() for q in near) > miss


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5])
def test_the_binomial_twins_agree(p):
    n = min_num_samples_for_binomial(p, 0.1, 1e-9, 1e-6)
    seen = min_discrepancy_of_binomial(p, n, 1e-9, 1e-6)
    assert 0.098 < seen <= 0.1 * (1 + 1e-12)
    assert min_discrepancy_of_binomial(p, 4 * n, 1e-9, 1e-6) < seen
    assert min_discrepancy_of_binomial(0.5, 1, 1e-9, 1e-6) == math.inf


def test_the_multinomial_twins_keep_the_false_pass_rate():
    law, off, fail, miss = (0.5, 0.25, 0.25), 0.45, 0.05, 0.02
    n = min_num_samples_for_multinomial(law, off, fail, miss)
    assert n < 60
    wrong = (0.5 - off, 0.25 + off, 0.25)
    passes = sum(
        stats.multinomial.pmf(counts, n, wrong)
        for counts in compositions(n, 3)
        if multinomial_p_value(counts, law) > fail
    )
    assert passes <= miss
    assert min_discrepancy_of_multinomial(law, n, fail, miss) <= off * (1 + 1e-12)
    assert min_discrepancy_of_multinomial(law, n // 2, fail, miss) > off


@pytest.mark.parametrize("n", [1, 2, 10, 100])
@pytest.mark.parametrize("rate", RATES)
def test_dkwm_bounds_the_exact_distribution_of_the_distance(n, rate):
    """Kolmogorov's statistic of n uniform numbers, as scipy has it exactly."""
    assert stats.kstwo.sf(min(1, dkwm_bound(n, rate)), n) <= rate


def test_dkwm_distance_is_exact_with_and_without_atoms():
    uniform = stats.uniform.cdf
    rng = np.random.default_rng(5)
    samples = rng.random(257)
    assert dkwm_distance(samples, uniform) == pytest.approx(stats.kstest(samples, uniform).statistic)
    fair = stats.bernoulli(0.5).cdf
    assert dkwm_distance([0, 1], fair) == 0
    assert dkwm_distance([1, 1, 1, 0], fair) == 0.25
    assert dkwm_distance([1, 1], fair) == 0.5
    assert dkwm_distance([2.0], uniform) == 1


def test_dkwm_twins_agree_and_a_planted_discrepancy_is_seen():
    n = min_num_samples_for_dkwm(0.25, 1e-9, 1e-6)
    assert min_discrepancy_of_dkwm(n, 1e-9, 1e-6) <= 0.25 < min_discrepancy_of_dkwm(n - 1, 1e-9, 1e-6)
    bound, rng = dkwm_bound(n, 1e-9), np.random.default_rng(1)
    # x -> x**2 moves the uniform distribution function by 1/4 at its worst. Each round misses at most 1e-6.
    assert all(dkwm_distance(rng.random(n) ** 2, stats.uniform.cdf) > bound for _ in range(50))
    assert all(dkwm_distance(rng.random(n), stats.uniform.cdf) <= bound for _ in range(50))


@pytest.mark.parametrize("p", [0.5, 0.1, 0.99])
@pytest.mark.parametrize("rate", [0.2, 0.05])
def test_looking_after_every_sample_fails_a_right_sampler_at_most_at_the_rate(p, rate):
    """All paths of 150 coin tosses, those that ever reach the rate absorbed: exact, by counts."""
    alive, failed = {0: 1.0}, 0.0
    for n in range(1, 151):
        reached = {}
        for k, weight in alive.items():
            for up, share in ((1, p), (0, 1 - p)):
                reached[k + up] = reached.get(k + up, 0.0) + weight * share
        alive = {}
        for k, weight in reached.items():
            process = EProcess((1 - p, p))
            if process.update([n - k, k]) <= rate:
                failed += weight
            else:
                alive[k] = weight
    assert failed <= rate
    assert failed > 0  # it can fail


@pytest.mark.parametrize("law", [(0.5, 0.5), (0.5, 0.25, 0.25), (0.9, 0.1, 0.0)])
def test_evidence_is_a_martingale(law):
    """One more sample leaves the e-value as it is, on average."""
    for counts in compositions(4, len(law)):
        if any(k and not p for k, p in zip(counts, law, strict=True)):
            continue
        process = EProcess(law)
        process.update(counts)
        before, after = math.exp(process.log_e_value), 0.0
        for outcome, p in enumerate(law):
            if p:
                more = EProcess(law)
                more.update([k + (i == outcome) for i, k in enumerate(counts)])
                after += p * math.exp(more.log_e_value)
        assert after <= before * (1 + 1e-12)  # equal where every outcome can come
        if all(law):
            assert after == pytest.approx(before)


def test_an_impossible_outcome_ends_it():
    assert EProcess((1.0, 0.0)).update([5, 1]) <= 1e-300


def test_the_p_value_is_the_least_of_all_looks_and_chunks_do_not_matter():
    process = EProcess((0.5, 0.5))
    first = process.update([0, 30])
    assert first < 1e-6
    assert process.update([300, 270]) == first
    assert process.counts.tolist() == [300, 300]
    whole = EProcess((0.5, 0.5))
    whole.update([300, 300])
    assert whole.log_e_value == process.log_e_value


@pytest.mark.parametrize("p", [0.5, 0.05])
@pytest.mark.parametrize("off", [0.2, 0.04])
def test_an_e_process_sees_the_discrepancy_in_time(p, off):
    fail, miss = 1e-9, 1e-6
    n = min_num_samples_for_e_process(p, off, fail, miss)
    passed = []
    for k in range(n + 1):
        process = EProcess((1 - p, p))
        passed.append(process.update([n - k, k]) > fail)
    for q in (p - off, p + off):
        if q >= 0:
            assert stats.binom.pmf(np.arange(n + 1), n, q)[np.array(passed)].sum() <= miss * (1 + 1e-9)
    # Looking all the time costs less than three times the samples.
    assert n < 3 * min_num_samples_for_binomial(p, off, fail, miss)


@pytest.mark.parametrize(("successes", "trials"), [(0, 40), (13, 40), (40, 40), (500, 1000)])
def test_a_confidence_sequence_holds_what_the_evidence_has_not_excluded(successes, trials):
    low, high = confidence_sequence(successes, trials, 1e-3)
    assert 0 <= low <= successes / trials <= high <= 1
    for p, inside in ((low - 1e-6, False), (low + 1e-6, True), (high - 1e-6, True), (high + 1e-6, False)):
        if 0 < p < 1:
            process = EProcess((1 - p, p))
            assert (process.update([trials - successes, successes]) > 1e-3) == inside


def test_no_samples_exclude_nothing():
    assert confidence_sequence(0, 0, 0.01) == (0, 1)
    assert binomial_p_value(0, 0, 0.3) == 1


def test_rates_are_split():
    assert split_rate(1e-6, 4) == 2.5e-7


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: binomial_p_value(3, 2, 0.5), "successes=3, but must be at most trials=2"),
        (lambda: binomial_p_value(1, 2, 1.5), r"probability=1.5, but must be in \[0, 1\]"),
        (lambda: binomial_p_value(-1, 2, 0.5), "successes=-1, but must be an integer >= 0"),
        (lambda: multinomial_p_value([1, 1], [0.5, 0.4]), "but must be >= 0 and sum to 1"),
        (lambda: multinomial_p_value([1], [0.5, 0.5]), r"len\(counts\)=1, but must be"),
        (
            lambda: min_num_samples_for_binomial(0.5, 0.6, 0.1, 0.1),
            "discrepancy=0.6, but must be at most 0.5",
        ),
        (
            lambda: min_num_samples_for_binomial(0.5, 0.1, 0, 0.1),
            r"false_fail_rate=0, but must be in \(0, 1\)",
        ),
        (lambda: min_num_samples_for_binomial(0.5, 1e-9, 0.1, 0.1), "samples can see"),
        (lambda: min_num_samples_for_multinomial([0.5, 0.5], 0.9, 0.1, 0.1), "discrepancy=0.9"),
        (lambda: min_num_samples_for_e_process(0.5, 0.7, 0.1, 0.1), "discrepancy=0.7"),
        (lambda: dkwm_bound(0, 0.1), "num_samples=0, but must be an integer >= 1"),
        (lambda: dkwm_distance([], stats.uniform.cdf), "must hold at least one number"),
        (lambda: confidence_sequence(3, 2, 0.1), "successes=3"),
        (lambda: EProcess((0.5, 0.5)).update([1]), r"len\(counts\)=1, but must be 2"),
        (lambda: split_rate(0.1, 0), "num_tests=0, but must be an integer >= 1"),
        (lambda: split_rate(1.0, 3), r"total=1.0, but must be in \(0, 1\)"),
        (lambda: split_rate(None, 3), r"total=None, but must be in \(0, 1\)"),
        (lambda: binomial_p_value(math.nan, 5, 0.5), "successes=nan, but must be an integer >= 0"),
        (lambda: binomial_p_value(1, math.inf, 0.5), "trials=inf, but must be an integer >= 0"),
        (lambda: binomial_p_value("1", 5, 0.5), "successes='1', but must be an integer >= 0"),
        (lambda: binomial_p_value(1, 2, "half"), r"probability='half', but must be in \[0, 1\]"),
        (lambda: binomial_p_value(1, 10**400, 0.5), r"but must be at most 2\*\*53"),
        (lambda: EProcess(["a", "b"]), r"probabilities=\['a', 'b'\], but must be"),
        (lambda: EProcess((0.5, 0.5)).update(3), "counts=3, but must be a list of integers, one per outcome"),
        (lambda: EProcess((0.5, 0.5)).update([[1, 2], [3, 4]]), r"counts=\[1, 2\], but must be an integer"),
        (
            lambda: EProcess((0.5, 0.5)).update([0, 2**40 + 1]),
            r"counts in all=.*, but must be at most 2\*\*40",
        ),
        (lambda: confidence_sequence(5, 10**15, 0.1), r"trials=.*, but must be at most 2\*\*40"),
        (lambda: multinomial_p_value(3, [0.5, 0.5]), "counts=3, but must be a list"),
        (
            lambda: dkwm_distance([0.5, math.nan], stats.uniform.cdf),
            r"samples\[1\]=nan, but must be a number",
        ),
        (lambda: dkwm_distance(["x"], stats.uniform.cdf), r"samples=\['x'\], but must be numbers"),
        (lambda: dkwm_distance([0.5], lambda x: x * math.nan), r"cdf\(0.5\)=nan, but must be a probability"),
        (lambda: dkwm_distance([0.5, 0.6], lambda x: x[0]), r"cdf\(x\) of shape \(\), but must be of x's"),
        (lambda: min_num_samples_for_dkwm(1e-300, 1e-9, 1e-6), "discrepancy=1e-300, but must be one that"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(InvalidArgument, match=message):
        call()


def test_evidence_is_right_up_to_the_most_samples_and_refused_beyond():
    # The exact law of n equal coins in n / 2 and n / 2, by Stirling's series: its error is below 1 / n.
    n = 2**40
    process = EProcess((0.5, 0.5))
    assert process.update([n // 2, n // 2]) == 1
    exact = 0.5 * math.log(2 / (math.pi * n))  # beta(k + 1/2, k + 1/2) / pi over 2**-n
    assert process.log_e_value == pytest.approx(exact, abs=0.01)
    before = process.counts.tolist()
    with pytest.raises(InvalidArgument, match="counts in all"):
        process.update([1, 0])
    assert process.counts.tolist() == before
