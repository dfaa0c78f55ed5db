"""Contract: every law has its thin file under properties/, and that file runs that law."""

import importlib.util
import inspect
from pathlib import Path

import pytest
from hypothesis import is_hypothesis_test

from treeconv.laws import BACKEND_LAWS
from treeconv.tree_laws import TREE_LAWS

PROPERTIES = Path(__file__).parents[1] / "properties"
LAWS = [*TREE_LAWS, *BACKEND_LAWS]


def load(path):
    spec = importlib.util.spec_from_file_location(f"properties_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_each_law_has_its_file(law):
    name = f"test_{law.name.replace('-', '_')}"
    module = load(PROPERTIES / f"{name}.py")
    assert module.LAW is law
    test = getattr(module, name)
    assert is_hypothesis_test(test)
    (mark,) = [mark for mark in test.pytestmark if mark.name == "treeconv"]
    assert mark.kwargs == {"law": law}
    body = inspect.getsource(test.hypothesis.inner_test).splitlines()
    assert body[-1].strip().startswith("LAW.run(")
    assert len(inspect.getsource(module).splitlines()) < 25  # thin: what is judged lives in the law


def test_no_file_judges_an_unknown_law():
    known = {f"test_{law.name.replace('-', '_')}.py" for law in LAWS}
    assert {path.name for path in PROPERTIES.glob("test_*.py")} == known | {"test_corpus.py"}
