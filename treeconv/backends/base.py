"""What a verifier must offer to be driven and judged, and how a stranger's function becomes one."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from treeconv.errors import BackendUnavailable, InvalidArgument
from treeconv.processors import PROCESSORS
from treeconv.rules import RULES
from treeconv.tree import Coins, VerifyInput, VerifyOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from treeconv.filters import Filters
    from treeconv.processors import ProcessorKind, Processors
    from treeconv.rules import Rule, RuleName

__all__ = [
    "Backend",
    "BackendTraits",
    "CoinUse",
    "FunctionBackend",
    "as_taken",
    "check_calls",
    "handed_over",
]

_OF_LOGITS = ("batch", "logits", "temperature", "coins", "depth_cap")
_OF_PROBS = ("batch", "target_probs", "coins", "depth_cap")

#: How a verifier comes by its coins; see :class:`BackendTraits`.
CoinUse = Literal["bucket", "own", "seeds", "generator"]


@dataclass(frozen=True)
class BackendTraits:
    """What a backend claims; a law is checked only where its claim is made.

    Args:
        takes_logits: has ``verify`` (raw logits and temperatures).

        takes_probs: has ``verify_probs`` (the target law itself), which dyadic laws judge exactly.

        reports_status: sets ``VerifyOutput.status`` for unusable rows instead of sampling from them.

        graph_safe: never waits for the device, so that a CUDA graph can hold it.

        devices: device types it runs on.

        rows_dtypes: dtypes of logits it takes. A case in another one is rounded to the first of them, and
            judged by what was handed over.

        is_interpreted: runs in an interpreter here, hundreds of times slower than it is meant to: judged
            only where asked for by name.

        takes_filters: both interfaces take ``filters`` (top-k, top-p and min-p).

        takes_processors: which of "bias", "bitmask" and "penalties" ``verify`` takes in ``processors``.

        coins: what its parameter ``coins`` is, and so which laws can be stated. "bucket": :class:`Coins`,
            compared with half-open buckets as DESIGN says; every law. "own": :class:`Coins` that it spends in
            a way of its own (draw-and-match); no law about buckets. Or it draws its coins itself: from
            "seeds", int64 ``[B]``, each request's coins fixed by (seed, ``batch.prefix_lens``); or from a
            "generator", a ``torch.Generator``. Then the laws about coins are what is left.

        rules: the acceptance rules it has, some of :data:`treeconv.rules.RULES`.

        takes_thresholds: its target-only rule takes acceptance thresholds below 1, which are lossy.

        takes_views: takes tensors of any strides, but for the vocabulary of rows, laws, biases and bitmasks,
            which is contiguous. Others are handed contiguous tensors, by laws and by :func:`treeconv.verify`.
    """

    takes_logits: bool = True
    takes_probs: bool = True
    reports_status: bool = True
    graph_safe: bool = False
    devices: tuple[str, ...] = ("cpu", "cuda")
    rows_dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    is_interpreted: bool = False
    takes_filters: bool = False
    takes_processors: tuple[ProcessorKind, ...] = ()
    coins: CoinUse = "bucket"
    rules: tuple[RuleName, ...] = ("target_only",)
    takes_thresholds: bool = False
    takes_views: bool = False


@runtime_checkable
class Backend(Protocol):
    """A tree verifier, target-only unless it claims other rules.

    Inputs arrive validated. ``temperature`` is float32 ``[B]``; ``coins.accept`` float32 ``[B, N]`` and
    ``coins.final`` float32 ``[B]``; all on the batch's device. Inputs must not be written to.

    ``filters`` is handed over only where some request may have one on, and only to a backend whose traits
    claim ``takes_filters``: one that does not may leave the parameter out. A request whose own filters are
    all off (:meth:`Cuts.are_on`) is decided as if there were none.

    ``coins`` is what ``traits.coins`` says: :class:`Coins`, seeds, or a generator.

    ``rule`` is handed over as ``filters`` is: only where it is not :attr:`~treeconv.rules.Rule.is_plain`, and
    only where the traits claim it. Its draft probabilities of padding are NaN in laws.

    ``processors`` likewise, and only to ``verify``: handed over only where some request may have one on,
    and only the kinds that the traits claim in ``takes_processors``.

    One that keeps scratch between calls may have ``with_own_scratch()``, which returns another like it that
    shares none: :class:`~treeconv.cuda_graph.CudaGraphRunner` asks for one, so that its replays may run
    beside other calls.
    """

    name: str
    traits: BackendTraits

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
        """Verify from ``logits [B, N, V]``."""

    def verify_probs(
        self,
        batch: VerifyInput,
        target_probs: torch.Tensor,
        coins: Coins,
        depth_cap: int,
        filters: Filters | None = None,
        rule: Rule | None = None,
    ) -> VerifyOutput:
        """Verify from ``target_probs [B, N, V]`` float32."""


def handed_over(
    backend: Backend,
    filters: Filters | None = None,
    rule: Rule | None = None,
    processors: Processors | None = None,
) -> dict[str, Any]:
    """What a backend is handed besides: nothing where it is the default, so that it need not know of it.

    Raises:
        BackendUnavailable: something that its traits do not claim.
    """
    name, traits = backend.name, backend.traits
    more: dict[str, Any] = {}
    if filters is not None:
        if not traits.takes_filters:
            raise BackendUnavailable(f"backend={name!r} takes no filters: it has no top-k, top-p or min-p")
        more["filters"] = filters
    if rule is not None:
        if rule.name not in traits.rules:
            known = ", ".join(traits.rules)
            raise BackendUnavailable(f"backend={name!r} has no rule {rule.name!r}, but {known}")
        if rule.is_lossy and not traits.takes_thresholds:
            raise BackendUnavailable(f"backend={name!r} takes no acceptance thresholds below 1")
        more["rule"] = rule
    if processors is not None:
        if missing := processors.kinds - set(traits.takes_processors):
            known = ", ".join(traits.takes_processors) or "none"
            lacks = " or ".join(sorted(missing))
            raise BackendUnavailable(f"backend={name!r} takes no {lacks}; of the processors it takes {known}")
        more["processors"] = processors
    return more


def check_calls(backend: Backend, name: str) -> None:
    """Refuse a backend that cannot be called as its traits say it will be, before any case is drawn.

    Raises:
        BackendUnavailable: traits of another class, or a method that takes other arguments.
    """
    traits = backend.traits
    if not isinstance(traits, BackendTraits):
        raise BackendUnavailable(
            f"backend={name!r}: traits is a {type(traits).__name__}, but must be a"
            " treeconv.backends.base.BackendTraits"
        )
    more = {
        "filters": traits.takes_filters,
        "rule": traits.takes_thresholds or traits.rules != RULES[:1],
        "processors": bool(traits.takes_processors),
    }
    kwargs = [key for key, is_taken in more.items() if is_taken]
    if traits.takes_logits:
        _check_call(name, "verify", backend.verify, _OF_LOGITS, kwargs)
    if traits.takes_probs:
        of_probs = [key for key in kwargs if key != "processors"]
        _check_call(name, "verify_probs", backend.verify_probs, _OF_PROBS, of_probs)


def _check_call(
    name: str, method: str, function: Callable[..., Any], args: Sequence[str], kwargs: Sequence[str]
) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # compiled: it does not say what it takes
        return
    try:
        signature.bind(*args, **dict.fromkeys(kwargs))
    except TypeError as error:
        called = ", ".join([*args, *(f"{key}=" for key in kwargs)])
        raise BackendUnavailable(
            f"backend={name!r} takes {method}{signature}, but is called as {method}({called}), as its traits"
            f" say: {error}"
        ) from None


def as_taken(
    backend: Backend, batch: VerifyInput, rows: torch.Tensor, more: dict[str, Any]
) -> tuple[VerifyInput, torch.Tensor, dict[str, Any]]:
    """What a backend is called with: contiguous tensors, unless it takes views."""
    if backend.traits.takes_views:
        return batch, rows, more
    contiguous = {name: _as_contiguous(value) for name, value in more.items()}
    return _as_contiguous(batch), rows.contiguous(), contiguous


def _as_contiguous(value: Any) -> Any:
    """A tensor, or a dataclass of tensors, without views."""
    if hasattr(value, "contiguous"):
        return value.contiguous()
    if not is_dataclass(value) or isinstance(value, type):
        return value
    return replace(value, **{part.name: _as_contiguous(getattr(value, part.name)) for part in fields(value)})


class FunctionBackend:
    """A plain function as a backend; which interface it has is read off its parameter names.

    ``f(batch, target_probs, coins, depth_cap)`` takes probabilities, and
    ``f(batch, logits, temperature, coins, depth_cap)`` logits; one that has a further parameter ``filters``
    is judged on filtered laws too (it gets None where there are none), and one of logits that has
    ``processors`` on those in its attribute ``takes_processors``, or on all. One with a parameter ``rule``
    gets the :class:`~treeconv.rules.Rule` (None for the plain one), and claims what its attribute ``rules``
    says: all of them if it has none. A function that draws its coins itself takes ``seeds`` or ``generator``
    in the place of ``coins`` (:class:`BackendTraits` says what they are). All return a
    :class:`VerifyOutput`, or ``(accept_index, accept_token_num, predicts)`` with an optional fourth
    ``status``. Unusable rows are judged where the function has an attribute ``reports_status`` that is true;
    attributes ``devices``, ``rows_dtypes``, ``coins`` and ``takes_views`` are its traits.

    Raises:
        BackendUnavailable: parameters of neither kind, or a further one without a default.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        parameters = set(inspect.signature(function).parameters)
        self._coins = next((kind for kind in ("seeds", "generator") if kind in parameters), "coins")
        takes_probs = {"batch", "target_probs", self._coins, "depth_cap"} <= parameters
        takes_logits = {"batch", "logits", "temperature", self._coins, "depth_cap"} <= parameters
        if not takes_probs and not takes_logits:
            raise BackendUnavailable(
                f"backend {name!r} takes ({', '.join(sorted(parameters))}), but must take (batch,"
                " target_probs, coins, depth_cap) or (batch, logits, temperature, coins, depth_cap)"
            )
        handed = {"batch", self._coins, "depth_cap", "filters", "rule"}
        handed |= {"logits", "temperature", "processors"} if takes_logits else {"target_probs"}
        required = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if more := [parameter for parameter in required if parameter not in handed]:
            raise BackendUnavailable(
                f"backend {name!r} requires {' and '.join(more)}, which it is not handed: give it a default"
            )
        drawn: Any = getattr(function, "coins", "bucket") if self._coins == "coins" else self._coins
        self.name = name
        self._function = function
        self.traits = BackendTraits(
            takes_logits=takes_logits,
            takes_probs=takes_probs and not takes_logits,
            reports_status=bool(getattr(function, "reports_status", False)),
            devices=tuple(getattr(function, "devices", BackendTraits.devices)),
            rows_dtypes=tuple(getattr(function, "rows_dtypes", BackendTraits.rows_dtypes)),
            takes_filters="filters" in parameters,
            takes_processors=(
                tuple(getattr(function, "takes_processors", PROCESSORS))
                if "processors" in parameters and takes_logits
                else ()
            ),
            coins=drawn,
            rules=tuple(getattr(function, "rules", RULES)) if "rule" in parameters else RULES[:1],
            takes_views=bool(getattr(function, "takes_views", False)),
        )
        self._takes_rule = "rule" in parameters

    def _output(self, result: Any) -> VerifyOutput:
        import torch  # noqa: PLC0415

        if isinstance(result, VerifyOutput):
            return result
        if not isinstance(result, (tuple, list)) or len(result) not in (3, 4):
            raise InvalidArgument(
                f"backend {self.name!r} returned {type(result).__name__}, but must return a VerifyOutput or"
                " (accept_index, accept_token_num, predicts[, status])"
            )
        for name, part in zip(
            ("accept_index", "accept_token_num", "predicts", "status"), result, strict=False
        ):
            if not isinstance(part, torch.Tensor):
                raise InvalidArgument(f"{name} is a {type(part).__name__}, but must be a torch.Tensor")
        accept_index, accept_token_num, predicts, *rest = result
        status = rest[0] if rest else torch.zeros_like(accept_token_num)
        return VerifyOutput(accept_index, accept_token_num, predicts, status)

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
        """Call the function with logits."""
        more = self._more(filters, rule)
        if self.traits.takes_processors:
            more["processors"] = processors
        return self._output(
            self._function(
                batch=batch,
                logits=logits,
                temperature=temperature,
                **{self._coins: coins},
                depth_cap=depth_cap,
                **more,
            )
        )

    def verify_probs(
        self,
        batch: VerifyInput,
        target_probs: torch.Tensor,
        coins: Coins,
        depth_cap: int,
        filters: Filters | None = None,
        rule: Rule | None = None,
    ) -> VerifyOutput:
        """Call the function with probabilities."""
        return self._output(
            self._function(
                batch=batch,
                target_probs=target_probs,
                **{self._coins: coins},
                depth_cap=depth_cap,
                **self._more(filters, rule),
            )
        )

    def _more(self, filters: Filters | None, rule: Rule | None) -> dict[str, Any]:
        more: dict[str, Any] = {}
        if self.traits.takes_filters:
            more["filters"] = filters
        else:
            assert filters is None, "handed filters that its traits do not claim"
        if self._takes_rule:
            more["rule"] = rule
        else:
            assert rule is None, "handed a rule that its traits do not claim"
        return more
