"""Deliberately wrong rules on processed rows, one fault each: p and q take different roads to a test.

:class:`ProcessedRuleSampler` is right: ``rule_faults``'s rules on ``processor_faults``'s rows.
"""

from functools import partial

import numpy as np
from processor_faults import Processing, Reciprocal
from registry import planting
from rule_faults import Dividing, RuleSampler

from treeconv.backends.base import BackendTraits
from treeconv.backends.reference import ReferenceBackend
from treeconv.processors import PROCESSORS
from treeconv.rules import RULES
from treeconv.sampling import target_probs
from treeconv.tree import RowStatus


class ProcessedRuleSampler(Processing, RuleSampler):
    """A right verifier by every rule with processors."""

    name = "right-processed-rules"
    traits = BackendTraits(devices=("cpu",), rules=RULES, takes_processors=PROCESSORS)

    def verify(self, batch, logits, temperature, coins, depth_cap, rule=None, processors=None):
        self.temperatures = temperature.tolist()
        self.take(batch, logits, processors)
        return super().verify(batch, logits, temperature, coins, depth_cap, rule=rule)

    def verify_probs(self, batch, target_probs, coins, depth_cap, rule=None):
        self.given = None
        return super().verify_probs(batch, target_probs, coins, depth_cap, rule=rule)

    def walk(self, request, *rest):
        self.request = request
        return super().walk(request, *rest)

    def raw_law(self):
        """The law of the node that is walked, as if there were no processors."""
        row = np.nan_to_num(self.raw[self.request, self.node], nan=-np.inf, neginf=-np.inf)
        row[0] = max(row[0], np.finfo(np.float32).min)  # some token is left
        return target_probs(row, self.temperatures[self.request])


class OddThroughout(ProcessedRuleSampler):
    """Float32 products with a reciprocal before the softmax, the float32 quotient p / q behind it."""

    name = "odd-processed-rules"
    repeated, counted = Reciprocal.repeated, Reciprocal.counted
    accepts = Dividing.accepts


RIGHT = [ProcessedRuleSampler, OddThroughout]


# --- wrong --------------------------------------------------------------------------------------------

FAULTS, _fault = planting()
fault = partial(_fault, "K13")


@fault("chain-rule-processors", "recursive-rule-processors")
class RatioBeforeTheProcessors(ProcessedRuleSampler):
    """Children are tested by the raw law; only the residual, and so the bonus, is of the processed one."""

    def accepts(self, p, q, token, coin, final):
        return super().accepts(self.raw_law() if self.given else p, q, token, coin, final)


@fault("chain-rule-processors", "recursive-rule-processors")
class ResidualBeforeTheProcessors(ProcessedRuleSampler):
    """Children are tested by the processed law; what is left after a rejection is left of the raw one."""

    def residual(self, p, q, token):
        return super().residual(self.raw_law() if self.given else p, q, token)


@fault("chain-rule-processors", "recursive-rule-processors")
class DraftLawProcessedToo(ProcessedRuleSampler):
    """q goes through the target's processors as well, though the drafter did not sample under them."""

    def draft_law(self, request, node):
        q = super().draft_law(request, node)
        if self.given is None or not q.any():
            return q
        with np.errstate(divide="ignore"):
            x = self.processed(request, node, np.log(q))
        return target_probs(x, 1.0) if x.max() > -np.inf else q


@fault("chain-rule-processors", "recursive-rule-processors")
class DraftsCountBeforeTheyAreKept(ProcessedRuleSampler):
    """A node's penalties count its eldest child too: the token that is tested there."""

    def seen(self, request, node):
        child = int(self.batch.retrieve_next_token[request, node])
        return super().seen(request, node) + (self.tokens(request, [child]) if child != -1 else [])


@fault("match-rule-processors", "chain-rule-processors")
class RawArgmaxByAnotherRule(ReferenceBackend):  # an eager branch of ours did it
    def verify(self, batch, logits, temperature, *call, rule=None, processors=None, **more):
        if rule is not None and not temperature.any():
            processors = None
        return super().verify(batch, logits, temperature, *call, rule=rule, processors=processors, **more)


@fault("chain-rule-purity", "recursive-rule-purity", "match-rule-purity")
class ProcessedInPlaceByARule(ProcessedRuleSampler):
    def processed(self, request, node, row):
        x = super().processed(request, node, row)
        row[:] = x
        return x


@fault("recursive-rule-processors", "chain-rule-processors")
class BiasOfRequestZeroByARule(ProcessedRuleSampler):
    def bias(self, request):
        return super().bias(0)


@fault("recursive-rule-processors", "chain-rule-processors")
class BitmaskOfRequestZeroByARule(ProcessedRuleSampler):
    def words(self, request, node):
        return super().words(0, node)


@fault("recursive-rule-processors", "chain-rule-processors")
class PenaltiesOfRequestZeroByARule(ProcessedRuleSampler):
    def amounts(self, request):
        return super().amounts(0)


@fault("recursive-rule-processors", "chain-rule-processors")
class DraftLawOfRequestZeroWhereProcessed(ProcessedRuleSampler):
    """Laws of drafters lie by another stride than the rows that were copied to be processed."""

    def draft_law(self, request, node):
        return super().draft_law(0 if self.given else request, node)


@_fault("K2", "chain-rule-purity", "recursive-rule-purity", "match-rule-purity")
class FilteredInPlaceByARule(RuleSampler):  # B23 by another rule
    def verify(self, *call, **more):
        self.nothing = -np.inf
        return super().verify(*call, **more)

    def verify_probs(self, *call, **more):
        self.nothing = 0.0
        return super().verify_probs(*call, **more)

    def filtered(self, law, cuts):
        left = super().filtered(law, cuts)
        self.cut = (left == 0) & (law > 0)
        return left

    def run(self, batch, rows, law, *rest):
        def in_place(request, row):
            status, left = law(request, row)
            if status is RowStatus.OK:
                row[self.cut] = self.nothing
            return status, left

        return super().run(batch, rows, in_place, *rest)
