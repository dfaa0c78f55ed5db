"""Contract: the commands, their last lines, exit codes and one-line errors."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from treeconv import DraftTree, __version__, suite, to_verify_input
from treeconv.backends.registry import get_backend
from treeconv.cli import main
from treeconv.corpus import load_entry
from treeconv.laws import Law, why_not

ROOT = Path(__file__).parents[1]
SEEDS = ROOT / "corpus" / "seeds"
TREES = [
    {"parents": [-1, 0, 0, 1], "token_ids": [9, 5, 7, 2]},
    {"parents": [-1, 0], "token_ids": [1, 0]},
]
LAST = re.compile(r"(PASS|FAIL) (\d+) laws, (\d+) backends, (\d+) cases, (\d+) broken")


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path, monkeypatch):
    """Failures are saved under the current directory, and samplers imported from it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def faulty(directory, module, name):
    text = f"import sys\nsys.path.append({str(ROOT / 'tests' / 'quality')!r})\nfrom faults import {name}\n"
    (directory / f"{module}.py").write_text(text)
    return f"{module}:{name}"


def saved(text):
    (path,) = set(re.findall(r"^  replay:   treeconv replay (\S+)", text, re.MULTILINE))
    return path


class TestVerify:
    def test_kept(self, capsys):
        assert main(["verify", "--max-examples", "4", "--seed", "1"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == f"treeconv {__version__}: 4 cases per law on cpu, --seed 1"
        assert lines[1].startswith("backends: reference, eager")
        judged = [
            (law, name)
            for law in suite.laws_named([])
            for name in (("reference", "eager") if isinstance(law, Law) else ("trees",))
            if name == "trees" or not why_not(law, get_backend(name))
        ]
        laws = len({law.name for law, _ in judged})  # not those of samplers that draw their own coins
        verdict, *numbers = LAST.fullmatch(lines[-1]).groups()
        assert (verdict, numbers[0], numbers[3]) == ("PASS", str(laws), "0")
        assert int(numbers[2]) == 4 * len(judged)
        rows = [line for line in lines if re.search(r"kept +\d+ cases +\d+\.\d s", line)]
        assert len(rows) == laws

    def test_broken(self, somewhere_else, capsys):
        backend = faulty(somewhere_else, "cli_faulty", "ResidualUnmasked")
        arguments = ["verify", "--backend", "reference", "--backend", backend, "--seed", "1"]
        arguments += ["--law", "outcome-law", "--law", "round-trip", "--max-examples", "60"]
        assert main(arguments) == 1
        out = capsys.readouterr().out
        assert "BROKEN" in out
        assert "law broken: outcome-law" in out
        assert LAST.fullmatch(out.splitlines()[-1]).groups()[::4] == ("FAIL", "1")
        assert load_entry(saved(out)).backend == backend
        # One kept, one broken: the row of the law says both.
        assert re.search(r"outcome-law .*kept .*BROKEN", out)

    def test_what_does_not_apply_is_said(self, somewhere_else, capsys):
        (somewhere_else / "cli_logits.py").write_text(
            "from treeconv import verify\n"
            "def f(batch, logits, temperature, coins, depth_cap):\n"
            "    return verify(batch, logits, temperature, coins, backend='eager', depth_cap=depth_cap)\n"
        )
        arguments = ["verify", "--backend", "cli_logits:f", "--max-examples", "3"]
        assert main([*arguments, "--law", "outcome-law", "--law", "chain"]) == 0
        out = capsys.readouterr().out
        assert re.search(r"outcome-law +skipped", out)
        assert "\n1 laws skipped\n" in out
        assert LAST.fullmatch(out.splitlines()[-1])
        assert "skipped on cli_logits:f: needs the probability interface" in out
        assert main([*arguments, "--law", "outcome-law"]) == 2
        assert capsys.readouterr().err == (
            "1/1 outcome-law cli_logits:f: skipped\n"  # a log sees each as it is done
            "treeconv: error: no law applies to these backends, so nothing was judged\n"
        )

    @pytest.mark.parametrize(
        "spoilt", ["output.accept_token_num.fill_(-1)", "output.predicts[output.predicts >= 0] = -1"]
    )
    def test_what_no_verifier_may_return_breaks_every_law_and_stops_none(
        self, somewhere_else, capsys, spoilt
    ):
        (somewhere_else / "cli_spoilt.py").write_text(
            "from treeconv.backends.eager import EagerBackend\n"
            "class Spoilt(EagerBackend):\n"
            "    def _spoil(self, output):\n"
            f"        {spoilt}\n"
            "        return output\n"
            "    def verify(self, *call, **more):\n"
            "        return self._spoil(super().verify(*call, **more))\n"
            "    def verify_probs(self, *call, **more):\n"
            "        return self._spoil(super().verify_probs(*call, **more))\n"
        )
        laws = ["autoregressive", "ranks-agree", "seeded-text", "outcome-law", "bad-rows", "purity"]
        arguments = ["verify", "--backend", "cli_spoilt:Spoilt", "--max-examples", "3", "--seed", "1"]
        assert main(arguments + [word for law in laws for word in ("--law", law)]) == 1
        out = capsys.readouterr().out
        assert LAST.fullmatch(out.splitlines()[-1])[5] == str(len(laws))
        assert out.count("  replay:   treeconv replay ") == len(laws)

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--law", "nonsense"], "law='nonsense', but must be one of round-trip, "),
            (["--backend", "nobody"], "backend='nobody', but must be one of reference, "),
            (["--device", "tpu"], "device='tpu', but must be cpu, cuda or cuda:<index>"),
            (["--max-examples", "0"], "max_examples=0, but must be >= 1"),
        ],
    )
    def test_wrong_arguments_are_one_line(self, capsys, arguments, message):
        assert main(["verify", *arguments]) == 2
        captured = capsys.readouterr()
        assert captured.err.startswith(f"treeconv: error: {message}")
        assert captured.err.count("\n") == 1

    def test_interrupted(self, monkeypatch, capsys):
        def interrupt(*_arguments, **_options):
            raise KeyboardInterrupt

        monkeypatch.setattr(suite, "check_law", interrupt)
        assert main(["verify"]) == 130
        assert capsys.readouterr().err == "treeconv: interrupted\n"

    def test_the_same_seed_is_the_same_run(self, somewhere_else, capsys):
        backend = faulty(somewhere_else, "cli_again", "InclusiveTest")
        arguments = ["verify", "--backend", backend, "--law", "critical-coins", "--seed", "9"]
        paths = set()
        for _ in range(2):
            main(arguments)
            paths.add(saved(capsys.readouterr().out))
        assert len(paths) == 1


class TestReplay:
    @pytest.fixture
    def failure(self, somewhere_else, capsys):
        backend = faulty(somewhere_else, "cli_replayed", "DepthCapIgnored")
        main(["verify", "--backend", backend, "--law", "depth-cap", "--seed", "1"])
        return saved(capsys.readouterr().out)

    def test_broken_on_the_backend_it_was_found_on(self, failure, capsys):
        assert main(["replay", failure]) == 1
        out = capsys.readouterr().out
        assert out.startswith("law broken: depth-cap")
        assert out.endswith(f"  replay:   treeconv replay {failure} --backend cli_replayed:DepthCapIgnored\n")

    def test_kept_elsewhere(self, failure, capsys):
        assert main(["replay", failure, "--backend", "eager", "--backend", "reference"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.split(",")[0] for line in lines] == [
            "kept: depth-cap on eager",
            "kept: depth-cap on reference",
        ]

    def test_published_vectors(self, capsys):
        codes = {path.name: main(["replay", str(path)]) for path in SEEDS.glob("*.json")}
        lossless = {path.name: load_entry(path).lossless for path in SEEDS.glob("*.json")}
        assert codes == {name: 0 if kept else 2 for name, kept in lossless.items()}
        captured = capsys.readouterr()
        assert (
            captured.out.count("not judged: oracle-agreement on eager: recorded at thresholds (0.0, 0.0)")
            == 3
        )
        assert "nothing was judged" in captured.err

    def test_a_trace(self, capsys):
        assert main(["replay", str(SEEDS / "essay-chain.trace"), "--backend", "eager"]) == 0
        assert re.fullmatch(r"kept: trace essay-chain on eager, \d+ decisions\n", capsys.readouterr().out)

    def test_a_tree_law(self, monkeypatch, capsys):
        """Broken conversion: positions count slots instead of depths."""
        from treeconv import tree_laws  # noqa: PLC0415

        def shifted(*arguments):
            batch = to_verify_input(*arguments)
            batch.positions[:, 2:] += 1
            return batch

        with monkeypatch.context() as patch:
            patch.setattr(tree_laws, "to_verify_input", shifted)
            assert main(["verify", "--law", "mask-and-positions", "--seed", "1"]) == 1
            out = capsys.readouterr().out
            path = saved(out)
            assert main(["replay", path]) == 1
            capsys.readouterr()
        assert main(["replay", path]) == 0
        assert capsys.readouterr().out.startswith("kept: mask-and-positions, ")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (None, "cannot be read: No such file"),
            ("", "not JSON"),
            ("{", "not JSON"),
            ('{"schema": 99}', "schema=99, but this treeconv reads schema 1"),
        ],
    )
    def test_bad_files_are_one_line(self, somewhere_else, capsys, content, message):
        path = somewhere_else / "case.json"
        if content is not None:
            path.write_text(content)
        assert main(["replay", str(path)]) == 2
        err = capsys.readouterr().err
        assert err.startswith(f"treeconv: error: {path}: ")
        assert message.lower() in err.lower() or "json" in message.lower()
        assert err.count("\n") == 1


class TestConvert:
    def test_json_is_the_layout(self, somewhere_else, capsys):
        path = somewhere_else / "trees.json"
        path.write_text(json.dumps({"trees": TREES, "prefix_lens": [3, 0], "num_draft_tokens": 5}))
        assert main(["convert", str(path), "--json"]) == 0
        layout = json.loads(capsys.readouterr().out)
        batch = to_verify_input([DraftTree(**tree) for tree in TREES], 5, [3, 0])
        for name in batch.__dataclass_fields__:
            assert layout[name] == getattr(batch, name).tolist()
        assert layout["tree_mask"][0][3] == [1, 1, 0, 1, 0]

    def test_picture(self, monkeypatch, capsys):
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(TREES[0])))
        assert main(["convert", "-"]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "request 0: 4 nodes, depth 2, prefix 0",
            "node 0: token 9",
            "├─ node 1: token 5",
            "│  └─ node 3: token 2",
            "└─ node 2: token 7",
            "",
            "slot  token  index  next_token  next_sibling  position  sees slots (besides the prefix)",
            "   0      9      0           1            -1         0  #...",
            "   1      5      1           3             2         1  ##..",
            "   2      7      2          -1            -1         1  #.#.",
            "   3      2      3          -1            -1         2  ##.#",
            "",
        ]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("{", "no JSON"),
            ("[]", "must hold a tree, or a list of at least one"),
            ("7", "must hold a tree, or a list of at least one"),
            ("[7]", "tree 0: must hold parents and token_ids alone, but holds int"),
            ('{"parents": [-1]}', "tree 0: must hold parents and token_ids alone, but holds ['parents']"),
            ('{"parents": -1, "token_ids": [1]}', "tree 0: parents and token_ids must be lists of integers"),
            ('{"parents": [-1], "token_ids": [1.5]}', "tree 0: token_ids="),
            ('[{"parents": [-1, 1], "token_ids": [1, 2]}]', "tree 0: parents[1]=1, but must be in [0, 0]"),
            ('{"parents": [-1, 0, 0], "token_ids": [1, 2, 2]}', "tree 0: token_ids[2]=2 repeats its sibling"),
            ('{"trees": [{"parents": [-1], "token_ids": [1]}], "prefix_lens": [1, 2]}', "prefix_lens"),
            ('{"parents": [-1, 0], "token_ids": [1, 2], "num_draft_tokens": 1}', "num_draft_tokens=1"),
            ('{"parents": [-1], "token_ids": [1], "num_draft_tokens": 99999999999}', "must be <= 1048576"),
            ('{"parents": [-1], "token_ids": [1], "num_draft_tokens": 1048576}', "B * N * N must be <="),
        ],
    )
    def test_malformed_trees_are_one_line(self, monkeypatch, capsys, text, message):
        monkeypatch.setattr(sys, "stdin", io.StringIO(text))
        assert main(["convert", "-"]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.startswith("treeconv: error: ")
        assert err.count("\n") == 1

    def test_missing_file(self, capsys):
        assert main(["convert", "nowhere.json"]) == 2
        assert capsys.readouterr().err == (
            "treeconv: error: nowhere.json: cannot be read: No such file or directory\n"
        )


def test_doctor(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for line in (
        rf"treeconv +{re.escape(__version__)} ",
        r"torch +\d",
        r"hypothesis +\d",
        r"device +cpu, \d+ threads",
        r"backend +reference: available, runs on cpu$",
        r"backend +eager: available, runs on cpu and cuda$",
        r"backend +sgl: ",
    ):
        assert re.search(f"^{line}", out, re.MULTILINE), line


def test_doctor_without_torch_says_so_and_how_to_get_it(tmp_path):
    """Where nothing works yet is where the doctor is asked first."""
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    done = subprocess.run(
        [sys.executable, "-m", "treeconv", "doctor"],
        capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (2, "")
    assert "device        none: torch cannot be imported here (No module named 'torch')" in done.stdout
    assert "make setup" in done.stdout
    assert f"{sys.executable} -m pip install torch" in done.stdout
    for name in ("eager", "triton"):
        assert re.search(
            f"^backend +{name}: not available: .*No module named 'torch'", done.stdout, re.MULTILINE
        )


@pytest.mark.parametrize("arguments", [[], ["verify"], ["replay"], ["convert"], ["doctor"]])
def test_help(capsys, arguments):
    with pytest.raises(SystemExit, match="0"):
        main([*arguments, "--help"])
    assert "usage: treeconv" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["prove"], ["replay"], ["verify", "--max-examples", "few"]])
def test_wrong_usage(capsys, arguments):
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "usage: treeconv" in capsys.readouterr().err


def test_as_a_module_and_into_a_pipe_that_closes():
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = f"{sys.executable} -m treeconv doctor | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", command],  # noqa: S607
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("treeconv ")


def test_bench_without_a_cuda_device_says_so(capsys):
    """The figures are a device's; on a machine without one there is nothing to time."""
    if torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")

    assert main(["bench"]) == 2
    assert "measures a CUDA device, and none is here" in capsys.readouterr().err


def test_a_misspelt_key_is_named(tmp_path, capsys):
    file = tmp_path / "trees.json"
    file.write_text('{"trees": [{"parents": [-1], "token_ids": [9]}], "num_draft_token": 4}')
    assert main(["convert", str(file)]) == 2
    assert (
        "unknown key 'num_draft_token', but must be one of num_draft_tokens, parents,"
        in capsys.readouterr().err
    )
