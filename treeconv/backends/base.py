"""What a verifier must offer to be driven and judged, and how a stranger's function becomes one."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from treeconv.errors import BackendUnavailable, InvalidArgument
from treeconv.processors import PROCESSORS
from treeconv.tree import Coins, VerifyInput, VerifyOutput

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from treeconv.filters import Filters
    from treeconv.processors import ProcessorKind, Processors

__all__ = ["Backend", "BackendTraits", "FunctionBackend"]


@dataclass(frozen=True)
class BackendTraits:
    """What a backend claims; a law is checked only where its claim is made.

    Args:
        takes_logits: has ``verify`` (raw logits and temperatures).

        takes_probs: has ``verify_probs`` (the target law itself), which dyadic laws judge exactly.

        reports_status: sets ``VerifyOutput.status`` for unusable rows instead of sampling from them.

        graph_safe: never waits for the device, so that a CUDA graph can hold it.

        devices: device types it runs on.

        rows_dtypes: dtypes of logits it takes.

        is_interpreted: runs in an interpreter here, hundreds of times slower than it is meant to: judged
            only where asked for by name.

        takes_filters: both interfaces take ``filters`` (top-k, top-p and min-p).

        takes_processors: which of "bias", "bitmask" and "penalties" ``verify`` takes in ``processors``.
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


@runtime_checkable
class Backend(Protocol):
    """A target-only tree verifier.

    Inputs arrive validated. ``temperature`` is float32 ``[B]``; ``coins.accept`` float32 ``[B, N]`` and
    ``coins.final`` float32 ``[B]``; all on the batch's device. Inputs must not be written to.

    ``filters`` is handed over only where some request may have one on, and only to a backend whose traits
    claim ``takes_filters``: one that does not may leave the parameter out. A request whose own filters are
    all off (:meth:`Cuts.are_on`) is decided as if there were none.

    ``processors`` likewise, and only to ``verify``: handed over only where some request may have one on,
    and only the kinds that the traits claim in ``takes_processors``.
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
    ) -> VerifyOutput:
        """Verify from ``target_probs [B, N, V]`` float32."""


class FunctionBackend:
    """A plain function as a backend; which interface it has is read off its parameter names.

    ``f(batch, target_probs, coins, depth_cap)`` takes probabilities, and
    ``f(batch, logits, temperature, coins, depth_cap)`` logits; one that has a further parameter ``filters``
    is judged on filtered laws too (it gets None where there are none), and one of logits that has
    ``processors`` on processed ones (on those in its attribute ``takes_processors``, by default all). Both
    return a
    :class:`VerifyOutput`, or ``(accept_index, accept_token_num, predicts)`` with an optional fourth
    ``status``. Unusable rows are judged where the function has an attribute ``reports_status`` that is true.

    Raises:
        BackendUnavailable: parameters of neither kind.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        parameters = set(inspect.signature(function).parameters)
        takes_probs = {"batch", "target_probs", "coins", "depth_cap"} <= parameters
        takes_logits = {"batch", "logits", "temperature", "coins", "depth_cap"} <= parameters
        if not takes_probs and not takes_logits:
            raise BackendUnavailable(
                f"backend {name!r} takes ({', '.join(sorted(parameters))}), but must take (batch,"
                " target_probs, coins, depth_cap) or (batch, logits, temperature, coins, depth_cap)"
            )
        self.name = name
        self._function = function
        self.traits = BackendTraits(
            takes_logits=takes_logits,
            takes_probs=takes_probs and not takes_logits,
            reports_status=bool(getattr(function, "reports_status", False)),
            devices=tuple(getattr(function, "devices", ("cpu", "cuda"))),
            takes_filters="filters" in parameters,
            takes_processors=(
                tuple(getattr(function, "takes_processors", PROCESSORS))
                if "processors" in parameters and takes_logits
                else ()
            ),
        )

    def _output(self, result: Any) -> VerifyOutput:
        import torch  # noqa: PLC0415

        if isinstance(result, VerifyOutput):
            return result
        if not isinstance(result, (tuple, list)) or len(result) not in (3, 4):
            raise InvalidArgument(
                f"backend {self.name!r} returned {type(result).__name__}, but must return a VerifyOutput or"
                " (accept_index, accept_token_num, predicts[, status])"
            )
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
        processors: Processors | None = None,
    ) -> VerifyOutput:
        """Call the function with logits."""
        more = self._more(filters)
        if self.traits.takes_processors:
            more["processors"] = processors
        return self._output(
            self._function(
                batch=batch,
                logits=logits,
                temperature=temperature,
                coins=coins,
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
    ) -> VerifyOutput:
        """Call the function with probabilities."""
        return self._output(
            self._function(
                batch=batch,
                target_probs=target_probs,
                coins=coins,
                depth_cap=depth_cap,
                **self._more(filters),
            )
        )

    def _more(self, filters: Filters | None) -> dict[str, Any]:
        if not self.traits.takes_filters:
            assert filters is None, "handed filters that its traits do not claim"
            return {}
        return {"filters": filters}
