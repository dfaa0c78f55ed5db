"""Philox4x32-10: random words as a function of a counter and a key, with no state to share or to lose.

The same bits in NumPy and in torch, on every device: integer operations only. Salmon, Moraes, Dror and Shaw,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011; held against Random123's known answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["philox4x32"]

_LOW = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def philox4x32(counter: Sequence[Any], key: Sequence[Any]) -> tuple[Any, Any, Any, Any]:
    """Four random 32-bit words for each counter and key.

    Args:
        counter: four int64 NumPy arrays, or four torch tensors, of words in [0, 2**32); they broadcast.

        key: two of the same.

    Returns:
        Four int64 arrays or tensors of words in [0, 2**32).
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # Products of two words need 64 bits: int64 wraps, and holds the very bits that uint64 would.
        left, right = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (
            ((right >> 32) & _LOW) ^ c1 ^ k0,
            right & _LOW,
            ((left >> 32) & _LOW) ^ c3 ^ k1,
            left & _LOW,
        )
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return c0, c1, c2, c3
