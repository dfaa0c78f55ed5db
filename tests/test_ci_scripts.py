"""The shell scripts of ``ci/``, without a GPU: which Python they take, and what they leave behind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STUB = '#!/bin/sh\ncase "$1" in -c) exit %d ;; *) echo \'%s\' "$@" ;; esac\n'  # -c: whether torch is there


def python_stub(path, name, imports_torch):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(STUB % (0 if imports_torch else 1, name))
    path.chmod(0o755)
    return str(path)


def run(script, *arguments, cwd, **variables):
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHON", "VENV", "OUT")}
    return subprocess.run(
        ["bash", str(script), *map(str, arguments)],  # noqa: S607
        capture_output=True, text=True, check=False, cwd=cwd, env=environment | variables,
    )  # fmt: skip


@pytest.fixture
def clone(tmp_path):
    """A folder with ``ci/gpu.sh`` and a python3 of its own on the path."""
    (tmp_path / "ci").mkdir()
    shutil.copy(ROOT / "ci" / "gpu.sh", tmp_path / "ci")
    python_stub(tmp_path / "bin" / "python3", "system", imports_torch=True)
    return tmp_path


def taken(clone, **variables):
    """The names of the stubs that ran the doctor and then the evidence."""
    path = f"{clone / 'bin'}:{os.environ['PATH']}"
    done = run(clone / "ci" / "gpu.sh", cwd=clone, PATH=path, **variables)
    assert done.returncode == 0, done.stderr
    doctor, evidence = done.stdout.splitlines()
    assert doctor.split()[1:] == ["-m", "treeconv", "doctor"]
    assert evidence.split()[1:] == ["ci/gpu_evidence.py"]
    return [doctor.split()[0], evidence.split()[0]]


def test_gpu_takes_the_python_that_has_torch(clone):
    """PYTHON if set; what ``make setup`` made, if it imports torch; else python3."""
    assert taken(clone) == ["system"] * 2
    venv = clone / ".venv" / "bin" / "python"
    python_stub(venv, "venv", imports_torch=False)
    assert taken(clone) == ["system"] * 2
    python_stub(venv, "venv", imports_torch=True)
    assert taken(clone) == ["venv"] * 2
    assert taken(clone, PYTHON=python_stub(clone / "own", "own", imports_torch=False)) == ["own"] * 2


def wheel(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def fetch(target, given):
    return run(
        ROOT / "ci" / "fetch_sgl_kernel.sh", given,
        cwd=ROOT, TREECONV_SGL_DIR=str(target), TREECONV_SGL_ARCH="sm90", PYTHON=sys.executable,
    )  # fmt: skip


def held(target):
    return {str(file.relative_to(target)): file.read_text() for file in target.rglob("*") if file.is_file()}


def test_a_bad_wheel_leaves_the_kernel_that_is_there(tmp_path):
    """Not a wheel, one that is missing, one cut short, one without these operators."""
    target = tmp_path / "sgl"
    old = {"sgl_kernel/__init__.py": "old", "sgl_kernel/gone.py": "old", "sgl_kernel/sm90/ops.so": "old"}
    assert fetch(target, wheel(tmp_path / "old.whl", old)).returncode == 0
    assert held(target) == old
    (tmp_path / "text.whl").write_text("no wheel")
    wheel(tmp_path / "other.whl", {"sgl_kernel/__init__.py": "new", "sgl_kernel/sm100/ops.so": "new"})
    whole = wheel(tmp_path / "whole.whl", {"sgl_kernel/sm90/ops.so": "new", "sgl_kernel/a.py": "new"})
    damaged = whole.read_bytes().replace(b"new", b"nwe", 1)
    (tmp_path / "damaged.whl").write_bytes(damaged)
    for name in ("text", "missing", "other", "damaged"):
        assert fetch(target, tmp_path / f"{name}.whl").returncode != 0, name
        assert held(target) == old, name
        assert [entry.name for entry in target.iterdir()] == ["sgl_kernel"], name


def test_a_new_kernel_takes_the_place_of_the_old_one_whole(tmp_path):
    target = tmp_path / "sgl"
    old = {"sgl_kernel/gone.py": "old", "sgl_kernel/sm90/ops.so": "old"}
    new = {"sgl_kernel/__init__.py": "new", "sgl_kernel/sm90/ops.so": "new"}
    assert fetch(target, wheel(tmp_path / "old.whl", old)).returncode == 0
    done = fetch(
        target, wheel(tmp_path / "new.whl", new | {"other/module.py": "", "sgl_kernel/sm100/x.so": ""})
    )
    assert (done.returncode, held(target)) == (0, new)
    assert [entry.name for entry in target.iterdir()] == ["sgl_kernel"]
    assert done.stdout == f"2 files, 0 MB, sm90 -> {target}\n"
