"""Contract: an entry comes back to the bit, a bad file is named and stops nothing, no write is half done."""

import base64
import json
import os
import stat
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from treeconv import _corpus_codec as codec
from treeconv import corpus
from treeconv.case import Request, VerifyCase
from treeconv.corpus import CorpusEntry, EagleCase, Expected, RawCase, load_corpus, load_entry, save_entry
from treeconv.errors import CorpusError, InvalidArgument, InvalidTree
from treeconv.tree import DraftTree

NASTY = [
    0.0,
    -0.0,
    np.inf,
    -np.inf,
    np.nan,
    1.0,
    -7.0,
    0.1,
    2.0**-149,
    -(2.0**-126),
    3.4028235e38,
    16777217.0,
]
NAN_BITS = [0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF]


def make_entry(law="round-trip", **changes):
    rows = np.array([NASTY, NASTY[::-1], np.arange(12.0)], np.float32)
    tree = DraftTree([-1, 0, 0], [9, 0, 4])
    accept = np.array([0.0, 1.0, np.nextafter(np.float32(1), np.float32(0))], np.float32)
    requests = (
        Request(tree, rows, temperature=0.6, accept=accept, final=0.1),
        Request(DraftTree.chain([3, 3]), rows[:2], temperature=0.0, accept=accept[:2], final=1.0),
    )
    values = {
        "note": "äöü: a test",
        "source": "here",
        "issue": "K1",
        "backend": "eager",
        "parameters": {"seed": 3, "permutation": [1, 0]},
        "expected": Expected(
            accept_index=((0, 1, -1), (4, -1, -1)), accept_token_num=(1, 0), tokens=((0, 4), (9,))
        ),
    }
    case = VerifyCase(requests, num_draft_tokens=4, depth_cap=3)
    return CorpusEntry(law, case, **(values | changes))


def make_raw(**changes):
    values = {
        "candidates": ((9, 5, 7), (1, 2, 3)),
        "retrieve_next_token": ((2, -1, -1), (1, 2, -1)),  # request 0: children 2 then 1
        "retrieve_next_sibling": ((-1, -1, 1), (-1, -1, -1)),
        "rows": np.array(NASTY * 2, np.float32).reshape(2, 3, 4),
        "temperature": (0.01, 0.0),
        "accept": np.array([[0.25, 0.5, 0.1], [0, 0, 0]], np.float32),
        "final": np.array([0.5, 0.3], np.float32),
        "depth_cap": 2,
    }
    return RawCase(**(values | changes))


def make_eagle(**changes):
    values = {
        "parent_list": ((-1,),),
        "top_scores_index": ((0, 1),),
        "draft_tokens": ((5, 7),),
        "root_token_ids": (9,),
        "topk": 2,
        "prefix_lens": (3,),
        "candidates": ((9, 5, 7),),
        "retrieve_index": ((0, 1, 2),),
        "retrieve_next_token": ((1, -1, -1),),
        "retrieve_next_sibling": ((-1, 2, -1),),
        "positions": ((3, 4, 4),),
    }
    return EagleCase(**(values | changes))


# --- round trip ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "entry",
    [
        make_entry(),
        make_entry(expected=None, parameters={}),
        make_entry(lossless=False, thresholds=(0.0, 0.5)),
        make_entry(thresholds=(1.0, 1.0)),
        CorpusEntry("raw", make_raw(), expected=Expected(predicts=(1, -1, 2, 3, -1, -1))),
        CorpusEntry("raw", make_raw(kind="probs", rows_dtype="float16")),
        CorpusEntry("layout", make_eagle()),
    ],
)
def test_an_entry_comes_back_as_it_was(tmp_path, entry):
    path = save_entry(tmp_path, entry)
    loaded = load_entry(path)
    assert loaded == entry
    assert loaded.path == path
    assert path.name.startswith(entry.law + "-")
    assert path.suffix == ".json"


def test_every_float_keeps_its_bits(tmp_path):
    """Includes NaN payloads and the sign of zero, which == cannot see."""
    entry = make_entry()
    loaded = load_entry(save_entry(tmp_path, entry))
    for before, after in zip(entry.case.requests, loaded.case.requests, strict=True):
        assert before.rows.tobytes() == after.rows.tobytes()
        assert before.accept.tobytes() == after.accept.tobytes()
        assert before.temperature.hex() == after.temperature.hex()


@pytest.mark.parametrize("values", [4, codec._BASE64_ABOVE + 1])
def test_float_codec_on_bits(values):
    """Readable lists and, for big arrays, base64: random bit patterns, all NaN kinds among them."""
    bits = np.random.default_rng(0).integers(0, 2**32, values, np.uint32)
    bits[:4] = NAN_BITS
    array = bits.view(np.float32)
    stored = json.loads(json.dumps(codec.encode_floats(array)))
    assert isinstance(stored, dict) == (values > codec._BASE64_ABOVE)
    assert codec.decode_floats(stored, "x", 1).view(np.uint32).tolist() == bits.tolist()


def test_float_codec_on_many_readable_values():
    rng = np.random.default_rng(1)
    for _ in range(200):
        bits = rng.integers(0, 2**32, 64, np.uint32)
        stored = json.loads(json.dumps(codec.encode_floats(bits.view(np.float32))))
        assert codec.decode_floats(stored, "x", 1).view(np.uint32).tolist() == bits.tolist()


def test_big_rows_round_trip_in_a_file(tmp_path):
    rows = np.random.default_rng(0).standard_normal((2, codec._BASE64_ABOVE)).astype(np.float32)
    case = VerifyCase((Request(DraftTree.chain([1, 2]), rows, 1.0, np.zeros(2, np.float32), 0.0),))
    path = save_entry(tmp_path, CorpusEntry("big", case))
    assert b"float32_base64" in path.read_bytes()
    assert load_entry(path).case == case


def test_small_cases_are_readable(tmp_path):
    """Integers as integers, one row a line, other floats as float.hex()."""
    text = save_entry(tmp_path, make_entry()).read_text()
    assert "[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]" in text
    assert (0.6).hex() in text
    assert '"parents": [-1, 0, 0],' in text


# --- names and writing --------------------------------------------------------------------------------


def test_same_content_is_written_once(tmp_path):
    first = save_entry(tmp_path, make_entry())
    os.utime(first, (1, 1))
    assert save_entry(tmp_path, make_entry()) == first
    assert first.stat().st_mtime == 1
    assert [file.name for file in tmp_path.iterdir()] == [first.name]


def test_a_loaded_entry_is_the_same_content(tmp_path):
    """`path` is no content: saving what was loaded writes nothing new."""
    first = save_entry(tmp_path, make_entry())
    assert save_entry(tmp_path, load_entry(first)) == first


@pytest.mark.parametrize("change", [{"note": "other"}, {"issue": ""}, {"parameters": {"seed": 4}}])
def test_other_content_has_another_name(tmp_path, change):
    assert save_entry(tmp_path, make_entry()) != save_entry(tmp_path, make_entry(**change))
    assert len(list(tmp_path.iterdir())) == 2


def test_signed_zero_is_other_content(tmp_path):
    plus, minus = (make_raw(final=np.array([z, 0.5], np.float32)) for z in (0.0, -0.0))
    assert plus != minus
    assert save_entry(tmp_path, CorpusEntry("z", plus)) != save_entry(tmp_path, CorpusEntry("z", minus))


def test_two_contents_with_one_short_hash_are_both_kept(tmp_path):
    path = save_entry(tmp_path, make_entry())
    squatter = save_entry(tmp_path / "other", make_entry(note="squatter"))
    path.write_bytes(squatter.read_bytes())
    second = save_entry(tmp_path, make_entry())
    assert second != path
    assert load_entry(second) == make_entry()
    assert load_entry(path).note == "squatter"


def test_a_damaged_file_is_replaced(tmp_path):
    path = save_entry(tmp_path, make_entry())
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    assert save_entry(tmp_path, make_entry()) == path
    assert path.read_bytes() == whole


@pytest.mark.parametrize("stage", ["write", "fsync", "replace"])
def test_a_crash_leaves_the_old_file_whole(tmp_path, monkeypatch, stage):
    """Whatever fails before the rename: the old bytes stay, no temporary file is left, the error is told."""
    path = tmp_path / "x.json"
    path.write_bytes(b"old")

    def crash(*_):
        raise OSError("disk full")

    if stage == "write":
        content, error = "text: a binary file refuses it", TypeError
    else:
        content, error = b"new", OSError
        monkeypatch.setattr(codec.os, stage, crash)
    with pytest.raises(error):
        codec.atomic_write(path, content)
    assert path.read_bytes() == b"old"
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_a_kill_between_write_and_replace_leaves_the_old_file_whole(tmp_path):
    """No cleanup runs, as under SIGKILL: the old file is whole and the leftover is not taken for an entry."""
    source = save_entry(tmp_path / "source", make_entry())
    old = save_entry(tmp_path / "corpus", make_entry())
    damaged = old.read_bytes()[:-10]
    old.write_bytes(damaged)
    code = (
        "import os, sys; from treeconv.corpus import load_entry, save_entry\n"
        "os.replace = lambda *_: os._exit(9)\n"
        "save_entry(sys.argv[2], load_entry(sys.argv[1]))"
    )
    arguments = [sys.executable, "-c", code, str(source), str(old.parent)]
    assert subprocess.run(arguments, check=False).returncode == 9
    assert old.read_bytes() == damaged
    assert len(list(old.parent.iterdir())) == 2
    entries, errors = load_corpus(old.parent)
    assert entries == []
    assert len(errors) == 1
    save_entry(old.parent, make_entry())
    assert load_entry(old) == make_entry()


def test_content_is_synced_before_the_rename(tmp_path, monkeypatch):
    calls = []
    real = {name: getattr(os, name) for name in ("fsync", "replace")}
    for name, function in real.items():
        monkeypatch.setattr(codec.os, name, lambda *a, n=name, f=function: (calls.append(n), f(*a))[1])
    save_entry(tmp_path, make_entry())
    assert calls == ["fsync", "replace"]


def test_files_have_the_usual_mode(tmp_path):
    umask = os.umask(0o022)
    try:
        path = save_entry(tmp_path, make_entry())
    finally:
        os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


# --- bad files ----------------------------------------------------------------------------------------


def edit(path, change, fix_checksum=True):
    document = json.loads(path.read_text())
    change(document)
    if fix_checksum:
        body = {key: value for key, value in document.items() if key not in ("schema", "sha256")}
        document["sha256"] = codec.sha256(codec.canonical(body))
    path.write_text(json.dumps(document))


def request0(document):
    return document["case"]["requests"][0]


BAD_EDITS = {
    "law": (lambda d: d.update(law=3), "law is a int"),
    "law that names no file": (lambda d: d.update(law="../x"), "law='../x'"),
    "note": (lambda d: d.update(note=None), "note is null"),
    "lossless": (lambda d: d.update(lossless="yes"), "lossless='yes'"),
    "lossless under a threshold": (lambda d: d.update(thresholds=[0, 0]), "lossless must be False"),
    "thresholds": (lambda d: d.update(thresholds=[1]), "two numbers"),
    "parameters": (lambda d: d.update(parameters=[]), "parameters=[]"),
    "missing key": (lambda d: d.pop("issue"), "lacks 'issue'"),
    "unknown key": (lambda d: d.update(isue="typing error"), "unknown keys 'isue'"),
    "case": (lambda d: d.update(case=[]), "case.type=None"),
    "case type": (lambda d: d["case"].update(type="graph"), "case.type='graph'"),
    "case key": (lambda d: d["case"].pop("kind"), "case lacks 'kind'"),
    "kind": (lambda d: d["case"].update(kind="scores"), "kind='scores'"),
    "rows_dtype": (lambda d: d["case"].update(rows_dtype="int8"), "rows_dtype='int8'"),
    "requests": (lambda d: d["case"].update(requests={}), "case.requests"),
    "no request": (lambda d: d["case"].update(requests=[]), "requests=()"),
    "slots": (lambda d: d["case"].update(num_draft_tokens=2), "num_draft_tokens=2, but must be >= 3"),
    "depth cap": (lambda d: (d["case"].update(depth_cap=0), d.update(expected=None)), "depth_cap=0"),
    "parents type": (lambda d: request0(d).update(parents=[-1, 0, "0"]), "requests[0].parents[2]='0'"),
    "parents rule": (lambda d: request0(d).update(parents=[-1, 2, 0]), "parents[1]=2"),
    "boolean for integer": (lambda d: request0(d).update(parents=[-1, False, 0]), "parents[1]=False"),
    "huge token": (lambda d: request0(d).update(token_ids=[2**70, 1, 2]), "64 bits"),
    "rows shape": (lambda d: request0(d)["rows"].pop(), "rows.shape=(2, 12)"),
    "rows ragged": (lambda d: request0(d)["rows"][1].pop(), "rectangular"),
    "rows empty": (lambda d: request0(d).update(rows=[]), "non-empty"),
    "rows of one dimension": (lambda d: request0(d).update(rows=[1, 2, 3]), "requests[0].rows[0] is a int"),
    "a decimal float": (lambda d: request0(d)["rows"][0].__setitem__(1, 0.5), "rows[0][1]=0.5"),
    "no float": (lambda d: request0(d)["rows"][0].__setitem__(1, "1.5"), "rows[0][1]='1.5'"),
    "no float32": (lambda d: request0(d)["rows"][0].__setitem__(1, (0.1).hex()), "a float32 exactly"),
    "beyond float32": (lambda d: request0(d)["rows"][0].__setitem__(1, "0x1p+999"), "a float32 exactly"),
    "beyond double": (lambda d: request0(d)["rows"][0].__setitem__(1, "0x1p+9999"), "0x1p+9999"),
    "NaN bits": (lambda d: request0(d)["rows"][0].__setitem__(1, "nan:0x00000001"), "bits of a NaN"),
    "base64": (
        lambda d: request0(d).update(rows={"shape": [3, 12], "float32_base64": "!"}),
        "is not base64",
    ),
    "base64 size": (
        lambda d: request0(d).update(
            rows={"shape": [3, 12], "float32_base64": base64.b64encode(b"1234").decode()}
        ),
        "4 bytes",
    ),
    "vocabularies": (
        lambda d: d["case"]["requests"][1].update(rows=[[1], [1]]),
        "vocabularies",
    ),
    "coins shape": (lambda d: request0(d)["accept"].pop(), "accept.shape=(2,)"),
    "temperature": (lambda d: request0(d).update(temperature="warm"), "temperature='warm'"),
    "expected shape": (lambda d: d["expected"].update(predicts=[1]), "expected.predicts holds 1"),
    "expected width": (lambda d: d["expected"]["accept_index"][0].pop(), "row of 2, but must have 3"),
    "expected key": (lambda d: d["expected"].update(word=[1]), "unknown keys 'word'"),
}


@pytest.mark.parametrize("name", BAD_EDITS)
def test_wrong_content_is_refused_with_file_and_place(tmp_path, name):
    """The checksum is made to fit: what is caught is the content itself."""
    change, message = BAD_EDITS[name]
    path = save_entry(tmp_path, make_entry())
    edit(path, change)
    with pytest.raises(CorpusError) as caught:
        load_entry(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


BAD_RAW = {
    "rows": (lambda c: c["rows"].pop(), "must hold 1 rows of 3"),
    "candidates": (lambda c: c["candidates"][0].pop(), "candidates must hold"),
    "pointer type": (
        lambda c: c["retrieve_next_token"][0].__setitem__(0, None),
        "retrieve_next_token[0][0]=None",
    ),
    "temperature": (lambda c: c.update(temperature=1), "temperature must be a list"),
    "temperature count": (lambda c: c["temperature"].pop(), "len(temperature)=1"),
    "coins": (lambda c: c["final"].pop(), "final.shape=(1,)"),
    "depth cap": (lambda c: c.update(depth_cap=0), "depth_cap=0"),
    "kind": (lambda c: c.update(kind="scores"), "kind='scores'"),
}


@pytest.mark.parametrize("name", BAD_RAW)
def test_wrong_raw_content_is_refused(tmp_path, name):
    change, message = BAD_RAW[name]
    path = save_entry(tmp_path, CorpusEntry("raw", make_raw()))
    edit(path, lambda d: change(d["case"]))
    with pytest.raises(CorpusError) as caught:
        load_entry(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)


BAD_EAGLE = {
    "positions": (lambda c: c["positions"][0].pop(), "positions must hold 1 rows of 3"),
    "draft tokens": (lambda c: c["draft_tokens"][0].append(1), "draft_tokens must hold 1 rows of 2"),
    "prefix": (lambda c: c.update(prefix_lens=[]), "prefix_lens must hold 1"),
    "empty": (lambda c: c.update(candidates=[]), "must not be empty"),
    "topk": (lambda c: c.update(topk="2"), "case.topk='2'"),
}


@pytest.mark.parametrize("name", BAD_EAGLE)
def test_wrong_building_example_is_refused(tmp_path, name):
    change, message = BAD_EAGLE[name]
    path = save_entry(tmp_path, CorpusEntry("layout", make_eagle()))
    edit(path, lambda d: change(d["case"]))
    with pytest.raises(CorpusError, match=message.replace("[", r"\[")):
        load_entry(path)


def make_filtered(**changes):
    """The usual entry, its first request with filters; ``changes`` are those of the request."""
    entry = make_entry()
    values = {"top_k": 3, "top_p": 0.9, "min_p": 0.05} | changes
    first, second = entry.case.requests
    case = replace(entry.case, requests=(replace(first, **values), second), filter_order="joint")
    return replace(entry, case=case)


def test_filters_come_back_as_they_were(tmp_path):
    entry = make_filtered()
    path = save_entry(tmp_path, entry)
    loaded = load_entry(path)
    assert loaded == entry
    assert json.loads(path.read_text())["schema"] == 2
    first, second = loaded.case.requests
    assert (first.top_k, first.top_p.hex(), first.min_p.hex()) == (
        3,
        "0x1.cccccc0000000p-1",
        "0x1.99999a0000000p-5",
    )
    assert (second.top_k, second.top_p, second.min_p) == (None, 1.0, 0.0)
    assert loaded.case.filter_order == "joint"


@pytest.mark.parametrize(
    "changes",
    [{"top_k": 2}, {"top_k": None}, {"top_p": 0.5}, {"min_p": 0.0}],
    ids=["top_k", "no top_k", "top_p", "no min_p"],
)
def test_each_filter_counts_as_content(tmp_path, changes):
    entries = [make_filtered(), make_filtered(**changes)]
    assert entries[0] != entries[1]
    assert len({save_entry(tmp_path, entry) for entry in entries}) == 2


def test_without_filters_the_file_is_what_version_1_wrote(tmp_path):
    """Names and bytes of stored cases must not move: the seeds' checksums stand in SHA256SUMS."""
    seed = next(Path("corpus/seeds").glob("oracle-agreement-*.json"))
    again = save_entry(tmp_path, load_entry(seed))
    assert (again.name, again.read_bytes()) == (seed.name, seed.read_bytes())
    path = save_entry(tmp_path, make_entry())
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    assert "filter_order" not in document["case"]
    assert "top_k" not in document["case"]["requests"][0]


BAD_FILTERS = {
    "top_k of 0": (lambda d: request0(d).update(top_k=0), "top_k=0, but must be"),
    "top_k of 2.5": (lambda d: request0(d).update(top_k=2.5), "top_k=2.5"),
    "top_k true": (lambda d: request0(d).update(top_k=True), "top_k=True"),
    "top_p of 0": (lambda d: request0(d).update(top_p=0), "top_p=0.0, but must be in (0, 1]"),
    "top_p no float32": (lambda d: request0(d).update(top_p=(0.1).hex()), "must be a float32 exactly"),
    "top_p null": (lambda d: request0(d).update(top_p=None), "top_p"),
    "min_p above 1": (lambda d: request0(d).update(min_p=2), "min_p=2.0, but must be in [0, 1]"),
    "min_p NaN": (lambda d: request0(d).update(min_p="nan"), "min_p"),
    "min_p missing": (lambda d: request0(d).pop("min_p"), "lacks 'min_p'"),
    "another order": (lambda d: d["case"].update(filter_order="last"), "filter_order='last'"),
    "no order": (lambda d: d["case"].pop("filter_order"), "lacks 'filter_order'"),
    "an unknown filter": (lambda d: request0(d).update(typical_p=1), "unknown keys 'typical_p'"),
}


@pytest.mark.parametrize("name", BAD_FILTERS)
def test_wrong_filters_are_refused(tmp_path, name):
    change, message = BAD_FILTERS[name]
    path = save_entry(tmp_path, make_filtered())
    edit(path, change)
    with pytest.raises(CorpusError) as caught:
        load_entry(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_version_1_takes_no_filters(tmp_path):
    path = save_entry(tmp_path, make_filtered())
    edit(path, lambda d: d.update(schema=1))
    with pytest.raises(CorpusError, match="unknown keys"):
        load_entry(path)


def make_ruled(**changes):
    """The usual trees as chains, verified by the chain rule; ``changes`` are those of the second request."""
    entry = make_entry()
    laws = np.zeros((2, 12), np.float32)
    laws[0, :3], laws[1, :2] = [0.5, 0.25, 0.25], [float("nan"), 1]
    second = replace(entry.case.requests[1], draft_probs=laws)
    requests = (replace(second, temperature=0.25), replace(second, **changes))
    case = replace(entry.case, requests=requests, rule="chain")
    return replace(entry, case=case, expected=None)


def test_a_rule_and_its_draft_laws_come_back_as_they_were(tmp_path):
    entry = make_ruled()
    path = save_entry(tmp_path, entry)
    loaded = load_entry(path)
    assert loaded == entry
    assert json.loads(path.read_text())["schema"] == 3
    assert loaded.case.rule == "chain"
    assert np.isnan(loaded.case.requests[1].draft_probs[1, 0])
    match = replace(make_entry().case, rule="draw_and_match")
    again = load_entry(save_entry(tmp_path, replace(entry, case=match)))
    assert (again.case, again.case.requests[0].draft_probs) == (match, None)


def test_draft_laws_count_as_content(tmp_path):
    other = make_ruled(draft_probs=np.full((2, 12), 0.125, np.float32))
    assert other != make_ruled()
    assert len({save_entry(tmp_path, entry) for entry in (make_ruled(), other)}) == 2


BAD_RULES = {
    "an unknown rule": (lambda d: d["case"].update(rule="typical"), "rule='typical', but must be one of"),
    "no rule": (lambda d: d["case"].pop("rule"), "lacks 'rule'"),
    "no draft law": (lambda d: request0(d).update(draft_probs=None), "draft_probs must be given"),
    "draft laws that the rule never reads": (
        lambda d: d["case"].update(rule="draw_and_match"),
        "draft_probs must be None",
    ),
    "a draft law too few": (lambda d: request0(d)["draft_probs"].pop(), "draft_probs.shape=(1, 12)"),
    "two children": (
        lambda d: d["case"]["requests"].append(
            request0(d)
            | {"parents": [-1, 0, 0], "token_ids": [9, 0, 1], "accept": [0] * 3}
            | {"rows": [*request0(d)["rows"], [0] * 12], "draft_probs": [[0] * 12] * 3}
        ),
        "has a node with two children",
    ),
}


@pytest.mark.parametrize("name", BAD_RULES)
def test_wrong_rules_are_refused(tmp_path, name):
    change, message = BAD_RULES[name]
    path = save_entry(tmp_path, make_ruled())
    edit(path, change)
    with pytest.raises(CorpusError) as caught:
        load_entry(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


BAD_BYTES = {
    "empty": (lambda _: b"", "not JSON, or truncated (0 bytes)"),
    "not UTF-8": (lambda raw: b"\xff" + raw, "not JSON"),
    "not JSON": (lambda _: b"hello", "not JSON"),
    "a list": (lambda _: b"[]", "must hold an object"),
    "a NaN literal": (lambda _: b'{"schema": NaN}', "NaN is no JSON"),
    "deep nesting": (lambda _: b"[" * 100_000, "not JSON"),
    "no schema": (lambda raw: raw.replace(b'"schema": 1', b'"scheme": 1'), "schema=None"),
    "a later schema": (lambda raw: raw.replace(b'"schema": 1', b'"schema": 4'), "schema=4"),
    "a schema with more keys": (
        lambda raw: raw.replace(b'"schema": 1', b'"schema": 2'),
        "lacks 'filter_order'",
    ),
    "schema true": (lambda raw: raw.replace(b'"schema": 1', b'"schema": true'), "schema=True"),
    "another note": (lambda raw: raw.replace(b"a test", b"a tesu"), "checksum mismatch"),
    "another checksum": (lambda raw: raw.replace(b'"sha256": "', b'"sha256": "0'), "checksum mismatch"),
    "another coin": (lambda raw: raw.replace(b"0x1.fffffep-1", b"0x1.fffffcp-1"), "checksum mismatch"),
}


@pytest.mark.parametrize("name", BAD_BYTES)
def test_damaged_bytes_are_refused(tmp_path, name):
    damage, message = BAD_BYTES[name]
    path = save_entry(tmp_path, make_entry())
    damaged = damage(path.read_bytes())
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    with pytest.raises(CorpusError) as caught:
        load_entry(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert message in str(caught.value)


def test_truncation_anywhere_is_refused(tmp_path):
    path = save_entry(tmp_path, make_entry())
    whole = path.read_bytes().rstrip()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(CorpusError, match="truncated"):
            load_entry(path)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(CorpusError, match=r"nothing\.json: cannot be read: No such file"):
        load_entry(tmp_path / "nothing.json")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(CorpusError, match=r"folder\.json: cannot be read"):
        load_entry(tmp_path / "folder.json")


def test_one_bad_file_of_several_stops_none(tmp_path):
    paths = [save_entry(tmp_path / folder, make_entry(note=str(n))) for n, folder in enumerate("aabc")]
    paths[1].write_bytes(paths[1].read_bytes()[:50])
    entries, errors = load_corpus(tmp_path)
    assert [entry.path for entry in entries] == sorted(set(paths) - {paths[1]})
    assert len(errors) == 1
    assert str(paths[1]) in str(errors[0])


def test_a_missing_corpus_is_no_empty_corpus(tmp_path):
    with pytest.raises(CorpusError, match="no such directory"):
        load_corpus(tmp_path / "sedes")


# --- arguments ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"law": "a/b"}, "law='a/b'"),
        ({"law": ""}, "law=''"),
        ({"thresholds": (0.5, 1.0)}, "lossless must be False"),
        ({"expected": Expected(accept_token_num=(1,))}, "accept_token_num holds 1 items, but must hold 2"),
        ({"expected": Expected(accept_index=((0,), (4,)))}, "row of 1, but must have 3"),
    ],
)
def test_an_entry_refuses_what_cannot_be_right(changes, message):
    with pytest.raises(InvalidArgument) as caught:
        make_entry(**changes)
    assert message in str(caught.value)


def test_an_eagle_case_takes_no_expected():
    with pytest.raises(InvalidArgument, match="EagleCase"):
        CorpusEntry("layout", make_eagle(), expected=Expected())


@pytest.mark.parametrize("value", [0.5, (1, 2), {1: 2}, object(), [[0.5]]])
def test_parameters_that_json_would_change_are_refused(tmp_path, value):
    with pytest.raises(InvalidArgument, match="JSON values without floats"):
        save_entry(tmp_path, make_entry(parameters={"x": value}))
    assert list(tmp_path.iterdir()) == []


# --- raw cases ----------------------------------------------------------------------------------------


def test_raw_tensors_keep_the_slots_and_walk_the_pointers():
    tensors = make_raw().tensors()
    assert tensors.batch.candidates.tolist() == [[9, 5, 7], [1, 2, 3]]
    assert tensors.batch.retrieve_next_token.tolist() == [[2, -1, -1], [1, 2, -1]]
    assert tensors.batch.retrieve_index.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert tensors.batch.positions.tolist() == [[0, 1, 1], [0, 1, 2]]
    assert tensors.depth_cap == 2
    assert tensors.coins.final.numpy().tobytes() == make_raw().final.tobytes()


def test_renumbered_follows_the_test_order():
    case = make_raw()
    requests = case.renumbered().requests
    assert requests[0].tree == DraftTree([-1, 0, 0], [9, 7, 5])
    assert requests[0].rows.tobytes() == case.rows[0, [0, 2, 1]].tobytes()
    assert requests[0].accept.tolist() == case.accept[0, [0, 2, 1]].tolist()
    assert requests[1].tree == DraftTree.chain([1, 2, 3])


def test_a_malformed_raw_case_can_be_stored_and_handed_over(tmp_path):
    """Siblings with one token and a cycle: faults to keep, so nothing hangs and no tree is claimed."""
    twins = make_raw(candidates=((9, 5, 5), (1, 2, 3)))
    cycle = make_raw(retrieve_next_sibling=((-1, 2, 1), (-1, -1, -1)))
    for case in (twins, cycle):
        assert load_entry(save_entry(tmp_path, CorpusEntry("malformed", case))).case == case
        case.tensors()
    with pytest.raises(InvalidTree, match="repeats its sibling"):
        twins.renumbered()


def test_importing_the_corpus_loads_neither_torch_nor_hypothesis():
    code = "import sys, treeconv.corpus; sys.exit(bool({'torch', 'hypothesis'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_public_names_exist():
    assert all(hasattr(corpus, name) for name in corpus.__all__)
