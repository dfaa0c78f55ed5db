"""Deliberately wrong filters, one fault each, and odd but right ones: the filter laws are tested on both.

:class:`FilterSampler` is right: DESIGN's walk in NumPy, every step a method that a fault overrides. It shares
no code with the backends.
"""

import numpy as np
import torch
from registry import planting
from remembered import row_status, target_probs

from treeconv.backends.base import BackendTraits
from treeconv.filters import Cuts
from treeconv.tree import RowStatus, VerifyOutput


class FilterSampler:
    """A right verifier with filters: sort, cut, divide, walk."""

    name = "right"
    traits = BackendTraits(devices=("cpu",), takes_filters=True)

    def verify(self, batch, logits, temperature, coins, depth_cap, filters=None):
        self.temperatures = temperature.tolist()
        return self.run(batch, logits.float().numpy(), coins, depth_cap, filters)

    def verify_probs(self, batch, target_probs, coins, depth_cap, filters=None):
        self.temperatures = None
        return self.run(batch, target_probs.numpy(), coins, depth_cap, filters)

    def run(self, batch, rows, coins, cap, filters):
        size, slots, _ = rows.shape
        self.filters = [Cuts()] * size if filters is None else self.read(filters)
        accept_index = np.full((size, cap), -1, np.int32)
        counts, statuses = np.zeros(size, np.int32), np.zeros(size, np.int32)
        predicts = np.full(size * slots, -1, np.int32)
        for request in range(size):
            path, tokens, status = self.walk(request, batch, rows[request], coins, cap)
            statuses[request] = status
            if status is RowStatus.OK:
                flat = [request * slots + node for node in path]
                accept_index[request, : len(path)] = flat
                counts[request] = len(path) - 1
                predicts[flat] = tokens
        return VerifyOutput(*map(torch.from_numpy, (accept_index, counts, predicts, statuses)))

    def read(self, filters):
        return filters.cuts()

    def walk(self, request, batch, rows, coins, cap):
        tokens = batch.candidates[request].tolist()
        first = batch.retrieve_next_token[request].tolist()
        sibling = batch.retrieve_next_sibling[request].tolist()
        accept = coins.accept[request].numpy()
        path = [0]
        while True:
            node = path[-1]
            status = row_status(rows[node], is_probs=self.temperatures is None)
            if status is not RowStatus.OK:
                return [], [], status
            tested, drawn = self.laws(request, rows[node])
            residual, acc, accepted, last = drawn.copy(), np.float32(0), -1, -1
            child = first[node] if len(path) < cap else -1
            while child != -1:
                mass = tested[tokens[child]]
                acc += mass
                last = child if mass > 0 else last
                if mass > 0 and accept[node] < acc:
                    accepted = child
                    break
                residual[tokens[child]] = 0
                child = sibling[child]
            if accepted == -1 and not residual.any():
                accepted = last
            if accepted == -1:
                bonus = self.bonus(residual, float(coins.final[request]))
                return path, [*(tokens[n] for n in path[1:]), bonus], status
            path.append(accepted)

    def bonus(self, residual, coin):
        sums = np.cumsum(residual, dtype=np.float64)
        above = np.flatnonzero((sums > coin * sums[-1]) & (residual > 0))
        return int(above[0]) if above.size else int(np.flatnonzero(residual)[-1])

    def softmax(self, request, row):
        return row if self.temperatures is None else target_probs(row, self.temperatures[request])

    def laws(self, request, row):
        """The law that children are tested against, and the one that the bonus is drawn from."""
        cuts = self.filters[request]
        law = self.softmax(request, row)
        if cuts.are_on(law.size):
            law = self.filtered(law, cuts)
        return law, law

    def filtered(self, law, cuts):
        order = self.order(law)
        length = min(self.by_k(law[order], cuts), self.by_p(law[order], cuts), self.by_min(law[order], cuts))
        return self.divided(law, order[: max(1, length)])

    def order(self, law):
        return np.lexsort((np.arange(law.size), -law))

    def by_k(self, falling, cuts):
        return cuts.top_k or falling.size

    def measured(self, falling, cuts):
        return falling[: self.by_k(falling, cuts)] if cuts.order == "sequential" else falling

    def by_p(self, falling, cuts):
        if cuts.top_p == 1:
            return falling.size
        before = np.concatenate([[0], np.cumsum(falling, dtype=np.float64)[:-1]])
        total = self.measured(falling, cuts).sum(dtype=np.float64)
        return int((before < cuts.top_p * total).sum())

    def by_min(self, falling, cuts):
        return int((falling >= float(cuts.min_p) * float(falling[0])).sum())

    def divided(self, law, kept):
        left = np.zeros_like(law)
        left[kept] = law[kept] / law[kept].sum(dtype=np.float64)
        return left


# --- odd but right ------------------------------------------------------------------------------------


class Renormalising(FilterSampler):
    """SGLang's way: one float32 renormalisation after each cut, each cut from its own sort."""

    name = "renormalising"

    def filtered(self, law, cuts):
        measured = law
        k = cuts.top_k or law.size
        if cuts.order == "sequential" and k < law.size:
            measured = self.divided(law, self.order(law)[:k])
        order = self.order(measured)
        kept = order[: min(k, self.by_p(measured[order] / measured.sum(), cuts))]
        law = self.divided(law, kept)
        law /= law.sum()
        if cuts.min_p > 0:
            law = np.where(law >= np.float32(cuts.min_p) * law.max(), law, np.float32(0))
        return law / law.sum()


class Complement(FilterSampler):
    """HF's way: sort ascending, and remove the tail whose mass stays at 1 - top_p or below."""

    name = "complement"

    def by_p(self, falling, cuts):
        if cuts.top_p == 1:
            return falling.size
        law = self.measured(falling, cuts)
        tail = np.cumsum((law / law.sum())[::-1], dtype=np.float32)[::-1]
        return max(1, int((tail > np.float32(1) - np.float32(cuts.top_p)).sum()))


class Pivot(FilterSampler):
    """FlashInfer's way, without a sort: a token's own cut is the mass and the number of those before it."""

    name = "pivot"

    def filtered(self, law, cuts):
        is_before = (law[None] > law[:, None]) | (
            (law[None] == law[:, None]) & (np.arange(law.size)[None] < np.arange(law.size)[:, None])
        )
        rank = is_before.sum(axis=1)
        mass = (is_before * law[None].astype(np.float64)).sum(axis=1)
        top = rank < (cuts.top_k or law.size)
        total = (law[top] if cuts.order == "sequential" else law).sum(dtype=np.float64)
        keep = top & (law >= np.float32(cuts.min_p) * law.max())
        if cuts.top_p < 1:
            keep &= mass / total < cuts.top_p
        return self.divided(law, np.flatnonzero(keep))


RIGHT = [FilterSampler, Renormalising, Complement, Pivot]


# --- wrong --------------------------------------------------------------------------------------------

FAULTS, fault = planting()


@fault("K3", "filters")  # from logits too, but not in every 200 cases
class MinPForTheBonusOnly(FilterSampler):  # B18, vllm#42744
    def laws(self, request, row):
        cuts = self.filters[request]
        without = Cuts(cuts.top_k, cuts.top_p, 0.0, cuts.order)
        drawn = super().laws(request, row)[1]
        self.filters[request] = without
        tested = super().laws(request, row)[0]
        self.filters[request] = cuts
        return tested, drawn


@fault("K3", "filters", "filters-logits", "filters-wide")
class NoFiltersForChildren(FilterSampler):
    def laws(self, request, row):
        return self.softmax(request, row), super().laws(request, row)[1]


@fault("K3", "critical-cuts", "filters", "filters-wide")
class NoFiltersForTheBonus(FilterSampler):
    def laws(self, request, row):
        return super().laws(request, row)[0], self.softmax(request, row)


@fault("K3", "critical-cuts", "filters", "filters-logits")
class CrossingTokenDropped(FilterSampler):  # B20, flashinfer#2202
    def by_p(self, falling, cuts):
        if cuts.top_p == 1:
            return falling.size
        total = self.measured(falling, cuts).sum(dtype=np.float64)
        return int((np.cumsum(falling, dtype=np.float64) <= cuts.top_p * total).sum())


@fault("K3", "filters-logits")
class KeptMassOfARoundedExponent(FilterSampler):  # our own kernel's, which 2.6 million cases found
    """A mass relative to ``exp2(x / T)`` as rounded: right for a row's sum, in which that cancels."""

    def softmax(self, request, row):
        self.off = np.float64(1)
        if self.temperatures is not None and self.temperatures[request] > 0:
            with np.errstate(over="ignore", invalid="ignore"):
                exact = np.float64(row.max()) * np.float64(
                    np.float32(1.4426950408889634 / self.temperatures[request])
                )
                if abs(exact) < 1024:
                    self.off = np.exp2(np.float64(np.float32(exact)) - exact)
        return super().softmax(request, row)

    def by_p(self, falling, cuts):
        if cuts.top_p < 1 and falling[0] * self.off >= cuts.top_p * falling.sum(dtype=np.float64):
            return 1
        return super().by_p(falling, cuts)

    def divided(self, law, kept):
        left = super().divided(law, kept)
        return left / np.float32(self.off) if len(kept) == 1 else left


@fault("K3", "critical-cuts")
class OneMoreWhereTheSumIsExact(FilterSampler):  # `before <= p`: what SGLang's torch sampler keeps
    def by_p(self, falling, cuts):
        if cuts.top_p == 1:
            return falling.size
        before = np.concatenate([[0], np.cumsum(falling, dtype=np.float64)[:-1]])
        return int((before <= cuts.top_p * self.measured(falling, cuts).sum(dtype=np.float64)).sum())


@fault("K3", "critical-cuts", "filters")
class TiesAllKept(FilterSampler):  # B19, flashinfer PR#3774
    def by_k(self, falling, cuts):
        k = min(cuts.top_k or falling.size, falling.size)
        return int((falling >= falling[k - 1]).sum())


@fault("K3", "critical-cuts", "filters-logits")
class HighestIdWinsTies(FilterSampler):
    def order(self, law):
        return np.lexsort((-np.arange(law.size), -law))


@fault("K3", "critical-cuts", "filter-parity")
class OneTooFewAtTopK(FilterSampler):
    def by_k(self, falling, cuts):
        return falling.size if cuts.top_k is None else max(1, cuts.top_k - 1)


@fault("K3", "critical-cuts")
class JointInsteadOfSequential(FilterSampler):  # B17; also: top-p before top-k
    def measured(self, falling, cuts):
        return super().measured(falling, Cuts(cuts.top_k, order="joint"))


@fault("K3", "critical-cuts")
class SequentialInsteadOfJoint(FilterSampler):  # B17, sglang PR#36173
    def measured(self, falling, cuts):
        return falling[: self.by_k(falling, cuts)]


@fault("K3", "critical-cuts")
class MinPBeforeTopP(FilterSampler):
    def measured(self, falling, cuts):
        return super().measured(falling, cuts)[: self.by_min(falling, cuts)]


@fault("K3", "critical-cuts")
class MinPIsStrict(FilterSampler):
    def by_min(self, falling, cuts):
        return int((falling > float(cuts.min_p) * float(falling[0])).sum())


@fault("K3", "critical-cuts")
class MinPOfOne(FilterSampler):  # a floor on the mass itself, not on its share of the largest
    def by_min(self, falling, cuts):
        return int((falling >= cuts.min_p * falling.sum()).sum())


@fault("K3", "filters")
class NotRenormalised(FilterSampler):
    def divided(self, law, kept):
        left = np.zeros_like(law)
        left[kept] = law[kept]
        return left


@fault("K10", "filters-purity")
class RenormalisedInPlace(FilterSampler):  # B23, sglang PR#15648
    def laws(self, request, row):
        law, _ = super().laws(request, row)
        if self.filters[request].are_on(row.size) and self.temperatures is None:
            row[:] = law
        return law, law


@fault("K10", "filters-purity")
class LogitsMaskedInPlace(FilterSampler):  # what masking with -inf in a server's own buffer does
    def run(self, batch, rows, coins, cap, filters):
        output = super().run(batch, rows, coins, cap, filters)
        if filters is not None and self.temperatures is not None:
            for request, cuts in enumerate(filters.cuts()):
                if cuts.top_k is not None and cuts.top_k < rows.shape[2]:
                    rows[request, 0, self.order(rows[request, 0])[cuts.top_k :]] = -np.inf
        return output

    def verify(self, batch, logits, temperature, coins, depth_cap, filters=None):
        self.temperatures = temperature.tolist()
        rows = logits.float().numpy()
        output = self.run(batch, rows, coins, depth_cap, filters)
        logits.copy_(torch.from_numpy(rows))
        return output


@fault("K8", "critical-cuts", "filters-batch")
class FilterOfRequestZero(FilterSampler):
    def read(self, filters):
        return filters.cuts()[:1] * len(filters.top_k)


@fault("K3", "filters-logits")
class FiltersBeforeTemperature(FilterSampler):
    def laws(self, request, row):
        cuts = self.filters[request]
        if self.temperatures is None or not cuts.are_on(row.size):
            return super().laws(request, row)
        kept = self.filtered(target_probs(row, 1.0), cuts) > 0
        law = target_probs(np.where(kept, row, -np.inf), self.temperatures[request])
        return law, law


@fault("K3", "filters-logits")
class FiltersIgnored(FilterSampler):
    def read(self, filters):
        return [Cuts()] * len(filters.top_k)


@fault("K8", "filters-batch")
class PaddingShiftsFilters(FilterSampler):  # values looked up by slot, not by request
    def run(self, batch, rows, coins, cap, filters):
        self.slots = rows.shape[1]
        return super().run(batch, rows, coins, cap, filters)

    def read(self, filters):
        cuts = filters.cuts()
        return [cuts[(request * self.slots) % len(cuts)] for request in range(len(cuts))]


@fault("K3", "filters-wide")
class TopKCappedAt1024(FilterSampler):
    def by_k(self, falling, cuts):
        return falling.size if cuts.top_k is None else min(cuts.top_k, 1024)


@fault("K3", "filters-wide")
class TopPAmongThe256Likeliest(FilterSampler):
    longest = 256

    def by_p(self, falling, cuts):
        kept = super().by_p(falling, cuts)
        return kept if cuts.top_p == 1 else min(kept, self.longest)


@fault("K3", "filters-wide")
class TopPAmongThe1024Likeliest(TopPAmongThe256Likeliest):
    longest = 1024


@fault("K3", "filters-wide")
class MinPAmongThe256Likeliest(FilterSampler):
    def by_min(self, falling, cuts):
        kept = super().by_min(falling, cuts)
        return kept if cuts.min_p == 0 else min(kept, 256)
