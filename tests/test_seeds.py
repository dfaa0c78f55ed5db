"""Contract: what lies in corpus/seeds loads, is whole and small, and says what its sources printed."""

import hashlib
import importlib.util
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from treeconv.convert import from_eagle, to_draft_trees, to_eagle, to_verify_input, tree_mask
from treeconv.corpus import EagleCase, RawCase, load_corpus, load_traces
from treeconv.tree import DraftTree, TreeMaskMode

ROOT = Path(__file__).parents[1]
SEEDS = ROOT / "corpus" / "seeds"
TRACE_NAMES = [
    "alphabet-deep",
    "chat-best-first",
    "code-best-first",
    "counting-chain",
    "essay-chain",
    "rhyme-binary",
    "story-star",
    "weekdays-best-first",
]


@pytest.fixture(scope="module")
def entries():
    loaded, errors = load_corpus(SEEDS)
    assert errors == []
    return loaded


@pytest.fixture(scope="module")
def traces():
    loaded, errors = load_traces(SEEDS)
    assert errors == []
    return loaded


def greedy_walk(tree, rows):
    """Nodes accepted at T = 0 (root first): follow the lowest-index argmax while a child carries it."""
    path = [0]
    while True:
        best = int(rows[path[-1]].argmax())
        step = [child for child in tree.children[path[-1]] if tree.token_ids[child] == best]
        if not step:
            return path
        path += step


def laws(rows, temperature):
    scaled = (rows.astype(np.float64) - rows.max(-1, keepdims=True)) / temperature
    weights = np.exp(scaled)
    return weights / weights.sum(-1, keepdims=True)


# --- the folder ---------------------------------------------------------------------------------------


def test_the_folder_holds_what_its_sums_say():
    """`cd corpus/seeds && sha256sum *.json *.trace > SHA256SUMS` after adding a file on purpose."""
    lines = (SEEDS / "SHA256SUMS").read_text().splitlines()
    listed = dict(reversed(line.split()) for line in lines)
    present = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in SEEDS.iterdir()
        if file.suffix in {".json", ".trace"}
    }
    assert present == listed


def test_the_folder_is_small_and_loads_quickly():
    assert sum(file.stat().st_size for file in SEEDS.iterdir()) < 6_000_000
    started = time.perf_counter()
    load_corpus(SEEDS)
    load_traces(SEEDS)
    assert time.perf_counter() - started < 5  # measured: 0.3 s


# --- SGLang's kernel test -----------------------------------------------------------------------------


def vectors(entries, *, lossless):
    return [e for e in entries if isinstance(e.case, RawCase) and e.lossless is lossless]


def test_the_kernel_vectors_are_all_there(entries):
    for lossless, threshold in ((True, 1), (False, 0)):
        found = vectors(entries, lossless=lossless)
        assert len(found) == 3
        assert {entry.thresholds for entry in found} == {(threshold, threshold)}
        assert {entry.law for entry in found} == {"oracle-agreement"}
        coins = {entry.case.accept.tobytes() + entry.case.final.tobytes() for entry in found}
        assert len(coins) == 3


def walk_one_hot(case, request, *, accept_anything):
    """SGLang's walk where every law is one-hot: accept the child that carries the peak, or just the first."""
    first, sibling = case.retrieve_next_token[request], case.retrieve_next_sibling[request]
    peak = case.rows[request].argmax(-1)
    path, tokens = [0], []
    while len(path) < case.depth_cap:
        child = first[path[-1]]
        while child != -1 and not accept_anything and case.candidates[request][child] != peak[path[-1]]:
            child = sibling[child]
        if child == -1:
            break
        tokens.append(case.candidates[request][child])
        path.append(child)
    return path, [*tokens, int(peak[path[-1]])]


@pytest.mark.parametrize("lossless", [True, False])
def test_the_kernel_vectors_follow_from_their_inputs(entries, lossless):
    """At T = .01 a gap of 9 is e^-900: float32 holds 0, each row is one-hot, and no coin matters."""
    for entry in vectors(entries, lossless=lossless):
        case, slots = entry.case, len(entry.case.candidates[0])
        assert laws(case.rows, case.temperature[0]).astype(np.float32).max(-1).min() == 1.0
        predicts, accept_index = [-1] * (2 * slots), []
        for request in range(2):
            path, tokens = walk_one_hot(case, request, accept_anything=not lossless)
            assert tuple(tokens) == entry.expected.tokens[request]
            assert len(path) - 1 == entry.expected.accept_token_num[request]
            for slot, token in zip(path, tokens, strict=True):
                predicts[request * slots + slot] = token
            row = [request * slots + slot for slot in path]
            accept_index.append((*row, *[-1] * (case.depth_cap - len(row))))
        assert tuple(predicts) == entry.expected.predicts
        assert tuple(accept_index) == entry.expected.accept_index


def test_the_lossy_vectors_do_leave_the_law(entries):
    """Under thresholds 0 they emit tokens of zero mass: marked, or a law would flag a right sampler."""
    for entry in vectors(entries, lossless=False):
        first_token = entry.expected.tokens[0][0]
        assert laws(entry.case.rows[0], entry.case.temperature[0])[0, first_token] < 2.0**-149


def test_the_kernel_vectors_as_trees(entries):
    """Request 1 tests slot 4 before slot 1, so no tree in node order holds it; renumbered, one does."""
    case = vectors(entries, lossless=True)[0].case
    requests = case.renumbered().requests
    assert requests[0].tree == DraftTree([-1, 0, 0, 1, 2, 4], [0, 1, 3, 2, 4, 5])
    assert requests[1].tree == DraftTree([-1, 0, 0, 1, 2, 4], [7, 11, 8, 12, 9, 10])
    tensors = case.tensors()
    assert tensors.batch.candidates.tolist() == [list(row) for row in case.candidates]
    assert tensors.batch.positions.tolist() == [[0, 1, 2, 1, 2, 3], [0, 1, 2, 3, 1, 2]]


# --- SGLang's 8-node build example --------------------------------------------------------------------


def test_the_build_example_comes_out_as_printed(entries):
    (case,) = [entry.case for entry in entries if isinstance(entry.case, EagleCase)]
    trees = from_eagle(case.draft())
    batch = to_verify_input(trees, prefix_lens=case.prefix_lens)
    names = ("candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "positions")
    for name in names:
        assert getattr(batch, name).tolist() == [list(row) for row in getattr(case, name)], name
    assert to_draft_trees(batch) == trees
    assert from_eagle(to_eagle(trees)) == trees


def test_the_build_example_s_mask(entries):
    """The mask against ancestors read off the *printed* pointers, not off our trees."""
    (case,) = [entry.case for entry in entries if isinstance(entry.case, EagleCase)]
    want = []
    for first, sibling, prefix in zip(
        case.retrieve_next_token, case.retrieve_next_sibling, case.prefix_lens, strict=True
    ):
        seen = {0: {0}}
        for node in range(8):
            child = first[node]
            while child != -1:
                seen[child] = seen[node] | {child}
                child = sibling[child]
        for node in range(8):
            want += [True] * prefix + [other in seen[node] for other in range(8)]
    batch = to_verify_input(from_eagle(case.draft()), prefix_lens=case.prefix_lens)
    mask = tree_mask(batch, TreeMaskMode.FULL_MASK)
    assert mask.numel() == 8 * (5 + 8) + 8 * (10 + 8)
    assert mask.tolist() == want


def test_the_vectors_are_what_the_script_writes(tmp_path, monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location("write_vectors", ROOT / "ci" / "write_vectors.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(sys, "argv", ["write_vectors.py", "--out", str(tmp_path)])
    script.main()
    assert len(capsys.readouterr().out.splitlines()) == 7
    written = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    assert written == {file.name: file.read_bytes() for file in SEEDS.glob("*.json")}


# --- the recorded traces ------------------------------------------------------------------------------


def test_the_traces_are_all_there(traces):
    assert [trace.name for trace in traces] == TRACE_NAMES
    for trace in traces:
        assert trace.path.name == f"{trace.name}.trace"
        assert trace.vocab_size == 49152
        assert trace.temperatures == (0.0, 0.6, 1.0)
        assert "SmolLM2-135M-Instruct" in trace.model
        assert trace.drafter
        assert trace.prompt


def test_rows_are_finite_bfloat16_values(traces):
    for trace in traces:
        assert np.isfinite(trace.rows).all()
        tensor = torch.from_numpy(trace.rows.copy())
        assert torch.equal(tensor.bfloat16().float(), tensor)
        assert len({row.tobytes() for row in trace.rows}) == len(trace.rows)


def test_trees_are_valid_and_positions_fit(traces):
    for trace in traces:
        batch = to_verify_input([trace.tree], prefix_lens=[trace.prefix_len])
        assert tuple(batch.positions[0].tolist()) == trace.positions
        assert to_draft_trees(batch) == [trace.tree]


def test_shapes_vary(traces):
    trees = {trace.name: trace.tree for trace in traces}
    widest = {name: max(map(len, tree.children)) for name, tree in trees.items()}
    assert widest["counting-chain"] == widest["essay-chain"] == 1
    assert len(trees["story-star"].children[0]) == len(trees["story-star"]) - 1 == 8
    assert widest["rhyme-binary"] == 2
    assert len(trees["rhyme-binary"]) == 15
    assert len(trees["chat-best-first"].children[0]) > 5
    assert trees["alphabet-deep"].depth >= 5
    assert widest["alphabet-deep"] > 1


def test_greedy_acceptance_is_real(traces):
    """From none to a whole chain (read off the drawings that ci/record_traces.py prints)."""
    accepted = {trace.name: len(greedy_walk(trace.tree, trace.rows)) - 1 for trace in traces}
    assert accepted == {
        "alphabet-deep": 5,
        "chat-best-first": 3,
        "code-best-first": 3,
        "counting-chain": 7,
        "essay-chain": 2,
        "rhyme-binary": 0,
        "story-star": 1,
        "weekdays-best-first": 2,
    }


def test_sampled_acceptance_is_real(traces):
    """E[accepted drafts] = sum over nodes of the product of masses on the path; neither none nor all."""
    for trace in traces:
        for temperature in (0.6, 1.0):
            mass = laws(trace.rows, temperature)
            reach = np.ones(len(trace.tree))
            for node in range(1, len(trace.tree)):
                parent = trace.tree.parents[node]
                reach[node] = reach[parent] * mass[parent, trace.tree.token_ids[node]]
            assert 0.02 < reach[1:].sum() < trace.tree.depth


def test_traces_as_cases(traces):
    for trace in traces:
        for temperature in trace.temperatures:
            case = trace.case(temperature)
            tensors = case.tensors()
            assert tensors.rows.dtype == torch.bfloat16
            assert tensors.rows[0].float().numpy().tobytes() == trace.rows.tobytes()
            assert tensors.temperature.item() == np.float32(temperature)
            request = case.requests[0]
            assert (request.accept >= 0).all()
            assert (request.accept < 1).all()
        coins = np.concatenate([trace.accept.ravel(), trace.final])
        assert len(set(coins.tolist())) == coins.size
