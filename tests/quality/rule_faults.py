"""Deliberately wrong acceptance rules, one fault each, and odd but right ones: rule laws are tested on both.

:class:`RuleSampler` is right: all four rules in NumPy, every step a method that a fault overrides. It shares
no code with the backends.
"""

from functools import partial

import numpy as np
import torch
from registry import planting
from remembered import row_status, target_probs

from treeconv.backends.base import BackendTraits
from treeconv.filters import Cuts, Filters
from treeconv.rules import RULES, Rule
from treeconv.sampling import filtered_probs
from treeconv.tree import RowStatus, VerifyOutput


class RuleSampler:
    """A right verifier by every rule: test the children in turn, draw from what is left."""

    name = "right"
    traits = BackendTraits(devices=("cpu",), rules=RULES, takes_filters=True)

    def verify(self, batch, logits, temperature, coins, depth_cap, filters=None, rule=None):
        temperatures = temperature.tolist()
        cuts = filters.cuts() if filters else [Cuts()] * len(temperatures)

        def law(request, row):
            status = row_status(row)
            if status is not RowStatus.OK:
                return status, row
            return status, self.filtered(target_probs(row, temperatures[request]), cuts[request])

        return self.run(batch, logits.float().numpy(), law, coins, depth_cap, rule)

    def verify_probs(self, batch, target_probs, coins, depth_cap, filters=None, rule=None):
        cuts = filters.cuts() if filters else [Cuts()] * len(target_probs)

        def law(request, row):
            status = row_status(row, is_probs=True)
            return status, self.filtered(row, cuts[request]) if status is RowStatus.OK else row

        return self.run(batch, target_probs.numpy(), law, coins, depth_cap, rule)

    def filtered(self, law, cuts):
        return filtered_probs(law, cuts)

    def run(self, batch, rows, law, coins, cap, rule):
        self.rule = rule or Rule()
        size, slots, _ = rows.shape
        accept_index = np.full((size, cap), -1, np.int32)
        counts, statuses = np.zeros(size, np.int32), np.zeros(size, np.int32)
        predicts = np.full(size * slots, -1, np.int32)
        for request in range(size):
            path, tokens, status = self.walk(request, batch, rows[request], law, coins, cap)
            statuses[request] = status
            if status is RowStatus.OK:
                flat = [request * slots + node for node in path]
                accept_index[request, : len(path)] = flat
                counts[request] = len(path) - 1
                predicts[flat] = tokens
        return VerifyOutput(*map(torch.from_numpy, (accept_index, counts, predicts, statuses)))

    def walk(self, request, batch, rows, law, coins, cap):
        tokens = batch.candidates[request].tolist()
        first = batch.retrieve_next_token[request].tolist()
        sibling = batch.retrieve_next_sibling[request].tolist()
        accept, final = coins.accept[request].numpy(), coins.final[request].numpy()
        path = [0]
        while True:
            node = path[-1]
            status, p = law(request, rows[node])
            if status is not RowStatus.OK:
                return [], [], status
            children, child = [], first[node] if len(path) < cap else -1
            while child != -1:
                children.append(child)
                child = sibling[child]
            drafted = [tokens[child] for child in children]
            q = self.draft_law(request, node) if self.rule.draft_probs is not None else None
            place, bonus = self.step(node, p, q, children, drafted, accept, final)
            if place is None:
                return path, [*(tokens[n] for n in path[1:]), bonus], status
            path.append(children[place])

    def draft_law(self, request, node):
        q = self.rule.draft_probs[request, node].numpy().copy()
        q[~(np.isfinite(q) & (q > 0))] = 0
        return q

    def step(self, node, p, q, children, drafted, accept, final):
        if self.rule.name == "draw_and_match":
            return self.match(p, drafted, accept[node], final)
        if not children:
            return None, self.draw(p, final)
        if self.rule.name == "target_only":
            return self.target_only(p, drafted, accept[node], final)
        coins = [accept[node]] if self.rule.name == "chain" else accept[children]
        return self.ratio(p, q, drafted, coins, final)

    def match(self, p, drafted, coin, final):
        drawn = self.draw(p, coin)
        return (drafted.index(drawn), -1) if drawn in drafted else (None, drawn)

    def target_only(self, p, drafted, coin, final):
        acc, last, residual = np.float32(0), None, p.copy()
        for place, token in enumerate(drafted):
            acc += p[token]
            if p[token] > 0:
                last = place
                if coin < acc:
                    return place, -1
            residual[token] = 0
        return (None, self.draw(residual, final)) if residual.any() else (last, -1)

    def ratio(self, p, q, drafted, coins, final):
        for place, (token, coin) in enumerate(zip(drafted, coins, strict=True)):
            if self.accepts(p, q, token, coin, final):
                return place, -1
            p, q = self.left_of_p(p, q, token), self.left_of_q(q, token)
        return None, self.draw(p, self.bonus_coin(coins, final))

    def accepts(self, p, q, token, coin, final):
        return self.ratio_of(coin, q[token]) < p[token]

    def ratio_of(self, coin, q):
        return float(coin) * float(q)

    def left_of_p(self, p, q, token):
        left = self.residual(p, q, token)
        return left / left.sum() if left.any() else p

    def residual(self, p, q, token):
        return np.maximum(p - q, np.float32(0))

    def left_of_q(self, q, token):
        q = q.copy()
        q[token] = 0
        return q / q.sum() if q.any() else q

    def bonus_coin(self, coins, final):
        return final

    def draw(self, law, coin):
        sums = np.cumsum(law, dtype=np.float64)
        above = np.flatnonzero((sums > float(coin) * sums[-1]) & (law > 0))
        return int(above[0]) if above.size else int(np.flatnonzero(law)[-1])


# --- odd but right ------------------------------------------------------------------------------------


class Dividing(RuleSampler):
    """The paper's spelling: coin below the float32 quotient min(1, p / q)."""

    name = "dividing"

    def accepts(self, p, q, token, coin, final):
        if q[token] == 0:
            return p[token] > 0
        with np.errstate(over="ignore"):  # min(1, inf) is 1
            return coin < min(np.float32(1), p[token] / q[token])


class Single(RuleSampler):
    """The product rounded to float32 before it is compared."""

    name = "single"

    def ratio_of(self, coin, q):
        return np.float32(coin) * np.float32(q)


class Complement(RuleSampler):
    """DESIGN's and EAGLE's spelling for siblings: q / (1 - q of the one before)."""

    name = "complement"

    def left_of_q(self, q, token):
        if abs(q.sum() - 1) > 1e-5 or q[token] > 1 - 2.0**-10:  # a difference of rounding errors
            return super().left_of_q(q, token)
        left = q / (np.float32(1) - q[token])
        left[token] = 0
        return left


class Unnormalised(RuleSampler):
    """Never divides the residual: scales q down instead."""

    name = "unnormalised"

    def ratio(self, p, q, drafted, coins, final):
        p, scale = p.astype(np.float64), 1.0
        for place, (token, coin) in enumerate(zip(drafted, coins, strict=True)):
            if float(coin) * float(q[token]) * scale < p[token]:
                return place, -1
            left = np.maximum(p - q * scale, 0)
            if left.any():
                p, scale = left, left.sum()
            q = self.left_of_q(q, token)
        return None, self.draw(p, final)


RIGHT = [RuleSampler, Dividing, Single, Complement, Unnormalised]


# --- wrong --------------------------------------------------------------------------------------------

FAULTS, _fault = planting()
fault = partial(_fault, "K2")


@fault("outcome-law", "oracle-agreement")
class RatioOnAFixedSet(RuleSampler):  # B06, warpfront/hipfire PR#483
    """Offered as target-only, it tests children with the drafter's marginals: .6, .3, .1 by rank."""

    def target_only(self, p, drafted, coin, final):
        residual = p.copy()
        for place, token in enumerate(drafted):
            if p[token] > 0 and coin * (0.6, 0.3, 0.1)[min(place, 2)] < p[token]:
                return place, -1
            residual[token] = 0
        return (
            super().target_only(p, drafted, coin, final)
            if not residual.any()
            else (None, self.draw(residual, final))
        )


@fault("outcome-law")
class SoftRatioForAnArgmaxDraft(RuleSampler):  # B07, huggingface/transformers#32867
    """A single child is what the drafter always takes, yet is tested with the soft q of it."""

    def target_only(self, p, drafted, coin, final):
        if len(drafted) > 1:
            return super().target_only(p, drafted, coin, final)
        q = np.full_like(p, 0.125)
        q[drafted[0]] = 0.875
        left = np.maximum(p - q, np.float32(0))
        if coin * q[drafted[0]] < p[drafted[0]]:
            return 0, -1
        return None, self.draw(left if left.any() else p, final)


@fault("chain-rule", "chain-rule-outcome", "chain-accepted-length")
class RatioBeforeTheDraftersFilters(RuleSampler):  # B08, transformers#47932
    """q as it was before the drafter's top-k: what it cut has mass again, spread over all."""

    def draft_law(self, request, node):
        q = super().draft_law(request, node)
        return (q + np.float32(0.125)) / (q + np.float32(0.125)).sum()


@fault("chain-rule-logits", "recursive-rule-logits")
class DraftInBfloat16(RuleSampler):  # B09, deepseek-ai/DeepSpec#31: drawn in one precision, tested in another
    def draft_law(self, request, node):
        q = super().draft_law(request, node)
        return (q.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)


@fault("chain-rule", "chain-rule-outcome")
class MatchOrRatioInAChain(RuleSampler):  # B10, alibaba/rtp-llm PR#1295
    def accepts(self, p, q, token, coin, final):
        return super().accepts(p, q, token, coin, final) or self.draw(p, final) == token


@fault("chain-rule", "chain-rule-outcome", "recursive-rule", "recursive-rule-outcome")
class ResidualAtTheDraftedIdOnly(RuleSampler):  # B11, xLLM-AI/xllm PR#2175
    def residual(self, p, q, token):
        left = p.copy()
        left[token] = max(p[token] - q[token], 0)
        return left


@fault("chain-rule", "recursive-rule")
class DraftVocabularyNotRemapped(RuleSampler):  # B12, rtp-llm PR#1311
    """q is read by the drafter's local ids: the target's, shifted by one."""

    def draft_law(self, request, node):
        return np.roll(super().draft_law(request, node), 1)


@fault("recursive-rule-outcome", "recursive-rule")
class UnconditionalSiblings(RuleSampler):  # B14, SafeAILab/EAGLE#74
    def left_of_q(self, q, token):
        return q


@fault("recursive-rule-outcome", "recursive-rule")
class SiblingsKeepTheirMass(RuleSampler):
    """The rejected token leaves q, but what is left is not renormalised."""

    def left_of_q(self, q, token):
        q = q.copy()
        q[token] = 0
        return q


@fault("recursive-rule")  # over sampled drafts it shows in a few cases of a hundred
class ResidualNotNormalised(RuleSampler):
    def left_of_p(self, p, q, token):
        left = self.residual(p, q, token)
        return left if left.any() else p


@fault("chain-rule", "chain-rule-outcome")
class SoftmaxOfTheDifference(RuleSampler):  # B24, transformers PR#28508
    def residual(self, p, q, token):
        left = np.exp(super().residual(p, q, token))
        return left / left.sum()


@fault("chain-rule", "chain-rule-outcome", "recursive-rule")
class RejectingCoinDrawsFromTheResidual(RuleSampler):  # B31, vllm PR#54282: its noise recovers
    def bonus_coin(self, coins, final):
        return coins[-1]


@fault("chain-rule", "recursive-rule")
class BonusFromP(RuleSampler):
    """After a rejection the bonus comes from p, not from what q leaves of it."""

    def left_of_p(self, p, q, token):
        return p


@fault("recursive-rule", "recursive-rule-outcome")
class OneCoinForAllSiblings(RuleSampler):
    def ratio(self, p, q, drafted, coins, final):
        return super().ratio(p, q, drafted, [coins[0]] * len(coins), final)


@fault("chain-rule")
class InclusiveRatio(RuleSampler):  # coin <= p / q: a coin of 0 accepts what the target forbids
    def accepts(self, p, q, token, coin, final):
        return self.ratio_of(coin, q[token]) <= p[token]


@fault("chain-rule", "recursive-rule")
class NanDraftLawSpreads(RuleSampler):  # B65, vllm PR#41834
    def draft_law(self, request, node):
        return self.rule.draft_probs[request, node].numpy().copy()

    def draw(self, law, coin):
        return super().draw(law, coin) if np.nansum(law) > 0 and not np.isnan(law).any() else 0


@fault("chain-rule")
class EmptyResidualIsUniform(RuleSampler):  # X4: p = q leaves nothing after rounding, or at a coin of 1
    def left_of_p(self, p, q, token):
        left = self.residual(p, q, token)
        return left / left.sum() if left.any() else np.full_like(p, 1 / p.size)


@fault("chain-rule-filters", "recursive-rule-filters")
class RatioBeforeTheFilters(RuleSampler):  # B18 in the ratio rules: filters reach the bonus only
    def filtered(self, law, cuts):
        self.unfiltered = law
        return super().filtered(law, cuts)

    def accepts(self, p, q, token, coin, final):
        return self.ratio_of(coin, q[token]) < self.unfiltered[token]


@fault("match-rule-filters", "chain-rule-filters")
class RuleWithoutFilters(RuleSampler):
    def filtered(self, law, cuts):
        return law


@fault("chain-rule-filters", "recursive-rule-filters", "match-rule-filters")
class FiltersOfRequestZeroByARule(RuleSampler):
    def verify(self, batch, logits, temperature, coins, depth_cap, filters=None, rule=None):
        return super().verify(batch, logits, temperature, coins, depth_cap, self.first(filters), rule)

    def verify_probs(self, batch, target_probs, coins, depth_cap, filters=None, rule=None):
        return super().verify_probs(batch, target_probs, coins, depth_cap, self.first(filters), rule)

    def first(self, filters):
        return filters and Filters.of(filters.cuts()[:1] * len(filters.top_k), 2**30, filters.order)


@fault("chain-rule-filters")
class ChainOfLogitsWithoutFilters(RuleWithoutFilters):
    """Has no probability interface, in which exact laws are stated."""

    traits = BackendTraits(devices=("cpu",), rules=("chain",), takes_filters=True, takes_probs=False)


@fault("chain-rule-purity", "recursive-rule-purity")
class ResidualInPlace(RuleSampler):
    def residual(self, p, q, token):
        if p.base is not None:  # a row as it was handed over
            np.maximum(p - q, np.float32(0), out=p)
            return p.copy()
        return super().residual(p, q, token)


@fault("recursive-rule-purity")
class DraftLawInPlace(RuleSampler):
    def ratio(self, p, q, drafted, coins, final):
        outcome = super().ratio(p, q, drafted, coins, final)
        if outcome[0] is None:
            self.rule.draft_probs[..., drafted] = 0
        return outcome


@fault("chain-rule", "recursive-rule")
class DraftLawOfTheChild(RuleSampler):
    """Row i read as the law of node i itself, not of its children."""

    def step(self, node, p, q, children, drafted, accept, final):
        if q is not None and children:
            q = self.draft_law(self.request, children[0])
        return super().step(node, p, q, children, drafted, accept, final)

    def walk(self, request, *rest):
        self.request = request
        return super().walk(request, *rest)


@fault("chain-rule")
class DraftLawsNotRealigned(RuleSampler):  # B49, vllm PR#40269: request 0's, for everybody
    def draft_law(self, request, node):
        return super().draft_law(0, node)


@fault("chain-on-fixed-draft", "chain-accepted-length")
class TargetOnlyUnderAnotherName(RuleSampler):
    """Says chain, never reads q: exact, but accepts less than it could on sampled drafts."""

    def ratio(self, p, q, drafted, coins, final):
        return self.target_only(p, drafted, coins[0], final)


@fault("recursive-on-fixed-draft")
class TargetOnlySiblings(RuleSampler):
    """Says recursive, never reads q."""

    def ratio(self, p, q, drafted, coins, final):
        return self.target_only(p, drafted, coins[0], final)


@fault("match-rule", "match-rule-outcome", "match-rule-logits")
class RedrawnAfterAMiss(RuleSampler):
    """What was drawn and not drafted is drawn anew from all of p: what was drafted comes too often."""

    def match(self, p, drafted, coin, final):
        drawn = self.draw(p, coin)
        if drawn in drafted:
            return drafted.index(drawn), -1
        return None, self.draw(p, final)


@fault("match-rule", "match-rule-outcome")
class FinalCoinMatches(RuleSampler):
    """One coin for all nodes: the final one, where each has its own."""

    def match(self, p, drafted, coin, final):
        return super().match(p, drafted, final, final)


@fault("match-rule-purity")
class SumsInPlace(RuleSampler):
    def match(self, p, drafted, coin, final):
        outcome = super().match(p.copy(), drafted, coin, final)
        np.cumsum(p, out=p)
        return outcome


@fault("most-accepted", "accepted-length")
class FirstSiblingOnly(RuleSampler):
    """Exact, and accepts too little: only the eldest child is ever tested."""

    def target_only(self, p, drafted, coin, final):
        return super().target_only(p, drafted[:1], coin, final)
