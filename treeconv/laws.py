"""The laws a lossless tree verifier keeps, each one function, shared by pytest, the CLI and the fuzzer.

A law takes a case and a backend, calls the backend, and raises :class:`LawBroken` with a message that a
person who never saw this code understands. It returns how many decisions it judged.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from treeconv import _filter_checks as filter_check
from treeconv import _fresh_coin_checks as fresh_check
from treeconv import _law_checks as check
from treeconv import _processor_checks as processor_check
from treeconv import _rng_checks as rng_check
from treeconv import _rule_checks as rule_check
from treeconv import _sampled_checks as sampled_check
from treeconv._drive import as_claimed, as_handed
from treeconv.judge import Violation, explain
from treeconv.processors import PROCESSORS

if TYPE_CHECKING:
    from collections.abc import Callable

    from treeconv.backends.base import Backend, CoinUse
    from treeconv.case import VerifyCase
    from treeconv.processors import ProcessorKind
    from treeconv.rules import RuleName

__all__ = ["BACKEND_LAWS", "Law", "law_named", "why_not"]


@dataclass(frozen=True)
class Law:
    """A law about a verifier.

    Args:
        name: what failures and tables call it.

        meaning: one line for a person who never read the design.

        check: ``(case, backend, device) -> decisions judged``; raises :class:`Violation`.

        cases: the kind of case it is about, a key of ``strategies.cases_for``.

        coins: the verifiers it is about, by ``BackendTraits.coins``: most laws are stated in buckets of coins
            that are handed over.

        rule: the acceptance rule it is about.
    """

    name: str
    meaning: str
    check: Callable[[VerifyCase, Backend, str], int]
    cases: str
    coins: tuple[CoinUse, ...] = ("bucket",)
    rule: RuleName = "target_only"

    def run(self, case: VerifyCase, backend: Backend, device: str = "cpu") -> int:
        """Judge one case, without the options that the backend does not claim.

        Returns:
            How many decisions were judged; 0 where the case has nothing for this law.

        Raises:
            LawBroken: the readable failure.
        """
        claimed = as_claimed(case, backend)
        handed = as_handed(claimed, backend)
        try:
            return self.check(handed, backend, device)
        except Violation as violation:
            error = explain(self.name, self.meaning, backend.name, handed, violation)
            error.case = claimed  # what a replay starts from
            raise error from None


_GIVEN: tuple[CoinUse, ...] = ("bucket", "own")  # coins are given, whatever is done with them
_ANY: tuple[CoinUse, ...] = ("bucket", "own", "seeds", "generator")
_OWN: tuple[CoinUse, ...] = (
    "own",
    "seeds",
    "generator",
)  # what has no buckets that its settings could be seen by
_DYADIC = (
    "dyadic",
    "dyadic_small",
    "zero_mass",
    "filtered",
    "filtered_roots",
    "filtered_small",
    "chain_rule",
    "chain_drafts",
    "chain_fixed",
    "recursive_rule",
    "recursive_drafts",
    "recursive_fixed",
    "match_rule",
    "match_drafts",
)
_FILTERED = (
    "filtered",
    "filtered_roots",
    "filtered_small",
    "filtered_logits",
    "filtered_batches",
    "filtered_wide",
    "drawn_filtered",
    "processed_filtered",
    "chain_filtered",
    "recursive_filtered",
    "match_filtered",
)
_PROCESSED: dict[str, tuple[ProcessorKind, ...]] = {
    **dict.fromkeys(
        ("masked", "masked_batches", "masked_wide", "forbidden_rows", "processed_filtered"),
        ("bias", "bitmask"),
    ),
    **dict.fromkeys(("penalised", "penalised_batches", "penalised_wide"), PROCESSORS),
    **dict.fromkeys(("chain_processed", "recursive_processed", "match_processed"), PROCESSORS),
}


def why_not(law: Law, backend: Backend) -> str | None:
    """Why a law does not apply to a backend, or None where it does."""
    if backend.traits.coins not in law.coins:
        return {
            "bucket": "about verifiers that draw their own coins",
            "own": "stated in buckets of coins, which the backend spends in a way of its own",
        }.get(backend.traits.coins, "stated in coins that are given, but the backend draws its own")
    if law.rule not in backend.traits.rules:
        return f"the backend does not claim the rule {law.rule}"
    if law.cases in _FILTERED and not backend.traits.takes_filters:
        return "the backend takes no filters (top-k, top-p, min-p)"
    if law.cases == "drawn_processed" and not backend.traits.takes_processors:
        return "the backend takes no processors (bias, bitmask, penalties)"
    if missing := set(_PROCESSED.get(law.cases, ())) - set(backend.traits.takes_processors):
        return f"the backend does not take these processors: {', '.join(sorted(missing))}"
    if law.cases in _DYADIC and not backend.traits.takes_probs:
        return "needs the probability interface (verify_probs), which dyadic laws are stated in"
    if law.cases in ("bad_rows", "forbidden_rows") and not backend.traits.reports_status:
        return "the backend does not claim to report unusable rows"
    return None


BACKEND_LAWS: tuple[Law, ...] = (
    Law(
        "oracle-agreement",
        "on every coin the verifier decides as the exact oracle does",
        check.oracle_agreement,
        "logits",
    ),
    Law(
        "oracle-agreement-wide",
        "the same over trees of up to 70 nodes and vocabularies of thousands",
        check.oracle_agreement,
        "wide",
    ),
    Law(
        "critical-coins",
        "at each bucket boundary and its float neighbours the decision flips exactly where the oracle says",
        check.critical_coins,
        "dyadic",
    ),
    Law(
        "critical-coins-logits",
        "from logits, decisions flip within the ambiguity band of float32 around each exact boundary",
        check.critical_coins,
        "logits",
    ),
    Law(
        "positive-mass",
        "an emitted token has p > 0 for every coin in [0, 1]",
        check.positive_mass,
        "zero_mass",
        _GIVEN,
    ),
    Law(
        "positive-mass-logits",
        "a token with logit -inf is never emitted, for every coin in [0, 1]",
        check.positive_mass,
        "zero_mass_logits",
        _GIVEN,
    ),
    Law(
        "outcome-law",
        "the text starts with s exactly as often as the target's own law says, for every s it can show",
        check.outcome_law,
        "dyadic",
    ),
    Law(
        "autoregressive",
        "two chained verification steps write text with the law of plain sampling, whatever was drafted",
        check.autoregressive,
        "dyadic_small",
    ),
    Law(
        "greedy",
        "temperature 0 is the lowest-index argmax whatever the coins, and tiny temperatures approach it",
        check.greedy,
        "logits",
        _GIVEN,
    ),
    Law("chain", "a tree of width 1 is a linear draft: keep tokens while coin < p", check.chain, "chains"),
    Law(
        "more-children",
        "one more child never loses an acceptance under the same coins",
        check.more_children,
        "logits",
    ),
    Law(
        "accepted-length",
        "the expected number of accepted drafts is the sum of the masses of the paths to the nodes",
        check.accepted_length,
        "dyadic",
    ),
    Law(
        "depth-cap",
        "at most depth_cap - 1 drafts are accepted, and at the cap the bonus comes from the full law",
        check.depth_cap,
        "dyadic",
    ),
    Law(
        "batch-invariance",
        "a request decides alike alone, padded, permuted and batched, whatever its neighbours' temperatures",
        check.batch_invariance,
        "batches",
    ),
    Law(
        "purity",
        "inputs are not written to, and nothing depends on what an earlier call left in a buffer",
        check.purity,
        "batches",
    ),
    Law("determinism", "the same call gives the same bits", check.determinism, "batches", _GIVEN),
    Law(
        "bad-rows",
        "a visited row of NaN, +inf or only -inf is reported for its own request, and only there",
        check.bad_rows,
        "bad_rows",
    ),
    Law(
        "sampled-law",
        "over coins that are drawn, not given, each next token comes as often as the target's law says",
        rng_check.sampled_law,
        "drawn",
        _ANY,
    ),
    Law(
        "sampled-law-logits",
        "the same from logits, at every temperature",
        rng_check.sampled_law,
        "logits",
        _ANY,
    ),
    Law(
        "sampled-law-filters",
        "the same with top-k, top-p and min-p, each request its own, of verifiers that draw their own coins",
        sampled_check.sampled_settings,
        "drawn_filtered",
        _OWN,
    ),
    Law(
        "sampled-law-processors",
        "the same with bias, bitmask and penalties, filtered or not",
        sampled_check.sampled_settings,
        "drawn_processed",
        _OWN,
    ),
    Law(
        "fresh-coins",
        "coins of other seeds, steps, calls and requests, and of one text, are drawn independently",
        fresh_check.fresh_coins,
        "drawn",
        _ANY,
    ),
    Law(
        "seeded-text",
        "a seed and a position fix a request's text, in any batch, at any place, under any padding",
        rng_check.seeded_text,
        "drawn",
        _ANY,
    ),
    Law(
        "ranks-agree",
        "every rank draws the same coins from the same seed, and so commits the same tokens",
        rng_check.ranks_agree,
        "drawn",
        _ANY,
    ),
    Law(
        "critical-cuts",
        "where a filter's cut flips, and just beside, exactly the right tokens are kept, in both orders",
        filter_check.critical_cuts,
        "filtered_roots",
    ),
    Law(
        "filters",
        "top-k, top-p and min-p keep exactly the tokens they must; drafts and bonus follow the law left",
        filter_check.filters,
        "filtered",
    ),
    Law(
        "filters-logits",
        "from logits, filters keep what the exact law keeps, but where float32 cannot tell a cut",
        filter_check.filters,
        "filtered_logits",
    ),
    Law(
        "filters-wide",
        "the same over trees of up to 70 nodes and vocabularies of thousands, cuts behind hundreds of tokens",
        filter_check.wide,
        "filtered_wide",
    ),
    Law(
        "filter-parity",
        "behind any draft the filtered law is the one that plain sampling has with the same filters",
        filter_check.parity,
        "filtered_small",
    ),
    Law(
        "filters-batch",
        "a filtered request decides alike alone, padded, permuted, batched, whatever its neighbours' filters",
        check.batch_invariance,
        "filtered_batches",
    ),
    Law(
        "filters-purity",
        "filters are not applied in place: rows and filters come back as they were",
        filter_check.purity,
        "filtered_batches",
    ),
    Law(
        "masks",
        "a token forbidden after a node has no mass there, a biased one its biased mass: drafts and bonus",
        processor_check.processed,
        "masked",
    ),
    Law(
        "masks-wide",
        "the same over trees of up to 70 nodes and vocabularies of thousands, no multiples of 32",
        check.oracle_agreement,
        "masked_wide",
    ),
    Law(
        "masks-empty",
        "a visited row that processors leave nothing of, or spoil, says so in its own request's status only",
        check.bad_rows,
        "forbidden_rows",
    ),
    Law(
        "masks-batch",
        "a request decides alike alone, padded, permuted, batched, whatever its neighbours' bias and bitmask",
        check.batch_invariance,
        "masked_batches",
    ),
    Law(
        "masks-purity",
        "bias and bitmask are not applied in place: rows, bias and bitmask come back as they were",
        check.purity,
        "masked_batches",
    ),
    Law(
        "penalties",
        "a node has seen the committed text and the path to it, each token as often as it is there",
        processor_check.processed,
        "penalised",
    ),
    Law(
        "penalties-wide",
        "the same over trees of up to 70 nodes and vocabularies of thousands",
        check.oracle_agreement,
        "penalised_wide",
    ),
    Law(
        "penalties-batch",
        "a penalised request decides alike alone, padded, permuted, batched, whatever its neighbours' text",
        check.batch_invariance,
        "penalised_batches",
    ),
    Law(
        "penalties-purity",
        "penalties are not applied in place: rows, committed text and penalties come back as they were",
        check.purity,
        "penalised_batches",
    ),
    Law(
        "commit-parity",
        "a drafted token counts like a committed one: below a node the walk is that of a step from there",
        processor_check.commit_parity,
        "penalised",
    ),
    Law(
        "processors-filtered",
        "temperature, top-k, top-p and min-p come after bias, bitmask and penalties",
        processor_check.processed,
        "processed_filtered",
    ),
    Law(
        "most-accepted",
        "on a fixed tree no other exact rule accepts more drafts than target-only",
        rule_check.most_accepted,
        "dyadic_small",
    ),
    Law(
        "chain-rule",
        "a child sampled from q is kept iff coin * q < p, else the bonus comes from relu(p - q)",
        rule_check.decisions,
        "chain_rule",
        rule="chain",
    ),
    Law(
        "chain-rule-logits",
        "from logits, the same within the ambiguity band of float32",
        rule_check.decisions,
        "chain_rule_logits",
        rule="chain",
    ),
    Law(
        "chain-rule-filters",
        "the same with top-k, top-p and min-p: children are tested, and the bonus drawn, by the law left",
        rule_check.decisions,
        "chain_filtered",
        rule="chain",
    ),
    Law(
        "chain-rule-processors",
        "the same with bias, bitmask and penalties: p is the processed law in test and residual, q as given",
        rule_check.decisions,
        "chain_processed",
        rule="chain",
    ),
    Law(
        "chain-rule-purity",
        "rows, draft laws, coins, filters and processors are not written to; a call decides alike again",
        rule_check.purity,
        "chain_any",
        rule="chain",
    ),
    Law(
        "chain-rule-outcome",
        "over all drafts sampled from q and all coins the next token has the target's law",
        rule_check.outcome_over_drafts,
        "chain_drafts",
        rule="chain",
    ),
    Law(
        "chain-on-fixed-draft",
        "forced on a fixed draft min(1, p/q) shows its exact bias: why that pairing is refused",
        rule_check.fixed_draft,
        "chain_fixed",
        rule="chain",
    ),
    Law(
        "chain-accepted-length",
        "a sampled chain keeps the sum over drafts of prod min(p, q) tokens on average",
        rule_check.accepted_over_drafts,
        "chain_drafts",
        rule="chain",
    ),
    Law(
        "recursive-rule",
        "siblings sampled without replacement are tested in turn, p and q renormalised after each",
        rule_check.decisions,
        "recursive_rule",
        rule="recursive",
    ),
    Law(
        "recursive-rule-logits",
        "from logits, the same within the ambiguity band of float32",
        rule_check.decisions,
        "recursive_rule_logits",
        rule="recursive",
    ),
    Law(
        "recursive-rule-filters",
        "the same with top-k, top-p and min-p: children are tested, and the bonus drawn, by the law left",
        rule_check.decisions,
        "recursive_filtered",
        rule="recursive",
    ),
    Law(
        "recursive-rule-processors",
        "the same with bias, bitmask and penalties: p is the processed law in test and residual, q as given",
        rule_check.decisions,
        "recursive_processed",
        rule="recursive",
    ),
    Law(
        "recursive-rule-purity",
        "rows, draft laws, coins, filters and processors are not written to; a call decides alike again",
        rule_check.purity,
        "recursive_any",
        rule="recursive",
    ),
    Law(
        "recursive-rule-outcome",
        "over all drafts sampled from q and all coins the next token has the target's law",
        rule_check.outcome_over_drafts,
        "recursive_drafts",
        rule="recursive",
    ),
    Law(
        "recursive-on-fixed-draft",
        "forced on a fixed draft min(1, p/q) shows its exact bias: why that pairing is refused",
        rule_check.fixed_draft,
        "recursive_fixed",
        rule="recursive",
    ),
    Law(
        "match-rule",
        "each visited node's own coin draws from its law, and a drafted token is followed",
        rule_check.decisions,
        "match_rule",
        rule="draw_and_match",
    ),
    Law(
        "match-rule-logits",
        "from logits, the same within the ambiguity band of float32",
        rule_check.decisions,
        "match_rule_logits",
        rule="draw_and_match",
    ),
    Law(
        "match-rule-filters",
        "the same with top-k, top-p and min-p: children are tested, and the bonus drawn, by the law left",
        rule_check.decisions,
        "match_filtered",
        rule="draw_and_match",
    ),
    Law(
        "match-rule-processors",
        "the same with bias, bitmask and penalties, at temperature 0 too: the processed row decides",
        rule_check.decisions,
        "match_processed",
        rule="draw_and_match",
    ),
    Law(
        "match-rule-purity",
        "rows, draft laws, coins, filters and processors are not written to; a call decides alike again",
        rule_check.purity,
        "match_any",
        rule="draw_and_match",
    ),
    Law(
        "match-rule-outcome",
        "drawing and matching, the text has the target's law whatever was drafted",
        check.outcome_law,
        "match_drafts",
        rule="draw_and_match",
    ),
    Law(
        "chain-rule-sampled",
        "over drawn coins a fixed chain goes on as min(1, p/q) and the residual say, whatever is set",
        sampled_check.sampled_settings,
        "chain_any",
        _OWN,
        rule="chain",
    ),
    Law(
        "recursive-rule-sampled",
        "over coins that are drawn siblings are kept as p/q, renormalised in turn, says, with any settings",
        sampled_check.sampled_settings,
        "recursive_any",
        _OWN,
        rule="recursive",
    ),
    Law(
        "match-rule-sampled",
        "over coins that are drawn each next token has the target's law, with any settings",
        sampled_check.sampled_settings,
        "match_any",
        _OWN,
        rule="draw_and_match",
    ),
)


def law_named(name: str) -> Law:
    """The backend law of that name.

    Raises:
        KeyError: there is none.
    """
    return {law.name: law for law in BACKEND_LAWS}[name]
