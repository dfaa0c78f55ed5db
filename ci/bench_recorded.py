"""Filters on a real model's rows: the sampler over the recorded trees of ``corpus/seeds``, on a CUDA device.

    PYTHONPATH=. python ci/bench_recorded.py

For each number of requests and temperature, a line a setting: the median over CUDA-graph replays, also as a
multiple of the call without filters, the rows that a walk visits, and in how many walks one was searched.
"""
# ruff: noqa: SLF001  (measured as treeconv.bench measures)

from __future__ import annotations

import sys
from pathlib import Path

import torch

from treeconv import bench
from treeconv.backends.triton import TritonBackend
from treeconv.convert import to_verify_input
from treeconv.filters import Cuts, Filters
from treeconv.traces import Trace, load_trace
from treeconv.tree import Coins

SEEDS = Path(__file__).resolve().parent.parent / "corpus" / "seeds"
CUTS = (Cuts(top_p=0.9), Cuts(top_k=50, top_p=0.95, min_p=0.05), Cuts(min_p=0.1), Cuts(top_k=50))
DEVICE = torch.device("cuda")


def inputs(traces: list[Trace], seed: int, B: int) -> bench._Inputs:
    """B requests, a trace each, with coins of their own."""
    N, V = max(len(trace.tree) for trace in traces), traces[0].rows.shape[1]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(traces), generator=generator).tolist()
    chosen = [traces[order[request % len(traces)]] for request in range(B)]
    logits = torch.zeros((B, N, V), dtype=torch.bfloat16, device=DEVICE)
    for request, trace in enumerate(chosen):
        logits[request, : len(trace.tree)] = torch.from_numpy(trace.rows).to(DEVICE, torch.bfloat16)
    draws = torch.rand((B, N + 1), generator=generator).to(DEVICE)
    batch = to_verify_input([trace.tree for trace in chosen], N, device=DEVICE)
    return bench._Inputs(batch, logits, Coins(draws[:, 1:].contiguous(), draws[:, 0].contiguous()))


def searched(given: list[bench._Inputs], temperatures: torch.Tensor, filters: Filters | None) -> int:
    """In how many walks some row took more than its one step."""
    count = 0
    for each in given:
        backend = TritonBackend()
        output = each.call(backend.verify, temperatures, filters)
        (workspace,) = backend._workspaces.values()
        steps = workspace.epochs[: len(temperatures)]
        count += int((steps > output.accept_token_num + 1).sum())
    return count


def main() -> int:
    """Returns the exit status."""
    if not torch.cuda.is_available():
        print("ci/bench_recorded.py needs a CUDA device, and torch sees none", file=sys.stderr)
        return 2
    traces = [load_trace(path) for path in sorted(SEEDS.glob("*.trace"))]
    V = traces[0].rows.shape[1]
    for B in (1, 4, 16, 64):
        given = [inputs(traces, seed, B) for seed in range(max(2, min(16, 64 // B)))]
        held = {str(cuts): (Filters.of([cuts] * B, V, device=DEVICE),) for cuts in CUTS}
        for temperature in (0.6, 1.0):
            temperatures = torch.full((B,), temperature, device=DEVICE)
            rows = bench._filtered_rows(given, {"no filters": (), **held}, temperature, 20.0)
            for row, filters in zip(rows, (None, *(only for (only,) in held.values())), strict=True):
                print(
                    f"{B} requests, T {temperature}, {row.filters}: {row.median_us:.1f} us,"
                    f" {row.median_us / rows[0].median_us:.2f} x, {row.visited:.2f} rows,"
                    f" searched in {searched(given, temperatures, filters)} of {B * len(given)}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
