"""Checks of a call's rule, and of the draft that it is used on; like :mod:`treeconv._validate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv._validate import check_rows
from treeconv.errors import InvalidArgument
from treeconv.rules import RATIO_RULES, Drafting, Rule, RuleName, check_pairing

if TYPE_CHECKING:
    import torch

    from treeconv.tree import VerifyInput

__all__ = ["check_rule"]


def check_rule(
    name: RuleName,
    draft_probs: Any,
    drafting: Drafting,
    threshold_single: Any,
    threshold_acc: Any,
    batch: VerifyInput,
    vocab_size: int,
) -> Rule | None:
    """The rule of a call, None where it is the plain target-only one; checked against drafts and trees.

    Trees and draft laws are looked at on the CPU only: reading them back from a device would wait for it.
    """
    if (
        draft_probs is None
        and all(isinstance(word, str) for word in (name, drafting))
        and all(isinstance(value, float) for value in (threshold_single, threshold_acc))
        and (name, drafting, threshold_single, threshold_acc) == ("target_only", "fixed", 1.0, 1.0)
    ):
        return None  # what nearly every call is
    check_pairing(name, drafting)
    if draft_probs is not None:
        draft_probs = check_rows(draft_probs, "draft_probs", batch, ("float32",))
        if draft_probs.shape[2] != vocab_size:
            raise InvalidArgument(
                f"draft_probs.shape={tuple(draft_probs.shape)}, but must be"
                f" {(*batch.candidates.shape, vocab_size)}: one law per slot, over the target's"
                " vocabulary (map a reduced one to it first)"
            )
    rule = Rule(name, draft_probs, threshold_single, threshold_acc)
    if name in RATIO_RULES and batch.device.type == "cpu":
        if name == "chain":
            _check_chain(batch)
        _check_sampled(batch, draft_probs)
    return None if rule.is_plain else rule


def _check_chain(batch: VerifyInput) -> None:
    """One child a node."""
    twins = (batch.retrieve_next_sibling >= 0).nonzero()
    if len(twins):
        request, node = twins[0].tolist()
        raise InvalidArgument(
            f"rule='chain', but request {request}, node {node} has a sibling: chain takes one child a"
            " node; use rule='recursive' for siblings sampled without replacement"
        )


def _check_sampled(batch: VerifyInput, draft_probs: torch.Tensor) -> None:
    """Every draft may have been sampled from its parent's law: a mass of 0 says that it was not.

    Every coin would keep it, whatever the target thinks of it. A row that holds what is no mass (NaN, an
    infinite or a negative number) is a drafter's failure instead, which must not cost the text.
    """
    first, sibling = batch.retrieve_next_token.numpy(), batch.retrieve_next_sibling.numpy()
    requests, parents = np.nonzero(first >= 0)
    children = first[requests, parents]
    tokens, laws = batch.candidates.numpy(), draft_probs.numpy()
    while len(children):
        drafted = tokens[requests, children]
        for place in np.flatnonzero(laws[requests, parents, drafted] == 0):
            request, parent, child = (int(column[place]) for column in (requests, parents, children))
            law = laws[request, parent]
            if np.isfinite(law).all() and (law >= 0).all():
                raise InvalidArgument(
                    f"draft_probs[{request}, {parent}, {drafted[place]}]={float(law[drafted[place]])!r}, but"
                    f" must be > 0: request {request}, node {child} drafts token {drafted[place]}, which was"
                    f" then not sampled from node {parent}'s law, and every coin would keep it"
                )
        younger = sibling[requests, children]
        is_one = younger >= 0
        requests, parents, children = requests[is_one], parents[is_one], younger[is_one]
