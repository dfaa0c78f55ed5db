"""Hypothesis strategies for calls that kernels cut up: siblings beyond a warp, vocabularies of many tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from treeconv.case import Request, VerifyCase, round_rows
from treeconv.filters import FILTER_ORDERS
from treeconv.sampling import target_probs
from treeconv.strategies import coins, draft_trees, filters_for, seeded_coins, temperatures

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["WIDE_CASES", "wide_cases"]

_TILES = (128, 1024)  # tokens that a kernel may take at once


@st.composite
def wide_cases(
    draw: DrawFn, *, max_requests: int = 2, allow_filters: bool = False, allow_probs: bool = False
) -> VerifyCase:
    """Trees of up to 70 nodes (siblings beyond a warp) over vocabularies beyond any block size.

    * ``max_requests``: the first has up to 70 nodes, others up to 8.
    * ``allow_filters``: whether most requests carry top-k, top-p or min-p.
    * ``allow_probs``: whether half of the calls are of probabilities: float32 softmaxes, whose sums miss 1 by
      a few roundings.

    Some cap the accepted path, at up to 70 slots. Whole numbers of tiles, and one token over; in 16 bits rows
    are full of ties. A grammar may have masked the first tiles, or all but a few tokens. The rows come from
    one drawn seed: thousands of drawn numbers would be slow, and shrink no better.
    """
    vocab = draw(st.sampled_from([16, 257, 32, 1031, 256, 4099]), label="vocab")
    dtype = draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"]), label="dtype")
    order = draw(st.sampled_from(FILTER_ORDERS), label="order") if allow_filters else FILTER_ORDERS[0]
    shapes = ["star", "chain", "random", "best-first"]
    is_of_probs = allow_probs and draw(st.booleans(), label="probabilities?")
    requests = []
    for index in range(draw(st.integers(1, max_requests), label="requests")):
        tree = draw(draft_trees(max_nodes=8 if index else 70, vocab_size=vocab, shapes=shapes))
        rng = np.random.default_rng(draw(st.integers(0, 2**16), label="rows"))
        peakedness = draw(st.sampled_from([1.0, 3.0, 8.0]), label="peakedness")
        rows = (rng.standard_normal((len(tree), vocab)) * peakedness).astype(np.float32)
        # Drafts are likely tokens, so that walks go deep; or sure ones, so that they come to the cap.
        above = draw(st.sampled_from([2, 2, 20]), label="drafts above") * peakedness
        for node in range(1, len(tree)):
            rows[tree.parents[node], tree.token_ids[node]] += np.float32(above)
        masked = draw(st.sampled_from(["nothing", "nothing", "first tiles", "nearly all"]), label="masked")
        if masked == "first tiles":
            rows[:, : max(tile for tile in (0, *_TILES) if tile < vocab)] = -np.inf
        elif masked == "nearly all":
            rows[:, rng.random(vocab) < 0.9] = -np.inf
        rows[:, -1] = np.where(rows.max(axis=1) == -np.inf, 0, rows[:, -1])
        if draw(st.booleans(), label="ties at the top?"):
            for places in rng.integers(0, vocab, (2, len(tree))):
                rows[np.arange(len(tree)), places] = rows.max(axis=1)
        rows = round_rows(rows, dtype)
        greedy = draw(st.integers(0, 4), label="greedy?") == 4
        temperature = 0.0 if greedy else draw(temperatures(), label="temperature")
        if is_of_probs:
            rows, temperature = np.stack([target_probs(row, temperature) for row in rows]), 1.0
        made_for = None if is_of_probs else temperature
        filters = draw(filters_for(rows, made_for)) if allow_filters else {}
        coin = draw(coins())
        requests.append(Request(tree, rows, temperature, seeded_coins(draw, len(tree)), coin, **filters))
    cap = None
    if draw(st.booleans(), label="cap?"):
        cap = draw(st.integers(1, 1 + max(request.tree.depth for request in requests)), label="depth cap")
    if is_of_probs:
        return VerifyCase(tuple(requests), "probs", depth_cap=cap, filter_order=order)
    return VerifyCase(tuple(requests), depth_cap=cap, rows_dtype=dtype, filter_order=order)


#: kind of case -> its strategy; part of what ``strategies.cases_for`` knows
WIDE_CASES: dict[str, Callable[[], SearchStrategy[VerifyCase]]] = {
    "wide": lambda: wide_cases(allow_probs=True),
    # Their oracle is the dearest.
    "filtered_wide": lambda: wide_cases(max_requests=1, allow_filters=True, allow_probs=True),
}
