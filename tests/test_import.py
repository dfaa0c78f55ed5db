"""What an import costs, and which way imports may point."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import treeconv

ROOT = Path(__file__).parents[1]


def run(code):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return done.stdout.strip()


def test_import_loads_neither_torch_nor_hypothesis():
    loaded = run("import sys, treeconv; print(*{name.split('.')[0] for name in sys.modules})").split()
    assert "treeconv" in loaded
    assert {"torch", "hypothesis", "pytest", "scipy", "rich", "triton"} & set(loaded) == set()


def test_trees_and_the_oracle_need_no_torch():
    """The exact law of a small tree, with torch made impossible to import."""
    code = """
import sys
sys.modules["torch"] = None
from treeconv import DraftTree, build_draft_tree, oracle
tree = build_draft_tree([[0.0, 1.0]], tree_budget=1, root_token_id=9)
assert tree == DraftTree([-1, 0], [9, 1])
print(*oracle.outcome_pmf(tree, [[0.25, 0.75], [1.0, 0.0]]).items())
"""
    assert run(code) == "((0,), Fraction(1, 4)) ((1, 0), Fraction(3, 4))"


def test_every_public_name_is_there():
    assert [name for name in treeconv.__all__ if not hasattr(treeconv, name)] == []
    assert treeconv.__all__ == sorted(treeconv.__all__)


@pytest.mark.skipif(
    shutil.which("lint-imports", path=str(Path(sys.executable).parent)) is None, reason="extra dev"
)
def test_imports_point_down_only():
    lint = Path(sys.executable).parent / "lint-imports"
    done = subprocess.run([str(lint), "--no-cache"], check=False, capture_output=True, text=True, cwd=ROOT)
    assert "Contracts: 2 kept, 0 broken." in done.stdout, done.stdout + done.stderr
