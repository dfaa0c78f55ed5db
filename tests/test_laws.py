"""The laws: right samplers keep them, wrong ones break the law that is about their fault."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from treeconv import DraftTree, LawBroken, Request, VerifyCase, VerifyOutput
from treeconv.backends.base import BackendTraits, FunctionBackend
from treeconv.backends.eager import EagerBackend
from treeconv.backends.reference import ReferenceBackend
from treeconv.backends.registry import get_backend
from treeconv.laws import BACKEND_LAWS, law_named, why_not
from treeconv.processor_strategies import PROCESSOR_CASES
from treeconv.processors import PROCESSORS, RequestProcessors
from treeconv.strategies import cases_for
from treeconv.suite import check_law
from treeconv.tree_laws import TREE_LAWS, tree_law_named

TREE = DraftTree([-1, 0, 0, 1], [0, 1, 2, 0])
CHAIN = DraftTree.chain([0, 1, 1])
LAW = np.array([[0.25, 0.25, 0.25, 0.25], [0.5, 0, 0.5, 0], [0, 0.75, 0.25, 0], [0, 0, 0, 1]], np.float32)
LOGITS = np.array([[0, 1, 1, -np.inf], [2, 0, 1, 0], [0, -1, 0, 3], [1, 1, 1, 1]], np.float32)


def request(tree, rows, temperature=1.0, coin=0.3, final=0.6):
    return Request(tree, rows[: len(tree)], temperature, [coin] * len(tree), final)


DYADIC = VerifyCase((request(TREE, LAW),), kind="probs")
BATCH = VerifyCase(
    (request(TREE, LOGITS, 0.5), request(CHAIN, LOGITS, 0.0), request(CHAIN, LOGITS, 2.0, 0.9))
)
ALONE = VerifyCase((request(DraftTree([-1], [0]), LOGITS),))
BAD = np.where(np.arange(4)[:, None] == 1, np.nan, LOGITS).astype(np.float32)
FILTERED = replace(
    BATCH,
    requests=(replace(BATCH.requests[0], top_k=3, top_p=0.75), *BATCH.requests[1:]),
    filter_order="joint",
)
MASKED = replace(
    BATCH,
    requests=tuple(
        replace(
            one,
            processors=RequestProcessors(
                np.array([0, 0.5, -np.inf, 0]), np.full((len(one.tree), 1), 0b1011, np.int32)
            ),
        )
        for one in BATCH.requests
    ),
)
PENALISED = replace(
    MASKED,
    requests=tuple(
        replace(one, processors=replace(one.processors, frequency_penalty=0.5, committed_tokens=(1, 3)))
        for one in MASKED.requests
    ),
)
Q = np.array([[0.5, 0.125, 0.25, 0.125], [0.25] * 4, [0.5, 0.5, 0, 0], [0, 0.75, 0, 0.25]], np.float32)


def by_rule(rule, case):
    """The case verified by another rule, with draft laws where it reads them; chains become chains."""
    requests = [one for one in case.requests if rule != "chain" or one.tree == CHAIN] or [request(CHAIN, LAW)]
    if rule != "draw_and_match":
        requests = [replace(one, draft_probs=Q[: len(one.tree)]) for one in requests]
    return replace(case, rule=rule, requests=requests)


CASES = {
    "logits": BATCH,
    "wide": BATCH,
    "dyadic": DYADIC,
    "dyadic_small": DYADIC,
    "zero_mass": DYADIC,
    "zero_mass_logits": BATCH,
    "chains": VerifyCase((request(CHAIN, LOGITS),)),
    "batches": BATCH,
    "bad_rows": VerifyCase((request(TREE, BAD), request(CHAIN, LOGITS))),
    "drawn": DYADIC,
    "drawn_filtered": VerifyCase((replace(request(TREE, LAW), top_k=2),), kind="probs"),
    "drawn_processed": PENALISED,
    "filtered": VerifyCase((replace(request(TREE, LAW), top_k=2),), kind="probs"),
    "filtered_roots": VerifyCase((request(DraftTree([-1], [0]), LAW),), kind="probs"),
    "filtered_small": VerifyCase((replace(request(TREE, LAW), top_k=2),), kind="probs"),
    "filtered_logits": FILTERED,
    "filtered_wide": FILTERED,
    "filtered_batches": FILTERED,
    "masked": MASKED,
    "masked_wide": MASKED,
    "masked_batches": MASKED,
    "forbidden_rows": replace(
        MASKED,
        requests=(
            replace(
                MASKED.requests[0], processors=RequestProcessors(token_bitmask=np.zeros((4, 1), np.int32))
            ),
        ),
    ),
    "penalised": PENALISED,
    "penalised_wide": PENALISED,
    "penalised_batches": PENALISED,
    "chain_processed": by_rule("chain", PENALISED),
    "recursive_processed": by_rule("recursive", PENALISED),
    "match_processed": by_rule("draw_and_match", PENALISED),
    "processed_filtered": replace(
        PENALISED, requests=(replace(PENALISED.requests[0], top_k=3), *PENALISED.requests[1:])
    ),
    **{
        f"{name}{ending}": by_rule(rule, case)
        for name, rule in (("chain", "chain"), ("recursive", "recursive"), ("match", "draw_and_match"))
        for ending, case in (
            ("_rule", DYADIC),
            ("_rule_logits", BATCH),
            ("_filtered", FILTERED),
            ("_any", DYADIC),
            ("_drafts", DYADIC),
            ("_fixed", DYADIC),
        )
    },
}


@pytest.mark.parametrize("backend", ["reference", "eager"])
@pytest.mark.parametrize("law", BACKEND_LAWS, ids=lambda law: law.name)
def test_our_backends_keep_every_law_and_something_is_judged(law, backend):
    assert law.run(CASES[law.cases], get_backend(backend)) >= 1


class Wrong(ReferenceBackend):
    """Changes what goes into a right sampler, or what comes out of it."""

    name = "wrong"

    def verify(self, batch, logits, temperature, coins, depth_cap):
        given = self.before(batch, logits, temperature, coins, depth_cap)
        return self.after(super().verify(*given))

    def verify_probs(self, batch, target_probs, coins, depth_cap):
        batch, rows, _, coins, cap = self.before(batch, target_probs, None, coins, depth_cap)
        return self.after(super().verify_probs(batch, rows, coins, cap))

    def before(self, *given):
        return given

    def after(self, output):
        return output


class InclusiveTest(Wrong):
    """``<=`` where the rule says ``<``: a coin on a boundary falls below it."""

    def before(self, batch, rows, temperature, coins, cap):
        below = torch.nextafter(coins.accept, torch.tensor(-1.0)).clamp(min=0)
        return batch, rows, temperature, replace(coins, accept=below), cap


class IgnoresTemperature(Wrong):
    def before(self, batch, rows, temperature, coins, cap):
        return batch, rows, temperature if temperature is None else torch.ones_like(temperature), coins, cap


class IgnoresTheCap(Wrong):
    """Walks as deep as it can, then cuts its output to size."""

    def before(self, batch, rows, temperature, coins, cap):
        self.cap = cap
        return batch, rows, temperature, coins, 9

    def after(self, output):
        count = output.accept_token_num.clamp(max=self.cap - 1)
        return replace(output, accept_index=output.accept_index[:, : self.cap], accept_token_num=count)


class AcceptsEverything(Wrong):
    def before(self, batch, rows, temperature, coins, cap):
        return batch, rows, temperature, replace(coins, accept=torch.zeros_like(coins.accept)), cap


class AcceptsNothing(Wrong):
    def before(self, batch, rows, temperature, coins, cap):
        return batch, rows, temperature, replace(coins, accept=torch.ones_like(coins.accept)), cap


class DropsDrafts(Wrong):
    """Accepts at most one draft, whatever the tree."""

    def before(self, batch, rows, temperature, coins, cap):
        return batch, rows, temperature, coins, min(cap, 2)

    def after(self, output):
        return output


class EmitsAnyToken(Wrong):
    """The bonus moves one up: now and then to a token without mass."""

    def after(self, output):
        predicts = output.predicts.clone()
        for row, count in zip(output.accept_index.tolist(), output.accept_token_num.tolist(), strict=True):
            predicts[row[count]] = (predicts[row[count]] + 1) % 4
        return replace(output, predicts=predicts)


class OneCoinsNeighbour(Wrong):
    """Every request is decided by the first one's coins."""

    def before(self, batch, rows, temperature, coins, cap):
        same = replace(coins, accept=coins.accept[:1].expand_as(coins.accept).contiguous())
        return batch, rows, temperature, same, cap


class WritesIntoItsInput(Wrong):
    def before(self, batch, rows, temperature, coins, cap):
        rows.mul_(0.5)
        return batch, rows, temperature, coins, cap


class Stateful(Wrong):
    """Every second call sees the coins of the call before."""

    last = None

    def before(self, batch, rows, temperature, coins, cap):
        stale = self.last if self.last is not None and self.last.shape == coins.final.shape else coins.final
        type(self).last = coins.final
        return batch, rows, temperature, replace(coins, final=stale), cap


class Restless(Wrong):
    """Draws its own coins."""

    def before(self, batch, rows, temperature, coins, cap):
        fresh = replace(coins, accept=torch.rand_like(coins.accept), final=torch.rand_like(coins.final))
        return batch, rows, temperature, fresh, cap


class HidesNaN(Wrong):
    def before(self, batch, rows, temperature, coins, cap):
        return batch, rows.nan_to_num(nan=-1.0), temperature, coins, cap


class Raises(Wrong):
    def before(self, *given):
        raise ZeroDivisionError(f"{len(given)} arguments")


class WrongShape(Wrong):
    def after(self, output):
        return replace(output, predicts=output.predicts[None])


class Fickle(Wrong):
    """Accepts only where no node has two children."""

    def before(self, batch, rows, temperature, coins, cap):
        siblings = (batch.retrieve_next_sibling >= 0).any()
        accept = torch.ones_like(coins.accept) if siblings else coins.accept
        return batch, rows, temperature, replace(coins, accept=accept), cap


def coin(case, accept, final=0.6):
    return case.replace_requests([r.with_coins([accept] * len(r.tree), final) for r in case.requests])


BROKEN = [
    ("oracle-agreement", IgnoresTemperature, BATCH),
    ("oracle-agreement", AcceptsEverything, BATCH),
    ("oracle-agreement-wide", AcceptsNothing, BATCH),
    ("critical-coins", InclusiveTest, DYADIC),
    ("critical-coins-logits", IgnoresTemperature, BATCH),
    ("positive-mass", EmitsAnyToken, DYADIC),
    ("positive-mass-logits", EmitsAnyToken, ALONE),
    ("outcome-law", AcceptsEverything, DYADIC),
    ("autoregressive", AcceptsEverything, DYADIC),
    ("greedy", IgnoresTemperature, BATCH),
    ("chain", AcceptsNothing, CASES["chains"]),
    ("more-children", Fickle, coin(CASES["chains"], 0.1)),
    ("accepted-length", DropsDrafts, DYADIC),
    ("depth-cap", IgnoresTheCap, DYADIC),
    ("batch-invariance", OneCoinsNeighbour, BATCH),
    ("purity", WritesIntoItsInput, BATCH),
    ("purity", Stateful, coin(BATCH, 0.9, 0.05)),
    ("determinism", Restless, BATCH),
    ("bad-rows", HidesNaN, CASES["bad_rows"]),
    ("oracle-agreement", Raises, BATCH),
    ("oracle-agreement", WrongShape, BATCH),
]


@pytest.mark.parametrize(
    ("law", "sampler", "case"), BROKEN, ids=lambda value: getattr(value, "__name__", None)
)
def test_a_wrong_sampler_breaks_the_law_about_its_fault(law, sampler, case):
    torch.manual_seed(1)
    with pytest.raises(LawBroken, match=f"law broken: {law}\n") as caught:
        law_named(law).run(case, sampler())
    assert (caught.value.law, caught.value.backend, caught.value.case) == (law, "wrong", case)
    assert {"got:", "want:"} <= set(str(caught.value).split())


def test_a_sampler_of_probabilities_is_handed_the_softmax_and_replays_the_logits():
    def of_probs(batch, target_probs, coins, depth_cap):
        return EagerBackend().verify_probs(batch, target_probs, coins, depth_cap)

    def wrong(batch, target_probs, coins, depth_cap):
        return EagerBackend().verify_probs(batch, target_probs, coins, 1 + 0 * depth_cap)

    assert law_named("oracle-agreement").run(BATCH, FunctionBackend(of_probs, "mine")) >= 3
    with pytest.raises(LawBroken, match="probs float32") as caught:
        law_named("oracle-agreement").run(BATCH, FunctionBackend(wrong, "mine"))
    assert caught.value.case == BATCH


@pytest.mark.parametrize(
    ("traits", "skipped"),
    [
        (BackendTraits(takes_filters=True, takes_processors=PROCESSORS), set()),
        (
            BackendTraits(takes_filters=True, takes_processors=PROCESSORS, takes_probs=False),
            {"dyadic", "dyadic_small", "zero_mass", "filtered", "filtered_roots", "filtered_small"},
        ),
        (
            BackendTraits(takes_filters=True, takes_processors=PROCESSORS, reports_status=False),
            {"bad_rows", "forbidden_rows"},
        ),
        (BackendTraits(takes_filters=True, takes_processors=PROCESSORS, takes_logits=False), set()),
        (
            BackendTraits(),
            {kind for kind in CASES if kind.startswith("filtered")}
            | set(PROCESSOR_CASES)
            - {"drawn_processed", "chain_processed", "recursive_processed", "match_processed"}
            | {"forbidden_rows"},
        ),
        (
            BackendTraits(takes_filters=True, takes_processors=("bias", "bitmask")),
            {"penalised", "penalised_wide", "penalised_batches"},
        ),
    ],
)
def test_laws_apply_where_the_claim_is_made(traits, skipped):
    backend = EagerBackend()
    backend.traits = traits
    laws = [law for law in BACKEND_LAWS if law.rule == "target_only" and "bucket" in law.coins]
    assert {law.cases for law in laws if why_not(law, backend) is not None} == skipped


def test_every_law_has_a_name_a_meaning_and_cases():
    names = [law.name for law in BACKEND_LAWS] + [law.name for law in TREE_LAWS]
    assert len(names) == len(set(names))
    for law in BACKEND_LAWS:
        assert law_named(law.name) is law
        assert cases_for(law.cases) is not None
        assert law.meaning[0].islower() != law.meaning.endswith(".")
    with pytest.raises(KeyError):
        law_named("no-such-law")


# The tree laws, against conversions gone wrong.


@pytest.mark.parametrize("law", TREE_LAWS, ids=lambda law: law.name)
def test_our_conversions_keep_every_tree_law(law):
    assert tree_law_named(law.name).run([TREE, CHAIN], 6, [3, 0]) == 2


def swap_siblings(batch):
    first, sibling = batch.retrieve_next_token.clone(), batch.retrieve_next_sibling.clone()
    first[0, 0], sibling[0, 1], sibling[0, 2] = 2, -1, 1
    return replace(batch, retrieve_next_token=first, retrieve_next_sibling=sibling)


CONVERSIONS = [
    ("round-trip", "to_draft_trees", lambda real: lambda batch: real(batch)[::-1]),
    ("round-trip", "from_tree_mask", lambda real: lambda *given: real(*given)[:1] * 2),
    ("round-trip", "from_eagle", lambda _: lambda _draft: [DraftTree([-1], [0])]),
    (
        "mask-and-positions",
        "to_verify_input",
        lambda real: lambda *given: replace(real(*given), positions=real(*given).positions + 1),
    ),
    ("mask-and-positions", "tree_mask", lambda real: lambda *given: real(*given).roll(1)),
    ("malformed-refused", "DraftTree", lambda _: lambda parents, tokens: f"{parents}, {tokens}"),
]


@pytest.mark.parametrize(("law", "name", "break_it"), CONVERSIONS)
def test_a_wrong_conversion_breaks_the_law_about_its_fault(law, name, break_it, monkeypatch):
    import treeconv.tree_laws as module  # noqa: PLC0415

    monkeypatch.setattr(module, name, break_it(getattr(module, name)))
    with pytest.raises(LawBroken, match=f"law broken: {law}\n") as caught:
        tree_law_named(law).run([TREE, CHAIN], 6, [3, 0])
    assert (caught.value.law, caught.value.parameters) == (law, {"prefix_lens": [3, 0]})
    assert [r.tree for r in caught.value.case.requests] == [TREE, CHAIN]
    assert "node 0: token 0" in str(caught.value)


def test_an_unnamed_refusal_is_seen(monkeypatch):
    import treeconv.tree_laws as module  # noqa: PLC0415
    from treeconv import InvalidTree  # noqa: PLC0415

    def refuse(parents, tokens):
        raise InvalidTree(f"bad tree of {len(parents)} and {len(tokens)}")

    monkeypatch.setattr(module, "DraftTree", refuse)
    with pytest.raises(LawBroken, match="a message naming node 1"):
        tree_law_named("malformed-refused").run([TREE], 4, [0])


def test_statuses_of_a_request_that_emits_nothing_are_no_tokens():
    output = VerifyOutput(*(torch.tensor(value) for value in ([[-1]], [0], [-1], [1])))
    assert output.tokens == [[]]


@pytest.mark.parametrize(
    "traits",
    [
        BackendTraits(),
        BackendTraits(takes_probs=False),
        BackendTraits(takes_logits=False),
        BackendTraits(takes_filters=True, takes_processors=("bias", "bitmask")),
    ],
)
@pytest.mark.parametrize("law", ["bad-rows", "masks-empty", "processors-filtered", "oracle-agreement-wide"])
def test_what_a_backend_does_not_claim_is_left_out_of_its_cases(law, traits):
    """Handed over all the same, it would be refused: ``handed_over`` raises."""
    backend = EagerBackend()
    backend.traits = traits
    outcome = check_law(law_named(law), backend, max_examples=40)
    assert outcome.broken is None
    assert outcome.skipped or outcome.cases == 40
