"""Random batches at any width, for the laws of a device; :mod:`treeconv.wide_oracle` decides them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from treeconv.convert import to_verify_input
from treeconv.tree import Coins, DraftTree, VerifyInput, VerifyOutput
from treeconv.wide_oracle import WideDecisions, decide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

__all__ = ["WideBatch", "float64_law", "random_batch", "random_trees"]


@dataclass(frozen=True)
class WideBatch:
    """A batch of random calls as tensors on a device.

    Args:
        batch: ``[B, N]`` trees.

        logits: ``[B, N, V]``.

        temperature: ``[B]`` float32.

        coins: of ``torch.rand``, so multiples of 2**-24.

        parents: ``[B, N]`` int64, -1 at the root, -2 in padding.
    """

    batch: VerifyInput
    logits: torch.Tensor
    temperature: torch.Tensor
    coins: Coins
    parents: torch.Tensor

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
            self.parents[index],
        )

    def disagreements(
        self, output: VerifyOutput, depth_cap: int, coins: Coins | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, WideDecisions]:
        """``[B]`` bool: what surely differs from the float64 walk, and what float32 may decide otherwise.

        Args:
            output: of all requests, in one call.

            depth_cap: that of the call.

            coins: default: the batch's own.
        """
        coins = coins or self.coins
        decisions = decide(
            self.parents,
            self.batch.candidates,
            self.logits,
            self.temperature,
            coins.accept,
            coins.final,
            depth_cap,
        )
        count, slots = self.parents.shape
        differs = decisions.differing(output, slots, count, reports_status=False)
        return differs & ~decisions.unsure, decisions.unsure, decisions


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
    node = np.arange(num_slots)
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
        parents=torch.from_numpy(np.where(node >= sizes[:, None], -2, parents)).to(device),
    )


def float64_law(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """``[B, N, V]`` float64 softmax at each request's temperature; 0 is one-hot, lowest-index argmax."""
    values = logits.double()
    greedy = (temperature == 0)[:, None, None]
    divisor = torch.where(greedy, 1.0, temperature[:, None, None].double())
    law = ((values - values.amax(dim=2, keepdim=True)) / divisor).softmax(dim=2)
    one_hot = torch.zeros_like(law).scatter_(2, logits.argmax(dim=2, keepdim=True), 1.0)
    return torch.where(greedy, one_hot, law)
