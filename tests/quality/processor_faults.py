"""Deliberately wrong processors, one fault each, and odd but right ones: the laws are tested on both.

:class:`ProcessorSampler` is right: each row is processed where it is visited, every step a method that a
fault overrides. It computes in float64 and shares no code with the backends.
"""

from functools import partial

import numpy as np
import torch
from filter_faults import FilterSampler
from registry import planting

from treeconv.backends.base import BackendTraits
from treeconv.processors import PENALTIES, PROCESSORS
from treeconv.sampling import target_probs


class _Rows:
    """The rows of one request, each processed when it is looked at."""

    def __init__(self, sampler, request, rows):
        self.sampler, self.request, self.rows = sampler, request, rows

    def __getitem__(self, node):
        self.sampler.node = node
        return self.sampler.processed(self.request, node, self.rows[node])


class Processing:
    """What a right verifier does to a row before its softmax: count, divide, subtract, add, mask."""

    given = None

    def take(self, batch, logits, processors):
        """What a call was handed, before its walks."""
        self.batch, self.given = batch, processors
        self.parents = {}  # request -> node -> its parent
        self.raw = logits.float().numpy()

    def walk(self, request, batch, rows, *rest):
        return super().walk(request, batch, _Rows(self, request, rows), *rest)

    def parents_of(self, request):
        if request in self.parents:
            return self.parents[request]
        first, sibling = (
            pointers[request].tolist()
            for pointers in (self.batch.retrieve_next_token, self.batch.retrieve_next_sibling)
        )
        parents = {0: -1}
        for node in range(len(first)):
            child = first[node]
            while child != -1:
                parents[child] = node
                child = sibling[child]
        self.parents[request] = parents
        return parents

    def processed(self, request, node, row):
        if self.given is None:
            return row
        with np.errstate(all="ignore"):
            x = row.astype(np.float64)
            if self.given.penalties is not None:
                x = self.penalised(request, node, x)
            if self.given.logit_bias is not None:
                x = x + self.bias(request)
            if self.given.token_bitmask is not None:
                x = self.masked(x, self.allowed(request, node, x.size))
            return x.astype(np.float32)

    # what was seen

    def path(self, request, node):
        nodes, parents = [], self.parents_of(request)
        while node != -1:
            nodes.append(node)
            node = parents.get(node, -1)
        return nodes[::-1]

    def tokens(self, request, nodes):
        tokens = self.batch.candidates[request].tolist()
        return [tokens[node] for node in nodes]

    def committed(self, request):
        return [token for token in self.given.penalties.committed_tokens[request].tolist() if token >= 0]

    def seen(self, request, node):
        return self.committed(request) + self.tokens(request, self.path(request, node))

    def counts(self, request, node, size):
        counts = np.zeros(size)
        for token in self.seen(request, node):
            if token < size:
                counts[token] += 1
        return counts

    # the penalties

    def amounts(self, request):
        return [getattr(self.given.penalties, name)[request].item() for name in PENALTIES]

    def penalised(self, request, node, x):
        repetition, frequency, presence = self.amounts(request)
        counts = self.counts(request, node, x.size)
        x = np.where(counts > 0, self.repeated(x, repetition), x)
        return self.counted(x, counts, frequency, presence)

    def repeated(self, x, r):
        return np.where(x > 0, x / r, x * r)

    def counted(self, x, counts, frequency, presence):
        return x - frequency * counts - presence * (counts > 0)

    # bias and bitmask

    def bias(self, request):
        return self.given.logit_bias[request].numpy()

    def words(self, request, node):
        return self.given.token_bitmask[request, node].numpy()

    def allowed(self, request, node, size):
        words, tokens = self.words(request, node), np.arange(size)
        return (words[tokens // 32] >> (tokens % 32)) & 1 == 1

    def masked(self, x, allowed):
        return np.where(allowed, x, -np.inf)


class ProcessorSampler(Processing, FilterSampler):
    """A right verifier with processors and filters."""

    name = "right-processors"
    traits = BackendTraits(devices=("cpu",), takes_filters=True, takes_processors=PROCESSORS)

    def verify(self, batch, logits, temperature, coins, depth_cap, filters=None, processors=None):
        self.temperatures = temperature.tolist()
        self.take(batch, logits, processors)
        return self.run(batch, self.raw, coins, depth_cap, filters)

    def verify_probs(self, batch, target_probs, coins, depth_cap, filters=None):
        self.given = None  # probabilities are of rows already processed
        return super().verify_probs(batch, target_probs, coins, depth_cap, filters)


# --- odd but right ------------------------------------------------------------------------------------


class Reciprocal(ProcessorSampler):
    """Float32 throughout, dividing by a product with the reciprocal."""

    name = "reciprocal"

    def repeated(self, x, r):
        x, r = x.astype(np.float32), np.float32(r)
        return np.where(x > 0, x * (np.float32(1) / r), x * r)

    def counted(self, x, counts, frequency, presence):
        x = x.astype(np.float32) - np.float32(frequency) * counts.astype(np.float32)
        return x - np.float32(presence) * (counts > 0).astype(np.float32)


class AddedUpFirst(ProcessorSampler):
    """SGLang's way: penalties and bias are added up in a float32 buffer, which is added to the logits."""

    name = "added-up-first"

    def processed(self, request, node, row):
        if self.given is None or self.given.penalties is None:
            return super().processed(request, node, row)
        with np.errstate(all="ignore"):
            repetition, frequency, presence = map(np.float32, self.amounts(request))
            counts = self.counts(request, node, row.size).astype(np.float32)
            buffer = -frequency * counts - presence * (counts > 0).astype(np.float32)
            if self.given.logit_bias is not None:
                buffer = buffer + self.bias(request)
            x = np.where(counts > 0, self.repeated(row, repetition), row) + buffer
            if self.given.token_bitmask is not None:
                x = self.masked(x, self.allowed(request, node, x.size))
            return x.astype(np.float32)


RIGHT = [ProcessorSampler, Reciprocal, AddedUpFirst]


# --- wrong --------------------------------------------------------------------------------------------

FAULTS, _fault = planting()
fault = partial(_fault, "K13")


@fault("penalties", "penalties-wide")
class FlatOrderHistory(ProcessorSampler):  # every slot up to the node's, siblings included
    def path(self, request, node):
        return list(range(node + 1))


@fault("penalties")
class RootOmitted(ProcessorSampler):  # B79, lucebox PR#374
    def path(self, request, node):
        return super().path(request, node)[1:]


@fault("penalties")
class RootCountedTwiceBelowIt(ProcessorSampler):  # B78, vllm PR#33251
    def path(self, request, node):
        return [0] * (node > 0) + super().path(request, node)


@fault("penalties", "commit-parity")
class RootsHistoryForAll(ProcessorSampler):
    def path(self, request, node):
        return [0]


@fault("penalties", "commit-parity")
class NodeItselfOmitted(ProcessorSampler):
    def path(self, request, node):
        return super().path(request, node)[:-1] or [0]


@fault("penalties")
class CommittedIgnored(ProcessorSampler):
    def committed(self, request):
        return []


@fault("penalties")
class StopsAtMinus1(ProcessorSampler):  # the text ends at its first padding, which may be anywhere
    def committed(self, request):
        text = self.given.penalties.committed_tokens[request].tolist()
        return text[: text.index(-1)] if -1 in text else text


@fault("penalties")
class OutsideIdsWrap(ProcessorSampler):  # the placeholder of an image counts for some token
    def counts(self, request, node, size):
        tokens = [token % size for token in self.seen(request, node)]
        return np.bincount(tokens, minlength=size).astype(float)


@fault("penalties", "penalties-batch")
class CommittedOfRequestZero(ProcessorSampler):
    def committed(self, request):
        return super().committed(0)


@fault("penalties-batch", "penalties")
class PenaltiesOfRequestZero(ProcessorSampler):
    def amounts(self, request):
        return super().amounts(0)


@fault("penalties")
class FrequencyCountedOnce(ProcessorSampler):
    def counted(self, x, counts, frequency, presence):
        return x - (frequency + presence) * (counts > 0)


@fault("penalties")
class PresenceForEachOccurrence(ProcessorSampler):
    def counted(self, x, counts, frequency, presence):
        return x - (frequency + presence) * counts


@fault("penalties")
class NegativeLogitsDivided(ProcessorSampler):
    def repeated(self, x, r):
        return x / r


@fault("penalties")
class RepetitionLast(ProcessorSampler):
    def penalised(self, request, node, x):
        repetition, frequency, presence = self.amounts(request)
        counts = self.counts(request, node, x.size)
        x = self.counted(x, counts, frequency, presence)
        return np.where(counts > 0, self.repeated(x, repetition), x)


@fault("penalties-wide")
class BiasBeforePenalties(ProcessorSampler):  # vLLM's order, which is not the declared one
    def penalised(self, request, node, x):
        bias = 0.0 if self.given.logit_bias is None else self.bias(request)
        x = super().penalised(request, node, x + bias)
        return np.where(np.isfinite(bias), x - np.where(np.isfinite(bias), bias, 0), -np.inf)


class _Split(ProcessorSampler):
    """Tests drafts against one processed law, and draws the bonus from another."""

    def without(self):
        return self.given

    def laws(self, request, row):
        given = self.given
        self.given = self.without() if given else None
        other = super().laws(request, self.processed(request, self.node, self.raw[request, self.node]))[1]
        self.given = given
        return other, super().laws(request, row)[1]


@fault("penalties")
class PenaltiesForTheBonusOnly(_Split):
    def without(self):
        return type(self.given)(self.given.logit_bias, self.given.token_bitmask)


@fault("masks")
class BiasForTheBonusOnly(_Split):
    def without(self):
        return type(self.given)(None, self.given.token_bitmask, self.given.penalties)


@fault("masks")
class BitmaskForTheBonusOnly(_Split):
    def without(self):
        return type(self.given)(self.given.logit_bias, None, self.given.penalties)


@fault("penalties", "commit-parity")
class RawArgmaxAtZero(ProcessorSampler):  # B82, atlas PR#302
    def processed(self, request, node, row):
        return row if self.temperatures[request] == 0 and node == 0 else super().processed(request, node, row)


@fault("penalties")
class PenaltiesAfterTemperature(ProcessorSampler):
    def counted(self, x, counts, frequency, presence):
        scale = self.scale or 1.0
        return super().counted(x, counts, frequency * scale, presence * scale)

    def penalised(self, request, node, x):
        self.scale = self.temperatures[request]
        return super().penalised(request, node, x)


@fault("processors-filtered")
class FiltersBeforeProcessors(ProcessorSampler):
    def laws(self, request, row):
        cuts = self.filters[request]
        if not cuts.are_on(row.size):
            return super().laws(request, row)
        raw = np.nan_to_num(self.raw[request, self.node], nan=-np.inf, neginf=-np.inf)
        if raw.max() == -np.inf:
            return super().laws(request, row)
        kept = self.filtered(target_probs(raw, self.temperatures[request]), cuts) > 0
        left = np.where(kept, row, -np.inf)
        law = target_probs(left if left.max() > -np.inf else row, self.temperatures[request])
        return law, law


@fault("masks", "masks-wide")
class RootsMaskForAll(ProcessorSampler):
    def words(self, request, node):
        return super().words(request, 0)


@fault("masks")
class MaskOfTheParent(ProcessorSampler):  # off by one level
    def words(self, request, node):
        return super().words(request, max(0, self.parents_of(request)[node]))


@fault("masks")
class MaskAdvancedAcrossSiblings(ProcessorSampler):  # B76, TensorRT-LLM#18892: the slot before counts too
    def words(self, request, node):
        before = super().words(request, max(0, node - 1))
        return before & super().words(request, node) if node > 1 else super().words(request, node)


@fault("masks-batch", "masks")
class MaskRowsOfRequestZero(ProcessorSampler):  # row i instead of b * N + i
    def words(self, request, node):
        return super().words(0, node)


@fault("masks-batch", "masks")
class BiasOfRequestZero(ProcessorSampler):
    def bias(self, request):
        return super().bias(0)


@fault("masks-wide")
class LastWordIgnored(ProcessorSampler):  # what whole words do not cover is allowed
    def allowed(self, request, node, size):
        allowed = super().allowed(request, node, size)
        if size > 32:
            allowed[size // 32 * 32 :] = True
        return allowed


@fault("masks", "masks-wide")
class HighestBitFirst(ProcessorSampler):
    def allowed(self, request, node, size):
        words, tokens = self.words(request, node), np.arange(size)
        return (words[tokens // 32] >> (31 - tokens % 32)) & 1 == 1


@fault("masks")
class ForbiddenIsFinite(ProcessorSampler):  # -1e4 for -inf: some mass is left at a high temperature
    def masked(self, x, allowed):
        return np.where(allowed, x, -1e4)


@fault("masks")
class ForbiddenByAddition(ProcessorSampler):  # NaN - inf is NaN
    def masked(self, x, allowed):
        return x + np.where(allowed, 0, -np.inf)


@fault("masks-empty")
class UnmaskedWhereAllIsForbidden(ProcessorSampler):
    def masked(self, x, allowed):
        return super().masked(x, allowed) if allowed.any() else x


@fault("masks-empty")
class EmptyFallsBackWithPenalties(
    ProcessorSampler
):  # nothing is left of a penalised row: the raw one instead
    def processed(self, request, node, row):
        x = super().processed(request, node, row)
        if self.given is None or self.given.penalties is None or self.given.token_bitmask is None:
            return x
        return row if x.max() == -np.inf else x


@fault("masks-empty")
class NanBias(ProcessorSampler):  # nan_to_num: what the caller got wrong is covered up
    def bias(self, request):
        return np.nan_to_num(super().bias(request), nan=0.0, posinf=1e30, neginf=-np.inf)


@fault("masks-purity", "penalties-purity")
class InPlace(ProcessorSampler):
    def verify(self, batch, logits, temperature, coins, depth_cap, filters=None, processors=None):
        output = super().verify(batch, logits, temperature, coins, depth_cap, filters, processors)
        if processors is not None:
            row = self.processed(0, 0, self.raw[0, 0])
            logits[0, 0] = torch.from_numpy(row).to(logits.dtype)
        return output


@_fault("K10", "penalties-purity", "penalties")
class HistoryOfEarlierCalls(ProcessorSampler):  # a buffer that is not cleared
    memory = ()

    def verify(self, batch, logits, temperature, coins, depth_cap, filters=None, processors=None):
        output = super().verify(batch, logits, temperature, coins, depth_cap, filters, processors)
        if processors is not None and processors.penalties is not None:
            self.memory = self.committed(0)
        return output

    def seen(self, request, node):
        return [*self.memory, *super().seen(request, node)]


@fault("penalties-wide")
class LastSixteenCommittedOnly(ProcessorSampler):
    """A window over the text, as llama.cpp's ``repeat_last_n``."""

    def committed(self, request):
        return super().committed(request)[-16:]


@fault("penalties-wide")
class FirstSixtyFourCommittedOnly(ProcessorSampler):
    def committed(self, request):
        return super().committed(request)[:64]


@fault("penalties-wide")
class OccurrencesCountedToFifteen(ProcessorSampler):
    """Four bits a token."""

    def counts(self, request, node, size):
        return np.minimum(super().counts(request, node, size), 15)


@fault("penalties-wide")
class CountSaturatesAt127(ProcessorSampler):
    """A signed byte a token."""

    def counts(self, request, node, size):
        return np.minimum(super().counts(request, node, size), 127)


@fault("penalties-wide")
class CountWrapsAt256(ProcessorSampler):
    """A byte a token."""

    def counts(self, request, node, size):
        return super().counts(request, node, size) % 256
