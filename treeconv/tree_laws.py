"""The laws of draft trees and their converted forms; no verifier involved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from treeconv.case import Request, VerifyCase
from treeconv.commit import commit
from treeconv.convert import (
    from_eagle,
    from_tree_mask,
    to_draft_trees,
    to_eagle,
    to_verify_input,
    tree_mask,
)
from treeconv.errors import InvalidTree, LawBroken
from treeconv.judge import Violation
from treeconv.tree import DraftTree, TreeMaskMode, VerifyOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

__all__ = ["TREE_LAWS", "TreeLaw", "tree_law_named"]


@dataclass(frozen=True)
class TreeLaw:
    """A law about trees and their converted forms; no backend involved."""

    name: str
    meaning: str
    check: Callable[[Sequence[DraftTree], int, Sequence[int]], None]

    def run(self, trees: Sequence[DraftTree], num_draft_tokens: int, prefix_lens: Sequence[int]) -> int:
        """Judge one batch of trees.

        Raises:
            LawBroken: the readable failure.
        """
        try:
            try:
                self.check(trees, num_draft_tokens, prefix_lens)
            except InvalidTree as error:  # of ours: a conversion refused what another made of a right tree
                raise Violation(0, f"refused: {error}", "the tree itself") from None
        except Violation as violation:
            lines = [
                f"law broken: {self.name}",
                f"  meaning:  {self.meaning}",
                f"  case:     {num_draft_tokens} slots, prefix lengths {list(prefix_lens)}",
                *("  " + line for tree in trees[:4] for line in tree.draw().splitlines()[:8]),
                f"  got:      {violation.got}",
                f"  want:     {violation.want}",
            ]
            # A case without target rows: what a replay needs is the trees, the slots and the prefixes.
            requests = [
                Request(tree, np.zeros((len(tree), 1), np.float32), 1.0, np.zeros(len(tree), np.float32), 0.0)
                for tree in trees
            ]
            raise LawBroken(
                "\n".join(lines),
                law=self.name,
                case=VerifyCase(tuple(requests), num_draft_tokens=num_draft_tokens),
                parameters={"prefix_lens": list(prefix_lens)},
            ) from None
        return len(trees)


def _round_trip(trees: Sequence[DraftTree], num_draft_tokens: int, prefix_lens: Sequence[int]) -> None:
    converted = to_verify_input(trees, num_draft_tokens, prefix_lens)
    _expect_trees("first-child / next-sibling layout", to_draft_trees(converted), trees)
    for mode in TreeMaskMode:
        mask = tree_mask(converted, mode)
        _expect_trees(
            f"{mode.name} mask", from_tree_mask(mask, converted.candidates, mode, prefix_lens), trees
        )
    for tree in trees:
        _expect_trees("EAGLE's parent_list layout", from_eagle(to_eagle([tree])), [tree])


def _expect_trees(what: str, got: Iterable[DraftTree], want: Sequence[DraftTree]) -> None:
    if list(got) != list(want):
        raise Violation(0, f"{what} and back: {got}", str(list(want)))


def _mask_and_positions(
    trees: Sequence[DraftTree], num_draft_tokens: int, prefix_lens: Sequence[int]
) -> None:
    converted = to_verify_input(trees, num_draft_tokens, prefix_lens)
    square = tree_mask(converted, TreeMaskMode.QLEN_ONLY)
    flat = tree_mask(converted, TreeMaskMode.FULL_MASK).tolist()
    start = 0
    for request, (tree, prefix) in enumerate(zip(trees, prefix_lens, strict=True)):
        for node in range(num_draft_tokens):
            is_node = node < len(tree)
            sees = set(tree.path(node)) if is_node else {node}
            want = [other in sees for other in range(num_draft_tokens)]
            got = square[request, node].tolist()
            if got != want:
                raise Violation(request, f"node {node} sees {got}", f"ancestors and itself: {want}")
            width = prefix + num_draft_tokens
            if flat[start : start + width] != [is_node] * prefix + want:
                raise Violation(request, f"FULL_MASK row {node} differs", "the prefix, then the tree's row")
            start += width
            position = int(converted.positions[request, node])
            wanted = prefix + (tree.depths[node] if is_node else 0)
            if position != wanted:
                raise Violation(request, f"position[{node}] = {position}", f"{wanted} (prefix + depth)")


def _malformed_refused(trees: Sequence[DraftTree], num_draft_tokens: int, prefix_lens: Sequence[int]) -> None:
    """Break each tree in every way that one edit can, and see it refused with the node named."""
    del num_draft_tokens, prefix_lens
    for tree in trees:
        for node in range(1, len(tree)):
            edits = {
                "a parent behind its child": (node + 1, tree.token_ids[node]),
                "its own parent": (node, tree.token_ids[node]),
                "a second root": (-1, tree.token_ids[node]),
                "a parent out of range": (len(tree) + 7, tree.token_ids[node]),
                "a negative token": (tree.parents[node], -1),
            }
            elder = [kid for kid in tree.children[tree.parents[node]] if kid < node]
            if elder:
                edits["its sibling's token"] = (tree.parents[node], tree.token_ids[elder[0]])
            for what, (parent, token) in edits.items():
                parents, tokens = list(tree.parents), list(tree.token_ids)
                parents[node], tokens[node] = parent, token
                try:
                    made = DraftTree(tuple(parents), tuple(tokens))
                except InvalidTree as error:
                    if f"[{node}]" not in str(error) and f"node {node}" not in str(error):
                        raise Violation(0, f"refused with {error}", f"a message naming node {node}") from None
                    continue
                raise Violation(0, f"{made} was accepted", f"InvalidTree: node {node} has {what}")


def _stop_tokens(trees: Sequence[DraftTree], num_draft_tokens: int, prefix_lens: Sequence[int]) -> None:
    """Accept the path to each node; stop at emitted tokens, at refused ones, and at some of each."""
    for shift in range(max(map(len, trees))):
        ends = [(shift + prefix) % len(tree) for tree, prefix in zip(trees, prefix_lens, strict=True)]
        paths = [tree.path(end) for tree, end in zip(trees, ends, strict=True)]
        bonus = [tree.token_ids[-1] for tree in trees]  # often a draft's, too
        emitted = [
            [*(tree.token_ids[node] for node in path[1:]), last]
            for tree, path, last in zip(trees, paths, bonus, strict=True)
        ]
        # Each request stops at another token of its own, or at none of the drafts that were refused.
        own = [[tokens[shift % len(tokens)]] for tokens in emitted]
        refused = [sorted({*tree.token_ids} - {*tokens}) for tree, tokens in zip(trees, emitted, strict=True)]
        for stops in (own, refused, [refused[0], *own[1:]], [emitted[0][-1:]] * len(trees)):
            _expect_cut(paths, emitted, stops, num_draft_tokens)
    _stop_tokens_of_long_texts(num_draft_tokens, prefix_lens)


def _stop_tokens_of_long_texts(num_draft_tokens: int, prefix_lens: Sequence[int]) -> None:
    """Chains longer than trees that are drawn: a stop at a place of each, behind the first ones."""
    size = 12 + num_draft_tokens
    path, emitted = range(size), [*range(1, size), 0]
    places = [6 + (sum(prefix_lens) * 5 + 7 * request) % (size - 6) for request in range(3)]
    stops = [[emitted[place]] for place in places]
    _expect_cut([path] * 3, [emitted] * 3, stops, size)


def _expect_cut(
    paths: Sequence[Sequence[int]],
    emitted: Sequence[Sequence[int]],
    stops: Sequence[Sequence[int]],
    slots: int,
) -> None:
    """What a verifier says that took these paths, and what is left of it."""
    size, cap = len(paths), slots + 1
    index = np.full((size, cap), -1, np.int32)
    predicts = np.empty((size, slots), np.int32)
    for request, (path, tokens) in enumerate(zip(paths, emitted, strict=True)):
        predicts[request] = (stops[request] or [0])[0]  # what is not on the path means nothing
        predicts[request, list(path)] = tokens
        index[request, : len(path)] = np.array(path) + request * slots
    counts = np.array([len(path) - 1 for path in paths], np.int32)
    arrays = (index, counts, predicts.ravel(), np.zeros(size, np.int32))
    output = VerifyOutput(*map(torch.from_numpy, arrays))
    got = commit(output, stops)
    for request, (path, tokens, ending) in enumerate(zip(paths, emitted, stops, strict=True)):
        place = next((place for place, token in enumerate(tokens) if token in ending), None)
        count = len(tokens) if place is None else place + 1
        want = {
            "emitted": list(tokens[:count]),
            "of them accepted": min(count, len(path) - 1),
            "finished": place is not None,
            "kept": [request * slots + node for node in path[:count]],
        }
        found = {
            "emitted": got.tokens[request],
            "of them accepted": int(got.num_accepted[request]),
            "finished": bool(got.is_finished[request]),
            "kept": [int(place) for place in got.accept_index[request] if place >= 0],
        }
        if found != want:
            case = f"stop tokens {list(ending)} behind path {list(path)}, which emits {list(tokens)}"
            raise Violation(request, f"{case}: {found}", str(want))


TREE_LAWS: tuple[TreeLaw, ...] = (
    TreeLaw(
        "round-trip",
        "a tree comes back exactly from its converted layout, from its mask and from EAGLE's tensors",
        _round_trip,
    ),
    TreeLaw(
        "malformed-refused",
        "a malformed tree is refused, and the message names the node",
        _malformed_refused,
    ),
    TreeLaw(
        "mask-and-positions",
        "a node sees the prefix, its ancestors and itself; its position is prefix + depth",
        _mask_and_positions,
    ),
    TreeLaw(
        "stop-tokens",
        "behind the first emitted stop token nothing is emitted, kept or counted; a refused one ends nothing",
        _stop_tokens,
    ),
)


def tree_law_named(name: str) -> TreeLaw:
    """The tree law of that name.

    Raises:
        KeyError: there is none.
    """
    return {law.name: law for law in TREE_LAWS}[name]
