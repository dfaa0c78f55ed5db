"""What each rule does at one node, as the ``reference`` backend decides it: NumPy float32, said plainly.

A step is given the law p of the node, the tokens of its children (none at a leaf, or at the depth cap) and
its coins. It returns ``(place, -1)`` of the accepted child, or ``(-1, token)`` of what ends the walk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Law = NDArray[np.float32]
    Step = tuple[int, int]

__all__ = ["chain_step", "draw", "match_step", "recursive_step", "target_only_step"]


def draw(law: Law, coin: np.float32) -> int:
    """Smallest t with ``cumsum(law)(t) > coin * sum(law)``; else the last t of positive mass.

    The running sum is blocked, ``[blocks, 128]``, its blocks added up in float64: a plain float32 one drifts
    over a large vocabulary, the faster the more equal its masses, whose sums all round the same way.
    """
    blocks = np.zeros((-(-law.size // 128), 128), np.float32)
    blocks.ravel()[: law.size] = law
    running = np.cumsum(blocks, axis=1, dtype=np.float32).astype(np.float64)
    ends = np.cumsum(running[:, -1])
    running[1:] += ends[:-1, None]
    sums = running.ravel()[: law.size]
    above = np.flatnonzero((sums > np.float64(coin) * ends[-1]) & (law > 0))
    return int(above[0]) if above.size else int(np.flatnonzero(law)[-1])


def target_only_step(
    p: Law,
    tokens: Sequence[int],
    coin: np.float32,
    final: np.float32,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> Step:
    """Children in order against the running sum of their masses; thresholds below 1 accept more, lossily."""
    single = threshold_single if threshold_single < 1 else np.inf
    residual = p.copy()
    acc = np.float32(0)
    last_with_mass = -1
    for place, token in enumerate(tokens):
        acc += p[token]
        if p[token] > 0:
            last_with_mass = place
            if coin * threshold_acc < acc or p[token] >= single:
                return place, -1
        residual[token] = 0
    if not residual.any():
        return last_with_mass, -1  # the children cover the support: rounding, or a coin of 1
    return -1, draw(residual, final)


def _masses(q: Law) -> Law:
    """A draft law without what can be no mass: NaN, infinite, negative."""
    return np.where(np.isfinite(q) & (q > 0), q, np.float32(0))


def _is_accepted(coin: np.float32, q: np.float32, p: np.float32) -> bool:
    return bool(np.float64(coin) * np.float64(q) < p)  # with probability min(1, p / q)


def chain_step(p: Law, q: Law, tokens: Sequence[int], coin: np.float32, final: np.float32) -> Step:
    """One child sampled from q: accepted with ``min(1, p / q)``, else a draw from ``relu(p - q)``."""
    if not tokens:
        return -1, draw(p, final)
    q = _masses(q)
    if _is_accepted(coin, q[tokens[0]], p[tokens[0]]):
        return 0, -1
    residual = np.maximum(p - q, np.float32(0))
    return -1, draw(residual if residual.any() else p, final)  # p = q up to rounding leaves nothing


def recursive_step(
    p: Law, q: Law, tokens: Sequence[int], coins: Sequence[np.float32], final: np.float32
) -> Step:
    """Siblings sampled from q without replacement, each tested with a coin of its own.

    After a rejection the residual takes the place of p, and q is renormalised without that sibling's token.
    """
    q = _masses(q)
    for place, (token, coin) in enumerate(zip(tokens, coins, strict=True)):
        if _is_accepted(coin, q[token], p[token]):
            return place, -1
        residual = np.maximum(p - q, np.float32(0))
        if residual.any():  # else p = q up to rounding: p stays
            p = residual / residual.sum()
        q[token] = 0
        left = q.sum()
        if left > 0:
            q = q / left
    return -1, draw(p, final)


def match_step(p: Law, tokens: Sequence[int], coin: np.float32) -> Step:
    """Draw from p, and follow the child that carries the drawn token."""
    drawn = draw(p, coin)
    return (tokens.index(drawn), -1) if drawn in tokens else (-1, drawn)
