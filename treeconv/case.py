"""One verification call as data: what laws judge, strategies generate and the corpus stores."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from treeconv.convert import to_verify_input
from treeconv.errors import InvalidArgument
from treeconv.filters import FILTER_ORDERS, Cuts, Filters
from treeconv.processors import Processors, RequestProcessors
from treeconv.rules import RATIO_RULES, RULES, Rule
from treeconv.tree import Coins, DraftTree, as_float_array

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from treeconv.filters import FilterOrder
    from treeconv.processors import ProcessorKind
    from treeconv.rules import RuleName
    from treeconv.tree import VerifyInput

__all__ = ["UNUSABLE", "CaseTensors", "Request", "RowsKind", "VerifyCase", "round_rows"]

RowsKind = Literal["logits", "probs"]
_DTYPES = ("float32", "bfloat16", "float16")

#: by the kind of rows, what makes one unusable -> (the value, whether all of the row has to hold it)
UNUSABLE: dict[str, dict[str, tuple[float, bool]]] = {
    "logits": {"nan": (np.nan, False), "inf": (np.inf, False), "empty": (-np.inf, True)},
    "probs": {
        "nan": (np.nan, False),
        "inf": (np.inf, False),
        "empty": (0.0, True),
        "negative": (-(2.0**-12), False),
    },
}


def round_rows(rows: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """Float32 rows that hold values of the dtype exactly; by truncation to bfloat16, none made infinite."""
    if dtype == "bfloat16":
        rows = (rows.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
    elif dtype == "float16":
        most = np.float32(np.finfo(np.float16).max)
        finite = np.where(np.isfinite(rows), rows.clip(-most, most), rows)
        rows = finite.astype(np.float16).astype(np.float32)
    return rows


def _same_array(left: NDArray[Any], right: NDArray[Any]) -> bool:
    return left.shape == right.shape and left.tobytes() == right.tobytes()


def _same_optional(left: NDArray[Any] | None, right: NDArray[Any] | None) -> bool:
    if left is None or right is None:
        return left is right
    return _same_array(left, right)


@dataclass(frozen=True, eq=False)
class Request:
    """One tree, its target rows, and its coins.

    Args:
        tree: n nodes.

        rows: ``[n, V]`` float32, the target's row at each node: logits, or probabilities.

        temperature: >= 0; 0 is greedy. Unused where the rows are probabilities.

        accept: ``[n]`` float32 coins in [0, 1].

        final: float32 coin in [0, 1].

        top_k, top_p, min_p: its filters, as in :class:`~treeconv.filters.Cuts`; off by default.

        processors: its bias, bitmask and penalties, of logits only; off by default.

        draft_probs: ``[n, V]`` float32, the law that each node's children were sampled from, for a rule that
            reads it; else None.
    """

    tree: DraftTree
    rows: NDArray[np.float32]
    temperature: float
    accept: NDArray[np.float32]
    final: float
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    processors: RequestProcessors = field(default_factory=RequestProcessors)
    draft_probs: NDArray[np.float32] | None = None

    def __post_init__(self) -> None:
        rows = np.ascontiguousarray(as_float_array(self.rows), np.float32)
        accept = np.ascontiguousarray(as_float_array(self.accept), np.float32)
        if rows.ndim != 2 or rows.shape[0] != len(self.tree) or rows.shape[1] == 0:
            raise InvalidArgument(f"rows.shape={rows.shape}, but must be ({len(self.tree)}, V), V >= 1")
        if accept.shape != (len(self.tree),):
            raise InvalidArgument(f"accept.shape={accept.shape}, but must be ({len(self.tree)},)")
        if self.draft_probs is not None:
            draft_probs = np.ascontiguousarray(as_float_array(self.draft_probs), np.float32)
            if draft_probs.shape != rows.shape:
                raise InvalidArgument(
                    f"draft_probs.shape={draft_probs.shape}, but must be {rows.shape}, as rows"
                )
            object.__setattr__(self, "draft_probs", draft_probs)
        object.__setattr__(self, "rows", rows)
        object.__setattr__(self, "accept", accept)
        object.__setattr__(self, "temperature", float(self.temperature))
        object.__setattr__(self, "final", float(np.float32(self.final)))
        cuts = Cuts(self.top_k, self.top_p, self.min_p)
        for name in ("top_k", "top_p", "min_p"):  # as checked, and as the float32 that backends take
            object.__setattr__(self, name, getattr(cuts, name))
        self.processors.check_shapes(len(self.tree), rows.shape[1])

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Request)
            and self.tree == other.tree
            and (self.temperature, self.final) == (other.temperature, other.final)
            and self.cuts() == other.cuts()
            and self.processors == other.processors
            and _same_array(self.rows, other.rows)
            and _same_optional(self.draft_probs, other.draft_probs)
            and _same_array(self.accept, other.accept)
        )

    __hash__ = None  # type: ignore[assignment]  # holds arrays

    def cuts(self, order: FilterOrder = "sequential") -> Cuts:
        """Its filters, applied in this order."""
        return Cuts(self.top_k, self.top_p, self.min_p, order)

    def with_coins(self, accept: Any, final: float) -> Request:
        """The same tree and rows under other coins."""
        return replace(self, accept=accept, final=final)


@dataclass(frozen=True)
class CaseTensors:
    """A case as a backend takes it. Padding is filled with traps: rows of NaN, coins of 0.

    ``filters`` is None where no request has one on, ``rule`` where it is the plain target-only one.
    """

    batch: VerifyInput
    rows: torch.Tensor
    temperature: torch.Tensor
    coins: Coins
    depth_cap: int
    filters: Filters | None = None
    processors: Processors | None = None
    rule: Rule | None = None


@dataclass(frozen=True)
class VerifyCase:
    """A batch of requests with one vocabulary.

    Args:
        requests: at least one; all rows have one V.

        kind: whether ``rows`` are "logits" or "probs".

        num_draft_tokens: N, slots per tree; default the largest tree.

        depth_cap: accept slots, root included; default: deepest tree + 1.

        rows_dtype: what the backend is handed: "float32", "bfloat16" or "float16". The float32 rows must
            hold values of that dtype exactly.

        filter_order: "sequential" or "joint": what top-p measures after top-k, in every request.

        rule: by which the call is verified, one of :data:`treeconv.rules.RULES`. ``chain`` and ``recursive``
            need every request's ``draft_probs``, the others none; ``chain`` trees of one child a node.
    """

    requests: tuple[Request, ...]
    kind: RowsKind = "logits"
    num_draft_tokens: int | None = None
    depth_cap: int | None = None
    rows_dtype: str = "float32"
    filter_order: FilterOrder = "sequential"
    rule: RuleName = "target_only"

    def __post_init__(self) -> None:
        object.__setattr__(self, "requests", tuple(self.requests))
        if not self.requests:
            raise InvalidArgument("requests=(), but must hold at least one Request")
        widths = {request.rows.shape[1] for request in self.requests}
        if len(widths) > 1:
            raise InvalidArgument(f"vocabularies {sorted(widths)}, but one case has one vocabulary")
        if self.kind not in ("logits", "probs"):
            raise InvalidArgument(f"kind={self.kind!r}, but must be 'logits' or 'probs'")
        if self.rows_dtype not in _DTYPES:
            raise InvalidArgument(f"rows_dtype={self.rows_dtype!r}, but must be one of {_DTYPES}")
        if self.filter_order not in FILTER_ORDERS:
            raise InvalidArgument(f"filter_order={self.filter_order!r}, but must be 'sequential' or 'joint'")
        if self.kind == "probs" and self.processor_kinds:
            raise InvalidArgument("kind='probs', but must be 'logits' where requests have processors")
        self._check_rule()

    def _check_rule(self) -> None:
        if self.rule not in RULES:
            raise InvalidArgument(f"rule={self.rule!r}, but must be one of {', '.join(RULES)}")
        for index, request in enumerate(self.requests):
            if (request.draft_probs is None) == (self.rule in RATIO_RULES):
                needs = "given" if self.rule in RATIO_RULES else "None"
                raise InvalidArgument(
                    f"requests[{index}].draft_probs must be {needs} with rule={self.rule!r}"
                )
            if self.rule == "chain" and any(len(children) > 1 for children in request.tree.children):
                raise InvalidArgument(
                    f"requests[{index}].tree has a node with two children, but must be a chain with"
                    " rule='chain'"
                )

    @property
    def vocab_size(self) -> int:
        """V, the vocabulary size."""
        return int(self.requests[0].rows.shape[1])

    @property
    def slots(self) -> int:
        """N, the slots per tree, root included."""
        return self.num_draft_tokens or max(len(request.tree) for request in self.requests)

    @property
    def effective_depth_cap(self) -> int:
        """The depth cap in force: ``depth_cap``, or the deepest tree's depth + 1."""
        return self.depth_cap or 1 + max(request.tree.depth for request in self.requests)

    @property
    def is_filtered(self) -> bool:
        """Whether any request has a filter on: then only a backend that takes filters can be asked."""
        return any(request.cuts().are_on(self.vocab_size) for request in self.requests)

    @property
    def processor_kinds(self) -> frozenset[ProcessorKind]:
        """The processors that any request has on: then only a backend that takes those can be asked."""
        return frozenset().union(*(request.processors.kinds for request in self.requests))

    @property
    def has_filter_settings(self) -> bool:
        """Whether any filter setting is not its default, on or not: what storing the case must keep."""
        return self.filter_order != "sequential" or any(request.cuts() != Cuts() for request in self.requests)

    def replace_requests(self, requests: Sequence[Request]) -> VerifyCase:
        """The same call on other requests; N and the depth cap stay what they were."""
        return replace(
            self,
            requests=tuple(requests),
            num_draft_tokens=self.slots,
            depth_cap=self.effective_depth_cap,
        )

    def as_logits(self) -> VerifyCase:
        """The logarithms of a call's probabilities: the same law at T = 1, its zeros -inf."""
        with np.errstate(divide="ignore", invalid="ignore"):  # a negative one becomes NaN: no law either
            requests = [
                replace(request, rows=np.log(request.rows), temperature=1.0) for request in self.requests
            ]
        return replace(self, requests=tuple(requests), kind="logits")

    def with_rows_dtype(self, dtype: str) -> VerifyCase:
        """The call with its logits rounded to another dtype: the case that a backend of that dtype sees."""
        rounded = [replace(request, rows=round_rows(request.rows, dtype)) for request in self.requests]
        return replace(self, requests=tuple(rounded), rows_dtype=dtype)

    def tensors(self, device: torch.device | str = "cpu") -> CaseTensors:
        """The call's tensors on a device."""
        import torch  # noqa: PLC0415

        # Another prefix each: a depth is a position less the prefix.
        prefixes = [5 + 9 * index for index in range(len(self.requests))]
        trees = [request.tree for request in self.requests]
        batch = to_verify_input(trees, self.slots, prefixes, device)
        shape = (len(self.requests), self.slots)
        rows = np.full((*shape, self.vocab_size), np.nan, np.float32)
        accept = np.zeros(shape, np.float32)
        for index, request in enumerate(self.requests):
            rows[index, : len(request.tree)] = request.rows
            accept[index, : len(request.tree)] = request.accept
        final = np.array([request.final for request in self.requests], np.float32)
        temperature = np.array([request.temperature for request in self.requests], np.float32)
        cuts = [request.cuts(self.filter_order) for request in self.requests]
        filters = Filters.of(cuts, self.vocab_size, self.filter_order, device) if self.is_filtered else None
        return CaseTensors(
            batch=batch,
            rows=torch.from_numpy(rows).to(getattr(torch, self.rows_dtype)).to(device),
            temperature=torch.from_numpy(temperature).to(device),
            coins=Coins(torch.from_numpy(accept).to(device), torch.from_numpy(final).to(device)),
            depth_cap=self.effective_depth_cap,
            filters=filters,
            processors=Processors.of(
                [request.processors for request in self.requests], self.slots, self.vocab_size, device
            ),
            rule=self._rule_tensors(device),
        )

    def _rule_tensors(self, device: torch.device | str) -> Rule | None:
        import torch  # noqa: PLC0415

        if self.rule == "target_only":
            return None
        if self.rule not in RATIO_RULES:
            return Rule(self.rule)
        draft_probs = np.full((len(self.requests), self.slots, self.vocab_size), np.nan, np.float32)
        for index, request in enumerate(self.requests):
            draft_probs[index, : len(request.tree)] = request.draft_probs
        return Rule(self.rule, torch.from_numpy(draft_probs).to(device))
