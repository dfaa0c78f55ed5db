"""Contract: the plugin's options, header, skips and failure text; and that it leaves others alone."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # before pytester: it forgets modules first imported in a run, torch cannot be twice

from treeconv import pytest_plugin, suite
from treeconv.cli import main
from treeconv.corpus import load_entry

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parents[1]
INSTALLED = "treeconv" in {point.name for point in importlib.metadata.entry_points(group="pytest11")}
LOAD = () if INSTALLED else ("-p", "treeconv.pytest_plugin")
FAULTY = f"""
import sys
sys.path.append({str(ROOT / "tests" / "quality")!r})
from faults import InclusiveTest, StaleResidual
"""
LOGITS_ONLY = """
from treeconv.backends.registry import get_backend
def sample(batch, logits, temperature, coins, depth_cap):
    return get_backend("eager").verify(batch, logits, temperature, coins, depth_cap)
"""


@pytest.fixture
def run(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # ours may run under xdist; theirs does not
    monkeypatch.delenv("PYTEST_XDIST_WORKER_COUNT", raising=False)
    path = list(sys.path)

    def run(*arguments, subprocess=False):
        runner = pytester.runpytest_subprocess if subprocess else pytester.runpytest_inprocess
        return runner(*LOAD, "-p", "no:cacheprovider", "-p", "no:benchmark", *map(str, arguments))

    yield run
    sys.path[:] = path


def law_file(name):
    return ROOT / "properties" / f"test_{name}.py"


def test_header(run):
    result = run(law_file("chain"), "--max-examples=3", "--hypothesis-seed=5")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            f"treeconv *, torch {torch.__version__}, hypothesis *",
            "treeconv: 3 cases per law on cpu, --hypothesis-seed=5",
            "treeconv: backends reference, eager*",
            "treeconv: not sgl: *",
        ]
    )


def test_default_seed_is_the_day(run):
    result = run(law_file("round_trip"), "--collect-only")
    result.stdout.fnmatch_lines([f"treeconv: 200 cases per law on cpu, --hypothesis-seed={'[0-9]' * 8}"])


def test_a_broken_law_is_readable_and_replays(run, pytester, monkeypatch, capsys):
    pytester.makepyfile(faulty_one=FAULTY)
    result = run(law_file("critical_coins"), "--backend=faulty_one:InclusiveTest")
    result.assert_outcomes(failed=1)
    text = result.stdout.str()
    shown = text[text.index("law broken") : text.index("short test summary")].splitlines()[:-1]
    assert shown[0] == "law broken: critical-coins"
    assert len(shown) <= 30
    line = re.fullmatch(r"  replay:   treeconv replay (\S+) --backend faulty_one:InclusiveTest", shown[-1])
    for noise in ("Traceback", "Falsifying", "hypothesis/", "site-packages", "array(", ".py:"):
        assert noise not in "\n".join(shown)
    result.stdout.fnmatch_lines(["FAILED *test_critical_coins[[]faulty_one:InclusiveTest[]]*"])
    path = Path(line[1])
    assert path.parent == Path(".treeconv/failures")
    monkeypatch.chdir(pytester.path)
    assert path.name.startswith("critical-coins-")
    entry = load_entry(path)
    assert (entry.law, entry.backend) == ("critical-coins", "faulty_one:InclusiveTest")
    assert max(len(request.tree) for request in entry.case.requests) <= 4
    capsys.readouterr()
    assert main(["replay", str(path)]) == 1
    assert "law broken: critical-coins" in capsys.readouterr().out
    assert main(["replay", str(path), "--backend", "reference"]) == 0
    assert capsys.readouterr().out.startswith("kept: critical-coins on reference, ")


def test_the_same_seed_saves_the_same_case(run, pytester):
    pytester.makepyfile(faulty_two=FAULTY)
    for _ in range(2):
        run(law_file("positive_mass"), "--backend=faulty_two:StaleResidual", "--hypothesis-seed=3")
        run(law_file("critical_coins"), "--backend=faulty_two:InclusiveTest", "--hypothesis-seed=3")
    saved = list((pytester.path / ".treeconv" / "failures").glob("critical-coins-*.json"))
    assert len(saved) == 1


def test_a_law_that_does_not_apply_is_skipped_with_its_reason(run, pytester):
    pytester.makepyfile(logits_only=LOGITS_ONLY)
    result = run(
        law_file("critical_coins"), law_file("chain"), "--backend=logits_only:sample", "--max-examples=5"
    )
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED*logits_only:sample: needs the probability interface*"])


def test_backends_are_repeatable(run, pytester):
    pytester.makepyfile(logits_again=LOGITS_ONLY)
    result = run(
        law_file("chain"), "--backend", "eager", "--backend", "logits_again:sample", "--max-examples=2", "-v"
    )
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*[[]eager[]] PASSED*", "*[[]logits_again:sample[]] PASSED*"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend=nobody"], "backend='nobody', but must be one of reference, eager,*"),
        (["--backend=nowhere:f"], "backend='nowhere:f' cannot be imported here: No module named 'nowhere'"),
        (
            ["--backend=raises:f"],
            "backend='raises:f' failed while it was loaded: ValueError: on purpose (*raises.py:1)",
        ),
        (["--backend=takes_x:f"], "backend 'takes_x:f' takes (x), but must take (batch, target_probs,*"),
        (["--device=tpu"], "device='tpu', but must be cpu, cuda or cuda:<index>"),
        (["--max-examples=0"], "max_examples=0, but must be >= 1"),
    ],
)
def test_wrong_options_are_one_line(run, pytester, arguments, message):
    pytester.makepyfile(raises="raise ValueError('on purpose')", takes_x="def f(x): ...")
    result = run(law_file("chain"), *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])
    assert "Traceback" not in result.stderr.str()


def test_a_sampler_that_raises_or_returns_nonsense_breaks_a_law(run, pytester):
    pytester.makepyfile(
        nonsense="""
import torch
def raising(batch, target_probs, coins, depth_cap):
    raise RuntimeError("CUDA error: an illegal memory access")
def shapeless(batch, target_probs, coins, depth_cap):
    return torch.zeros(3), torch.zeros(1), torch.zeros(1)
"""
    )
    names = ("--backend=nonsense:raising", "--backend=nonsense:shapeless")
    result = run(law_file("chain"), *names)
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            "  got:      RuntimeError: CUDA error: an illegal memory access (raised at *nonsense.py:*)",
            "  got:      accept_index of shape (3,), torch.float32",
            "  want:     integers of shape (*, 1) (batch *, 1 slots)",
        ]
    )


def test_workers_use_one_thread_and_the_controller_s_seed(run, pytester):
    pytester.makepyfile(
        """
import torch
from treeconv.pytest_plugin import _SUITE, each_backend

@each_backend
def test_threads(backend, device, request):
    assert torch.get_num_threads() == 1
    assert request.config.stash[_SUITE].seed == 77
"""
    )
    result = run("-n2", "--backend=eager", "--backend=reference", "--hypothesis-seed=77", subprocess=True)
    result.assert_outcomes(passed=2)


def test_another_suite_is_left_alone(run, pytester):
    """Its conftest takes our short names; nothing is printed, and our long names still work."""
    pytester.makeconftest(
        """
def pytest_addoption(parser):
    parser.addoption("--device", default="theirs")
    parser.addoption("--backend", default="theirs")
"""
    )
    pytester.makepyfile(
        """
import sys
def test_theirs(request):
    assert request.config.getoption("--device") == "mine"
    assert request.config.getoption("--backend") == "theirs"
    assert "torch" not in sys.modules and "hypothesis" not in sys.modules
"""
    )
    result = run("--device=mine", subprocess=True)
    result.assert_outcomes(passed=1)
    assert "treeconv:" not in result.stdout.str()
    result = run("--treeconv-backend=eager", "--collect-only", subprocess=True)
    result.stdout.fnmatch_lines(["treeconv: backends eager"])


def test_loading_the_plugin_imports_nothing_heavy():
    heavy = "{'torch', 'hypothesis', 'scipy', 'treeconv.laws'} & set(sys.modules)"
    done = subprocess.run(  # our own interpreter and text
        [sys.executable, "-c", f"import sys, treeconv.pytest_plugin; print({heavy})"],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=True,
    )
    assert done.stdout == "set()\n"


@pytest.mark.parametrize(
    ("worker", "device", "visible", "want"),
    [
        ("gw0", "cuda", "4,5,6", "4"),
        ("gw4", "cuda", "4,5,6", "5"),
        ("gw1", "cuda", "4", "4"),
        ("gw1", "cuda:1", "4,5", "4,5"),
        ("gw1", None, "4,5", "4,5"),
        ("", "cuda", "4,5", "4,5"),
    ],
)
def test_each_worker_sees_one_gpu(monkeypatch, worker, device, visible, want):
    monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    pytest_plugin._narrow_gpus(device)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == want


def test_the_seed_of_the_day_is_a_date():
    assert re.fullmatch(r"20\d\d[01]\d[0-3]\d", str(suite.seed_of_the_day()))
