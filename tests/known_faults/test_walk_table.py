"""Known faults that are one walk: a tree, its target rows, its coins, and the one right decision."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from treeconv import DraftTree, RowStatus

NAN, INF = float("nan"), float("inf")
LAST_COIN = 1 - 2**-24


def hot(token: int, vocab: int = 3) -> list[float]:
    return [float(other == token) for other in range(vocab)]


@dataclass(frozen=True)
class Case:
    """One known fault. ``rows`` are logits where ``settings`` holds a temperature, else probabilities."""

    id: str
    tree: DraftTree
    rows: list[list[float]]
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    status: RowStatus = RowStatus.OK


def fork(*tokens: int) -> DraftTree:
    return DraftTree([-1] + [0] * len(tokens), [9, *tokens])


ROOT = fork()
CHAIN = DraftTree.chain

WALKS = [
    # K1: zero mass, edges of the running sum, coins at 0 and 1
    Case("B01 zero-mass child at coin 0", fork(2), [[0, 1, 0, 0]], (0,), (1,), {"accept": 0.0}),
    Case("B01 at every final coin 0", fork(2), [[0, 1, 0, 0]], (0,), (1,), {"accept": 0.0, "final": 0.0}),
    Case("B02 a boundary belongs above", fork(0, 1), [[0.25, 0.25, 0.5]], (0, 2), (1, 2), {"accept": 0.25}),
    Case("B04 a draw of the whole mass", ROOT, [[0.5, 0.4999, 0, 0]], (0,), (1,), {"final": 1.0}),
    Case("B04 and just below it", ROOT, [[0.5, 0.4999, 0, 0]], (0,), (1,), {"final": LAST_COIN}),
    *(
        Case(f"B05 one-hot at coin {coin:.3g}", ROOT, [hot(1, 5)], (0,), (1,), {"final": coin})
        for coin in (0.0, 2.0**-149, 0.5, LAST_COIN, 1.0)
    ),
    # K3: temperature lost or applied twice
    Case("B15 sampled, not argmax", fork(1), [[0.6, 0.4]], (0, 1), (1, 0), {"accept": 0.3}),
    Case("B16 temperature applied", fork(0), [[2, 0]], (0, 1), (0, 0), {"accept": 0.9, "temperature": 0.5}),
    Case("B21 once: kept at .98", fork(0), [[2, 0]], (0, 1), (0, 0), {"accept": 0.98, "temperature": 0.5}),
    Case(
        "B21 not twice: refused at .985", fork(0), [[2, 0]], (0,), (1,), {"accept": 0.985, "temperature": 0.5}
    ),
    Case("B22 first token after prefill is drawn", ROOT, [[0.6, 0.4]], (0,), (1,), {"final": 0.7}),
    # K4: residual and bonus from the right row
    Case("B25 bonus after full acceptance", CHAIN([9, 0, 1]), [hot(0), hot(1), hot(2)], (0, 1, 2), (0, 1, 2)),
    Case("B27 no row is shifted", CHAIN([9, 1, 0]), [hot(1), hot(0), hot(2)], (0, 1, 2), (1, 0, 2)),
    Case(
        "B28 bonus from the last accepted row",
        CHAIN([9, 1, 2]),
        [hot(1, 4), hot(3, 4), hot(0, 4)],
        (0, 1),
        (1, 3),
    ),
    # K9: counts and slots
    Case("B53 one token left", CHAIN([9, *[1] * 8]), [hot(1)] * 9, (0,), (1,), {"depth_cap": 1}),
    Case(
        "B54 a run ends at its first refusal",
        CHAIN([9, 1, 1, 1, 1]),
        [hot(1), hot(0), hot(1), hot(1), hot(1)],
        (0, 1),
        (1, 0),
    ),
    Case(
        "B56 accept slots hold the root",
        CHAIN([9, 0, 0, 0]),
        [[1, 0]] * 4,
        (0, 1, 2),
        (0,) * 3,
        {"depth_cap": 3},
    ),
    Case("B58 refused at once", CHAIN([9, 1, 2]), [hot(0)], (0,), (0,)),
    # K10: scratch
    Case("B60 no mass was rejected yet", ROOT, [[0.5, 0.5]], (0,), (0,), {"final": 0.25}),
    # K11: numerics
    Case("B64 a NaN row", ROOT, [[NAN] * 3], (), (), {"temperature": 1.0}, RowStatus.NAN),
    Case("B66 tiny temperature", ROOT, [[0, 5, 4]], (0,), (1,), {"temperature": 1e-40}),
    Case("B66 in float16", ROOT, [[30, 29]], (0,), (0,), {"temperature": 1e-4, "dtype": torch.float16}),
    Case(
        "B66 in float16 and greedy",
        ROOT,
        [[29, 30]],
        (0,),
        (1,),
        {"temperature": 0.0, "dtype": torch.float16},
    ),
    Case("B67 greedy: the bonus", ROOT, [[2, 2, 1]], (0,), (0,), {"temperature": 0.0, "final": 0.75}),
    Case(
        "B68 first tie wins", fork(0), [[2, 2, 1]], (0, 1), (0, 0), {"temperature": 0.0, "accept": LAST_COIN}
    ),
    Case("B68 second tie loses", fork(1), [[2, 2, 1]], (0,), (0,), {"temperature": 0.0, "accept": 0.0}),
    Case("B70 one NaN", ROOT, [[NAN, 1, 3]], (), (), {"temperature": 1.0, "final": 0.9}, RowStatus.NAN),
    Case("B70 one +inf", ROOT, [[INF, 1, 3]], (), (), {"temperature": 1.0, "final": 0.9}, RowStatus.POS_INF),
    Case("B70 greedy too", ROOT, [[NAN, 1, 3]], (), (), {"temperature": 0.0}, RowStatus.NAN),
    Case("B71 never clamped", fork(1), [[0, 0.01]], (0, 1), (1, 1), {"accept": 0.85, "temperature": 0.005}),
    Case("B71 bonus too", ROOT, [[0, 0.01]], (0,), (1,), {"final": 0.2, "temperature": 0.005}),
    Case(
        "B72 greedy has a law", fork(1), [[1, 3]], (0, 1), (1, 1), {"temperature": 0.0, "accept": LAST_COIN}
    ),
]


@pytest.mark.parametrize("case", WALKS, ids=lambda case: case.id)
def test_walk(case, sampler):
    # A leaf's row is its parent's where the case leaves it unsaid but the walk needs it.
    rows = case.rows + case.rows[-1:] * (1 + max(case.path, default=0) - len(case.rows))
    got = sampler(case.tree, rows, **case.settings)
    assert (case.path, case.tokens, case.status) == (got.path, got.tokens, got.status)


@pytest.mark.parametrize("coin", [0.25, 0.75])
def test_b67_one_meaning_of_tiny_temperature(coin, sampler):
    """B67: no path has a greedy threshold of its own: at T = 1e-6 ties are drawn evenly, bonus or child.

    The report's decoder calls 1e-6 greedy everywhere. Here only 0 is greedy and any T > 0 is sampled;
    what matters is that accepting and drawing agree.
    """
    rows = [[2, 2, 1]] * 2
    drawn = sampler(ROOT, rows[:1], temperature=1e-6, final=coin)
    tested = sampler(fork(0), rows, temperature=1e-6, accept=coin, final=0.5)
    assert (drawn.tokens[0], drawn.tokens[0]) == (int(coin > 0.5), tested.tokens[0])
