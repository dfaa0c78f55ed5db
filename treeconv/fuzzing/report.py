"""What a campaign says: a live line, findings as they come, a verdict; JUnit XML and Markdown for CI."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TextIO
from xml.etree import ElementTree as ET

if TYPE_CHECKING:
    from pathlib import Path

    from treeconv.fuzzing.store import Discovery
    from treeconv.fuzzing.supervise import JobResult, Progress, Result

__all__ = ["Display", "junit_xml", "markdown_summary", "progress_line", "replay_line", "verdict_line"]

_EVERY = 10.0  # seconds between lines where no terminal shows a live one
_SHOWN_ERRORS = 5
_TEXT_LIMIT = 30  # lines of a finding in the summary


def progress_line(progress: Progress) -> str:
    """One line: time, cases and their rate, what is under way, coverage, new inputs, findings."""
    counters = progress.counters
    parts = [
        f"{progress.seconds:7.1f} s",
        f"{counters['cases']:,} cases",
        f"{progress.per_second:,.0f}/s",
        progress.job,
    ]
    if counters["features"]:
        parts.append(f"{counters['features']} features")
    if counters["entries"]:
        parts.append(f"{counters['entries']} new inputs")
    parts.append(
        f"{progress.found} new findings" + (f" ({progress.known} known faults)" if progress.known else "")
    )
    if counters["repeats"]:
        parts.append(f"{counters['repeats']} repeats")
    if progress.deaths:
        parts.append(f"{progress.deaths} crashes or hangs")
    return "  ".join(parts)


def replay_line(found: Discovery, corpus: str) -> str:
    """The command that judges a finding's case again; why there is none, where there is none."""
    if not found.entry:
        return f"none: the campaign {found.campaign} with the same seed ({found.origin})"
    path = found.entry if found.entry.startswith("/") else f"{corpus}/{found.entry}"
    backend = f" --backend {found.backend}" if found.backend else ""
    return f"treeconv replay {path}{backend}"


def finding_text(found: Discovery, corpus: str) -> str:
    """A finding as a person reads it."""
    lines = [found.text]
    if found.known:
        lines.append(f"  known:    {found.known}, in the ledger")
    if found.state == "raw":
        lines.append("  state:    not shrunk yet; the next campaign takes it up")
    return "\n".join([*lines, f"  replay:   {replay_line(found, corpus)}"])


def closed(result: Result) -> list[str]:
    """Findings that an earlier campaign left unshrunk and that are none any more: why, a line each."""
    of_shrinking = [job.skipped for job in result.jobs if job.job.campaign == "shrink"]
    return [reason for reason in of_shrinking if reason.startswith("closed: ")]


def lines_about_before(result: Result) -> list[str]:
    """What became of earlier campaigns' findings: those met again, in short, and those that were closed."""
    lines = []
    for digest, found in result.findings.items():
        if digest not in result.new:
            on = f" on {found.backend}" if found.backend else ""
            known = f" (known: {found.known})" if found.known else ""
            lines.append(f"met again: {found.law}{on}: {found.kind}{known}")
            lines.append(f"  replay:   {replay_line(found, result.config.corpus)}")
    return lines + closed(result)


class Display:
    """The live line on standard error, findings on standard output.

    Args:
        corpus: as it was asked for: replay lines name it.

        stream: of the live line.
    """

    def __init__(self, corpus: str, stream: TextIO | None = None) -> None:
        self.corpus = corpus
        self._stream = sys.stderr if stream is None else stream
        self._next = 0.0
        self._width = 0

    def progress(self, progress: Progress) -> None:
        """Show where the campaign is."""
        is_live = self._stream.isatty()
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + (0.25 if is_live else _EVERY)
        line = progress_line(progress)
        if is_live:
            self._stream.write("\r" + line[:200].ljust(self._width))
            self._width = len(line[:200])
        else:
            self._stream.write(line + "\n")
        self._stream.flush()

    def clear(self) -> None:
        """Take the live line away."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0

    def finding(self, digest: str, found: Discovery) -> None:
        """A finding is new: one line. It was shrunk: all of it."""
        self.clear()
        if found.state == "raw":
            on = f" on {found.backend}" if found.backend else ""
            print(f"found: {found.law}{on}: {found.kind} ({digest}), being shrunk")  # noqa: T201
        else:
            print(finding_text(found, self.corpus) + "\n")  # noqa: T201
        sys.stdout.flush()


def verdict_line(result: Result) -> str:
    """The last line of a campaign: FAIL, INCOMPLETE where something was not judged, or PASS."""
    cases = result.progress.counters["cases"]
    known = len(result.findings) - len(result.unknown)
    verdict = "FAIL" if result.unknown else "INCOMPLETE" if result.is_incomplete else "PASS"
    words = f"{len(result.unknown)} findings, {len(result.new)} of them new, {known} known faults"
    if not result.unknown:
        words = f"0 findings, {known} known faults"
    if result.errors:
        words += f", {len(result.errors)} jobs could not be done"
    seconds = result.progress.seconds
    return f"{verdict} {cases} cases in {seconds:.0f} s ({result.progress.per_second:,.0f}/s), {words}"


def _jobs_with_findings(result: Result) -> list[tuple[JobResult, list[tuple[str, Discovery]]]]:
    placed: set[str] = set()
    rows = []
    for job in result.jobs:
        mine = [(digest, result.findings[digest]) for digest in job.found if digest in result.findings]
        placed |= {digest for digest, _ in mine}
        rows.append((job, mine))
    return rows


def junit_xml(result: Result) -> bytes:
    """A test case for each subject on each backend; findings are failures, known ones are skipped."""
    rows = _jobs_with_findings(result)
    in_jobs = {digest for _, mine in rows for digest, _ in mine}
    suite = ET.Element("testsuite", name="treeconv fuzz", time=f"{result.progress.seconds:.3f}")
    failures = errors = skipped = 0
    for job, mine in rows:
        name = f"{job.job.subject}[{job.job.backend}]" if job.job.backend else job.job.subject
        case = ET.SubElement(
            suite, "testcase", classname=f"fuzz.{job.job.campaign}", name=name, time=f"{job.seconds:.3f}"
        )
        unknown = [(digest, found) for digest, found in mine if not found.known]
        if unknown:
            failures += 1
            text = "\n\n".join(finding_text(found, result.config.corpus) for _, found in unknown)
            kinds = "; ".join(found.kind for _, found in unknown)
            ET.SubElement(case, "failure", message=_clean(kinds)).text = _clean(text)
        elif job.errors:
            errors += 1
            ET.SubElement(case, "error", message=_clean(job.errors[0][:200])).text = _clean(job.errors[0])
        elif mine:
            skipped += 1
            names = dict.fromkeys(f"known: {found.known}" for _, found in mine)  # one may break in two ways
            ET.SubElement(case, "skipped", message=_clean("; ".join(names)))
        elif job.skipped and not job.cases:
            skipped += 1
            ET.SubElement(case, "skipped", message=_clean(job.skipped))
    for digest, found in result.findings.items():  # of a job that was cut off before it could say so
        if digest in in_jobs or found.known:
            continue
        failures += 1
        case = ET.SubElement(
            suite, "testcase", classname=f"fuzz.{found.campaign}", name=f"{found.law}-{digest}"
        )
        failure = ET.SubElement(case, "failure", message=_clean(found.kind))
        failure.text = _clean(finding_text(found, result.config.corpus))
    if result.is_incomplete and not failures + errors:
        errors += 1
        case = ET.SubElement(suite, "testcase", classname="fuzz", name="campaign")
        ET.SubElement(case, "error", message="nothing was judged").text = verdict_line(result)
    counts = {"tests": len(suite), "failures": failures, "errors": errors, "skipped": skipped}
    for name, count in counts.items():
        suite.set(name, str(count))
    root = ET.Element("testsuites")
    root.append(suite)
    ET.indent(root)
    return bytes(ET.tostring(root, encoding="utf-8", xml_declaration=True))


def _clean(text: str) -> str:
    """Without the characters that XML cannot hold."""
    return "".join(
        c if c in "\t\n" or 0x20 <= ord(c) < 0xD800 or 0xE000 <= ord(c) < 0xFFFE else "?" for c in text
    )


def markdown_summary(result: Result) -> str:
    """The campaign on a page: verdict, findings with their pictures, what was searched and what was not."""
    config, progress = result.config, result.progress
    lines = [
        f"# treeconv fuzz: {verdict_line(result)}",
        "",
        f"Campaigns {', '.join(config.campaigns)} on {', '.join(config.backends) or 'no backend'}"
        f" ({config.device}), seed {config.seed}, {config.workers} workers"
        + (", **interrupted**" if result.interrupted else "")
        + ".",
        "",
    ]
    counters = progress.counters
    if counters["features"]:
        lines += [f"Coverage: {counters['features']} features, {counters['entries']} new inputs.", ""]
    for title, group in (
        ("Findings", result.unknown),
        ("Known faults, met again", {d: f for d, f in result.findings.items() if f.known}),
    ):
        if not group:
            continue
        lines += [f"## {title}", ""]
        for digest, found in group.items():
            new = ", new" if digest in result.new else ""
            on = f" on `{found.backend}`" if found.backend else ""
            lines += [f"### `{found.law}`{on}: {found.kind}{new}", "", "```text"]
            lines += finding_text(found, config.corpus).splitlines()[:_TEXT_LIMIT]
            lines += ["```", ""]
    if closed(result):
        lines += ["## Closed", "", *(f"* {reason.removeprefix('closed: ')}" for reason in closed(result)), ""]
    lines += ["## Searched", "", "| campaign | subject | backend | rounds | cases | seconds | outcome |"]
    lines.append("| --- | --- | --- | ---: | ---: | ---: | --- |")
    for job, mine in _jobs_with_findings(result):
        if job.job.campaign in ("replay", "shrink") and not mine and not job.errors:
            continue
        outcome = f"{len(mine)} findings" if mine else "error" if job.errors else job.skipped or "kept"
        lines.append(
            f"| {job.job.campaign} | {job.job.subject} | {job.job.backend} | {job.rounds} | {job.cases} |"
            f" {job.seconds:.1f} | {outcome} |"
        )
    replayed = [job for job in result.jobs if job.job.campaign == "replay"]
    lines += ["", f"Stored cases replayed first: {len(replayed)}.", ""]
    if result.errors:
        lines += ["## Could not be done", ""]
        for job_, error in result.errors[:_SHOWN_ERRORS]:
            lines += [f"{job_}:", "", "```text", error.strip(), "```", ""]
    return "\n".join(lines)


def write_reports(result: Result, junit: Path | None, summary: Path | None) -> None:
    """Write what was asked for.

    Raises:
        OSError: the disk refuses.
    """
    if junit is not None:
        junit.write_bytes(junit_xml(result))
    if summary is not None:
        summary.write_text(markdown_summary(result), encoding="utf-8")
