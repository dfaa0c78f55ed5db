"""A draft tree's bitmask rows from a grammar's matcher: the state at a node is committed text + path.

The matcher walks the tree depth first, one token in on the way down, one token back on the way up. So no
node sees what only its sibling accepted, and the matcher comes back as it was handed in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from treeconv._validate import check_int
from treeconv._validate_layouts import check_sequence_of_trees
from treeconv.errors import InvalidArgument
from treeconv.processors import bitmask_words

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from treeconv.tree import DraftTree

__all__ = ["Matcher", "fill_token_bitmask"]


class Matcher(Protocol):
    """What is asked of a grammar's matcher: the part of ``xgrammar.GrammarMatcher`` of these names."""

    def accept_token(self, token_id: int, /) -> bool:
        """Go on by one token; False, and no change, where the grammar refuses it."""

    def fill_next_token_bitmask(self, bitmask: torch.Tensor, index: int = 0, /) -> Any:
        """Write row ``index`` of an int32 ``[rows, ceil(V / 32)]`` bitmask: the tokens that may come next."""

    def rollback(self, num_tokens: int = 1, /) -> None:
        """Take back the last tokens that were accepted."""

    def is_terminated(self) -> bool:
        """Whether the text is complete, its stop token accepted: then nothing more may be asked."""


def fill_token_bitmask(
    trees: Sequence[DraftTree],
    matchers: Sequence[Matcher | None],
    vocab_size: int,
    num_draft_tokens: int | None = None,
) -> torch.Tensor:
    """The ``token_bitmask`` of a batch of draft trees, for :func:`treeconv.verify`.

    * A node whose token the grammar refuses, and all below it, allow nothing: they are never reached, their
      token being forbidden at the parent, and if one is all the same its request is EMPTY.
    * At a terminated node (its token was the stop token), and below it, nothing is asked and everything
      allowed: what follows a stop token is cut off, and a row of nothing would lose the text before it.

    Args:
        trees: B draft trees.

        matchers: B matchers, each in the state *after its root's token*; None for a request that has no
            grammar. Each comes back in the state it came in, also where it raises.

        vocab_size: V, the width of the logits.

        num_draft_tokens: N, slots per tree; default the largest tree.

    Returns:
        ``[B, N, ceil(V / 32)]`` int32 on the CPU (where xgrammar fills), for ``.to(device)``; padded slots
        allow everything.

    Raises:
        InvalidArgument: other numbers of trees and matchers, or more nodes than slots.
    """
    import torch  # noqa: PLC0415

    trees = check_sequence_of_trees(trees)
    if len(matchers) != len(trees):
        raise InvalidArgument(f"len(matchers)={len(matchers)}, but must be {len(trees)}, one per tree")
    largest = max(map(len, trees))
    slots = largest if num_draft_tokens is None else check_int(num_draft_tokens, "num_draft_tokens", largest)
    words = bitmask_words(check_int(vocab_size, "vocab_size", 1))
    bitmask = torch.full((len(trees), slots, words), -1, dtype=torch.int32)
    for rows, tree, matcher in zip(bitmask, trees, matchers, strict=True):
        if matcher is not None:
            _fill(rows, tree, matcher)
    return bitmask


def _fill(rows: torch.Tensor, tree: DraftTree, matcher: Matcher) -> None:
    accepted: list[int] = []  # the nodes below the root that the matcher stands behind
    try:
        pending = [0]
        while pending:
            node = pending.pop()
            while accepted and accepted[-1] != tree.parents[node]:
                accepted.pop()
                matcher.rollback(1)
            if node:
                if not matcher.accept_token(
                    tree.token_ids[node]
                ):  # it stays where it was: nothing to take back
                    rows[_below(tree, node)] = 0
                    continue
                accepted.append(node)
            if not matcher.is_terminated():
                matcher.fill_next_token_bitmask(rows, node)
                pending.extend(reversed(tree.children[node]))
    finally:
        if accepted:
            matcher.rollback(len(accepted))


def _below(tree: DraftTree, node: int) -> list[int]:
    """A node and all nodes below it."""
    found = [node]
    for inner in found:  # grows while it is read
        found.extend(tree.children[inner])
    return found
