"""Tests of samplers that draw their own coins, with both error rates stated and the sample size computed.

Exact or finite-sample valid throughout: no normal approximation, no chi-square limit. Each test comes with
its twins: how many samples it takes to see a discrepancy, and which discrepancy so many samples see.

* *False fail*: a right sampler is flagged. Never more often than ``false_fail_rate``.
* *False pass*: a sampler that is off by ``discrepancy`` is not flagged. Never more often than
  ``false_pass_rate``, given at least ``min_num_samples_for_...``.

An :class:`EProcess` may be looked at after every sample and stopped at any of them: its false-fail rate holds
for the whole sequence of looks. The shape is TensorFlow Probability's ``statistical_testing``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special

from treeconv._validate_statistics import (
    MOST_SAMPLES,
    check_count,
    check_counts,
    check_evidence,
    check_law,
    check_rate,
    check_share,
)
from treeconv.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

__all__ = [
    "EProcess",
    "binomial_p_value",
    "confidence_sequence",
    "dkwm_bound",
    "dkwm_distance",
    "min_discrepancy_of_binomial",
    "min_discrepancy_of_dkwm",
    "min_discrepancy_of_multinomial",
    "min_num_samples_for_binomial",
    "min_num_samples_for_dkwm",
    "min_num_samples_for_e_process",
    "min_num_samples_for_multinomial",
    "multinomial_p_value",
    "split_rate",
]


def split_rate(total: float, num_tests: int) -> float:
    """The rate that each of several tests may have, so that all together keep ``total``.

    Union bound, so the tests may depend on each other.

    Args:
        total: of all of them, in (0, 1).

        num_tests: >= 1.
    """
    return check_rate("total", total) / check_count("num_tests", num_tests, 1)


# --- binomial -----------------------------------------------------------------------------------------


def _at_most(k: int, n: int, p: float) -> float:
    """P(X <= k), X binomial; k may lie beside [0, n]."""
    if not 0 <= k < n:
        return float(k >= n)
    return float(special.betainc(n - k, k + 1, 1 - p))


def _at_least(k: int, n: int, p: float) -> float:
    """P(X >= k), without the cancellation of 1 - P(X < k)."""
    if not 0 < k <= n:
        return float(k <= 0)
    return float(special.betainc(k, n - k + 1, p))


def binomial_p_value(successes: int, trials: int, probability: float) -> float:
    """Exact two-sided p-value of ``successes`` in ``trials``: twice the smaller tail, at most 1.

    P(p-value <= a) <= a for every a, whatever ``trials`` and ``probability``.

    Args:
        successes: in [0, trials].

        trials: >= 0.

        probability: of one success, in [0, 1].
    """
    trials = check_count("trials", trials)
    successes = check_count("successes", successes)
    if successes > trials:
        raise InvalidArgument(f"successes={successes!r}, but must be at most trials={trials!r}")
    p = check_share("probability", probability)
    tail = min(_at_most(successes, trials, p), _at_least(successes, trials, p))
    return min(1.0, 2 * tail)


def _accepted_counts(trials: int, probability: float, rate: float) -> tuple[int, int]:
    """The counts that are not flagged: p-value > rate exactly for low <= count <= high."""

    def first(
        holds: Callable[[int], bool],
    ) -> int:  # of [0, trials], holds being monotone; trials + 1 if never
        low, high = 0, trials + 1
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if holds(middle) else (middle + 1, high)
        return low

    low = first(lambda k: 2 * _at_most(k, trials, probability) > rate)
    beyond = first(lambda k: 2 * _at_least(k, trials, probability) <= rate)
    return low, beyond - 1


def _false_pass(trials: int, probability: float, discrepancy: float, rate: float) -> float:
    """The chance that the test at ``rate`` passes a sampler off by ``discrepancy``, to the worse side."""
    low, high = _accepted_counts(trials, probability, rate)
    worst = 0.0
    # The further off, the less of the accepted range is met: the nearest on each side is the worst.
    for other in (probability - discrepancy, probability + discrepancy):
        if 0 <= other <= 1:
            passes = min(_at_most(high, trials, other), _at_least(low, trials, other))
            worst = max(worst, passes)
    return worst


def _least(suffices: Callable[[int], bool], what: str) -> int:
    """A number of samples that suffices: found by doubling, then bisecting."""
    high = 1
    while not suffices(high):
        high *= 2
        if high > MOST_SAMPLES:
            raise InvalidArgument(f"{what}, but must be one that {MOST_SAMPLES} samples can see")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def min_num_samples_for_binomial(
    probability: float, discrepancy: float, false_fail_rate: float, false_pass_rate: float
) -> int:
    """Samples with which ``binomial_p_value <= false_fail_rate`` sees ``discrepancy`` all but rarely.

    Exact at the number returned. A count is whole, so power is a saw-tooth in the number of samples: some of
    the numbers just above may miss the rate by a little, and some just below may keep it.

    Args:
        probability: the claimed one.

        discrepancy: between the true probability and the claimed one, in either direction, in (0, 1).

        false_fail_rate: of the test, in (0, 1).

        false_pass_rate: how often a discrepancy at least so large may be missed, in (0, 1).

    Raises:
        InvalidArgument: no probability is that far away, or more than 2**40 samples would be needed.
    """
    p = check_share("probability", probability)
    check_rate("discrepancy", discrepancy)
    check_rate("false_fail_rate", false_fail_rate)
    check_rate("false_pass_rate", false_pass_rate)
    if p - discrepancy < 0 and p + discrepancy > 1:
        raise InvalidArgument(f"discrepancy={discrepancy!r}, but must be at most {max(p, 1 - p)!r}")
    return _least(
        lambda n: _false_pass(n, p, discrepancy, false_fail_rate) <= false_pass_rate,
        f"discrepancy={discrepancy!r}",
    )


def _least_discrepancy(missed: Callable[[float], bool], most: float) -> float:
    """The least discrepancy that is not missed, by bisection; ``most`` where all are."""
    low, high = 0.0, most
    if missed(most):
        return math.inf
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if missed(middle) else (low, middle)
    return high


def min_discrepancy_of_binomial(
    probability: float, num_samples: int, false_fail_rate: float, false_pass_rate: float
) -> float:
    """The least discrepancy that so many samples see, up to ``false_pass_rate``; inf where they see none.

    Args: as for :func:`min_num_samples_for_binomial`.
    """
    p = check_share("probability", probability)
    n = check_count("num_samples", num_samples, 1)
    check_rate("false_fail_rate", false_fail_rate)
    check_rate("false_pass_rate", false_pass_rate)

    def missed(discrepancy: float) -> bool:
        return _false_pass(n, p, discrepancy, false_fail_rate) > false_pass_rate

    return _least_discrepancy(missed, max(p, 1 - p))


# --- multinomial --------------------------------------------------------------------------------------


def multinomial_p_value(counts: Sequence[int], probabilities: Sequence[float]) -> float:
    """P-value of counts per outcome: the smallest exact binomial one, times the number of outcomes.

    P(p-value <= a) <= a by the union bound; nearly sharp, since the smallest tail decides. One count of an
    outcome without probability gives 0.

    Args:
        counts: how often each outcome came.

        probabilities: of each outcome, >= 0 and summing to 1.
    """
    law = check_law(probabilities)
    seen = check_counts(counts, law.size, f"len(probabilities)={law.size}")
    total = sum(seen)
    least = min(binomial_p_value(k, total, min(1.0, p)) for k, p in zip(seen, law.tolist(), strict=True))
    return min(1.0, law.size * least)


def min_num_samples_for_multinomial(
    probabilities: Sequence[float], discrepancy: float, false_fail_rate: float, false_pass_rate: float
) -> int:
    """Samples with which :func:`multinomial_p_value` sees one outcome off by ``discrepancy``, whichever.

    Args: as for :func:`min_num_samples_for_binomial`; ``discrepancy`` is the largest one of any outcome.
    """
    law = check_law(probabilities)
    check_rate("discrepancy", discrepancy)
    rate = split_rate(check_rate("false_fail_rate", false_fail_rate), law.size)
    reachable = [p for p in set(law.tolist()) if discrepancy <= max(p, 1 - p)]
    if not reachable:
        raise InvalidArgument(f"discrepancy={discrepancy!r}, but must be one that an outcome can have")
    return max(min_num_samples_for_binomial(p, discrepancy, rate, false_pass_rate) for p in reachable)


def min_discrepancy_of_multinomial(
    probabilities: Sequence[float], num_samples: int, false_fail_rate: float, false_pass_rate: float
) -> float:
    """The least discrepancy of one outcome that so many samples see, whichever outcome it is.

    Args: as for :func:`min_num_samples_for_multinomial`.
    """
    law = check_law(probabilities)
    rate = split_rate(check_rate("false_fail_rate", false_fail_rate), law.size)
    return max(min_discrepancy_of_binomial(p, num_samples, rate, false_pass_rate) for p in set(law.tolist()))


# --- Dvoretzky, Kiefer, Wolfowitz, Massart ------------------------------------------------------------


def dkwm_distance(samples: Any, cdf: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> float:
    """The largest distance between the samples' empirical distribution function and ``cdf``.

    Args:
        samples: numbers, no NaN.

        cdf: P(X <= x) of an array of x, atoms allowed.

    Raises:
        InvalidArgument: no sample, one that is no number, or a cdf that gives none: any distance from NaN
            would pass.
    """
    try:
        flat = np.asarray(samples, np.float64).ravel()
    except (TypeError, ValueError):
        raise InvalidArgument(f"samples={samples!r}, but must be numbers") from None
    if not flat.size:
        raise InvalidArgument("samples=[], but must hold at least one number")
    if np.isnan(flat).any():
        at_fault = int(np.isnan(flat).argmax())
        raise InvalidArgument(f"samples[{at_fault}]=nan, but must be a number: NaN lies nowhere")
    ordered = np.sort(flat)
    places = np.unique(ordered)
    at = _values_of(cdf, places)
    upto = np.searchsorted(ordered, places, side="right") / ordered.size
    before = np.searchsorted(ordered, np.nextafter(places, -np.inf), side="right") / ordered.size
    just_below = _values_of(cdf, np.nextafter(places, -np.inf))
    return float(max(np.abs(upto - at).max(), np.abs(before - just_below).max()))


def _values_of(
    cdf: Callable[[NDArray[np.float64]], NDArray[np.float64]], places: NDArray[np.float64]
) -> NDArray[np.float64]:
    values = np.asarray(cdf(places), np.float64)
    if values.shape != places.shape:
        raise InvalidArgument(f"cdf(x) of shape {values.shape}, but must be of x's, {places.shape}")
    if np.isnan(values).any():
        place = float(places[np.isnan(values).argmax()])
        raise InvalidArgument(f"cdf({place!r})=nan, but must be a probability")
    return values


def dkwm_bound(num_samples: int, false_fail_rate: float) -> float:
    """The distance that n independent samples exceed with at most this chance, whatever the distribution.

    ``sqrt(log(2 / rate) / (2 n))``: Massart, "The tight constant in the Dvoretzky-Kiefer-Wolfowitz
    inequality", Ann. Probab. 18 (1990).
    """
    n = check_count("num_samples", num_samples, 1)
    return math.sqrt(math.log(2 / check_rate("false_fail_rate", false_fail_rate)) / (2 * n))


def min_discrepancy_of_dkwm(num_samples: int, false_fail_rate: float, false_pass_rate: float) -> float:
    """The distance between two distribution functions that n samples see: each side errs by its own bound."""
    return dkwm_bound(num_samples, false_fail_rate) + dkwm_bound(num_samples, false_pass_rate)


def min_num_samples_for_dkwm(discrepancy: float, false_fail_rate: float, false_pass_rate: float) -> int:
    """Samples with which ``dkwm_distance > dkwm_bound(n, false_fail_rate)`` sees ``discrepancy``.

    Raises:
        InvalidArgument: a rate outside (0, 1), or more than 2**40 samples would be needed.
    """
    check_rate("discrepancy", discrepancy)
    ratio = min_discrepancy_of_dkwm(1, false_fail_rate, false_pass_rate) / discrepancy
    if ratio > math.sqrt(MOST_SAMPLES):
        raise InvalidArgument(
            f"discrepancy={discrepancy!r}, but must be one that {MOST_SAMPLES} samples can see"
        )
    return math.ceil(ratio**2)


# --- looked at all the time ---------------------------------------------------------------------------


def _log_evidence(counts: NDArray[Any], law: NDArray[np.float64]) -> Any:
    """The log of a sequence's probability under the Dirichlet(1/2) mixture, less that under the claim."""
    half = 0.5
    size = law.size
    mixture = (special.gammaln(counts + half) - special.gammaln(half)).sum(axis=-1)
    mixture += special.gammaln(size * half) - special.gammaln(counts.sum(axis=-1) + size * half)
    claimed = special.xlogy(counts, law).sum(axis=-1)  # -inf where an impossible outcome came
    return mixture - claimed


@dataclass
class EProcess:
    """Evidence against a claimed law of outcomes, valid whenever it is looked at and whenever one stops.

    The likelihood ratio of a Dirichlet(1/2) mixture of all laws to the claimed one is a martingale of mean 1
    if the claim is right, so it *ever* reaches 1 / a with a chance of at most a (Ville's inequality). With
    two outcomes it is the beta-binomial mixture martingale (Robbins, Ann. Math. Statist. 41, 1970).

    It takes at most 2**40 samples in all: its logarithm is a difference of log-gammas, off by less than 0.01
    up to there, by 10 at 2**50.

    Args:
        probabilities: of each outcome, >= 0 and summing to 1.
    """

    probabilities: Sequence[float]
    counts: NDArray[np.int64] = field(init=False)
    log_e_value: float = field(default=0.0, init=False)
    p_value: float = field(default=1.0, init=False)

    def __post_init__(self) -> None:
        self._law = check_law(self.probabilities)
        self.counts = np.zeros(self._law.size, np.int64)

    def update(self, counts: Sequence[int] | NDArray[np.int64]) -> float:
        """Add new counts per outcome.

        Returns:
            The p-value so far, the least of all looks: at most a with a chance of at most a, ever.

        Raises:
            InvalidArgument: not one count >= 0 per outcome, or more than 2**40 samples in all.
        """
        new = check_counts(counts, self._law.size, f"{self._law.size}, one per outcome")
        check_evidence("counts in all", int(self.counts.sum()) + sum(new))
        self.counts = self.counts + np.array(new, np.int64)
        self.log_e_value = float(_log_evidence(self.counts, self._law))
        self.p_value = min(self.p_value, math.exp(-max(0.0, min(self.log_e_value, 700.0))))
        return self.p_value


def min_num_samples_for_e_process(
    probability: float, discrepancy: float, false_fail_rate: float, false_pass_rate: float
) -> int:
    """Samples after which an :class:`EProcess` of two outcomes has seen ``discrepancy``, if not before.

    Exact at the number returned, for the look after the last sample.

    Args: as for :func:`min_num_samples_for_binomial`.
    """
    p = check_share("probability", probability)
    check_rate("discrepancy", discrepancy)
    threshold = -math.log(check_rate("false_fail_rate", false_fail_rate))
    check_rate("false_pass_rate", false_pass_rate)
    others = [q for q in (p - discrepancy, p + discrepancy) if 0 <= q <= 1]
    if not others:
        raise InvalidArgument(f"discrepancy={discrepancy!r}, but must be at most {max(p, 1 - p)!r}")

    def suffices(n: int) -> bool:
        low, high = _unflagged(n, p, threshold)
        return all(min(_at_most(high, n, q), _at_least(low, n, q)) <= false_pass_rate for q in others)

    return _least(suffices, f"discrepancy={discrepancy!r}")


def _unflagged(trials: int, probability: float, threshold: float) -> tuple[int, int]:
    """The counts at which the evidence stays below the threshold; it is convex in the count."""
    law = np.array([1 - probability, probability])

    def evidence(k: int) -> float:
        return float(_log_evidence(np.array([trials - k, k]), law))

    def edge(inside: int, outside: int) -> int:  # the last one below the threshold
        if evidence(outside) < threshold:
            return outside
        while abs(outside - inside) > 1:
            middle = (inside + outside) // 2
            inside, outside = (middle, outside) if evidence(middle) < threshold else (inside, middle)
        return inside

    centre = min(max(round(trials * probability), 0), trials)
    return edge(centre, 0), edge(centre, trials)


def confidence_sequence(successes: int, trials: int, false_fail_rate: float) -> tuple[float, float]:
    """Bounds of the true probability that hold at all sample sizes at once, but for ``false_fail_rate``.

    They are the probabilities against which an :class:`EProcess` has not reached ``1 / false_fail_rate``.

    Args:
        successes: in [0, trials].

        trials: at most 2**40 (see :class:`EProcess`); none gives (0, 1).

        false_fail_rate: the chance that the truth *ever* lies outside, in (0, 1).
    """
    trials = check_count("trials", trials)
    successes = check_count("successes", successes)
    if successes > trials:
        raise InvalidArgument(f"successes={successes!r}, but must be at most trials={trials!r}")
    check_evidence("trials", trials)
    threshold = -math.log(check_rate("false_fail_rate", false_fail_rate))
    if trials == 0:
        return 0.0, 1.0

    def excluded(p: float) -> bool:
        counts = np.array([trials - successes, successes])
        return bool(_log_evidence(counts, np.array([1 - p, p])) >= threshold)

    def edge(inside: float, outside: float) -> float:  # rounded outwards
        if not excluded(outside):
            return outside
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if excluded(middle) else (middle, outside)
        return outside

    seen = successes / trials
    return edge(seen, 0.0), edge(seen, 1.0)
