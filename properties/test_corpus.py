"""Stored cases, once found and never lost: each is judged by its law, on every backend.

One test per file, so that a bad file fails alone and the rest still run.
"""

from pathlib import Path

import pytest

from treeconv.corpus import load_entry, load_trace
from treeconv.pytest_plugin import each_backend
from treeconv.replay import law_of, replay_entry, replay_trace, why_not_judged
from treeconv.tree_laws import TreeLaw

CORPUS = Path(__file__).parents[1] / "corpus"
SHELVES = ("seeds", "regressions", "crashes")
ENTRIES = sorted(path for shelf in SHELVES for path in (CORPUS / shelf).rglob("*.json"))
TRACES = sorted(path for shelf in SHELVES for path in (CORPUS / shelf).rglob("*.trace"))


def test_the_corpus_is_there():
    """An empty corpus would pass every test below."""
    assert ENTRIES
    assert TRACES


@each_backend
@pytest.mark.parametrize("path", ENTRIES, ids=lambda path: path.stem)
def test_entry(path, backend, device):
    entry = load_entry(path)
    if isinstance(law_of(entry), TreeLaw):
        backend = None  # judged alike for every backend; cheap enough not to be told apart
    reason = why_not_judged(entry, backend)
    if reason:
        pytest.skip(f"{path.name}: {reason}")
    assert replay_entry(entry, backend, device) > 0


@each_backend
@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace(path, backend, device):
    """A real model's logits, over a real vocabulary, at temperature 0 and above."""
    if not backend.traits.takes_logits:
        pytest.skip(f"{backend.name} takes probabilities only, and a trace holds logits")
    trace = load_trace(path)
    for temperature in trace.temperatures:
        assert replay_trace(trace, temperature, backend, device) > 0
