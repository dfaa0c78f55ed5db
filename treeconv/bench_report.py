"""What ``treeconv bench`` measured: as data, as a table, as a plot."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from treeconv.errors import BackendUnavailable

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["BenchReport", "BenchRow", "FilteredRow", "format_table", "save_plot"]


@dataclass(frozen=True)
class BenchRow:
    """One figure.

    Args:
        path: "deployed", "eager" or "triton".

        median_us: of one call that is a graph of its own; ``spread_us`` is the range of the middle half of
            the rounds.

        among_us: of one call among others in one graph, 16 or more unless a call takes long; None for plain
            calls.

        visited: rows visited per request, mean.

        bound_us, limit_us: see the module.

        extra_mb: device memory that one call takes besides its inputs, at its peak.

        same_as_deployed: the share of requests that accept what sgl_kernel accepts; None where it is not
            here. Coins within float32's rounding of a boundary may differ.

        in_graph: whether graph replays were timed.

        note: what is special about the figure.
    """

    num_draft_tokens: int
    batch_size: int
    vocab_size: int
    temperature: float
    path: str
    median_us: float
    spread_us: float
    visited: float
    bound_us: float
    limit_us: float
    extra_mb: float
    same_as_deployed: float | None = None
    among_us: float | None = None
    in_graph: bool = True
    note: str = ""


@dataclass(frozen=True)
class FilteredRow:
    """One figure of a call whose requests carry filters.

    Args:
        path: "triton", in a graph, or "deployed", as plain calls.

        filters: which, "no filters", or "bias and bitmask" for those instead.

        visited: rows visited per request, mean; 0 where not counted.

        flat: rows whose largest token has about an eighth of the mass, instead of nearly all of it.
    """

    num_draft_tokens: int
    batch_size: int
    vocab_size: int
    temperature: float
    path: str
    filters: str
    median_us: float
    visited: float
    flat: bool = False


@dataclass
class BenchReport:
    """Everything one run measured.

    Args:
        device: the card's name.

        copy_tb_s: bytes read plus written by a large device-to-device copy, in 10**12 a second.

        rows: the figures.

        converter: the device converter's: what -> microseconds, 128 trees of 64 nodes.

        skipped: ``[shape, why]`` of what was left out.

        filtered: the figures with filters, each batch size's one without first.
    """

    device: str
    copy_tb_s: float
    rows: list[BenchRow] = field(default_factory=list)
    converter: dict[str, float] = field(default_factory=dict)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    filtered: list[FilteredRow] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def format_table(report: BenchReport) -> str:
    """The figures as text, one shape and temperature a line."""
    lines = [
        f"{report.device}, copies at {report.copy_tb_s:.2f} TB/s (read + written)",
        "times in us: of a call that is a graph of its own, then (among) of one in a graph of many",
    ]
    if report.converter:
        parts = ", ".join(f"{name}: {us:.1f}" for name, us in report.converter.items())
        lines.append(f"device converter, 128 trees x 64 nodes: {parts}")
    lines.append(
        f"{'N':>4} {'B':>4} {'V':>7} {'T':>4} {'rows':>5} {'deployed':>9} {'eager':>9} {'triton':>8}"
        f" {'x':>6} {'among: deployed':>15} {'triton':>8} {'x':>6} {'bound':>7} {'limit':>7}"
        f"  {'extra MB deployed / triton':>26}"
    )
    cells: dict[tuple[int, int, int, float], dict[str, BenchRow]] = {}
    for row in report.rows:
        key = (row.num_draft_tokens, row.batch_size, row.vocab_size, row.temperature)
        cells.setdefault(key, {})[row.path] = row
    for (N, B, V, T), found in cells.items():
        us = {path: f"{row.median_us:.1f}" for path, row in found.items()}
        best = found.get("triton") or next(iter(found.values()))
        among = {path: f"{row.among_us:.1f}" for path, row in found.items() if row.among_us is not None}
        gain = among_gain = ""
        if "triton" in found and "deployed" in found:
            deployed, triton = found["deployed"], found["triton"]
            gain = f"{deployed.median_us / triton.median_us:.0f}x"
            if deployed.among_us is not None and triton.among_us is not None:
                among_gain = f"{deployed.among_us / triton.among_us:.0f}x"
        extra = " / ".join(f"{found[p].extra_mb:.1f}" if p in found else "-" for p in ("deployed", "triton"))
        over = " *" if "triton" in found and best.median_us > best.limit_us else ""
        lines.append(
            f"{N:>4} {B:>4} {V:>7} {T:>4} {best.visited:>5.1f} {us.get('deployed', '-'):>9}"
            f" {us.get('eager', '-'):>9} {us.get('triton', '-'):>8} {gain:>6}"
            f" {among.get('deployed', '-'):>15} {among.get('triton', '-'):>8} {among_gain:>6}"
            f" {best.bound_us:>7.2f} {best.limit_us:>7.1f}  {extra:>26}{over}"
        )
    notes = sorted({f"{row.path}: {row.note}" for row in report.rows if row.note})
    shares = [row.same_as_deployed for row in report.rows if row.same_as_deployed is not None]
    if shares:
        lines.append(f"accepts what deployed accepts: {min(shares):.2%} of requests at least, in every shape")
    lines += ["* over the limit of 12 us + 2 x bound, as a graph of its own", *notes]
    plain: dict[int, float] = {}
    for figure in report.filtered:
        if figure.filters == "no filters":
            plain[figure.batch_size] = figure.median_us
        ratio = figure.median_us / plain.get(figure.batch_size, float("nan"))
        lines.append(
            f"filters: {figure.path} {figure.batch_size} x {figure.num_draft_tokens} x {figure.vocab_size},"
            f" T {figure.temperature}, {'flat rows, ' * figure.flat}{figure.filters}:"
            f" {figure.median_us:.1f} us, {ratio:.2f} x the sampler without"
        )
    for why in dict.fromkeys(why for _, why in report.skipped):
        shapes = [shape for shape, reason in report.skipped if reason == why]
        lines.append(f"left out: {', '.join(shapes)}: {why}")
    return "\n".join(lines)


def save_plot(report: BenchReport, path: str | Path, num_draft_tokens: int = 64) -> None:
    """A PNG: microseconds over requests, a panel per vocabulary.

    Raises:
        BackendUnavailable: matplotlib is not installed, or no figure has that many nodes.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise BackendUnavailable(f"the plot needs matplotlib: {error}") from error
    rows = [row for row in report.rows if row.num_draft_tokens == num_draft_tokens]
    sampled = sorted({row.temperature for row in rows if row.temperature > 0})
    vocabs = sorted({row.vocab_size for row in rows})
    if not vocabs:
        raise BackendUnavailable(f"num_draft_tokens={num_draft_tokens}, but nothing was measured there")
    temperature = sampled[0] if sampled else 0.0
    figure = Figure(figsize=(4.2 * len(vocabs), 4), layout="constrained")
    FigureCanvasAgg(figure)
    for axis, vocab in zip(
        figure.subplots(1, len(vocabs), sharey=True, squeeze=False)[0], vocabs, strict=True
    ):
        here = [row for row in rows if row.vocab_size == vocab and row.temperature == temperature]
        for name in ("deployed", "eager", "triton"):
            line = sorted((row.batch_size, row.median_us) for row in here if row.path == name)
            if line:
                axis.plot(*zip(*line, strict=True), marker="o", label=name)
        own = sorted((row.batch_size, row.bound_us, row.limit_us) for row in here if row.path == "triton")
        if own:
            sizes, bounds, limits = zip(*own, strict=True)
            axis.plot(sizes, bounds, color="grey", linestyle=":", label="bytes bound")
            axis.plot(sizes, limits, color="grey", linestyle="--", label="12 us + 2 x bound")
        axis.set(xscale="log", yscale="log", xlabel="requests", title=f"vocabulary {vocab}")
        axis.set_xticks(sorted({row.batch_size for row in here}))
        axis.xaxis.set_major_formatter("{x:.0f}")
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    figure.axes[0].set_ylabel("us per call")
    figure.axes[0].legend()
    figure.suptitle(f"{report.device}: {num_draft_tokens} nodes, bf16 logits, T = {temperature}")
    figure.savefig(path, dpi=110)
