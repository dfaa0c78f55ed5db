"""Known faults K3 about top-k, top-p and min-p: B17 to B20 and B23, on the oracle and each CPU backend."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import CPU_BACKENDS

from treeconv import Coins, DraftTree, oracle, to_verify_input, verify_probs
from treeconv.filters import Cuts

ROOT = DraftTree([-1], [9])
JOINT = {"top_k": 3, "top_p": 0.75, "filter_order": "joint"}
SEQUENTIAL = {"top_k": 3, "top_p": 0.75}

#: id -> row, filters, the right law in whole numbers (to be divided by their sum)
LAWS = {
    "B17 joint": ([0.4, 0.3, 0.2, 0.1], JOINT, [4, 3, 2, 0]),
    "B17 sequential": ([0.4, 0.3, 0.2, 0.1], SEQUENTIAL, [4, 3, 0, 0]),
    "B18": ([0.6, 0.3, 0.1], {"min_p": 0.4}, [2, 1, 0]),
    "B19": ([0.2, 0.2, 0.2, 0.4], {"top_k": 2}, [1, 0, 0, 2]),
    "B20": ([0.5, 0.25, 0.125, 0.125], {"top_p": 0.8}, [4, 2, 1, 0]),
    "B23": ([0.5, 0.3, 0.2], {"top_k": 2}, [5, 3, 0]),
}


def law_of_bonus(sampler, row, filters, grid):
    """The exact law of a root's bonus, where its boundaries are multiples of ``1 / grid``."""
    coins = [([0.5], (k + 0.5) / grid) for k in range(grid)]
    law = [Fraction(0)] * len(row)
    for decision in sampler.many(ROOT, [row], coins, filters=filters):
        law[decision.tokens[0]] += Fraction(1, grid)
    return law


@pytest.mark.parametrize("name", LAWS)
def test_b17_b18_b19_b20_b23_the_law_that_the_bonus_is_drawn_from(name, sampler):
    row, filters, want = LAWS[name]
    got = law_of_bonus(sampler, row, filters, 10 * sum(want))
    assert got == [Fraction(share, sum(want)) for share in want]


@pytest.mark.parametrize("name", LAWS)
def test_b17_b18_b19_b20_b23_the_law_that_children_are_tested_against(name, sampler):
    """Each token as the only child: it is accepted just below its share, and refused just above."""
    row, filters, want = LAWS[name]
    for token, share in enumerate(want):
        tree = DraftTree([-1, 0], [9, token])
        edge = share / sum(want)
        for coin in (edge - 1e-5, edge + 1e-5):
            if 0 <= coin < 1:
                decision = sampler(tree, [row, row], accept=coin, filters=filters)
                assert (len(decision.path) == 2) == (coin < edge)


def test_b18_a_child_that_min_p_cuts_is_refused_at_any_coin(sampler):
    """B18 as reported: cut .24, child 2 of mass .1, coin .05; wrong samplers accept it."""
    tree = DraftTree([-1, 0], [9, 2])
    for coin in (0.0, 0.05):
        decision = sampler(tree, [[0.6, 0.3, 0.1]], accept=coin, filters={"min_p": 0.4})
        assert (decision.path, decision.tokens) == ((0,), (0,))


def test_b17_b18_b20_logits_and_temperature_come_first(sampler):
    """The same laws as logits at T = 2: filters see the law after temperature."""
    for name in ("B17 joint", "B17 sequential", "B18", "B20"):
        row, filters, want = LAWS[name]
        logits = [[2 * float(np.log(p)) for p in row]]
        coins = [([0.5], (k + 0.5) / (10 * sum(want))) for k in range(10 * sum(want))]
        drawn = [d.tokens[0] for d in sampler.many(ROOT, logits, coins, temperature=2.0, filters=filters)]
        assert [drawn.count(token) for token in range(len(row))] == [10 * share for share in want]


@pytest.mark.parametrize("backend", CPU_BACKENDS)
def test_b23_the_callers_array_is_not_renormalised(backend):
    """B23: twice on one array, then read it: unchanged, and both calls as if the first."""
    rows = torch.tensor([[[0.5, 0.3, 0.2]]])
    before = rows.clone()
    batch = to_verify_input([ROOT])
    for _ in range(2):
        drawn = [
            verify_probs(batch, rows, Coins([[0.5]], [coin]), backend=backend, top_k=2).tokens[0][0]
            for coin in (0.62, 0.63, 0.99)
        ]
        assert drawn == [0, 1, 1]
    assert torch.equal(rows, before)
    unfiltered = verify_probs(batch, rows, Coins([[0.5]], [0.99]), backend=backend).tokens[0][0]
    assert unfiltered == 2


def test_b23_nor_is_the_oracles():
    row = np.array([[0.5, 0.25, 0.25]], np.float32)
    before = row.copy()
    for make in (oracle.TargetRows.exact, oracle.TargetRows.from_probs):
        rows = make(row, Cuts(top_k=2))
        assert [rows[0].mass(token) for token in range(3)] == [Fraction(2, 3), Fraction(1, 3), 0]
    assert (row == before).all()
