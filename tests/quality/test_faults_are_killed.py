"""Contract: every planted fault dies by its named laws in the default number of cases, and is shown well.

And every law kills something. The other way round, right samplers are never flagged: test_no_false_alarms.py.
One seed here; ``ci/fault_table.py`` runs twenty, and its table is held to name the same faults and laws.
"""

import re

import pytest
from faults import DepthCapIgnored
from registry import KINDS, LAWS, all_faults, hunt

from treeconv.corpus import load_entry
from treeconv.errors import LawBroken
from treeconv.gpu_laws import GPU_LAWS
from treeconv.laws import BACKEND_LAWS, law_named
from treeconv.replay import replay_entry
from treeconv.suite import check_law, failure_text
from treeconv.tree_laws import TREE_LAWS

FAULTS = all_faults()
ALSO = [
    pytest.param(fault, law, id=f"{fault.name}-by-{law}") for fault in FAULTS for law in fault.killed_by[1:]
]
#: A fault that only some siblings or depths show takes a tree that has them.
MOST_NODES = 5
MOST_LINES = 30


def parts(text):
    """The lines of a failure by their labels; those of the picture under the empty one."""
    found = {"": []}
    for line in text.splitlines():
        label, colon, rest = line.strip().partition(":")
        known = label in (
            "law broken",
            "meaning",
            "backend",
            "case",
            "beside",
            "got",
            "want",
            "because",
            "replay",
            "flaky",
        )
        if colon and known:
            found[label] = rest.strip()
        else:
            found[""].append(line.strip())
    return found


def settings_of(law):
    """Words of which the case's line or its neighbours' must hold one, where a law is about such settings."""
    if law.cases.startswith("filtered"):
        return ("top_k ", "top_p ", "min_p ")
    if law.cases.startswith(("masked", "forbidden", "penalised")) or "processed" in law.cases:
        return ("bias {", "a bitmask", " penalty ")
    return () if law.rule == "target_only" else (f"rule {law.rule}",)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.name}-by-{fault.killed_by[0]}")
def test_fault_is_killed_and_the_failure_says_how(fault, tmp_path):
    law = fault.killed_by[0]
    hunted = hunt(fault, law)
    assert hunted.broken, f"{fault.name} survived {hunted.examples} cases of {law}"
    text = failure_text(hunted.broken, tmp_path)
    said = parts(text)
    assert len(text.splitlines()) <= MOST_LINES
    assert (said["law broken"], said["meaning"]) == (law, LAWS[law].meaning)
    assert said["got"]
    assert said["want"]
    assert said["got"] != said["want"]
    # What keeps state, or looks at more than its inputs, may decide the same case rightly when asked again.
    assert "flaky" not in said or fault.kind in ("K5", "K10")
    if LAWS[law] in GPU_LAWS:  # thousands of trees: a seed replays them, and none is drawn
        assert f"gpu_law_named({law!r}).run(" in said["replay"]
        return
    most_nodes = getattr(fault.made, "fewest_nodes", MOST_NODES)
    assert hunted.nodes <= most_nodes
    assert said["case"]
    assert said[""][0].startswith("node 0: token ")
    assert len(said[""]) <= 4 * MOST_NODES  # a larger tree is drawn in part
    is_tree_law = LAWS[law] in TREE_LAWS
    name = getattr(fault.made, "backend", fault).name  # a right one, where the fault is before it
    path = next(tmp_path.iterdir())
    assert said["replay"] == f"treeconv replay {path}" + ("" if is_tree_law else f" --backend {name}")
    assert is_tree_law or said["backend"] == name
    if not is_tree_law:
        said_besides = settings_of(LAWS[law])
        assert not said_besides or any(
            words in said["case"] + said.get("beside", "") for words in said_besides
        )
    if "flaky" in said or getattr(fault.made, "is_restless", False):
        return  # its next answer may happen to be right
    with fault.planted() as backend, pytest.raises(LawBroken, match=f"law broken: {law}\n"):
        replay_entry(load_entry(path), backend)


@pytest.mark.parametrize(("fault", "law"), ALSO)
def test_fault_is_also_killed(fault, law):
    hunted = hunt(fault, law, shrink=False)
    assert hunted.broken, f"{fault.name} survived {hunted.examples} cases of {law}"


def test_every_kind_has_a_fault():
    assert {fault.kind for fault in FAULTS} == set(KINDS)
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60


def test_every_law_kills_one():
    """Those that need a device have more in tests/device_faults.py."""
    named = {law for fault in FAULTS for law in fault.killed_by}
    assert named <= set(LAWS)
    assert named >= {law.name for law in (*TREE_LAWS, *BACKEND_LAWS)}


def test_an_ignored_cap_is_shown_on_few_nodes():
    """Though the law goes on to a chain of ten, for samplers that keep small caps."""
    outcome = check_law(law_named("depth-cap"), DepthCapIgnored(), seed=1)
    assert int(re.search(r"(\d+) accept slots", str(outcome.broken))[1]) <= 4
    assert len(outcome.broken.case.requests[0].tree) <= 4
