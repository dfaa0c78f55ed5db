"""The lazy walk in plain torch, on the CPU or a CUDA device, batched over requests.

One step per tree level: the current row of every request still walking is gathered, softmaxed and
tested at once. Rows that no walk visits are never read. At most one float32 row per walking request
is alive at a time, and its weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from treeconv.backends.base import BackendTraits
from treeconv.tree import Coins, RowStatus, VerifyInput, VerifyOutput

__all__ = ["EagerBackend"]

_BLOCK = 512  # elements of a blocked sum: short enough to be accurate, long enough to be fast


@dataclass
class _Walk:
    """The state of all requests, ``[B]`` each; ``node`` is where each stands."""

    node: torch.Tensor
    count: torch.Tensor
    accept_index: torch.Tensor
    predicts: torch.Tensor
    status: torch.Tensor


class _Law:
    """The visited rows of the requests still walking: masses up to a factor, and that factor.

    Keeps weights ``exp((x - max) / T)`` rather than quotients: one pass less over the vocabulary.
    """

    def __init__(self, rows: torch.Tensor, temperature: torch.Tensor | None) -> None:
        peak = rows.amax(dim=1).float()
        self.status = torch.zeros(len(rows), dtype=torch.int32, device=rows.device)
        if temperature is None:
            self.weights = rows
            self.total = torch.ones_like(peak)
            empty, bad = peak == 0, rows.amin(dim=1) < 0
        else:
            empty, bad = peak == -torch.inf, torch.zeros_like(peak, dtype=torch.bool)
            is_greedy = temperature == 0
            divisor = torch.where(is_greedy, 1.0, temperature)
            self.weights = rows.to(torch.float32, copy=True)
            self.weights.sub_(peak[:, None]).div_(divisor[:, None]).exp_()
            if bool(is_greedy.any()):
                chosen = rows.argmax(dim=1)  # torch takes the lowest index among equals
                greedy = torch.zeros_like(self.weights[is_greedy])
                greedy.scatter_(1, chosen[is_greedy, None], 1.0)
                self.weights[is_greedy] = greedy
            self.total = self.weights.sum(dim=1)
        # torch's amax hands NaN on, so one look at the peak finds it.
        self.status[empty] = RowStatus.EMPTY
        self.status[peak == torch.inf] = RowStatus.POS_INF
        self.status[torch.isnan(peak) | bad] = RowStatus.NAN


def _draw_bonus(residual: torch.Tensor, coin: torch.Tensor) -> torch.Tensor:
    """Smallest t with ``cumsum(residual)(t) > coin * sum(residual)``; else the last t of positive mass.

    Two levels, so that no float32 sum runs over the whole vocabulary: the block, then the place in it.

    Args:
        residual: ``[A, V]`` float32 >= 0, some of it positive.

        coin: ``[A]`` float32.

    Returns:
        ``[A]`` int64.
    """
    size, vocab = residual.shape
    blocks = -(-vocab // _BLOCK)
    if vocab % _BLOCK:
        residual = torch.nn.functional.pad(residual, (0, blocks * _BLOCK - vocab))
    blocked = residual.view(size, blocks, _BLOCK)
    sums = blocked.sum(dim=2)
    ends = sums.cumsum(dim=1)
    # Products of two float32 are exact in float64: no rounding decides.
    target = coin.double() * ends[:, -1].double()
    has_mass = sums > 0
    places = torch.arange(blocks, device=residual.device)
    above = (ends > target[:, None]) & has_mass
    last = torch.where(has_mass, places, -1).amax(dim=1)
    block = torch.where(above.any(dim=1), above.int().argmax(dim=1), last)

    chosen = blocked.gather(1, block[:, None, None].expand(-1, 1, _BLOCK)).squeeze(1)
    before = torch.where(block > 0, ends.gather(1, (block - 1).clamp(min=0)[:, None]).squeeze(1), 0.0)
    inner = chosen.cumsum(dim=1) + before[:, None]
    positive = chosen > 0
    above = (inner > target[:, None]) & positive
    last = torch.where(positive, torch.arange(_BLOCK, device=residual.device), -1).amax(dim=1)
    return block * _BLOCK + torch.where(above.any(dim=1), above.int().argmax(dim=1), last)


class EagerBackend:
    """Torch operations, level by level; on a CUDA device it waits for the device once per level."""

    name = "eager"
    traits = BackendTraits()

    def verify(
        self,
        batch: VerifyInput,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        coins: Coins,
        depth_cap: int,
    ) -> VerifyOutput:
        """Softmax each visited row at its request's temperature, then walk."""
        return _run(batch, logits, temperature, coins, depth_cap)

    def verify_probs(
        self, batch: VerifyInput, target_probs: torch.Tensor, coins: Coins, depth_cap: int
    ) -> VerifyOutput:
        """Walk on the probabilities as they are."""
        return _run(batch, target_probs, None, coins, depth_cap)


def _run(
    batch: VerifyInput,
    rows: torch.Tensor,
    temperature: torch.Tensor | None,
    coins: Coins,
    depth_cap: int,
) -> VerifyOutput:
    size, slots = batch.candidates.shape
    device = rows.device
    walk = _Walk(
        node=torch.zeros(size, dtype=torch.int64, device=device),
        count=torch.zeros(size, dtype=torch.int32, device=device),
        accept_index=torch.full((size, depth_cap), -1, dtype=torch.int32, device=device),
        predicts=torch.full((size, slots), -1, dtype=torch.int32, device=device),
        status=torch.zeros(size, dtype=torch.int32, device=device),
    )
    walking = torch.arange(size, device=device)
    for depth in range(depth_cap):
        node = walk.node[walking]
        walk.accept_index[walking, depth] = batch.retrieve_index[walking, node].int()
        law = _Law(rows[walking, node], None if temperature is None else temperature[walking])
        usable = law.status == 0
        if not bool(usable.all()):
            _give_up(walk, walking[~usable], law.status[~usable])
            walking, node = walking[usable], node[usable]
            law.weights, law.total = law.weights[usable], law.total[usable]
            if not walking.numel():
                break
        accepted = torch.full_like(node, -1)
        if depth + 1 < depth_cap:
            accepted = _test_children(batch, law, coins.accept[walking, node], walking, node)
        stopping = accepted < 0
        if bool(stopping.any()):
            at, residual = walking[stopping], law.weights
            residual = residual if bool(stopping.all()) else residual[stopping]
            walk.predicts[at, node[stopping]] = _draw_bonus(residual, coins.final[at]).int()
            walk.count[at] = depth
        walking, node, accepted = walking[~stopping], node[~stopping], accepted[~stopping]
        if not walking.numel():
            break
        walk.predicts[walking, node] = batch.candidates[walking, accepted].int()
        walk.node[walking] = accepted
    return VerifyOutput(walk.accept_index, walk.count, walk.predicts.view(-1), walk.status)


def _give_up(walk: _Walk, requests: torch.Tensor, status: torch.Tensor) -> None:
    walk.status[requests] = status
    walk.accept_index[requests] = -1
    walk.predicts[requests] = -1


def _test_children(
    batch: VerifyInput, law: _Law, coin: torch.Tensor, walking: torch.Tensor, node: torch.Tensor
) -> torch.Tensor:
    """The accepted child of each node, or -1; rejected children leave the weights, which become the residual.

    Siblings are tested one after another, over all requests at once.
    """
    child = batch.retrieve_next_token[walking, node]
    accepted = torch.full_like(child, -1)
    last_with_mass = torch.full_like(child, -1)
    acc = torch.zeros_like(coin)
    lane = torch.arange(len(walking), device=child.device)
    while bool(((child >= 0) & (accepted < 0)).any()):
        testing = (child >= 0) & (accepted < 0)
        token = batch.candidates[walking, child.clamp(min=0)].clamp(min=0, max=law.weights.shape[1] - 1)
        weight = law.weights[lane, token]
        mass = torch.where(testing, weight / law.total, 0.0)
        acc = acc + mass
        takes = testing & (mass > 0) & (coin < acc)
        accepted = torch.where(takes, child, accepted)
        last_with_mass = torch.where(testing & (mass > 0), child, last_with_mass)
        law.weights[lane, token] = torch.where(testing & ~takes, 0.0, weight)
        child = torch.where(testing, batch.retrieve_next_sibling[walking, child.clamp(min=0)], child)
    # Children that cover the support: by rounding, or for a coin of 1, the last one takes the rest.
    uncovered = law.weights.amax(dim=1) > 0
    return torch.where((accepted < 0) & ~uncovered, last_with_mass, accepted)
