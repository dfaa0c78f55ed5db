"""Time the Triton sampler alone, over CUDA-graph replays, for several ways to cut the launch up.

    python ci/bench_verify.py [--sweep] [--batch 1 4 16 64 128]

Trees are best-first ones of N nodes; logits are peaked at a drafted child with probability .7, so that
about three rows are visited. Each graph holds one call; graphs over different buffers are replayed in turn.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

import torch

from treeconv.backends.triton import TritonBackend
from treeconv.kernels import launch
from treeconv.tree import Coins, VerifyInput, VerifyOutput

COPY_RATE = 4.24e12  # bytes a second, read or written, of DESIGN section 7
TARGET = {1: 12, 4: 14, 16: 19, 64: 46, 128: 74}


def best_first_tree(rng: random.Random, N: int, V: int) -> tuple[list[int], list[int], list[int]]:
    """Parents and tokens of the N - 1 likeliest nodes under random per-depth marginals, and their ranks."""
    marginals = []
    for _ in range(15):
        weights = sorted((rng.random() ** 4 for _ in range(16)), reverse=True)
        total = sum(weights)
        marginals.append([(w / total, t) for w, t in zip(weights, rng.sample(range(V), 16), strict=True)])
    parents, tokens, ranks = [-1], [rng.randrange(V)], [0]
    heap = [(-marginals[0][0][0], 0, 0, 0, 1.0)]  # (-mass, parent, depth, rank, parent's mass)
    while len(parents) < N:
        mass, parent, depth, rank, above = heapq.heappop(heap)
        node = len(parents)
        parents.append(parent)
        tokens.append(marginals[depth][rank][1])
        ranks.append(rank)
        if rank + 1 < 16:
            heapq.heappush(heap, (-above * marginals[depth][rank + 1][0], parent, depth, rank + 1, above))
        if depth + 1 < 15:
            heapq.heappush(heap, (mass * marginals[depth + 1][0][0], node, depth + 1, 0, -mass))
    return parents, tokens, ranks


def make_batch(seed: int, B: int, N: int, V: int, rate: float = 0.8) -> tuple[Any, ...]:
    """One batch on the device, with peaked logits."""
    rng = random.Random(seed)
    child, sibling = torch.full((B, N), -1), torch.full((B, N), -1)
    candidates, peaks = torch.zeros((B, N), dtype=torch.int64), []
    for b in range(B):
        parents, tokens, ranks = best_first_tree(rng, N, V)
        candidates[b] = torch.tensor(tokens)
        kids = [[] for _ in range(N)]
        for node, parent in enumerate(parents[1:], start=1):
            kids[parent].append(node)
        for node, each in enumerate(kids):
            if each:
                child[b, node] = each[0]
                for left, right in itertools.pairwise(each):
                    sibling[b, left] = right
            if each and rng.random() < rate:
                chosen = rng.choices(each, [2.0 ** -ranks[k] for k in each])[0]
                peaks.append((b, node, tokens[chosen]))
            else:
                peaks.append((b, node, rng.randrange(V)))
    rows = torch.empty((B, N, V), dtype=torch.bfloat16, device="cuda")
    gen = torch.Generator("cuda").manual_seed(seed)
    for b in range(B):
        rows[b] = torch.randn((N, V), generator=gen, device="cuda") * 2
    index = torch.tensor(peaks, device="cuda").T
    rows[index[0], index[1], index[2]] = 22.0
    on = lambda t: t.to("cuda")  # noqa: E731
    batch = VerifyInput(
        on(candidates), torch.arange(B * N, device="cuda").view(B, N), on(child), on(sibling),
        torch.zeros((B, N), dtype=torch.int64, device="cuda"),
        torch.zeros(B, dtype=torch.int64, device="cuda"),
    )  # fmt: skip
    coins = Coins(torch.rand((B, N), device="cuda"), torch.rand(B, device="cuda"))
    return batch, rows, torch.full((B,), 0.8, device="cuda"), coins


def capture(
    backend: TritonBackend, inputs: tuple[Any, ...], programs: int | None, depth_cap: int = 16
) -> tuple[torch.cuda.CUDAGraph, VerifyOutput]:
    """A graph of one call, and its outputs."""
    out = backend.empty_output(inputs[0], depth_cap)
    backend.verify(*inputs, depth_cap, out=out, programs=programs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        backend.verify(*inputs, depth_cap, out=out, programs=programs)
    return graph, out


def time_graphs(graphs: list[torch.cuda.CUDAGraph], rounds: int = 15, replays: int = 40) -> float:
    """Median microseconds a replay, over rounds of back-to-back replays."""
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for i in range(replays):
            graphs[i % len(graphs)].replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / replays)
    return statistics.median(times)


def main() -> None:
    """Print one line per batch size and program count."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 4, 16, 64, 128])
    parser.add_argument("--vocab", type=int, default=163840)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--sweep", default="", help='more program counts to try, as "B:P,P B:P"')
    parser.add_argument("--json", default="")
    parser.add_argument("--tune", nargs="*", default=[], help="chunk,registers,programs per multiprocessor")
    options = parser.parse_args()
    backend = TritonBackend()
    sweep = {}
    for part in options.sweep.split():
        B, plans = part.split(":")
        sweep[int(B)] = [int(programs) for programs in plans.split(",")]
    empty = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    empty.add_(1)
    with torch.cuda.graph(graph):
        empty.add_(1)
    results = [{"null_kernel_us": time_graphs([graph])}]
    print(f"one tiny kernel in a graph: {results[0]['null_kernel_us']:.2f} us")
    for B in options.batch:
        sets = [make_batch(seed, B, options.nodes, options.vocab) for seed in range(max(3, min(16, 64 // B)))]
        for tune, programs in itertools.product(options.tune or [""], [None, *sweep.get(B, [])]):
            if tune:
                chunk, launch.REGISTERS, launch.PROGRAMS_PER_SM = map(int, tune.split(","))
                launch.chunk_size = lambda _, chunk=chunk: chunk
            captured = [capture(backend, inputs, programs) for inputs in sets]
            us = time_graphs([graph for graph, _ in captured])
            visited = statistics.mean((out.accept_token_num.float().mean() + 1).item() for _, out in captured)
            longest = max(int(out.accept_token_num.max()) + 1 for _, out in captured)
            bound = visited * B * options.vocab * 2 / COPY_RATE * 1e6
            shown = programs or backend.programs_for(B, options.vocab, torch.device("cuda", 0))
            results.append(
                {"B": B, "programs": shown, "us": us, "visited": visited, "bound_us": bound, "tune": tune}
            )
            print(
                f"B={B:4d} P={shown:4d} {tune:16s} {us:8.2f} us"
                f"  visited {visited:.2f} (max {longest})  bound {bound:6.2f}  limit {12 + 2 * bound:6.2f}"
                f"  issue's {TARGET.get(B)}",
                flush=True,
            )
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
