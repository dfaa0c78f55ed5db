"""Hypothesis strategies for calls that kernels cut up: siblings beyond a warp, vocabularies of many tiles."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from treeconv.case import Request, VerifyCase, round_rows
from treeconv.filters import FILTER_ORDERS
from treeconv.strategies import coins, draft_trees, filters_for, seeded_coins, temperatures

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["WIDE_CASES", "wide_cases"]

_TILES = (128, 1024)  # tokens that a kernel may take at once


@st.composite
def wide_cases(draw: DrawFn, *, max_requests: int = 2, allow_filters: bool = False) -> VerifyCase:
    """Trees of up to 70 nodes (siblings beyond a warp) over vocabularies beyond any block size.

    * ``max_requests``: the first has up to 70 nodes, others up to 8.
    * ``allow_filters``: whether most requests carry top-k, top-p or min-p.

    Whole numbers of tiles, and one token over; in 16 bits rows are full of ties. A grammar may have masked
    the first tiles, or all but a few tokens. The rows come from one drawn seed: thousands of drawn numbers
    would be slow, and shrink no better.
    """
    vocab = draw(st.sampled_from([16, 257, 32, 1031, 256, 4099]), label="vocab")
    dtype = draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"]), label="dtype")
    order = draw(st.sampled_from(FILTER_ORDERS), label="order") if allow_filters else FILTER_ORDERS[0]
    shapes = ["star", "chain", "random", "best-first"]
    requests = []
    for index in range(draw(st.integers(1, max_requests), label="requests")):
        tree = draw(draft_trees(max_nodes=8 if index else 70, vocab_size=vocab, shapes=shapes))
        rng = np.random.default_rng(draw(st.integers(0, 2**16), label="rows"))
        peakedness = draw(st.sampled_from([1.0, 3.0, 8.0]), label="peakedness")
        rows = (rng.standard_normal((len(tree), vocab)) * peakedness).astype(np.float32)
        for node in range(1, len(tree)):  # drafts are likely tokens, so that walks go deep
            rows[tree.parents[node], tree.token_ids[node]] += np.float32(2 * peakedness)
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
        filters = draw(filters_for(rows, temperature)) if allow_filters else {}
        coin = draw(coins())
        requests.append(Request(tree, rows, temperature, seeded_coins(draw, len(tree)), coin, **filters))
    return VerifyCase(requests=tuple(requests), rows_dtype=dtype, filter_order=order)


#: kind of case -> its strategy; part of what ``strategies.cases_for`` knows
WIDE_CASES: dict[str, Callable[[], SearchStrategy[VerifyCase]]] = {
    "wide": wide_cases,
    "filtered_wide": lambda: wide_cases(max_requests=1, allow_filters=True),  # their oracle is the dearest
}
