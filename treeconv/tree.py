"""The nouns: draft trees, their converted form, coins, and what a verifier returns.

A *draft tree* has ``n`` nodes; node 0 is the root, the last committed token, which is never tested.
Children of a node are ordered by node index and carry distinct tokens. NumPy and plain Python only;
:class:`VerifyInput` and :class:`VerifyOutput` hold torch tensors but this module never imports torch.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv.errors import InvalidArgument, InvalidTree

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    import torch
    from numpy.typing import NDArray

__all__ = [
    "Coins",
    "DraftTree",
    "RowStatus",
    "TreeMaskMode",
    "VerifyInput",
    "VerifyOutput",
]


class TreeMaskMode(IntEnum):
    """SGLang's three layouts of the tree attention mask; the values are SGLang's own.

    ``FULL_MASK``: flat bool, ``sum_b N * (prefix_len_b + N)``: each row sees the prefix, then the tree.
    ``QLEN_ONLY``: bool ``[B, N, N]``, the tree part alone.
    ``QLEN_ONLY_BITPACKING``: bit ``j`` of row ``i`` says whether node ``i`` sees node ``j``;
    ``[B, N]`` uint8, uint16 or uint32 (the narrowest that holds N bits) up to N = 32 as in SGLang,
    ``[B, N, ceil(N / 32)]`` uint32 words above.
    """

    FULL_MASK = 0
    QLEN_ONLY = 1
    QLEN_ONLY_BITPACKING = 2


class RowStatus(IntEnum):
    """Why a request emitted nothing: what was found in a *visited* target row, or in its own settings.

    A row that holds several is reported as the first of NAN, POS_INF, EMPTY. BAD_SETTINGS comes before them;
    only settings that are on a device are told of in this way: others are refused before the call.
    """

    OK = 0
    NAN = 1  # NaN, or through the probability interface a negative number
    POS_INF = 2
    EMPTY = 3  # all -inf, or through the probability interface no mass at all
    BAD_SETTINGS = 4  # a temperature, top_k, top_p or min_p outside its range, in a tensor on a device


def _integers(values: Iterable[Any], name: str) -> tuple[int, ...]:
    if hasattr(values, "tolist"):  # numpy arrays and torch tensors: one copy instead of n conversions
        values = values.tolist()
    try:
        return tuple(map(operator.index, values))
    except TypeError:
        raise InvalidTree(f"{name}={values!r}, but must be a flat sequence of integers") from None


@dataclass(frozen=True, eq=True)
class DraftTree:
    """A tree of draft tokens under the last committed token, as parent pointers.

    Args:
        parents: ``n`` integers; ``parents[0] == -1`` and ``0 <= parents[i] < i`` for every other node.

        token_ids: ``n`` integers >= 0; distinct among the children of one node. ``token_ids[0]`` is
            the root: the last committed token, never tested.

    Both are kept as tuples of ``int``; lists, NumPy arrays and torch tensors are taken.

    Raises:
        InvalidTree: empty input, a length mismatch, a missing or second root, a parent that is out of
            range or not before its child (which is also what a cycle is), a negative token, or two
            siblings with one token (its mass would be counted twice). The message names the node.
    """

    parents: tuple[int, ...]
    token_ids: tuple[int, ...]

    def __post_init__(self) -> None:
        parents = _integers(self.parents, "parents")
        token_ids = _integers(self.token_ids, "token_ids")
        object.__setattr__(self, "parents", parents)
        object.__setattr__(self, "token_ids", token_ids)
        if not parents:
            raise InvalidTree("parents=[], but a tree must hold at least its root (node 0)")
        if len(parents) != len(token_ids):
            raise InvalidTree(
                f"len(parents)={len(parents)} and len(token_ids)={len(token_ids)}, but must be equal"
            )
        if parents[0] != -1:
            raise InvalidTree(f"parents[0]={parents[0]}, but must be -1: node 0 is the root")
        seen: dict[tuple[int, int], int] = {}
        for node, (parent, token) in enumerate(zip(parents, token_ids, strict=True)):
            if not 0 <= token < 2**63:
                rule = "be >= 0" if token < 0 else "fit int64"
                raise InvalidTree(f"token_ids[{node}]={token}, but must {rule}")
            if node == 0:
                continue
            if not 0 <= parent < node:
                rule = "a second root" if parent == -1 else "a cycle or a node out of order"
                raise InvalidTree(
                    f"parents[{node}]={parent}, but must be in [0, {node - 1}]: a parent comes before its"
                    f" child (this is {rule if parent < len(parents) else 'out of range'})"
                )
            twin = seen.setdefault((parent, token), node)
            if twin != node:
                raise InvalidTree(
                    f"token_ids[{node}]={token} repeats its sibling node {twin} (both children of node"
                    f" {parent}), but siblings must carry distinct tokens: the mass would count twice"
                )

    @classmethod
    def chain(cls, token_ids: Iterable[int]) -> DraftTree:
        """The linear tree (a DFlash block): each token is the only child of the one before.

        Args:
            token_ids: ``n >= 1`` integers >= 0, the root (last committed token) first; any iterable.

        Raises:
            InvalidTree: as for :class:`DraftTree`.
        """
        tokens = _integers(token_ids, "token_ids")
        return cls(parents=tuple(range(-1, len(tokens) - 1)), token_ids=tokens)

    def __len__(self) -> int:
        return len(self.parents)

    def __repr__(self) -> str:
        return f"DraftTree(parents={list(self.parents)}, token_ids={list(self.token_ids)})"

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, in node order: the order in which a verifier tests them."""
        lists: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            lists[parent].append(node)
        return tuple(map(tuple, lists))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Distance of each node from the root; ``depths[0] == 0``."""
        depths = [0] * len(self.parents)
        for node, parent in enumerate(self.parents[1:], start=1):
            depths[node] = depths[parent] + 1
        return tuple(depths)

    @property
    def depth(self) -> int:
        """Depth of the deepest node: the most drafts that one walk can accept."""
        return max(self.depths)

    def path(self, node: int) -> tuple[int, ...]:
        """Nodes from the root to ``node``, both included."""
        nodes = []
        while node != -1:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def draw(self, notes: Mapping[int, str] | None = None, keep: Collection[int] | None = None) -> str:
        """A picture of the tree in text, one node a line, siblings top to bottom in test order.

        Args:
            notes: node -> a remark printed behind it.

            keep: the nodes to draw (their ancestors must be among them); the others are counted. Default
                all.
        """
        notes = notes or {}
        lines = []
        # (node or None for a remark, text of the remark, lead of its line, indent of its children)
        stack: list[tuple[int | None, str, str, str]] = [(0, "", "", "")]
        while stack:
            node, remark, lead, indent = stack.pop()
            if node is None:
                lines.append(lead + remark)
                continue
            note = f"   {notes[node]}" if node in notes else ""
            lines.append(f"{lead}node {node}: token {self.token_ids[node]}{note}")
            kids: list[int | None] = [kid for kid in self.children[node] if keep is None or kid in keep]
            hidden = len(self.children[node]) - len(kids)
            if hidden:
                kids.append(None)
            for place in reversed(range(len(kids))):
                last = place == len(kids) - 1
                lead, below = indent + ("└─ " if last else "├─ "), indent + ("   " if last else "│  ")
                stack.append((kids[place], f"... {hidden} more", lead, below))
        return "\n".join(lines)


@dataclass(frozen=True)
class Coins:
    """The uniform numbers a walk consumes: one per node for its children, one for the bonus token.

    Args:
        accept: ``[B, N]`` float32 in [0, 1); ``accept[b, i]`` decides among the children of node ``i``.

        final: ``[B]`` float32 in [0, 1); draws the bonus token from the residual. Never a reused
            ``accept`` coin.

    For one tree (``oracle.walk``) the leading dimension is dropped. Exactly 1.0 is accepted: it can
    come out of a rounding generator, and must still emit a token of positive mass. NumPy arrays, torch
    tensors and lists are taken; :func:`treeconv.verify` checks shapes and range.
    """

    accept: Any
    final: Any


class _Sealed:
    """Room for a batch's seal outside ``vars``, which holds the tensors alone; a copy is not sealed."""

    __slots__ = ("_seal",)
    _seal: tuple[tuple[Any, ...], int]

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)


@dataclass(frozen=True)
class VerifyInput(_Sealed):
    """A batch of draft trees in EAGLE's first-child / next-sibling layout, padded to N slots.

    The tensors that SGLang's ``tree_speculative_sampling_target_only`` takes, under SGLang's names.
    Slots without a node (padding) are unreachable: nothing points at them.

    Args:
        candidates: ``[B, N]`` int64, the token of each slot, root first; 0 in padding.

        retrieve_index: ``[B, N]`` int64, the flat index ``b * N + i`` of each slot.

        retrieve_next_token: ``[B, N]`` int64, first child of each slot, or -1.

        retrieve_next_sibling: ``[B, N]`` int64, next child of the same parent, or -1.

        positions: ``[B, N]`` int64, prefix length + depth; the prefix length in padding.

        prefix_lens: ``[B]`` int64, committed tokens *before* the root, >= 0.
    """

    candidates: torch.Tensor
    retrieve_index: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor
    positions: torch.Tensor
    prefix_lens: torch.Tensor

    @property
    def batch_size(self) -> int:
        """B, the number of trees."""
        return int(self.candidates.shape[0])

    @property
    def num_draft_tokens(self) -> int:
        """N, the slots per tree, root included."""
        return int(self.candidates.shape[1])

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.candidates.device

    def _layout(self) -> tuple[Any, ...]:
        """Tokens and pointers by value: tensors can be written to, also where no version counter sees it."""
        tensors = (self.candidates, self.retrieve_next_token, self.retrieve_next_sibling)
        return self.candidates.shape, *[tensor.numpy().tobytes() for tensor in tensors]

    def seal(self) -> VerifyInput:
        """Note that these are trees, as whoever made them from :class:`DraftTree`s knows. On the CPU."""
        object.__setattr__(self, "_seal", (self._layout(), int(self.candidates.max())))
        return self

    def is_sealed(self, vocab_size: int | None = None) -> bool:
        """Whether tokens and pointers are still those sealed, and in the vocabulary, if one is given."""
        layout, greatest = getattr(self, "_seal", (None, 0))
        if layout is None or (vocab_size is not None and greatest >= vocab_size):
            return False
        return bool(layout == self._layout())

    def to(self, device: torch.device | str) -> VerifyInput:
        """The same batch on another device."""
        return VerifyInput(**{name: getattr(self, name).to(device) for name in self.__dataclass_fields__})


@dataclass(frozen=True)
class VerifyOutput:
    """What a verifier decided, in SGLang's layout, plus a status per request.

    Args:
        accept_index: ``[B, depth_cap]`` int32, flat indices (``retrieve_index``) of the accepted path,
            root first, -1 behind its end.

        accept_token_num: ``[B]`` int32, accepted drafts; root and bonus not counted.

        predicts: ``[B * N]`` int32; at each accepted flat index the token that follows it: the next
            accepted draft, and the bonus token at the last one. -1 elsewhere (undefined in SGLang).

        status: ``[B]`` int32, a :class:`RowStatus`. Where it is not 0 the request emitted nothing:
            ``accept_index`` and ``predicts`` are -1 and ``accept_token_num`` is 0.
    """

    accept_index: torch.Tensor
    accept_token_num: torch.Tensor
    predicts: torch.Tensor
    status: torch.Tensor

    @cached_property
    def tokens(self) -> list[list[int]]:
        """Per request the emitted token ids, bonus last; ``[]`` where ``status`` is not 0.

        Copies to the host, and so waits for the device.
        """
        predicts = self.predicts.tolist()
        rows = zip(
            self.accept_index.tolist(), self.accept_token_num.tolist(), self.status.tolist(), strict=True
        )
        return [[] if status else [predicts[i] for i in row[: count + 1]] for row, count, status in rows]

    def raise_for_status(self) -> None:
        """Raise if any request met a row it could not sample from.

        Copies ``status`` to the host.

        Raises:
            InvalidArgument: names the first such request and what its row held.
        """
        for request, status in enumerate(self.status.tolist()):
            if status:
                held = {
                    1: "NaN, or a negative probability",
                    2: "+inf",
                    3: "no mass (all -inf, or all zero)",
                }.get(status, "?")
                raise InvalidArgument(
                    f"request {request}: a visited target row holds {held}, but must hold finite logits (-inf"
                    " allowed) with at least one above -inf, or probabilities >= 0 that are not all 0;"
                    " nothing was emitted for it"
                )


def as_float_array(values: Any) -> NDArray[np.floating[Any]]:
    """Any array-like (torch bf16 included) as a NumPy float array with the same exact values."""
    if hasattr(values, "detach"):  # a torch tensor; NumPy has no bfloat16, float32 holds it exactly
        tensor = values.detach().cpu()
        values = (tensor if str(tensor.dtype) == "torch.float64" else tensor.float()).numpy()
    array = np.asarray(values)
    return array if array.dtype.kind == "f" else array.astype(np.float64)
