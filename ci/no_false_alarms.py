"""Right samplers under every law that applies to them, as long as there is time: not one alarm is allowed.

Adds to docs/no_false_alarms.json, with a new seed for each 200 cases, and writes docs/no_false_alarms.md.

    python ci/no_false_alarms.py --seconds 3600      # the least tried pairs first
    python ci/no_false_alarms.py --render            # the table alone

A law's default is 200 cases; a hundred times that, for each sampler and law, is the aim.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported: its kernels run on the CPU
ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "quality"), str(ROOT / "tests")]

from right_samplers import RIGHT  # noqa: E402

from treeconv.backends.registry import get_backend  # noqa: E402
from treeconv.laws import BACKEND_LAWS, law_named, why_not  # noqa: E402
from treeconv.suite import DEFAULT_MAX_EXAMPLES, check_law  # noqa: E402

RESULTS, TABLE = ROOT / "docs" / "no_false_alarms.json", ROOT / "docs" / "no_false_alarms.md"
OURS = ("reference", "eager", "triton")
AIM = 100 * DEFAULT_MAX_EXAMPLES
FEW = 10  # cases at a time for a sampler in an interpreter
BANDED = ("logits", "wide", "chains", "batches", "filtered_logits", "filtered_wide")
HEAD = """# No false alarms

Right samplers, ours and odd ones (`tests/quality/right_samplers.py`), under every law that applies to them:
{cases} cases, {decisions} decisions, **{alarms} alarms**. The aim is {aim} cases for each of {pairs} pairs of
sampler and law; {reached} pairs have reached it so far. Made by `ci/no_false_alarms.py`, which adds to it.

"""

BAND = """## The ambiguity band

The share of the coin space in which float32 may rightly decide either way: each boundary's band, weighted by
how often its node is met; over 200 generated cases. Dyadic laws have none.
"""


def known_as(made: type) -> str:
    """Its class, with the file that it is in."""
    return f"{made.__module__}.{made.__name__}"


def sampler_named(name: str) -> object:
    """A right sampler, made anew."""
    return get_backend(name) if name in OURS else next(made for made in RIGHT if known_as(made) == name)()


def sampler_names() -> list[str]:
    """Ours, then the odd ones."""
    return [*OURS, *map(known_as, RIGHT)]


def judged(job: tuple[str, str, int]) -> tuple[str, str, int, int, str]:
    """Some cases of one law on one sampler."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    name, law, seed = job
    count = FEW if name in ("triton", "filter_faults.Pivot") else DEFAULT_MAX_EXAMPLES
    outcome = check_law(law_named(law), sampler_named(name), max_examples=count, seed=f"long {seed}")  # type: ignore[arg-type]
    return name, law, outcome.cases, outcome.decisions, str(outcome.broken or "")


def band_shares(cases: int = 200) -> dict[str, list[float]]:
    """Law -> mean and largest share of the coin space that float32 may decide either way."""
    from hypothesis import given, seed  # noqa: PLC0415
    from hypothesis.strategies import just  # noqa: PLC0415
    from test_oracle import ambiguous_share  # noqa: PLC0415

    from treeconv.judge import target_rows  # noqa: PLC0415
    from treeconv.strategies import cases_for  # noqa: PLC0415
    from treeconv.suite import suite_settings  # noqa: PLC0415

    shares: dict[str, list[float]] = {}
    for kind in BANDED:
        found: list[float] = []

        def look(case, found):  # noqa: ANN001, ANN202
            for request in case.requests:
                found.append(
                    ambiguous_share(request.tree, target_rows(request, case.kind, case.filter_order))
                )

        given_cases = given(case=cases_for(kind), found=just(found))(look)
        seed(1)(suite_settings(cases)(given_cases))()
        shares[kind] = [sum(found) / len(found), max(found)]
    return {law.name: shares[law.cases] for law in BACKEND_LAWS if law.cases in shares}


def load() -> dict[str, dict[str, list[int]]]:
    """Sampler -> law -> cases, decisions, alarms, calls so far."""
    stored = json.loads(RESULTS.read_text())["judged"] if RESULTS.exists() else {}
    return defaultdict(dict, stored)


def pairs() -> list[tuple[str, str]]:
    """All samplers and laws that apply to them."""
    return [
        (name, law.name)
        for law in BACKEND_LAWS
        for name in sampler_names()
        if why_not(law, sampler_named(name)) is None  # type: ignore[arg-type]
    ]


def render() -> str:
    """The table, from the stored results alone."""
    stored = json.loads(RESULTS.read_text())
    results, shares = stored["judged"], stored["band"]
    every = [counts for laws in results.values() for counts in laws.values()]
    head = HEAD.format(
        cases=f"{sum(counts[0] for counts in every):,}",
        decisions=f"{sum(counts[1] for counts in every):,}",
        alarms=sum(counts[2] for counts in every),
        aim=f"{AIM:,}",
        pairs=stored["pairs"],
        reached=sum(counts[0] >= AIM for counts in every),
    )
    rows = []
    for name, laws in results.items():
        cases, decisions, alarms, _ = map(sum, zip(*laws.values(), strict=True))
        fewest = min(counts[0] for counts in laws.values())
        rows.append(f"| {name} | {len(laws)} | {fewest:,} | {cases:,} | {decisions:,} | {alarms} |")
    bands = [f"| {law} | {mean:.2g} | {worst:.2g} |" for law, (mean, worst) in shares.items()]
    columns = "| sampler | laws | fewest cases of a law | cases | decisions | alarms |"
    table = "\n".join([columns, "|" + " --- |" * 6, *rows])
    band = "\n".join(["| law | mean | largest |", "|" + " --- |" * 3, *bands])
    return f"{head}{table}\n\n{BAND}\n{band}\n"


def save(results: dict[str, dict[str, list[int]]], shares: dict[str, list[float]]) -> None:
    """Write the counts, a sampler a line, atomically."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(laws)}" for name, laws in results.items())
    part = RESULTS.with_suffix(".part")
    part.write_text(f'{{"pairs": {len(pairs())}, "band": {json.dumps(shares)},\n "judged": {{\n{lines}}}}}\n')
    part.replace(RESULTS)


def main() -> int:
    """Judge the least tried pairs until the time is up; 1 if any right sampler was flagged."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=3600)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args()
    if options.render:
        TABLE.write_text(render())
        return 0
    results, shares = load(), band_shares()
    ends = time.monotonic() + options.seconds
    alarms = 0
    with multiprocessing.Pool(options.jobs) as pool:
        while time.monotonic() < ends:
            known = {pair: results.get(pair[0], {}).get(pair[1], [0, 0, 0, 0]) for pair in pairs()}
            due = [pair for pair in sorted(known, key=lambda pair: known[pair][3]) if known[pair][0] < AIM]
            if not due:
                break
            jobs = [(*pair, known[pair][3]) for pair in due[: 10 * options.jobs]]
            for name, law, cases, decisions, broken in pool.imap_unordered(judged, jobs):
                before = known[name, law]
                counts = [before[0] + cases, before[1] + decisions, before[2] + bool(broken), before[3] + 1]
                results[name][law] = counts
                if broken:
                    alarms += 1
                    print(f"false alarm on {name}:\n{broken}", flush=True)
            save(results, shares)
            print(f"{sum(c[0] for laws in results.values() for c in laws.values()):,} cases", flush=True)
    TABLE.write_text(render())
    return int(alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
