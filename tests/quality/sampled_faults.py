"""Samplers that draw their own coins, as servers' do, and lose a setting; and right ones that lose none.

Coins in buckets are nowhere handed over: only the laws about drawn coins see what these do.
"""

from dataclasses import replace

import torch
from mixed_faults import MixedSampler
from registry import planting

from treeconv.filters import Filters
from treeconv.sampling import draw_coins
from treeconv.tree import Coins


class GeneratedWithAll(MixedSampler):
    """A right verifier with filters, processors and every rule, its coins from one generator."""

    name = "generated-with-all"
    traits = replace(MixedSampler.traits, coins="generator")

    def verify(self, batch, logits, temperature, drawn_from, *call, **more):
        return super().verify(batch, logits, temperature, self.drawn(batch, drawn_from), *call, **more)

    def verify_probs(self, batch, target_probs, drawn_from, *call, **more):
        return super().verify_probs(batch, target_probs, self.drawn(batch, drawn_from), *call, **more)

    def drawn(self, batch, generator):
        draws = torch.rand(batch.batch_size, batch.num_draft_tokens + 1, generator=generator)
        return Coins(draws[:, 1:].contiguous(), draws[:, 0].contiguous())


class SeededWithAll(GeneratedWithAll):
    """The same from each request's seed and position."""

    name = "seeded-with-all"
    traits = replace(MixedSampler.traits, coins="seeds")

    def drawn(self, batch, seeds):
        return draw_coins(seeds, batch.prefix_lens, batch.num_draft_tokens)


RIGHT = [GeneratedWithAll, SeededWithAll]


# --- wrong --------------------------------------------------------------------------------------------

FAULTS, fault = planting()


@fault("K3", "sampled-law-filters", "match-rule-sampled", "chain-rule-sampled")
class GeneratorWithoutFilters(GeneratedWithAll):
    def filtered(self, law, cuts):
        return law


@fault("K8", "sampled-law-filters", "match-rule-sampled")
class SeedsAndFiltersOfRequestZero(SeededWithAll):
    def verify(self, *call, filters=None, **more):
        return super().verify(*call, filters=self.first(filters), **more)

    def verify_probs(self, *call, filters=None, **more):
        return super().verify_probs(*call, filters=self.first(filters), **more)

    def first(self, filters):
        return filters and Filters.of(filters.cuts()[:1] * len(filters.top_k), 2**30, filters.order)


@fault("K13", "sampled-law-processors", "recursive-rule-sampled")
class GeneratorWithoutProcessors(GeneratedWithAll):
    def processed(self, request, node, row):
        return row


@fault("K13", "sampled-law-processors")
class SeedsAndPenaltiesOfTheCommittedTextOnly(SeededWithAll):
    def seen(self, request, node):
        return self.committed(request)


@fault("K2", "chain-rule-sampled")
class GeneratedChainAcceptsAll(GeneratedWithAll):
    traits = replace(GeneratedWithAll.traits, rules=("chain",))

    def accepts(self, p, q, token, coin, final):
        return True


@fault("K2", "recursive-rule-sampled", "chain-rule-sampled")
class SeededBonusFromP(SeededWithAll):
    def left_of_p(self, p, q, token):
        return p


@fault("K3", "sampled-law-logits")
class SeededWithAllAtOneTemperature(SeededWithAll):
    def verify(self, batch, logits, temperature, *call, **more):
        return super().verify(batch, logits, (temperature > 0).to(temperature.dtype), *call, **more)
