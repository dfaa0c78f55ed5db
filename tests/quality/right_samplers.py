"""Right samplers, ours and odd ones: no law may ever flag one. ``ci/no_false_alarms.py`` runs them long."""

import numpy as np
import torch
from faults import Sampler, running_sums
from filter_faults import RIGHT as RIGHT_FILTERS
from processed_rule_faults import RIGHT as RIGHT_PROCESSED_RULES
from processor_faults import RIGHT as RIGHT_PROCESSORS
from rng_faults import RIGHT as RIGHT_COINS
from rule_faults import RIGHT as RIGHT_RULES
from sampled_faults import RIGHT as RIGHT_SAMPLED

from treeconv.backends.base import BackendTraits
from treeconv.sampling import row_status
from treeconv.tree import RowStatus


class InFloat64(Sampler):
    """All sums and the softmax in float64."""

    name = "float64"

    def law(self, walk, node):
        row = self.row(walk, node)
        status = row_status(row, is_probs=walk.temperature is None)
        if status is not RowStatus.OK or walk.temperature is None:
            return status, row.astype(np.float64)
        row = row.astype(np.float64)
        if walk.temperature == 0:
            return status, np.eye(1, row.size, int(row.argmax()))[0]
        with np.errstate(over="ignore", under="ignore"):
            weights = np.exp((row - row.max()) / walk.temperature)
        return status, weights / weights.sum()

    def test(self, walk, path, kids, p):
        rejected, acc = [], 0.0
        for kid in kids:
            token = walk.tokens[kid]
            acc += p[token]
            if p[token] > 0 and float(walk.accept[path[-1]]) < acc:
                return kid, rejected
            rejected.append(token)
        return None, rejected

    def draw(self, residual, coin):
        sums = np.cumsum(residual, dtype=np.float64)
        above = np.flatnonzero((sums > float(coin) * sums[-1]) & (residual > 0))
        return int(above[0]) if above.size else self.fallback(residual)


def backwards(values):
    """Their float32 sum from the last to the first."""
    return running_sums(values[::-1])[-1] if len(values) else np.float32(0)


class InReverse(Sampler):
    """Every sum is taken from its far end: the softmax's, the children's, the residual's.

    (Not the distribution function itself: what is left of 1 above a token is too coarse near coin 0, where a
    sampler that decides by it is flagged.)
    """

    name = "reverse-order"

    def softmax(self, row, temperature):
        if temperature == 0:
            return super().softmax(row, temperature)
        with np.errstate(over="ignore", under="ignore"):
            weights = np.exp((row - row.max()) / np.float32(temperature))
        return weights / backwards(weights)

    def test(self, walk, path, kids, p):
        masses = p[[walk.tokens[kid] for kid in kids]]
        for place, kid in enumerate(kids):
            acc = backwards(masses[: place + 1])
            if self.hits(self.coin(walk, path, kid), acc, masses[place]):
                return kid, [walk.tokens[other] for other in kids[:place]]
        return None, [walk.tokens[kid] for kid in kids]

    def draw(self, residual, coin):
        total = np.float64(backwards(residual))
        sums = running_sums(residual)
        above = np.flatnonzero((sums > np.float64(coin) * total) & (residual > 0))
        return int(above[0]) if above.size else self.fallback(residual)


class DividesProbabilities(Sampler):
    """Divides what it is handed by its sum, which a float32 softmax leaves a few roundings off 1."""

    name = "divides-probabilities"

    def law(self, walk, node):
        status, p = super().law(walk, node)
        return status, p / p.sum(dtype=np.float32) if status is RowStatus.OK else p


class InBfloat16(Sampler):
    """Takes bfloat16 logits alone, and is judged by what it was handed (X3)."""

    name = "bfloat16"
    traits = BackendTraits(devices=("cpu",), rows_dtypes=("bfloat16",))

    def verify(self, batch, logits, temperature, coins, depth_cap):
        assert logits.dtype == torch.bfloat16
        return super().verify(batch, logits, temperature, coins, depth_cap)


ODD = [Sampler, InFloat64, InReverse, DividesProbabilities, InBfloat16]
RIGHT = [
    *ODD,
    *RIGHT_FILTERS,
    *RIGHT_RULES,
    *RIGHT_PROCESSORS,
    *RIGHT_PROCESSED_RULES,
    *RIGHT_COINS,
    *RIGHT_SAMPLED,
]
