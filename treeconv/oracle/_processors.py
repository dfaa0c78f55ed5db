"""The law at one node after bias, bitmask and penalties: exact logits, and how far float32 may be from them.

A processed logit is computed in up to four float32 steps (:mod:`treeconv.processors`), each of which rounds;
a sampler may also take them in float64, or sum the three terms in another order. So each processed logit has
a *doubt*: 0 where every such sum is exact in float32, else a bound of what the roundings add up to. A doubt
of d is a relative error of ``exp(d / T) - 1`` of that token's mass. At temperature 0, and where the doubt is
beyond a temperature, it decides who wins: then every token that may be the largest has its turn.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv.errors import InvalidArgument
from treeconv.oracle._filters import enclosed_alternatives
from treeconv.oracle._rows import ROUNDING, EnclosedRow, ExactRow, enclosed_weights, unsampled
from treeconv.tree import RowStatus, as_float_array

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from treeconv.filters import Cuts
    from treeconv.oracle._rows import Row
    from treeconv.processors import RequestProcessors
    from treeconv.tree import DraftTree

__all__ = ["ProcessedLogits", "processed_alternatives"]

_LARGEST = float(np.finfo(np.float32).max)
_TINIEST = 2.0**-149  # of float32: what underflow may lose
_MAX_LISTED = 32  # winners at temperature 0; above, one loose row stands for them
_MOST_DOUBT = 1.0  # in temperatures; above, masses say nothing and a loose row joins
_FAR = 110.0  # in temperatures: exp(-110) is 0 in float32


class ProcessedLogits:
    """The logits of one request after its processors, node by node.

    Args:
        logits: ``[n, V]`` floats, taken at their exact values.

        tree: whose paths, root included, are what penalties have seen beside the committed tokens.

        processors: of the request.
    """

    def __init__(self, logits: Any, tree: DraftTree, processors: RequestProcessors) -> None:
        self._logits = logits
        self._tree = tree
        self._processors = processors

    def __len__(self) -> int:
        return len(self._logits)

    def __getitem__(self, node: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """``[V]`` processed logits, and ``[V]`` how far float32 may be from each."""
        x = as_float_array(self._logits[node]).astype(np.float64)
        if x.ndim != 1:
            raise InvalidArgument(f"logits.shape={x.shape}, but must be [vocab], vocab >= 1")
        held, size = self._processors, x.size
        path = [self._tree.token_ids[inner] for inner in self._tree.path(node)]
        counts = np.zeros(size)
        for token in (*held.committed_tokens, *path):
            if 0 <= token < size:  # neither padding nor a placeholder
                counts[token] += 1
        seen = counts > 0
        with np.errstate(over="ignore", invalid="ignore"):
            scaled, doubt = _repeated(x, seen, held.repetition_penalty)
            terms = [scaled, -held.frequency_penalty * counts, -held.presence_penalty * seen]
            if held.logit_bias is not None:
                terms.append(held.logit_bias.astype(np.float64))
            keys, doubt = _summed(np.array(terms), doubt)
        if held.token_bitmask is not None:
            words = held.token_bitmask[node].astype(np.int64)
            tokens = np.arange(size)
            keys[(words[tokens // 32] >> (tokens % 32)) & 1 == 0] = -np.inf
        doubt = np.where(np.isfinite(keys), doubt, 0.0)
        # Equal logits stay equal; equal sums of different ones are a tie only where they do not round.
        return keys + doubt * 2.0**-10 * np.tanh(np.where(doubt > 0, x, 0.0)), doubt


def _is_single(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which numbers are float32 numbers."""
    is_single: NDArray[np.bool_] = values.astype(np.float32) == values
    return is_single


def _repeated(
    x: NDArray[np.float64], seen: NDArray[np.bool_], penalty: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Logits after the repetition penalty, and the doubt: a product rounds once, a quotient at most twice."""
    if penalty == 1:
        return x, np.zeros_like(x)
    scaled = np.where(seen, np.where(x > 0, x / penalty, x * penalty), x)
    is_power_of_two = np.frexp(penalty)[0] == 0.5
    # Some multiply by the reciprocal: then a quotient is exact only by a power of two.
    is_exact = ~seen | (x == 0) | (_is_single(scaled) & ((x < 0) | is_power_of_two))
    roundings = np.where(x > 0, 2.0, 1.0)
    return scaled, np.where(is_exact, 0.0, roundings * ROUNDING * np.abs(scaled) + _TINIEST)


def _summed(
    terms: NDArray[np.float64], doubt: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The sum of ``[k, V]`` terms; no further doubt where each partial sum, in any order, is a float32.

    That is so where all terms are multiples of one power of two, of which 2**24 make up the sum of their
    absolute values.
    """
    keys = terms.sum(axis=0)
    keys = np.where(np.abs(keys) > _LARGEST, np.copysign(np.inf, keys), keys)
    total = np.abs(np.where(np.isfinite(terms), terms, 0.0)).sum(axis=0)
    unit = np.exp2(np.maximum(np.ceil(np.log2(np.maximum(total, _TINIEST))) - 24, -149))
    is_exact = (doubt == 0) & (np.floor(terms / unit) == terms / unit).all(axis=0)
    additions = np.count_nonzero(terms, axis=0)  # and the product of frequency and count
    return keys, np.where(is_exact, 0.0, doubt + (additions * ROUNDING * total + _TINIEST) * (1 + 2.0**-20))


def _winners(keys: NDArray[np.float64], doubt: NDArray[np.float64]) -> list[int]:
    """The tokens that may be the lowest-index argmax, the exact one first."""
    lower, upper = keys - doubt, keys + doubt
    best, first = lower.max(), int(lower.argmax())
    tokens = np.arange(keys.size)
    may_win = tokens[(upper > best) | ((upper == best) & (tokens <= first))].tolist()
    top = int(keys.argmax())
    return [top, *(token for token in may_win if token != top)]


def _loose(keys: NDArray[np.float64], may_win: NDArray[np.bool_]) -> Row:
    """A row of which nothing is known but which tokens may have mass worth mentioning."""
    weights = may_win.astype(np.float64)
    errors = np.full_like(keys, 8 * ROUNDING)
    return EnclosedRow(weights, errors, keys > -np.inf, is_normalised=True, optional=may_win)


def processed_alternatives(
    keys: NDArray[np.float64], doubt: NDArray[np.float64], temperature: float, cuts: Cuts | None
) -> list[Callable[[], Row]]:
    """What a careful float32 sampler may see of a row of processed logits, the exact law first.

    Args:
        keys: ``[V]`` processed logits.

        doubt: ``[V]`` how far float32 may be from each.

        temperature: >= 0.

        cuts: one request's filters, applied behind.
    """
    settled = unsampled(keys, temperature)
    if settled is not None and settled.status is not RowStatus.OK:
        return [lambda: settled]
    if settled is not None:
        winners = _winners(keys, doubt)
        if len(winners) > _MAX_LISTED:
            may_win = np.isin(np.arange(keys.size), winners)
            return [lambda: settled, partial(_loose, keys, may_win)]
        return [partial(ExactRow.one_hot, keys.size, token) for token in winners]
    weights, errors = enclosed_weights(keys, temperature)
    single = float(np.float32(temperature))
    near = keys + doubt >= (keys - doubt).max() - _FAR * single
    with np.errstate(over="ignore"):
        spread = doubt / single
    errors = (1 + errors) * np.exp(np.minimum(spread, _MOST_DOUBT)) - 1
    may_have = keys > -np.inf
    rows: list[Callable[[], Row]]
    if cuts is not None and cuts.are_on(keys.size):
        rows = enclosed_alternatives(keys, weights, errors, may_have, cuts, is_normalised=True)
    else:
        rows = [partial(EnclosedRow, weights, errors, may_have, is_normalised=True)]
    if spread[near].max() > _MOST_DOUBT:
        rows.append(partial(_loose, keys, near))
    return rows
