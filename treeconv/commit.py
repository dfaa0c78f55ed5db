"""What a step emits in the end: the verifier's tokens up to the first stop token, and the slots to keep.

The same on any device, without waiting for it: a CUDA graph can hold it behind the verifier.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treeconv._validate import check_int
from treeconv.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from treeconv.tree import VerifyOutput

__all__ = ["Commit", "commit"]


@dataclass(frozen=True)
class Commit:
    """What is left of a :class:`~treeconv.tree.VerifyOutput` after the stop tokens.

    Args:
        accept_index: ``[B, depth_cap]`` int32, the flat indices whose predictions are emitted, root first, -1
            behind: the slots whose keys and values are kept.

        emitted: ``[B, depth_cap]`` int32, the emitted token after each of them; -1 behind.

        num_emitted: ``[B]`` int32; 0 where ``status`` is not 0.

        num_accepted: ``[B]`` int32, drafts among the emitted: one less than ``num_emitted`` where the bonus
            token was emitted, else all of them.

        is_finished: ``[B]`` bool, whether a stop token was emitted; it is the last one then.
    """

    accept_index: torch.Tensor
    emitted: torch.Tensor
    num_emitted: torch.Tensor
    num_accepted: torch.Tensor
    is_finished: torch.Tensor

    @property
    def tokens(self) -> list[list[int]]:
        """Per request the emitted ids. Copies to the host, and so waits for the device."""
        rows = zip(self.emitted.tolist(), self.num_emitted.tolist(), strict=True)
        return [row[:count] for row, count in rows]


def commit(
    output: VerifyOutput, stop_token_ids: Sequence[int] | Sequence[Sequence[int]] | torch.Tensor = ()
) -> Commit:
    """Cut each request's tokens behind its first stop token, which is emitted itself.

    Only emitted tokens count: a stop token that was drafted and refused ends nothing.

    Args:
        output: of :func:`~treeconv.verify`.

        stop_token_ids: ids >= 0 for all requests, or a sequence of them per request; or a tensor of integers
            on the output's device: ``[S]``, or ``[B, S]`` with -1 where a request has fewer.

    Raises:
        InvalidArgument: an id that is no integer >= 0, or not one sequence per request.
    """
    import torch  # noqa: PLC0415

    index, counts = output.accept_index, output.accept_token_num
    size, cap = index.shape
    places = torch.arange(cap, device=index.device)
    is_emitted = (places <= counts[:, None]) & (index >= 0)  # accepted drafts, then the bonus token
    emitted = output.predicts[index.clamp(min=0).long()]
    stops = _stops(stop_token_ids, size, index.device)
    is_stop = (emitted[:, :, None] == stops[:, None, :]).any(dim=2) & is_emitted
    stops_before = is_stop.cumsum(dim=1) - is_stop.long()
    is_emitted = is_emitted & (stops_before == 0)
    num_emitted = is_emitted.sum(dim=1, dtype=torch.int32)
    return Commit(
        accept_index=torch.where(is_emitted, index, -1),
        emitted=torch.where(is_emitted, emitted, -1),
        num_emitted=num_emitted,
        num_accepted=torch.minimum(counts, num_emitted),
        is_finished=is_stop.any(dim=1),
    )


def _stops(given: Any, size: int, device: torch.device) -> torch.Tensor:
    """``[1 or B, S]`` int64, -1 in padding; tensors are taken as they are."""
    import torch  # noqa: PLC0415

    if isinstance(given, torch.Tensor):
        is_integral = not given.dtype.is_floating_point and given.dtype is not torch.bool
        if not is_integral or given.ndim not in (1, 2) or (given.ndim == 2 and given.shape[0] != size):
            raise InvalidArgument(
                f"stop_token_ids is {tuple(given.shape)} {given.dtype}, but must be integers, [S] or"
                f" [{size}, S]"
            )
        return given[None] if given.ndim == 1 else given
    rows = list(given)
    if not rows or not hasattr(rows[0], "__len__"):
        rows = [rows]
    elif len(rows) != size:
        raise InvalidArgument(
            f"len(stop_token_ids)={len(rows)}, but must be {size}, one sequence per request"
        )
    checked = [
        [check_int(token, f"stop_token_ids[{request}][{place}]", 0) for place, token in enumerate(row)]
        for request, row in enumerate(rows)
    ]
    width = max(map(len, checked))
    padded = [[*row, *[-1] * (width - len(row))] for row in checked]
    return torch.tensor(padded, dtype=torch.int64, device=device).view(len(checked), width)
