"""The figures that the README quotes, held on this machine.

Run them with ``make bench``, or ``python -m pytest tests/benchmarks --benchmark-only -s`` (without xdist). A
plain ``pytest tests/`` calls each timed function once, for its result, and reads no clock; memory is
asserted always.

Times on a shared machine are noisy, so nothing is compared across runs: a figure in microseconds is held
against the median of many rounds, and a ratio against the ratio of two medians whose rounds took turns. Where
the middle half of those rounds spreads by more than a factor of two, no ratio can be read: skipped.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from treeconv import Coins, DraftTree, build_draft_tree, oracle, to_draft_trees, to_verify_input, verify
from treeconv.backends.registry import get_backend
from treeconv.filters import Cuts
from treeconv.fuzzing.bulk import Launch, launch

V = 163840  # Kimi K2's vocabulary
NODES = 64
T = 0.8


@pytest.fixture
def timed(benchmark, request):
    """Whether times are wanted; the benchmark fixture calls its function once where they are not."""
    benchmark.disabled |= not request.config.getoption("benchmark_only")
    return not benchmark.disabled


@pytest.fixture(params=[1, None], ids=["one thread", "default threads"])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param or before)
    yield torch.get_num_threads()
    torch.set_num_threads(before)


def ddtree(seed, vocab=1000):
    """A best-first tree of 64 nodes over a block drafter's marginals."""
    logits = np.random.default_rng(seed).normal(0, 3, (15, vocab))
    return build_draft_tree(logits, NODES - 1, root_token_id=9)


def served(visited=2, dtype=torch.bfloat16):
    """One request as served: 64 nodes, eldest children accepted until so many rows are visited, the bonus."""
    tree = ddtree(0)
    logits = torch.randn(1, NODES, V, generator=torch.Generator().manual_seed(0)).mul_(2).to(dtype)
    path = [0]
    while len(path) < visited:
        accepted = tree.children[path[-1]][0]
        logits[0, path[-1], tree.token_ids[accepted]] = 24.0
        path.append(accepted)
    return to_verify_input([tree]), logits, middle_coins(NODES), path


def middle_coins(nodes):
    return Coins(torch.full((1, nodes), 0.5), torch.full((1,), 0.5))


def take_turns(one, other, rounds):
    """Median seconds of two functions that were called in turn, in turned order; skips where too noisy."""
    seconds = ([], [])
    for turn in range(rounds + 10):
        for place in (0, 1) if turn % 2 else (1, 0):
            start = time.perf_counter()
            (one, other)[place]()
            seconds[place].append(time.perf_counter() - start)
    quarters = [statistics.quantiles(times[10:]) for times in seconds]
    if any(high > 2 * low for low, _, high in quarters):
        shown = " and ".join(f"{low * 1e6:.0f} to {high * 1e6:.0f} us" for low, _, high in quarters)
        pytest.skip(f"too noisy to read a ratio: the middle halves of the rounds took {shown}")
    return quarters[0][1], quarters[1][1]


def torch_memory(call):
    """Bytes that torch allocated and freed during the call, in order of time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]


def test_conversion_takes_at_most_20_us_a_tree(benchmark, timed):
    trees = [ddtree(seed) for seed in range(64)]
    batch = benchmark(to_verify_input, trees)
    assert to_draft_trees(batch) == trees
    if timed:
        per_tree = benchmark.stats.stats.median / len(trees) * 1e6
        print(f"\nto_verify_input: {per_tree:.1f} us a tree at 64 trees x {NODES} nodes")  # noqa: T201
        assert per_tree <= 20


def test_oracle_walk_takes_at_most_5_ms(benchmark, timed):
    """Exact arithmetic over every row that it visits, here down to a leaf."""
    tree = ddtree(1)
    law = np.random.default_rng(1).dirichlet([0.1] * 1024, NODES).astype(np.float32) / 2
    for node, kids in enumerate(tree.children):
        law[node, tree.token_ids[kids[0]] if kids else 0] += 0.5
    walk = benchmark(oracle.walk, tree, law, Coins([0.25] * NODES, 0.7))
    assert tree.children[walk.path[-1]] == ()
    if timed:
        median = benchmark.stats.stats.median * 1e3
        print(f"\noracle.walk: {median:.2f} ms, {NODES} nodes, V = 1024, {len(walk.path)} rows")  # noqa: T201
        assert median <= 5


@pytest.mark.parametrize(
    "cuts",
    [Cuts(top_k=50), Cuts(top_p=0.95), Cuts(min_p=0.05), Cuts(top_k=1000, top_p=0.9, min_p=0.001)],
    ids=str,
)
def test_oracle_takes_at_most_50_ms_for_a_filtered_row(benchmark, timed, cuts):
    """From logits to a judged draw: the law, every alternative of it, two children and the bonus."""
    logits = (np.random.default_rng(2).normal(0, 3, (1, V))).astype(np.float32)

    def judged():
        rows = oracle.TargetRows.from_logits(logits, T, cuts)
        stops = list(oracle.admissible_stops(DraftTree([-1, 0, 0], [0, 5, 7]), rows, [0.999999], 2))
        return stops[0].row.bonus(stops[0].rejected).draw(0.5), stops

    token, stops = benchmark.pedantic(judged, rounds=20, warmup_rounds=2)
    assert stops[0].admits(token, 0.5)
    if timed:
        median = benchmark.stats.stats.median * 1e3
        print(f"\noracle, {cuts}: {median:.1f} ms a row, V = {V}, {len(stops)} laws")  # noqa: T201
        assert median <= 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
@pytest.mark.parametrize("rows", [1, 2, 3, 4])
def test_eager_takes_at_most_1_5_softmaxes_of_the_visited_rows(benchmark, timed, threads, rows, dtype):
    """Beside one softmax of all of them, though a walk cannot know its second row before it saw the first."""
    batch, logits, coins, visited = served(rows, dtype)

    def ours():
        return verify(batch, logits, T, coins, backend="eager")

    def bound():
        return torch.softmax(logits[0, visited].float() / T, -1)

    output = benchmark.pedantic(ours, rounds=20, warmup_rounds=5)
    assert output.accept_index[0, :rows].tolist() == visited
    assert output.accept_token_num.tolist() == [rows - 1]
    if timed:
        taken, least = take_turns(ours, bound, rounds=200)
        print(  # noqa: T201
            f"\neager, {threads} threads: {taken * 1e6:.0f} us against {least * 1e6:.0f} us for a softmax of"
            f" the {rows} visited {dtype} rows: ratio {taken / least:.2f}"
        )
        assert taken / least <= 1.5


@pytest.mark.usefixtures("timed")
def test_eager_takes_at_most_4_rows_of_extra_memory(benchmark):
    """By the profiler's ledger of torch's allocations: their running total, in float32 rows."""
    batch, logits, coins, _ = served()
    changes = torch_memory(
        lambda: benchmark.pedantic(verify, (batch, logits, T, coins), {"backend": "eager"})
    )
    rows = np.cumsum(changes).max() / (4 * V)
    print(f"\neager: {rows:.2f} rows of extra memory at its peak")  # noqa: T201
    assert 1 <= rows <= 4


def test_eager_takes_no_more_memory_for_a_larger_tree():
    """Rows that are not visited cost nothing; the walks below visit two rows each."""
    peaks = []
    for nodes in (8, 64):
        batch = to_verify_input([DraftTree.chain([0, 0] + [1] * (nodes - 2))])
        logits = torch.zeros(1, nodes, 2**16)
        logits[:, 0, 0] = 30.0
        changes = torch_memory(lambda: verify(batch, logits, T, middle_coins(nodes), backend="eager"))  # noqa: B023
        peaks.append(np.cumsum(changes).max() // 2**18)
    assert peaks == [1, 1]


@pytest.mark.parametrize("kind", ["logits", "probs"])
def test_bulk_engine_judges_20_000_trees_a_second_on_two_cores(benchmark, timed, kind):
    """V = 64, N = 16, `eager`, one thread; by CPU time, since a campaign runs one worker a core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        backend = get_backend("eager")
        done = benchmark.pedantic(launch, (Launch(5, 2048, kind), backend, "cpu"), rounds=3, warmup_rounds=1)
        assert not bool((done.differing & ~done.decisions.unsure).any())
        if timed:
            started = time.process_time()
            for seed in range(5):
                launch(Launch(seed, 2048, kind), backend, "cpu")
            a_core = 5 * 2048 / (time.process_time() - started)
            print(f"\nbulk engine, {kind}: {a_core:,.0f} trees judged a second of one core, eager included")  # noqa: T201
            assert 2 * a_core >= 20_000
    finally:
        torch.set_num_threads(threads)
