"""Planted faults, each under the law named to kill it, on twenty seeds at the default profile.

Writes docs/faults.json and docs/faults.md.

    python ci/fault_table.py                 # what docs/faults.json does not hold yet; then the table
    python ci/fault_table.py --anew          # everything again
    python ci/fault_table.py --render        # the table alone

Results are kept as they come, so a run may be stopped and gone on with. Takes some 20 minutes of CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import statistics
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "quality")]

from registry import KINDS, all_faults, hunt  # noqa: E402

from treeconv.suite import DEFAULT_MAX_EXAMPLES  # noqa: E402

RESULTS, TABLE = ROOT / "docs" / "faults.json", ROOT / "docs" / "faults.md"
SEEDS = 20
SHRUNK = "shrunk"  # the first seed again
HEAD = """# Planted faults

The suite is tested on {count} deliberately wrong samplers, filters, coin plumbings, converters, masks and
graph runners (`tests/quality/*faults.py`), each one small edit away from right. Each is hunted by the law
named in advance to kill it, in at most {examples} cases (the default), under {seeds} seeds.

* **examples**: cases until the law broke, median and worst of the seeds.
* **nodes**: nodes of the shrunk failing tree (the largest of its batch), at the first seed; - where a law
  makes thousands of trees of its own.
* **CPU s**: the worst seed's, without shrinking; and at the first seed, shrinking included.

{verdict}
Measured on {machine}. Made by `ci/fault_table.py`; a test holds names and laws equal to the code's.

"""


def hunted(job: tuple[str, str]) -> tuple[str, str, dict[str, object]]:
    """One fault under its law: at one seed, or at the first one "shrunk" as well."""
    import torch  # noqa: PLC0415

    torch.set_num_threads(1)
    name, seed = job
    fault = next(fault for fault in all_faults() if fault.name == name)
    law = fault.killed_by[0]
    found = hunt(fault, law, 0 if seed == SHRUNK else int(seed), shrink=seed == SHRUNK)
    result: dict[str, object] = {
        "law": law,
        "killed": found.broken is not None,
        "examples": found.examples,
        "cpu_seconds": round(found.cpu_seconds, 2),
    }
    if seed == SHRUNK:
        result["nodes"] = found.nodes
    return name, seed, result


def load() -> dict[str, dict[str, dict[str, object]]]:
    """Results so far, of faults that still exist under the law that they still name."""
    stored = json.loads(RESULTS.read_text())["faults"] if RESULTS.exists() else {}
    laws = {fault.name: fault.killed_by[0] for fault in all_faults()}
    kept = {
        name: {seed: result for seed, result in seeds.items() if result["law"] == laws.get(name)}
        for name, seeds in stored.items()
    }
    return {name: seeds for name, seeds in kept.items() if seeds}


def order(seed: str) -> int:
    """Seeds by number, and what was shrunk at the end."""
    return 10**9 if seed == SHRUNK else int(seed)


def save(results: dict[str, dict[str, dict[str, object]]]) -> None:
    """Write the results, a line each, atomically."""
    lines = [
        f"  {json.dumps(name)}: {{\n"
        + ",\n".join(f"   {json.dumps(seed)}: {json.dumps(seeds[seed])}" for seed in sorted(seeds, key=order))
        + "}"
        for name, seeds in sorted(results.items())
    ]
    names = ("torch", "numpy", "hypothesis")
    machine = ", ".join(
        [platform.machine(), f"Python {platform.python_version()}", *(f"{n} {version(n)}" for n in names)]
    )
    text = f'{{"machine": {json.dumps(machine)},\n "faults": {{\n' + ",\n".join(lines) + "}}\n"
    part = RESULTS.with_suffix(".part")
    part.write_text(text)
    part.replace(RESULTS)


def render() -> str:
    """The table, from the stored results alone."""
    stored = json.loads(RESULTS.read_text())
    results = load()
    planted = all_faults()
    faults = [fault for fault in planted if len(set(results.get(fault.name, ())) - {SHRUNK}) >= SEEDS]
    rows, worst = [], []
    alive = 0
    for fault in faults:
        runs = [run for seed, run in results[fault.name].items() if seed != SHRUNK]
        examples = [run["examples"] for run in runs]
        alive += sum(not run["killed"] for run in runs)
        cpu = max(run["cpu_seconds"] for run in runs)
        worst.append(cpu)
        shrunk = results[fault.name].get(SHRUNK, {})
        law, also = fault.killed_by[0], ", ".join(fault.killed_by[1:])
        size = shrunk.get("nodes")
        rows.append(
            f"| {fault.name} | {fault.kind} | {law} | {also} | {statistics.median(examples):g} |"
            f" {max(examples)} | {'-' if size is None else size} | {cpu:.1f} |"
            f" {shrunk.get('cpu_seconds', '-')} |"
        )
    below = sum(cpu <= 5 for cpu in worst)
    runs = sum(len(set(results[fault.name]) - {SHRUNK}) for fault in faults)
    verdict = (
        f"Of {runs} hunts {runs - alive} killed. The slowest took {max(worst):.1f} s of CPU;"
        f" {below} of {len(worst)} faults ({100 * below / len(worst):.0f} %) never took more than 5 s.\n"
    )
    head = HEAD.format(
        count=len(faults),
        examples=DEFAULT_MAX_EXAMPLES,
        seeds=SEEDS,
        verdict=verdict,
        machine=stored["machine"],
    )
    missing = [fault.name for fault in planted if fault not in faults]
    survived = [name for name in missing if not all(r["killed"] for r in results.get(name, {}).values())]
    rest = f"\n## Not measured on all seeds yet\n\n{', '.join(missing)}.\n" if missing else ""
    rest += f"\nOf these survived a seed already: {', '.join(survived)}.\n" if survived else ""
    kinds = "\n".join(f"* **{kind}** {what}" for kind, what in KINDS.items())
    columns = "fault | kind | killed by | and by | examples: median | worst | nodes | CPU s: worst | shrunk"
    return (
        f"{head}{kinds}\n\n| {columns} |\n|{' --- |' * (columns.count('|') + 1)}\n"
        + "\n".join(rows)
        + "\n"
        + rest
    )


def main() -> None:
    """Hunt what is missing, seed by seed, then write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=None, metavar="FAULT")
    parser.add_argument("--anew", action="store_true")
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args()
    if not options.render:
        results = {} if options.anew else load()
        names = options.only or [fault.name for fault in all_faults()]
        seeds = [*map(str, range(options.seeds)), SHRUNK]
        jobs = [(name, seed) for seed in seeds for name in names if seed not in results.get(name, {})]
        with multiprocessing.Pool(options.jobs) as pool:
            for done, (name, seed, result) in enumerate(pool.imap_unordered(hunted, jobs), 1):
                results.setdefault(name, {})[seed] = result
                if not result["killed"]:
                    print(f"survived: {name}, seed {seed}, {result}", flush=True)
                if done % 20 == 0 or done == len(jobs):
                    save(results)
                    print(f"{done} of {len(jobs)}", flush=True)
    TABLE.write_text(render())


if __name__ == "__main__":
    main()
