"""Backends by name, imported only when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from treeconv.backends.base import Backend, FunctionBackend, check_calls
from treeconv.errors import BackendUnavailable

if TYPE_CHECKING:
    from collections.abc import Collection

    import torch

    from treeconv.rules import RuleName

__all__ = ["BACKENDS", "BY_NAME_ONLY", "available_backends", "choose_backend", "get_backend"]

#: name -> "module:class"
BACKENDS = {
    "reference": "treeconv.backends.reference:ReferenceBackend",
    "eager": "treeconv.backends.eager:EagerBackend",
    "triton": "treeconv.backends.triton:TritonBackend",
    "sgl": "treeconv.backends.sgl:SglBackend",
    "sgl-raw": "treeconv.backends.sgl:raw_sgl_backend",
    "hf-chain": "treeconv.backends.hf:HfChain",
    "hf-filters": "treeconv.backends.hf:HfFilters",
}
#: judged only where asked for by name: their faults are known (fuzz/findings.py, fuzz/peer_findings.py)
BY_NAME_ONLY = frozenset({"sgl-raw", "hf-chain", "hf-filters"})
_loaded: dict[str, Backend] = {}


def get_backend(name: str | Backend) -> Backend:
    """A backend by its name, by ``module:callable``, or as it is.

    Args:
        name: one of :data:`BACKENDS`; or ``module:attribute`` naming a backend, a class or factory of
            one (called without arguments), or a function as :class:`FunctionBackend` takes it.

    Raises:
        BackendUnavailable: an unknown name, or a module that cannot be imported here; the message says why.
    """
    if not isinstance(name, str):
        if isinstance(name, Backend):
            return name
        raise BackendUnavailable(
            f"backend={name!r}, but must be a name or an object with verify and verify_probs"
        )
    if name in _loaded:
        return _loaded[name]
    target = BACKENDS.get(name, name)
    module_name, _, attribute = target.partition(":")
    if not attribute or module_name.endswith(".py"):
        module = module_name.removesuffix(".py").replace("/", ".")
        raise BackendUnavailable(
            f"backend={name!r}, but must be one of {', '.join(BACKENDS)}, or module:callable for your own"
            f" (did you mean {module}:{attribute or 'verify'}?)"
        )
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except AttributeError as error:
        if getattr(error, "name", None) != attribute:
            raise BackendUnavailable(f"backend={name!r} cannot be imported here: {error}") from error
        raise BackendUnavailable(f"backend={name!r}: module {module_name} has no {attribute}") from None
    except Exception as error:  # a stranger's module may raise anything while it is imported
        raise BackendUnavailable(f"backend={name!r} cannot be imported here: {error}") from error
    made = "is"
    if isinstance(found, type) or (not isinstance(found, Backend) and _is_factory(found)):
        made, found = "takes no arguments, so it was called, and returned", found()
    if not isinstance(found, Backend) and not callable(found):
        _explain_what_is_missing(name, found)
        raise BackendUnavailable(
            f"backend={name!r} {made} a {type(found).__name__}, but must be a backend, what makes one, or a"
            " function of (batch, target_probs, coins, depth_cap) or (batch, logits, temperature, coins,"
            " depth_cap)"
        )
    if isinstance(found, Backend):
        check_calls(found, name)
    _loaded[name] = found if isinstance(found, Backend) else FunctionBackend(found, name)
    return _loaded[name]


def _explain_what_is_missing(name: str, found: object) -> None:
    has = [part for part in ("verify", "verify_probs") if hasattr(found, part)]
    lacks = [part for part in ("name", "traits", "verify", "verify_probs") if not hasattr(found, part)]
    if has:
        raise BackendUnavailable(
            f"backend={name!r} has {' and '.join(has)}, but no {' and no '.join(lacks)}: a backend has a"
            " name, traits (treeconv.backends.base.BackendTraits), verify and verify_probs"
        )


def _is_factory(found: object) -> bool:
    code = getattr(found, "__code__", None)
    return code is not None and code.co_argcount == 0 and code.co_kwonlyargcount == 0


def available_backends() -> dict[str, str | None]:
    """Every backend's name -> None where it can be used here, else the reason why not."""
    reasons: dict[str, str | None] = {}
    for name in BACKENDS:
        try:
            get_backend(name)
            reasons[name] = None
        except BackendUnavailable as error:
            reasons[name] = str(error)
    return reasons


def choose_backend(
    device: torch.device,
    *,
    takes_filters: bool = False,
    takes_processors: Collection[str] = (),
    rule: RuleName = "target_only",
    takes_thresholds: bool = False,
) -> Backend:
    """What ``backend="auto"`` means: ``triton`` on a CUDA device where it can be imported, else ``eager``.

    Args:
        device: where the batch is.

        takes_filters: whether a filter is on: a backend that takes none is passed over.

        takes_processors: the processors that are on, likewise.

        rule: likewise, a backend that does not claim it.

        takes_thresholds: likewise, whether an acceptance threshold is below 1.
    """
    if device.type == "cuda":
        try:
            triton = get_backend("triton")
        except BackendUnavailable:
            return get_backend("eager")
        traits = triton.traits
        lacks = (takes_filters and not traits.takes_filters) or (
            takes_thresholds and not traits.takes_thresholds
        )
        if rule in traits.rules and set(takes_processors) <= set(traits.takes_processors) and not lacks:
            return triton
    return get_backend("eager")
