"""What top-k, top-p and min-p a request carries: one request's :class:`Cuts`, a batch's :class:`Filters`.

Each filter keeps a *prefix* of the tokens sorted by falling mass, equal masses by rising id. What is left is
divided by its sum; children are tested against that law and the bonus is drawn from it.

* ``top_k`` keeps the first k tokens.
* ``top_p`` keeps a token iff the mass before it is below p: the smallest set of highest tokens whose mass
  reaches p, the token that crosses it included (Holtzman et al., "The curious case of neural text
  degeneration", ICLR 2020).
* ``min_p`` keeps a token iff its mass is at least min_p times the largest one (Nguyen et al., "Turning up the
  heat: min-p sampling", ICLR 2025).

In the *sequential* order top-p measures the law renormalised after top-k (HF, vLLM, SGLang's verifier), in
the *joint* order the law after temperature, before any cut (SGLang's plain sampler). The token of largest
mass is always kept, so no filter empties a law, and at temperature 0 none changes anything.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from treeconv._numbers import as_number
from treeconv.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = ["FILTER_ORDERS", "Cuts", "FilterOrder", "Filters", "check_order"]

FilterOrder = Literal["sequential", "joint"]
FILTER_ORDERS: tuple[FilterOrder, ...] = ("sequential", "joint")


def check_order(order: Any) -> None:
    """Refuse what is no order.

    Raises:
        InvalidArgument: not one of :data:`FILTER_ORDERS`.
    """
    if not isinstance(order, str) or order not in FILTER_ORDERS:  # an array of names is none of them
        raise InvalidArgument(f"filter_order={order!r}, but must be 'sequential' or 'joint'")


@dataclass(frozen=True)
class Cuts:
    """The filters of one request.

    Args:
        top_k: >= 1; None, or the vocabulary's size and more, is off.

        top_p: in (0, 1], taken as a float32; 1 is off.

        min_p: in [0, 1], taken as a float32; 0 is off.

        order: "sequential" or "joint": which law top-p measures after top-k.

    Raises:
        InvalidArgument: a value outside its range.
    """

    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    order: FilterOrder = "sequential"

    def __post_init__(self) -> None:
        k = self.top_k
        if k is not None and (isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k < 1):
            raise InvalidArgument(f"top_k={k!r}, but must be an integer >= 1, or None for no cut")
        for name, low in (("top_p", "("), ("min_p", "[")):
            value = getattr(self, name)
            number = as_number(value)
            # Below 0 or above 1 by less than a rounding too; a positive one that rounds to 0 keeps nothing.
            if not 0 <= number <= 1 or (np.float32(number) == 0 and low == "("):
                wanted = f"a number in {low}0, 1]" if np.isnan(number) else f"in {low}0, 1] as a float32"
                raise InvalidArgument(f"{name}={value!r}, but must be {wanted}")
            object.__setattr__(self, name, float(np.float32(number)) + 0.0)  # -0.0 is 0.0
        if k is not None:
            object.__setattr__(self, "top_k", int(k))
        check_order(self.order)

    def are_on(self, vocab_size: int) -> bool:
        """Whether anything may be cut; where not, the law is taken as it is, not even renormalised."""
        return (self.top_k is not None and self.top_k < vocab_size) or self.top_p < 1 or self.min_p > 0

    def __str__(self) -> str:
        parts = [
            *([] if self.top_k is None else [f"top_k {self.top_k}"]),
            *([] if self.top_p == 1 else [f"top_p {self.top_p!r}"]),
            *([] if self.min_p == 0 else [f"min_p {self.min_p!r}"]),
        ]
        if self.top_k is not None and self.top_p < 1:
            parts.append(f"{self.order} order")
        return ", ".join(parts) or "no filters"


@dataclass(frozen=True)
class Filters:
    """The filters of a batch, as a backend takes them; a request's values may all be off.

    Args:
        top_k: ``[B]`` int64, >= 1; V and more is off.

        top_p: ``[B]`` float32 in (0, 1]; 1 is off.

        min_p: ``[B]`` float32 in [0, 1]; 0 is off.

        order: "sequential" or "joint", one for the whole batch.
    """

    top_k: torch.Tensor
    top_p: torch.Tensor
    min_p: torch.Tensor
    order: FilterOrder = "sequential"

    @classmethod
    def of(
        cls,
        cuts: Sequence[Cuts],
        vocab_size: int,
        order: FilterOrder = "sequential",
        device: torch.device | str = "cpu",
    ) -> Filters:
        """The tensors of these requests' filters, on a device; ``order`` overrides the requests' own."""
        import torch  # noqa: PLC0415

        top_k = [vocab_size if cut.top_k is None else min(cut.top_k, vocab_size) for cut in cuts]
        return cls(
            top_k=torch.tensor(top_k, dtype=torch.int64, device=device),
            top_p=torch.tensor([cut.top_p for cut in cuts], dtype=torch.float32, device=device),
            min_p=torch.tensor([cut.min_p for cut in cuts], dtype=torch.float32, device=device),
            order=order,
        )

    def contiguous(self) -> Filters:
        """The same filters in contiguous tensors; copies only what is not."""
        tensors = (self.top_k.contiguous(), self.top_p.contiguous(), self.min_p.contiguous())
        return replace(self, top_k=tensors[0], top_p=tensors[1], min_p=tensors[2])

    def cuts(self) -> list[Cuts]:
        """One :class:`Cuts` per request. Copies to the host, and so waits for the device."""
        columns = (self.top_k.tolist(), self.top_p.tolist(), self.min_p.tolist())
        return [Cuts(k, top_p, min_p, self.order) for k, top_p, min_p in zip(*columns, strict=True)]
