"""The acceptance rules: which draft each is right for, and what a rule besides the default needs.

* ``target_only``: children in order, one coin per node, against the running sum of the target's own masses.
  Exact for any draft, and on a fixed set of children no exact rule accepts more. Reads no draft law.
* ``draw_and_match``: draw a token from every visited node's own law, follow it where it was drafted. Exact
  for any draft. The reference DDTree's way. Reads no draft law.
* ``chain``: accept the child t with ``min(1, p(t) / q(t))``, else draw from ``relu(p - q)`` (Leviathan et
  al., "Fast inference from transformers via speculative decoding", ICML 2023; Chen et al., 2023). Exact where
  the child was *sampled* from q, one child a node.
* ``recursive``: the same from sibling to sibling, q renormalised without the ones before and p replaced by
  the residual after each rejection (Jeon et al., "Recursive speculative decoding", 2024; EAGLE). Exact where
  the siblings were *sampled without replacement* from q.

On a fixed set of children (DDTree, EAGLE's top-k) the ratio rules are biased towards it: nothing random in
the draft makes up for what they accept too much. So they want ``drafting="sampled"``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from treeconv._numbers import as_number
from treeconv.errors import InvalidArgument

if TYPE_CHECKING:
    import torch

__all__ = ["DRAFTINGS", "RATIO_RULES", "RULES", "Drafting", "Rule", "RuleName", "check_pairing"]

RuleName = Literal["target_only", "chain", "recursive", "draw_and_match"]
RULES: tuple[RuleName, ...] = ("target_only", "chain", "recursive", "draw_and_match")
#: those that read q, and are right only where the draft was sampled from it
RATIO_RULES: tuple[RuleName, ...] = ("chain", "recursive")
Drafting = Literal["fixed", "sampled"]
DRAFTINGS: tuple[Drafting, ...] = ("fixed", "sampled")


def _check_name(rule: Any) -> None:
    if not isinstance(rule, str) or rule not in RULES:  # an array of names is none of them
        raise InvalidArgument(f"rule={rule!r}, but must be one of {', '.join(RULES)}")


def check_pairing(rule: RuleName, drafting: Drafting) -> None:
    """Refuse a rule with drafts that it is biased on.

    Raises:
        InvalidArgument: an unknown name, or ``chain`` or ``recursive`` with a fixed draft; the message says
            what would come out.
    """
    _check_name(rule)
    if not isinstance(drafting, str) or drafting not in DRAFTINGS:
        raise InvalidArgument(f"drafting={drafting!r}, but must be 'fixed' or 'sampled'")
    if rule in RATIO_RULES and drafting == "fixed":
        raise InvalidArgument(
            f"drafting='fixed', but must be 'sampled' with rule={rule!r}: accepting with min(1, p/q) keeps"
            " the target's law only where the children were drawn from q. On a fixed set (DDTree, EAGLE's"
            " top-k) it is biased towards the set: with p=[.5, .3, .2] and q=[.6, .3, .1], children 0 and 1,"
            " token 0 comes out with .8333 instead of .5. Use rule='target_only' for a fixed draft, or say"
            " drafting='sampled' where draft_probs is what the children were sampled from"
        )


@dataclass(frozen=True)
class Rule:
    """How a batch is verified, where it is not by the plain target-only rule; handed to backends as ``rule``.

    Args:
        name: one of :data:`RULES`.

        draft_probs: ``[B, N, V]`` float32: row ``i`` is the law q_i that the children of node i were sampled
            from. A q that is negative or not finite counts as no mass. For ``chain`` and ``recursive``, else
            None.

        threshold_single: in [0, 1], ``target_only`` alone: also accept a child of p >= it. 1 is off. SGLang's
            knob; below 1 the output no longer has the target's law.

        threshold_acc: in (0, 1], ``target_only`` alone: accept iff ``coin * threshold_acc < acc``. 1 is off;
            below 1 lossy too.

    Raises:
        InvalidArgument: a value outside its range, draft probabilities that the rule does not read or lacks,
            or thresholds with another rule than ``target_only``.
    """

    name: RuleName = "target_only"
    draft_probs: torch.Tensor | None = None
    threshold_single: float = 1.0
    threshold_acc: float = 1.0

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.name in RATIO_RULES and self.draft_probs is None:
            raise InvalidArgument(
                f"draft_probs=None, but must be [B, N, V] with rule={self.name!r}: the laws that the children"
                " were sampled from"
            )
        if self.name not in RATIO_RULES and self.draft_probs is not None:
            raise InvalidArgument(
                f"draft_probs was given, but must be None with rule={self.name!r}: it never reads them"
            )
        for name, low in (("threshold_single", "["), ("threshold_acc", "(")):
            value = getattr(self, name)
            number = as_number(value)
            if not 0 <= number <= 1 or (number == 0 and low == "("):
                raise InvalidArgument(f"{name}={value!r}, but must be in {low}0, 1], one number for all")
            object.__setattr__(self, name, number)
        if self.is_lossy and self.name != "target_only":
            raise InvalidArgument(
                f"threshold_single={self.threshold_single!r}, threshold_acc={self.threshold_acc!r}, but must"
                f" be 1 with rule={self.name!r}: thresholds are target_only's"
            )

    @property
    def is_lossy(self) -> bool:
        """Whether a threshold is below 1: accepts more than the target's law allows, on purpose."""
        return self.threshold_single < 1 or self.threshold_acc < 1

    @property
    def is_plain(self) -> bool:
        """Whether this is target-only at thresholds 1: what a backend decides without being told."""
        return self.name == "target_only" and not self.is_lossy
