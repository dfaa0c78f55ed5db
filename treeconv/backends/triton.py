"""The fused sampler of :mod:`treeconv.kernels.verify_tree` behind the backend interface."""

from __future__ import annotations

import contextlib
import warnings
from typing import TYPE_CHECKING

import numpy as np
import torch

from treeconv._validate import check_int
from treeconv.backends.base import BackendTraits
from treeconv.errors import BackendUnavailable, InvalidArgument
from treeconv.kernels.launch import (
    MAX_BATCH,
    MAX_NODES,
    MAX_VOCAB,
    Workspace,
    chunk_size,
    programs_per_request,
    speaks_ptx,
)
from treeconv.kernels.verify_tree import INTERPRETED, verify_tree
from treeconv.processors import bitmask_words
from treeconv.tree import VerifyOutput

if TYPE_CHECKING:
    from collections.abc import Iterator

    from treeconv.filters import Filters
    from treeconv.processors import Processors
    from treeconv.tree import Coins, VerifyInput

__all__ = ["TritonBackend"]

_LOGIT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@contextlib.contextmanager
def _quiet_numpy() -> Iterator[None]:
    """The interpreter computes in NumPy, which warns of infinities and NaN that a GPU takes in silence."""
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


class TritonBackend:
    """Walks the trees on the GPU from raw logits, in one launch; CPU tensors through Triton's interpreter.

    No softmax of rows that are not visited, no host synchronisation; with ``out=`` no allocation, so a
    call can be captured in a CUDA graph once one like it ran outside (which compiles the kernel and
    lays out scratch).

    Scratch (5.2 MB) belongs to the stream of the call: calls on one stream, and graphs captured on it, share
    theirs and must not run at the same time as each other, on whatever streams the graphs are replayed;
    different streams are independent. ``torch.cuda.Stream()`` hands out streams of a pool again, and
    ``torch.cuda.graph`` captures on one and the same stream unless told otherwise: graphs that are to be
    replayed at once need streams of their own, or backends of their own (:meth:`with_own_scratch`).

    A capture on a stream that nothing was called on takes a spare. Every call outside a capture lays one out
    if there is none; none is laid out inside one, where its filling would be part of the graph and put the
    scratch back at each replay. So two such captures need a call between them.
    """

    name = "triton"
    traits = BackendTraits(
        graph_safe=not INTERPRETED,
        devices=("cpu",) if INTERPRETED else ("cuda",),
        is_interpreted=INTERPRETED,
        takes_filters=True,
        takes_processors=("bias", "bitmask"),
        takes_views=True,
    )

    def __init__(self) -> None:
        self._workspaces: dict[tuple[torch.device, int], Workspace] = {}
        self._spares: dict[torch.device, list[Workspace]] = {}

    @staticmethod
    def with_own_scratch() -> TritonBackend:
        """Another backend, whose calls and graphs share no scratch with this one's."""
        return TritonBackend()

    def verify(
        self,
        batch: VerifyInput,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        coins: Coins,
        depth_cap: int,
        filters: Filters | None = None,
        processors: Processors | None = None,
        *,
        out: VerifyOutput | None = None,
        programs: int | None = None,
    ) -> VerifyOutput:
        """Sample from ``softmax(logits / temperature)`` at each visited node.

        Args:
            batch: trees in converted form, already validated; ``[B, N]`` int64 on the device.

            logits: ``[B, N, V]`` bf16, fp16 or fp32; last dimension contiguous, the others of any stride.

            temperature: ``[B]`` float32, finite and >= 0; 0 is the lowest-index argmax. A request with any
                other emits nothing, its status being ``BAD_SETTINGS``; so it is with filters out of range.

            coins: ``accept`` ``[B, N]`` and ``final`` ``[B]``, float32 in [0, 1].

            depth_cap: accept slots per request, root included, >= 1.

            filters: top-k, top-p and min-p on the same device, or None for none.

            processors: a bias, a bitmask or both on the same device, or None for none; of any strides, but
                one whose last dimension is not contiguous is copied, which allocates.

            out: tensors to write into and return, as :meth:`empty_output` makes them.

            programs: overrides how many programs share a request; the result is the same.

        Raises:
            InvalidArgument: a shape, dtype, stride or size the kernel does not take, or mixed devices.

            BackendUnavailable: no CUDA device under the tensors and no interpreter, or a capture that no
                call outside one laid out scratch for (see the class).
        """
        if logits.dtype not in _LOGIT_DTYPES:
            raise InvalidArgument(f"logits.dtype={logits.dtype}, but must be bfloat16, float16 or float32")
        assert processors is None or processors.penalties is None, "handed what its traits do not claim"
        return self._run(
            batch, "logits", logits, temperature, coins, depth_cap, filters, processors, out, programs
        )

    def verify_probs(
        self,
        batch: VerifyInput,
        target_probs: torch.Tensor,
        coins: Coins,
        depth_cap: int,
        filters: Filters | None = None,
        *,
        out: VerifyOutput | None = None,
        programs: int | None = None,
    ) -> VerifyOutput:
        """The same walk over laws given as they are; exact where they are multiples of 2^-12.

        Args:
            batch: as for :meth:`verify`.

            target_probs: ``[B, N, V]`` float32 >= 0; a visited row's sum need not be 1, and is not used to
                normalise the acceptance test.

            coins: as for :meth:`verify`.

            depth_cap: as for :meth:`verify`.

            filters: as for :meth:`verify`.

            out: as for :meth:`verify`.

            programs: as for :meth:`verify`.

        Raises:
            InvalidArgument: as for :meth:`verify`.

            BackendUnavailable: as for :meth:`verify`.
        """
        if target_probs.dtype != torch.float32:
            raise InvalidArgument(f"target_probs.dtype={target_probs.dtype}, but must be float32")
        return self._run(
            batch, "target_probs", target_probs, None, coins, depth_cap, filters, None, out, programs
        )

    @staticmethod
    def empty_output(batch: VerifyInput, depth_cap: int) -> VerifyOutput:
        """Output tensors for ``out=``, uninitialised: each call writes every element."""
        B, N = batch.candidates.shape

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.int32, device=batch.candidates.device)

        return VerifyOutput(
            accept_index=empty(B, depth_cap),
            accept_token_num=empty(B),
            predicts=empty(B * N),
            status=empty(B),
        )

    def _run(
        self,
        batch: VerifyInput,
        rows_name: str,
        rows: torch.Tensor,
        temperature: torch.Tensor | None,
        coins: Coins,
        depth_cap: int,
        filters: Filters | None,
        processors: Processors | None,
        out: VerifyOutput | None,
        programs: int | None,
    ) -> VerifyOutput:
        device = rows.device
        trees = {
            "candidates": batch.candidates,
            "retrieve_next_token": batch.retrieve_next_token,
            "retrieve_next_sibling": batch.retrieve_next_sibling,
        }
        given = {**trees, "coins.accept": coins.accept, "coins.final": coins.final}
        if temperature is not None:
            given["temperature"] = temperature
        if filters is not None:
            given |= {f"filters.{key}": getattr(filters, key) for key in ("top_k", "top_p", "min_p")}
        if processors is not None:
            given |= processors.tensors
        for name, tensor in given.items():
            if tensor.device != device:
                raise InvalidArgument(
                    f"{name}.device={tensor.device}, but must be that of {rows_name}, {device}"
                )
        if device.type != "cuda" and not (device.type == "cpu" and INTERPRETED):
            raise BackendUnavailable(
                f"{rows_name}.device={device}, but must be a CUDA device"
                " (or the CPU with TRITON_INTERPRET=1 set before treeconv is imported)"
            )
        if rows.dim() != 3:
            raise InvalidArgument(f"{rows_name}.shape={tuple(rows.shape)}, but must be [B, N, V]")
        B, N, V = rows.shape
        for name, size, limit in (("B", B, MAX_BATCH), ("N", N, MAX_NODES), ("V", V, MAX_VOCAB)):
            if not 1 <= size <= limit:
                raise InvalidArgument(f"{name}={size}, but must be in [1, {limit}]")
        if V > 1 and rows.stride(2) != 1:
            raise InvalidArgument(
                f"{rows_name}.stride()={rows.stride()}, but must end in 1: the vocabulary is contiguous"
            )
        depth_cap = check_int(depth_cap, "depth_cap", 1)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(given, (B,))
        shapes |= dict.fromkeys((*trees, "coins.accept"), (B, N))
        shapes |= {"logit_bias": (B, V), "token_bitmask": (B, N, bitmask_words(V))}
        dtypes = dict.fromkeys((*trees, "filters.top_k"), torch.int64) | {"token_bitmask": torch.int32}
        for name, tensor in given.items():
            shape = shapes[name]
            if tuple(tensor.shape) != shape:
                raise InvalidArgument(f"{name}.shape={tuple(tensor.shape)}, but must be {shape}")
            dtype = dtypes.get(name, torch.float32)
            if tensor.dtype != dtype:
                raise InvalidArgument(f"{name}.dtype={tensor.dtype}, but must be {dtype}")
        if programs is not None:
            programs = check_int(programs, "programs", 1)
        if programs is None:
            programs = self.programs_for(B, V, device)
        elif programs > 1 and (INTERPRETED or not speaks_ptx(device)):
            why = f"on {device}: programs wait for each other on NVIDIA devices of sm_80 and newer alone"
            if INTERPRETED:
                why = "in the interpreter: it runs one at a time"
            raise InvalidArgument(f"programs={programs}, but must be 1 {why}")
        elif programs > -(-V // chunk_size(V)):
            raise InvalidArgument(
                f"programs={programs}, but must be in [1, {-(-V // chunk_size(V))}], the chunks of a row"
            )
        if out is None:
            out = self.empty_output(batch, depth_cap)
        else:
            self._check_output(out, B, N, depth_cap, device)
        with _quiet_numpy() if INTERPRETED else torch.cuda.device(device):
            verify_tree(
                batch.candidates.contiguous(),
                batch.retrieve_next_token.contiguous(),
                batch.retrieve_next_sibling.contiguous(),
                rows,
                temperature if temperature is None else temperature.contiguous(),
                coins.accept.contiguous(),
                coins.final.contiguous(),
                out.accept_index,
                out.accept_token_num,
                out.predicts,
                out.status,
                self._workspace(device),
                programs,
                None if filters is None else filters.contiguous(),
                processors,
            )
        return out

    @staticmethod
    def _check_output(out: VerifyOutput, B: int, N: int, depth_cap: int, device: torch.device) -> None:
        shapes = {
            "accept_index": (B, depth_cap),
            "accept_token_num": (B,),
            "predicts": (B * N,),
            "status": (B,),
        }
        for name, shape in shapes.items():
            tensor = getattr(out, name)
            fits = tensor.shape == shape and tensor.dtype == torch.int32 and tensor.device == device
            if not (fits and tensor.is_contiguous()):
                raise InvalidArgument(
                    f"out.{name}={tuple(tensor.shape)} {tensor.dtype} on {tensor.device}, but must be"
                    f" contiguous {shape} torch.int32 on {device}"
                )

    @staticmethod
    def programs_for(B: int, V: int, device: torch.device) -> int:
        """How many programs share a request in a call of these shapes on ``device``."""
        # The interpreter runs programs one after another; how they wait elsewhere was reasoned out in PTX.
        if INTERPRETED or not speaks_ptx(device):
            return 1
        about = torch.cuda.get_device_properties(device)
        return programs_per_request(B, V, about.multi_processor_count, about.shared_memory_per_multiprocessor)

    def _workspace(self, device: torch.device) -> Workspace:
        """The scratch of the current stream, made on first use; a capture takes the spare made earlier.

        Scratch allocated inside a capture would live in the graph's pool and be filled by its replays alone:
        calls on that stream would find it as it was, and each replay would start its epochs anew.
        """
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        key = (device, stream)
        spares = self._spares.setdefault(device, [])
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if key not in self._workspaces:
            if not capturing:
                self._workspaces[key] = Workspace(device)
            elif spares:
                self._workspaces[key] = spares.pop()
            elif any(known == device for known, _ in self._workspaces):
                raise BackendUnavailable(
                    "the triton backend was captured in a CUDA graph on a new stream, but the scratch that"
                    " its last call outside one laid out is taken by another stream: it must be called once"
                    " more outside a capture before this one, or captured on a stream that it was called on"
                )
            else:
                raise BackendUnavailable(
                    "the triton backend was captured in a CUDA graph before its first call, but must be"
                    " called once outside a capture, to compile the kernel and lay out its scratch"
                )
        if not capturing and not spares and device.type == "cuda":
            spares.append(Workspace(device))
            # Scratch is initialised on this stream; a capture may be replayed on any other.
            torch.cuda.current_stream(device).synchronize()
        return self._workspaces[key]
