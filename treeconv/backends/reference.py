"""The verifier to read first: a plain loop over requests and nodes, in NumPy float32.

Deliberately slow and obvious. The oracle does not use it and it does not use the oracle.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from treeconv.backends._reference_steps import chain_step, match_step, recursive_step, target_only_step
from treeconv.backends.base import BackendTraits
from treeconv.filters import Cuts
from treeconv.processors import PENALTIES, PROCESSORS
from treeconv.rules import RULES, Rule
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
    # Decides at a node by its law, its children and their tokens: (place of a child, -1) or (-1, token).
    Step = Callable[[int, NDArray[np.float32], list[int], list[int]], tuple[int, int]]

__all__ = ["ReferenceBackend", "walk_request"]


def walk_request(
    law: Law,
    step: Step,
    tokens: NDArray[np.int64],
    first_child: NDArray[np.int64],
    next_sibling: NDArray[np.int64],
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
        children = []
        child = int(first_child[node]) if len(path) < depth_cap else -1
        while child != -1:
            children.append(child)
            child = int(next_sibling[child])
        place, bonus = step(node, p, children, [int(tokens[child]) for child in children])
        if place == -1:
            return path, bonus, RowStatus.OK
        path.append(children[place])


def _processing(
    processors: Processors, batch: VerifyInput
) -> Callable[[NDArray[np.float32], int, list[int]], NDArray[np.float32]]:
    """The function of a row, its request and the path that it ends that applies the request's processors."""
    penalties = processors.penalties
    texts: list[list[int]] = []
    amounts: dict[str, list[float]] = {}
    if penalties is not None:
        texts = [[token for token in text if token >= 0] for text in penalties.committed_tokens.tolist()]
        amounts = {name: getattr(penalties, name).tolist() for name in PENALTIES}
    tokens = batch.candidates.tolist()
    bias = None if processors.logit_bias is None else processors.logit_bias.numpy()
    mask = None if processors.token_bitmask is None else processors.token_bitmask.numpy()

    def processed(row: NDArray[np.float32], request: int, path: list[int]) -> NDArray[np.float32]:
        return processed_logits(
            row,
            [*texts[request], *(tokens[request][node] for node in path)] if texts else [],
            **{name: values[request] for name, values in amounts.items()},
            logit_bias=None if bias is None else bias[request],
            token_bitmask=None if mask is None else mask[request, path[-1]],
        )

    return processed


class ReferenceBackend:
    """Readable NumPy float32; CPU tensors only."""

    name = "reference"
    traits = BackendTraits(
        devices=("cpu",),
        takes_filters=True,
        takes_processors=PROCESSORS,
        rules=RULES,
        takes_thresholds=True,
        takes_views=True,
    )

    def verify(
        self,
        batch: VerifyInput,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        coins: Coins,
        depth_cap: int,
        filters: Filters | None = None,
        rule: Rule | None = None,
        processors: Processors | None = None,
    ) -> VerifyOutput:
        """Process each visited row, softmax it at its request's temperature, filter it, then walk."""
        rows, temperatures = as_float_array(logits), temperature.tolist()
        cuts = filters.cuts() if filters else [Cuts()] * batch.batch_size
        processed = None if processors is None else _processing(processors, batch)

        def law(request: int, path: list[int]) -> tuple[RowStatus, NDArray[np.float32]]:
            row = rows[request, path[-1]].astype(np.float32)
            if processed is not None:
                row = processed(row, request, path)
            status = row_status(row)
            if status is not RowStatus.OK:
                return status, row
            return status, filtered_probs(target_probs(row, temperatures[request]), cuts[request])

        return self._run(batch, law, coins, depth_cap, rule or Rule())

    def verify_probs(
        self,
        batch: VerifyInput,
        target_probs: torch.Tensor,
        coins: Coins,
        depth_cap: int,
        filters: Filters | None = None,
        rule: Rule | None = None,
    ) -> VerifyOutput:
        """Walk on the probabilities as they are, or filtered."""
        rows = as_float_array(target_probs)
        cuts = filters.cuts() if filters else [Cuts()] * batch.batch_size

        def law(request: int, path: list[int]) -> tuple[RowStatus, NDArray[np.float32]]:
            row = rows[request, path[-1]].astype(np.float32)
            status = row_status(row, is_probs=True)
            return status, filtered_probs(row, cuts[request]) if status is RowStatus.OK else row

        return self._run(batch, law, coins, depth_cap, rule or Rule())

    def _run(
        self,
        batch: VerifyInput,
        law: Callable[[int, list[int]], tuple[RowStatus, NDArray[np.float32]]],
        coins: Coins,
        depth_cap: int,
        rule: Rule,
    ) -> VerifyOutput:
        import torch  # noqa: PLC0415

        size, slots = batch.batch_size, batch.num_draft_tokens
        tokens = batch.candidates.numpy()
        first, sibling = batch.retrieve_next_token.numpy(), batch.retrieve_next_sibling.numpy()
        accept, final = coins.accept.numpy(), coins.final.numpy()
        draft_probs = None if rule.draft_probs is None else as_float_array(rule.draft_probs)

        def step(
            request: int, node: int, p: NDArray[np.float32], children: list[int], drafted: list[int]
        ) -> tuple[int, int]:
            coin, last = accept[request, node], final[request]
            if rule.name == "draw_and_match":
                return match_step(p, drafted, coin)
            if draft_probs is None:
                return target_only_step(p, drafted, coin, last, rule.threshold_single, rule.threshold_acc)
            q = draft_probs[request, node].astype(np.float32)
            if rule.name == "chain":
                return chain_step(p, q, drafted, coin, last)
            return recursive_step(p, q, drafted, accept[request, children], last)

        accept_index = np.full((size, depth_cap), -1, np.int32)
        accept_token_num = np.zeros(size, np.int32)
        predicts = np.full(size * slots, -1, np.int32)
        statuses = np.zeros(size, np.int32)
        for request in range(size):
            path, bonus, status = walk_request(
                partial(law, request),
                partial(step, request),
                tokens[request],
                first[request],
                sibling[request],
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
