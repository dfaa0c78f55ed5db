"""Thousands of trees at once on a device: random batches, and the walk in float64 with its margins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treeconv.convert import to_verify_input
from treeconv.tree import Coins, DraftTree, VerifyInput, VerifyOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["BAND", "Walk64", "WideBatch", "float64_law", "float64_walk", "random_batch", "random_trees"]

#: Coins closer than this to a boundary (of the normalised running sums) may be decided either way in float32:
#: 256 units of 2**-24. A softmax's masses err by (4 |a| + 8) units each, relatively, where a = (x - max) / T
#: is at most 40 in these batches; sums add fewer than 64 units. See ``oracle.enclosure``.
BAND = 256 * 2.0**-24


@dataclass(frozen=True)
class WideBatch:
    """A batch of random calls as tensors on a device.

    Args:
        batch: ``[B, N]`` trees.

        logits: ``[B, N, V]``.

        temperature: ``[B]`` float32.

        coins: of ``torch.rand``, so multiples of 2**-24.
    """

    batch: VerifyInput
    logits: torch.Tensor
    temperature: torch.Tensor
    coins: Coins

    def take(self, requests: Sequence[int] | torch.Tensor) -> WideBatch:
        """Some of the requests as a batch of their own."""
        index = torch.as_tensor(requests, device=self.logits.device)
        names = [name for name in self.batch.__dataclass_fields__ if name != "retrieve_index"]
        fields = {name: getattr(self.batch, name)[index] for name in names}
        N = self.batch.num_draft_tokens
        flat = torch.arange(len(index) * N, device=index.device).view(-1, N)
        return WideBatch(
            VerifyInput(**fields, retrieve_index=flat),
            self.logits[index],
            self.temperature[index],
            Coins(self.coins.accept[index], self.coins.final[index]),
        )


def random_trees(
    rng: np.random.Generator, count: int, max_nodes: int, vocab_size: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Parents (-1 in padding), tokens and sizes of random trees: ``[B, N]``, ``[B, N]``, ``[B]``.

    Shapes from chains to stars, sizes from 1 node up, tokens distinct within a tree; tokens 0 and V - 1 are
    among them. Needs ``vocab_size >= max_nodes``.
    """
    sizes = rng.integers(1, max_nodes + 1, count)
    sizes[rng.random(count) < 0.5] = max_nodes
    node = np.arange(max_nodes)
    picks = (rng.random((count, max_nodes)) * np.maximum(node, 1)).astype(np.int64)
    near = np.maximum(node - 1 - picks % 3, 0)
    shape = rng.integers(0, 4, (count, 1))
    chains = np.broadcast_to(np.maximum(node - 1, 0), picks.shape)
    parents = np.select([shape == 0, shape == 1, shape == 2], [picks, near, picks // 4], chains)
    parents = np.minimum(parents, np.maximum(node - 1, 0))
    parents[:, 0] = -1
    # i * step stays below V, so the tokens are distinct, whatever they are shifted by.
    step = rng.integers(1, max(vocab_size // max_nodes, 1) + 1, (count, 1))
    tokens = (rng.integers(0, vocab_size, (count, 1)) + node * step) % vocab_size
    padding = node >= sizes[:, None]
    parents[padding] = -1
    tokens[padding] = 0
    return parents, tokens, sizes


def random_batch(
    rng: np.random.Generator,
    count: int,
    num_slots: int,
    vocab_size: int,
    device: torch.device | str,
    *,
    dtype: torch.dtype = torch.float32,
    temperatures: Sequence[float] = (0.0, 0.3, 0.7, 1.0, 2.0),
    favoured: float = 3.0,
) -> WideBatch:
    """Random trees, logits that favour a child of each node by ``favoured``, temperatures and coins."""
    parents, tokens, sizes = random_trees(rng, count, num_slots, vocab_size)
    trees = [
        DraftTree(tuple(map(int, parent[:size])), tuple(map(int, token[:size])))
        for parent, token, size in zip(parents, tokens, sizes, strict=True)
    ]
    batch = to_verify_input(trees, num_slots, device=device)
    generator = torch.Generator(device).manual_seed(int(rng.integers(2**62)))

    def uniform(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator, device=device)

    logits = torch.empty((count, num_slots, vocab_size), dtype=dtype, device=device)
    logits.normal_(generator=generator)
    # Children of one node in turn: the newest mark on a token stands.
    child = torch.from_numpy(np.where(parents >= 0, parents, 0)).to(device)
    bump = torch.where(torch.from_numpy(parents >= 0).to(device), favoured * uniform(count, num_slots), 0.0)
    request = torch.arange(count, device=device)[:, None].expand(count, num_slots)
    logits.index_put_((request, child, batch.candidates), bump.to(dtype), accumulate=True)
    chosen = rng.choice(np.array(temperatures, np.float32), count)
    return WideBatch(
        batch=batch,
        logits=logits,
        temperature=torch.from_numpy(chosen).to(device),
        coins=Coins(uniform(count, num_slots), uniform(count)),
    )


@dataclass(frozen=True)
class Walk64:
    """What float64 decides.

    Args:
        nodes: ``[B, depth_cap]`` accepted nodes, root first, -1 behind.

        bonus: ``[B]`` the token drawn at the end.

        margin: ``[B]`` float64, the least distance of any coin that was used from a boundary.
    """

    nodes: torch.Tensor
    bonus: torch.Tensor
    margin: torch.Tensor

    def disagreements(self, output: VerifyOutput, num_slots: int, band: float = BAND) -> tuple[Any, Any]:
        """``[B]`` bool: where an output differs outside the band, and which requests are inside it."""
        count = len(self.bonus)
        base = num_slots * torch.arange(count, device=self.nodes.device)[:, None]
        want = torch.where(self.nodes >= 0, self.nodes + base, -1)
        length = (self.nodes >= 0).sum(dim=1)
        last = want.gather(1, length[:, None] - 1)
        differs = (output.accept_index.long() != want).any(dim=1)
        differs |= output.accept_token_num.long() != length - 1
        differs |= output.predicts.long().gather(0, last[:, 0]) != self.bonus
        inside = self.margin < band
        return differs & ~inside, inside


def float64_law(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """``[B, N, V]`` float64 softmax at each request's temperature; 0 is one-hot, lowest-index argmax."""
    values = logits.double()
    greedy = (temperature == 0)[:, None, None]
    divisor = torch.where(greedy, 1.0, temperature[:, None, None].double())
    law = ((values - values.amax(dim=2, keepdim=True)) / divisor).softmax(dim=2)
    one_hot = torch.zeros_like(law).scatter_(2, logits.argmax(dim=2, keepdim=True), 1.0)
    return torch.where(greedy, one_hot, law)


def float64_walk(batch: VerifyInput, law: torch.Tensor, coins: Coins, depth_cap: int) -> Walk64:
    """The target-only walk of every request, in float64. ``law`` is ``[B, N, V]`` and >= 0."""
    count, _, _ = law.shape
    device = law.device
    every = torch.arange(count, device=device)
    node = torch.zeros(count, dtype=torch.int64, device=device)
    walking = torch.ones(count, dtype=torch.bool, device=device)
    nodes = torch.full((count, depth_cap), -1, dtype=torch.int64, device=device)
    bonus = torch.full((count,), -1, dtype=torch.int64, device=device)
    margin = torch.full((count,), torch.inf, dtype=torch.float64, device=device)
    accept, final = coins.accept.double(), coins.final.double()
    for level in range(depth_cap):
        nodes[:, level] = torch.where(walking, node, -1)
        residual = law[every, node].clone()
        coin = accept[every, node]
        child = torch.where(walking & (level + 1 < depth_cap), batch.retrieve_next_token[every, node], -1)
        accepted = torch.full_like(node, -1)
        last = torch.full_like(node, -1)
        acc = torch.zeros_like(coin)
        while bool((child >= 0).any()):
            has = child >= 0
            at = child.clamp(min=0)
            token = batch.candidates[every, at]
            mass = torch.where(has, residual[every, token], 0.0)
            acc = acc + mass
            margin = torch.where(has, torch.minimum(margin, (coin - acc).abs()), margin)
            last = torch.where(has & (mass > 0), at, last)
            takes = has & (mass > 0) & (coin < acc)
            accepted = torch.where(takes, at, accepted)
            kept = residual[every, token]
            residual[every, token] = torch.where(has & ~takes, 0.0, kept)
            child = torch.where(has & ~takes, batch.retrieve_next_sibling[every, at], -1)
        total = residual.sum(dim=1)
        accepted = torch.where((total <= 0) & (accepted < 0), last, accepted)
        stops = walking & (accepted < 0)
        shares = residual.cumsum(dim=1) / total.clamp(min=1e-300)[:, None]
        gaps = torch.where(residual > 0, (shares - final[:, None]).abs(), torch.inf)
        drawn = (shares <= final[:, None]).sum(dim=1)
        highest = torch.where(residual > 0, torch.arange(law.shape[2], device=device), -1).amax(dim=1)
        bonus = torch.where(stops, torch.minimum(drawn, highest), bonus)
        margin = torch.where(stops, torch.minimum(margin, gaps.amin(dim=1)), margin)
        walking = walking & (accepted >= 0)
        node = torch.where(walking, accepted, node)
        if not bool(walking.any()):
            break
    return Walk64(nodes, bonus, margin)
