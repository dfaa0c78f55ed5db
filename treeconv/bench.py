"""``treeconv bench``: the deployed path, ``eager`` and ``triton`` side by side, against the bytes to move.

*Deployed* is what a serving engine runs today: logits to float32, divided by the temperature, softmax of
every row, a zeroed scratch tensor of the same size, ``sgl_kernel``; at T = 0 the argmax of every row and
``verify_tree_greedy``. Times are medians over replays of CUDA graphs between CUDA events (``eager`` waits for
the device and is called plainly), of graphs of one call each and of one graph of many calls, as a server's
step holds the call among others; inputs are rotated so that few requests do not sit in the cache. The
*bound* is the rows that the walks really visited, read once at the rate of a copy measured in the same run;
the *limit* is the project's target, 12 us + 2 x bound. At the headline shape the sampler is timed with
filters too, and with a bias and a bitmask, each beside the same call without, and beside the deployed path
with SGLang's top-p step.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treeconv.backends.registry import get_backend
from treeconv.bench_report import BenchReport, BenchRow, FilteredRow, format_table, save_plot
from treeconv.bench_timing import capture, copy_rate, event_times, extra_bytes, time_among_others
from treeconv.convert import to_verify_input
from treeconv.draft import build_draft_tree
from treeconv.errors import BackendUnavailable, InvalidArgument
from treeconv.filters import Cuts, Filters
from treeconv.processors import Processors, bitmask_words
from treeconv.tree import Coins, VerifyInput, VerifyOutput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from treeconv.tree import DraftTree

__all__ = ["BenchGrid", "BenchReport", "BenchRow", "format_table", "run_bench", "save_plot"]

_DEPTH_CAP = 16
_FOLLOWED = 0.7  # chance that a row peaks at a drafted child: about three rows are visited
_PEAK = 22.0  # over logits of deviation 2: at T = 0.6 all but 1e-8 of the mass
_FLAT_PEAK = 12.0  # at T = 1 an eighth of the mass
_LIMIT_US = 12.0


@dataclass(frozen=True)
class BenchGrid:
    """What is measured: every combination.

    Args:
        vocab_sizes, num_draft_tokens, batch_sizes, temperatures: as in DESIGN section 7.

        budget_s: seconds after which no further shape is begun; what was left out is listed.

        measure_ms: device time per figure, about.

        cuts: filters that every request carries, measured at 64 nodes, the largest vocabulary and the first
            temperature above 0.
    """

    vocab_sizes: tuple[int, ...] = (32_000, 128_256, 163_840)
    num_draft_tokens: tuple[int, ...] = (16, 64, 256)
    batch_sizes: tuple[int, ...] = (1, 4, 16, 64, 128)
    temperatures: tuple[float, ...] = (0.0, 0.6, 1.0)
    budget_s: float = 240.0
    measure_ms: float = 20.0
    cuts: tuple[Cuts, ...] = (
        Cuts(top_p=0.9),
        Cuts(top_k=50, top_p=0.95, min_p=0.05),
        Cuts(min_p=0.1),
        Cuts(top_k=50),
    )

    def shapes(self) -> Iterator[tuple[int, int, int]]:
        """``(N, B, V)``, the project's headline shape (64 nodes, the largest vocabulary) first."""
        cells = itertools.product(self.num_draft_tokens, self.batch_sizes, self.vocab_sizes)
        return iter(sorted(cells, key=lambda cell: (cell[0] != 64, -cell[2], cell[0], cell[1])))


@dataclass(frozen=True)
class _Inputs:
    batch: VerifyInput
    logits: torch.Tensor
    coins: Coins

    def call(
        self,
        path: Callable[..., VerifyOutput],
        temperature: torch.Tensor,
        *more: Filters | Processors | None,
    ) -> VerifyOutput:
        return path(self.batch, self.logits, temperature, self.coins, _DEPTH_CAP, *more)


def _random_trees(rng: np.random.Generator, count: int, num_nodes: int, vocab: int) -> list[DraftTree]:
    """Best-first trees under random marginals, 16 candidates at each of 15 depths."""
    trees = []
    for _ in range(count):
        scores = np.full((15, 16), -np.inf)
        scores[:] = np.log(np.maximum(rng.random((15, 16)) ** 4, 1e-12))
        tree = build_draft_tree(scores, num_nodes - 1, 0)
        names = np.array([rng.choice(vocab, 16, replace=False) for _ in range(15)])
        tokens = [0] + [
            int(names[tree.depths[node] - 1, tree.token_ids[node]]) for node in range(1, len(tree))
        ]
        trees.append(type(tree)(tree.parents, tuple(tokens)))
    return trees


def _inputs(seed: int, B: int, N: int, V: int, device: torch.device) -> _Inputs:
    rng = np.random.default_rng([seed, B, N])
    trees = _random_trees(rng, min(B, 16), N, min(V, 32_000))
    trees = [trees[index % len(trees)] for index in range(B)]
    batch = to_verify_input(trees, N, device=device)
    peaks = rng.integers(0, V, (B, N))
    for request, tree in enumerate(trees):
        for node, kids in enumerate(tree.children):
            if kids and rng.random() < _FOLLOWED:
                chances = 0.5 ** np.arange(len(kids))
                kid = kids[rng.choice(len(kids), p=chances / chances.sum())]
                peaks[request, node] = tree.token_ids[kid]
    generator = torch.Generator(device).manual_seed(seed)
    logits = torch.empty((B, N, V), dtype=torch.bfloat16, device=device)
    logits.normal_(0.0, 2.0, generator=generator)
    logits.scatter_(2, torch.from_numpy(peaks).to(device)[:, :, None], _PEAK)
    draws = torch.rand((B, N + 1), generator=generator, device=device)
    return _Inputs(batch, logits, Coins(draws[:, 1:].contiguous(), draws[:, 0].contiguous()))


class _Deployed:
    """The path of a serving engine; without SGLang's kernel, all of it but that."""

    def __init__(self) -> None:
        self.note = ""
        self._kernels: Any = None
        try:
            self._kernels = get_backend("sgl-raw").kernels  # type: ignore[attr-defined]
        except BackendUnavailable:
            self.note = "sgl_kernel is not here: softmax and scratch alone"

    @property
    def has_kernel(self) -> bool:
        return self._kernels is not None

    def sampled(
        self,
        batch: VerifyInput,
        logits: torch.Tensor,
        temperature: torch.Tensor,
        coins: Coins,
        cap: int,
        filters: Filters | None = None,
    ) -> VerifyOutput:
        probs = torch.softmax(logits.float().div_(temperature[:, None, None]), dim=-1)
        if filters is not None:  # top-p alone, as SGLang's verifier applies it: to every row
            from treeconv.backends.sgl import top_p_renormalised  # noqa: PLC0415

            probs = top_p_renormalised(probs, filters.top_p)
        scratch = torch.zeros_like(probs)
        output = self._output(batch, cap)
        if self._kernels is not None:
            self._kernels.call(
                "tree_speculative_sampling_target_only",
                **self._trees(batch, output),
                uniform_samples=coins.accept,
                uniform_samples_for_final_sampling=coins.final,
                target_probs=probs,
                draft_probs=scratch,
            )
        return output

    def greedy(
        self, batch: VerifyInput, logits: torch.Tensor, temperature: torch.Tensor, coins: Coins, cap: int
    ) -> VerifyOutput:
        del temperature, coins
        target = torch.argmax(logits, dim=-1)
        output = self._output(batch, cap)
        if self._kernels is not None:
            self._kernels.call("verify_tree_greedy", **self._trees(batch, output), target_predict=target)
        return output

    @staticmethod
    def _output(batch: VerifyInput, cap: int) -> VerifyOutput:
        B, N = batch.candidates.shape
        options: Any = {"dtype": torch.int32, "device": batch.device}
        return VerifyOutput(
            torch.full((B, cap), -1, **options),
            torch.zeros(B, **options),
            torch.empty(B * N, **options),
            torch.zeros(B, **options),
        )

    @staticmethod
    def _trees(batch: VerifyInput, output: VerifyOutput) -> dict[str, torch.Tensor]:
        outputs = {name: getattr(output, name) for name in ("predicts", "accept_index", "accept_token_num")}
        names = ("candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling")
        return outputs | {name: getattr(batch, name) for name in names}


def _fits(path: str, B: int, N: int, V: int, sets: int, device: torch.device) -> str | None:
    """Why a path does not fit beside its inputs, or None."""
    elements = B * N * V
    needed = {"deployed": 12 * elements, "eager": 8 * B * V, "triton": 0}[path] + 2 * elements * sets
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0] + 2 * elements * sets
    if needed * 1.05 + 2**30 > free:
        return f"needs {needed / 2**30:.0f} GiB of {free / 2**30:.0f}"
    return None


def run_bench(
    grid: BenchGrid | None = None,
    paths: Sequence[str] = ("deployed", "eager", "triton"),
    device: torch.device | str = "cuda",
    on_row: Callable[[BenchRow], None] | None = None,
) -> BenchReport:
    """Measure every combination that fits the card.

    Args:
        grid: what to measure; default everything.

        paths: any of "deployed", "eager", "triton".

        device: a CUDA device.

        on_row: called with each figure as it is measured.

    Raises:
        BackendUnavailable: no CUDA device, or a path that cannot be imported here.
        InvalidArgument: an unknown path.
    """
    grid = grid or BenchGrid()
    unknown = set(paths) - {"deployed", "eager", "triton"}
    if unknown:
        raise InvalidArgument(f"path={min(unknown)!r}, but must be one of deployed, eager, triton")
    if not torch.cuda.is_available():
        raise BackendUnavailable("treeconv bench measures a CUDA device, and none is here")
    device = torch.device(device)
    report = BenchReport(torch.cuda.get_device_name(device), copy_rate(device) / 1e12)
    deployed = _Deployed()
    if "triton" in paths:
        report.converter = bench_converter(device)
    started = time.monotonic()
    for N, B, V in grid.shapes():
        shape = f"{B} x {N} x {V}"
        if time.monotonic() - started > grid.budget_s:
            report.skipped.append((shape, f"the run's {grid.budget_s:.0f} s were over"))
            continue
        one = 2 * B * N * V
        sets = max(1, min(16, 64 // B, int(0.15 * torch.cuda.mem_get_info(device)[1] // one)))
        reason = _fits("triton", B, N, V, sets, device)
        if reason:
            report.skipped.append((shape, reason))
            continue
        inputs = [_inputs(seed, B, N, V, device) for seed in range(sets)]
        for temperature in grid.temperatures:
            decided: dict[str, torch.Tensor] = {}
            for path in paths:
                reason = _fits(path, B, N, V, 0, device)
                if reason:
                    report.skipped.append((f"{path} at {shape}", reason))
                    continue
                row = _measure(path, inputs, temperature, grid, report.copy_tb_s, deployed, decided)
                report.rows.append(row)
                if on_row:
                    on_row(row)
        del inputs
    if "triton" in paths:
        _measure_filters(grid, report, deployed, "deployed" in paths, started, device)
    return report


def _measure_filters(
    grid: BenchGrid,
    report: BenchReport,
    deployed: _Deployed,
    has_deployed: bool,
    started: float,
    device: torch.device,
) -> None:
    """Rows of the sampler with filters, with processors and plain, and of the deployed path with top-p."""
    N, V = 64, max(grid.vocab_sizes)
    sampled = [temperature for temperature in grid.temperatures if temperature > 0]
    if N not in grid.num_draft_tokens or not sampled or not grid.cuts:
        return
    for B in grid.batch_sizes:
        if time.monotonic() - started > 1.3 * grid.budget_s or _fits("triton", B, N, V, 1, device):
            report.skipped.append((f"filters at {B} x {N} x {V}", "time or memory was over"))
            continue
        inputs = [_inputs(seed, B, N, V, device) for seed in range(max(1, min(16, 64 // B)))]
        held: dict[str, tuple[Filters | Processors | None, ...]] = {"no filters": ()}
        held |= {str(cuts): (Filters.of([cuts] * B, V, device=device),) for cuts in grid.cuts}
        held["bias and bitmask"] = (None, _all_allowed(B, N, V, device))
        report.filtered += _filtered_rows(inputs, held, sampled[0], grid.measure_ms)
        if has_deployed and deployed.has_kernel and _fits("deployed", 2 * B, N, V, 0, device) is None:
            top_p = Filters.of([Cuts(top_p=0.9)] * B, V, device=device)
            temperatures = torch.full((B,), sampled[0], device=device)
            try:
                calls = [partial(each.call, deployed.sampled, temperatures, top_p) for each in inputs[:2]]
                times = event_times(calls, grid.measure_ms)
            except (BackendUnavailable, RuntimeError) as error:
                report.skipped.append((f"deployed with top-p at {B} x {N} x {V}", str(error)[:200]))
            else:
                report.filtered.append(
                    FilteredRow(N, B, V, sampled[0], "deployed", "top_p 0.9", statistics.median(times), 0.0)
                )
        for each in inputs:
            each.logits.clamp_(max=_FLAT_PEAK)
        del held["bias and bitmask"]
        report.filtered += _filtered_rows(inputs, held, 1.0, grid.measure_ms, flat=True)
        del inputs


def _filtered_rows(
    inputs: list[_Inputs],
    held: dict[str, tuple[Filters | Processors | None, ...]],
    temperature: float,
    measure_ms: float,
    *,
    flat: bool = False,
) -> list[FilteredRow]:
    """One figure of the sampler for each of ``held``, over these inputs."""
    B, N, V = inputs[0].logits.shape
    temperatures = torch.full((B,), temperature, device=inputs[0].logits.device)
    function: Callable[..., VerifyOutput] = get_backend("triton").verify
    rows = []
    for what, more in held.items():
        results = [each.call(function, temperatures, *more) for each in inputs]
        graphs = [
            capture(
                partial(each.call, _with(function, _empty_output(function, out)), temperatures, *more), None
            )
            for each, out in zip(inputs, results, strict=True)
        ]
        times = event_times([graph.replay for graph in graphs], measure_ms)
        visited = statistics.mean(float(out.accept_token_num.float().mean()) + 1 for out in results)
        rows.append(
            FilteredRow(N, B, V, temperature, "triton", what, statistics.median(times), visited, flat)
        )
    return rows


def _all_allowed(B: int, N: int, V: int, device: torch.device) -> Processors:
    """A bias of zero and a mask of ones: the walks stay those without, so that times compare."""
    words = torch.full((B, N, bitmask_words(V)), -1, dtype=torch.int32, device=device)
    return Processors(torch.zeros((B, V), device=device), words)


def _measure(
    path: str,
    inputs: list[_Inputs],
    temperature: float,
    grid: BenchGrid,
    copy_tb_s: float,
    deployed: _Deployed,
    decided: dict[str, torch.Tensor],
) -> BenchRow:
    """One figure; ``decided`` takes the path's decisions on the first inputs, beside the earlier paths'."""
    B, N, V = inputs[0].logits.shape
    device = inputs[0].logits.device
    temperatures = torch.full((B,), temperature, device=device)
    note, in_graph = "", path != "eager"
    function: Callable[..., VerifyOutput]
    if path == "deployed":
        function, note = (deployed.greedy if temperature == 0 else deployed.sampled), deployed.note
        inputs = inputs[: max(1, min(len(inputs), 2**31 // (B * N * V * 8) or 1))]
        if temperature > 0 and deployed.has_kernel and B * N * V >= 2**32:
            note = "at 2**32 elements and more sgl_kernel's offsets wrap: it reads other rows"
    else:
        backend = get_backend(path)
        function = backend.verify
    extra = extra_bytes(lambda: inputs[0].call(function, temperatures), device)
    results = [each.call(function, temperatures) for each in inputs]
    visited = statistics.mean(float(result.accept_token_num.float().mean()) + 1 for result in results)
    decided[path] = results[0].accept_index
    same = None
    if path != "deployed" and "deployed" in decided and deployed.has_kernel:
        same = float((decided[path] == decided["deployed"]).all(dim=1).float().mean())
    calls: list[Callable[[], object]]
    among = None
    if in_graph:
        pool = torch.cuda.graph_pool_handle()
        outs = [_empty_output(function, result) for result in results]
        calls = [
            partial(each.call, _with(function, out), temperatures)
            for each, out in zip(inputs, outs, strict=True)
        ]
        times = sorted(event_times([capture(call, pool).replay for call in calls], grid.measure_ms))
        among = time_among_others(calls, statistics.median(times), pool, grid.measure_ms)
    else:
        calls = [partial(each.call, function, temperatures) for each in inputs]
        note = "plain calls: it waits for the device"
        times = sorted(event_times(calls, grid.measure_ms))
    bound = 0.0 if path == "deployed" and not deployed.has_kernel else visited * B * V * 2 / copy_tb_s / 1e6
    return BenchRow(
        num_draft_tokens=N,
        batch_size=B,
        vocab_size=V,
        temperature=temperature,
        path=path,
        median_us=statistics.median(times),
        spread_us=times[5] - times[1],
        among_us=among,
        visited=visited,
        bound_us=bound,
        limit_us=_LIMIT_US + 2 * bound,
        extra_mb=extra / 1e6,
        same_as_deployed=same,
        in_graph=in_graph,
        note=note,
    )


def _empty_output(function: Callable[..., VerifyOutput], like: VerifyOutput) -> VerifyOutput | None:
    """Outputs for a path that can write into given ones, so that its graph allocates nothing."""
    owner = getattr(function, "__self__", None)
    if not hasattr(owner, "empty_output"):
        return None
    return VerifyOutput(*(torch.empty_like(getattr(like, name)) for name in like.__dataclass_fields__))


def _with(function: Callable[..., VerifyOutput], out: VerifyOutput | None) -> Callable[..., VerifyOutput]:
    return function if out is None else lambda *call: function(*call, out=out)


def bench_converter(device: torch.device) -> dict[str, float]:
    """Microseconds of one captured conversion of 128 trees of 64 nodes, by mask mode."""
    from treeconv.kernels.convert_tree import convert_tree  # noqa: PLC0415  (triton is optional)
    from treeconv.tree import TreeMaskMode  # noqa: PLC0415

    B, N, prefix = 128, 64, 1000
    trees = _random_trees(np.random.default_rng(0), 16, N, 32_000)
    parents = torch.tensor([trees[b % 16].parents for b in range(B)], device=device)
    tokens = torch.tensor([trees[b % 16].token_ids for b in range(B)], device=device)
    sizes = torch.full((B,), N, device=device)
    prefixes = torch.full((B,), prefix, device=device)
    figures = {}
    for mode in (None, *TreeMaskMode):
        out = convert_tree(parents, tokens, sizes, prefixes, mode, prefix * B)

        def call(mode: Any = mode, out: Any = out) -> object:
            return convert_tree(parents, tokens, sizes, prefixes, mode, prefix * B, out)

        graph = capture(call, None)
        name = "no mask" if mode is None else mode.name
        if mode is TreeMaskMode.FULL_MASK:
            name += f", prefix {prefix}"
        figures[name] = statistics.median(event_times([graph.replay], 10.0))
    return figures
