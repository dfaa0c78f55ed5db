"""Hugging Face transformers as a peer: its speculative sampling and its logits warpers, as installed.

Both draw with torch's generator. Here they get our coins instead: the module that holds the function sees a
torch of which ``rand_like`` and ``multinomial`` are ours, so that every decision is a step function of known
coins and is judged exactly. Nothing else is replaced. CPU only; needs the ``peers`` extra.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
import transformers
from transformers.generation import utils
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from treeconv.backends._reference_steps import target_only_step
from treeconv.backends.base import BackendTraits
from treeconv.filters import Cuts
from treeconv.tree import Coins, VerifyInput, VerifyOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treeconv.filters import Filters
    from treeconv.rules import Rule

__all__ = ["VERSION", "HfChain", "HfFilters"]

VERSION = f"transformers {transformers.__version__}"


class _Law(torch.Tensor):
    """Probabilities that are their own softmax: handed where logits are expected, they arrive as they are."""

    def softmax(self, dim: int) -> torch.Tensor:  # type: ignore[override]
        assert dim == -1
        return self.as_subclass(torch.Tensor)


class _CoinedTorch:
    """torch with our coins for its generator's."""

    def __init__(self, accept: torch.Tensor, final: float) -> None:
        self._accept, self._final = accept, final

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def rand_like(self, like: torch.Tensor) -> torch.Tensor:
        return self._accept.reshape(like.shape)

    def multinomial(self, law: torch.Tensor, num_samples: int) -> torch.Tensor:
        # The real one first: it raises for NaN, for infinite and negative masses, and where there is none.
        torch.multinomial(law, num_samples, generator=torch.Generator().manual_seed(0))
        masses = law[0].numpy().astype(np.float64)
        sums = masses.cumsum()
        above = np.flatnonzero((sums > self._final * sums[-1]) & (masses > 0))
        return torch.tensor([[above[0] if above.size else np.flatnonzero(masses)[-1]]])


def _output(
    paths: Sequence[Sequence[int]], texts: Sequence[Sequence[int]], slots: int, cap: int
) -> VerifyOutput:
    size = len(paths)
    accept_index = torch.full((size, cap), -1, dtype=torch.int32)
    counts = torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32)
    predicts = torch.full((size, slots), -1, dtype=torch.int32)
    for request, (path, text) in enumerate(zip(paths, texts, strict=True)):
        nodes = torch.tensor(path)
        accept_index[request, : len(path)] = nodes.int() + request * slots
        predicts[request, nodes] = torch.tensor(text, dtype=torch.int32)
    return VerifyOutput(accept_index, counts, predicts.view(-1), torch.zeros(size, dtype=torch.int32))


class HfChain:
    """``transformers.generation.utils._speculative_sampling`` on chains, from p and q themselves.

    Assisted decoding calls it with one candidate at least; without one, and at a depth cap of 1, the bonus is
    drawn from p, as generation does.

    Args:
        is_exclusive: undo that the function accepts a coin *at* p / q (it compares with ``<=``): it is handed
            the next float32 above each coin. So what else it does differently shows.
    """

    name = "hf-chain"
    version = VERSION
    traits = BackendTraits(devices=("cpu",), takes_logits=False, reports_status=False, rules=("chain",))

    def __init__(self, *, is_exclusive: bool = False) -> None:
        self._is_exclusive = is_exclusive

    def verify(self, *args: Any, **kwargs: Any) -> VerifyOutput:
        """Never called: the traits claim probabilities only."""
        raise NotImplementedError

    def verify_probs(
        self,
        batch: VerifyInput,
        target_probs: torch.Tensor,
        coins: Coins,
        depth_cap: int,
        filters: Filters | None = None,
        rule: Rule | None = None,
    ) -> VerifyOutput:
        """One request after the other: the function takes a batch of one."""
        assert rule is not None
        assert rule.draft_probs is not None
        assert filters is None
        paths, texts = [], []
        for request, first in enumerate(batch.retrieve_next_token.tolist()):
            chain = [0]
            while first[chain[-1]] != -1 and len(chain) < depth_cap:
                chain.append(first[chain[-1]])
            p, q = target_probs[request, chain], rule.draft_probs[request, chain[:-1]]
            text = self._sample(
                batch.candidates[request, chain[1:]],
                p,
                q,
                coins.accept[request, chain[:-1]],
                float(coins.final[request]),
            )
            texts.append(text)
            paths.append(chain[: len(text)])
        return _output(paths, texts, batch.num_draft_tokens, depth_cap)

    def _sample(
        self,
        drafted: torch.Tensor,
        p: torch.Tensor,
        q: torch.Tensor,
        accept: torch.Tensor,
        final: float,
    ) -> list[int]:
        if self._is_exclusive:
            accept = accept.nextafter(torch.full_like(accept, 2.0))
        coined = _CoinedTorch(accept, final)
        if not len(drafted):
            return [int(coined.multinomial(p, num_samples=1))]
        with mock.patch.object(utils, "torch", coined):
            tokens, _ = utils._speculative_sampling(  # noqa: SLF001  # the function itself is what is judged
                candidate_input_ids=drafted[None],
                candidate_logits=q[None].as_subclass(_Law),
                candidate_length=len(drafted),
                new_logits=p[None].as_subclass(_Law),
            )
        return [int(token) for token in tokens[0]]


class HfFilters:
    """transformers' temperature, top-k, top-p and min-p warpers, in generation's order, before our own walk.

    At temperature 0 generation does not sample: the lowest-index argmax has all mass. The joint order is the
    two cuts made on the same scores; generation itself knows the sequential one only.

    Args:
        is_centred: undo that logits are divided by T before the maximum is taken off: they are handed over
            with their maximum at 0. So what else the warpers do differently shows.
    """

    name = "hf-filters"
    version = VERSION
    traits = BackendTraits(devices=("cpu",), takes_probs=False, reports_status=False, takes_filters=True)

    def __init__(self, *, is_centred: bool = False) -> None:
        self._is_centred = is_centred

    def verify(
        self,
        batch: VerifyInput,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        coins: Coins,
        depth_cap: int,
        filters: Filters | None = None,
        rule: Rule | None = None,
    ) -> VerifyOutput:
        """Warp each visited row, take its softmax, then walk as the ``reference`` backend does."""
        assert rule is None
        cuts = filters.cuts() if filters else [Cuts()] * batch.batch_size
        first, sibling = batch.retrieve_next_token.tolist(), batch.retrieve_next_sibling.tolist()
        tokens = batch.candidates.tolist()
        accept, final = coins.accept.numpy(), coins.final.numpy()
        paths, texts = [], []
        for request, T in enumerate(temperature.tolist()):
            path = [0]
            while True:
                node = path[-1]
                children, child = [], first[request][node] if len(path) < depth_cap else -1
                while child != -1:
                    children.append(child)
                    child = sibling[request][child]
                place, bonus = target_only_step(
                    self._law(logits[request, node], T, cuts[request]),
                    [tokens[request][child] for child in children],
                    accept[request, node],
                    final[request],
                )
                if place == -1:
                    break
                path.append(children[place])
            paths.append(path)
            texts.append([*(tokens[request][node] for node in path[1:]), bonus])
        return _output(paths, texts, batch.num_draft_tokens, depth_cap)

    def verify_probs(self, *args: Any, **kwargs: Any) -> VerifyOutput:
        """Never called: the traits claim logits only."""
        raise NotImplementedError

    def _law(self, row: torch.Tensor, temperature: float, cuts: Cuts) -> Any:
        scores = row.float()[None]  # generation casts to float32 before it warps
        if temperature == 0:
            return torch.nn.functional.one_hot(scores[0].argmax(), scores.shape[1]).float().numpy()
        if self._is_centred:
            scores = scores - scores.max()
        ids: Any = None  # read by none of these
        scores = TemperatureLogitsWarper(temperature)(ids, scores)
        heated = scores
        if cuts.top_k is not None:
            scores = TopKLogitsWarper(cuts.top_k)(ids, scores)
        if cuts.top_p < 1:
            kept = TopPLogitsWarper(cuts.top_p)(ids, scores if cuts.order == "sequential" else heated)
            scores = torch.minimum(scores, kept)
        if cuts.min_p > 0:
            scores = MinPLogitsWarper(cuts.min_p)(ids, scores)
        return scores.softmax(-1)[0].numpy()
