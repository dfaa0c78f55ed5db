"""Cases made of a law's case with something rare planted in its first request: what drawn cases seldom hold.

A law judges them beside the case itself: what a fault needs is then in every case, not in one of fifty.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv.case import UNUSABLE, Request, VerifyCase, round_rows
from treeconv.processors import PROCESSORS, RequestProcessors, pack_bitmask
from treeconv.sampling import target_probs
from treeconv.tree import DraftTree

if TYPE_CHECKING:
    from treeconv.backends.base import BackendTraits

__all__ = [
    "deep_cuts",
    "each_greedy",
    "far_below",
    "forbidden_top",
    "kept_alone",
    "repeated_top",
    "ties_of_zeros",
    "unusable_roots",
    "with_settings",
    "without_token_0",
]

_LARGE = 200  # tokens: half of them are more than a block
_FLAT = 4099  # tokens of a flat row: beyond what may be sorted of it, no whole number of tiles
_DEPTHS = (300, 1100, _FLAT // 2)  # of a cut: behind short lists, behind lists of 1024, at half of the row
_DISTANCES = (520, 640)  # temperatures between zero and a row's largest logit
_HAIR = 4e-6  # relative: beyond the band of a token at a few temperatures from the largest
_WIDER = 70  # tokens that a vocabulary is made wider by: two blocks of 32 at least


def far_below(case: VerifyCase) -> list[VerifyCase]:
    """The logits moved to where float16 has no numbers: what counts is their distance.

    Of a large vocabulary the first half has no mass then, whatever it had: whole blocks of it.
    """
    if case.kind == "probs" or case.rows_dtype == "float16" or case.processor_kinds:
        return []
    subject = case.requests[0]
    rows = round_rows(subject.rows - np.float32(2**17), case.rows_dtype)
    if case.vocab_size > _LARGE:
        rows[:, : case.vocab_size // 2] = -np.inf
        rows[np.isneginf(rows).all(axis=1), -1] = 0.0
    return [case.replace_requests([replace(subject, rows=rows)])]


def deep_cuts(case: VerifyCase) -> VerifyCase:
    """A flat row alone, of which top-k, top-p and min-p keep the same hundreds of tokens: a request each.

    Its final coins draw the last token that is kept: they lie in the middle of that token's bucket.
    """
    subject = case.requests[0]
    rng = np.random.default_rng([*subject.accept.view(np.uint32).tolist(), int(subject.final * 2**24)])
    kept = int(rng.choice(_DEPTHS))
    row = np.linspace(0, -3, _FLAT, dtype=np.float32)
    row = round_rows(row[rng.permutation(_FLAT)], case.rows_dtype)
    masses = target_probs(row, 1.0)
    if case.kind == "probs":
        row = masses
    order = np.lexsort((np.arange(_FLAT), -row))
    while row[order[kept]] == row[order[kept - 1]]:  # min-p cuts between values; in 16 bits there are ties
        kept += 1
    falling = masses[order].astype(np.float64)
    sums = np.cumsum(falling) / falling.sum()
    last, before = order[kept - 1], order[:kept][order[:kept] < order[kept - 1]]
    coin = (masses[before].sum(dtype=np.float64) + masses[last] / 2) / falling[:kept].sum()
    filters: list[dict[str, Any]] = [
        {"top_k": kept},
        {"top_p": (sums[kept - 2] + sums[kept - 1]) / 2},
        {"min_p": np.sqrt(falling[kept - 1] * falling[kept]) / falling[0]},
    ]
    root = DraftTree((-1,), (0,))
    coins = {"accept": np.zeros(1, np.float32), "final": coin}
    requests = [Request(root, row[None], 1.0, **coins, **one) for one in filters]
    return replace(case, requests=tuple(requests), num_draft_tokens=None, depth_cap=None)


def kept_alone(case: VerifyCase) -> VerifyCase:
    """Requests whose filter keeps the largest token alone, which is drafted, or with one more by a hair.

    Their logits are hundreds of temperatures from zero, where ``x / T`` and powers of two near it are rounded
    by more than what float32 makes of ``(x - max) / T``: the kept mass is no longer the token's own.
    """
    subject = case.requests[0]
    temperature = np.float32(subject.temperature or 1.0)
    requests = []
    for distance in _DISTANCES:
        row = subject.rows[0] - subject.rows[0].max() + np.float32(distance) * temperature
        row = round_rows(row[None], case.rows_dtype)[0]
        top = int(row.argmax())
        share = float(target_probs(row, float(temperature))[top])
        filters: list[dict[str, Any]] = [{"top_k": 1}]
        filters += [{"top_p": p} for p in (share * (1 - _HAIR), share * (1 + _HAIR)) if p < 1]
        tree = DraftTree((-1, 0), (0, top))
        accept, rows = np.full(2, 0.5, np.float32), np.stack([row, row])
        requests += [Request(tree, rows, float(temperature), accept, 0.5, **one) for one in filters]
    return replace(case, requests=tuple(requests), num_draft_tokens=None, depth_cap=None)


def without_token_0(case: VerifyCase) -> list[VerifyCase]:
    """The root, its row without mass at token 0, which is drafted."""
    subject = case.requests[0]
    if case.vocab_size == 1 or case.processor_kinds:
        return []
    rows = np.repeat(subject.rows[:1], 2, axis=0)
    if case.kind == "probs":
        rows[:, -1] += rows[:, 0]
    elif np.isneginf(rows[0, 1:]).all():
        rows[:, -1] = 0.0
    rows[:, 0] = 0.0 if case.kind == "probs" else -np.inf
    tree = DraftTree.chain([subject.tree.token_ids[0], 0])
    request = replace(subject, tree=tree, rows=rows, accept=np.zeros(2, np.float32))
    return [replace(case, requests=(request,), num_draft_tokens=None, depth_cap=2)]


def ties_of_zeros(case: VerifyCase, subject: Request) -> VerifyCase:
    """Rows with -0.0 at the first token and 0.0 at the last, some blocks on: a tie, as all else is less."""
    rows = round_rows(subject.rows - subject.rows.max(axis=1, keepdims=True), case.rows_dtype)
    rows = np.pad(rows, ((0, 0), (0, _WIDER)), constant_values=np.float32(-1))
    rows[:, 0], rows[:, -1] = -0.0, 0.0
    return case.replace_requests([replace(subject, rows=rows)])


def unusable_roots(case: VerifyCase) -> list[VerifyCase]:
    """The whole case with a root's row of each kind that nothing can be sampled from."""
    root = case.requests[0]
    cases = []
    for value, is_whole in UNUSABLE[case.kind].values():
        rows = root.rows.copy()
        rows[0, None if is_whole else -1] = value  # the last: in the tail of the last block, often
        cases.append(replace(case, requests=(replace(root, rows=rows), *case.requests[1:])))
    return cases


def forbidden_top(case: VerifyCase) -> list[VerifyCase]:
    """Top-k 1 where the mask forbids the raw row's first: the cut is found in what the mask leaves."""
    subject = case.requests[0]
    if not case.is_filtered or subject.processors.token_bitmask is None:
        return []
    allowed = np.ones(subject.rows.shape, dtype=bool)
    allowed[np.arange(len(allowed)), subject.rows.argmax(axis=1)] = False
    held = replace(subject.processors, token_bitmask=pack_bitmask(allowed))
    return [case.replace_requests([replace(subject, top_k=1, top_p=1.0, min_p=0.0, processors=held)])]


def each_greedy(case: VerifyCase) -> list[VerifyCase]:
    """Every processed request alone, at temperature 0: the argmax is the processed row's, by any rule."""
    if case.kind != "logits":
        return []
    processed = [request for request in case.requests if request.processors != RequestProcessors()]
    return [case.replace_requests([replace(request, temperature=0.0)]) for request in processed]


def repeated_top(case: VerifyCase) -> list[VerifyCase]:
    """The root's likeliest token committed three times: its presence counts once, its frequency thrice."""
    subject = case.requests[0]
    if "penalties" not in case.processor_kinds:
        return []
    top = int(subject.rows[0].argmax())
    scale = subject.temperature or 1.0
    held = replace(
        subject.processors,
        committed_tokens=(top,) * 3,
        repetition_penalty=1.0,
        frequency_penalty=0.25 * scale,
        presence_penalty=0.5 * scale,
    )
    return [case.replace_requests([replace(subject, processors=held)])]


def with_settings(case: VerifyCase, traits: BackendTraits) -> list[VerifyCase]:
    """Every request filtered; and every request processed, in float32: as far as a backend takes that.

    Each request otherwise than the next, all by the case's rule.
    """
    made = []
    if traits.takes_filters and not case.is_filtered:
        filtered = [
            replace(request, top_k=1 + place + case.vocab_size // 2, min_p=0.25)
            for place, request in enumerate(case.requests)
        ]
        made.append(case.replace_requests(filtered))
    if traits.takes_processors and traits.takes_logits and not case.processor_kinds:
        logits = case if case.kind == "logits" else case.as_logits()
        processed = [
            replace(request, processors=_some(request, place, traits))
            for place, request in enumerate(logits.requests)
        ]
        whole = replace(logits.replace_requests(processed), rows_dtype="float32")
        claimed = traits.rows_dtypes
        made.append(whole if "float32" in claimed else whole.with_rows_dtype(claimed[0]))
    return made


def _some(request: Request, place: int, traits: BackendTraits) -> RequestProcessors:
    """A bias on every other token, the likeliest forbidden where there is another, the root's penalised."""
    size = request.rows.shape
    bias = np.zeros(size[1], np.float32)
    bias[place % 2 :: 2] = 0.5
    allowed = np.ones(size, dtype=bool)
    several = np.flatnonzero((request.rows > -np.inf).sum(axis=1) > 1)
    allowed[several, np.nan_to_num(request.rows, nan=-np.inf)[several].argmax(axis=1)] = False
    held = RequestProcessors(
        logit_bias=bias,
        token_bitmask=pack_bitmask(allowed),
        committed_tokens=request.tree.token_ids[:1],
        presence_penalty=0.25 * (1 + place),
    )
    return held.without(set(PROCESSORS) - set(traits.takes_processors))
