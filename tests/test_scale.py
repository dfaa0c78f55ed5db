"""Wide batches: what they hold, and that a wrong output is told from a right one."""

from __future__ import annotations

import numpy as np
import torch

from treeconv import Coins, verify
from treeconv._scale import random_batch, random_trees


def test_disagreements_see_a_wrong_output_and_spare_the_band():
    rng = np.random.default_rng(7)
    wide = random_batch(rng, 200, 8, 32, "cpu")
    output = verify(wide.batch, wide.logits, wide.temperature, wide.coins, backend="reference", depth_cap=8)
    wrong, unsure, decisions = wide.disagreements(output, 8)
    assert not wrong.any()
    assert unsure.float().mean() < 0.1
    length = output.accept_token_num.long()
    assert torch.equal(((decisions.nodes >= 0).sum(1) - 1)[~unsure], length[~unsure])
    # Another bonus token, another path: every one of them is seen.
    for name in ("predicts", "accept_token_num"):
        spoilt = type(output)(**{**vars(output), name: getattr(output, name) + 1})
        wrong, unsure, _ = wide.disagreements(spoilt, 8)
        assert (wrong | unsure).all()
    # Other coins, other decisions.
    other = Coins(1 - wide.coins.accept, 1 - wide.coins.final)
    assert wide.disagreements(output, 8, other)[0].float().mean() > 0.5


def test_parts_of_a_batch_are_decided_alike():
    wide = random_batch(np.random.default_rng(3), 40, 6, 20, "cpu")
    part = wide.take([3, 17, 30])
    output = verify(part.batch, part.logits, part.temperature, part.coins, backend="reference", depth_cap=6)
    assert not part.disagreements(output, 6)[0].any()


def test_random_trees_cover_shapes_and_edges():
    parents, tokens, sizes = random_trees(np.random.default_rng(0), 500, 8, 8)
    assert set(sizes) == set(range(1, 9))
    assert tokens.min() == 0
    assert tokens.max() == 7
    full = parents[sizes == 8]
    assert (full[:, 1:] == np.arange(7)).all(1).any()  # a chain
    assert (full[:, 1:] == 0).all(1).any()  # a star
