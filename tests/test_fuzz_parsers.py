"""Contract: every reader refuses in words or understands exactly; and a reader that does neither is found."""

import json
import os
import time
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck

from treeconv import DraftTree, to_verify_input
from treeconv.convert import EagleDraft, from_eagle
from treeconv.corpus import load_entry, save_entry
from treeconv.errors import CorpusError, InvalidArgument, InvalidTree, LawBroken
from treeconv.fuzzing import parsers
from treeconv.fuzzing.flight import FlightRecorder
from treeconv.fuzzing.guided import has_atheris, search_parser
from treeconv.fuzzing.parsers import PARSERS, load_input, parser_named, save_input, shrink_input
from treeconv.fuzzing.session import Config, Session
from treeconv.fuzzing.signature import signature_of
from treeconv.fuzzing.store import Store
from treeconv.fuzzing.supervise import run_campaign
from treeconv.tree_documents import parse_trees


def search(parser, examples):
    settings = hypothesis.settings(
        max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck)
    )

    def test(value):
        parser.run(value)

    hypothesis.seed(1)(settings(hypothesis.given(value=parser.inputs())(test)))()


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_ours_pass(parser):
    search(parser, 150)


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_inputs_are_often_well_formed_and_often_not(parser):
    """Else only one half of the contract is tried."""
    runs, understood = [], set()
    inner = parser.check

    def check(value):
        runs.append(value)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parsers, "_same", lambda *_: understood.add(len(runs)))
            inner(value)

    search(parsers.Parser(parser.name, parser.meaning, check, parser.inputs), 200)
    assert 10 <= len(understood) <= len(runs) - 10


def wrongly(original, break_it):
    def broken(*arguments, **more):
        return break_it(original(*arguments, **more))

    return broken


@pytest.mark.parametrize(
    ("name", "patched", "replacement"),
    [
        ("tree", "from_tree_mask", lambda _: [DraftTree((-1,), (0,))]),
        ("pointers", "to_draft_trees", lambda trees: [DraftTree.chain(tree.token_ids) for tree in trees]),
        ("mask", "from_tree_mask", lambda trees: [DraftTree.chain(range(len(tree))) for tree in trees]),
        ("eagle", "from_eagle", lambda trees: [DraftTree.chain(range(len(tree))) for tree in trees]),
        ("convert-input", "to_draft_trees", lambda trees: trees[:1]),
    ],
)
def test_a_reader_that_misunderstands_is_found(monkeypatch, name, patched, replacement):
    monkeypatch.setattr(parsers, patched, wrongly(getattr(parsers, patched), replacement))
    with pytest.raises(LawBroken) as caught:
        search(parser_named(name), 300)
    lines = str(caught.value).splitlines()
    assert lines[0] == f"law broken: {name}"
    assert [line.split(":")[0].strip() for line in lines[1:]] == ["meaning", "case", "got", "want"]


def test_a_reader_that_raises_something_else_is_found(monkeypatch):
    def raises(*_):
        return {}["no such key"]

    monkeypatch.setattr(parsers, "parse_trees", raises)
    with pytest.raises(LawBroken, match="KeyError: 'no such key'"):
        search(parser_named("convert-input"), 10)


def test_an_input_is_stored_shrunk_and_judged_again(monkeypatch, tmp_path):
    def raises(raw, _where):
        if b"7" in raw:
            raise KeyError("seven")
        raise InvalidArgument("no")

    monkeypatch.setattr(parsers, "parse_trees", raises)
    parser = parser_named("convert-input")
    with pytest.raises(LawBroken) as caught:
        parser.run('{"parents": [-1, 7], "token_ids": [1, 2]}')
    least = shrink_input(parser, caught.value, signature_of(caught.value), lambda: False)
    assert least.parameters == {"input": "7"}
    path = save_input(tmp_path, parser.name, "7")
    again, value = load_input(path)
    with pytest.raises(LawBroken, match="KeyError"):
        again.run(value)
    path.write_text('{"parser": "nobody", "input": 1}')
    with pytest.raises(CorpusError, match="parser='nobody', but must be one of"):
        load_input(path)


# --- what the campaign found in ours ------------------------------------------------------------------


def test_a_candidate_selected_twice_is_refused():
    draft = EagleDraft(
        parent_list=torch.tensor([[-1]]),
        top_scores_index=torch.tensor([[1, 1]]),
        draft_tokens=torch.tensor([[0, 1]]),
        root_token_ids=torch.tensor([0]),
        topk=2,
    )
    with pytest.raises(InvalidTree, match=r"request 0, node 2: top_scores_index=1 is node 1's already"):
        from_eagle(draft)


def test_numbers_that_fit_no_int64_are_refused():
    with pytest.raises(InvalidTree, match=r"token_ids\[0\]=9223372036854775808, but must fit int64"):
        DraftTree((-1,), (2**63,))
    with pytest.raises(
        InvalidArgument, match=r"prefix_lens\[0\]=4611686018427387904, but must be below 2\*\*62"
    ):
        to_verify_input([DraftTree((-1,), (0,))], prefix_lens=[2**62])
    with pytest.raises(InvalidArgument, match="prefix_lens=5, but must be a list"):
        parse_trees(b'{"trees": [{"parents": [-1], "token_ids": [0]}], "prefix_lens": 5}', "here")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("temperature", "nan", "must be finite and >= 0"),
        ("temperature", -1, "must be finite and >= 0"),
        ("final", 2, r"must be in \[0, 1\]"),
        ("final", "nan", r"must be in \[0, 1\]"),
    ],
)
def test_numbers_out_of_range_in_a_corpus_file_are_refused(tmp_path, field, value, message):
    source = next(Path(__file__).parents[1].glob("corpus/regressions/*.json"))
    path = save_entry(tmp_path, load_entry(source))
    document = json.loads(path.read_text())
    document["case"]["requests"][0][field] = value
    path.write_text(json.dumps(document))
    with pytest.raises(CorpusError, match=message):
        load_entry(path)


# --- as a campaign ------------------------------------------------------------------------------------


def test_the_campaign_finds_what_is_planted(tmp_path, monkeypatch, capsys):
    """Without atheris in the tests' environment, by Hypothesis alone."""
    (tmp_path / "sitecustomize.py").write_text(
        "from treeconv.fuzzing import parsers\n"
        "def raises(raw, where): raise KeyError(where)\n"
        "parsers.parse_trees = raises\n"
    )
    root = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}")
    monkeypatch.chdir(tmp_path)
    result = run_campaign(Config("corpus", (), ("parsers",), rounds=1, seconds=200.0, ledger=""))
    assert {job.job.subject for job in result.jobs if job.cases} >= {p.name for p in PARSERS} - {
        "convert-input"
    }
    (found,) = result.findings.values()
    assert (found.law, found.backend) == ("convert-input", "")
    assert found.entry.startswith("regressions/convert-input-")
    parser, value = load_input(Path("corpus") / found.entry)
    assert parser.name == "convert-input"
    parser.run(value)  # kept here, where nothing is planted
    from treeconv.cli import main  # noqa: PLC0415

    assert main(["replay", f"corpus/{found.entry}"]) == 0
    assert capsys.readouterr().out.splitlines() == ["kept: convert-input"]


@pytest.mark.skipif(not has_atheris(), reason="atheris is not installed: pip install 'treeconv[fuzz]'")
def test_coverage_guides_the_search(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text(
        "from treeconv import tree_documents\n"
        "inner = tree_documents.parse_trees\n"
        "def raises(raw, where):\n"
        "    if b'prefix_lens' in raw: raise KeyError(where)\n"
        "    return inner(raw, where)\n"
        "tree_documents.parse_trees = raises\n"
    )
    root = Path(__file__).parents[1]
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{root}:{os.environ.get('PYTHONPATH', '')}")
    recorder = FlightRecorder(tmp_path / "flight")
    config = Config(str(tmp_path / "corpus"), (), ("parsers",), ledger="")
    session = Session(config, Store(tmp_path / "corpus"), recorder, time.monotonic() + 60)
    search_parser("convert-input", session, 0)
    assert recorder.counters["cases"] > 100
    assert recorder.counters["features"] > 20
    kept = list((tmp_path / "corpus" / ".fuzz" / "parsers" / "convert-input").iterdir())
    assert len(kept) == recorder.counters["entries"] > 3
    (found,) = session.store.load().values()
    assert session.found
    assert found.state == "done"
    assert len(load_input(tmp_path / "corpus" / found.entry)[1]) < 60
