"""The tests of the rules that read q, on torch vectors, for the ``eager`` backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["accept_by_ratio"]


def accept_by_ratio(
    p: torch.Tensor, draft_row: torch.Tensor, tokens: Sequence[int], coins: Sequence[float]
) -> tuple[int, torch.Tensor]:
    """Children in turn, each accepted iff ``coin * q < p``; waits for the device at each.

    After a rejection the residual ``relu(p - q)`` takes the place of p (which stays where rounding left
    none of it), and q is renormalised without that child's token. One child is the chain rule, several the
    recursive.

    Args:
        p: ``[W]`` float32, the target's law, 0 behind the vocabulary.

        draft_row: ``[V]``, V <= W; what is negative or not finite has no mass.

        tokens: of the children, in test order.

        coins: one each.

    Returns:
        ``(place, p)`` of the accepted child, or ``(-1, left)``: what the bonus is drawn from, up to a factor.
    """
    q = torch.zeros_like(p)
    q[: len(draft_row)] = torch.where(draft_row.isfinite() & (draft_row > 0), draft_row, 0)
    for place, (token, coin) in enumerate(zip(tokens, coins, strict=True)):
        if coin * float(q[token]) < float(p[token]):  # the host's doubles hold the product exactly
            return place, p
        left = (p - q).clamp_(min=0)
        total = left.sum()
        if total > 0:
            p = left if place == len(tokens) - 1 else left / total
        q[token] = 0
        rest = q.sum()
        if rest > 0:
            q = q / rest
    return -1, p
