"""Contract: Random123's known answers, bit for bit in NumPy and in torch."""

import numpy as np
import pytest
import torch

from treeconv.philox import philox4x32

# Random123's kat_vectors, philox 4x32 with 10 rounds: counter, key, answer.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def words(text):
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(counter, key, answer):
    arrays = philox4x32([np.array([w]) for w in words(counter)], [np.array([w]) for w in words(key)])
    assert [int(word[0]) for word in arrays] == words(answer)
    for device in DEVICES:
        tensors = philox4x32(*([torch.tensor(w, device=device) for w in words(t)] for t in (counter, key)))
        assert [int(word) for word in tensors] == words(answer)


def test_counters_and_keys_broadcast_and_numpy_equals_torch():
    rng = np.random.default_rng(3)
    counter = [rng.integers(0, 2**32, (1, 7)) for _ in range(4)]
    key = [rng.integers(0, 2**32, (5, 1)) for _ in range(2)]
    numpy = philox4x32(counter, key)
    for device in DEVICES:
        torched = philox4x32(*([torch.from_numpy(w).to(device) for w in part] for part in (counter, key)))
        for left, right in zip(numpy, torched, strict=True):
            assert left.shape == (5, 7)
            assert left.tolist() == right.tolist()
