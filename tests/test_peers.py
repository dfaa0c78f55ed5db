"""Contract: transformers keeps the laws it should; what it breaks is in the ledger, and is found again.

Runs where the ``peers`` extra is installed (``make peers``).
"""

import importlib.util
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))  # fuzz/ is no installed package

from fuzz import peer_findings
from fuzz.peer_findings import PEER_LEDGER, stored_peer_case
from treeconv.backends.registry import get_backend
from treeconv.case import Request, VerifyCase
from treeconv.corpus import load_entry
from treeconv.errors import BackendUnavailable, InvalidArgument, LawBroken
from treeconv.laws import BACKEND_LAWS, law_named, why_not
from treeconv.replay import replay_entry
from treeconv.suite import check_law
from treeconv.tree import DraftTree

PEERS = ("hf-chain", "hf-filters")
HAS_PEERS = importlib.util.find_spec("transformers") is not None
needs_peers = pytest.mark.skipif(not HAS_PEERS, reason="transformers is not installed: make peers")
#: laws that a random search breaks by a known finding, though those that can be are undone: :func:`repaired`
BROKEN = {
    "hf-chain": {"chain-rule", "chain-rule-logits", "chain-rule-purity"},
    "hf-filters": {"filters-logits", "filters-wide", "filters-purity"},
}
RULES = {"hf-chain": "chain", "hf-filters": "target_only"}
KEPT = [
    pytest.param(name, law, id=f"{name}-{law.name}")
    for name in (PEERS if HAS_PEERS else ())
    for law in BACKEND_LAWS
    if law.rule == RULES[name] and law.name not in BROKEN[name] and not why_not(law, get_backend(name))
]


def repaired(name):
    """The peer without the known findings that no draw of cases keeps clear of."""
    settings = {"hf-chain": {}, "hf-filters": {"is_centred": True}}
    return type(get_backend(name))(**settings[name])


@pytest.mark.parametrize("finding", list(PEER_LEDGER), ids=lambda finding: finding.id)
def test_a_findings_case_is_stored_and_our_backends_keep_it(finding):
    entry = stored_peer_case(finding)
    assert (entry.law, entry.backend, entry.note) == (finding.law, finding.backend, finding.summary)
    law = law_named(finding.law)
    for name in ("reference", "eager"):
        backend = get_backend(name)
        if not why_not(law, backend) and entry.case.rule in backend.traits.rules:
            assert replay_entry(entry, backend)


def test_the_stored_cases_are_what_the_table_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(peer_findings, "CORPUS", tmp_path)
    assert peer_findings.write_cases() == {finding.id: finding.case for finding in PEER_LEDGER}
    for finding in PEER_LEDGER:
        assert load_entry(tmp_path / finding.case) == stored_peer_case(finding)


@needs_peers
@pytest.mark.parametrize("finding", list(PEER_LEDGER), ids=lambda finding: finding.id)
def test_a_finding_is_found_again(finding):
    backend = get_backend(finding.backend)
    verdict = PEER_LEDGER.judge(
        finding.id,
        backend.version,
        {
            "the stored case": lambda: replay_entry(stored_peer_case(finding), backend),
            "the suite": lambda: _search(finding.law, backend),
        },
    )
    assert verdict.outcome in ("found again", "absent in this version"), verdict.message


def _search(law, backend):
    outcome = check_law(law_named(law), backend, seed=1, shrink=False)
    if outcome.broken:
        raise outcome.broken


@needs_peers
@pytest.mark.parametrize(("name", "law"), KEPT)
def test_the_other_laws_are_kept(name, law):
    outcome = check_law(law, repaired(name), max_examples=100, seed=1)
    assert not outcome.broken, str(outcome.broken)
    assert outcome.decisions


@needs_peers
def test_beyond_the_inclusive_test_the_chain_is_right_to_the_boundary():
    """With coins handed one float32 up, every boundary of clean laws is where the oracle says."""
    HfChain = type(get_backend("hf-chain"))
    p = np.array([[0.5, 0.25, 0.125, 0.125], [0.125, 0.5, 0.25, 0.125], [0.25] * 4], np.float32)
    broken = 0
    for shift in (1, 2, 3):  # q is p with its masses moved on, so that residuals differ
        q = np.roll(p, shift, axis=1)
        for tokens in product(range(4), repeat=2):
            request = Request(DraftTree.chain([0, *tokens]), p, 1.0, [0.5] * 3, 0.5, draft_probs=q)
            case = VerifyCase((request,), kind="probs", rule="chain")
            assert law_named("chain-rule").run(case, HfChain(is_exclusive=True))
            try:
                law_named("chain-rule").run(case, HfChain())
            except LawBroken:
                broken += 1
    assert broken > 20  # as it is: wherever p is below q at a drafted token


@pytest.mark.skipif(HAS_PEERS, reason="transformers is installed here")
@pytest.mark.parametrize("name", PEERS)
def test_without_the_extra_a_peer_says_what_is_missing(name):
    with pytest.raises(BackendUnavailable, match="No module named 'transformers'"):
        get_backend(name)


def test_a_ledger_judges_every_peer_by_a_version():
    with pytest.raises(InvalidArgument, match="attempts"):
        PEER_LEDGER.judge("hf-coin-zero", "transformers 5.24.0", {})
    assert PEER_LEDGER.judge("hf-coin-zero", None, {}).outcome == "not launched"
