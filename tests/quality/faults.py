"""Deliberately wrong verifiers, one fault each: the provers are tested on them.

:class:`Sampler` is right, small and open: every step of the walk is a method, and a fault overrides one.
To add a fault: subclass, decorate with ``fault``, name its kind (``registry.KINDS``) and the laws that must
kill it. ``variant_faults.py`` has faults that are seldom seen; ``registry.py`` lists all modules of faults.
"""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from registry import planting
from remembered import row_status, target_probs

from treeconv.backends.base import BackendTraits
from treeconv.tree import RowStatus, VerifyOutput

FAULTS, fault = planting()


def running_sums(values):
    """In float32; of more than 32 as a device scans, each a tree of additions.

    One after the other, thousands are coarser than what the oracle grants float32.
    """
    sums = np.array(values, np.float32)
    if sums.size <= 32:
        return np.cumsum(sums, out=sums)
    step = 1
    while step < sums.size:
        sums[step:] += sums[:-step].copy()
        step *= 2
    return sums


@dataclass
class Walk:
    """One request as the walk sees it."""

    index: int
    tokens: list
    children: list
    depths: list
    rows: np.ndarray  # [N, V]
    temperature: float | None  # None: rows are probabilities
    accept: np.ndarray
    final: np.float32
    cap: int
    batch: "Batch"


@dataclass
class Batch:
    """What all requests of a call share."""

    rows: np.ndarray  # [B, N, V]
    temperatures: list | None


class Sampler:  # its steps take all that a fault may want to look at
    """A right verifier: DESIGN's walk in NumPy float32."""

    name = "right"
    traits = BackendTraits(devices=("cpu",))

    def verify(self, batch, logits, temperature, coins, depth_cap):
        return self.run(batch, logits.float().numpy(), temperature.tolist(), coins, depth_cap)

    def verify_probs(self, batch, target_probs, coins, depth_cap):
        return self.run(batch, target_probs.numpy(), None, coins, depth_cap)

    def run(self, batch, rows, temperatures, coins, cap):
        size, slots, _ = rows.shape
        tokens = batch.candidates.tolist()
        first, sibling = batch.retrieve_next_token.tolist(), batch.retrieve_next_sibling.tolist()
        depths = (batch.positions - batch.prefix_lens[:, None]).tolist()
        accept_index = np.full((size, cap), -1, np.int32)
        counts = np.zeros(size, np.int32)
        predicts = np.full(size * slots, -1, np.int32)
        statuses = np.zeros(size, np.int32)
        for request in range(size):
            walk = Walk(
                index=request,
                tokens=tokens[request],
                children=[self.chain_of_siblings(first[request], sibling[request], n) for n in range(slots)],
                depths=depths[request],
                rows=rows[request],
                temperature=None if temperatures is None else temperatures[request],
                accept=coins.accept[request].numpy(),
                final=coins.final[request].numpy()[()],
                cap=cap,
                batch=Batch(rows, temperatures),
            )
            path, bonus, status = self.walk(walk)
            statuses[request] = status
            if status is not RowStatus.OK:
                continue
            flat, count, emitted = self.commit(walk, path, bonus)
            accept_index[request, : len(flat[:cap])] = [request * slots + node for node in flat[:cap]]
            counts[request] = count
            for node, token in zip(flat, emitted, strict=False):
                predicts[request * slots + node] = token
        return VerifyOutput(*map(torch.from_numpy, (accept_index, counts, predicts, statuses)))

    @staticmethod
    def chain_of_siblings(first, sibling, node):
        children, child = [], first[node]
        while child != -1:
            children.append(child)
            child = sibling[child]
        return children

    def walk(self, walk):
        path = [0]
        while True:
            node = path[-1]
            status, p = self.law(walk, node)
            if status is not RowStatus.OK:
                return [], -1, status
            kids = self.kids(walk, path)
            accepted, rejected = self.test(walk, path, kids, p)
            residual = self.residual(walk, path, p, rejected)
            if accepted is None and not residual.any():
                with_mass = [kid for kid in kids if p[walk.tokens[kid]] > 0]
                accepted = with_mass[-1] if with_mass else None
            if accepted is None:
                return path, self.draw(residual, self.final_coin(walk, path)), RowStatus.OK
            path.append(accepted)

    def temperature(self, walk):
        return walk.temperature

    def row(self, walk, node):
        return walk.rows[node]

    def law(self, walk, node):
        row = self.row(walk, node)
        status = row_status(row, is_probs=walk.temperature is None)
        if walk.temperature is None or status is not RowStatus.OK:
            return status, row
        return status, self.softmax(row, self.temperature(walk))

    def softmax(self, row, temperature):
        return target_probs(row, temperature)

    def kids(self, walk, path):
        return walk.children[path[-1]] if len(path) < walk.cap else []

    def test(self, walk, path, kids, p):
        """The accepted child or None, and the tokens rejected before it."""
        rejected, acc = [], np.float32(0)
        for kid in kids:
            token = walk.tokens[kid]
            acc += p[token]
            if self.hits(self.coin(walk, path, kid), acc, p[token]):
                return kid, rejected
            rejected.append(token)
        return None, rejected

    def coin(self, walk, path, kid):
        return walk.accept[path[-1]]

    def hits(self, coin, acc, mass):
        return mass > 0 and coin < acc

    def residual(self, walk, path, p, rejected):
        residual = p.copy()
        residual[rejected] = 0
        return residual

    def final_coin(self, walk, path):
        return walk.final

    def draw(self, residual, coin):
        sums = running_sums(residual)
        above = np.flatnonzero((sums > np.float64(coin) * np.float64(sums[-1])) & (residual > 0))
        return int(above[0]) if above.size else self.fallback(residual)

    def fallback(self, residual):
        return int(np.flatnonzero(residual)[-1])

    def commit(self, walk, path, bonus):
        """Nodes, count and tokens as they are written to the output."""
        return path, len(path) - 1, [*(walk.tokens[node] for node in path[1:]), bonus]


# --- K1: zero mass and edges --------------------------------------------------------------------------


@fault("K1", "critical-coins")
class InclusiveTest(Sampler):
    def hits(self, coin, acc, mass):
        return mass > 0 and coin <= acc


@fault("K1", "positive-mass", "positive-mass-logits")
class CoinZeroAcceptsZeroMass(Sampler):
    def hits(self, coin, acc, mass):
        return coin <= acc


@fault("K1", "positive-mass")
class BonusTestInclusive(Sampler):
    def draw(self, residual, coin):
        sums = np.cumsum(residual, dtype=np.float32)
        return int(np.flatnonzero(sums >= np.float64(coin) * np.float64(sums[-1]))[0])


@fault("K1", "positive-mass")
class FallsBackToLastId(Sampler):
    def fallback(self, residual):
        return residual.size - 1


@fault("K1", "positive-mass")
class EmptyResidualEmitsLastId(Sampler):
    """SGLang's: children cover the support, the sum rounds below the coin, the last id is emitted."""

    def residual(self, walk, path, p, rejected):
        residual = super().residual(walk, path, p, rejected)
        if not residual.any():
            residual[-1] = 1
        return residual


# --- K2: wrong proposal law ---------------------------------------------------------------------------


@fault("K2", "outcome-law", "critical-coins")
class RatioTest(Sampler):
    """min(1, p/q) with a marginal of 3/4, for children that are a fixed set."""

    def hits(self, coin, acc, mass):
        return coin < mass / np.float32(0.75)


@fault("K2", "outcome-law")
class MatchOrRatio(Sampler):
    """Accepts a child that the target's own draw matches, or that passes the test."""

    def test(self, walk, path, kids, p):
        drawn = self.draw(p, walk.final)
        for kid in kids:
            if walk.tokens[kid] == drawn:
                return kid, []
        return super().test(walk, path, kids, p)


@fault("K2", "more-children", "accepted-length")
class SharesCoinAmongChildren(Sampler):
    def test(self, walk, path, kids, p):
        return super().test(walk, path, kids, p / np.float32(max(1, len(kids))))


# --- K3: temperature ----------------------------------------------------------------------------------


@fault("K3", "oracle-agreement", "critical-coins-logits")
class TemperatureIgnored(Sampler):
    def temperature(self, walk):
        return 1.0 if walk.temperature > 0 else 0.0


@fault("K3", "oracle-agreement", "critical-coins-logits")
class TemperatureTwice(Sampler):
    def temperature(self, walk):
        return float(np.float32(min(walk.temperature**2, 1e30)))


@fault("K3", "oracle-agreement", "critical-coins-logits")
class AlwaysGreedy(Sampler):
    def temperature(self, walk):
        return 0.0


@fault("K3", "critical-coins-logits")
class BonusWithoutTemperature(Sampler):
    def residual(self, walk, path, p, rejected):
        if walk.temperature is not None and walk.temperature > 0:
            p = target_probs(walk.rows[path[-1]], 1.0)
        return super().residual(walk, path, p, rejected)


# --- K4: residual and bonus ---------------------------------------------------------------------------


@fault("K4", "outcome-law", "critical-coins", "autoregressive")
class ResidualUnmasked(Sampler):
    def residual(self, walk, path, p, rejected):
        return p.copy()


@fault("K4", "outcome-law")
class BonusFromParentRow(Sampler):
    def residual(self, walk, path, p, rejected):
        if len(path) > 1 and not rejected:
            p = self.law(walk, path[-2])[1]
        return super().residual(walk, path, p, rejected)


@fault("K4", "outcome-law", "oracle-agreement")
class BonusDroppedAfterFullAcceptance(Sampler):
    def commit(self, walk, path, bonus):
        if len(path) > 1 and not walk.children[path[-1]]:
            bonus = -1
        return super().commit(walk, path, bonus)


@fault("K4", "outcome-law")
class SoftmaxOfResidual(Sampler):
    def residual(self, walk, path, p, rejected):
        residual = super().residual(walk, path, p, rejected)
        return np.where(residual > 0, np.exp(residual), 0).astype(np.float32)


# --- K5: coins ----------------------------------------------------------------------------------------


@fault("K5", "outcome-law")
class CoinReusedOneLevelDown(Sampler):
    def coin(self, walk, path, kid):
        return walk.accept[path[max(0, len(path) - 2)]]


@fault("K5", "outcome-law")
class FinalCoinIsAcceptCoin(Sampler):
    def final_coin(self, walk, path):
        return walk.accept[path[-1]]


@fault("K5", "chain", "oracle-agreement")
class CoinOfTheChild(Sampler):
    def coin(self, walk, path, kid):
        return walk.accept[kid]


@fault("K5", "determinism")
class OwnCoins(Sampler):
    """Draws its own coins from a stream nobody seeds."""

    is_restless = True

    def __init__(self):
        self.stream = np.random.default_rng(7)

    def coin(self, walk, path, kid):
        return self.stream.random(dtype=np.float32)


# --- K6: layout ---------------------------------------------------------------------------------------


@fault("K6", "accepted-length", "oracle-agreement")
class FirstChildOnly(Sampler):
    def kids(self, walk, path):
        return super().kids(walk, path)[:1]


@fault("K6", "critical-coins", "accepted-length")
class LostThirdSibling(Sampler):
    def kids(self, walk, path):
        return super().kids(walk, path)[:2]


@fault("K6", "critical-coins", "oracle-agreement")
class SiblingsTestedInReverse(Sampler):
    def kids(self, walk, path):
        return super().kids(walk, path)[::-1]


@fault("K6", "critical-coins", "oracle-agreement")
class SiblingsReversedInOutput(Sampler):
    """Decides rightly, and reports the sibling at the mirrored place."""

    def commit(self, walk, path, bonus):
        _, count, emitted = super().commit(walk, path, bonus)
        mirrored = [0]
        for before, node in pairwise(path):
            kids = walk.children[before]
            mirrored.append(kids[::-1][kids.index(node)])
        return mirrored, count, emitted


@fault("K6", "critical-coins", "oracle-agreement")
class TokenZeroMeansNone(Sampler):
    def kids(self, walk, path):
        return [kid for kid in super().kids(walk, path) if walk.tokens[kid] != 0]


# --- K7: rows of other nodes --------------------------------------------------------------------------


@fault("K7", "oracle-agreement", "outcome-law")
class RowsShiftedByOne(Sampler):
    def row(self, walk, node):
        return walk.rows[max(0, node - 1)]


@fault("K7", "outcome-law")
class ParentRowFromDepthThree(Sampler):
    def row(self, walk, node):
        return walk.rows[max(0, node - 1)] if walk.depths[node] >= 3 else walk.rows[node]


# --- K8: batches --------------------------------------------------------------------------------------


@fault("K8", "batch-invariance")
class TemperatureOfRequestZero(Sampler):
    def temperature(self, walk):
        return walk.batch.temperatures[0]


@fault("K8", "batch-invariance")
class MixedTemperaturesAreSampled(Sampler):
    """Greedy requests are sampled at 1 as soon as one request of the batch is."""

    def temperature(self, walk):
        mixed = len(set(walk.batch.temperatures)) > 1
        return 1.0 if mixed and walk.temperature == 0 else walk.temperature


@fault("K8", "batch-invariance")
class RowsOfRequestZero(Sampler):
    def row(self, walk, node):
        return walk.batch.rows[0, node]


@fault("K8", "outcome-law", "critical-coins")
class DropsTailOfVocabulary(Sampler):
    """Loads four tokens at a time; a vocabulary of 5, 6, 7 or 9 loses its tail."""

    def draw(self, residual, coin):
        whole = residual.size // 4 * 4
        return super().draw(residual[:whole] if residual[:whole].any() else residual, coin)


# --- K9: committing -----------------------------------------------------------------------------------


@fault("K9", "depth-cap")
class DepthCapIgnored(Sampler):
    def kids(self, walk, path):
        return walk.children[path[-1]]


@fault("K9", "depth-cap")
class RejectsAtTheCap(Sampler):
    """At the cap nothing was tested, yet the children are taken out of the law."""

    def residual(self, walk, path, p, rejected):
        if len(path) >= walk.cap:
            untested = [walk.tokens[kid] for kid in walk.children[path[-1]]]
            without = super().residual(walk, path, p, untested)
            return without if without.any() else p
        return super().residual(walk, path, p, rejected)


@fault("K9", "oracle-agreement", "depth-cap")
class CountsTheBonus(Sampler):
    def commit(self, walk, path, bonus):
        flat, count, emitted = super().commit(walk, path, bonus)
        return flat, count + 1, emitted


# --- K10: buffers -------------------------------------------------------------------------------------


@fault("K10", "purity")
class StaleResidual(Sampler):
    """What one call rejected stays masked in the next (graph replay with an uncleared buffer)."""

    def __init__(self):
        self.masked = {}

    def residual(self, walk, path, p, rejected):
        banned = self.masked.setdefault((walk.index, path[-1]), set())
        banned |= set(rejected)
        usable = [token for token in banned if token < p.size]
        stale = super().residual(walk, path, p, usable)
        return stale if stale.any() else super().residual(walk, path, p, rejected)


@fault("K10", "purity")
class WritesItsInputs(Sampler):
    def residual(self, walk, path, p, rejected):
        walk.rows[path[-1], rejected] = 0
        return super().residual(walk, path, p, rejected)


# --- K11: numerics ------------------------------------------------------------------------------------


@fault("K11", "greedy")
class LastTieWins(Sampler):
    def softmax(self, row, temperature):
        if temperature > 0:
            return super().softmax(row, temperature)
        return np.eye(1, row.size, row.size - 1 - int(row[::-1].argmax()), dtype=np.float32)[0]


@fault("K11", "greedy")
class GreedyIsTemperatureOneThousandth(Sampler):
    def temperature(self, walk):
        return max(walk.temperature, 1e-3) if walk.temperature == 0 else walk.temperature


@fault("K11", "critical-coins-logits")
class TemperatureClamped(Sampler):
    def temperature(self, walk):
        return max(walk.temperature, 0.01) if walk.temperature > 0 else 0.0


@fault("K11", "bad-rows")
class NanSanitised(Sampler):
    def row(self, walk, node):
        return np.nan_to_num(walk.rows[node], nan=0.0, posinf=np.inf, neginf=-np.inf)


@fault("K11", "bad-rows")
class UnvisitedRowsLookedAt(Sampler):
    def walk(self, walk):
        for node in range(len(walk.tokens)):
            if node and walk.depths[node] == 0:
                continue  # padding
            status = row_status(walk.rows[node], is_probs=walk.temperature is None)
            if status is not RowStatus.OK:
                return [], -1, status
        return super().walk(walk)


@fault("K11", "bad-rows")
class OneBadRequestStopsTheBatch(Sampler):
    def run(self, batch, rows, temperatures, coins, cap):
        output = super().run(batch, rows, temperatures, coins, cap)
        if output.status.any():
            output.status[:] = output.status.max()
            output.accept_index[:], output.accept_token_num[:], output.predicts[:] = -1, 0, -1
        return output


@fault("K11", "critical-coins")
class SumsInHalfPrecision(Sampler):
    def test(self, walk, path, kids, p):
        return super().test(walk, path, kids, p.astype(np.float16).astype(np.float32) + np.float32(2**-13))


# --- K12: overflow ------------------------------------------------------------------------------------


@fault("K12", "oracle-agreement-wide")
class OffsetWraps(Sampler):
    """Row offsets kept in too few bits (here 12, so that cases that fit a test reach the end of them)."""

    def row(self, walk, node):
        rows = walk.batch.rows
        _, slots, vocab = rows.shape
        offset = ((walk.index * slots + node) * vocab) % 4096
        flat = rows.reshape(-1)
        return flat[offset : offset + vocab] if offset + vocab <= flat.size else walk.rows[node]
