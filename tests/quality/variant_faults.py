"""Faults like those of ``faults.py`` that are seldom seen: one ulp, one child, one depth, one call."""

import numpy as np
import torch
from faults import Sampler
from registry import planting

from treeconv.sampling import row_status, target_probs
from treeconv.tree import RowStatus

FAULTS, fault = planting()


def down(value):
    return np.nextafter(np.float32(value), np.float32(-1))


def up(value):
    return np.nextafter(np.float32(value), np.float32(2))


def rounded_to_bfloat16(value):
    return float(torch.tensor(value).bfloat16())


# --- K1 -----------------------------------------------------------------------------------------------


@fault("K1", "critical-coins")
class BoundaryOneUlpLow(Sampler):
    def hits(self, coin, acc, mass):
        return mass > 0 and coin < down(acc)


@fault("K1", "critical-coins")
class BonusBoundaryOneUlpLow(Sampler):
    def draw(self, residual, coin):
        return super().draw(residual, up(coin) if coin < 1 else coin)


@fault("K1", "critical-coins")
class InclusiveForTheFirstChild(Sampler):
    def test(self, walk, path, kids, p):
        if kids and walk.accept[path[-1]] == p[walk.tokens[kids[0]]] > 0:
            return kids[0], []
        return super().test(walk, path, kids, p)


@fault("K1", "critical-coins")
class InclusiveFromDepthTwo(Sampler):
    def coin(self, walk, path, kid):
        coin = super().coin(walk, path, kid)
        return max(np.float32(0), down(coin)) if len(path) >= 3 else coin


@fault("K1", "positive-mass")
class ZeroMassOfTokenZeroAccepted(Sampler):
    def test(self, walk, path, kids, p):
        if kids and walk.tokens[kids[0]] == 0 and walk.accept[path[-1]] == 0:
            return kids[0], []
        return super().test(walk, path, kids, p)


@fault("K1", "positive-mass")
class CoinOfOneIsNoToken(Sampler):
    """A coin of exactly 1 leaves nothing above it: the search runs off the end."""

    def draw(self, residual, coin):
        return residual.size if coin == 1 else super().draw(residual, coin)


# --- K2 -----------------------------------------------------------------------------------------------


@fault("K2", "critical-coins")
class OneBucketOffByOneInTenThousand(Sampler):
    def test(self, walk, path, kids, p):
        moved = p.copy()
        moved[1 % p.size] += np.float32(1e-4) * (p[1 % p.size] > 0)
        return super().test(walk, path, kids, moved)


@fault("K2", "critical-coins")
class FirstChildOffByOneInAMillion(Sampler):
    def test(self, walk, path, kids, p):
        moved = p.copy()
        moved[[walk.tokens[kid] for kid in kids[:1]]] *= np.float32(1 + 1e-6)
        return super().test(walk, path, kids, moved)


@fault("K2", "outcome-law", "critical-coins")
class LaterChildrenOnTheirOwnMass(Sampler):
    """Each child is tested on its own mass with the one coin: a later one is accepted too seldom."""

    def test(self, walk, path, kids, p):
        rejected = []
        for kid in kids:
            token = walk.tokens[kid]
            if p[token] > walk.accept[path[-1]]:
                return kid, rejected
            rejected.append(token)
        return None, rejected


@fault("K2", "outcome-law")
class SecondChildAgainstWhatIsLeft(Sampler):
    """Renormalised without the first child, though the coin was not drawn anew."""

    def test(self, walk, path, kids, p):
        rejected, left = [], np.float32(1)
        for kid in kids:
            token = walk.tokens[kid]
            if p[token] > 0 and walk.accept[path[-1]] < p[token] / max(left, np.float32(1e-9)):
                return kid, rejected
            left -= p[token]
            rejected.append(token)
        return None, rejected


# --- K3 -----------------------------------------------------------------------------------------------


@fault("K3", "batch-invariance", "oracle-agreement")
class TemperatureIgnoredBehindTheFirstRequest(Sampler):
    def temperature(self, walk):
        return 1.0 if walk.index and walk.temperature else walk.temperature


@fault("K3", "batch-invariance")
class OneTemperatureWhenTwoDiffer(Sampler):
    def temperature(self, walk):
        return max(walk.batch.temperatures)


@fault("K3", "critical-coins-logits")
class TemperatureInBfloat16(Sampler):
    def temperature(self, walk):
        return rounded_to_bfloat16(walk.temperature)


@fault("K3", "critical-coins-logits")
class TemperatureLostBelowTheRoot(Sampler):
    def law(self, walk, node):
        kept = walk.temperature
        if node and kept:
            walk.temperature = 1.0
        try:
            return super().law(walk, node)
        finally:
            walk.temperature = kept


@fault("K3", "critical-coins-logits")
class SoftmaxInBfloat16(Sampler):
    def softmax(self, row, temperature):
        p = super().softmax(row, temperature)
        return torch.from_numpy(p).bfloat16().float().numpy()


# --- K4 -----------------------------------------------------------------------------------------------


@fault("K4", "outcome-law")
class OnlyTheLastRejectedIsMasked(Sampler):
    def residual(self, walk, path, p, rejected):
        return super().residual(walk, path, p, rejected[-1:])


@fault("K4", "outcome-law")
class OnlyTheFirstRejectedIsMasked(Sampler):
    def residual(self, walk, path, p, rejected):
        return super().residual(walk, path, p, rejected[:1])


@fault("K4", "outcome-law")
class RejectedAtTheParentStayMasked(Sampler):
    def test(self, walk, path, kids, p):
        accepted, rejected = super().test(walk, path, kids, p)
        self.above = [] if len(path) == 1 else self.here
        self.here = rejected
        return accepted, rejected

    def residual(self, walk, path, p, rejected):
        residual = super().residual(walk, path, p, [*rejected, *self.above])
        return residual if residual.any() else super().residual(walk, path, p, rejected)


@fault("K4", "outcome-law")
class LeavesDrawFromTheRoot(Sampler):
    def residual(self, walk, path, p, rejected):
        if len(path) > 1 and not walk.children[path[-1]]:
            p = self.law(walk, 0)[1]
        return super().residual(walk, path, p, rejected)


# --- K5 -----------------------------------------------------------------------------------------------


@fault("K5", "outcome-law")
class CoinReusedTwoLevelsDown(Sampler):
    def coin(self, walk, path, kid):
        return walk.accept[path[len(path) - 3 if len(path) >= 3 else -1]]


@fault("K5", "outcome-law")
class BonusCoinIsTheRootsBelowTheRoot(Sampler):
    def final_coin(self, walk, path):
        return walk.accept[0] if len(path) > 1 else walk.final


class FirstRequestsCoins(Sampler):
    def run(self, batch, rows, temperatures, coins, cap):
        self.first = coins.accept[0].numpy(), coins.final[0].numpy()[()]
        return super().run(batch, rows, temperatures, coins, cap)


@fault("K5", "batch-invariance")
class CoinsOfRequestZero(FirstRequestsCoins):
    def coin(self, walk, path, kid):
        return self.first[0][path[-1]]


@fault("K5", "batch-invariance", "oracle-agreement")
class FinalCoinOfRequestZero(FirstRequestsCoins):
    def final_coin(self, walk, path):
        return self.first[1]


# --- K6 -----------------------------------------------------------------------------------------------


@fault("K6", "critical-coins", "accepted-length")
class FirstChildOnlyFromDepthOne(Sampler):
    def kids(self, walk, path):
        kids = super().kids(walk, path)
        return kids if len(path) == 1 else kids[:1]


@fault("K6", "critical-coins", "accepted-length")
class ChildrenOfTokenZeroLost(Sampler):
    def kids(self, walk, path):
        return [] if len(path) > 1 and walk.tokens[path[-1]] == 0 else super().kids(walk, path)


@fault("K6", "critical-coins", "accepted-length")
class LastOfFourSiblingsLost(Sampler):
    def kids(self, walk, path):
        return super().kids(walk, path)[:3]


@fault("K6", "critical-coins")
class SiblingsInOrderOfTokens(Sampler):
    def kids(self, walk, path):
        return sorted(super().kids(walk, path), key=lambda kid: walk.tokens[kid])


# --- K7 -----------------------------------------------------------------------------------------------


@fault("K7", "oracle-agreement", "batch-invariance")
class RowsShiftedBehindTheFirstRequest(Sampler):
    def row(self, walk, node):
        return walk.rows[max(0, node - 1) if walk.index else node]


@fault("K7", "outcome-law")
class RowOfTheFirstSibling(Sampler):
    def row(self, walk, node):
        family = next((kids for kids in walk.children if node in kids), [node])
        return walk.rows[family[0]]


@fault("K7", "outcome-law")
class RowByDepth(Sampler):
    """A chain hides it: there, node and depth are one number."""

    def row(self, walk, node):
        return walk.rows[walk.depths[node]]


# --- K8 -----------------------------------------------------------------------------------------------


@fault("K8", "critical-coins")
class ChildrenInTheTailOfTheVocabularyLost(Sampler):
    """A whole number of four tokens is looked at, when children are tested."""

    def test(self, walk, path, kids, p):
        whole = max(1, p.size // 4 * 4)
        return super().test(walk, path, kids, np.where(np.arange(p.size) < whole, p, np.float32(0)))


@fault("K8", "batch-invariance")
class CapOfTheShallowestTree(Sampler):
    def run(self, batch, rows, temperatures, coins, cap):
        depths = batch.positions - batch.prefix_lens[:, None]
        return super().run(batch, rows, temperatures, coins, min(cap, 1 + int(depths.amax(dim=1).min())))


@fault("K8", "batch-invariance")
class PaddedRequestsStopAtTheRoot(Sampler):
    def kids(self, walk, path):
        slots = len(walk.tokens)
        nodes = 1 + sum(len(kids) for kids in walk.children)
        return [] if slots >= nodes + 3 else super().kids(walk, path)


# --- K9 -----------------------------------------------------------------------------------------------


@fault("K9", "oracle-agreement", "outcome-law")
class BonusWrittenAtTheRoot(Sampler):
    def commit(self, walk, path, bonus):
        flat, count, emitted = super().commit(walk, path, bonus)
        return flat, count, [bonus, *emitted[:-1]] if len(path) > 2 else emitted


@fault("K9", "oracle-agreement", "critical-coins")
class PathBackwards(Sampler):
    def commit(self, walk, path, bonus):
        flat, count, emitted = super().commit(walk, path, bonus)
        return [flat[0], *flat[:0:-1]], count, emitted


@fault("K9", "depth-cap")
class OneDraftTooManyAtTheCap(Sampler):
    """The cap counts drafts, not slots; what does not fit is cut off when it is written."""

    def kids(self, walk, path):
        return walk.children[path[-1]] if len(path) <= walk.cap else []

    def commit(self, walk, path, bonus):
        flat, count, emitted = super().commit(walk, path, bonus)
        return flat, min(count, walk.cap - 1), emitted


# --- K10 ----------------------------------------------------------------------------------------------


@fault("K10", "purity")
class FinalCoinsOfTheLastCall(Sampler):
    """From the second call on; where the batch has another size, the buffer is laid out anew."""

    kept = None

    def run(self, batch, rows, temperatures, coins, cap):
        final, stale = coins.final.clone(), self.kept
        self.kept = final
        if stale is not None and stale.shape == final.shape:
            coins = type(coins)(coins.accept, stale)
        return super().run(batch, rows, temperatures, coins, cap)


@fault("K10", "purity")
class OutputsNotCleared(Sampler):
    kept = None

    def run(self, batch, rows, temperatures, coins, cap):
        output = super().run(batch, rows, temperatures, coins, cap)
        if self.kept is not None and self.kept.shape == output.accept_index.shape:
            behind = output.accept_index == -1
            output.accept_index[behind] = self.kept[behind]
        self.kept = output.accept_index.clone()
        return output


@fault("K10", "purity")
class CoinsWrittenTo(Sampler):
    def run(self, batch, rows, temperatures, coins, cap):
        output = super().run(batch, rows, temperatures, coins, cap)
        coins.accept[:, 0] = 0
        return output


# --- K11 ----------------------------------------------------------------------------------------------


@fault("K11", "bad-rows")
class NanLookedForAmongTheFirstFour(Sampler):
    def law(self, walk, node):
        status, p = super().law(walk, node)
        row = self.row(walk, node)
        if status is RowStatus.NAN and row_status(row[:4]) is not RowStatus.NAN:
            clean = np.nan_to_num(row, nan=-np.inf, posinf=np.inf, neginf=-np.inf)
            if row_status(clean) is RowStatus.OK:
                return RowStatus.OK, self.softmax(clean, self.temperature(walk) or 1.0)
        return status, p


@fault("K11", "bad-rows")
class InfinityWins(Sampler):
    def law(self, walk, node):
        row = self.row(walk, node)
        if row_status(row) is RowStatus.POS_INF:
            return RowStatus.OK, np.eye(1, row.size, int(row.argmax()), dtype=np.float32)[0]
        return super().law(walk, node)


@fault("K11", "bad-rows")
class EmptyRowEmitsTokenZero(Sampler):
    def law(self, walk, node):
        row = self.row(walk, node)
        if row_status(row) is RowStatus.EMPTY:
            return RowStatus.OK, np.eye(1, row.size, dtype=np.float32)[0]
        return super().law(walk, node)


@fault("K11", "greedy")
class LaterBlockWinsTies(Sampler):
    """A maximum for each four tokens, and the last of the equal ones is taken."""

    def softmax(self, row, temperature):
        if temperature > 0:
            return super().softmax(row, temperature)
        block = int(np.flatnonzero(row == row.max())[-1]) // 4
        return np.eye(
            1, row.size, 4 * block + int(row[4 * block : 4 * block + 4].argmax()), dtype=np.float32
        )[0]


@fault("K11", "critical-coins-logits", "oracle-agreement")
class SmallTemperaturesAreGreedy(Sampler):
    def temperature(self, walk):
        return 0.0 if walk.temperature < 0.02 else walk.temperature


@fault("K11", "critical-coins-logits")
class ReciprocalOfTheTemperatureOverflows(Sampler):
    """B66: multiplies by 1 / T in float16's range."""

    def softmax(self, row, temperature):
        if temperature == 0 or 1 / temperature < 65504:
            return target_probs(row, temperature)
        return np.eye(1, row.size, dtype=np.float32)[0]


# --- K12 ----------------------------------------------------------------------------------------------


@fault("K12", "oracle-agreement-wide")
class TokenIdsIn8Bits(Sampler):
    def commit(self, walk, path, bonus):
        return super().commit(walk, path, bonus & 0xFF)


@fault("K12", "oracle-agreement-wide")
class FlatIndicesIn5Bits(Sampler):
    fewest_nodes = 33  # below, five bits are enough

    def commit(self, walk, path, bonus):
        flat, count, emitted = super().commit(walk, path, bonus)
        return [node & 31 for node in flat], count, emitted
