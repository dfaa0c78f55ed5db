"""What the suite found in Hugging Face transformers: run, and found again, where the ``peers`` extra is.

    python fuzz/peer_findings.py                 # the table
    python fuzz/peer_findings.py --write-cases   # (re)write the stored cases under corpus/

``hf-chain`` is ``_speculative_sampling``; ``hf-filters`` the temperature, top-k, top-p and min-p warpers
before our own walk. None of these is a bias that a reader of text would see; each is a place where the law
that comes out is not the one that was asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from fuzz.findings import CORPUS, main
from treeconv.case import Request, VerifyCase
from treeconv.corpus import CorpusEntry, load_entry, save_entry
from treeconv.ledger import Finding, Ledger
from treeconv.tree import DraftTree

__all__ = ["PEER_LEDGER", "stored_peer_case"]

_SEEN = ("transformers 5.24.0",)
_SAMPLING = "huggingface/transformers generation/utils.py, _speculative_sampling"
_WARPERS = "huggingface/transformers generation/logits_process.py"

PEER_LEDGER = Ledger(
    (
        Finding(
            id="hf-inclusive-ratio",
            law="chain-rule",
            backend="hf-chain",
            versions=_SEEN,
            summary="a coin exactly at p / q accepts: the test is r <= p / q",
            source=f"{_SAMPLING}: is_accepted = r_i <= probability_ratio",
            sees="a bias of at most 2**-24 a draft towards the drafter",
            case="regressions/chain-rule-59bc7cfe5ee8.json",
        ),
        Finding(
            id="hf-coin-zero",
            law="chain-rule",
            backend="hf-chain",
            versions=_SEEN,
            summary="coin 0 accepts a draft of no mass: 0 <= 0 / q (B01 in the chain rule)",
            source=f"{_SAMPLING}: is_accepted = r_i <= probability_ratio",
            sees="about once in 2**24 drafts a token that a logits processor forbids",
            case="regressions/chain-rule-e8278fd40d7c.json",
        ),
        Finding(
            id="hf-nan-draft-law",
            law="chain-rule",
            backend="hf-chain",
            versions=_SEEN,
            summary="a NaN in the draft law of a rejected token raises in torch.multinomial (B65)",
            source=f"{_SAMPLING}: p - q is drawn from as it is",
            sees="RuntimeError: probability tensor contains either inf, nan or element < 0",
            case="regressions/chain-rule-a3e59705525c.json",
        ),
        Finding(
            id="hf-empty-residual",
            law="chain-rule-logits",
            backend="hf-chain",
            versions=_SEEN,
            summary="q a rounding above p everywhere: no residual is left, and 0 / 0 is drawn from (X4)",
            source=f"{_SAMPLING}: the empty residual is handled for assistant_ensemble_weight only",
            sees="RuntimeError at the largest coin of 24 bits, where p and q are equal but for rounding",
            case="regressions/chain-rule-logits-7becff1e635f.json",
        ),
        Finding(
            id="hf-top-k-keeps-ties",
            law="filters-logits",
            backend="hf-filters",
            versions=_SEEN,
            summary="top-k keeps every token that equals the k-th (B19)",
            source=f"{_WARPERS}, TopKLogitsWarper: scores < torch.topk(scores, top_k)[0][..., -1, None]",
            sees="more than k tokens where logits tie, as bfloat16 ones often do",
            case="regressions/filters-logits-d5a4ca845daa.json",
        ),
        Finding(
            id="hf-top-p-cuts-low-ids",
            law="filters-logits",
            backend="hf-filters",
            versions=_SEEN,
            summary="top-p sorts upwards, and of equal tokens cuts the lowest ids first",
            source=f"{_WARPERS}, TopPLogitsWarper: torch.sort(scores, descending=False)",
            sees="of tied tokens at the cut the other ones stay than where ties go to the lowest id",
            case="regressions/filters-logits-f115fa4c3851.json",
        ),
        Finding(
            id="hf-tiny-temperature",
            law="oracle-agreement",
            backend="hf-filters",
            versions=_SEEN,
            summary="logits are divided by T before the maximum is taken off: at T = 1e-40 all is NaN (B66)",
            source=f"{_WARPERS}, TemperatureLogitsWarper: scores / temperature",
            sees="a NaN law; torch.multinomial raises",
            case="regressions/oracle-agreement-5810b58996d9.json",
        ),
        Finding(
            id="hf-large-logits",
            law="critical-coins-logits",
            backend="hf-filters",
            versions=_SEEN,
            summary="for the same reason masses are off by |logit| / T * 2**-24 where logits are large",
            source=f"{_WARPERS}, TemperatureLogitsWarper: scores / temperature",
            sees="at T = .6 a mass off by 8.5e-6 of itself with logits 300 and 299, 2.7e-4 at 3000 and 2999",
            case="regressions/critical-coins-logits-b41d6728ebbd.json",
        ),
    )
)


def stored_peer_case(finding: Finding) -> CorpusEntry:
    """The finding's entry under ``corpus/``."""
    return load_entry(CORPUS / finding.case)


def _one(tokens: list[int], row: list[float], coin: float = 0.5, final: float = 0.5, **more: Any) -> Request:
    size = len(tokens)
    rows = np.tile(np.array(row, np.float32), (size, 1))
    if "draft_probs" in more:
        more["draft_probs"] = np.tile(np.array(more["draft_probs"], np.float32), (size, 1))
    values = {"temperature": 1.0, **more}
    return Request(
        DraftTree.chain(tokens), rows, accept=np.full(size, coin, np.float32), final=final, **values
    )


def _entries() -> dict[str, CorpusEntry]:
    """The stored cases, by finding: the smallest that show each."""

    def chain(request: Request) -> VerifyCase:
        return VerifyCase((request,), kind="probs", rule="chain")

    def logits(request: Request) -> VerifyCase:
        return VerifyCase((request,))

    below_half, below_one = 0.5 - 2.0**-24, 1 - 2.0**-24
    nan = float("nan")
    cases = {
        "hf-inclusive-ratio": chain(_one([0, 0], [0.5, 0.5], draft_probs=[1.0, 0.0])),
        "hf-coin-zero": chain(_one([0, 1], [1.0, 0.0], 0.0, draft_probs=[0.0, 1.0])),
        "hf-nan-draft-law": chain(_one([0, 0], [0.5, 0.5], draft_probs=[nan, 0.0])),
        "hf-empty-residual": chain(_one([0, 0], [below_half] * 2, below_one, draft_probs=[0.5, 0.5])),
        "hf-top-k-keeps-ties": logits(_one([0], [0.0, 0.0], final=0.75, top_k=1)),
        "hf-top-p-cuts-low-ids": logits(_one([0], [0.0, 0.0], final=0.25, top_p=0.5)),
        "hf-tiny-temperature": logits(_one([0], [0.0, 5.0, 4.0], temperature=1e-40)),
        "hf-large-logits": logits(_one([0], [300.0, 299.0], temperature=0.6)),
    }
    return {
        name: CorpusEntry(
            law=PEER_LEDGER[name].law,
            case=case,
            note=PEER_LEDGER[name].summary,
            source=PEER_LEDGER[name].source,
            backend=PEER_LEDGER[name].backend,
        )
        for name, case in cases.items()
    }


def write_cases() -> dict[str, str]:
    """Save every case; finding -> its path under ``corpus/``."""
    placed = {}
    for name, entry in _entries().items():
        path = save_entry(CORPUS / "regressions", entry)
        placed[name] = str(path.relative_to(CORPUS))
    return placed


if __name__ == "__main__":
    main(PEER_LEDGER, write_cases)
