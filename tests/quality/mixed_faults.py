"""Wrong where two settings meet, and right alone: filters on processed rows, by every rule; their status.

:class:`MixedSampler` is right: ``processed_rule_faults``'s rules on processed and then filtered rows.
"""

from dataclasses import replace

import numpy as np
import torch
from processed_rule_faults import ProcessedRuleSampler
from processor_faults import ProcessorSampler
from registry import planting
from rule_faults import RuleSampler

from treeconv.backends.base import BackendTraits
from treeconv.backends.reference import ReferenceBackend
from treeconv.filters import Cuts
from treeconv.processors import PROCESSORS, Processors
from treeconv.rules import RULES
from treeconv.sampling import target_probs


class MixedSampler(ProcessedRuleSampler):
    """A right verifier with everything: processors, filters, every rule."""

    name = "right-mixed"
    traits = BackendTraits(devices=("cpu",), rules=RULES, takes_filters=True, takes_processors=PROCESSORS)

    def verify(self, batch, logits, temperature, coins, depth_cap, filters=None, rule=None, processors=None):
        self.temperatures = temperature.tolist()
        self.take(batch, logits, processors)
        return RuleSampler.verify(self, batch, logits, temperature, coins, depth_cap, filters, rule)

    def verify_probs(self, batch, target_probs, coins, depth_cap, filters=None, rule=None):
        self.given = None
        return RuleSampler.verify_probs(self, batch, target_probs, coins, depth_cap, filters, rule)


# --- wrong: filters and processors, target-only -------------------------------------------------------

FAULTS, fault = planting()


class CutEarly(ProcessorSampler):
    """Some filters cut before some processors are applied; what is left is processed, and cut by the rest."""

    filters_early = ("top_k", "top_p", "min_p")
    processors_late = ("logit_bias", "token_bitmask", "penalties")

    def laws(self, request, row):
        cuts, given = self.filters[request], self.given
        if given is None or not cuts.are_on(row.size):
            return super().laws(request, row)
        fields = ("logit_bias", "token_bitmask", "penalties")
        self.given = Processors(**{f: getattr(given, f) for f in fields if f not in self.processors_late})
        early = self.processed(request, self.node, self.raw[request, self.node])
        early = np.nan_to_num(early, nan=-np.inf, neginf=-np.inf)
        self.given = given
        first = Cuts(**{name: getattr(cuts, name) for name in self.filters_early}, order=cuts.order)
        if not first.are_on(row.size) or early.max() == -np.inf:
            return super().laws(request, row)
        temperature = self.temperatures[request]
        left = np.where(self.filtered(target_probs(early, temperature), first) > 0, row, -np.inf)
        law = target_probs(left if left.max() > -np.inf else row, temperature)
        rest = [name for name in ("top_k", "top_p", "min_p") if name not in self.filters_early]
        second = Cuts(**{name: getattr(cuts, name) for name in rest}, order=cuts.order)
        law = self.filtered(law, second) if second.are_on(law.size) else law
        return law, law


@fault("K13", "processors-filtered")
class BitmaskAfterTheFilters(CutEarly):
    processors_late = ("token_bitmask",)


@fault("K13", "processors-filtered")
class BiasAfterTopK(CutEarly):
    filters_early, processors_late = ("top_k",), ("logit_bias",)


@fault("K13", "processors-filtered")
class MinPBeforePenalties(CutEarly):
    filters_early, processors_late = ("min_p",), ("penalties",)


# --- wrong: filters and processors by another rule ----------------------------------------------------


@fault("K13", "chain-rule-processors", "recursive-rule-processors", "match-rule-processors")
class FiltersOfTheRawLawByARule(MixedSampler):
    """The cut is found in the raw row, and made in the processed one."""

    def filtered(self, law, cuts):
        if self.given is None or not cuts.are_on(law.size):
            return super().filtered(law, cuts)
        left = np.where(super().filtered(self.raw_law(), cuts) > 0, law, np.float32(0))
        return left / left.sum() if left.any() else law


@fault("K13", "chain-rule-processors", "recursive-rule-processors", "match-rule-processors")
class ProcessedRowsAreNotFilteredByARule(MixedSampler):
    def filtered(self, law, cuts):
        return super().filtered(law, cuts) if self.given is None or self.rule.is_plain else law


@fault("K13", "chain-rule-processors", "recursive-rule-processors")
class ProcessedRatioBeforeTheFilters(MixedSampler):
    """Children of processed rows are tested by the law before the filters; the bonus is of the one after."""

    def filtered(self, law, cuts):
        self.unfiltered = law
        return super().filtered(law, cuts)

    def accepts(self, p, q, token, coin, final):
        return super().accepts(p if self.given is None else self.unfiltered, q, token, coin, final)


# --- wrong: unusable rows, where something else is in play --------------------------------------------


def _patched(rows, what, value):
    """Rows with what is no number replaced, as a sampler that does not look sees them."""
    return torch.where(what(rows), torch.full_like(rows, value), rows)


@fault("K11", "bad-rows")
class NanIsCutByFilters(MixedSampler):
    """A sort puts NaN last, and the filters cut it off."""

    def verify(self, batch, logits, *call, filters=None, **more):
        if filters is not None:
            logits = _patched(logits, torch.isnan, -np.inf)
        return super().verify(batch, logits, *call, filters=filters, **more)


@fault("K11", "bad-rows")
class InfinityIsTheOnlyTokenUnderFilters(MixedSampler):
    def verify(self, batch, logits, *call, filters=None, **more):
        if filters is not None:
            logits = _patched(logits, torch.isposinf, 3e4)
        return super().verify(batch, logits, *call, filters=filters, **more)


@fault("K11", "bad-rows")
class NanIsNoMassByAnotherRule(MixedSampler):
    def verify(self, batch, logits, *call, rule=None, **more):
        if rule is not None:
            logits = _patched(logits, torch.isnan, -np.inf)
        return super().verify(batch, logits, *call, rule=rule, **more)


@fault("K11", "bad-rows")
class NanIsNoMassInProbabilities(MixedSampler):
    def verify_probs(self, batch, target_probs, *call, **more):
        return super().verify_probs(batch, _patched(target_probs, torch.isnan, 0.0), *call, **more)


@fault("K11", "bad-rows")
class NegativeProbabilitiesAreTaken(MixedSampler):
    def verify_probs(self, batch, target_probs, *call, **more):
        return super().verify_probs(batch, target_probs.clamp(min=0), *call, **more)


@fault("K11", "bad-rows")
class NoProbabilityIsTokenZero(MixedSampler):
    def verify_probs(self, batch, target_probs, *call, **more):
        rows = target_probs.clone()
        rows[..., 0] = torch.where((rows == 0).all(dim=-1), torch.ones_like(rows[..., 0]), rows[..., 0])
        return super().verify_probs(batch, rows, *call, **more)


@fault("K11", "masks-empty")
class EmptyIsUnmaskedUnderFilters(MixedSampler):
    """What is forbidden throughout falls back to the row without its mask, if it is filtered as well."""

    def verify(self, batch, *call, filters=None, **more):
        self.is_filtered = filters is not None
        return super().verify(batch, *call, filters=filters, **more)

    def masked(self, x, allowed):
        return x if self.is_filtered and not allowed.any() else super().masked(x, allowed)


# --- wrong: more siblings, more tokens, by a ratio rule -----------------------------------------------


class LaterSiblings(MixedSampler):
    """Counts the siblings that were rejected at a node."""

    def ratio(self, p, q, drafted, coins, final):
        self.rejected = 0
        return super().ratio(p, q, drafted, coins, final)

    def left_of_p(self, p, q, token):
        self.rejected += 1
        return self.left(p, q, token)

    def left(self, p, q, token):
        return super().left_of_p(p, q, token)


@fault("K2", "recursive-rule")
class FourthSiblingsQIsStale(LaterSiblings):
    """The fourth sibling is tested with the third one's q."""

    fewest_nodes = 6

    def left_of_q(self, q, token):
        return q if self.rejected == 3 else super().left_of_q(q, token)


@fault("K2", "recursive-rule")
class FifthSiblingsPIsStale(LaterSiblings):
    fewest_nodes = 6

    def left(self, p, q, token):
        return p if self.rejected == 4 else super().left(p, q, token)


@fault("K2", "recursive-rule")
class FourSiblingsAtMost(MixedSampler):
    """A buffer of four: a fifth sibling is never tested."""

    fewest_nodes = 6

    def ratio(self, p, q, drafted, coins, final):
        return super().ratio(p, q, drafted[:4], coins[:4], final)


@fault("K2", "chain-rule-logits", "recursive-rule-logits")
class DraftLawCutAtSixteen(MixedSampler):
    """q is read in one tile of 16."""

    def draft_law(self, request, node):
        q = super().draft_law(request, node)
        q[16:] = 0
        return q


@fault("K2", "chain-rule-logits")
class ResidualOfLaterTilesFromP(MixedSampler):
    def residual(self, p, q, token):
        left = super().residual(p, q, token)
        left[128:] = p[128:]
        return left


@fault("K2", "match-rule-logits")
class MatchesInTheFirstTile(MixedSampler):
    """Drawn tokens are matched with drafts among the first 128 tokens only."""

    def match(self, p, drafted, coin, final):
        place, drawn = super().match(p, drafted, coin, final)
        return (None, drafted[place]) if place is not None and drafted[place] >= 128 else (place, drawn)


# --- wrong: what an earlier call asked for ------------------------------------------------------------


@fault("K10", "purity", "penalties-purity")
class ThresholdsOfTheCallBefore(ReferenceBackend):
    """Kept until a call brings others."""

    kept = None

    def verify(self, *call, rule=None, **more):
        self.kept = rule or self.kept
        return super().verify(*call, rule=self.kept, **more)


@fault("K10", "purity", "masks-purity")
class FiltersOfTheCallBefore(ReferenceBackend):
    kept = None

    def verify(self, batch, *call, filters=None, **more):
        if filters is not None or (self.kept is not None and len(self.kept.top_k) != batch.batch_size):
            self.kept = filters
        return super().verify(batch, *call, filters=self.kept, **more)


# --- wrong: views read as if they were contiguous -----------------------------------------------------


def storage(tensor):
    """What lies behind a tensor's first element, as many of them: strides ignored."""
    return torch.as_strided(tensor, tensor.shape, torch.empty(tensor.shape, device="meta").stride())


class TakesViews(MixedSampler):
    """Right, with tensors of any strides."""

    name = "right-views"
    traits = replace(MixedSampler.traits, takes_views=True)


@fault("K8", "batch-invariance", "recursive-rule-purity")
class TokensReadByTheirPlace(TakesViews):
    def walk(self, request, batch, *rest):
        return super().walk(request, replace(batch, candidates=storage(batch.candidates)), *rest)


@fault("K8", "batch-invariance", "filters-batch")
class RowsReadByTheirPlace(TakesViews):
    def verify(self, batch, logits, *call, **more):
        return super().verify(batch, storage(logits), *call, **more)


@fault("K8", "batch-invariance", "filters-batch")
class AlignedRowsReadToTheirEnd(TakesViews):
    def verify(self, batch, logits, *call, **more):
        stride = logits.stride(1)
        if stride % 16 == 0 and stride > logits.shape[2]:
            logits = torch.as_strided(logits, (*logits.shape[:2], stride), logits.stride())
        return super().verify(batch, logits, *call, **more)


@fault("K8", "masks-batch")
class BitmaskReadByItsPlace(TakesViews):
    def words(self, request, node):
        return storage(self.given.token_bitmask)[request, node].numpy()


@fault("K8", "chain-rule-purity", "recursive-rule-purity")
class DraftLawsReadByTheirPlace(TakesViews):
    def draft_law(self, request, node):
        self.rule = replace(self.rule, draft_probs=storage(self.rule.draft_probs))
        return super().draft_law(request, node)
