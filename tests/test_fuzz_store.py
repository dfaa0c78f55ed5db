"""Contract: one record a signature, however many find it at once; nothing half-written is read as whole."""

import multiprocessing
from pathlib import Path

import numpy as np
import pytest

from treeconv.case import Request, VerifyCase
from treeconv.corpus import CorpusEntry, load_corpus, save_entry
from treeconv.errors import LawBroken
from treeconv.fuzzing.flight import FlightRecorder, read_payload, read_status, reset
from treeconv.fuzzing.signature import Signature, kind_of, signature_of
from treeconv.fuzzing.store import Discovery, Store
from treeconv.tree import DraftTree

SIGNATURE = Signature("critical-coins", "mine", "accepts a child too many")
FOUND = Discovery.of(SIGNATURE, "laws", "law broken: critical-coins")


def entry(note=""):
    tree = DraftTree((-1, 0), (0, 0))
    rows = np.full((2, 2), 0.5, np.float32)
    request = Request(tree, rows, 1.0, np.full(2, 0.5, np.float32), 0.5)
    return CorpusEntry("critical-coins", VerifyCase((request,), kind="probs"), note=note)


def saving(note=""):
    return lambda directory: save_entry(directory, entry(note))


class TestStore:
    def test_claimed_then_settled(self, tmp_path):
        store = Store(tmp_path)
        assert store.claim(SIGNATURE, FOUND, saving("raw"))
        (raw,) = store.load().values()
        assert raw.state == "raw"
        assert (tmp_path / raw.entry).exists()
        assert load_corpus(tmp_path) == ([], [])  # what is not shrunk is no part of the corpus
        settled = store.settle(SIGNATURE, FOUND, saving("shrunk"))
        assert settled == store.get(SIGNATURE)
        assert settled.state == "done"
        assert settled.entry.startswith("regressions/critical-coins-")
        assert not (tmp_path / raw.entry).exists()
        (stored,), errors = load_corpus(tmp_path)
        assert (stored.note, errors) == ("shrunk", [])

    def test_a_signature_is_claimed_once(self, tmp_path):
        store = Store(tmp_path)
        assert store.claim(SIGNATURE, FOUND)
        assert not store.claim(SIGNATURE, FOUND)
        assert not Store(tmp_path).claim(SIGNATURE, FOUND)
        assert store.claim(Signature("critical-coins", "yours", SIGNATURE.kind), FOUND)

    def test_of_many_processes_one_wins(self, tmp_path):
        Store(tmp_path)
        with multiprocessing.get_context("fork").Pool(8) as pool:
            won = pool.map(claim_in, [tmp_path] * 64)
        assert sum(won) == 1
        assert [path.suffix for path in (tmp_path / ".fuzz" / "findings").iterdir()] == [".json"]

    @pytest.mark.parametrize("damage", [b"", b'{"law": ', b"[]", b'{"law": "x"}'])
    def test_a_damaged_record_is_made_again(self, tmp_path, damage):
        store = Store(tmp_path)
        store.claim(SIGNATURE, FOUND)
        (path,) = (tmp_path / ".fuzz" / "findings").iterdir()
        path.write_bytes(damage)
        assert store.load() == {}
        assert store.claim(SIGNATURE, FOUND)
        assert store.get(SIGNATURE) == FOUND


def claim_in(directory):
    return Store(Path(directory)).claim(SIGNATURE, FOUND)


def test_a_lone_surrogate_is_told_as_its_escape(tmp_path):
    broken = LawBroken(failure("\ud800 raised", "nothing"), law="some-law", backend="mine")
    signature = signature_of(broken)
    assert signature.kind == "\\ud800 raised, not nothing".replace("800", "#")
    store = Store(tmp_path)
    assert store.claim(signature, Discovery.of(signature, "laws", str(broken)))
    assert "\\ud800 raised" in store.get(signature).text


def failure(got, want, because=""):
    lines = [
        "law broken: some-law",
        "  meaning:  m",
        "  backend:  mine",
        f"  got:      {got}",
        f"  want:     {want}",
    ]
    return "\n".join([*lines, *([f"  because:  {because}"] if because else [])])


def walk(path, bonus):
    return f"path {' -> '.join(map(str, path))}, then bonus token {bonus} (emitted [1, {bonus}])"


class TestSignature:
    @pytest.mark.parametrize(
        ("got", "want", "kind"),
        [
            (walk([0, 1], 3), walk([0], 2), "accepts a child too many"),
            (walk([0, 2, 5], 3), walk([0, 2], 2), "accepts a child too many"),
            (walk([0], 3), walk([0, 1, 4], 2), "rejects a child"),
            (walk([0, 1], 3), walk([0, 2], 2), "accepts another child"),
            (walk([0, 4], 3), walk([0, 4], 2), "draws another token"),
        ],
    )
    def test_walks_are_told_apart_by_where_they_part(self, got, want, kind):
        because = "node 0: coin 0.25 against boundary 0.125: distance +0.125, ambiguity band 0"
        assert kind_of(failure(got, want, because)) == kind

    @pytest.mark.parametrize(
        ("because", "more"),
        [
            (
                "node 0: coin 0.5 against boundary 0.5: distance +0, ambiguity band 0",
                ", exactly at a boundary",
            ),
            ("node 0: coin 0.5 against boundary 0.5: distance +0.01, ambiguity band 0", ""),
            ("node 2: token 7 has no mass there (p = 0)", ", of no mass"),
            (
                "node 1: token 7 was tested and rejected there, so it is not in the residual",
                ", rejected before",
            ),
            ("node 1: no child may be accepted here (accept slots: 2)", ", beyond the cap"),
        ],
    )
    def test_and_by_why(self, because, more):
        assert kind_of(failure(walk([0], 1), walk([0], 2), because)) == "draws another token" + more

    def test_numbers_sizes_and_folders_do_not_count(self):
        one = failure(
            "IndexError: index 3 is out of bounds [1, 2, 3] (raised at /a/b/mine.py:12)", "a decision"
        )
        two = failure("IndexError: index 17 is out of bounds [4] (raised at /c/mine.py:99)", "a decision")
        other = failure("KeyError: 3 (raised at /a/b/mine.py:12)", "a decision")
        assert kind_of(one) == kind_of(two) != kind_of(other)

    def test_law_and_backend_count(self):
        text = failure(walk([0], 1), walk([0], 2))
        signatures = {
            signature_of(LawBroken(text, law=law, backend=name)).digest
            for law in ("one", "two")
            for name in ("mine", "yours", None)
        }
        assert len(signatures) == 6


class TestFlightRecorder:
    def test_what_is_under_way_outlives_the_writer(self, tmp_path):
        path = tmp_path / "flight"
        assert read_status(path)[0]["cases"] == 0
        recorder = FlightRecorder(path)
        recorder.add("cases", 3)
        assert read_payload(path) is None
        recorder.under_way(("laws", "one", "mine", entry().case))
        counters, running = read_status(path)
        assert counters["cases"] == 3
        assert 0 < running < 5
        assert read_payload(path)[3] == entry().case
        recorder.under_way(("a", "shorter", "one", None))
        assert read_payload(path) == ("a", "shorter", "one", None)
        again = FlightRecorder(path)  # the worker that takes over
        assert again.counters["cases"] == 3
        assert read_payload(path) is None

    def test_a_dead_workers_call_does_not_count_against_the_next(self, tmp_path):
        path = tmp_path / "flight"
        FlightRecorder(path).under_way("x")
        reset(path)
        assert read_status(path)[1] == 0
        reset(tmp_path / "none")
