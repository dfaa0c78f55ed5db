"""Hypothesis strategies for calls with processors: the rare in masks, biases, penalties and texts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from treeconv.case import round_rows
from treeconv.filters import FILTER_ORDERS
from treeconv.processors import PENALTIES, PROCESSORS, RequestProcessors, pack_bitmask
from treeconv.rule_strategies import draft_laws, shapes_for
from treeconv.rules import RATIO_RULES
from treeconv.sampling import processed_logits
from treeconv.strategies import filters_for, verify_cases
from treeconv.wide_strategies import wide_cases

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from hypothesis.strategies import DrawFn, SearchStrategy
    from numpy.typing import NDArray

    from treeconv.case import Request, VerifyCase
    from treeconv.processors import ProcessorKind
    from treeconv.rules import RuleName
    from treeconv.tree import DraftTree

__all__ = ["PROCESSOR_CASES", "processed_cases", "processors_for"]

# Mostly multiples of 1/4, so that most processed logits are exact in float32.
_BIASES = (1.0, -1.0, 0.5, 2.0, -0.25, 100.0, -100.0, -np.inf, 1e8, 0.1)
_UNUSABLE = (np.nan, np.inf)
_REPETITIONS = (2.0, 0.5, 4.0, 2.0, 1.25)
_CALM = (1.0, 1.0, 0.5, 2.0)  # temperatures at which calm logits are neither one token's nor everybody's
_MANY = 300  # occurrences of one token: more than a byte counts
_AMOUNTS = (0.5, 1.0, -0.5, 2.0, -2.0, 0.25, 1.5, -1.0, 0.75, 0.1)


def _calm(tree: DraftTree, rows: NDArray[np.float32], *, likely_drafts: bool) -> NDArray[np.float32]:
    """Rows as multiples of 1/4 in [-2, 2], drafts 1 above if so wanted: nothing crowds out the rest.

    So walks go deep, and what was processed wrongly further down shows. Many tie.
    """
    calm = (np.round(np.clip(rows, -16, 16) / 2) / 4).astype(np.float32)
    if likely_drafts:
        calm[list(tree.parents[1:]), list(tree.token_ids[1:])] += 1
    return calm


def _some_token_is_left(
    rows: NDArray[np.float32], held: dict[str, Any], allowed: NDArray[np.bool_] | None
) -> None:
    """Take back what leaves no token at a node: rows without any are another law's business."""
    bias = held.get("logit_bias", np.zeros(rows.shape[1], np.float32))
    usable = (rows > -np.inf) & (bias > -np.inf)
    if not usable.any(axis=1).all():
        bias[bias == -np.inf] = -1
        usable = rows > -np.inf
    if allowed is not None:
        for node in np.flatnonzero(~(usable & allowed).any(axis=1)):
            allowed[node, usable[node].argmax()] = True


@st.composite
def processors_for(
    draw: DrawFn,
    tree: DraftTree,
    rows: NDArray[np.float32],
    kinds: Sequence[ProcessorKind] = PROCESSORS,
    *,
    allow_empty: bool = False,
) -> RequestProcessors:
    """The processors of a request with this tree and these logits.

    Drafts' tokens are forbidden, biased and committed most often. Now and then a forbidden token's logit is
    set to NaN in ``rows``, and a logit is moved so that the penalties make a tie.

    * ``kinds``: those that may be on, the last of them most often.
    * ``allow_empty``: whether a node may forbid every token, and a bias hold NaN or +inf.

    Shrinks towards no processors at all.
    """
    nodes, vocab = rows.shape
    subsets = [[], *([kind] for kind in kinds), [kinds[-1]], *[list(kinds)] * 3]
    on = draw(st.sampled_from(subsets), label="processors")
    drafted = sorted(set(tree.token_ids))
    a_token = st.one_of(st.sampled_from(drafted), st.integers(0, vocab - 1))
    held: dict[str, Any] = {}
    allowed = None
    if "penalties" in on:
        for name, values in (
            ("frequency_penalty", _AMOUNTS),
            ("presence_penalty", _AMOUNTS),
            ("repetition_penalty", _REPETITIONS),
        ):
            if draw(st.integers(0, 2), label=f"{name}?"):
                held[name] = draw(st.sampled_from(values), label=name)
        outside = st.sampled_from([vocab, 2**31])
        committed = st.lists(st.one_of(a_token, a_token, a_token, outside), max_size=5)
        text = draw(committed, label="committed")
        place = draw(st.sampled_from([None, 0, 0, len(text) // 2, len(text)]), label="padding")
        if place is not None:  # -1 is padding wherever it is
            text.insert(place, -1)
        held["committed_tokens"] = text
    if "bias" in on:
        bias = np.zeros(vocab, np.float32)
        if draw(st.integers(0, 3), label="all sunk?") == 3:
            bias[:] = -(2.0**20)  # far below any finite stand-in for -inf, and calm logits stay exact
        else:
            biased = st.lists(st.tuples(a_token, st.sampled_from(_BIASES)), min_size=1, max_size=4)
            for token, value in draw(biased, label="bias"):
                bias[token] = value
        if allow_empty and draw(st.integers(0, 2), label="unusable bias?") == 2:
            bias[draw(a_token)] = draw(st.sampled_from(_UNUSABLE), label="unusable bias")
        held["logit_bias"] = bias
    if "bitmask" in on:
        allowed = np.ones((nodes, vocab), bool)
        for node in range(nodes):
            usual = ["all", "not", "not", "not", "only"]
            what = draw(st.sampled_from([*usual, "none"] if allow_empty else usual))
            if what == "not":
                likeliest = int(np.nan_to_num(rows[node], nan=-np.inf, neginf=-np.inf).argmax())
                a_choice = st.one_of(a_token, st.just(likeliest))  # what filters would have kept
                allowed[node, draw(st.lists(a_choice, min_size=1, max_size=3))] = False
            elif what == "only":
                allowed[node] = False
                allowed[node, draw(st.lists(a_token, min_size=1, max_size=3))] = True
            elif what == "none":
                allowed[node] = False
    if not allow_empty:
        _some_token_is_left(rows, held, allowed)
    if allowed is not None:
        held["token_bitmask"] = pack_bitmask(allowed, rest=draw(st.booleans(), label="bits behind V"))
        if draw(st.integers(0, 3), label="NaN where forbidden?") == 3:
            rows[~allowed] = np.nan
    if "penalties" in on and vocab > 1 and draw(st.integers(0, 3), label="tie?") == 3:
        # A seen token one penalty above another: level once the penalties are paid.
        node = draw(st.integers(0, nodes - 1))
        seen, other = tree.token_ids[node], draw(st.integers(0, vocab - 1))
        if seen != other and np.isfinite(rows[node, other]) and not np.isnan(rows[node, seen]):
            cost = held.get("frequency_penalty", 0.0) + held.get("presence_penalty", 0.0)
            rows[node, seen] = np.float32(np.round(rows[node, other] * 4) / 4 + cost)
            rows[node, other] = np.round(rows[node, other] * 4) / 4
    return RequestProcessors(**held)


@st.composite
def processed_cases(
    draw: DrawFn,
    /,
    kinds: Sequence[ProcessorKind] = PROCESSORS,
    *,
    allow_empty: bool = False,
    allow_filters: bool = False,
    max_nodes: int = 6,
    min_vocab: int = 2,
    **calls: Any,
) -> VerifyCase:
    """Calls of which most requests carry processors.

    * ``kinds``: those that may be on, the last of them most often.
    * ``allow_empty``: whether a node may forbid every token, and a bias hold NaN or +inf.
    * ``allow_filters``: whether most requests carry filters too, made for their processed rows.
    * the rest: as :func:`treeconv.strategies.verify_cases` takes it.

    Three in four requests have calm logits, and more than usual are greedy. Shrinks as ``verify_cases`` does,
    and towards no processors.
    """
    case = draw(verify_cases(max_nodes=max_nodes, min_vocab=min_vocab, **calls))
    requests = []
    for request in case.requests:
        rows = request.rows.copy()
        if draw(st.integers(0, 3), label="calm logits?") < 3:
            rows = _calm(request.tree, rows, likely_drafts=draw(st.booleans(), label="likely drafts?"))
        temperature = 0.0 if draw(st.integers(0, 5), label="greedy?") == 5 else request.temperature
        held = draw(processors_for(request.tree, rows, kinds, allow_empty=allow_empty))
        rows = round_rows(rows, case.rows_dtype)
        carries = replace(request, rows=rows, temperature=temperature, processors=held)
        requests.append(draw(_filtered(carries)) if allow_filters else carries)
    order = draw(st.sampled_from(FILTER_ORDERS), label="order") if allow_filters else case.filter_order
    return replace(case, requests=tuple(requests), filter_order=order)


@st.composite
def _filtered(draw: DrawFn, request: Request) -> Request:
    """The request with filters whose cuts lie where its processed rows have theirs.

    At a tiny temperature one token is left before any filter, at a huge one all are alike.
    """
    temperature = draw(st.sampled_from([*_CALM, request.temperature]), label="temperature")
    request = replace(request, temperature=temperature)
    rows = _plain(request, processed=True).rows
    return replace(request, **draw(filters_for(rows, temperature)))


@st.composite
def _wide_cases(draw: DrawFn, kinds: Collection[ProcessorKind]) -> VerifyCase:
    """Wide calls, their processors from one drawn seed: thousands of drawn numbers would be slow."""
    case = draw(wide_cases())
    rng = np.random.default_rng(draw(st.integers(0, 2**16), label="processors"))
    requests = []
    for request in case.requests:
        rows = request.rows.copy()
        rows[:, 0] = np.where(rows[:, 0] == -np.inf, 0, rows[:, 0])  # no processor forbids it
        held = _seeded(rng, request.tree, rows, kinds)
        requests.append(replace(request, rows=rows, processors=held))
    return replace(case, requests=tuple(requests))


def _seeded(
    rng: np.random.Generator,
    tree: DraftTree,
    rows: NDArray[np.float32],
    kinds: Collection[ProcessorKind],
) -> RequestProcessors:
    """Processors over a large vocabulary, drafts mostly allowed and often committed.

    Half of the texts hold a likely token more often than a byte counts, at penalties so small that each
    occurrence still tells; half have padding before, in and behind them.
    """
    vocab_size = rows.shape[1]
    held: dict[str, Any] = {}
    if "bias" in kinds:
        bias = rng.choice(np.array([0, 0, 0, 0.5, -1, 2, -np.inf], np.float32), vocab_size)
        bias[0] = 0  # some token is left
        held["logit_bias"] = bias
    if "bitmask" in kinds:
        shares = rng.choice([0.02, 0.5, 0.9, 1.0], (len(tree), 1))
        allowed = rng.random((len(tree), vocab_size)) < shares
        for node in range(1, len(tree)):  # most drafts are allowed, so that walks go deep
            allowed[tree.parents[node], tree.token_ids[node]] = rng.random() < 0.8
        allowed[:, 0] = True
        held["token_bitmask"] = pack_bitmask(allowed, rest=bool(rng.integers(2)))
    if "penalties" in kinds:
        held["repetition_penalty"] = float(rng.choice([1.0, 2.0, 1.25]))
        held["frequency_penalty"] = float(rng.choice([0.5, 0.0, -0.25, 1.0]))
        held["presence_penalty"] = float(rng.choice([0.0, 0.5, -0.5]))
        pool = [*tree.token_ids[:4], *rng.integers(0, vocab_size, 8).tolist(), *tree.token_ids]
        committed = rng.choice(pool, rng.choice([40, 300]))  # beyond any window, some tokens dozens of times
        if rng.random() < 0.5:
            held["repetition_penalty"] = 1.0
            held["frequency_penalty"] = float(rng.choice([2.0**-7, -(2.0**-7), 2.0**-6]))
            likely = int(rows[0].argmax())
            committed = np.concatenate([committed, np.full(_MANY, likely)])
        if rng.random() < 0.5:
            committed = np.insert(committed, [0, *rng.integers(0, committed.size, 2), committed.size], -1)
        held["committed_tokens"] = committed.tolist()
    return RequestProcessors(**held)


def _plain(request: Request, *, processed: bool) -> Request:
    """Its rows alone, processed or raw (NaN, +inf without mass), as those of a request without processors."""
    held, rows = request.processors, request.rows
    if processed:
        mask = held.token_bitmask
        paths = map(request.tree.path, range(len(request.tree)))
        rows = np.stack(
            [
                processed_logits(
                    row,
                    [*held.committed_tokens, *(request.tree.token_ids[node] for node in path)],
                    **{name: getattr(held, name) for name in PENALTIES},
                    logit_bias=held.logit_bias,
                    token_bitmask=None if mask is None else mask[path[-1]],
                )
                for row, path in zip(rows, paths, strict=True)
            ]
        )
    rows = np.where(rows < np.inf, rows, -np.inf)  # nor NaN
    rows[rows.max(axis=1) == -np.inf, 0] = 0
    return replace(request, rows=rows, processors=RequestProcessors())


@st.composite
def _by_rule(draw: DrawFn, /, rule: RuleName, **sizes: Any) -> VerifyCase:
    """Processed calls verified by another rule than target-only, half of them filtered as well.

    q, where the rule reads one, is the drafter's own: near the processed law, or near the raw one, of a
    drafter that knows no processors; or far from both.
    """
    case = draw(processed_cases(**sizes, **shapes_for(rule)))
    is_filtered = draw(st.booleans(), label="filtered?")
    requests = [draw(_drafted(request, rule, is_filtered=is_filtered)) for request in case.requests]
    order = draw(st.sampled_from(FILTER_ORDERS), label="order") if is_filtered else FILTER_ORDERS[0]
    return replace(case, requests=tuple(requests), rule=rule, filter_order=order)


@st.composite
def _drafted(draw: DrawFn, request: Request, rule: RuleName, *, is_filtered: bool) -> Request:
    # At a tiny or a huge one calm logits are one token's, or everybody's: p / q then has little to show.
    temperature = draw(st.sampled_from([*_CALM, 0.0, 0.0, request.temperature]), label="temperature")
    request = replace(request, temperature=temperature)
    if is_filtered:
        request = draw(_filtered(request))
        temperature = request.temperature
    if rule not in RATIO_RULES:
        return request
    knows = draw(st.sampled_from([True, True, False]), label="drafter knows the processors?")
    likely = draw(st.booleans(), label="likely drafts?")
    known = _plain(request, processed=knows)
    return replace(request, draft_probs=draw(draft_laws(known, kind="logits", likely_drafts=likely)))


_CLOSE: dict[str, Any] = {"min_vocab": 4, "max_vocab": 5, "allow_depth_cap": False}
_MASKS: tuple[ProcessorKind, ...] = ("bias", "bitmask")

#: kind of case -> its strategy; part of what ``strategies.cases_for`` knows
PROCESSOR_CASES: dict[str, Callable[[], SearchStrategy[VerifyCase]]] = {
    "masked": lambda: processed_cases(_MASKS, max_requests=2),
    "masked_batches": lambda: processed_cases(_MASKS, min_requests=2, max_requests=4),
    "masked_wide": lambda: _wide_cases(_MASKS),
    "penalised": lambda: processed_cases(max_requests=2),
    "penalised_batches": lambda: processed_cases(min_requests=2, max_requests=4),
    "penalised_wide": lambda: _wide_cases(PROCESSORS),
    "drawn_processed": lambda: processed_cases(
        allow_filters=True, max_requests=2, max_nodes=4, max_vocab=7, allow_depth_cap=False
    ),
    "processed_filtered": lambda: processed_cases(
        allow_filters=True, max_requests=2, max_nodes=4, max_vocab=7
    ),
    "chain_processed": lambda: _by_rule("chain", max_requests=2, min_nodes=2, max_nodes=3, **_CLOSE),
    "recursive_processed": lambda: _by_rule("recursive", max_requests=2, min_nodes=3, max_nodes=4, **_CLOSE),
    "match_processed": lambda: _by_rule(
        "draw_and_match", max_requests=2, min_nodes=2, max_nodes=4, max_vocab=6
    ),
}
