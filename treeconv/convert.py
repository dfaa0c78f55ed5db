"""Between parent-pointer trees and the layouts that verifiers and attention kernels take.

* :func:`to_verify_input` / :func:`to_draft_trees`: EAGLE's first-child / next-sibling layout.
* :func:`tree_mask` / :func:`from_tree_mask`: the attention mask in SGLang's three modes.
* :func:`to_eagle` / :func:`from_eagle`: EAGLE's ``parent_list`` / ``top_scores_index`` / ``draft_tokens``.

Every pair restores the trees exactly, and refuses what is no tree.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from treeconv._validate import check_int, tree_pointers
from treeconv._validate_layouts import (
    as_array,
    check_device,
    check_layout,
    check_mask_mode,
    check_mask_size,
    check_num_draft_tokens,
    check_prefix_lens,
    check_same_rows,
    check_sequence_of_trees,
    mask_rows,
)
from treeconv.errors import InvalidArgument, InvalidTree
from treeconv.tree import DraftTree, TreeMaskMode, VerifyInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

__all__ = [
    "EagleDraft",
    "from_eagle",
    "from_tree_mask",
    "to_draft_trees",
    "to_eagle",
    "to_verify_input",
    "tree_mask",
]


def _padded(trees: Sequence[DraftTree], num_slots: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Parents (-1 in padding) and tokens (0 in padding), ``[B, N]`` int64."""
    sizes = np.fromiter(map(len, trees), np.int64, len(trees))
    used = np.arange(num_slots) < sizes[:, None]
    parents = np.full((len(trees), num_slots), -1, np.int64)
    tokens = np.zeros((len(trees), num_slots), np.int64)
    total = int(sizes.sum())
    parents[used] = np.fromiter(chain.from_iterable(tree.parents for tree in trees), np.int64, total)
    tokens[used] = np.fromiter(chain.from_iterable(tree.token_ids for tree in trees), np.int64, total)
    return parents, tokens


def _depths(parents: NDArray[np.int64]) -> NDArray[np.int64]:
    """Distance from the root of every slot, ``[B, N]``; 0 in padding. Pointer doubling: log2(depth) steps."""
    num_slots = parents.shape[1]
    offsets = num_slots * np.arange(parents.shape[0])[:, None]
    is_child = parents >= 0
    depth = is_child.astype(np.int64).ravel()
    jump = np.where(is_child, parents + offsets, np.arange(num_slots) + offsets).ravel()
    while True:
        further = depth[jump]
        if not further.any():
            return depth.reshape(parents.shape)
        depth += further
        jump = jump[jump]


def to_verify_input(
    trees: Sequence[DraftTree],
    num_draft_tokens: int | None = None,
    prefix_lens: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> VerifyInput:
    """Lay a batch of draft trees out as verifiers take it: first child, next sibling, positions.

    Args:
        trees: B >= 1 trees; their sizes may differ.

        num_draft_tokens: N, the slots per tree, root included; at least the largest tree, which is
            also the default; at most 2**20, unless a tree is larger. Slots behind a tree's nodes are
            padding: unreachable, token 0.

        prefix_lens: ``[B]`` committed tokens before each root, >= 0 (the position of the root);
            default 0.

        device: where the tensors are put.

    Returns:
        A :class:`VerifyInput` of int64 tensors, ``[B, N]`` each.

    Raises:
        InvalidArgument: no tree, ``num_draft_tokens`` below the largest tree or absurdly large, bad
            ``prefix_lens``, or a ``device`` that torch cannot use here.
    """
    import torch  # noqa: PLC0415  (treeconv imports without torch)

    trees = check_sequence_of_trees(trees)
    target = check_device(device)
    num_draft_tokens = check_num_draft_tokens(num_draft_tokens, [*map(len, trees)])
    prefix = check_prefix_lens(prefix_lens, len(trees))

    parents, tokens = _padded(trees, num_draft_tokens)
    shape = parents.shape
    slots = np.arange(parents.size)
    first_row_slot = slots.reshape(shape)[:, :1]
    child = np.flatnonzero(parents >= 0)
    parent = (parents + first_row_slot).ravel()[child]  # flat slot of each child's parent
    next_token = np.full(parents.size, -1, np.int64)
    # Written from the last child to the first: for a repeated index NumPy keeps the last value.
    next_token[parent[::-1]] = child[::-1] % num_draft_tokens
    next_sibling = np.full(parents.size, -1, np.int64)
    order = np.argsort(parent, kind="stable")
    same_parent = parent[order[1:]] == parent[order[:-1]]
    elder, younger = child[order[:-1]][same_parent], child[order[1:]][same_parent]
    next_sibling[elder] = younger % num_draft_tokens

    arrays = {
        "candidates": tokens,
        "retrieve_index": slots.reshape(shape),
        "retrieve_next_token": next_token.reshape(shape),
        "retrieve_next_sibling": next_sibling.reshape(shape),
        "positions": _depths(parents) + prefix[:, None],
        "prefix_lens": prefix,
    }
    made = VerifyInput(**{name: torch.from_numpy(array) for name, array in arrays.items()})
    return made.seal() if target.type == "cpu" else made.to(target)


def to_draft_trees(verify_input: VerifyInput) -> list[DraftTree]:
    """The draft trees that a converted batch holds: the exact inverse of :func:`to_verify_input`.

    Raises:
        InvalidArgument: no VerifyInput, or tokens and pointers that are not integers of one shape
            ``[B, N]``, B, N >= 1.
        InvalidTree: a pointer out of range, a slot reached twice (a cycle or a shared child), siblings
            or parents out of node order, reachable slots that are not 0..n-1, or whatever
            :class:`DraftTree` refuses. The message names request and node.
    """
    check_layout(verify_input)
    candidates = verify_input.candidates.tolist()
    firsts = verify_input.retrieve_next_token.tolist()
    siblings = verify_input.retrieve_next_sibling.tolist()
    trees = []
    for request, (tokens, first, sibling) in enumerate(zip(candidates, firsts, siblings, strict=True)):
        parents = tree_pointers(first, sibling, f"request {request}, ")
        size = sum(parent is not None for parent in parents)
        for node, parent in enumerate(parents[:size]):
            if parent is None:
                raise InvalidTree(
                    f"request {request}, node {node}: not reachable from the root, but a later node is;"
                    " the nodes of a tree must fill slots 0..n-1"
                )
        kept = [parent for parent in parents[:size] if parent is not None]
        for node, younger in enumerate(sibling[:size]):
            if younger != -1 and younger < node:
                raise InvalidTree(
                    f"request {request}, node {node}: its next sibling is node {younger}, but siblings"
                    " must be ordered by node index"
                )
        try:
            trees.append(DraftTree(parents=tuple(kept), token_ids=tuple(tokens[:size])))
        except InvalidTree as error:
            raise InvalidTree(f"request {request}: {error}") from None
    return trees


def _visibility(verify_input: VerifyInput) -> torch.Tensor:
    """``[B, N, N]`` bool, ancestors and self; a slot that the root does not reach sees itself only."""
    import torch  # noqa: PLC0415

    batch, num_slots = verify_input.candidates.shape
    device = verify_input.device
    firsts, siblings = verify_input.retrieve_next_token.tolist(), verify_input.retrieve_next_sibling.tolist()
    up = []  # parents; the root and padding lead to themselves
    for request, (first, sibling) in enumerate(zip(firsts, siblings, strict=True)):
        parents = tree_pointers(first, sibling, f"request {request}, ")
        parents[0] = 0
        up.append([slot if parent is None else parent for slot, parent in enumerate(parents)])
    parent = torch.from_numpy(np.array(up, np.int64)).to(device)

    visible = torch.eye(num_slots, dtype=torch.bool, device=device).repeat(batch, 1, 1)
    jump = parent
    for _ in range(max(1, (num_slots - 1).bit_length())):
        visible |= visible.gather(1, jump[:, :, None].expand(-1, -1, num_slots))
        jump = jump.gather(1, jump)
    return visible


def tree_mask(verify_input: VerifyInput, mode: TreeMaskMode = TreeMaskMode.FULL_MASK) -> torch.Tensor:
    """The tree attention mask: each node sees the prefix, its ancestors and itself.

    Args:
        verify_input: a batch of trees; only what the root reaches counts. On a device its pointers are
            copied to the host, which waits for the device.

        mode: see :class:`TreeMaskMode` for the layouts.

    Returns:
        A tensor on the batch's device. A padded slot sees itself only, not even the prefix, so that it
        changes nothing and no row of a softmax is empty.

    Raises:
        InvalidArgument: an unknown mode, tokens and pointers that are not integers of one shape ``[B, N]``,
            a negative prefix, or a mask of more than 2**32 values (2**36 with the prefixes).
        InvalidTree: what the root reaches is no tree: a pointer out of range, or a slot reached twice. The
            message names request and node.
    """
    import torch  # noqa: PLC0415

    mode = check_mask_mode(mode)
    check_layout(verify_input)
    prefixes = check_mask_size(verify_input, mode)
    visible = _visibility(verify_input)
    batch, num_slots, _ = visible.shape
    if mode == TreeMaskMode.QLEN_ONLY:
        return visible
    if mode == TreeMaskMode.FULL_MASK:
        real = visible[:, :, 0]  # every node sees the root; padding does not
        rows = []
        for tree, is_node, prefix in zip(visible, real, prefixes, strict=True):
            rows.append(torch.cat([is_node[:, None].expand(-1, prefix), tree], dim=1).flatten())
        return torch.cat(rows)
    words = -(-num_slots // 32)
    bits = torch.nn.functional.pad(visible, (0, 32 * words - num_slots)).reshape(batch, num_slots, words, 32)
    weights = 1 << torch.arange(32, device=visible.device)
    packed = (bits * weights).sum(-1)
    if num_slots > 32:
        return packed.to(torch.uint32)
    narrowest = torch.uint8 if num_slots <= 8 else torch.uint16 if num_slots <= 16 else torch.uint32
    return packed[:, :, 0].to(narrowest)


def from_tree_mask(
    mask: torch.Tensor,
    token_ids: torch.Tensor,
    mode: TreeMaskMode = TreeMaskMode.FULL_MASK,
    prefix_lens: Sequence[int] | None = None,
) -> list[DraftTree]:
    """The trees that a mask describes: a node's parent is its nearest visible ancestor.

    Args:
        mask: as :func:`tree_mask` returns it; arrays and lists are taken too.

        token_ids: ``[B, N]`` integers, the token of each slot (``VerifyInput.candidates``).

        mode: the mask's layout.

        prefix_lens: ``[B]``, needed to cut a FULL_MASK; default 0.

    Raises:
        InvalidArgument: an unknown mode, sizes that do not fit, or what are no numbers.
        InvalidTree: a row that is not "ancestors and self" of any tree (padding: itself only; in FULL_MASK
            nodes see the whole prefix too), and whatever :class:`DraftTree` refuses. The message names
            request and row.
    """
    mode = check_mask_mode(mode)
    ids = as_array(token_ids, "token_ids", 2)
    if 0 in ids.shape:
        raise InvalidArgument(f"token_ids.shape={ids.shape}, but must be [B, N] with B, N >= 1")
    tokens = ids.tolist()
    batch, num_slots = ids.shape
    lengths = check_prefix_lens(prefix_lens, batch).tolist()
    given = mask_rows(as_array(mask, "mask"), mode, num_slots, lengths)
    offsets = lengths if mode == TreeMaskMode.FULL_MASK else [0] * batch
    trees = []
    for request in range(batch):
        rows = given[request][:, offsets[request] :][:, :num_slots]
        size = int(rows[:, 0].sum())  # only real nodes see the root
        parents = []
        for node in range(size):
            ancestors = np.flatnonzero(rows[node][:node]).tolist()
            parents.append(ancestors[-1] if ancestors else -1)
            want = rows[parents[-1]].copy() if ancestors else np.zeros(num_slots, bool)
            want[node] = True
            if (node and not ancestors) or not np.array_equal(rows[node], want):
                raise InvalidTree(
                    f"request {request}, node {node}: its mask row {rows[node].astype(int).tolist()} is not"
                    f" the row of an earlier node plus itself, so it is no row of a tree mask"
                )
        try:
            trees.append(DraftTree(parents=tuple(parents), token_ids=tuple(tokens[request][:size])))
        except InvalidTree as error:
            raise InvalidTree(f"request {request}: {error}") from None
    # The rows looked at so far are those that see the root; the rest must be what the trees give.
    again = tree_mask(to_verify_input(trees, num_slots, lengths), mode).numpy()
    sizes = [*map(len, trees)]
    check_same_rows(given, mask_rows(again, mode, num_slots, lengths), sizes, offsets)
    return trees


@dataclass(frozen=True)
class EagleDraft:
    """A batch of equal-sized trees as EAGLE's draft loop hands them to ``build_tree_kernel_efficient``.

    Candidate number ``c`` of the draft loop is child ``c % topk`` of beam ``c // topk``; beam 0 is the
    root and beam ``g >= 1`` is candidate ``parent_list[:, g]``; step ``s`` opens beams
    ``1 + (s - 1) * topk`` to ``s * topk``.

    Args:
        parent_list: ``[B, topk * (depth - 1) + 1]`` int64, -1 at beam 0 and in unused beams.

        top_scores_index: ``[B, n - 1]`` int64, the candidate number of nodes 1..n-1. SGLang sorts it;
            a best-first tree keeps its own order here, which its kernel takes as well.

        draft_tokens: ``[B, n - 1]`` int64, the token of nodes 1..n-1.

        root_token_ids: ``[B]`` int64, the last committed token (SGLang's ``verified_id``).

        topk: children per beam and beams per step, >= 1.
    """

    parent_list: torch.Tensor
    top_scores_index: torch.Tensor
    draft_tokens: torch.Tensor
    root_token_ids: torch.Tensor
    topk: int


def to_eagle(trees: Sequence[DraftTree], topk: int | None = None) -> EagleDraft:
    """Write trees as EAGLE's draft loop would have.

    Args:
        trees: B >= 1 trees of one size (EAGLE has no padding).

        topk: beam width; the default is the least that fits: no node has more children, and no depth
            has more nodes with children.

    Raises:
        InvalidArgument: trees of several sizes, or ``topk`` too small.
    """
    import torch  # noqa: PLC0415

    trees = check_sequence_of_trees(trees)
    sizes = {len(tree) for tree in trees}
    if len(sizes) > 1:
        raise InvalidArgument(f"tree sizes {sorted(sizes)}, but EAGLE's layout takes trees of one size")
    inner_per_depth: dict[tuple[int, int], int] = {}
    for index, tree in enumerate(trees):
        for node, kids in enumerate(tree.children):
            if kids and node:
                key = (index, tree.depths[node])
                inner_per_depth[key] = inner_per_depth.get(key, 0) + 1
    widest = max(len(kids) for tree in trees for kids in tree.children)
    needed = max(1, widest, *inner_per_depth.values()) if inner_per_depth else max(1, widest)
    topk = needed if topk is None else check_int(topk, "topk", needed)

    depth = max(1, *(tree.depth for tree in trees))
    parent_list = np.full((len(trees), topk * (depth - 1) + 1), -1, np.int64)
    size = sizes.pop()
    numbers = np.zeros((len(trees), size), np.int64)
    for index, tree in enumerate(trees):
        opened = [0] * (depth + 1)
        for node, kids in enumerate(tree.children):
            if not kids:
                continue
            beam = 0
            if node:
                level = tree.depths[node]
                beam = 1 + (level - 1) * topk + opened[level]
                opened[level] += 1
                parent_list[index, beam] = numbers[index, node]
            for place, kid in enumerate(kids):
                numbers[index, kid] = beam * topk + place
    tokens = np.array([tree.token_ids for tree in trees], np.int64)
    return EagleDraft(
        parent_list=torch.from_numpy(parent_list),
        top_scores_index=torch.from_numpy(numbers[:, 1:].copy()),
        draft_tokens=torch.from_numpy(tokens[:, 1:].copy()),
        root_token_ids=torch.from_numpy(tokens[:, 0].copy()),
        topk=topk,
    )


def from_eagle(draft: EagleDraft) -> list[DraftTree]:
    """The trees that EAGLE's tensors describe: the inverse of :func:`to_eagle`.

    Raises:
        InvalidArgument: no EagleDraft, or fields that are not integers of the shapes that it states.
        InvalidTree: a node whose parent was not selected (SGLang's kernel reads another request's row
            there) or comes after it, a candidate selected twice, and whatever :class:`DraftTree` refuses.
            The message names it.
    """
    if not isinstance(draft, EagleDraft):
        raise InvalidArgument(f"draft={type(draft).__name__}, but must be an EagleDraft")
    topk = check_int(draft.topk, "topk", 1)
    roots = as_array(draft.root_token_ids, "root_token_ids", 1)
    beam_rows = as_array(draft.parent_list, "parent_list", 2)
    number_rows = as_array(draft.top_scores_index, "top_scores_index", 2)
    token_rows = as_array(draft.draft_tokens, "draft_tokens", 2)
    for name, rows in (("parent_list", beam_rows), ("top_scores_index", number_rows)):
        if len(rows) != len(roots):
            raise InvalidArgument(
                f"{name}.shape={rows.shape}, but must be [{len(roots)}, ...]: a row for each root_token_ids"
            )
    if token_rows.shape != number_rows.shape:
        raise InvalidArgument(
            f"draft_tokens.shape={token_rows.shape}, but must be {number_rows.shape}, as top_scores_index"
        )
    trees = []
    fields = (beam_rows.tolist(), number_rows.tolist(), token_rows.tolist(), roots.tolist())
    for request, (beams, numbers, tokens, root) in enumerate(zip(*fields, strict=True)):
        node_of = {number: node for node, number in enumerate(numbers, start=1)}
        if len(node_of) < len(numbers):
            node = next(node for node, number in enumerate(numbers, start=1) if node_of[number] != node)
            number = numbers[node - 1]
            raise InvalidTree(
                f"request {request}, node {node_of[number]}: top_scores_index={number} is node {node}'s"
                " already, but a candidate must be selected once"
            )
        parents = [-1]
        for node, number in enumerate(numbers, start=1):
            beam = number // topk
            if beam == 0 and number >= 0:
                parents.append(0)
                continue
            if not 0 < beam < len(beams):
                raise InvalidTree(
                    f"request {request}, node {node}: top_scores_index={number} names beam {beam}, but"
                    f" parent_list holds beams 0..{len(beams) - 1}"
                )
            if beams[beam] not in node_of:
                raise InvalidTree(
                    f"request {request}, node {node}: its parent is candidate {beams[beam]}, which is not in"
                    " top_scores_index; a selected node's parent must be selected too"
                )
            parents.append(node_of[beams[beam]])
        try:
            trees.append(DraftTree(parents=tuple(parents), token_ids=(root, *tokens)))
        except InvalidTree as error:
            raise InvalidTree(f"request {request}: {error}") from None
    return trees
