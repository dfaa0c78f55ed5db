"""Samplers under test, behind one small interface: the exact oracle and every CPU backend."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from treeconv import Coins, DraftTree, RowStatus, oracle, to_verify_input, verify, verify_probs
from treeconv.filters import Cuts

if TYPE_CHECKING:
    from collections.abc import Sequence

CPU_BACKENDS = ("reference", "eager")


@dataclass(frozen=True)
class Decision:
    """What a sampler did with one tree: accepted nodes, emitted tokens (bonus last), status."""

    path: tuple[int, ...]
    tokens: tuple[int, ...]
    status: RowStatus = RowStatus.OK


class Sampler:
    """One sampler by name; rows are probabilities, or logits where a temperature is given."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(
        self,
        tree: DraftTree,
        rows: Sequence[Sequence[float]],
        *,
        temperature: float | None = None,
        accept: dict[int, float] | float = 0.5,
        final: float = 0.5,
        depth_cap: int | None = None,
        dtype: torch.dtype = torch.float32,
        filters: dict[str, object] | None = None,
    ) -> Decision:
        """Decide one tree. ``accept``: node -> coin, or one coin for all; unstated coins are .5.

        ``filters``: top_k, top_p, min_p, filter_order, as ``verify`` takes them.
        """
        coins = (
            [accept] * len(tree)
            if not isinstance(accept, dict)
            else [accept.get(node, 0.5) for node in range(len(tree))]
        )
        return self.many(tree, rows, [(coins, final)], temperature, depth_cap, dtype, filters)[0]

    def many(
        self,
        tree: DraftTree,
        rows: Sequence[Sequence[float]],
        coins: Sequence[tuple[Sequence[float], float]],
        temperature: float | None = None,
        depth_cap: int | None = None,
        dtype: torch.dtype = torch.float32,
        filters: dict[str, object] | None = None,
    ) -> list[Decision]:
        """Decide the same tree under several coin vectors."""
        # Rows that the case leaves unsaid are NaN: looking at one would show.
        full = np.full((len(tree), len(rows[0])), np.nan, np.float32)
        full[: len(rows)] = rows
        typed = torch.from_numpy(full).to(dtype)
        if self.name == "oracle":
            given_filters = dict(filters or {})
            cuts = Cuts(order=given_filters.pop("filter_order", "sequential"), **given_filters)
            law = (
                oracle.TargetRows.exact(full, cuts)
                if temperature is None
                else oracle.TargetRows.from_logits(typed, temperature, cuts)
            )
            walks = [oracle.walk(tree, law, Coins(accept, final), depth_cap) for accept, final in coins]
            return [Decision(walk.path, walk.tokens, walk.status) for walk in walks]
        batch = to_verify_input([tree] * len(coins))
        given = Coins([accept for accept, _ in coins], [final for _, final in coins])
        copies = typed.expand(len(coins), *typed.shape)
        output = (
            verify_probs(batch, copies, given, backend=self.name, depth_cap=depth_cap, **(filters or {}))
            if temperature is None
            else verify(
                batch, copies, temperature, given, backend=self.name, depth_cap=depth_cap, **(filters or {})
            )
        )
        paths = [
            tuple(index - request * len(tree) for index in row if index != -1)
            for request, row in enumerate(output.accept_index.tolist())
        ]
        statuses = map(RowStatus, output.status.tolist())
        return [
            Decision(path, tuple(tokens), status)
            for path, tokens, status in zip(paths, output.tokens, statuses, strict=True)
        ]

    def decisions(
        self, tree: DraftTree, rows: Sequence[Sequence[float]], grid: int, temperature: float | None = None
    ) -> dict[Decision, Fraction]:
        """The exact law of what is decided, by enumeration of coins ``(k + 1/2) / grid``.

        Exact where every boundary is a multiple of ``1 / grid``: no coin then lies near one.
        """
        ticks = [(k + 0.5) / grid for k in range(grid)]
        inner = [node for node in range(len(tree)) if tree.children[node]]
        coins = []
        for final, *accepts in product(ticks, repeat=1 + len(inner)):
            vector = [0.5] * len(tree)
            for node, coin in zip(inner, accepts, strict=True):
                vector[node] = coin
            coins.append((vector, final))
        counts = Counter(self.many(tree, rows, coins, temperature))
        return {decision: Fraction(count, len(coins)) for decision, count in counts.items()}

    def first_token_law(
        self, tree: DraftTree, rows: Sequence[Sequence[float]], grid: int, temperature: float | None = None
    ) -> list[Fraction]:
        """``[V]``, the exact law of the first emitted token."""
        law = [Fraction(0)] * len(rows[0])
        for decision, chance in self.decisions(tree, rows, grid, temperature).items():
            law[decision.tokens[0]] += chance
        return law


@pytest.fixture(params=["oracle", *CPU_BACKENDS])
def sampler(request: pytest.FixtureRequest) -> Sampler:
    return Sampler(request.param)


@pytest.fixture(params=CPU_BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param
