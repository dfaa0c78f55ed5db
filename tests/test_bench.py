"""The benchmark's table, plot and refusals; its figures need a GPU (ci/gpu.sh)."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from treeconv import BackendUnavailable, InvalidArgument, verify
from treeconv.bench import BenchGrid, BenchReport, BenchRow, _inputs, format_table, run_bench, save_plot
from treeconv.bench_report import FilteredRow


def report():
    rows = [
        BenchRow(
            64,
            B,
            163840,
            0.6,
            path,
            us * B,
            1.0,
            3.0,
            0.2 * B,
            12 + 0.4 * B,
            5.0,
            None if path == "deployed" else 1.0,
            None if path == "eager" else us * B - 3,
            path != "eager",
            note,
        )
        for B in (1, 16)
        for path, us, note in (("deployed", 228.0, ""), ("eager", 90.0, "plain calls"), ("triton", 13.0, ""))
    ]
    return BenchReport("A card", 4.2, rows, {"no mask": 3.0}, [("128 x 256 x 163840", "needs 90 GiB of 80")])


def test_table_holds_what_was_measured_and_left_out():
    text = format_table(report())
    assert "A card, copies at 4.20 TB/s" in text
    assert "18x" in text
    assert "225.0     10.0    22x" in text  # of one call among others in a graph: 225 / 10
    assert "left out: 128 x 256 x 163840: needs 90 GiB of 80" in text
    assert "eager: plain calls" in text
    assert "accepts what deployed accepts: 100.00%" in text
    first, second = (line for line in text.splitlines() if "163840" in line and "left out" not in line)
    assert first.endswith("*")  # 13 us against a limit of 12.4
    assert second.endswith("*")
    json.dumps(report().to_json())


def test_figures_with_filters_stand_beside_the_one_without():
    told = report()
    for path, filters, us in (
        ("triton", "no filters", 20.0),
        ("triton", "top_p 0.9", 28.0),
        ("deployed", "top_p 0.9", 747.0),
    ):
        told.filtered.append(FilteredRow(64, 1, 163840, 0.6, path, filters, us, 2.5))
    told.filtered.append(FilteredRow(64, 1, 163840, 1.0, "triton", "no filters", 10.0, 1.5, flat=True))
    told.filtered.append(FilteredRow(64, 1, 163840, 1.0, "triton", "top_k 50", 80.0, 1.5, flat=True))
    text = format_table(told)
    assert "T 1.0, flat rows, top_k 50: 80.0 us, 8.00 x the sampler without" in text
    assert "triton 1 x 64 x 163840, T 0.6, top_p 0.9: 28.0 us, 1.40 x the sampler without" in text
    assert "deployed 1 x 64 x 163840, T 0.6, top_p 0.9: 747.0 us" in text
    json.dumps(told.to_json())


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    save_plot(report(), tmp_path / "bench.png")
    assert (tmp_path / "bench.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BackendUnavailable, match="num_draft_tokens=7"):
        save_plot(report(), tmp_path / "no.png", num_draft_tokens=7)


def test_headline_shape_comes_first():
    shapes = list(BenchGrid().shapes())
    assert shapes[0] == (64, 1, 163840)
    assert len(shapes) == 45


def test_inputs_visit_a_few_rows():
    """About three visited rows a request, the same trees for every vocabulary."""
    made = _inputs(0, 16, 64, 500, torch.device("cpu"))
    output = verify(made.batch, made.logits, 0.6, made.coins, backend="eager", depth_cap=16)
    assert 2 < float(output.accept_token_num.float().mean()) + 1 < 5
    again = _inputs(0, 16, 64, 700, torch.device("cpu"))
    assert np.array_equal(made.batch.retrieve_next_token, again.batch.retrieve_next_token)


def test_refusals():
    with pytest.raises(InvalidArgument, match="path='magic'"):
        run_bench(paths=("magic",))
    if not torch.cuda.is_available():
        with pytest.raises(BackendUnavailable, match="measures a CUDA device"):
            run_bench()
