"""Checks of what goes in and out of :mod:`treeconv.convert`; like :mod:`treeconv._validate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv._validate import check_int
from treeconv.errors import InvalidArgument, InvalidTree
from treeconv.tree import DraftTree, TreeMaskMode, VerifyInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

__all__ = [
    "as_array",
    "check_device",
    "check_layout",
    "check_mask_mode",
    "check_mask_size",
    "check_num_draft_tokens",
    "check_prefix_lens",
    "check_same_rows",
    "check_sequence_of_trees",
    "mask_rows",
]

_MOST_SLOTS = 2**20  # per tree
_MOST_SQUARE = 2**32  # values of the tree parts of a batch's mask
_MOST_FULL = 2**36  # values of a FULL_MASK


def check_sequence_of_trees(trees: Sequence[DraftTree]) -> list[DraftTree]:
    """A non-empty list of :class:`DraftTree`."""
    if isinstance(trees, DraftTree):
        raise InvalidArgument("trees is one DraftTree, but must be a sequence of them: [tree]")
    try:
        trees = list(trees)
    except TypeError:
        raise InvalidArgument(f"trees={trees!r}, but must be a sequence of DraftTrees") from None
    for index, tree in enumerate(trees):
        if not isinstance(tree, DraftTree):
            raise InvalidArgument(f"trees[{index}]={tree!r}, but must be a DraftTree")
    if not trees:
        raise InvalidArgument("trees=[], but must hold at least one DraftTree")
    return trees


def check_device(device: Any) -> torch.device:
    """``device`` as a ``torch.device`` on which tensors can be made here."""
    import torch  # noqa: PLC0415

    try:
        found = torch.device(device)
        if found.type != "cpu":
            torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, ImportError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidArgument(
            f"device={device!r}, but must be a device that torch can use here: {reason}"
        ) from None
    return found


def check_num_draft_tokens(value: Any, sizes: Sequence[int]) -> int:
    """Slots per tree: at least the largest tree (the default), and no absurd number."""
    largest = max(sizes)
    if value is None:
        return largest
    number = check_int(value, "num_draft_tokens", 1)
    if number < largest:
        raise InvalidArgument(
            f"num_draft_tokens={value}, but must be >= {largest}: tree {sizes.index(largest)} has that many"
            " nodes (root included)"
        )
    if number > max(_MOST_SLOTS, largest):
        raise InvalidArgument(f"num_draft_tokens={value}, but must be <= {_MOST_SLOTS} slots per tree")
    return number


def check_prefix_lens(prefix_lens: Any, batch: int) -> NDArray[np.int64]:
    """``[B]`` int64, each >= 0; zeros where None."""
    prefix = np.zeros(batch, np.int64)
    if prefix_lens is None:
        return prefix
    try:
        size = len(prefix_lens)
    except TypeError:
        raise InvalidArgument(
            f"prefix_lens={prefix_lens!r}, but must be a sequence of {batch} integers, one per tree"
        ) from None
    if size != batch:
        raise InvalidArgument(f"len(prefix_lens)={size}, but must be {batch}, one per tree")
    if hasattr(prefix_lens, "tolist"):
        prefix_lens = prefix_lens.tolist()
    for index, length in enumerate(prefix_lens):
        if check_int(length, f"prefix_lens[{index}]", 0) >= 2**62:  # positions are a depth beyond it
            raise InvalidArgument(f"prefix_lens[{index}]={length}, but must be below 2**62")
        prefix[index] = length
    return prefix


def check_layout(batch: Any) -> None:
    """Tokens and pointers are integer tensors ``[B, N]``, B, N >= 1; narrow ones are taken."""
    import torch  # noqa: PLC0415

    if not isinstance(batch, VerifyInput):
        raise InvalidArgument(f"verify_input={type(batch).__name__}, but must be a VerifyInput")
    for name in ("candidates", "retrieve_next_token", "retrieve_next_sibling"):
        tensor = getattr(batch, name)
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(f"{name}={type(tensor).__name__}, but must be a torch.Tensor")
        if tensor.ndim != 2 or 0 in tensor.shape:
            raise InvalidArgument(f"{name}.shape={tuple(tensor.shape)}, but must be [B, N] with B, N >= 1")
        if tensor.shape != batch.candidates.shape:
            raise InvalidArgument(
                f"{name}.shape={tuple(tensor.shape)}, but must be {tuple(batch.candidates.shape)}, as"
                " candidates"
            )
        if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool:
            raise InvalidArgument(f"{name}.dtype={tensor.dtype}, but must be an integer type")


def as_array(value: Any, name: str, ndim: int | None = None) -> NDArray[Any]:
    """A tensor, array or nested list as a NumPy array; of integers where ``ndim`` is given."""
    want = "an array of numbers" if ndim is None else f"an array of integers of {ndim} dimension(s)"
    try:
        array = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, bfloat16, sparse, meta
        raise InvalidArgument(f"{name}={type(value).__name__}, but must be {want}: {error}") from None
    if array.dtype.kind not in ("biuf" if ndim is None else "iu") and (array.size or array.dtype.kind == "O"):
        held = f"{name}={value!r}" if array.ndim == 0 else f"{name} holds {array.dtype}"
        raise InvalidArgument(f"{held}, but must be {want}")
    if ndim is not None and array.ndim != ndim:
        raise InvalidArgument(f"{name}.shape={array.shape}, but must have {ndim} dimension(s)")
    return array


# --- masks ---------------------------------------------------------------------------------------------


def check_mask_mode(mode: Any) -> TreeMaskMode:
    """A :class:`TreeMaskMode`, or its value."""
    try:
        return TreeMaskMode(mode)
    except ValueError:
        raise InvalidArgument(f"mode={mode!r}, but must be one of {[m.name for m in TreeMaskMode]}") from None


def check_mask_size(batch: VerifyInput, mode: TreeMaskMode) -> list[int]:
    """The prefix of each request (needed by FULL_MASK alone), of a mask that is not absurdly large."""
    size, slots = batch.candidates.shape
    if size * slots**2 > _MOST_SQUARE:
        raise InvalidArgument(
            f"candidates.shape={(size, slots)}, but B * N * N must be <= {_MOST_SQUARE} for a mask"
        )
    if mode != TreeMaskMode.FULL_MASK:
        return []
    prefixes: list[int] = check_prefix_lens(batch.prefix_lens, size).tolist()
    total = sum(slots * (prefix + slots) for prefix in prefixes)
    if total > _MOST_FULL:
        raise InvalidArgument(
            f"prefix_lens={prefixes}, but the FULL_MASK must hold <= {_MOST_FULL} values, not {total}"
        )
    return prefixes


def mask_rows(
    mask: NDArray[Any], mode: TreeMaskMode, num_slots: int, prefixes: Sequence[int]
) -> list[NDArray[np.bool_]]:
    """One request at a time what each slot sees: ``[N, prefix + N]`` in FULL_MASK, else ``[N, N or more]``.

    A bit-packed mask's bits behind the N slots are kept, so that they can be compared.
    """
    shape: tuple[int, ...] = (len(prefixes), num_slots, num_slots)
    if mode == TreeMaskMode.FULL_MASK:
        widths = [num_slots * (prefix + num_slots) for prefix in prefixes]
        if mask.size != sum(widths):
            raise InvalidArgument(f"mask holds {mask.size} values, but FULL_MASK must hold {sum(widths)}")
        parts = np.split(mask.astype(bool).ravel(), np.cumsum(widths)[:-1])
        return [part.reshape(num_slots, -1) for part in parts]
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        shape = (*shape[:2], -(-num_slots // 32)) if num_slots > 32 else shape[:2]
    if mask.size != np.prod(shape):
        raise InvalidArgument(f"mask holds {mask.size} values, but {mode.name} must hold {shape}")
    if mode == TreeMaskMode.QLEN_ONLY:
        return list(mask.astype(bool).reshape(shape))
    if mask.dtype.kind not in "iub":
        raise InvalidArgument(f"mask holds {mask.dtype}, but {mode.name} must hold integers")
    if mask.dtype.kind == "i" and mask.dtype.itemsize < 8:  # the same bits, without a sign
        mask = mask.astype(f"u{mask.dtype.itemsize}")
    words = mask.astype(np.int64).reshape(*shape[:2], -1, 1)
    # Bits behind a word's 32 go behind the row.
    halves = [((words >> bits) & 1).reshape(*shape[:2], -1) for bits in np.arange(64).reshape(2, 32)]
    return list(np.concatenate(halves, axis=2).astype(bool))


def check_same_rows(
    rows: Sequence[NDArray[np.bool_]],
    want: Sequence[NDArray[np.bool_]],
    sizes: Sequence[int],
    prefixes: Sequence[int],
) -> None:
    """Every row is what the trees of these ``sizes`` give; else the first that differs is named.

    ``prefixes`` counts the columns before slot 0, which only a FULL_MASK has.
    """
    for request, (got, right, size, prefix) in enumerate(zip(rows, want, sizes, prefixes, strict=True)):
        if np.array_equal(got, right):
            continue
        row, column = np.argwhere(got != right)[0].tolist()
        seen = f"slot {column - prefix}" if column >= prefix else f"token {column} of the prefix"
        if column >= prefix + len(right):
            seen = f"by a bit behind its last slot {len(right) - 1}"
        sees = "sees" if got[row, column] else "does not see"
        raise InvalidTree(
            f"request {request}, row {row} ({'a node' if row < size else 'padding'}): {sees} {seen}, but a"
            " row must hold its ancestors and itself, and nothing else (padding: itself only; a node in"
            " FULL_MASK: also the whole prefix)"
        )
