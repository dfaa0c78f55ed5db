"""Times and memory on a CUDA device: rounds of calls between events, graphs of one call and of many."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CALLS_IN_ONE_GRAPH = 16


def event_times(calls: Sequence[Callable[[], object]], measure_ms: float) -> list[float]:
    """Microseconds a call, one figure per round; the calls take turns."""
    for call in calls:
        call()
    torch.cuda.synchronize()

    def timed(count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for index in range(count):
            calls[index % len(calls)]()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) * 1000 / count

    first = timed(len(calls))
    per_round = max(len(calls), min(200, int(measure_ms * 1000 / 7 / max(first, 1.0))))
    return [timed(per_round) for _ in range(7)]


def capture(call: Callable[[], object], pool: Any) -> torch.cuda.CUDAGraph:
    """The call as a CUDA graph, after one plain call on the capturing stream."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        call()
    return graph


def time_among_others(
    calls: Sequence[Callable[[], object]], call_us: float, pool: Any, measure_ms: float
) -> float:
    """Microseconds of one call in a graph of 16 or more, median; of fewer where a call takes long.

    Args:
        calls: as for :func:`event_times`; the graph holds all of them, as often as the number asks.

        call_us: what one takes, about.

        pool: as for :func:`capture`.

        measure_ms: as for :func:`event_times`; what a graph takes at most, about.
    """
    wanted = max(1, min(_CALLS_IN_ONE_GRAPH, int(measure_ms * 1000 / max(call_us, 1.0))))
    repeats = math.ceil(wanted / len(calls))

    def all_of_them() -> None:
        for call in itertools.chain.from_iterable([calls] * repeats):
            call()

    graph = capture(all_of_them, pool)
    return statistics.median(event_times([graph.replay], measure_ms)) / (len(calls) * repeats)


def copy_rate(device: torch.device) -> float:
    """Bytes read plus written per second by a large copy."""
    free = torch.cuda.mem_get_info(device)[0]
    size = min(2**32, free // 4)
    source = torch.randn(size // 4, device=device)
    target = torch.empty_like(source)
    median = statistics.median(event_times([lambda: target.copy_(source)], 60.0))
    return 2 * source.numel() * 4 / (median * 1e-6)


def extra_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Bytes that the call holds at its peak, by torch's allocator, besides those held before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated(device) - before)
