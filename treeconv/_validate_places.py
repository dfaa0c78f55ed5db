"""Whether a batch's flat indices, positions and prefixes agree with its pointers: see :mod:`._validate`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treeconv.errors import InvalidArgument

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from treeconv.tree import VerifyInput

    Ids = NDArray[np.int64]


def check_places(batch: VerifyInput) -> None:
    """On the CPU, of a batch whose pointers make trees: places are those that a conversion gives.

    What no pointer leads to is padding: its position does not matter.

    Raises:
        InvalidArgument: ``retrieve_index`` is not ``b * N + i``, a prefix is negative, or the position of a
            node is not its request's prefix plus its depth.
    """
    size, slots = batch.candidates.shape
    flat = np.arange(size * slots).reshape(size, slots)
    wrong = np.argwhere(batch.retrieve_index.numpy() != flat)
    if len(wrong):
        request, slot = wrong[0].tolist()
        raise InvalidArgument(
            f"retrieve_index[{request}, {slot}]={int(batch.retrieve_index[request, slot])}, but must be"
            f" {flat[request, slot]}: request * N + slot"
        )
    prefixes = batch.prefix_lens.numpy()
    if prefixes.min() < 0:
        request = int(prefixes.argmin())
        raise InvalidArgument(f"prefix_lens[{request}]={prefixes[request]}, but must be >= 0")
    depths = batch.positions.numpy() - prefixes[:, None]
    first, sibling = batch.retrieve_next_token.numpy(), batch.retrieve_next_sibling.numpy()
    if not _agree(depths, first, sibling):
        _name_the_position(depths, first, sibling, prefixes)


def _agree(depths: Ids, first: Ids, sibling: Ids) -> bool:
    """Whether every pointer leads to the depth that it should, padding's too."""
    if depths[:, 0].any() or max(first.max(), sibling.max()) >= first.shape[1]:
        return False
    for pointer, further in ((first, 1), (sibling, 0)):
        request, node = np.nonzero(pointer >= 0)
        if (depths[request, pointer[request, node]] != depths[request, node] + further).any():
            return False
    return True


def _name_the_position(depths: Ids, first: Ids, sibling: Ids, prefixes: Ids) -> None:
    for request in range(len(depths)):
        reached = [(0, 0)]  # node, depth
        for node, depth in reached:
            if depths[request, node] != depth:
                raise InvalidArgument(
                    f"positions[{request}, {node}]={depths[request, node] + prefixes[request]}, but must be"
                    f" {depth + prefixes[request]}: the prefix's length plus the node's depth"
                )
            child = int(first[request, node])
            while child != -1:
                reached.append((child, depth + 1))
                child = int(sibling[request, child])
