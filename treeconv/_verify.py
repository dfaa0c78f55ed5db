"""The front door: check the arguments once, pick a backend, verify."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treeconv import _validate, _validate_processors, _validate_rules
from treeconv.backends.base import as_taken, handed_over
from treeconv.backends.registry import choose_backend, get_backend
from treeconv.errors import BackendUnavailable, InvalidArgument
from treeconv.sampling import draw_coins
from treeconv.tree import Coins, VerifyInput, VerifyOutput

if TYPE_CHECKING:
    import torch

    from treeconv.backends.base import Backend
    from treeconv.filters import FilterOrder, Filters
    from treeconv.processors import Processors
    from treeconv.rules import Drafting, Rule, RuleName

__all__ = ["choose_coins", "verify", "verify_probs"]

_LOGITS = ("float32", "float16", "bfloat16")


def choose_coins(
    backend: Backend,
    batch: VerifyInput,
    coins: Coins | None = None,
    generator: torch.Generator | None = None,
    seeds: Any = None,
) -> Any:
    """What the backend's parameter ``coins`` gets: coins as given or drawn, or what it draws its own from."""
    import torch  # noqa: PLC0415

    if not isinstance(generator, (torch.Generator, type(None))):
        raise InvalidArgument(f"generator={generator!r}, but must be a torch.Generator or None")
    given = {"coins": coins, "generator": generator, "seeds": seeds}
    named = [name for name, value in given.items() if value is not None]
    if len(named) > 1:
        raise InvalidArgument(f"{' and '.join(named)} were both given, but only one can decide the coins")
    kind = backend.traits.coins
    if kind in ("seeds", "generator"):  # it draws its own
        if kind == "generator" and not named:
            is_cuda = batch.device.type == "cuda"
            return torch.cuda.default_generators[batch.device.index] if is_cuda else torch.default_generator
        if named != [kind]:
            what = named[0] if named else "nothing"
            raise InvalidArgument(
                f"{what} was given, but backend {backend.name!r} draws its coins from {kind}"
            )
        return generator if kind == "generator" else _validate.check_seeds(seeds, batch)
    if coins is not None:
        return _validate.check_coins(coins, batch)
    if seeds is not None:
        return draw_coins(_validate.check_seeds(seeds, batch), batch.prefix_lens, batch.num_draft_tokens)
    shape = tuple(batch.candidates.shape)
    draws = torch.rand(shape[0], shape[1] + 1, generator=generator, device=batch.device)
    return Coins(accept=draws[:, 1:].contiguous(), final=draws[:, 0].contiguous())


def _backend(
    backend: str | Backend,
    device: torch.device,
    filters: Filters | None,
    rule: Rule | None,
    processors: Processors | None = None,
) -> Backend:
    if isinstance(backend, str) and backend == "auto":
        name = "target_only" if rule is None else rule.name
        is_lossy = rule is not None and rule.is_lossy
        kinds = processors.kinds if processors else ()
        chosen = choose_backend(
            device,
            takes_filters=filters is not None,
            takes_processors=kinds,
            rule=name,
            takes_thresholds=is_lossy,
        )
    else:
        chosen = get_backend(backend)
    if device.type not in chosen.traits.devices:
        raise BackendUnavailable(
            f"backend={chosen.name!r} runs on {', '.join(chosen.traits.devices)}, but the batch is on"
            f" {device}"
        )
    return chosen


def verify(
    batch: VerifyInput,
    logits: Any,
    temperature: Any = 1.0,
    coins: Coins | None = None,
    generator: torch.Generator | None = None,
    backend: str | Backend = "auto",
    depth_cap: int | None = None,
    *,
    seeds: Any = None,
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
    rule: RuleName = "target_only",
    draft_probs: Any = None,
    drafting: Drafting = "fixed",
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
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
            A CUDA tensor is not read back: a request out of range has the status ``BAD_SETTINGS`` and emits
            nothing (``eager``, which waits for the device anyway, raises). So it is with filters.

        coins: ``Coins(accept=[B, N], final=[B])`` float32 in [0, 1). Default: fresh ones.

        generator: draws the coins where neither they nor seeds are given; the default generator if None.

        backend: a registered name ("reference", "eager", "triton", "sgl"), "module:callable", a backend
            object, or "auto": ``triton`` on CUDA, else ``eager`` (there too, where ``triton`` lacks
            something: penalties, rules other than "target_only", thresholds).

        depth_cap: accept slots, root included: at most ``depth_cap - 1`` drafts are accepted. Default:
            deepest tree + 1, which on a CUDA device is read back (pass it to stay asynchronous).

        seeds: one integer in [0, 2**64) per request, or an int64 tensor: its coins are then fixed by its seed
            and ``batch.prefix_lens`` alone (:func:`draw_coins`), on every rank and wherever it is in a batch.

        top_k: keep the k likeliest tokens, among equals the lowest ids: an integer >= 1, None (off), or one
            of them per request. Drafts are tested against the filtered law, and the bonus comes from it.

        top_p: keep the smallest set of likeliest tokens whose mass reaches p, the one that crosses it
            included: a number in (0, 1], or one per request; None and 1 are off.

        min_p: keep tokens of at least min_p times the largest mass: in [0, 1], or one per request; None and 0
            are off.

        filter_order: "sequential": top-p measures the law renormalised after top-k (HF, vLLM, SGLang's
            verifier); "joint": the law after temperature (SGLang's plain sampler).

        logit_bias: ``[B, V]`` float32, added to a request's visited rows after the penalties; -inf forbids.

        token_bitmask: ``[B, N, ceil(V / 32)]`` int32 (xgrammar's layout): bit ``t % 32`` of word ``t // 32``
            is set where token ``t`` may follow node ``i``. See :func:`treeconv.grammar.fill_token_bitmask`.
            Bias and bitmask: ``reference``, ``eager`` and ``triton``; penalties: the first two.

        repetition_penalty: > 0, or one per request; None and 1 are off. Applied to tokens seen before, as
            :mod:`treeconv.processors` defines, in float32 and before everything else.

        frequency_penalty: finite, or one per request; None and 0 are off. What a node has seen is what is
            in ``committed_tokens``, and the path from the root to it: each occurrence once.

        presence_penalty: likewise.

        committed_tokens: the ids that penalties are about *before* each root, whose own token is counted
            from the tree: a list of ids per request, or ``[B, L]`` int64 with -1 in padding. Default: none.

        rule: "target_only"; "draw_and_match" (draw from each visited node's law, follow it where drafted; the
            node's own coin draws, the final one is unused); or, for drafts *sampled* from ``draft_probs``,
            "chain" (one child a node, accepted iff ``coin * q < p``, coin of the parent) or "recursive"
            (siblings sampled without replacement, each tested with its own slot's coin). See
            :mod:`treeconv.rules`.

        draft_probs: ``[B, N, V]`` float32: row ``[b, i]`` is the law that the children of node i were sampled
            from, after whatever filters the drafter had. For "chain" and "recursive", else None. A q that is
            negative or not finite counts as no mass. A draft that its law has at 0 was not sampled from it,
            and is refused (on the CPU; where the law holds nothing that is no mass).

        drafting: "fixed": the children are a fixed set, as DDTree's or EAGLE's top-k; "sampled": they were
            drawn from ``draft_probs``. "chain" and "recursive" are biased on a fixed set, and refused.

        threshold_single: below 1 **lossy**: a child of p >= it is accepted whatever the coin (SGLang's
            ``speculative_accept_threshold_single``). "target_only" alone.

        threshold_acc: below 1 **lossy**: a child is accepted iff ``coin * threshold_acc < acc``. The output
            then no longer has the target's law, and no law of this package judges it.

    Returns:
        A :class:`VerifyOutput`. A request that *visits* a row of NaN, +inf or only -inf emits nothing and
        says so in ``status``; the others do not notice. What counts is the row after the processors: one
        whose tokens are all forbidden is EMPTY.

    Raises:
        InvalidArgument: a shape, dtype, device or value that breaks the rules above, or a rule with drafts
            that it is biased on; the message names it.
        InvalidTree: pointers that are no tree (checked on the CPU).
        BackendUnavailable: an unknown backend, one that cannot run here, or one that lacks the
            filters, the processors or the rule.
    """
    _validate.check_tensors(batch)
    rows = _validate.check_rows(logits, "logits", batch, _LOGITS)
    _validate.check_trees(batch, rows.shape[2])
    temperatures = _validate.check_temperature(temperature, batch)
    filters = _validate.check_filters(top_k, top_p, min_p, filter_order, batch, rows.shape[2])
    how = _validate_rules.check_rule(
        rule, draft_probs, drafting, threshold_single, threshold_acc, batch, rows.shape[2]
    )
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
    chosen = _backend(backend, batch.device, filters, how, processors)
    if not chosen.traits.takes_logits:
        raise BackendUnavailable(f"backend={chosen.name!r} takes probabilities only: use verify_probs")
    if str(rows.dtype).removeprefix("torch.") not in chosen.traits.rows_dtypes:
        takes = " and ".join(chosen.traits.rows_dtypes)
        raise BackendUnavailable(f"backend={chosen.name!r} takes logits of {takes}, not of {rows.dtype}")
    more = handed_over(chosen, filters, how, processors)
    batch, rows, more = as_taken(chosen, batch, rows, more)
    cap = _validate.check_depth_cap(depth_cap, batch)
    return chosen.verify(
        batch, rows, temperatures, choose_coins(chosen, batch, coins, generator, seeds), cap, **more
    )


def verify_probs(
    batch: VerifyInput,
    target_probs: Any,
    coins: Coins | None = None,
    generator: torch.Generator | None = None,
    backend: str | Backend = "auto",
    depth_cap: int | None = None,
    *,
    seeds: Any = None,
    top_k: Any = None,
    top_p: Any = None,
    min_p: Any = None,
    filter_order: FilterOrder = "sequential",
    rule: RuleName = "target_only",
    draft_probs: Any = None,
    drafting: Drafting = "fixed",
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
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

        seeds: as for :func:`verify`.

        top_k: as for :func:`verify`. A request with a filter on is compared with its renormalised law, one
            without with the row as it is.

        top_p: as for :func:`verify`.

        min_p: as for :func:`verify`.

        filter_order: as for :func:`verify`.

        rule: as for :func:`verify`.

        draft_probs: as for :func:`verify`.

        drafting: as for :func:`verify`.

        threshold_single: as for :func:`verify`.

        threshold_acc: as for :func:`verify`.

    Returns, Raises: as for :func:`verify`.
    """
    _validate.check_tensors(batch)
    rows = _validate.check_rows(target_probs, "target_probs", batch, ("float32",))
    _validate.check_trees(batch, rows.shape[2])
    filters = _validate.check_filters(top_k, top_p, min_p, filter_order, batch, rows.shape[2])
    how = _validate_rules.check_rule(
        rule, draft_probs, drafting, threshold_single, threshold_acc, batch, rows.shape[2]
    )
    chosen = _backend(backend, batch.device, filters, how)
    if not chosen.traits.takes_probs:
        raise BackendUnavailable(f"backend={chosen.name!r} takes logits only: use verify")
    more = handed_over(chosen, filters, how)
    batch, rows, more = as_taken(chosen, batch, rows, more)
    cap = _validate.check_depth_cap(depth_cap, batch)
    return chosen.verify_probs(batch, rows, choose_coins(chosen, batch, coins, generator, seeds), cap, **more)
