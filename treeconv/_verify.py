"""The front door: check the arguments once, pick a backend, verify."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treeconv import _validate, _validate_processors
from treeconv.backends.registry import choose_backend, get_backend
from treeconv.errors import BackendUnavailable, InvalidArgument
from treeconv.tree import Coins, VerifyInput, VerifyOutput

if TYPE_CHECKING:
    import torch

    from treeconv.backends.base import Backend
    from treeconv.filters import FilterOrder, Filters
    from treeconv.processors import Processors

__all__ = ["verify", "verify_probs"]

_LOGITS = ("float32", "float16", "bfloat16")


def _coins(coins: Coins | None, generator: torch.Generator | None, batch: VerifyInput) -> Coins:
    import torch  # noqa: PLC0415

    if coins is not None:
        if generator is not None:
            raise InvalidArgument("coins and generator were both given, but only one can decide the coins")
        return _validate.check_coins(coins, batch)
    shape = tuple(batch.candidates.shape)
    draws = torch.rand(shape[0], shape[1] + 1, generator=generator, device=batch.device)
    return Coins(accept=draws[:, 1:].contiguous(), final=draws[:, 0].contiguous())


def _backend(
    backend: str | Backend,
    device: torch.device,
    filters: Filters | None,
    processors: Processors | None = None,
) -> Backend:
    if isinstance(backend, str) and backend == "auto":
        kinds = processors.kinds if processors else ()
        chosen = choose_backend(device, takes_filters=filters is not None, takes_processors=kinds)
    else:
        chosen = get_backend(backend)
    if device.type not in chosen.traits.devices:
        raise BackendUnavailable(
            f"backend={chosen.name!r} runs on {', '.join(chosen.traits.devices)}, but the batch is on"
            f" {device}"
        )
    return chosen


def _filters(filters: Filters | None, backend: Backend) -> dict[str, Any]:
    """What a backend is handed besides: nothing where no filter is on, so that it need not know of them."""
    if filters is None:
        return {}
    if not backend.traits.takes_filters:
        raise BackendUnavailable(
            f"backend={backend.name!r} takes no filters: it has no top-k, top-p or min-p"
        )
    return {"filters": filters}


def _processors(processors: Processors | None, backend: Backend) -> dict[str, Any]:
    """Likewise."""
    if processors is None:
        return {}
    missing = processors.kinds - set(backend.traits.takes_processors)
    if missing:
        raise BackendUnavailable(
            f"backend={backend.name!r} takes no {' or '.join(sorted(missing))}: among the processors it takes"
            f" {', '.join(backend.traits.takes_processors) or 'none'}"
        )
    return {"processors": processors}


def verify(
    batch: VerifyInput,
    logits: Any,
    temperature: Any = 1.0,
    coins: Coins | None = None,
    generator: torch.Generator | None = None,
    backend: str | Backend = "auto",
    depth_cap: int | None = None,
    *,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    filter_order: FilterOrder = "sequential",
    logit_bias: Any = None,
    token_bitmask: Any = None,
    repetition_penalty: Any = None,
    frequency_penalty: Any = None,
    presence_penalty: Any = None,
    committed_tokens: Any = None,
) -> VerifyOutput:
    """Verify a batch of draft trees against the target's logits, losslessly at every temperature.

    Target-only tree speculative sampling: right for trees whose children are a fixed set (DDTree, EAGLE's
    top-k), where it accepts as often as any exact rule can. Only visited rows are looked at.

    Args:
        batch: the converted trees, ``[B, N]``.

        logits: ``[B, N, V]`` float32, float16 or bfloat16 on the batch's device: row ``[b, i]`` is the
            target's prediction of the token *after* node ``i``. -inf is no mass.

        temperature: a scalar, or ``[B]``, one per request; finite, >= 0. 0 is greedy (the lowest-index
            argmax, exactly; coins do not matter); any T > 0 is sampled, as ``(x - max) / T``, never clamped.

        coins: ``Coins(accept=[B, N], final=[B])`` float32 in [0, 1). Default: fresh ones.

        generator: draws the coins where none are given; the default generator if None.

        backend: a registered name ("reference", "eager", "triton", "sgl"), "module:callable", a backend
            object, or "auto": ``triton`` on CUDA, else ``eager`` (there too, where a filter is on and
            ``triton`` takes none).

        depth_cap: accept slots, root included: at most ``depth_cap - 1`` drafts are accepted. Default:
            deepest tree + 1, which on a CUDA device is read back (pass it to stay asynchronous).

        top_k: keep the k likeliest tokens, among equals the lowest ids: an integer >= 1, None (off), or one
            of them per request. Drafts are tested against the filtered law, and the bonus comes from it.

        top_p: keep the smallest set of likeliest tokens whose mass reaches p, the one that crosses it
            included: a number in (0, 1], or one per request; None and 1 are off.

        min_p: keep tokens of at least min_p times the largest mass: in [0, 1], or one per request; None and 0
            are off.

        filter_order: "sequential": top-p measures the law renormalised after top-k (HF, vLLM, SGLang's
            verifier); "joint": the law after temperature (SGLang's plain sampler).

        logit_bias: ``[B, V]`` float32, added to each request's visited rows after the penalties; -inf forbids.

        token_bitmask: ``[B, N, ceil(V / 32)]`` int32 (xgrammar's layout): bit ``t % 32`` of word ``t // 32``
            is set where token ``t`` may follow node ``i``. See :func:`treeconv.grammar.fill_token_bitmask`.

        repetition_penalty: > 0, or one per request; None and 1 are off. Applied to tokens seen before, as
            :mod:`treeconv.processors` defines, in float32 and before everything else.

        frequency_penalty: finite, or one per request; None and 0 are off. What a node has seen is what is
            in ``committed_tokens``, and the path from the root to it: each occurrence once.

        presence_penalty: likewise.

        committed_tokens: the ids *before* each root (its own token is counted from the tree), that penalties
            are about: a list of ids per request, or ``[B, L]`` int64 with -1 in padding. Default: none.

    Returns:
        A :class:`VerifyOutput`. A request that *visits* a row of NaN, +inf or only -inf emits nothing and
        says so in ``status``; the others do not notice. What counts is the row after the processors: one
        whose tokens are all forbidden is EMPTY.

    Raises:
        InvalidArgument: a shape, dtype, device or value that breaks the rules above; the message names it.
        InvalidTree: pointers that are no tree (checked on the CPU).
        BackendUnavailable: an unknown backend, one that cannot run here, or one that takes no filters, or
            not these processors.
    """
    _validate.check_verify_input(batch)
    rows = _validate.check_rows(logits, "logits", batch, _LOGITS)
    _validate.check_tokens(batch, rows.shape[2])
    temperatures = _validate.check_temperature(temperature, batch)
    filters = _validate.check_filters(top_k, top_p, min_p, filter_order, batch, rows.shape[2])
    processors = _validate_processors.check_processors(
        batch,
        rows.shape[2],
        logit_bias,
        token_bitmask,
        {
            "repetition_penalty": repetition_penalty,
            "frequency_penalty": frequency_penalty,
            "presence_penalty": presence_penalty,
        },
        committed_tokens,
    )
    chosen = _backend(backend, batch.device, filters, processors)
    if not chosen.traits.takes_logits:
        raise BackendUnavailable(f"backend={chosen.name!r} takes probabilities only: use verify_probs")
    more = _filters(filters, chosen) | _processors(processors, chosen)
    cap = _validate.check_depth_cap(depth_cap, batch)
    return chosen.verify(batch, rows, temperatures, _coins(coins, generator, batch), cap, **more)


def verify_probs(
    batch: VerifyInput,
    target_probs: Any,
    coins: Coins | None = None,
    generator: torch.Generator | None = None,
    backend: str | Backend = "auto",
    depth_cap: int | None = None,
    *,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    filter_order: FilterOrder = "sequential",
) -> VerifyOutput:
    """Verify against the target's probabilities: :func:`verify` with the softmax already taken.

    This is ``sgl_kernel.tree_speculative_sampling_target_only``'s interface at thresholds 1. Coins are
    compared with the plain running sums of ``target_probs``, so laws of dyadic masses are decided exactly.

    Args:
        batch: the converted trees, ``[B, N]``.

        target_probs: ``[B, N, V]`` float32 on the batch's device, >= 0: after processors and temperature, and
            after filters unless they are given here. Never written to.

        coins: as for :func:`verify`.

        generator: as for :func:`verify`.

        backend: as for :func:`verify`.

        depth_cap: as for :func:`verify`.

        top_k: as for :func:`verify`. A request with a filter on is compared with its renormalised law, one
            without with the row as it is.

        top_p: as for :func:`verify`.

        min_p: as for :func:`verify`.

        filter_order: as for :func:`verify`.

    Returns, Raises: as for :func:`verify`.
    """
    _validate.check_verify_input(batch)
    rows = _validate.check_rows(target_probs, "target_probs", batch, ("float32",))
    _validate.check_tokens(batch, rows.shape[2])
    filters = _validate.check_filters(top_k, top_p, min_p, filter_order, batch, rows.shape[2])
    chosen = _backend(backend, batch.device, filters)
    if not chosen.traits.takes_probs:
        raise BackendUnavailable(f"backend={chosen.name!r} takes logits only: use verify")
    more = _filters(filters, chosen)
    cap = _validate.check_depth_cap(depth_cap, batch)
    return chosen.verify_probs(batch, rows, _coins(coins, generator, batch), cap, **more)
