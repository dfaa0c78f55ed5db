"""Bad input: every message names the argument, its value, and the rule."""

from __future__ import annotations

import copy
import re
from dataclasses import fields, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from treeconv import (
    BackendUnavailable,
    Coins,
    DraftTree,
    InvalidArgument,
    InvalidTree,
    VerifyInput,
    to_verify_input,
    verify,
    verify_probs,
)
from treeconv._validate import check_coins, check_trees

NAN, INF = float("nan"), float("inf")
TREE = DraftTree([-1, 0, 0, 1], [9, 5, 7, 2])
BATCH = to_verify_input([TREE, TREE])
ROWS = torch.zeros(2, 4, 8)
COINS = Coins(torch.full((2, 4), 0.5), torch.full((2,), 0.5))
META = BATCH.to("meta")


def change(**tensors):
    return replace(BATCH, **tensors)


def coins(accept=COINS.accept, final=COINS.final):
    return Coins(accept, final)


def with_coin(value):
    accept = torch.full((2, 4), 0.5)
    accept[1, 2] = value
    return accept


# batch, logits, keyword arguments -> message
LOGITS_CALLS = {
    "no batch": ([[TREE]], ROWS, {}, r"batch=list, but must be a VerifyInput \(to_verify_input\)"),
    "trees": ([TREE], ROWS, {}, "batch=list, but must be a VerifyInput"),
    "candidates flat": (
        change(candidates=torch.zeros(8, dtype=torch.int64)),
        ROWS,
        {},
        r"candidates.shape=\(8,\), but must be \[B, N\] with B, N >= 1",
    ),
    "no request": (
        VerifyInput(*[torch.zeros(0, 4, dtype=torch.int64)] * 5, torch.zeros(0, dtype=torch.int64)),
        ROWS[:0],
        {},
        r"candidates.shape=\(0, 4\), but must be",
    ),
    "pointer shape": (
        change(retrieve_next_token=BATCH.retrieve_next_token[:, :3]),
        ROWS,
        {},
        r"retrieve_next_token.shape=\(2, 3\), but must be \(2, 4\)",
    ),
    "prefix shape": (
        change(prefix_lens=torch.zeros(3, dtype=torch.int64)),
        ROWS,
        {},
        r"prefix_lens.shape=\(3,\), but must be \(2,\)",
    ),
    "pointer dtype": (
        change(retrieve_next_sibling=BATCH.retrieve_next_sibling.int()),
        ROWS,
        {},
        "retrieve_next_sibling.dtype=torch.int32, but must be torch.int64",
    ),
    "token dtype": (
        change(candidates=BATCH.candidates.float()),
        ROWS,
        {},
        "candidates.dtype=torch.float32, but must be torch.int64",
    ),
    "a list": (
        change(positions=BATCH.positions.tolist()),
        ROWS,
        {},
        "positions=list, but must be a torch.Tensor",
    ),
    "an array": (
        change(candidates=BATCH.candidates.numpy()),
        ROWS,
        {},
        "candidates=ndarray, but must be a torch.Tensor",
    ),
    "pointer device": (
        change(positions=META.positions),
        ROWS,
        {},
        "positions.device=meta, but must be cpu, the device of candidates",
    ),
    "logits rank": (BATCH, ROWS[0], {}, r"logits.shape=\(4, 8\), but must be \(2, 4, 'V'\) with V >= 1"),
    "logits requests": (BATCH, ROWS[:1], {}, r"logits.shape=\(1, 4, 8\), but must be \(2, 4, 'V'\)"),
    "logits slots": (BATCH, ROWS[:, :3], {}, r"logits.shape=\(2, 3, 8\), but must be \(2, 4, 'V'\)"),
    "no vocabulary": (BATCH, ROWS[..., :0], {}, r"logits.shape=\(2, 4, 0\), but must be .* V >= 1"),
    "logits dtype": (
        BATCH,
        ROWS.double(),
        {},
        "logits.dtype=torch.float64, but must be one of float32, float16, bfloat16",
    ),
    "logits ints": (BATCH, ROWS.long(), {}, "logits.dtype=torch.int64, but must be one of"),
    "logits device": (BATCH, ROWS.to("meta"), {}, "logits.device=meta, but must be cpu, the batch's device"),
    "logits ragged": (BATCH, [[[0.0] * 8], [[0.0] * 7]], {}, "logits=list, but must be numbers of shape"),
    "logits None": (BATCH, None, {}, "logits=NoneType, but must be numbers of shape"),
    "draft beyond the vocabulary": (
        BATCH,
        ROWS[..., :7],
        {},
        r"candidates\[0, 2\]=7, but must be in \[0, 6\], the vocabulary",
    ),
    "negative draft": (
        change(candidates=torch.tensor([[9, 5, 7, 2], [9, 5, 7, -2]])),
        ROWS,
        {},
        r"candidates\[1, 3\]=-2, but must be in \[0, 7\]",
    ),
    "negative temperature": (
        BATCH,
        ROWS,
        {"temperature": -1.0},
        "temperature=-1.0, but must be finite and >= 0",
    ),
    "one negative": (
        BATCH,
        ROWS,
        {"temperature": [1.0, -0.5]},
        "temperature=-0.5, but must be finite and >= 0",
    ),
    "NaN temperature": (BATCH, ROWS, {"temperature": NAN}, "temperature=nan, but must be finite and >= 0"),
    "NaN among them": (
        BATCH,
        ROWS,
        {"temperature": torch.tensor([NAN, 1])},
        "temperature=nan, but must be finite and >= 0",
    ),
    "infinite temperature": (
        BATCH,
        ROWS,
        {"temperature": INF},
        "temperature=inf, but must be finite and >= 0",
    ),
    "too large for float32": (BATCH, ROWS, {"temperature": 1e300}, r"temperature=1e\+300, but must be"),
    "too small for float32": (
        BATCH,
        ROWS,
        {"temperature": 1e-50},
        "temperature=1e-50, but must be 0 or >= 1.4e-45, the smallest float32",
    ),
    "temperatures for others": (
        BATCH,
        ROWS,
        {"temperature": [1.0] * 3},
        r"temperature.shape=\(3,\), but must be a scalar or \(2,\), one per request",
    ),
    "temperature text": (
        BATCH,
        ROWS,
        {"temperature": "warm"},
        "temperature='warm', but must be a number or 2 numbers",
    ),
    "temperature None": (BATCH, ROWS, {"temperature": None}, "temperature=None, but must be a number or 2"),
    "depth cap 0": (BATCH, ROWS, {"depth_cap": 0}, "depth_cap=0, but must be an integer >= 1"),
    "depth cap 1.5": (BATCH, ROWS, {"depth_cap": 1.5}, "depth_cap=1.5, but must be an integer >= 1"),
    "coins and generator": (
        BATCH,
        ROWS,
        {"coins": COINS, "generator": torch.Generator()},
        "coins and generator were both given, but only one",
    ),
    "coins tuple": (BATCH, ROWS, {"coins": (0.5, 0.5)}, r"coins=tuple, but must be Coins\(accept="),
    "accept shape": (
        BATCH,
        ROWS,
        {"coins": coins(accept=COINS.accept[0])},
        r"coins.accept.shape=\(4,\), but must be \(2, 4\)",
    ),
    "final shape": (
        BATCH,
        ROWS,
        {"coins": coins(final=COINS.accept)},
        r"coins.final.shape=\(2, 4\), but must be \(2,\)",
    ),
    "coins dtype": (
        BATCH,
        ROWS,
        {"coins": coins(final=COINS.final.double())},
        "coins.final.dtype=torch.float64, but must be torch.float32",
    ),
    "coins device": (
        BATCH,
        ROWS,
        {"coins": coins(accept=COINS.accept.to("meta"))},
        "coins.accept.device=meta, but must be cpu",
    ),
    "coins ragged": (
        BATCH,
        ROWS,
        {"coins": coins(accept=[[0.5] * 4, [0.5] * 3])},
        "coins.accept=list, but must be numbers of shape",
    ),
    "coin negative": (
        BATCH,
        ROWS,
        {"coins": coins(accept=with_coin(-0.25))},
        r"coins.accept holds -0.25, but must be in \[0, 1\)",
    ),
    "coin above 1": (
        BATCH,
        ROWS,
        {"coins": coins(final=torch.tensor([0.5, 1.5]))},
        r"coins.final holds 1.5, but must be in \[0, 1\)",
    ),
    "coin NaN": (
        BATCH,
        ROWS,
        {"coins": coins(accept=with_coin(NAN))},
        r"coins.accept holds nan, but must be in \[0, 1\)",
    ),
    "complex rows": (
        BATCH,
        ROWS.numpy() + 1j,
        {},
        r"logits=ndarray, but must be numbers of shape \(2, 4, 'V'\): complex numbers",
    ),
    "complex coins": (
        BATCH,
        ROWS,
        {"coins": Coins([[0.5j] * 4] * 2, [0.5, 0.5])},
        "coins.accept=list, but must be numbers of shape .*: complex numbers",
    ),
    "coin inf": (
        BATCH,
        ROWS,
        {"coins": coins(final=torch.tensor([INF, 0.5]))},
        r"coins.final holds inf, but must be in \[0, 1\)",
    ),
}


#: places that do not fit a batch's pointers -> what is said
MISPLACED = {
    "flat indices": ({"retrieve_index": [[1, 2, 3, 0]]}, r"retrieve_index\[0, 0\]=1, but must be 0"),
    "no depth": (
        {"positions": [[7, 7, 7, 7]]},
        r"positions\[0, 1\]=7, but must be 8: the prefix's length plus",
    ),
    "one too deep": ({"positions": [[7, 8, 8, 10]]}, r"positions\[0, 3\]=10, but must be 9"),
    "another prefix": ({"prefix_lens": [9]}, r"positions\[0, 0\]=7, but must be 9"),
    "negative prefix": ({"prefix_lens": [-1]}, r"prefix_lens\[0\]=-1, but must be >= 0"),
}


@pytest.mark.parametrize(("places", "message"), MISPLACED.values(), ids=list(MISPLACED))
def test_places_that_do_not_fit_the_pointers_are_refused(places, message):
    batch = to_verify_input([DraftTree([-1, 0, 0, 1], [9, 5, 7, 2])], prefix_lens=[7])
    changed = replace(batch, **{name: torch.tensor(values) for name, values in places.items()})
    with pytest.raises(InvalidArgument, match=message):
        verify(changed, torch.zeros(1, 4, 10))
    with pytest.raises(InvalidArgument, match=message):
        verify_probs(changed, torch.full((1, 4, 10), 0.1))


def test_padding_may_be_anywhere():
    batch = to_verify_input([DraftTree([-1, 0], [9, 5])], num_draft_tokens=4)
    positions, sibling = batch.positions.clone(), batch.retrieve_next_sibling.clone()
    positions[0, 2:] = 1
    sibling[0, 2] = 3  # no pointer leads to slot 2
    moved = replace(batch, positions=positions, retrieve_next_sibling=sibling)
    logits = torch.zeros(1, 4, 10)
    assert verify(moved, logits, 0.0).tokens == verify(batch, logits, 0.0).tokens


@pytest.mark.parametrize("backend", ["auto", "reference", "eager"])
@pytest.mark.parametrize(
    ("batch", "logits", "settings", "message"), LOGITS_CALLS.values(), ids=list(LOGITS_CALLS)
)
def test_verify_refuses(batch, logits, settings, message, backend):
    with pytest.raises(InvalidArgument, match=message):
        verify(batch, logits, backend=backend, **settings)


PROBS_CALLS = {
    "no batch": (None, ROWS, {}, "batch=NoneType, but must be a VerifyInput"),
    "slots": (BATCH, ROWS[:, :3], {}, r"target_probs.shape=\(2, 3, 8\), but must be \(2, 4, 'V'\)"),
    "dtype": (BATCH, ROWS.bfloat16(), {}, "target_probs.dtype=torch.bfloat16, but must be one of float32"),
    "device": (BATCH, ROWS.to("meta"), {}, "target_probs.device=meta, but must be cpu"),
    "vocabulary": (BATCH, ROWS[..., :7], {}, r"candidates\[0, 2\]=7, but must be in \[0, 6\]"),
    "depth cap": (BATCH, ROWS, {"depth_cap": -1}, "depth_cap=-1, but must be an integer >= 1"),
    "coins": (BATCH, ROWS, {"coins": coins(accept=with_coin(2.0))}, "coins.accept holds 2.0, but must be"),
}


@pytest.mark.parametrize("backend", ["auto", "reference", "eager"])
@pytest.mark.parametrize(
    ("batch", "probs", "settings", "message"), PROBS_CALLS.values(), ids=list(PROBS_CALLS)
)
def test_verify_probs_refuses(batch, probs, settings, message, backend):
    with pytest.raises(InvalidArgument, match=message):
        verify_probs(batch, probs, backend=backend, **settings)


def test_coin_of_exactly_one_is_tolerated():
    output = verify(BATCH, ROWS, coins=Coins(torch.ones(2, 4), torch.ones(2)))
    assert output.tokens == [[6], [6]]  # all children refused: the last token of the residual


@pytest.mark.parametrize("backend", ["auto", "eager"])
def test_a_batch_on_a_device_without_backend(backend):
    with pytest.raises(BackendUnavailable, match="runs on cpu, cuda, but the batch is on meta"):
        verify(META, ROWS.to("meta"), backend=backend)


def test_temperature_on_another_device_than_the_batch():
    on_meta = torch.ones(2, device="meta")
    with pytest.raises(InvalidArgument, match=r"temperature.device=meta, but must be cpu"):
        verify(BATCH, ROWS, on_meta)
    with pytest.raises(
        InvalidArgument, match=r"temperature has shape \(1,\) and dtype torch.float32, but on a"
    ):
        verify(BATCH, ROWS, on_meta[:1])


@pytest.mark.parametrize("backend", ["Eager", "", "cuda", "sglang"])
def test_an_unknown_backend(backend):
    with pytest.raises(BackendUnavailable, match=f"backend='{backend}', but must be one of reference"):
        verify(BATCH, ROWS, backend=backend)


@pytest.mark.parametrize("backend", [None, 3, SimpleNamespace(name="half", verify=print)])
def test_an_object_that_is_no_backend(backend):
    with pytest.raises(
        BackendUnavailable, match="but must be a name or an object with verify and verify_probs"
    ):
        verify(BATCH, ROWS, backend=backend)


# Malformed pointers of four slots: (first child, next sibling, tokens) -> message. All end within N steps.
POINTERS = {
    "child out of range": (
        [4, -1, -1, -1],
        [-1] * 4,
        [0, 1, 2, 3],
        "node 0: points at child 4, but must be -1 or in",
    ),
    "child below -1": (
        [1, -2, -1, -1],
        [-1] * 4,
        [0, 1, 2, 3],
        "node 1: points at child -2, but must be -1 or in",
    ),
    "sibling out of range": ([1, -1, -1, -1], [-1, 9, -1, -1], [0, 1, 2, 3], "node 0: points at child 9"),
    "root with sibling": (
        [1, -1, -1, -1],
        [2, -1, -1, -1],
        [0, 1, 2, 3],
        "node 0: next sibling 2, but the root",
    ),
    "root its own child": ([0, -1, -1, -1], [-1] * 4, [0, 1, 2, 3], "node 0: reached twice"),
    "cycle of children": ([1, 2, 1, -1], [-1] * 4, [0, 1, 2, 3], "node 1: reached twice"),
    "cycle of siblings": ([1, -1, -1, -1], [-1, 2, 3, 1], [0, 1, 2, 3], "node 1: reached twice"),
    "its own sibling": ([1, -1, -1, -1], [-1, 1, -1, -1], [0, 1, 2, 3], "node 1: reached twice"),
    "child of two parents": ([1, 3, 3, -1], [-1, 2, -1, -1], [0, 1, 2, 3], "node 3: reached twice"),
    "duplicate siblings": (
        [1, -1, -1, -1],
        [-1, 2, 3, -1],
        [0, 1, 2, 1],
        "node 3: token 1 repeats a sibling's",
    ),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("requests", [2, 40], ids=["one by one", "as arrays"])
@pytest.mark.parametrize(("first", "sibling", "tokens", "message"), POINTERS.values(), ids=list(POINTERS))
def test_malformed_pointers_are_refused(first, sibling, tokens, message, requests):
    """Also in a large batch, whose check takes another path."""
    trees = to_verify_input([DraftTree([-1, 0, 0, 1], [0, 1, 2, 3])] * requests)
    batch = replace(trees, **{field.name: getattr(trees, field.name).clone() for field in fields(trees)})
    batch.retrieve_next_token[1] = torch.tensor(first)
    batch.retrieve_next_sibling[1] = torch.tensor(sibling)
    batch.candidates[1] = torch.tensor(tokens)
    with pytest.raises(InvalidTree, match="request 1, " + message):
        verify_probs(batch, torch.full((requests, 4, 4), 0.25))


def test_many_valid_shapes_pass_both_checks():
    """Random trees, tokens repeated under different parents and in padding, small and large batches."""
    rng = np.random.default_rng(1)
    for requests in (1, 60):
        trees = []
        for size in rng.integers(1, 12, requests).tolist():
            parents = [-1] + [int(rng.integers(0, node)) for node in range(1, size)]
            tokens = [0] + [
                sum(other == parents[node] for other in parents[:node]) for node in range(1, size)
            ]
            trees.append(DraftTree(parents, tokens))
        assert check_trees(replace(to_verify_input(trees, 13))) is None  # a copy: not sealed


@pytest.mark.parametrize("is_seen_by_torch", [True, False], ids=["torch", "numpy"])
@pytest.mark.parametrize(
    ("name", "node", "value", "message"),
    [
        ("candidates", 2, 5, "request 1, node 2: token 5 repeats a sibling's"),
        ("candidates", 3, 8, "candidates[1, 3]=8, but must be in [0, 7]"),
        ("retrieve_next_token", 3, 1, "request 1, node 1: reached twice"),
        ("retrieve_next_sibling", 2, 9, "points at child 9"),
    ],
)
def test_a_converted_batch_that_was_written_to_is_checked_anew(name, node, value, message, is_seen_by_torch):
    """Its seal holds values: a write through NumPy's view, which torch does not count, breaks it too."""
    batch = to_verify_input([TREE, TREE])
    assert batch.is_sealed(10)
    tensor = getattr(batch, name)
    if is_seen_by_torch:
        tensor[1, node] = value
    else:
        tensor.numpy()[1, node] = value
    assert not batch.is_sealed()
    with pytest.raises(InvalidArgument, match=re.escape(message)):
        verify(batch, ROWS, 1.0, COINS)


def test_a_seal_covers_no_smaller_vocabulary_and_no_copy():
    batch = to_verify_input([TREE, TREE])
    assert [batch.is_sealed(size) for size in (9, 10, None)] == [False, True, True]
    for other in (replace(batch), copy.copy(batch), copy.deepcopy(batch)):
        assert not other.is_sealed()
        assert all(map(torch.equal, vars(other).values(), vars(batch).values()))


def test_cuda_style_batches_are_not_read_back():
    """On another device contents are not looked at: even a cycle passes the check, without a wait."""
    assert (
        check_trees(replace(META, retrieve_next_token=torch.zeros(2, 4, dtype=torch.int64, device="meta")))
        is None
    )


@pytest.mark.parametrize("size", [2, 200])
def test_coins_that_require_grad_are_read_all_the_same(size):
    batch = to_verify_input([DraftTree((-1,), (0,))] * size)
    coins = Coins(torch.full((size, 1), 0.5).requires_grad_(), torch.full((size,), 0.25).requires_grad_())
    checked = check_coins(coins, batch)
    assert checked.accept.tolist() == [[0.5]] * size
    assert not checked.final.requires_grad


@pytest.mark.parametrize("pointer", ["retrieve_next_token", "retrieve_next_sibling"])
def test_pointers_of_padding_may_hold_anything(pointer):
    """Nothing leads there, so no walk follows them: an index behind the slots is not looked up either."""
    batch = to_verify_input([DraftTree((-1, 0), (0, 1))], 4)
    want = verify(batch, torch.zeros(1, 4, 8), 0.0).tokens
    getattr(batch, pointer)[0, 3] = 99
    assert verify(batch, torch.zeros(1, 4, 8), 0.0).tokens == want == [[0]]
