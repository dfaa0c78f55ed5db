"""The SGLang adapter without a GPU: spellings, guards and coins, over a stand-in for the kernel."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import fake_sgl_kernel as fake
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from treeconv import (
    BackendUnavailable,
    Coins,
    DraftTree,
    InvalidArgument,
    InvalidTree,
    LawBroken,
    to_verify_input,
)
from treeconv.backends import registry, sgl
from treeconv.backends.sgl import SglBackend, SglKernels, load_sgl_kernels, top_p_renormalised
from treeconv.laws import BACKEND_LAWS, law_named, why_not
from treeconv.strategies import cases_for
from treeconv.suite import select_backends
from treeconv.tree import RowStatus

KERNELS = SglKernels(
    "fake",
    {name: getattr(fake, name) for name in ("tree_speculative_sampling_target_only", "verify_tree_greedy")},
)


@pytest.fixture
def guarded():
    return SglBackend(kernels=KERNELS)


@pytest.fixture
def raw():
    return SglBackend(raw=True, kernels=KERNELS)


def run_law(law, backend, examples):
    @settings(max_examples=examples, deadline=None, database=None, derandomize=True,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(cases_for(law.cases))
    def judge(case):
        law.run(case, backend)

    judge()


@pytest.mark.parametrize("law", BACKEND_LAWS, ids=lambda law: law.name)
def test_guarded_keeps_every_law_that_it_claims(law, guarded):
    reason = why_not(law, guarded)
    # SGLang filters and penalises before this kernel, in kernels of its own, and has no other rule here.
    if law.cases.startswith("filtered") or law.rule != "target_only" or reason:
        assert reason is not None
        assert reason.startswith(("the backend takes no", "the backend does not", "about verifiers"))
    else:
        run_law(law, guarded, 10)


@pytest.mark.parametrize("name", ["positive-mass", "critical-coins", "greedy"])
def test_raw_is_found_out_by(name, raw):
    """Coin 0, and the exact boundary."""
    with pytest.raises(LawBroken):
        run_law(law_named(name), raw, 300)


def call(backend, tree, probs, accept, final, cap=None):
    batch = to_verify_input([tree])
    coins = Coins(torch.tensor([accept]), torch.tensor([final]))
    return backend.verify_probs(batch, torch.tensor([probs]), coins, cap or tree.depth + 1)


def test_coin_0_and_the_exact_boundary(raw, guarded):
    """B01 and B02."""
    zero = DraftTree((-1, 0), (9, 2))
    probs = [[0.0, 1.0, 0.0, 0.0]] * 2
    assert call(raw, zero, probs, [0.0, 0.0], 0.5).tokens[0][0] == 2
    assert call(guarded, zero, probs, [0.0, 0.0], 0.5).tokens == [[1]]
    two = DraftTree((-1, 0, 0), (9, 0, 1))
    probs = [[0.25, 0.25, 0.5]] * 3
    assert call(raw, two, probs, [0.25] * 3, 0.5).accept_index.tolist() == [[0, 1]]
    assert call(guarded, two, probs, [0.25] * 3, 0.5).accept_index.tolist() == [[0, 2]]


def test_children_that_cover_the_support(raw, guarded):
    """Their float32 sum is under 1, and a coin above it finds nothing left."""
    below = 0.99999994
    probs = torch.full((10,), 0.0999999)
    tree = DraftTree((-1, *[0] * 10), (0, *range(10)))
    rows = [probs.tolist()] * 11
    accept = [below] + [0.5] * 10
    assert call(raw, tree, rows, accept, 0.5).accept_token_num.tolist() == [0]  # emits V - 1
    got = call(guarded, tree, rows, accept, 0.5)
    assert got.accept_index.tolist() == [[0, 10]]
    assert call(guarded, tree, rows, [1.0] + [0.5] * 10, 0.5).accept_index.tolist() == [[0, 10]]


def test_guards_refuse(guarded, raw):
    batch = to_verify_input([DraftTree((-1, 0, 0), (9, 1, 2))])
    twins = type(batch)(**{**vars(batch), "candidates": torch.tensor([[9, 1, 1]])})
    coins = Coins(torch.full((1, 3), 0.45), torch.tensor([0.5]))
    probs = torch.tensor([[[0.2, 0.3, 0.4, 0.1]] * 3])
    with pytest.raises(InvalidTree, match="node 2: token 1 repeats"):
        guarded.verify_probs(twins, probs, coins, 2)
    # B13: the mass of token 1 counts twice, and node 2 is taken.
    assert raw.verify_probs(twins, probs, coins, 2).accept_index.tolist() == [[0, 2]]
    huge = torch.empty(1).expand(1, 3, 2**31)
    with pytest.raises(
        InvalidArgument, match=r"B\*N\*V=1\*3\*2147483648=6442450944, but must be < 4294967296"
    ):
        guarded.verify_probs(batch, huge, coins, 2)


TREES = to_verify_input([DraftTree((-1, 0, 0), (9, 1, 2))] * 2)
SURE = Coins(torch.full((2, 3), 0.45), torch.full((2,), 0.5))


def with_value(name, place, value):
    """The batch above with one value changed."""
    tensor = getattr(TREES, name).clone()
    tensor[place] = value
    return replace(TREES, **{name: tensor})


@pytest.mark.parametrize(
    ("batch", "says"),
    [
        (
            with_value("candidates", (1, 2), 4),
            r"candidates\[1, 2\]=4, but must be in \[0, 3\], the vocabulary",
        ),
        (with_value("candidates", (0, 1), -5), r"candidates\[0, 1\]=-5, but must be in \[0, 3\]"),
        (with_value("retrieve_index", (1, 0), 2**40), r"retrieve_index\[1, 0\]=1099511627776, but must be 3"),
        (with_value("retrieve_index", (0, 0), -1), r"retrieve_index\[0, 0\]=-1, but must be 0"),
        (with_value("positions", (0, 1), 7), r"positions\[0, 1\]=7, but must be 1"),
        (with_value("retrieve_next_token", (0, 1), 3), "node 1: points at child 3, but must be"),
        (replace(TREES, candidates=TREES.candidates.int()), r"candidates.dtype=torch.int32, but must be"),
    ],
)
def test_guards_refuse_what_the_kernel_would_reach_through(guarded, batch, says):
    """A token or flat index out of range is an address: the kernel reads there, or writes."""
    for probs in (False, True):
        rows = torch.full((2, 3, 4), 0.25)
        with pytest.raises(InvalidArgument, match=says):
            verify_either(guarded, batch, rows, probs=probs)
    if "token" not in says:
        with pytest.raises(InvalidArgument, match=says):
            guarded.verify_greedy(batch, rows, 2)


def verify_either(backend, batch, rows, cap=2, coins=SURE, temperature=None, *, probs):
    if probs:
        return backend.verify_probs(batch, rows, coins, cap)
    return backend.verify(batch, rows, torch.ones(2) if temperature is None else temperature, coins, cap)


@pytest.mark.parametrize("probs", [False, True])
def test_guards_refuse_shapes_and_dtypes(guarded, probs):
    name, rows = "target_probs" if probs else "logits", torch.full((2, 3, 4), 0.25)
    refused = {
        rf"{name}.shape=\(2, 2, 4\), but must be \(2, 3, 'V'\)": {"rows": rows[:, :2]},
        rf"{name}.shape=\(3, 4\), but must be": {"rows": rows[0]},
        rf"{name}.dtype=torch.float64, but must be": {"rows": rows.double()},
        "depth_cap=0, but must be an integer >= 1": {"cap": 0},
        r"depth_cap=2\.5, but must be an integer >= 1": {"cap": 2.5},
        r"coins.accept.shape=\(2, 2\), but must be \(2, 3\)": {
            "coins": Coins(SURE.accept[:, :2], SURE.final)
        },
        r"coins.final.shape=\(1,\), but must be \(2,\)": {"coins": Coins(SURE.accept, SURE.final[:1])},
    }
    if not probs:
        refused[r"temperature.shape=\(3,\), but must be"] = {"temperature": torch.ones(3)}
    for says, changed in refused.items():
        with pytest.raises(InvalidArgument, match=says):
            verify_either(guarded, TREES, **({"rows": rows} | changed), probs=probs)
    for cap, wrong in ((0, rows), (2, rows[:, :2]), (2, rows.double())):
        with pytest.raises(InvalidArgument, match="but must be"):
            guarded.verify_greedy(TREES, wrong, cap)


def test_raw_hands_all_of_it_over(raw):
    """As SGLang does: that is what the laws judge."""
    handed = {}

    def kernel(
        predicts, accept_index, accept_token_num, candidates, retrive_index, retrive_next_token,
        retrive_next_sibling, uniform_samples, uniform_samples_for_final_sampling, target_probs, draft_probs,
        threshold_single, threshold_acc, deterministic,
    ):  # fmt: skip
        handed.update(locals())

    raw.kernels = SglKernels("fake", {"tree_speculative_sampling_target_only": kernel})
    odd = with_value("retrieve_index", (1, 0), 2**40)
    raw.verify_probs(odd, torch.ones((2, 2, 4)), SURE, 1)
    assert handed["retrive_index"][1, 0] == 2**40
    assert handed["target_probs"].shape == (2, 2, 4)


def test_unusable_rows(guarded):
    tree = DraftTree((-1, 0), (9, 1))
    nan = float("nan")
    good, coins = [0.5, 0.5], [0.0, 0.0]
    assert call(guarded, tree, [[nan, 0.5], good], coins, 0.5).status.tolist() == [RowStatus.NAN]
    assert call(guarded, tree, [good, [0.0, 0.0]], coins, 0.5).status.tolist() == [RowStatus.EMPTY]
    assert call(guarded, tree, [good, [float("inf"), 0.0]], coins, 0.5).status.tolist() == [RowStatus.POS_INF]
    seen = call(guarded, tree, [good, [nan, 0.0]], [0.9, 0.0], 0.5)  # not visited
    assert seen.status.tolist() == [RowStatus.OK]
    bad = call(guarded, tree, [good, [nan, 0.0]], coins, 0.5)
    assert (bad.accept_index.tolist(), bad.predicts.tolist(), bad.accept_token_num.tolist()) == (
        [[-1, -1]], [-1, -1], [0],
    )  # fmt: skip


def test_tiny_temperature(raw, guarded):
    """B66: the guarded form shifts by the maximum first; SGLang serves T < 1e-6 as greedy."""
    batch = to_verify_input([DraftTree((-1,), (9,))])
    coins = Coins(torch.tensor([[0.5]]), torch.tensor([0.5]))
    logits = torch.tensor([[[0.0, 5.0, 4.0]]])
    for backend in (raw, guarded):
        assert backend.verify(batch, logits, torch.tensor([1e-40]), coins, 1).tokens == [[1]]


def test_greedy_operator(guarded):
    batch = to_verify_input([DraftTree((-1, 0, 0, 2), (9, 1, 2, 0))])
    logits = torch.tensor([[[0.0, 1.0, 2.0], [1.0, 0.0, 0.0], [3.0, 3.0, 1.0], [0.0, 1.0, 0.0]]])
    got = guarded.verify_greedy(batch, logits, 3)
    assert got.tokens == [[2, 0, 1]]
    zero = Coins(torch.zeros((1, 4)), torch.zeros(1))
    assert guarded.verify(batch, logits, torch.tensor([0.0]), zero, 3).tokens == got.tokens


def test_either_spelling_and_home(monkeypatch):
    """The wheel of one version, SGLang's own module of another; `retrive` or `retrieve`."""
    seen = {}

    def modern(predicts, retrieve_index, retrieve_next_token, retrieve_next_sibling):  # noqa: ARG001
        seen.update(retrieve_index=retrieve_index, predicts=predicts)

    def old(predicts, retrive_index, retrive_next_token, retrive_next_sibling):  # noqa: ARG001
        seen.update(retrive_index=retrive_index, predicts=predicts)

    arguments = {"predicts": 0, "retrieve_index": 1, "retrieve_next_token": 2, "retrieve_next_sibling": 3}
    for function, key in ((modern, "retrieve_index"), (old, "retrive_index")):
        seen.clear()
        SglKernels("x", {"f": function}).call("f", **arguments)
        assert seen == {key: 1, "predicts": 0}
    with pytest.raises(BackendUnavailable, match="must take tree_mask"):
        SglKernels("x", {"f": old}).call("f", **arguments, tree_mask=1)
    with pytest.raises(BackendUnavailable, match="g is not in this version"):
        SglKernels("x", {}).call("g")

    module = types.ModuleType("sgl_kernel")
    module.__version__ = "9.9"
    module.tree_speculative_sampling_target_only = old
    monkeypatch.setitem(sys.modules, "sgl_kernel", module)
    monkeypatch.setitem(sys.modules, "sgl_kernel.speculative", None)
    monkeypatch.setitem(sys.modules, "sglang.kernels.ops.speculative.tree", None)
    found = load_sgl_kernels()
    assert found.version == "sgl_kernel 9.9"
    assert set(found.functions) == {"tree_speculative_sampling_target_only"}


def test_says_why_it_is_not_here(monkeypatch):
    for homes in sgl._HOMES.values():
        for home in homes:
            monkeypatch.setitem(sys.modules, home, None)
    with pytest.raises(BackendUnavailable, match=r"fetch_sgl_kernel.sh.*sgl_kernel:"):
        SglBackend()


def test_raw_is_not_judged_unless_asked_for(monkeypatch):
    """`treeconv verify --device cuda` judges what is offered for use."""
    monkeypatch.setattr(registry, "_loaded", {"sgl-raw": SglBackend(raw=True, kernels=KERNELS)})
    chosen, reasons = select_backends([], "cuda")
    assert "sgl-raw" not in [backend.name for backend in chosen]
    assert "by name" in reasons["sgl-raw"]
    assert [backend.name for backend in select_backends(["sgl-raw"], "cuda")[0]] == ["sgl-raw"]


def test_the_top_p_step_cuts_each_row_at_its_requests_share(monkeypatch):
    sampling = types.ModuleType("sgl_kernel.sampling")
    sampling.top_p_renorm_prob = lambda rows, top_p: rows * top_p[:, None]
    monkeypatch.setitem(sys.modules, "sgl_kernel", types.ModuleType("sgl_kernel"))
    monkeypatch.setitem(sys.modules, "sgl_kernel.sampling", sampling)
    cut = top_p_renormalised(torch.ones(2, 3, 4), torch.tensor([0.5, 0.25]))
    assert cut[:, :, 0].tolist() == [[0.5] * 3, [0.25] * 3]
    del sampling.top_p_renorm_prob
    with pytest.raises(BackendUnavailable, match="sgl_kernel has no top-p step here"):
        top_p_renormalised(torch.ones(1, 1, 2), torch.ones(1))
