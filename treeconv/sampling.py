"""The target law at a node, in float32 as backends compute it, and coins fixed by (seed, position)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv._validate import as_int64, check_int
from treeconv.errors import InvalidArgument
from treeconv.philox import philox4x32
from treeconv.tree import Coins, RowStatus, as_float_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from treeconv.filters import Cuts

__all__ = ["draw_coins", "filtered_probs", "processed_logits", "row_status", "target_probs"]


def row_status(row: NDArray[np.floating[Any]], *, is_probs: bool = False) -> RowStatus:
    """Whether a target row can be sampled from; see :class:`RowStatus`.

    Args:
        row: ``[vocab]`` logits, or probabilities.

        is_probs: the row holds probabilities: a negative one counts as NaN, no mass as EMPTY.
    """
    peak = row.max()  # NaN if any is
    if np.isnan(peak) or (is_probs and row.min() < 0):
        return RowStatus.NAN
    if peak == np.inf:
        return RowStatus.POS_INF
    return RowStatus.EMPTY if peak == (0 if is_probs else -np.inf) else RowStatus.OK


def processed_logits(
    logits: NDArray[np.float32],
    seen: Sequence[int] = (),
    repetition_penalty: float = 1.0,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logit_bias: NDArray[np.float32] | None = None,
    token_bitmask: NDArray[np.int32] | None = None,
) -> NDArray[np.float32]:
    """One row of logits after its processors, in float32; see :mod:`treeconv.processors`.

    Args:
        logits: ``[vocab]`` float32. Not written to.

        seen: the ids that penalties are about, each occurrence once; ids outside the vocabulary count for
            nobody.

        repetition_penalty: float32 > 0; 1 is off.

        frequency_penalty: float32; 0 is off.

        presence_penalty: float32; 0 is off.

        logit_bias: ``[vocab]`` float32, or None.

        token_bitmask: ``[ceil(vocab / 32)]`` int32, or None; bits at vocab and beyond mean nothing.

    Returns:
        ``[vocab]`` float32. A forbidden token has -inf, whatever its logit was.
    """
    row: NDArray[np.float32] = logits.copy()
    tokens, counts = np.unique([t for t in seen if 0 <= t < row.size], return_counts=True)
    tokens = tokens.astype(np.int64)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if repetition_penalty != 1:
            x, r = row[tokens], np.float32(repetition_penalty)
            row[tokens] = np.where(x > 0, x / r, x * r)
        if frequency_penalty != 0:
            row[tokens] -= np.float32(frequency_penalty) * counts.astype(np.float32)
        if presence_penalty != 0:
            row[tokens] -= np.float32(presence_penalty)
        if logit_bias is not None:
            row += logit_bias
    if token_bitmask is not None:
        words = np.ascontiguousarray(token_bitmask).astype("<i4").view(np.uint8)
        row[np.unpackbits(words, bitorder="little")[: row.size] == 0] = -np.inf
    return row


def target_probs(logits: Any, temperature: float) -> NDArray[np.float32]:
    """Softmax of one row of logits at a temperature, in float32: ``exp((x - max) / T) / sum``.

    Args:
        logits: ``[vocab]``; -inf allowed, one value above it needed.

        temperature: >= 0. 0 is greedy: all mass on the lowest-index argmax, exactly. Never clamped.

    Returns:
        ``[vocab]`` float32. A logit of -inf has exactly no mass.

    Raises:
        InvalidArgument: NaN, +inf or only -inf in the row; a negative, NaN or infinite temperature.
    """
    row = as_float_array(logits).astype(np.float32)
    if not 0 <= temperature < float("inf"):
        raise InvalidArgument(f"temperature={temperature!r}, but must be finite and >= 0")
    status = row_status(row)
    if status is not RowStatus.OK:
        raise InvalidArgument(f"logits hold {status.name}, but must be finite or -inf, not all -inf")
    if temperature == 0:
        one_hot = np.zeros_like(row)
        one_hot[row.argmax()] = 1
        return one_hot
    # (x - max) / T overflows to -inf for tiny T: that is the limit, and 0 / T stays 0.
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((row - row.max()) / np.float32(temperature))
        result: NDArray[np.float32] = weights / weights.sum()
    return result


def filtered_probs(probs: NDArray[np.float32], cuts: Cuts) -> NDArray[np.float32]:
    """The law after top-k, top-p and min-p, renormalised; see :mod:`treeconv.filters`.

    Args:
        probs: ``[vocab]`` float32 >= 0 with positive mass. Not written to.

        cuts: one request's filters. Where all are off the law is returned as it is.

    Returns:
        ``[vocab]`` float32, exactly 0 where a token was cut.
    """
    if not cuts.are_on(probs.size):
        return probs
    order = np.argsort(-probs, kind="stable")  # stable: among equals the lowest id comes first
    falling = probs[order].astype(np.float64)  # sums over a large vocabulary drift in float32
    k = falling.size if cuts.top_k is None else min(cuts.top_k, falling.size)
    is_kept = np.arange(falling.size) < k
    if cuts.top_p < 1:
        total = falling[:k].sum() if cuts.order == "sequential" else falling.sum()
        mass_before = np.concatenate([[0.0], np.cumsum(falling)[:-1]])
        is_kept &= mass_before < cuts.top_p * total
    is_kept &= falling >= cuts.min_p * falling[0]
    result = np.zeros_like(probs)
    kept = order[is_kept]
    result[kept] = probs[kept] / np.float32(falling[is_kept].sum())
    return result


def draw_coins(seeds: Any, positions: Any, num_draft_tokens: int) -> Coins:
    """Fresh coins for one verification step, a function of (seed, position, node) and nothing else.

    Request ``b``'s coins do not depend on its place in the batch, on the batch, on padding, on the rank nor
    on the device; another position (committed length) or seed gives independent ones. Philox4x32-10
    (:mod:`treeconv.philox`), keyed by the seed; position and node are the counter.

    Args:
        seeds: ``[B]`` integers in [0, 2**64), one stream per request; or an int64 tensor of their 64 bits.

        positions: ``[B]`` integers in [0, 2**64), the committed length at this step: never used twice per
            seed; or an int64 tensor on the seeds' device.

        num_draft_tokens: N >= 1, slots per request.

    Returns:
        ``Coins`` of float32 in [0, 1), multiples of 2**-24: ``accept [B, N]``, ``final [B]``. NumPy arrays;
        tensors on the seeds' device where those are a tensor (nothing waits for it, and a graph can hold it).

    Raises:
        InvalidArgument: lengths that differ, values out of range, or tensors of another dtype.
    """
    check_int(num_draft_tokens, "num_draft_tokens", 1)
    if len(seeds) != len(positions):
        raise InvalidArgument(
            f"len(seeds)={len(seeds)} and len(positions)={len(positions)}, but must be equal"
        )
    blocks = num_draft_tokens // 4 + 1  # N + 1 coins, four in each; the final one first: padding moves none
    if hasattr(seeds, "is_cuda"):
        return _draw_tensors(seeds, positions, num_draft_tokens, blocks)
    block, none = np.arange(blocks)[None], np.zeros((1, 1), np.int64)
    step = _split(as_int64(positions, "positions")[:, None])
    words = philox4x32((block, none, *step), _split(as_int64(seeds, "seeds")[:, None]))
    draws = np.stack(words, axis=-1).reshape(len(seeds), -1) >> 8
    coins = draws.astype(np.float32) * np.float32(2.0**-24)
    accept = np.ascontiguousarray(coins[:, 1 : num_draft_tokens + 1])
    return Coins(accept=accept, final=np.ascontiguousarray(coins[:, 0]))


def _draw_tensors(seeds: Any, positions: Any, num_draft_tokens: int, blocks: int) -> Coins:
    import torch  # noqa: PLC0415

    for name, tensor in (("seeds", seeds), ("positions", positions)):
        if getattr(tensor, "dtype", None) is not torch.int64:  # narrower words would shift into the coins
            found = getattr(tensor, "dtype", type(tensor).__name__)
            raise InvalidArgument(f"{name}.dtype={found}, but must be torch.int64 where seeds are a tensor")
    block = torch.arange(blocks, device=seeds.device)[None]
    counter = (block, torch.zeros_like(block), *_split(positions[:, None]))
    words = philox4x32(counter, _split(seeds[:, None]))
    draws = (torch.stack(words, dim=-1).view(len(seeds), -1) >> 8).float() * 2.0**-24
    return Coins(accept=draws[:, 1 : num_draft_tokens + 1].contiguous(), final=draws[:, 0].contiguous())


def _split(values: Any) -> tuple[Any, Any]:
    """The low and the high 32 bits of int64."""
    return values & 0xFFFFFFFF, (values >> 32) & 0xFFFFFFFF
