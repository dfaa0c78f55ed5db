"""The registry, strangers' functions as backends, and what is said where a backend cannot be had."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch

from treeconv import (
    BackendUnavailable,
    Coins,
    DraftTree,
    InvalidArgument,
    Request,
    VerifyCase,
    VerifyOutput,
    suite,
    to_verify_input,
)
from treeconv import verify as front_verify
from treeconv import verify_probs as front_verify_probs
from treeconv.backends import eager, registry
from treeconv.backends.base import Backend, BackendTraits, FunctionBackend
from treeconv.backends.eager import EagerBackend
from treeconv.backends.reference import ReferenceBackend
from treeconv.backends.registry import BACKENDS, available_backends, choose_backend, get_backend
from treeconv.laws import law_named
from treeconv.processors import PROCESSORS
from treeconv.rules import RULES

BATCH = to_verify_input([DraftTree.chain([9, 1])])
PROBS = torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])
COINS = Coins(torch.full((1, 2), 0.5), torch.full((1,), 0.5))


def from_probs(batch, target_probs, coins, depth_cap):
    return ReferenceBackend().verify_probs(batch, target_probs, coins, depth_cap)


def from_logits(batch, logits, temperature, coins, depth_cap):
    return ReferenceBackend().verify(batch, logits, temperature, coins, depth_cap)


def as_tuple(batch, target_probs, coins, depth_cap):
    out = from_probs(batch, target_probs, coins, depth_cap)
    return out.accept_index, out.accept_token_num, out.predicts


def as_list_of_four(batch, target_probs, coins, depth_cap):
    out = from_probs(batch, target_probs, coins, depth_cap)
    return [out.accept_index, out.accept_token_num, out.predicts, out.status + 1]


class NoTraits:
    name = "no-traits"

    def verify(self, *call): ...


class Hungry(ReferenceBackend):
    def verify(self, batch, logits, temperature, coins, depth_cap, alpha, **more): ...


class Claims(ReferenceBackend):
    def verify_probs(self, batch, target_probs, coins, depth_cap): ...


class Traitless(ReferenceBackend):
    traits = {"takes_filters": True}  # noqa: RUF012


@pytest.fixture
def strangers():
    """A module that somebody else wrote, importable by name."""
    module = ModuleType("strangers")
    module.from_probs, module.from_logits, module.not_callable = from_probs, from_logits, 3.14
    module.instance, module.Class, module.make = EagerBackend(), ReferenceBackend, lambda: ReferenceBackend()  # noqa: PLW0108
    module.gives_seven = lambda: 7
    module.neither = lambda batch, rows: None  # noqa: ARG005
    module.more = lambda batch, target_probs, coins, depth_cap, alpha: None  # noqa: ARG005
    module.NoTraits, module.Hungry, module.Claims, module.Traitless = NoTraits, Hungry, Claims, Traitless
    sys.modules["strangers"] = module
    yield module
    del sys.modules["strangers"]


@pytest.mark.parametrize("name", ["reference", "eager"])
def test_a_name_gives_one_backend(name):
    backend = get_backend(name)
    assert isinstance(backend, Backend)
    assert (backend.name, get_backend(name)) == (name, backend)


def test_claims():
    assert get_backend("reference").traits == BackendTraits(
        devices=("cpu",),
        takes_filters=True,
        takes_processors=PROCESSORS,
        rules=RULES,
        takes_thresholds=True,
        takes_views=True,
    )
    assert get_backend("eager").traits == BackendTraits(
        takes_filters=True,
        takes_processors=PROCESSORS,
        rules=RULES,
        takes_thresholds=True,
        takes_views=True,
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_auto_is_eager_away_from_cuda(device):
    assert choose_backend(torch.device(device)).name == "eager"


def test_every_backend_is_listed_with_the_reason_why_not():
    reasons = available_backends()
    assert list(reasons) == list(BACKENDS)
    assert (reasons["reference"], reasons["eager"]) == (None, None)


def test_a_missing_module_is_a_reason(monkeypatch):
    monkeypatch.setitem(BACKENDS, "npu", "treeconv_npu:Backend")
    want = "backend='npu' cannot be imported here: No module named 'treeconv_npu'"
    assert available_backends()["npu"] == want
    with pytest.raises(BackendUnavailable, match="cannot be imported here"):
        get_backend("npu")


@pytest.mark.parametrize(
    ("attribute", "kind"),
    [
        ("instance", EagerBackend),
        ("Class", ReferenceBackend),
        ("make", ReferenceBackend),
        ("from_probs", FunctionBackend),
        ("from_logits", FunctionBackend),
    ],
)
def test_module_and_attribute(attribute, kind, strangers, monkeypatch):
    monkeypatch.setattr("treeconv.backends.registry._loaded", {})
    backend = get_backend(f"strangers:{attribute}")
    assert type(backend) is kind
    assert attribute != "instance" or backend is strangers.instance


@pytest.mark.usefixtures("strangers")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("strangers:absent", "module strangers has no absent"),
        ("no_such_module:f", "cannot be imported here: No module named 'no_such_module'"),
        (":f", "cannot be imported here"),
        ("strangers:gives_seven", "takes no arguments, so it was called, and returned a int, but must be"),
        ("my_sampler", r"did you mean my_sampler:verify\?"),
        ("lib/my_sampler.py:f", r"did you mean lib.my_sampler:f\?"),
        ("strangers:not_callable", "is a float, but must be a backend, what makes one, or a"),
        (
            "strangers:neither",
            r"takes \(batch, rows\), but must take \(batch, target_probs, coins, depth_cap\)",
        ),
        ("strangers:more", "requires alpha, which it is not handed: give it a default"),
        (
            "strangers:NoTraits",
            r"has verify, but no traits and no verify_probs: a backend has a name, traits",
        ),
        (
            "strangers:Hungry",
            r"but is called as verify\(batch, logits, .* missing a required argument: 'alpha'",
        ),
        (
            "strangers:Claims",
            r"depth_cap\), but is called as .* depth_cap, filters=, rule=\), as its traits say: got an",
        ),
        ("strangers:Traitless", "traits is a dict, but must be a treeconv.backends.base.BackendTraits"),
        (
            "triton2",
            "backend='triton2', but must be one of reference, eager, triton, sgl",
        ),
    ],
)
def test_unavailable(name, message):
    with pytest.raises(BackendUnavailable, match=message):
        get_backend(name)


def test_a_module_that_fails_at_import_is_a_reason(tmp_path, monkeypatch):
    (tmp_path / "breaks_at_import.py").write_text("raise OSError('libcuda.so.1 is missing')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(BackendUnavailable, match="cannot be imported here: libcuda"):
        get_backend("breaks_at_import:f")


@pytest.mark.parametrize("function", [from_probs, as_tuple], ids=["VerifyOutput", "tuple"])
def test_a_function_of_probabilities(function):
    backend = FunctionBackend(function, "mine")
    assert (backend.traits.takes_probs, backend.traits.takes_logits) == (True, False)
    output = front_verify_probs(BATCH, PROBS, COINS, backend=backend)
    assert isinstance(output, VerifyOutput)
    assert (output.tokens, output.status.tolist()) == ([[1, 0]], [0])
    with pytest.raises(BackendUnavailable, match="backend='mine' takes probabilities only: use verify_probs"):
        front_verify(BATCH, PROBS, backend=backend)


def test_a_function_of_logits():
    backend = FunctionBackend(from_logits, "mine")
    assert (backend.traits.takes_probs, backend.traits.takes_logits) == (False, True)
    assert front_verify(BATCH, PROBS.log(), 1.0, COINS, backend=backend).tokens == [[1, 0]]
    with pytest.raises(BackendUnavailable, match="backend='mine' takes logits only: use verify"):
        front_verify_probs(BATCH, PROBS, backend=backend)


def test_a_fourth_value_is_the_status():
    output = FunctionBackend(as_list_of_four, "mine").verify_probs(BATCH, PROBS, COINS, 2)
    assert output.status.tolist() == [1]


def test_a_function_claims_status_and_devices_by_attributes():
    def function(batch, target_probs, coins, depth_cap):
        raise NotImplementedError

    plain = FunctionBackend(function, "mine").traits
    function.reports_status, function.devices = True, ["cpu"]
    claimed = FunctionBackend(function, "mine").traits
    assert (plain.reports_status, plain.devices) == (False, ("cpu", "cuda"))
    assert (claimed.reports_status, claimed.devices) == (True, ("cpu",))


@pytest.mark.parametrize("returned", [None, 3, (1, 2), (1, 2, 3, 4, 5)])
def test_a_function_that_returns_something_else(returned):
    backend = FunctionBackend(lambda batch, target_probs, coins, depth_cap: returned, "mine")  # noqa: ARG005
    with pytest.raises(InvalidArgument, match=f"backend 'mine' returned {type(returned).__name__}, but must"):
        front_verify_probs(BATCH, PROBS, COINS, backend=backend)


def test_a_function_that_returns_lists():
    backend = FunctionBackend(lambda batch, target_probs, coins, depth_cap: ([[0, 1]], [1], [0, 0]), "mine")  # noqa: ARG005
    with pytest.raises(InvalidArgument, match=r"accept_index is a list, but must be a torch.Tensor"):
        front_verify_probs(BATCH, PROBS, COINS, backend=backend)


def test_a_function_with_other_parameters():
    with pytest.raises(BackendUnavailable, match=r"backend 'mine' takes \(coins, logits\), but must take"):
        FunctionBackend(lambda logits, coins: None, "mine")  # noqa: ARG005


def test_a_backend_off_its_devices():
    class Gpu(EagerBackend):
        name = "gpu"
        traits = BackendTraits(devices=("cuda",))

    with pytest.raises(BackendUnavailable, match="backend='gpu' runs on cuda, but the batch is on cpu"):
        front_verify_probs(BATCH, PROBS, backend=Gpu())


def test_an_interpreted_backend_is_judged_only_by_name(monkeypatch):
    """TRITON_INTERPRET=1 makes the sampler run anywhere, hundreds of times slower than it is meant to."""

    class Interpreted(ReferenceBackend):
        name = "triton"
        traits = replace(ReferenceBackend.traits, is_interpreted=True)

    monkeypatch.setitem(registry._loaded, "triton", Interpreted())
    backends, reasons = suite.select_backends([], "cpu")

    assert "triton" not in [backend.name for backend in backends]
    assert "it runs in an interpreter here" in reasons["triton"]
    assert [backend.name for backend in suite.select_backends(["triton"], "cpu")[0]] == ["triton"]


@pytest.mark.parametrize("name", ["reference", "eager"])
@pytest.mark.parametrize("peak", [12.0, 3.0, 0.0])
@pytest.mark.parametrize("vocab", [163840, 262144])
def test_equal_masses_of_a_large_vocabulary_add_up(name, peak, vocab):
    """Sums of equal numbers all round the same way: a plain float32 sum of blocks drifts out of the band."""
    row = np.zeros((1, vocab), np.float32)
    row[0, 0] = peak
    backend = get_backend(name)
    for final in (0.1, 0.5, 0.77, 0.9, 0.99):
        request = Request(DraftTree([-1], [0]), row, 1.0, np.array([0.5], np.float32), final)
        assert law_named("oracle-agreement").run(VerifyCase((request,)), backend)


@pytest.mark.parametrize("law", ["oracle-agreement", "critical-coins", "match-rule"])
def test_eager_is_right_where_masses_stay_torch_tensors(monkeypatch, law):
    """On a device large weights are not brought to the host; here the same operations run on the CPU."""
    monkeypatch.setattr(eager, "_hosted", lambda weights: weights)
    outcome = suite.check_law(law_named(law), EagerBackend(), max_examples=60, seed=1, shrink=False)
    assert outcome.cases == 60
    assert outcome.broken is None


@pytest.mark.parametrize("takes_views", [False, True])
def test_views_are_handed_on_only_to_who_takes_them(takes_views):
    seen = []

    def look(batch, target_probs, coins, depth_cap, rule=None):
        del rule
        seen.append([batch.candidates.is_contiguous(), target_probs.is_contiguous()])
        return from_probs(batch, target_probs, coins, depth_cap)

    look.takes_views = takes_views
    view = replace(BATCH, candidates=torch.stack([BATCH.candidates, BATCH.candidates], dim=2)[..., 0])
    rows = PROBS.transpose(0, 1).contiguous().transpose(0, 1)[..., [0, 1, 1]][..., :2]
    output = front_verify_probs(view, rows, COINS, backend=FunctionBackend(look, "look"))
    assert seen == [[not takes_views] * 2]
    assert output.tokens == front_verify_probs(BATCH, PROBS, COINS, backend="reference").tokens


def test_narrow_ids_are_no_decision():
    """Right over the vocabularies of laws, they would wrap over a real one."""

    class Narrow(ReferenceBackend):
        def verify(self, *call, **more):
            output = super().verify(*call, **more)
            return replace(output, predicts=output.predicts.to(torch.int16))

    broken = suite.check_law(law_named("oracle-agreement"), Narrow(), max_examples=5).broken
    assert "got:      predicts of torch.int16\n" in str(broken)
    assert "want:     int32 or int64: token ids" in str(broken)
