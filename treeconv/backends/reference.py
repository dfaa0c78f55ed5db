"""The verifier to read first: a plain loop over requests and nodes, in NumPy float32.

Deliberately slow and obvious. The oracle does not use it and it does not use the oracle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from treeconv.backends.base import BackendTraits
from treeconv.filters import Cuts
from treeconv.processors import PENALTIES, PROCESSORS
from treeconv.sampling import filtered_probs, processed_logits, row_status, target_probs
from treeconv.tree import Coins, RowStatus, VerifyInput, VerifyOutput, as_float_array

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from numpy.typing import NDArray

    from treeconv.filters import Filters
    from treeconv.processors import Processors

    # Gives the law at the end of a path of one request, or why there is none.
    Law = Callable[[list[int]], tuple[RowStatus, NDArray[np.float32]]]

__all__ = ["ReferenceBackend"]


def draw_bonus(residual: NDArray[np.float32], coin: np.float32) -> int:
    """Smallest t with ``cumsum(residual)(t) > coin * sum(residual)``; else the last t of positive mass.

    The running sum is blocked, ``[blocks, 128]``: a plain float32 one drifts over a large vocabulary.
    """
    blocks = np.zeros((-(-residual.size // 128), 128), np.float32)
    blocks.ravel()[: residual.size] = residual
    running = np.cumsum(blocks, axis=1, dtype=np.float32)
    ends = np.cumsum(running[:, -1], dtype=np.float32)
    running[1:] += ends[:-1, None]
    sums = running.ravel()[: residual.size]
    # float64 holds the product of two float32 exactly: no rounding decides.
    above = np.flatnonzero((sums > np.float64(coin) * np.float64(ends[-1])) & (residual > 0))
    return int(above[0]) if above.size else int(np.flatnonzero(residual)[-1])


def walk_request(
    law: Law,
    tokens: NDArray[np.int64],
    first_child: NDArray[np.int64],
    next_sibling: NDArray[np.int64],
    accept_coins: NDArray[np.float32],
    final_coin: np.float32,
    depth_cap: int,
) -> tuple[list[int], int, RowStatus]:
    """Walk one tree; see DESIGN section 2 or ``oracle.canonical_walk`` for the rule.

    Returns:
        The accepted nodes (root first), the bonus token, and the status of the first unusable row.
    """
    path = [0]
    while True:
        node = path[-1]
        status, p = law(path)
        if status is not RowStatus.OK:
            return [], -1, status
        residual = p.copy()
        accepted = last_with_mass = -1
        if len(path) < depth_cap:
            acc = np.float32(0)
            child = int(first_child[node])
            while child != -1:
                token = tokens[child]
                acc += p[token]
                if p[token] > 0:
                    last_with_mass = child
                    if accept_coins[node] < acc:
                        accepted = child
                        break
                residual[token] = 0
                child = int(next_sibling[child])
        if accepted == -1 and not residual.any():
            accepted = last_with_mass  # the children cover the support: rounding, or a coin of 1
        if accepted == -1:
            return path, draw_bonus(residual, final_coin), RowStatus.OK
        path.append(accepted)


def _processed(
    row: NDArray[np.float32], processors: Processors, request: int, path: list[int], batch: VerifyInput
) -> NDArray[np.float32]:
    """The row at the end of a path after its request's processors."""
    penalties = processors.penalties
    seen, values = [], {}
    if penalties is not None:
        committed = penalties.committed_tokens[request]
        seen = [*committed[committed >= 0].tolist(), *batch.candidates[request, path].tolist()]
        values = {name: getattr(penalties, name)[request].item() for name in PENALTIES}
    bias, mask = processors.logit_bias, processors.token_bitmask
    return processed_logits(
        row,
        seen,
        **values,
        logit_bias=None if bias is None else bias[request].numpy(),
        token_bitmask=None if mask is None else mask[request, path[-1]].numpy(),
    )


class ReferenceBackend:
    """Readable NumPy float32; CPU tensors only."""

    name = "reference"
    traits = BackendTraits(devices=("cpu",), takes_filters=True, takes_processors=PROCESSORS)

    def verify(
        self,
        batch: VerifyInput,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        coins: Coins,
        depth_cap: int,
        filters: Filters | None = None,
        processors: Processors | None = None,
    ) -> VerifyOutput:
        """Process each visited row, softmax it at its request's temperature, filter it, then walk."""
        temperatures = temperature.tolist()
        cuts = filters.cuts() if filters else [Cuts()] * batch.batch_size

        def law(request: int, path: list[int]) -> tuple[RowStatus, NDArray[np.float32]]:
            row = as_float_array(logits[request, path[-1]]).astype(np.float32)
            if processors is not None:
                row = _processed(row, processors, request, path, batch)
            status = row_status(row)
            if status is not RowStatus.OK:
                return status, row
            return status, filtered_probs(target_probs(row, temperatures[request]), cuts[request])

        return self._run(batch, law, coins, depth_cap)

    def verify_probs(
        self,
        batch: VerifyInput,
        target_probs: torch.Tensor,
        coins: Coins,
        depth_cap: int,
        filters: Filters | None = None,
    ) -> VerifyOutput:
        """Walk on the probabilities as they are, or filtered."""
        cuts = filters.cuts() if filters else [Cuts()] * batch.batch_size

        def law(request: int, path: list[int]) -> tuple[RowStatus, NDArray[np.float32]]:
            row = as_float_array(target_probs[request, path[-1]]).astype(np.float32)
            status = row_status(row, is_probs=True)
            return status, filtered_probs(row, cuts[request]) if status is RowStatus.OK else row

        return self._run(batch, law, coins, depth_cap)

    def _run(
        self,
        batch: VerifyInput,
        law: Callable[[int, list[int]], tuple[RowStatus, NDArray[np.float32]]],
        coins: Coins,
        depth_cap: int,
    ) -> VerifyOutput:
        import torch  # noqa: PLC0415

        size, slots = batch.batch_size, batch.num_draft_tokens
        tokens = batch.candidates.numpy()
        first, sibling = batch.retrieve_next_token.numpy(), batch.retrieve_next_sibling.numpy()
        accept, final = coins.accept.numpy(), coins.final.numpy()
        accept_index = np.full((size, depth_cap), -1, np.int32)
        accept_token_num = np.zeros(size, np.int32)
        predicts = np.full(size * slots, -1, np.int32)
        statuses = np.zeros(size, np.int32)
        for request in range(size):
            path, bonus, status = walk_request(
                lambda path, request=request: law(request, path),  # type: ignore[misc]
                tokens[request],
                first[request],
                sibling[request],
                accept[request],
                final[request],
                depth_cap,
            )
            statuses[request] = status
            if status is not RowStatus.OK:
                continue
            flat = [request * slots + node for node in path]
            accept_index[request, : len(path)] = flat
            accept_token_num[request] = len(path) - 1
            predicts[flat] = [*(tokens[request, node] for node in path[1:]), bonus]
        return VerifyOutput(
            torch.from_numpy(accept_index),
            torch.from_numpy(accept_token_num),
            torch.from_numpy(predicts),
            torch.from_numpy(statuses),
        )
