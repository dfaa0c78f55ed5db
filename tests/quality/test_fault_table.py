"""Contract: docs/faults.md is what was measured, of the faults that there are; all of them were killed."""

import importlib.util
import json
from pathlib import Path

from registry import all_faults

ROOT = Path(__file__).parents[2]


def script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hunts():
    return json.loads((ROOT / "docs" / "faults.json").read_text())["faults"]


def test_the_measurements_are_of_faults_that_there_are_under_the_laws_that_they_name():
    """After a new fault: ``python ci/fault_table.py`` measures it; until then it is listed as missing."""
    laws = {fault.name: fault.killed_by[0] for fault in all_faults()}
    measured = {name: {result["law"] for result in results.values()} for name, results in hunts().items()}
    assert measured == {name: {laws[name]} for name in measured}


def test_every_measured_fault_was_killed_on_every_seed_and_fast_enough():
    worst = []
    for name, results in hunts().items():
        if set(results) >= {str(seed) for seed in range(20)}:
            assert all(result["killed"] for result in results.values()), name
            worst.append(
                max(results[str(seed)]["cpu_seconds"] for seed in range(20))
            )  # shrinking comes after
    assert len(worst) >= 240
    assert max(worst) <= 60
    assert sum(seconds <= 5 for seconds in worst) >= 0.9 * len(worst)


def test_the_document_is_what_the_script_makes_of_the_measurements():
    assert script("fault_table").render() == (ROOT / "docs" / "faults.md").read_text()


def test_no_right_sampler_was_ever_flagged_in_the_long_run():
    judged = json.loads((ROOT / "docs" / "no_false_alarms.json").read_text())["judged"]
    counts = [counts for laws in judged.values() for counts in laws.values()]
    assert sum(cases for cases, *_ in counts) >= 3000
    assert sum(alarms for _, _, alarms, _ in counts) == 0


def test_the_long_runs_document_is_what_the_script_makes_of_its_counts():
    assert script("no_false_alarms").render() == (ROOT / "docs" / "no_false_alarms.md").read_text()
