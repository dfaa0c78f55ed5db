"""The wide float64 walk against the oracle, request by request."""

from __future__ import annotations

import numpy as np
import pytest

from treeconv import oracle, to_draft_trees, verify
from treeconv._scale import BAND, float64_law, float64_walk, random_batch, random_trees


@pytest.mark.parametrize("cap", [1, 2, 9])
def test_walk_is_the_oracles(cap):
    rng = np.random.default_rng(cap)
    wide = random_batch(rng, 150, 8, 11, "cpu")
    law = float64_law(wide.logits, wide.temperature)
    walk = float64_walk(wide.batch, law, wide.coins, cap)
    left_out = 0
    for request, tree in enumerate(to_draft_trees(wide.batch)):
        if walk.margin[request] < 1e-12:
            left_out += 1
            continue
        rows = oracle.TargetRows.exact(law[request].numpy())
        want = oracle.canonical_walk(
            tree, rows, wide.coins.accept[request].tolist(), float(wide.coins.final[request]), cap
        )
        nodes = walk.nodes[request]
        assert tuple(nodes[nodes >= 0].tolist()) == want.path
        assert int(walk.bonus[request]) == want.bonus
    assert left_out < 3


def test_disagreements_see_a_wrong_output_and_spare_the_band():
    rng = np.random.default_rng(7)
    wide = random_batch(rng, 200, 8, 32, "cpu")
    walk = float64_walk(wide.batch, float64_law(wide.logits, wide.temperature), wide.coins, 8)
    output = verify(wide.batch, wide.logits, wide.temperature, wide.coins, backend="reference", depth_cap=8)
    wrong, inside = walk.disagreements(output, 8)
    assert not wrong.any()
    assert inside.float().mean() < 0.02
    # Another bonus token, another path: every one of them is seen.
    predicts = (output.predicts + 1) % 32
    wrong, inside = walk.disagreements(type(output)(**{**vars(output), "predicts": predicts}), 8)
    assert (wrong | inside).all()
    wrong, inside = walk.disagreements(
        type(output)(**{**vars(output), "accept_token_num": output.accept_token_num + 1}), 8
    )
    assert (wrong | inside).all()
    # At a margin of 1, everything is inside.
    wrong, inside = walk.disagreements(type(output)(**{**vars(output), "predicts": predicts}), 8, band=2.0)
    assert not wrong.any()
    assert inside.all()
    assert 0 < BAND < 2e-5


def test_random_trees_cover_shapes_and_edges():
    parents, tokens, sizes = random_trees(np.random.default_rng(0), 500, 8, 8)
    assert set(sizes) == set(range(1, 9))
    assert tokens.min() == 0
    assert tokens.max() == 7
    full = parents[sizes == 8]
    assert (full[:, 1:] == np.arange(7)).all(1).any()  # a chain
    assert (full[:, 1:] == 0).all(1).any()  # a star
