"""SGLang's own verification kernels behind the backend interface: the one file that knows their spellings.

``tree_speculative_sampling_target_only``, ``verify_tree_greedy`` and ``build_tree_kernel_efficient`` come
from the ``sglang-kernel`` wheel (module ``sgl_kernel``) up to 0.4.7, and from ``sglang`` itself after that;
``ci/fetch_sgl_kernel.sh`` gets the wheel.

:class:`SglBackend` guards them. What the kernel does not check is refused; what it decides wrongly at the
edge of a bucket is kept from it by moving the coin it is handed, never a probability.
``SglBackend(raw=True)`` hands everything over as SGLang does: that is what the laws judge, and
``fuzz/findings.py`` lists what they found.
"""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from treeconv._validate import (
    check_coins,
    check_int,
    check_rows,
    check_temperature,
    check_tensors,
    check_trees,
)
from treeconv.backends.base import BackendTraits
from treeconv.errors import BackendUnavailable, InvalidArgument
from treeconv.tree import Coins, RowStatus, TreeMaskMode, VerifyInput, VerifyOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from treeconv.convert import EagleDraft

__all__ = ["SglBackend", "SglKernels", "load_sgl_kernels", "raw_sgl_backend", "top_p_renormalised"]

#: Where each operator has lived, newest wheel first.
_HOMES = {
    "tree_speculative_sampling_target_only": (
        "sgl_kernel",
        "sgl_kernel.speculative",
        "sglang.kernels.ops.speculative.sampling",
    ),
    "verify_tree_greedy": ("sgl_kernel", "sgl_kernel.speculative", "sglang.kernels.ops.speculative.tree"),
    "build_tree_kernel_efficient": (
        "sgl_kernel",
        "sgl_kernel.speculative",
        "sglang.kernels.ops.speculative.tree",
    ),
}
_WRAPS_AT = 2**32  # the kernel keeps element offsets in 32 unsigned bits
_LEAST_NORMAL = 2.0**-126  # below it a kernel built with fast math sees zero
_GREEDY_BELOW = 1e-6  # SGLang serves smaller temperatures as top_k = 1
_ULP = 2.0**-24


def _spell(name: str, known: frozenset[str] | set[str]) -> str:
    """``name`` as a function spells it: SGLang wrote ``retrive`` for years."""
    old = name.replace("retrieve", "retrive")
    return old if old in known else name


def _by_keyword(function: Callable[..., Any], arguments: Mapping[str, Any]) -> Any:
    """Call with the function's own spelling of each name; options it does not have are an error."""
    parameters = set(inspect.signature(function).parameters)
    spelled = {_spell(name, parameters): value for name, value in arguments.items()}
    unknown = set(spelled) - parameters
    if unknown:
        raise BackendUnavailable(
            f"{function.__name__} takes ({', '.join(sorted(parameters))}), but must take"
            f" {', '.join(sorted(unknown))}: this version of SGLang is not known here"
        )
    return function(**spelled)


@dataclass(frozen=True)
class SglKernels:
    """SGLang's operators under one spelling.

    Args:
        version: of the package that holds the sampler.

        functions: operator name -> function; only those that were found.
    """

    version: str
    functions: Mapping[str, Callable[..., Any]]

    def call(self, operator: str, **arguments: Any) -> None:
        """Call an operator by its keywords, spelled ``retrieve_*``; outputs are written in place.

        Raises:
            BackendUnavailable: this version has no such operator, or another signature.
        """
        if operator not in self.functions:
            raise BackendUnavailable(
                f"{operator} is not in this version of SGLang ({self.version}), but must be"
            )
        _by_keyword(self.functions[operator], arguments)


def top_p_renormalised(probs: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """SGLang's top-p step: every row ``[B, N, V]`` cut at its request's ``top_p [B]`` and renormalised.

    Raises:
        BackendUnavailable: no ``sgl_kernel`` here, or one without this operator.
    """
    try:
        renormalise = importlib.import_module("sgl_kernel.sampling").top_p_renorm_prob
    except (ImportError, AttributeError, OSError) as error:
        raise BackendUnavailable(f"sgl_kernel has no top-p step here: {error}") from error
    B, N, V = probs.shape
    rows: torch.Tensor = renormalise(probs.view(B * N, V), top_p.repeat_interleave(N))
    return rows.view(B, N, V)


def load_sgl_kernels() -> SglKernels:
    """Find SGLang's operators in whatever version is installed.

    Raises:
        BackendUnavailable: no module holds the sampler; the message says where it was looked for.
    """
    functions: dict[str, Callable[..., Any]] = {}
    reasons: list[str] = []
    version = "unknown"
    for operator, homes in _HOMES.items():
        for home in homes:
            try:
                module = importlib.import_module(home)
                functions[operator] = getattr(module, operator)
            except (ImportError, AttributeError, OSError, RuntimeError) as error:
                reasons.append(
                    f"{home}: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}"
                )
                continue
            if operator == "tree_speculative_sampling_target_only":
                package = importlib.import_module(home.partition(".")[0])
                version = f"{package.__name__} {getattr(package, '__version__', 'unknown')}"
            break
    if "tree_speculative_sampling_target_only" not in functions:
        missing = all(": No module named" in reason for reason in reasons)
        seen = "" if missing else ": " + "; ".join(dict.fromkeys(reasons))
        raise BackendUnavailable(f"sgl_kernel is not installed (ci/fetch_sgl_kernel.sh gets it){seen}")
    return SglKernels(version, functions)


class SglBackend:
    """The deployed verifier: softmax of every row in float32, a scratch tensor as large, then the kernel.

    Args:
        raw: hand everything over as it is. Duplicate siblings, sizes past 2**32 and unusable rows go
            unnoticed, coins are not moved, and the scratch (``draft_probs``) keeps what earlier calls left
            in it, as where a serving engine allocates it once.

        kernels: SGLang's operators; default: what is installed.

    The guarded form adds:

    * Before the call: ``B*N*V >= 2**32`` is refused (offsets wrap, silently), and so are shapes and dtypes
      that do not fit, trees that are no trees or repeat a token among siblings, tokens outside the
      vocabulary, and flat indices other than ``b * N + i`` (the kernel reads and writes wherever they
      lead). Trees are read back for it, except while a CUDA graph is captured.
    * Inside the call, and so inside a captured region: the scratch is cleared.
    * Coins: the kernel accepts a child where ``coin <= acc``, so coin 0 accepts a child of no mass. It is
      handed the next float32 above each coin, which makes that test ``coin < acc`` exactly. At a node
      whose children cover the whole support the coin is held below their float32 sum: nothing is left to
      draw there, and the kernel would emit token V - 1.
    * After it: ``predicts`` is -1 where nothing was emitted, and a request that visited a row of NaN, +inf
      or no mass says so in ``status`` and emits nothing.

    Raises:
        BackendUnavailable: SGLang's kernels cannot be imported here.
    """

    def __init__(self, *, raw: bool = False, kernels: SglKernels | None = None) -> None:
        self.kernels = load_sgl_kernels() if kernels is None else kernels
        self.raw = raw
        self.name = "sgl-raw" if raw else "sgl"
        self._scratch: torch.Tensor | None = None

    @cached_property
    def traits(self) -> BackendTraits:
        """Runs on CUDA and never waits for it, so that a graph can hold it; raw reports no status."""
        return BackendTraits(reports_status=not self.raw, graph_safe=True, devices=("cuda",))

    def fresh(self) -> SglBackend:
        """The same backend with scratch that nothing was left in."""
        return SglBackend(raw=self.raw, kernels=self.kernels)

    def verify(
        self,
        batch: VerifyInput,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        coins: Coins,
        depth_cap: int,
    ) -> VerifyOutput:
        """Softmax of all rows, then the kernel. T = 0 is a one-hot row at the lowest-index argmax.

        Raw divides the logits by the temperature as SGLang does (a tiny one overflows) and serves T < 1e-6
        as greedy; the guarded form subtracts the row's maximum first, and only T = 0 is greedy.

        Raises:
            InvalidArgument, InvalidTree: see the class.
        """
        status = None
        if not self.raw:
            self._check(batch, "logits", logits, depth_cap)
            _check_offsets(logits)
            temperature, coins = check_temperature(temperature, batch), check_coins(coins, batch)
            usable = (temperature >= 0) & (temperature < torch.inf)  # on a device nobody has looked
            temperature = torch.where(usable, temperature, 1.0)
            status = _row_status(logits.amax(dim=2), torch.finfo(logits.dtype).min)
            status = torch.where(usable[:, None], status, int(RowStatus.BAD_SETTINGS))
        return self._run(batch, self._probs(logits, temperature), coins, depth_cap, status)

    def verify_probs(
        self, batch: VerifyInput, target_probs: torch.Tensor, coins: Coins, depth_cap: int
    ) -> VerifyOutput:
        """The kernel on probabilities as they are.

        Raises:
            InvalidArgument, InvalidTree: see the class.
        """
        status = None
        if not self.raw:
            self._check(batch, "target_probs", target_probs, depth_cap, ("float32",))
            _check_offsets(target_probs)
            coins = check_coins(coins, batch)
            status = _row_status(target_probs.amax(dim=2), 0.0)
            status = torch.where(target_probs.amin(dim=2) < 0, int(RowStatus.NAN), status)
        return self._run(batch, target_probs.contiguous(), coins, depth_cap, status)

    def verify_greedy(self, batch: VerifyInput, logits: torch.Tensor, depth_cap: int) -> VerifyOutput:
        """``verify_tree_greedy`` on the argmax of every row: what SGLang runs for an all-greedy batch.

        Raises:
            InvalidArgument, InvalidTree: see the class.
            BackendUnavailable: this version of SGLang has no such operator.
        """
        if not self.raw:
            self._check(batch, "logits", logits, depth_cap)
        output = self._empty_output(batch, depth_cap)
        self.kernels.call(
            "verify_tree_greedy",
            **self._tensors(batch, output),
            target_predict=logits.argmax(dim=2),
        )
        return output

    def build_tree(
        self, draft: EagleDraft, prefix_lens: torch.Tensor, prefix_sum: int, mode: TreeMaskMode
    ) -> tuple[VerifyInput, torch.Tensor]:
        """``build_tree_kernel_efficient``: EAGLE's draft tensors to layout and mask, on the device.

        Args:
            draft: trees of one size.

            prefix_lens: ``[B]`` int64 on the device, committed tokens before each root.

            prefix_sum: their sum.

            mode: FULL_MASK or QLEN_ONLY, or QLEN_ONLY_BITPACKING up to 32 nodes.

        Returns:
            The converted batch, and the mask in SGLang's own (flat) shape.

        Raises:
            InvalidArgument: a bit-packed mask of more than 32 nodes, which SGLang has no type for.
            BackendUnavailable: this version of SGLang has no such operator.
        """
        device = prefix_lens.device
        B, N = draft.draft_tokens.shape[0], draft.draft_tokens.shape[1] + 1
        if mode == TreeMaskMode.QLEN_ONLY_BITPACKING and N > 32:
            raise InvalidArgument(f"N={N}, but must be <= 32 for SGLang's QLEN_ONLY_BITPACKING")
        if mode == TreeMaskMode.FULL_MASK:
            mask = torch.ones(N * (prefix_sum + B * N), dtype=torch.bool, device=device)
        elif mode == TreeMaskMode.QLEN_ONLY:
            mask = torch.ones(B * N * N, dtype=torch.bool, device=device)
        else:
            packed = torch.uint8 if N <= 8 else torch.uint16 if N <= 16 else torch.uint32
            mask = torch.zeros(B * N, dtype=packed, device=device)
        index, child, sibling = torch.full((3, B, N), -1, dtype=torch.int64, device=device)
        positions = torch.empty(B * N, dtype=torch.int64, device=device)
        parent_list = draft.parent_list.to(device)
        self.kernels.call(
            "build_tree_kernel_efficient",
            parent_list=parent_list,
            selected_index=draft.top_scores_index.to(device),
            verified_seq_len=prefix_lens,
            tree_mask=mask,
            positions=positions,
            retrieve_index=index,
            retrieve_next_token=child,
            retrieve_next_sibling=sibling,
            topk=draft.topk,
            depth=(parent_list.shape[1] - 1) // draft.topk + 1,
            draft_token_num=N,
            tree_mask_mode=int(mode),
        )
        candidates = torch.cat([draft.root_token_ids[:, None], draft.draft_tokens], dim=1).to(device)
        return VerifyInput(candidates, index, child, sibling, positions.view(B, N), prefix_lens), mask

    def _check(
        self,
        batch: VerifyInput,
        name: str,
        rows: torch.Tensor,
        depth_cap: int,
        dtypes: tuple[str, ...] | None = None,
    ) -> None:
        """What :func:`treeconv.verify` checks on the CPU, here wherever the batch lies."""
        check_tensors(batch)
        check_rows(rows, name, batch, dtypes or self.traits.rows_dtypes)
        check_int(depth_cap, "depth_cap", 1)
        if batch.device.type != "cuda":
            check_trees(batch, rows.shape[2])
        elif not torch.cuda.is_current_stream_capturing():
            check_trees(batch.to("cpu"), rows.shape[2])

    def _probs(self, logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
        """``[B, N, V]`` float32."""
        values = logits.float()  # a copy, unless the logits are float32 already
        if not self.raw:
            values = values - values.amax(dim=2, keepdim=True)
        greedy = temperature < _GREEDY_BELOW if self.raw else temperature == 0
        divisor = torch.where(greedy, 1.0, temperature)[:, None, None]
        probs = (values / divisor).softmax(dim=2)
        top = logits.argmax(dim=2, keepdim=True)  # among equals torch returns the first
        probs.masked_fill_(greedy[:, None, None], 0.0)
        at_top = torch.where(greedy[:, None, None], 1.0, probs.gather(2, top))
        return probs.scatter_(2, top, at_top)

    def _run(
        self,
        batch: VerifyInput,
        probs: torch.Tensor,
        coins: Coins,
        depth_cap: int,
        row_status: torch.Tensor | None,
    ) -> VerifyOutput:
        output = self._empty_output(batch, depth_cap)
        accept = coins.accept
        if self.raw:
            # Allocated once and handed to every call, as a captured serving loop does.
            if self._scratch is None or self._scratch.numel() < probs.numel():
                self._scratch = torch.zeros(probs.numel(), device=probs.device)
            scratch = self._scratch[: probs.numel()].view_as(probs)
        else:
            scratch = torch.zeros_like(probs)
            accept = _guarded_coins(batch, probs, accept)
        self.kernels.call(
            "tree_speculative_sampling_target_only",
            **self._tensors(batch, output),
            uniform_samples=accept.contiguous(),
            uniform_samples_for_final_sampling=coins.final.contiguous(),
            target_probs=probs,
            draft_probs=scratch,
            threshold_single=1.0,
            threshold_acc=1.0,
            deterministic=True,
        )
        return output if row_status is None else _with_status(output, row_status)

    @staticmethod
    def _tensors(batch: VerifyInput, output: VerifyOutput) -> dict[str, torch.Tensor]:
        return {
            "predicts": output.predicts,
            "accept_index": output.accept_index,
            "accept_token_num": output.accept_token_num,
            "candidates": batch.candidates.contiguous(),
            "retrieve_index": batch.retrieve_index.contiguous(),
            "retrieve_next_token": batch.retrieve_next_token.contiguous(),
            "retrieve_next_sibling": batch.retrieve_next_sibling.contiguous(),
        }

    @staticmethod
    def _empty_output(batch: VerifyInput, depth_cap: int) -> VerifyOutput:
        """-1 everywhere, as SGLang fills them: the kernel writes only what it emits."""
        B, N = batch.candidates.shape

        def filled(*shape: int, value: int = -1) -> torch.Tensor:
            return torch.full(shape, value, dtype=torch.int32, device=batch.device)

        return VerifyOutput(filled(B, depth_cap), filled(B, value=0), filled(B * N), filled(B, value=0))


def raw_sgl_backend() -> SglBackend:
    """The backend registered as ``sgl-raw``."""
    return SglBackend(raw=True)


def _check_offsets(rows: torch.Tensor) -> None:
    B, N, V = rows.shape
    if B * N * V >= _WRAPS_AT:
        raise InvalidArgument(
            f"B*N*V={B}*{N}*{V}={B * N * V}, but must be < {_WRAPS_AT} for SGLang's kernel: it keeps offsets"
            " in 32 bits, and requests past that read another request's rows"
        )


def _row_status(peaks: torch.Tensor, least: float) -> torch.Tensor:
    """``[B, N]`` int32 :class:`RowStatus` from each row's maximum, which hands NaN on.

    A row is empty where its maximum is below every finite logit (``least``), or is 0 for probabilities.
    """
    status = torch.zeros(peaks.shape, dtype=torch.int32, device=peaks.device)
    empty = peaks <= least if least == 0 else peaks < least
    status = torch.where(empty, int(RowStatus.EMPTY), status)
    status = torch.where(peaks == torch.inf, int(RowStatus.POS_INF), status)
    return torch.where(peaks.isnan(), int(RowStatus.NAN), status)


def _with_status(output: VerifyOutput, row_status: torch.Tensor) -> VerifyOutput:
    """Take back what a request emitted that visited an unusable row; its first such row decides."""
    B, N = row_status.shape
    visited = output.accept_index >= 0
    flat = torch.where(visited, output.accept_index, 0).long()
    on_path = torch.where(visited, row_status.view(-1)[flat], 0)
    first = (on_path != 0).int().argmax(dim=1, keepdim=True)
    status = on_path.gather(1, first)[:, 0].int()
    bad = status != 0
    return VerifyOutput(
        accept_index=output.accept_index.masked_fill(bad[:, None], -1),
        accept_token_num=output.accept_token_num.masked_fill(bad, 0),
        predicts=output.predicts.view(B, N).masked_fill(bad[:, None], -1).view(-1),
        status=status,
    )


def _parents(batch: VerifyInput) -> torch.Tensor:
    """``[B, N]`` parents from the pointers, -1 where nothing points; log2(N) steps, nothing read back."""
    first, sibling = batch.retrieve_next_token, batch.retrieve_next_sibling
    B, N = first.shape
    slots = torch.arange(N, device=first.device).expand(B, N)

    def pointed_from(pointer: torch.Tensor) -> torch.Tensor:
        spare = torch.full((B, N + 1), -1, dtype=torch.int64, device=first.device)  # unused -1s land behind
        # Padding's may hold anything, and a captured call's were not checked.
        return spare.scatter_(1, torch.where((pointer < 0) | (pointer >= N), N, pointer), slots)[:, :N]

    parent, elder = pointed_from(first), pointed_from(sibling)
    eldest = torch.where(elder >= 0, elder, slots)
    for _ in range(max(1, (N - 1).bit_length())):
        eldest = eldest.gather(1, eldest)
    return parent.gather(1, eldest)


def _guarded_coins(batch: VerifyInput, probs: torch.Tensor, accept: torch.Tensor) -> torch.Tensor:
    """The coins to hand over so that ``coin <= acc`` decides as ``coin < acc`` must; see the class.

    The float32 sum of n masses is above ``(1 - n * 2**-24)`` times the exact one, and every coin from there
    up belongs to the last child anyway, unless its mass is inside the rounding.
    """
    V = probs.shape[2]
    strict = torch.nextafter(accept, torch.full_like(accept, 2.0)).clamp(min=_LEAST_NORMAL, max=1.0)
    parents = _parents(batch)
    is_child = parents >= 0
    at = parents.clamp(min=0)
    tokens = batch.candidates.clamp(0, V - 1)
    # Gathered as [b, parent, token]: one mass per node, nothing of the size of the rows.
    flat = (torch.arange(parents.shape[0], device=probs.device)[:, None] * parents.shape[1] + at) * V + tokens
    mass = torch.where(is_child, probs.reshape(-1)[flat], 0.0).double()
    zero = torch.zeros(parents.shape, dtype=torch.float64, device=probs.device)
    covered = zero.scatter_add(1, at, mass)
    children = zero.scatter_add(1, at, (mass > 0).double())
    support = torch.count_nonzero(probs, dim=2)
    ceiling = (covered * (1 - (children + 1) * _ULP)).float().clamp(min=_LEAST_NORMAL)
    return torch.where((children > 0) & (children >= support), torch.minimum(strict, ceiling), strict)
