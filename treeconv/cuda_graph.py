"""One verification call captured as CUDA graphs, replayed on changing trees, logits, temperatures and coins.

**Static** (fixed when the runner is made): the backend, the interface (logits or probabilities), N slots, V,
the depth cap, the rows' dtype, the device, the generator, which processors, the filters' order, and the
largest batch. The runner owns one set of input and output buffers of that size; every graph works on the
first rows of them.

**Free in every replay**: the trees and their sizes (up to N slots), rows, temperatures (0 included), coins,
biases, bitmasks, top-k, top-p and min-p, and the batch size. A batch runs in the smallest captured bucket
that holds it; the requests between are made single roots, and no result of theirs is handed out.

**Streams.** Buffers and scratch are the runner's own, so replays of different runners may be on different
streams at once. Replays of one runner must not overlap in time: one stream for all, or streams that wait.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from treeconv._validate import (
    check_coins,
    check_filters,
    check_int,
    check_rows,
    check_temperature,
    check_tensors,
    check_trees,
)
from treeconv._validate_processors import check_processors
from treeconv.backends.registry import get_backend
from treeconv.errors import BackendUnavailable, InvalidArgument
from treeconv.filters import FILTER_ORDERS, Cuts, Filters
from treeconv.processors import PENALTIES, Processors, bitmask_words
from treeconv.tree import Coins, VerifyInput, VerifyOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from treeconv.backends.base import Backend
    from treeconv.filters import FilterOrder
    from treeconv.processors import ProcessorKind

__all__ = ["CudaGraphRunner"]

_POINTERS = ("retrieve_next_token", "retrieve_next_sibling")


def _with_own_scratch(backend: Backend) -> Backend:
    """Another backend like this one where calls share scratch, and it can make one; else the same."""
    make: Callable[[], Backend] | None = getattr(backend, "with_own_scratch", None)
    return backend if make is None else make()


class CudaGraphRunner:
    """Captures a backend once per batch bucket and replays it.

        runner = CudaGraphRunner("triton", num_draft_tokens=64, vocab_size=163840, depth_cap=16,
                                 batch_sizes=(1, 4, 16, 64), generator=generator)
        runner.capture()
        ...
        runner.rows[:batch_size].copy_(logits)          # or let the model write there: no copy
        output = runner.replay(batch, temperature=temperature)

    Args:
        backend: a name or an object; on CUDA it must be ``graph_safe`` (never waits for the device). One that
            keeps scratch between calls is asked for another with scratch of its own, if it has
            ``with_own_scratch()``: else the scratch is shared with whoever else calls it.

        num_draft_tokens: N, slots per tree.

        vocab_size: V.

        depth_cap: accept slots per request, root included.

        batch_sizes: the buckets; a smaller batch runs in the next one up.

        rows_dtype: dtype of the logits; probabilities are float32.

        interface: "logits", or "probs" for a backend that is handed the law itself.

        device: a CUDA device. On the CPU there are no graphs: ``replay`` calls the backend on the same
            static buffers, which is how the bookkeeping is tested without a GPU.

        generator: draws the coins where a replay is given none, inside the graph: its state is registered
            with each graph, so that every replay draws fresh ones and a seed reproduces the sequence.
            Default: a new generator, seeded at random.

        rows: ``[max(batch_sizes), N, V]`` to use as the static rows, where the model already writes there.

        processors: which of "bias" and "bitmask" replays may bring, for logits alone. Penalties have no
            static shape: a committed text grows.

        filter_order: "sequential" or "joint" where replays may bring top-k, top-p and min-p; None for none.

    Raises:
        InvalidArgument: sizes below 1, a backend that waits for the device, one without this interface,
            these processors or filters, a generator of another device, or ``rows`` that do not fit.
        BackendUnavailable: the backend, or a CUDA device, is not here.
    """

    def __init__(
        self,
        backend: str | Backend,
        *,
        num_draft_tokens: int,
        vocab_size: int,
        depth_cap: int,
        batch_sizes: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128),
        rows_dtype: torch.dtype = torch.bfloat16,
        interface: Literal["logits", "probs"] = "logits",
        device: torch.device | str = "cuda",
        generator: torch.Generator | None = None,
        rows: torch.Tensor | None = None,
        processors: Collection[ProcessorKind] = (),
        filter_order: FilterOrder | None = None,
    ) -> None:
        self.num_draft_tokens = check_int(num_draft_tokens, "num_draft_tokens", 1)
        self.vocab_size = check_int(vocab_size, "vocab_size", 1)
        self.depth_cap = check_int(depth_cap, "depth_cap", 1)
        self.batch_sizes = tuple(sorted({check_int(size, "batch_sizes", 1) for size in batch_sizes}))
        if not self.batch_sizes:
            raise InvalidArgument("batch_sizes=(), but must hold at least one size")
        self.backend = _with_own_scratch(get_backend(backend))
        self.device = torch.device(device)
        if interface not in ("logits", "probs"):
            raise InvalidArgument(f"interface={interface!r}, but must be 'logits' or 'probs'")
        self._takes_probs = interface == "probs"
        traits = self.backend.traits
        if not (traits.takes_probs if self._takes_probs else traits.takes_logits):
            raise InvalidArgument(
                f"interface={interface!r}, but backend {self.backend.name!r} does not take that"
            )
        if unknown := set(processors) - ({"bias", "bitmask"} & set(traits.takes_processors)):
            raise InvalidArgument(
                f"processors={sorted(unknown)}, but must be of 'bias' and 'bitmask', and taken by backend"
                f" {self.backend.name!r}"
            )
        if processors and self._takes_probs:
            raise InvalidArgument("processors were given, but interface='probs' has none")
        if filter_order not in (None, *FILTER_ORDERS):
            raise InvalidArgument(f"filter_order={filter_order!r}, but must be None, 'sequential' or 'joint'")
        if filter_order is not None and not traits.takes_filters:
            raise InvalidArgument(
                f"filter_order={filter_order!r}, but backend {self.backend.name!r} takes no filters"
            )
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise BackendUnavailable(f"device={self.device}, but no CUDA device is here")
            self.device = torch.empty(0, device=self.device).device  # with its index
            if not traits.graph_safe:
                raise InvalidArgument(
                    f"backend={self.backend.name!r}, but must be graph_safe: it waits for the device, which"
                    " no graph can hold"
                )
        if generator is None:
            generator = torch.Generator(device=self.device)
            generator.seed()
        elif not isinstance(generator, torch.Generator) or generator.device.type != self.device.type:
            raise InvalidArgument(
                f"generator={generator!r}, but must be a torch.Generator on {self.device}, or None"
            )
        self._generator = generator
        self._allocate(torch.float32 if self._takes_probs else rows_dtype, rows)
        self._processors = self._static_processors(processors)
        self._filters: Filters | None = None
        if filter_order is not None:  # of the largest batch, all off
            self._filters = Filters.of([Cuts()] * self.batch_sizes[-1], vocab_size, filter_order, self.device)
        self._accepts_out = "out" in inspect.signature(self._method).parameters
        self._graphs: dict[tuple[int, bool], Callable[[], None]] = {}

    @property
    def _method(self) -> Callable[..., VerifyOutput]:
        return self.backend.verify_probs if self._takes_probs else self.backend.verify

    def _allocate(self, rows_dtype: torch.dtype, rows: torch.Tensor | None) -> None:
        B, N, V = self.batch_sizes[-1], self.num_draft_tokens, self.vocab_size
        if rows is None:
            rows = torch.zeros((B, N, V), dtype=rows_dtype, device=self.device)
        elif tuple(rows.shape) != (B, N, V) or rows.dtype != rows_dtype or rows.device != self.device:
            raise InvalidArgument(
                f"rows is {tuple(rows.shape)} {rows.dtype} on {rows.device}, but must be {(B, N, V)}"
                f" {rows_dtype} on {self.device}"
            )

        def integers(*shape: int, value: int = 0, dtype: torch.dtype = torch.int64) -> torch.Tensor:
            return torch.full(shape, value, dtype=dtype, device=self.device)

        self.rows = rows
        self.temperature = torch.ones(B, device=self.device)
        # One tensor, so that a replay draws all its coins in one launch; [:, 0] are the final ones.
        self._draws = torch.full((B, N + 1), 0.5, device=self.device)
        self._trees = VerifyInput(
            candidates=integers(B, N),
            retrieve_index=torch.arange(B * N, device=self.device).view(B, N),
            retrieve_next_token=integers(B, N, value=-1),
            retrieve_next_sibling=integers(B, N, value=-1),
            positions=integers(B, N),
            prefix_lens=integers(B),
        )
        self._output = VerifyOutput(
            accept_index=integers(B, self.depth_cap, value=-1, dtype=torch.int32),
            accept_token_num=integers(B, dtype=torch.int32),
            predicts=integers(B * N, value=-1, dtype=torch.int32),
            status=integers(B, dtype=torch.int32),
        )
        self._coins = Coins(integers(B, N).float(), integers(B).float())

    def _static_processors(self, kinds: Collection[ProcessorKind]) -> Processors:
        """Buffers of the captured ones, which do nothing yet."""
        (B, N, V), device = self.rows.shape, self.device
        bias = torch.zeros((B, V), device=device) if "bias" in kinds else None
        mask = None
        if "bitmask" in kinds:
            mask = torch.full((B, N, bitmask_words(V)), -1, dtype=torch.int32, device=device)
        return Processors(bias, mask)

    @property
    def coins(self) -> Coins:
        """The coins of the last replay, static tensors: ``[max(batch_sizes), N]``, ``[max(batch_sizes)]``."""
        return self._coins

    def bucket(self, batch_size: int) -> int | None:
        """The captured batch size that a batch of this size runs in, or None if it is too large."""
        return next((size for size in self.batch_sizes if size >= batch_size), None)

    def can_run(self, batch: VerifyInput, rows: Any = None, depth_cap: int | None = None) -> bool:
        """Whether :meth:`replay` takes a batch and rows of these shapes, dtypes and device, and this cap.

        No more requests or slots than captured, and the same V. Compares requests with requests: a batch of 2
        trees of 5 nodes needs a bucket of 2, not of 10. Values are not looked at, on the CPU either.
        """
        try:
            check_tensors(batch)
            return self._why_not(batch, self._as_rows(rows, batch), depth_cap) is None
        except InvalidArgument:
            return False

    def _as_rows(self, rows: Any, batch: VerifyInput) -> torch.Tensor | None:
        """Rows as they are; lists and arrays as :func:`treeconv.verify` takes them."""
        if rows is None or isinstance(rows, torch.Tensor):
            return rows
        return check_rows(rows, "target_probs" if self._takes_probs else "logits", batch, ("float32",))

    def _why_not(self, batch: VerifyInput, rows: torch.Tensor | None, depth_cap: int | None) -> str | None:
        B, N = batch.candidates.shape
        if self.bucket(B) is None:
            return f"batch_size={B}, but must be <= {self.batch_sizes[-1]}, the largest captured"
        if self.num_draft_tokens < N:
            return f"num_draft_tokens={N}, but must be <= {self.num_draft_tokens}, as captured"
        if batch.device != self.device:
            return f"device={batch.device}, but must be {self.device}, as captured"
        if depth_cap is not None and depth_cap != self.depth_cap:
            return f"depth_cap={depth_cap}, but must be {self.depth_cap}, as captured"
        if rows is None:
            return None
        if rows.ndim == 3 and rows.shape[2] != self.vocab_size:
            return f"vocab_size={rows.shape[2]}, but must be {self.vocab_size}, as captured"
        if tuple(rows.shape) != (B, N, self.vocab_size):
            return f"rows.shape={tuple(rows.shape)}, but must be {(B, N, self.vocab_size)}"
        if rows.dtype != self.rows.dtype:
            return f"rows.dtype={rows.dtype}, but must be {self.rows.dtype}, as captured"
        if rows.device != self.device:
            return f"rows.device={rows.device}, but must be {self.device}, as captured"
        return None

    def _call(self, size: int, *, draws: bool) -> None:
        """What a graph holds: the coins, if it draws them, and the backend on the first ``size`` requests."""
        N = self.num_draft_tokens
        if draws:
            self._draws[:size].uniform_(generator=self._generator)
            self._coins.accept[:size].copy_(self._draws[:size, 1:])
            self._coins.final[:size].copy_(self._draws[:size, 0])
        names = self._trees.__dataclass_fields__
        batch = VerifyInput(**{name: getattr(self._trees, name)[:size] for name in names})
        coins = Coins(self._coins.accept[:size], self._coins.final[:size])
        out = self._sliced_output(size, N)
        rows = (self.rows[:size],) if self._takes_probs else (self.rows[:size], self.temperature[:size])
        options: dict[str, Any] = {"out": out} if self._accepts_out else {}
        bias, mask = self._processors.logit_bias, self._processors.token_bitmask
        if self._processors.kinds:
            options["processors"] = Processors(
                None if bias is None else bias[:size], None if mask is None else mask[:size]
            )
        if (held := self._filters) is not None:
            options["filters"] = Filters(held.top_k[:size], held.top_p[:size], held.min_p[:size], held.order)
        result = self._method(batch, *rows, coins, self.depth_cap, **options)
        for name in VerifyOutput.__dataclass_fields__:
            source, target = getattr(result, name), getattr(out, name)
            if source.data_ptr() != target.data_ptr():
                target.copy_(source)

    def _sliced_output(self, size: int, slots: int) -> VerifyOutput:
        output = self._output
        return VerifyOutput(
            accept_index=output.accept_index[:size],
            accept_token_num=output.accept_token_num[:size],
            predicts=output.predicts[: size * slots],
            status=output.status[:size],
        )

    def capture(self) -> None:
        """Capture every bucket, twice: with coins drawn inside, and with coins as given.

        Each is run once outside the capture first, which compiles kernels and lays out scratch; the
        generator is left as it was found. Call it once, with nothing else running on the device.
        """
        if self.device.type != "cuda":
            for size in self.batch_sizes:
                for draws in (False, True):
                    self._graphs[size, draws] = partial(self._call, size, draws=draws)
            return
        state = self._generator.get_state()
        stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        pool = None
        # The largest first: the others fit into the memory it laid out.
        for size in reversed(self.batch_sizes):
            for draws in (False, True):
                stream.wait_stream(torch.cuda.current_stream(self.device))
                with torch.cuda.stream(stream):
                    self._call(size, draws=draws)
                torch.cuda.current_stream(self.device).wait_stream(stream)
                torch.cuda.synchronize(self.device)
                graph = torch.cuda.CUDAGraph()
                if draws:
                    graph.register_generator_state(self._generator)
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    self._call(size, draws=draws)
                pool = graph.pool()
                self._graphs[size, draws] = graph.replay
        self._generator.set_state(state)
        torch.cuda.synchronize(self.device)

    def replay(
        self,
        batch: VerifyInput,
        rows: Any = None,
        temperature: Any = None,
        coins: Coins | None = None,
        depth_cap: int | None = None,
        *,
        logit_bias: Any = None,
        token_bitmask: Any = None,
        top_k: Any = None,
        top_p: Any = None,
        min_p: Any = None,
    ) -> VerifyOutput:
        """Verify a batch by replaying the graph of its bucket. Never waits for the device.

        Args:
            batch: ``[B, N']`` with B up to the largest bucket and N' up to the captured N.

            rows: ``[B, N', V]`` of the captured dtype (lists and arrays count as float32), copied into the
                static rows; None where the model wrote to ``runner.rows`` itself.

            temperature: a scalar or ``[B]``; needed for the logits interface.

            coins: given ones, copied in; None draws fresh ones inside the graph.

            depth_cap: must be the captured one, if given.

            logit_bias: ``[B, V]`` float32, copied in; None for none, whatever an earlier replay brought. Only
                where captured.

            token_bitmask: ``[B, N', ceil(V / 32)]`` int32, likewise.

            top_k: None for off, whatever an earlier replay brought, an int or one a request; a tensor on the
                device is taken as it is.

            top_p: likewise, in (0, 1].

            min_p: likewise, in [0, 1].

        Returns:
            The result for B requests. ``accept_index`` and ``predicts`` are laid out for the batch's own
            N'. The tensors belong to the runner where N' is the captured N: the next replay overwrites
            them, clone what is to be kept.

        Raises:
            InvalidArgument: a batch that :meth:`can_run` refuses, or was not captured; bad rows,
                temperatures, coins, processors or filters, or such as were not captured; on the CPU also
                tokens and places that :func:`treeconv.verify` refuses.
            InvalidTree: pointers that are no tree (checked on the CPU).
        """
        check_tensors(batch)
        rows = self._as_rows(rows, batch)
        reason = self._why_not(batch, rows, depth_cap)
        if reason is not None:
            raise InvalidArgument(reason)
        check_trees(batch, self.vocab_size)
        B, slots = batch.candidates.shape
        size = self.bucket(B)
        if size is None or (size, coins is None) not in self._graphs:
            raise InvalidArgument("the runner replays nothing yet, but must be captured first: capture()")
        if not self._takes_probs:
            if temperature is None:
                raise InvalidArgument("temperature=None, but must be a number or one per request")
            self.temperature[:B].copy_(check_temperature(temperature, batch))
        if rows is not None:
            self.rows[:B, :slots].copy_(rows.detach())
        if coins is not None:
            coins = check_coins(coins, batch)
            self._coins.accept[:B, :slots].copy_(coins.accept)
            self._coins.final[:B].copy_(coins.final)
        self._load_processors(batch, logit_bias, token_bitmask)
        self._load_filters(batch, top_k, top_p, min_p)
        self._load(batch, size)
        self._graphs[size, coins is None]()
        return self._result(B, slots)

    def _load(self, batch: VerifyInput, size: int) -> None:
        """The trees into the static buffers; what an earlier replay left behind them is cut off."""
        B, slots = batch.candidates.shape
        self._trees.candidates[:B, :slots].copy_(batch.candidates)
        self._trees.positions[:B, :slots].copy_(batch.positions)
        self._trees.prefix_lens[:B].copy_(batch.prefix_lens)
        for name in _POINTERS:
            static = getattr(self._trees, name)
            static[:B, :slots].copy_(getattr(batch, name))
            if slots < self.num_draft_tokens:
                static[:B, slots:].fill_(-1)
            if size > B:
                static[B:size].fill_(-1)
        if size > B:
            self._trees.positions[B:size].zero_()
            self._trees.prefix_lens[B:size].zero_()

    def _load_processors(self, batch: VerifyInput, logit_bias: Any, token_bitmask: Any) -> None:
        """Bias and bitmask into the static buffers, or what does nothing: both fit any tree."""
        B, slots = batch.candidates.shape
        off = dict.fromkeys(PENALTIES)
        given = check_processors(batch, self.vocab_size, logit_bias, token_bitmask, off, None) or Processors()
        held = self._processors.tensors
        if unknown := given.tensors.keys() - held.keys():
            raise InvalidArgument(f"{min(unknown)} was given, but must be captured: processors=")
        for name, static in held.items():
            value = given.tensors.get(name)
            if value is None:
                static[:B].fill_(0 if name == "logit_bias" else -1)
            else:
                (static[:B] if name == "logit_bias" else static[:B, :slots]).copy_(value)

    def _load_filters(self, batch: VerifyInput, top_k: Any, top_p: Any, min_p: Any) -> None:
        """Filters into the static buffers, or what filters nothing."""
        held, B = self._filters, batch.batch_size
        order = "sequential" if held is None else held.order
        given = check_filters(top_k, top_p, min_p, order, batch, self.vocab_size)
        if held is None:
            if given is not None:
                raise InvalidArgument("filters were given, but must be captured: filter_order=")
            return
        if given is None:
            given = Filters.of([Cuts()] * B, self.vocab_size, order, self.device)
        for name in ("top_k", "top_p", "min_p"):
            getattr(held, name)[:B].copy_(getattr(given, name))

    def _result(self, B: int, slots: int) -> VerifyOutput:
        N = self.num_draft_tokens
        out = self._sliced_output(B, N)
        if slots == N:
            return out
        # Flat indices count the captured slots; the caller counts its own.
        accepted = out.accept_index
        renumbered = torch.where(accepted >= 0, accepted - accepted // N * (N - slots), -1)
        predicts = out.predicts.view(B, N)[:, :slots].reshape(-1)
        return VerifyOutput(renumbered, out.accept_token_num, predicts, out.status)
