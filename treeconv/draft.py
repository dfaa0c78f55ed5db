"""DDTree's builder: the best tree under a node budget, from a block drafter's per-position marginals."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv._validate import check_int
from treeconv.errors import InvalidArgument
from treeconv.tree import DraftTree, as_float_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["build_draft_tree"]


def _log_probs(row: NDArray[np.float64]) -> NDArray[np.float64]:
    peak = row.max(initial=-np.inf)
    if peak == -np.inf:
        return row
    shifted = row - peak
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum())
    return result


def build_draft_tree(draft_logits: Any, tree_budget: int, root_token_id: int) -> DraftTree:
    """Take the ``tree_budget`` likeliest prefixes under the drafter's independent marginals.

    A node at depth ``d`` that ends the prefix ``t_1 .. t_d`` weighs ``prod_j q_j(t_j)``; best-first search
    over (next rank at the same place, first rank one deeper) pops the heaviest prefixes in order, and a
    prefix never outweighs its parent, so the result is a tree and no tree of that size weighs more
    (Ringel and Romano, DDTree, https://github.com/liranringel/ddtree).

    Args:
        draft_logits: ``[depth, vocab]`` floats; row ``d`` scores the token at depth ``d + 1``. -inf is a
            token that is never drafted; a row of -inf ends the tree above it. ``depth`` may be 0.

        tree_budget: nodes besides the root, >= 0. The tree has at most ``tree_budget + 1`` nodes: fewer
            where the prefixes run out.

        root_token_id: the last committed token, >= 0.

    Returns:
        The tree; nodes in the order they were popped: by falling weight. Ties: the earlier parent, then
        the lower rank; equal logits rank by lowest token id.

    Raises:
        InvalidArgument: not a matrix of numbers, NaN or +inf, a negative budget or root token.
    """
    try:
        logits = as_float_array(draft_logits).astype(np.float64)
    except (TypeError, ValueError) as error:  # ragged, text
        raise InvalidArgument(
            f"draft_logits={draft_logits!r}, but must be numbers of shape [depth, vocab]: {error}"
        ) from None
    if logits.ndim != 2 or (logits.size == 0 and logits.shape[0] != 0):
        raise InvalidArgument(f"draft_logits.shape={logits.shape}, but must be [depth, vocab], vocab >= 1")
    check_int(tree_budget, "tree_budget", 0)
    check_int(root_token_id, "root_token_id", 0)
    bad = np.isnan(logits) | (logits == np.inf)
    if bad.any():
        depth, token = np.argwhere(bad)[0].tolist()
        raise InvalidArgument(
            f"draft_logits[{depth}, {token}]={logits[depth, token]}, but must be finite or -inf"
        )

    ranked: list[tuple[list[int], list[float]]] = []
    for row in logits[:tree_budget]:
        scores = _log_probs(row)
        # Stable sort of the negated scores: ties keep the lowest token id first.
        order = np.argsort(-scores, kind="stable")[:tree_budget]
        order = order[scores[order] > -np.inf]
        ranked.append((order.tolist(), scores[order].tolist()))
        if not len(order):
            break

    parents, tokens = [-1], [root_token_id]
    # (-log weight, parent node, rank among its siblings, log weight of the parent, depth of the node)
    heap: list[tuple[float, int, int, float, int]] = []

    def offer(parent: int, rank: int, parent_weight: float, depth: int) -> None:
        if depth <= len(ranked) and rank < len(ranked[depth - 1][0]):
            weight = parent_weight + ranked[depth - 1][1][rank]
            heapq.heappush(heap, (-weight, parent, rank, parent_weight, depth))

    offer(0, 0, 0.0, 1)
    while heap and len(parents) <= tree_budget:
        negated, parent, rank, parent_weight, depth = heapq.heappop(heap)
        node = len(parents)
        parents.append(parent)
        tokens.append(ranked[depth - 1][0][rank])
        offer(parent, rank + 1, parent_weight, depth)
        offer(node, 0, -negated, depth + 1)
    return DraftTree(parents=tuple(parents), token_ids=tuple(tokens))
