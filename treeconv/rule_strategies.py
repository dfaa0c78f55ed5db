"""Hypothesis strategies for calls by another rule than target-only: :mod:`treeconv.strategies`, and q.

Draft laws are often the target's own at a node (no residual is left), one-hot, without mass at the drafted
token, or hold NaN: a drafter's failure that must not reach the text.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from treeconv.case import Request, VerifyCase
from treeconv.rules import RATIO_RULES
from treeconv.sampling import target_probs
from treeconv.strategies import (
    cases_for,
    coins,
    draft_trees,
    dyadic_rows,
    give_mass_to_drafts,
    seeded_coins,
    verify_cases,
)
from treeconv.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import DrawFn, SearchStrategy
    from numpy.typing import NDArray

    from treeconv.rules import RuleName

__all__ = [
    "RULE_CASES",
    "draft_laws",
    "fixed_draft_cases",
    "late_sibling_cases",
    "rule_cases",
    "sampled_draft_cases",
    "shapes_for",
    "wide_rule_cases",
]

# Siblings are what the recursive rule is about: a star has them at once.
_SHAPES = {"chain": ["chain"], "recursive": ["star", "star", "k-ary", "random", "best-first"]}


def shapes_for(rule: RuleName) -> dict[str, Any]:
    """The shapes of trees that a rule is about, as an argument of ``verify_cases``."""
    return {"shapes": _SHAPES[rule]} if rule in _SHAPES else {}


@st.composite
def draft_laws(
    draw: DrawFn,
    request: Request,
    *,
    kind: str,
    max_bits: int = 12,
    allow_unusable: bool = True,
    likely_drafts: bool = False,
) -> NDArray[np.float32]:
    """``[n, V]`` float32: a law q for the children of each node.

    * ``kind``: "probs": multiples of ``2**-max_bits``; "logits": about half of them softmaxes.
    * ``allow_unusable``: whether NaN, infinite and negative values appear; they count as no mass.
    * ``likely_drafts``: whether drafted tokens get mass, as sampled ones have; not where q is the target's.

    Shrinks towards all mass on token 0.
    """
    nodes, vocab = request.rows.shape
    near_target: list[int] = []
    laws = np.zeros((nodes, vocab), np.float32)
    for node, row in enumerate(request.rows):
        what = draw(st.sampled_from(["drawn", "drawn", "near", "same", "bad"]), label="q")
        if what == "same" or (what == "near" and kind == "logits"):
            noise = draw(st.sampled_from([2.0**-12, 0.25, 1.0])) if what == "near" else 0.0
            near = row + np.float32(noise) * np.cos(np.arange(vocab, dtype=np.float32))
            laws[node] = target_probs(near, request.temperature) if kind == "logits" else row
            near_target.append(node)
            continue
        laws[node] = draw(dyadic_rows(1, vocab, min_bits=min(2, max_bits), max_bits=max_bits))[0]
        if what == "bad" and allow_unusable:
            value = draw(st.sampled_from([np.nan, np.inf, -1.0]))
            laws[node, list(draw(st.sets(st.integers(0, vocab - 1), min_size=1)))] = value
    if likely_drafts:
        as_drawn = laws[near_target]
        give_mass_to_drafts(request.tree, laws)
        laws[near_target] = as_drawn
    return laws


@st.composite
def rule_cases(
    draw: DrawFn, rule: RuleName, *, kind: str = "probs", allow_filters: bool = False
) -> VerifyCase:
    """Batches verified by a rule, ragged and padded; the drafted tokens need not be likely ones.

    * ``rule``: any; ``chain`` gets chains.
    * ``kind``: "probs" (dyadic laws, p and q) or "logits".
    * ``allow_filters``: whether most requests carry top-k, top-p or min-p; q is what it is without them.

    Shrinks as :func:`treeconv.strategies.verify_cases` does, q towards all mass on token 0.
    """
    nodes, vocab = (4, 6) if allow_filters else (5, 7)
    least = 4 if rule == "recursive" else 2  # two siblings, and a choice of what is left
    sizes: dict[str, Any] = {"max_requests": 2, "max_nodes": nodes, "min_vocab": least, "max_vocab": vocab}
    case = draw(verify_cases(kind=kind, allow_filters=allow_filters, **sizes, **shapes_for(rule)))
    requests = case.requests
    if rule in RATIO_RULES:
        requests = tuple(
            replace(request, draft_probs=draw(draft_laws(request, kind=kind))) for request in requests
        )
    slots = max(len(request.tree) for request in requests) + draw(st.integers(0, 2), label="padding")
    return replace(case, requests=requests, rule=rule, num_draft_tokens=slots)


@st.composite
def late_sibling_cases(draw: DrawFn) -> VerifyCase:
    """Stars whose fourth and fifth child still have something to be tested for, as drawn ones hardly have.

    q falls by halves along the siblings; p wants what comes late, so that it outlasts their rejections.

    Shrinks towards four siblings and one seed.
    """
    count = draw(st.integers(4, 6), label="siblings")
    vocab = count + draw(st.integers(1, 2), label="other tokens")
    rng = np.random.default_rng(draw(st.integers(0, 2**16), label="masses"))
    siblings = rng.permutation(vocab)[:count]
    size = count + 1
    rows, laws = np.zeros((2, size, vocab), np.float32)
    rows[:, 0] = laws[:, 0] = 1  # below a sibling nothing is at stake
    shares = np.ones(vocab)
    shares[siblings] = np.where(np.arange(count) < 3, 0.25, 4)
    rows[0] = rng.multinomial(64, shares / shares.sum()) / 64
    laws[0] = 0
    laws[0, siblings] = 0.5 ** np.minimum(np.arange(1, size), count - 1)
    tree = DraftTree((-1, *[0] * count), (0, *siblings.tolist()))
    request = Request(tree, rows, 1.0, seeded_coins(draw, size), draw(coins()), draft_probs=laws)
    return VerifyCase((request,), kind="probs", rule="recursive")


@st.composite
def wide_rule_cases(draw: DrawFn, rule: RuleName) -> VerifyCase:
    """Small trees by a rule over vocabularies of several tiles, p and q alike but for some noise.

    * ``rule``: any; ``chain`` gets chains.

    Shrinks towards one root over 17 tokens.
    """
    vocab = draw(st.sampled_from([17, 130, 257, 33, 1031]), label="vocab")
    shapes = shapes_for(rule).get("shapes", ("star", "random"))
    tree = draw(draft_trees(max_nodes=4, vocab_size=vocab, shapes=shapes))
    rng = np.random.default_rng(draw(st.integers(0, 2**16), label="rows"))
    rows = rng.standard_normal((len(tree), vocab)).astype(np.float32) * 2
    for node in range(1, len(tree)):  # drafts are likely tokens, so that walks go deep
        rows[tree.parents[node], tree.token_ids[node]] += 4
    temperature = draw(st.sampled_from([1.0, 0.5, 2.0]), label="temperature")
    request = Request(tree, rows, temperature, seeded_coins(draw, len(tree)), draw(coins()))
    if rule in RATIO_RULES:
        other = rows + rng.standard_normal(rows.shape).astype(np.float32) * draw(st.sampled_from([1, 0]))
        laws = np.stack([target_probs(row, temperature) for row in other])
        request = replace(request, draft_probs=laws)
    return VerifyCase((request,), rule=rule)


@st.composite
def sampled_draft_cases(draw: DrawFn, rule: RuleName) -> VerifyCase:
    """A draft's shape with a target and a drafter that are Markov chains: a law then samples every draft.

    * ``rule``: ``chain`` or ``recursive``.

    Few nodes and tokens, masses in sixteenths: the law enumerates drafts and coins. Shrinks towards one root.
    """
    shapes = ["chain"] if rule == "chain" else ["star", "star", "random"]
    # Two siblings want a fourth token: among three, what is left after one rejection leaves no choice.
    nodes, vocab = draw(st.sampled_from([(4, 3), (3, 4), (3, 4)]), label="sizes")
    case = draw(
        verify_cases(
            kind="probs",
            max_nodes=nodes,
            min_vocab=vocab - 1,
            max_vocab=vocab,
            max_bits=4,
            shapes=shapes,
            allow_depth_cap=False,
        )
    )
    request = case.requests[0]
    laws = draw(draft_laws(request, kind="probs", max_bits=4, allow_unusable=False))
    return replace(case, requests=(replace(request, draft_probs=laws),), rule=rule)


@st.composite
def fixed_draft_cases(draw: DrawFn, rule: RuleName) -> VerifyCase:
    """The pairing that is refused: children are q's top-k, not a sample of q, and the rule tests p / q.

    * ``rule``: ``chain`` (k = 1, one below the other) or ``recursive`` (a star).

    Shrinks towards one child that both laws are sure of.
    """
    vocab = draw(st.integers(2, 4), label="vocab")
    rows, laws = draw(dyadic_rows(4, vocab, max_bits=4)), draw(dyadic_rows(4, vocab, max_bits=4))
    count = draw(st.integers(1, min(3, vocab)), label="children")
    if rule == "chain":
        tree = DraftTree.chain([0, *(int(law.argmax()) for law in laws[:count])])
    else:
        top = np.argsort(-laws[0], kind="stable")[:count]
        tree = DraftTree((-1, *[0] * count), (0, *(int(token) for token in top)))
    request = draw(verify_cases(kind="probs", max_nodes=1)).requests[0]
    size = len(tree)
    whole = replace(
        request,
        tree=tree,
        rows=rows[:size],
        accept=np.full(size, 0.5, np.float32),
        draft_probs=laws[:size],
    )
    return VerifyCase((whole,), kind="probs", rule=rule)


@st.composite
def _now_and_then_late(draw: DrawFn) -> VerifyCase:
    """A third are :func:`late_sibling_cases`, drawn behind a usual one, since shorter ones are shrunk to."""
    usual = draw(rule_cases("recursive"))
    return draw(late_sibling_cases()) if draw(st.integers(0, 2)) == 2 else usual


def _now_and_then_wide(rule: RuleName) -> SearchStrategy[VerifyCase]:
    usual = rule_cases(rule, kind="logits")
    return st.one_of(usual, usual, usual, wide_rule_cases(rule))


def _filtered_chains() -> SearchStrategy[VerifyCase]:
    """Of probabilities, where cuts and boundaries are exact, and of logits, which all have."""
    return st.one_of(*(rule_cases("chain", kind=kind, allow_filters=True) for kind in ("probs", "logits")))


@st.composite
def _with_any_settings(draw: DrawFn, name: str, rule: RuleName) -> VerifyCase:
    """Plain calls, of probabilities, filtered ones, and processed ones, half of them filtered.

    Most logits are float32: whoever converts them first writes to a copy, and cannot be caught.
    """
    kinds = ("plain", "plain", "plain", "filtered", "filtered logits", "processed", "processed")
    kind = draw(st.sampled_from(kinds), label="settings")
    if kind == "processed":
        case = draw(cases_for(f"{name}_processed"))
    else:
        of = "logits" if kind == "filtered logits" else "probs"
        case = draw(rule_cases(rule, kind=of, allow_filters=kind != "plain"))
    if draw(st.integers(0, 2), label="as it is?"):
        case = replace(case, rows_dtype="float32")  # which holds any other's values
    return case


def _match_cases() -> SearchStrategy[VerifyCase]:
    small = verify_cases(kind="probs", max_nodes=5, max_vocab=5)
    return small.map(lambda case: replace(case, rule="draw_and_match"))


#: kind of case -> its strategy; part of what ``strategies.cases_for`` knows
RULE_CASES: dict[str, Callable[[], SearchStrategy[VerifyCase]]] = {
    "chain_rule": lambda: rule_cases("chain"),
    "chain_rule_logits": lambda: _now_and_then_wide("chain"),
    "chain_filtered": _filtered_chains,
    "chain_any": lambda: _with_any_settings("chain", "chain"),
    "chain_drafts": lambda: sampled_draft_cases("chain"),
    "chain_fixed": lambda: fixed_draft_cases("chain"),
    "recursive_rule": _now_and_then_late,
    "recursive_rule_logits": lambda: _now_and_then_wide("recursive"),
    "recursive_filtered": lambda: rule_cases("recursive", kind="logits", allow_filters=True),
    "recursive_any": lambda: _with_any_settings("recursive", "recursive"),
    "recursive_drafts": lambda: sampled_draft_cases("recursive"),
    "recursive_fixed": lambda: fixed_draft_cases("recursive"),
    "match_rule": lambda: rule_cases("draw_and_match"),
    "match_rule_logits": lambda: _now_and_then_wide("draw_and_match"),
    "match_filtered": lambda: rule_cases("draw_and_match", kind="logits", allow_filters=True),
    "match_any": lambda: _with_any_settings("match", "draw_and_match"),
    "match_drafts": _match_cases,
}
