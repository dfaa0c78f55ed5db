"""Thousands of random verification calls at once, made as tensors on a device: the rare is made often.

Shapes from chains to stars, siblings among token 0 and the last one, ties, -inf, zero mass, greedy beside
tiny and huge temperatures, and coins planted just outside the ambiguity band of a boundary (or, where
float32 is exact, at the boundary itself and one unit below it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import torch

from treeconv.case import Request, VerifyCase
from treeconv.tree import Coins, DraftTree, VerifyInput
from treeconv.wide_oracle import law_of_rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treeconv.case import RowsKind

__all__ = ["WideCalls", "random_calls"]

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_TEMPERATURES = (0.0, 0.0, 1e-40, 1e-4, 0.01, 0.3, 0.6, 0.6, 0.8, 0.8, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 100.0)
_BITS = (1.0, 2.0, 4.0, 12.0, 12.0)
_PADDING = -2  # a parent that no node is
_POOL = 4096  # rows are taken from so many: a fresh one for every slot would be most of the work


@dataclass(frozen=True)
class WideCalls:
    """B requests on a device.

    Args:
        parents: ``[B, N]`` int64, -1 at the root, -2 in padding.

        batch: the same trees in the converted form, ``retrieve_index`` for calls of ``call_size`` requests.

        rows: ``[B, N, V]`` logits or dyadic probabilities; NaN in padding.

        temperature: ``[B]`` float32.

        coins: ``[B, N]`` and ``[B]``.

        depth_cap: accept slots, root included.

        kind: "logits" or "probs".

        call_size: requests a call; the last call may be smaller.
    """

    parents: torch.Tensor
    batch: VerifyInput
    rows: torch.Tensor
    temperature: torch.Tensor
    coins: Coins
    depth_cap: int
    kind: RowsKind
    call_size: int

    def __len__(self) -> int:
        return len(self.temperature)

    def call(self, start: int) -> WideCalls:
        """The call of ``call_size`` requests that begins with this one."""
        part = slice(start, start + self.call_size)
        names = self.batch.__dataclass_fields__
        return replace(
            self,
            parents=self.parents[part],
            batch=VerifyInput(**{name: getattr(self.batch, name)[part] for name in names}),
            rows=self.rows[part],
            temperature=self.temperature[part],
            coins=Coins(self.coins.accept[part], self.coins.final[part]),
        )

    def case(self, requests: Sequence[int]) -> VerifyCase:
        """Some of the requests as a case for the exact oracle."""
        made = []
        for request in requests:
            parents = [parent for parent in self.parents[request].tolist() if parent != _PADDING]
            size = len(parents)
            tokens = self.batch.candidates[request, :size].tolist()
            made.append(
                Request(
                    DraftTree(tuple(parents), tuple(tokens)),
                    self.rows[request, :size].float().cpu().numpy(),
                    float(self.temperature[request]) if self.kind == "logits" else 1.0,
                    self.coins.accept[request, :size].cpu().numpy(),
                    float(self.coins.final[request]),
                )
            )
        dtype = str(self.rows.dtype).removeprefix("torch.")
        slots = self.parents.shape[1]
        return VerifyCase(tuple(made), self.kind, slots, self.depth_cap, dtype)


class _Random:
    """Uniform numbers of one generator."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.device = device
        self.generator = torch.Generator(device).manual_seed(seed)

    def uniform(self, *shape: int) -> torch.Tensor:
        """Multiples of 2**-24 in [0, 1)."""
        return torch.rand(shape, generator=self.generator, device=self.device)

    def below(self, limit: torch.Tensor | int, *shape: int) -> torch.Tensor:
        """Integers in [0, limit); 0 where the limit is."""
        picked = (self.uniform(*shape) * limit).long()
        return torch.minimum(picked, (torch.as_tensor(limit, device=self.device) - 1).clamp(min=0))

    def pick(self, values: Sequence[float], *shape: int) -> torch.Tensor:
        """Any of some values."""
        return torch.tensor(values, device=self.device)[self.below(len(values), *shape)]

    def chance(self, share: float, *shape: int) -> torch.Tensor:
        """True for about this share."""
        return self.uniform(*shape) < share


def random_calls(
    seed: int,
    count: int,
    *,
    num_slots: int = 16,
    vocab_size: int = 64,
    device: torch.device | str = "cpu",
    kind: Literal["logits", "probs"] = "logits",
    rows_dtype: str = "float32",
    depth_cap: int | None = None,
    call_size: int = 1024,
) -> WideCalls:
    """Random requests; a function of the arguments and, since each has its own generator, of the device.

    Args:
        seed: fixes everything.

        count: B.

        num_slots: N, at most V.

        vocab_size: V.

        device: where they are made.

        kind: "probs" gives dyadic laws, whose every float32 sum is exact.

        rows_dtype: of logits.

        depth_cap: default: N, which caps nothing.

        call_size: requests a call.
    """
    N, V = num_slots, vocab_size
    assert N <= V, "a node's children have distinct tokens"
    random = _Random(seed, torch.device(device))
    parents = _parents(random, count, N)
    batch = _layout(random, parents, V, call_size)
    kinds = min(_POOL, 2 * count)
    pool = random.below(kinds, count, N)
    if kind == "logits":
        temperature = random.pick(_TEMPERATURES, count)
        rows = _logits(random, kinds, V)[pool]
        # Some temperatures apart: else every tiny one is as good as greedy.
        is_scaled = (temperature > 1e-7) & (temperature < 0.5) & random.chance(0.6, count)
        rows *= torch.where(is_scaled, temperature, 1.0)[:, None, None]
        favour = (
            random.pick((0.0, 4.0, 8.0, 12.0), count, 1) * torch.where(is_scaled, temperature, 1.0)[:, None]
        )
        rows = _favoured(rows, parents, batch.candidates, favour * random.uniform(count, N))
        rows = rows.to(_DTYPES[rows_dtype])
    else:
        temperature = torch.ones(count, device=random.device)
        rows = _with_top_drafted(random, _dyadic(random, kinds, V)[pool], parents, batch.candidates)
    rows.masked_fill_((parents == _PADDING)[:, :, None], torch.nan)
    calls = WideCalls(
        parents=parents,
        batch=batch,
        rows=rows,
        temperature=temperature,
        coins=Coins(random.uniform(count, N), random.uniform(count)),
        depth_cap=depth_cap or N,
        kind=kind,
        call_size=call_size,
    )
    return replace(calls, coins=_planted_coins(random, calls))


def _parents(random: _Random, B: int, N: int) -> torch.Tensor:
    node = torch.arange(N, device=random.device)
    before = (node - 1).clamp(min=0)
    size = torch.where(random.chance(0.5, B), N, 1 + random.below(N, B))
    pick = random.below(node.clamp(min=1), B, N)
    arity = 2 + random.below(3, B, 1)
    shapes = torch.stack(
        [
            pick,  # any
            (before - pick % 3).clamp(min=0),  # deep and bushy
            pick // 4,  # wide
            before.expand(B, N),  # chain
            torch.zeros_like(pick),  # star
            before // arity,  # k-ary
            torch.where(node % 2 == 1, before, (node - 2).clamp(min=0)).expand(B, N),  # comb
        ]
    )
    shape = random.below(len(shapes), B)
    parents = torch.minimum(shapes[shape, torch.arange(B, device=random.device)], before)
    parents[:, 0] = -1
    return parents.masked_fill_(node >= size[:, None], _PADDING)


def _layout(random: _Random, parents: torch.Tensor, V: int, call_size: int) -> VerifyInput:
    """The converted form, siblings under distinct tokens."""
    B, N = parents.shape
    device = random.device
    # One spare column, for what padding points at.
    first = torch.full((B, N + 1), -1, dtype=torch.int64, device=device)
    sibling, rank, depth = torch.full_like(first, -1), torch.zeros_like(first), torch.zeros_like(first)
    seen = torch.zeros_like(first)
    at = torch.where(parents == _PADDING, N, parents)
    for node in range(1, N):
        parent = at[:, node : node + 1]
        rank[:, node : node + 1] = seen.gather(1, parent)
        depth[:, node : node + 1] = depth.gather(1, parent) + 1
        seen.scatter_add_(1, parent, torch.ones_like(parent))
    for node in range(N - 1, 0, -1):  # from the last: what was first becomes the next sibling
        parent = at[:, node : node + 1]
        sibling[:, node : node + 1] = first.gather(1, parent)
        first.scatter_(1, parent, node)
    is_padding = parents == _PADDING
    # Steps coprime to V: siblings' tokens are distinct; token 0, or the last one, is often among the first.
    steps = [step for step in (1, 3, 5, 7, 11, 13, V - 1) if math.gcd(step, V) == 1]
    step = random.pick(steps, B, 1)
    base = torch.where(random.chance(0.4, B, 1), random.pick((0, V - 1), B, 1), random.below(V, B, 1))
    tokens = (base + step * (rank[:, :N] + parents.clamp(min=0) * random.below(3, B, 1))) % V
    tokens[:, 0] = random.below(V, B)
    flat = torch.arange(B, device=device)[:, None] % call_size * N + torch.arange(N, device=device)
    eldest, next_one = (x[:, :N].masked_fill(is_padding, -1) for x in (first, sibling))
    return VerifyInput(
        tokens.masked_fill_(is_padding, 0),
        flat,
        eldest,
        next_one,
        depth[:, :N].masked_fill(is_padding, 0),
        torch.zeros(B, dtype=torch.int64, device=device),
    )


def _logits(random: _Random, R: int, V: int) -> torch.Tensor:
    """Rows of many kinds: flat, peaked, tied, and with only some tokens allowed."""
    rows = torch.empty((R, V), device=random.device).normal_(generator=random.generator)
    rows *= random.pick((0.0, 1.0, 1.0, 3.0, 10.0), R, 1)
    rows = torch.where(random.chance(0.25, R, 1), rows.round(), rows)
    masked = random.uniform(R, V) < random.pick((0.0, 0.0, 0.5, 0.9), R, 1)
    masked.scatter_(1, random.below(V, R, 1), value=False)
    return rows.masked_fill_(masked, -torch.inf)


def _dyadic(random: _Random, R: int, V: int) -> torch.Tensor:
    """Rows of multiples of a power of two that sum to 1, many of them zero."""
    whole = 2.0 ** random.pick(_BITS, R, 1)
    weights = random.uniform(R, V) ** random.pick((1.0, 4.0, 16.0), R, 1)
    weights.masked_fill_(random.uniform(R, V) < random.pick((0.0, 0.5, 0.9), R, 1), 0.0)
    shares = (weights / weights.sum(1, keepdim=True).clamp(min=1e-9) * whole).floor_()
    rest = whole - shares.sum(1, keepdim=True)
    return shares.scatter_add_(1, random.below(V, R, 1), rest) / whole


def _favoured(
    rows: torch.Tensor, parents: torch.Tensor, names: torch.Tensor, amount: torch.Tensor
) -> torch.Tensor:
    """Add ``amount [B, N]`` at each child's token in its parent's row, so that walks go deep."""
    B, N, V = rows.shape
    at = parents.clamp(min=0) * V + names
    amount = amount.masked_fill(parents < 0, 0.0)
    return rows.view(B, N * V).scatter_add_(1, at, amount).view(B, N, V)


def _with_top_drafted(
    random: _Random, rows: torch.Tensor, parents: torch.Tensor, names: torch.Tensor
) -> torch.Tensor:
    """Swap each row's largest mass with that of one of the node's children, half the time."""
    B, N, _ = rows.shape
    drafted = torch.full((B, N + 1), -1, dtype=torch.int64, device=rows.device)
    wanted = (parents >= 0) & random.chance(0.5, B, N)
    drafted.scatter_(1, torch.where(wanted, parents, N), names)
    top, token = rows.max(2, keepdim=True)
    other = drafted[:, :N, None]
    other = torch.where(other < 0, token, other)
    swapped = rows.gather(2, other)
    return rows.scatter_(2, token, swapped).scatter_(2, other, top)


def _planted_coins(random: _Random, calls: WideCalls) -> Coins:
    """Coins at the edges: 0, the last below 1, 1; beside a boundary of a child or of the bonus draw."""
    B, N = calls.parents.shape
    accept, final = calls.coins.accept, calls.coins.final
    edges = (0.0, 1 - 2.0**-24, 1.0)
    accept = torch.where(random.chance(0.3, B, 1), accept / 4, accept)  # for deep walks
    accept = torch.where(random.chance(0.03, B, N), random.pick(edges, B, N), accept)
    final = torch.where(random.chance(0.05, B), random.pick(edges, B), final)
    temperature = calls.temperature if calls.kind == "logits" else None

    # In half of the requests: beside the boundary behind a child, half the time behind the root's first.
    part = slice(0, B // 2)
    parents, names = calls.parents[part], calls.batch.candidates[part]
    lanes = torch.arange(len(parents), device=random.device)
    last = (parents != _PADDING).sum(1) - 1
    child = 1 + random.below(last.clamp(min=1), len(lanes))
    child = torch.minimum(torch.where(random.chance(0.5, len(lanes)), 1, child), last)
    node = parents[lanes, child].clamp(min=0)
    law = law_of_rows(calls.rows[part][lanes, node], None if temperature is None else temperature[part])
    kids = law.children(parents == node[:, None], names)
    beside = _beside(random, kids.lower[lanes, child], kids.upper[lanes, child])
    accept[part] = accept[part].scatter(
        1, node[:, None], torch.where(child > 0, beside, accept[lanes, node])[:, None]
    )

    # In a quarter: beside a boundary of the root's bonus. The coin is the last one below 1, to reject the
    # children.
    part = slice(B // 2, B // 2 + B // 4)
    parents, names = calls.parents[part], calls.batch.candidates[part]
    lanes = torch.arange(len(parents), device=random.device)
    law = law_of_rows(calls.rows[part][:, 0], None if temperature is None else temperature[part])
    left = law.residual(parents == 0, names)
    token = torch.where(left.masses > 0, random.uniform(*left.masses.shape), -1.0).argmax(1)
    at = left.sums[lanes, token] / left.sums[:, -1]
    width = left.width[:, 0]
    beside = _beside(random, at * (1 - width) - width, at * (1 + width) + width)
    final[part] = torch.where(at < 1, beside, final[part])
    accept[part, 0] = 1 - 2.0**-24
    return Coins(accept.contiguous(), final.contiguous())


def _beside(random: _Random, lower: torch.Tensor, upper: torch.Tensor) -> torch.Tensor:
    """The last float32 below the band, or the first at or above it, within [0, 1]."""
    down, up = torch.tensor(-1.0, device=lower.device), torch.tensor(2.0, device=lower.device)
    low, high = lower.float(), upper.float()
    low = torch.where(low.double() >= lower, torch.nextafter(low, down), low)
    high = torch.where(high.double() < upper, torch.nextafter(high, up), high)
    return torch.where(random.chance(0.5, *lower.shape), low, high).clamp(0.0, 1.0)
