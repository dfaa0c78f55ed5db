"""The float32 target law at a node, row statuses, and coins fixed by (seed, position)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from treeconv import InvalidArgument, RowStatus, draw_coins
from treeconv.sampling import row_status, target_probs

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("logits", "temperature", "want"),
    [
        ([0, 0, 0, 0], 1.0, [0.25] * 4),
        ([0, 0, -INF, 0], 3.0, [1 / 3, 1 / 3, 0, 1 / 3]),
        ([2, 0], 0.5, [0.98201379, 0.01798621]),
        ([1e30, 0], 1e30, [0.73105858, 0.26894142]),
        ([0, 5, 4], 1e-40, [0, 1, 0]),
        ([2, 2, 1], 1e-40, [0.5, 0.5, 0]),
        ([2, 2, 1], 0.0, [1, 0, 0]),
        ([-INF, -30000, -30000], 0.0, [0, 1, 0]),
        ([7], 2.0, [1]),
    ],
)
def test_law_at_a_temperature(logits, temperature, want):
    probs = target_probs(logits, temperature)
    assert probs.dtype == np.float32
    assert probs.tolist() == pytest.approx(want, rel=1e-6, abs=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_law_of_any_logit_dtype(dtype):
    logits = torch.tensor([1.5, -2.0, 0.25], dtype=dtype)
    assert target_probs(logits, 0.8).tolist() == target_probs([1.5, -2.0, 0.25], 0.8).tolist()


def test_logits_are_not_written_to():
    logits = np.array([1.0, 2.0], np.float32)
    target_probs(logits, 0.5)
    assert logits.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("logits", "temperature", "message"),
    [
        ([0, 1], -1.0, "temperature=-1.0, but must be finite and >= 0"),
        ([0, 1], NAN, "temperature=nan, but must be finite and >= 0"),
        ([0, 1], INF, "temperature=inf, but must be finite and >= 0"),
        ([0, NAN], 1.0, "logits hold NAN, but must be finite or -inf, not all -inf"),
        ([0, INF], 0.0, "logits hold POS_INF, but must be"),
        ([-INF, -INF], 1.0, "logits hold EMPTY, but must be"),
    ],
)
def test_bad_rows_and_temperatures(logits, temperature, message):
    with pytest.raises(InvalidArgument, match=message):
        target_probs(logits, temperature)


@pytest.mark.parametrize(
    ("row", "is_probs", "want"),
    [
        ([0.0, -INF], False, RowStatus.OK),
        ([NAN, INF], False, RowStatus.NAN),
        ([INF, -INF], False, RowStatus.POS_INF),
        ([-INF, -INF], False, RowStatus.EMPTY),
        ([0.0, -1.0], False, RowStatus.OK),
        ([0.5, -1e-9], True, RowStatus.NAN),
        ([0.5, NAN], True, RowStatus.NAN),
        ([0.0, INF], True, RowStatus.POS_INF),
        ([0.0, 0.0], True, RowStatus.EMPTY),
        ([0.0, 1e-45], True, RowStatus.OK),
    ],
)
def test_row_status(row, is_probs, want):
    assert row_status(np.array(row, np.float32), is_probs=is_probs) is want


def flat(coins):
    return [*coins.accept.flatten().tolist(), *coins.final.tolist()]


def test_coins_are_float32_multiples_of_2_to_minus_24_below_one():
    coins = draw_coins(range(50), [3] * 50, 40)
    values = np.array(flat(coins))
    assert (coins.accept.dtype, coins.final.dtype) == (np.float32, np.float32)
    assert (coins.accept.shape, coins.final.shape) == ((50, 40), (50,))
    assert (values.min() >= 0, values.max() < 1, (values * 2**24 % 1).max()) == (True, True, 0)


def test_a_request_keeps_its_coins_anywhere_in_a_batch_and_under_any_padding():
    alone = draw_coins([7], [12], 5)
    among = draw_coins([3, 7, 9], [1, 12, 12], 9)
    assert among.accept[1, :5].tolist() == alone.accept[0].tolist()
    assert among.final[1] == alone.final[0]


def test_coins_are_fresh_for_every_request_step_and_node():
    """2,310 coins over 7 seeds and 30 positions; 2**24 values make a chance repeat of a few likely."""
    coins = [draw_coins([seed], [position], 10) for seed in range(7) for position in range(30)]
    rows = {tuple(flat(coin)) for coin in coins}
    assert len(rows) == 210
    assert len({value for row in rows for value in row}) >= 2300


def test_neighbouring_positions_share_no_coin():
    """A counter that moves one block per position would hand this step's tail to the next."""
    here, there = (set(flat(draw_coins([7], [position], 64))) for position in (5, 6))
    assert here & there == set()


@pytest.mark.parametrize("seed", [0, 2**64 - 1])
def test_every_64_bit_seed_is_taken(seed):
    assert flat(draw_coins([seed], [2**40], 2)) == flat(draw_coins([seed], [2**40], 2))


@pytest.mark.parametrize(
    ("seeds", "positions", "slots", "message"),
    [
        ([1], [1, 2], 3, r"len\(seeds\)=1 and len\(positions\)=2, but must be equal"),
        ([-1], [1], 3, r"seeds\[0\]=-1, but must be an integer >= 0"),
        ([1, 2**64], [1, 1], 3, r"seeds\[1\]=18446744073709551616, but must be"),
        ([1], [-1], 3, r"positions\[0\]=-1, but must be an integer >= 0"),
        ([1], [2**64], 3, r"positions\[0\]=18446744073709551616, but must be"),
        ([1.5], [1], 3, r"seeds\[0\]=1.5, but must be an integer >= 0"),
        ([1], [1], 0, "num_draft_tokens=0, but must be an integer >= 1"),
    ],
)
def test_bad_arguments(seeds, positions, slots, message):
    with pytest.raises(InvalidArgument, match=message):
        draw_coins(seeds, positions, slots)


@pytest.mark.parametrize("slots", [1, 3, 4, 64])
def test_tensors_and_lists_draw_the_same_coins(slots):
    seeds, positions = [0, 7, 2**64 - 1, 2**63], [0, 2**40 + 3, 5, 2**64 - 1]
    listed = draw_coins(seeds, positions, slots)
    tensors = [torch.from_numpy(np.array(values, np.uint64).view(np.int64)) for values in (seeds, positions)]
    drawn = draw_coins(*tensors, slots)
    assert drawn.accept.dtype == torch.float32
    assert (drawn.accept.tolist(), drawn.final.tolist()) == (listed.accept.tolist(), listed.final.tolist())


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32])
def test_narrow_tensors_are_refused(dtype):
    """Words of 32 bits shifted into coins outside [0, 1)."""
    one, narrow = torch.tensor([3]), torch.tensor([3], dtype=dtype)
    with pytest.raises(InvalidArgument, match=rf"seeds.dtype={dtype}, but must be torch.int64"):
        draw_coins(narrow, one, 4)
    with pytest.raises(InvalidArgument, match=rf"positions.dtype={dtype}, but must be torch.int64"):
        draw_coins(one, narrow, 4)


def test_coins_are_the_words_of_random123s_first_known_answer():
    """Pinned: a change of the counter's layout would change everybody's samples."""
    coins = draw_coins([0], [0], 3)
    assert (coins.final * 2**24).tolist() == [0x6627E8]
    assert (coins.accept * 2**24).tolist() == [[0xE169C5, 0xBC57AC, 0x9B00DB]]
    assert flat(coins) != flat(draw_coins([2**32], [0], 3)) != flat(draw_coins([0], [2**32], 3))
