"""What the suite found in shipped samplers: each entry is launched in every GPU run and must be found again.

    python fuzz/findings.py                 # the table
    python fuzz/findings.py --write-cases   # (re)write the stored cases under corpus/

Cases that one generated call can hold are in ``corpus/regressions/`` and belong to a law of the suite. Three
need more than that (siblings no tree may have, two calls on one buffer, tensors of 18 GB): ``corpus/device/``
holds their essence, and :func:`replay_device_case` plays it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv.case import Request, VerifyCase
from treeconv.corpus import CorpusEntry, Expected, RawCase, load_entry, save_entry
from treeconv.errors import InvalidArgument, LawBroken
from treeconv.ledger import Finding, Ledger, NotLaunched
from treeconv.tree import Coins, DraftTree

if TYPE_CHECKING:
    from collections.abc import Callable

    from treeconv.backends.base import Backend

__all__ = ["CORPUS", "LEDGER", "main", "replay_device_case", "stored_case"]

CORPUS = Path(__file__).resolve().parent.parent / "corpus"
_SEEN = ("sgl_kernel 0.4.5",)
_KERNEL = "sgl-project/sglang sgl-kernel/csrc/speculative/speculative_sampling.cuh"

LEDGER = Ledger(
    (
        Finding(
            id="sgl-coin-zero",
            law="positive-mass",
            backend="sgl-raw",
            versions=_SEEN,
            summary="coin 0 accepts a child of no mass: the test is coin <= acc",
            source="sgl-project/sglang#35771, fixed in SGLang by PR#35798 (B01)",
            sees="about once in 2**24 nodes a token the target forbids; with a grammar mask, broken output",
            case="regressions/positive-mass-fc2c94e49939.json",
        ),
        Finding(
            id="sgl-inclusive-boundary",
            law="critical-coins",
            backend="sgl-raw",
            versions=_SEEN,
            summary="a coin exactly at a boundary accepts the child before it",
            source="sgl-project/sglang PR#35798, second fault of that fix (B02)",
            sees="a bias of 2**-24 per node towards earlier children",
            case="regressions/critical-coins-25b677fb3095.json",
        ),
        Finding(
            id="sgl-empty-residual",
            law="covered-support",
            backend="sgl-raw",
            versions=_SEEN,
            summary="children cover the support, the coin is above their float32 sum: token V - 1 is emitted",
            source=f"{_KERNEL}: sampled_id = d - 1 where no residual is left; no report found",
            sees="at peaked rows now and then the last vocabulary id, whatever its mass; no error",
            case="regressions/oracle-agreement-ff81e0f05ff4.json",
        ),
        Finding(
            id="sgl-unreported-rows",
            law="bad-rows",
            backend="sgl-raw",
            versions=_SEEN,
            summary="a visited row of NaN emits token V - 1, with no status",
            source="sgl-project/sglang#33187 (B64)",
            sees="the request goes on from a token nobody drew; no error",
            case="regressions/bad-rows-b98902bb28aa.json",
        ),
        Finding(
            id="sgl-duplicate-siblings",
            law="duplicate-siblings",
            backend="sgl-raw",
            versions=_SEEN,
            summary="two siblings with one token: its mass is added twice, and nothing refuses them",
            source=f"{_KERNEL}: prob_acc sums over siblings without looking at their tokens (B13)",
            sees="that token up to twice as often as the target says",
            case="device/duplicate-siblings-cc92865b76e3.json",
        ),
        Finding(
            id="sgl-offsets-wrap",
            law="offsets-64-bit",
            backend="sgl-raw",
            versions=_SEEN,
            summary="element offsets are kept in 32 unsigned bits: requests past 2**32 read another's rows",
            source=f"{_KERNEL}: uint32_t cur_prob_offset (B75)",
            sees="at 430 requests x 64 nodes x 163840 tokens, wrong tokens from request 410 on; no error",
            case="device/offsets-64-bit-0351df416201.json",
        ),
        Finding(
            id="sgl-scratch-in-graph",
            law="graph-replay",
            backend="sgl-raw",
            versions=_SEEN,
            summary="draft_probs keeps rejected masses: uncleared in a graph, it masks those tokens for ever",
            source="sgl-project/sglang PR#12561 (B60): the caller must clear it inside the graph",
            sees="tokens that earlier replays rejected at a node are never drawn there again",
            case="device/graph-replay-bbd1ee71ab5b.json",
        ),
    )
)


def stored_case(finding: Finding) -> CorpusEntry:
    """The finding's entry under ``corpus/``."""
    return load_entry(CORPUS / finding.case)


def _broken(entry: CorpusEntry, backend: Backend, got: str, want: str) -> LawBroken:
    lines = [f"law broken: {entry.law}", f"  case:     {entry.note}", f"  backend:  {backend.name}"]
    lines += [f"  got:      {got}", f"  want:     {want}"]
    return LawBroken("\n".join(lines), law=entry.law, backend=backend.name)


def replay_device_case(entry: CorpusEntry, backend: Any, device: str) -> int:
    """Play one of the cases that :func:`treeconv.replay.replay_entry` cannot.

    Returns:
        How many decisions were judged.

    Raises:
        LawBroken: the backend decided otherwise than the entry expects.
        NotLaunched: the device is too small for it.
        CorpusError: an entry that is none of the three.
    """
    play = {
        "duplicate-siblings": _play_duplicates,
        "graph-replay": _play_two_calls,
        "offsets-64-bit": _play_offsets,
    }
    return play[entry.law](entry, backend, device)


def _tokens(entry: CorpusEntry) -> list[list[int]]:
    assert entry.expected is not None
    assert entry.expected.tokens is not None
    return [list(row) for row in entry.expected.tokens]


def _play_duplicates(entry: CorpusEntry, backend: Any, device: str) -> int:
    assert isinstance(entry.case, RawCase)
    call = entry.case.tensors(device)
    try:
        output = backend.verify_probs(call.batch, call.rows, call.coins, call.depth_cap)
    except InvalidArgument:  # refused, as it should be
        return 1
    if output.tokens != _tokens(entry):
        raise _broken(entry, backend, f"tokens {output.tokens}", f"refused, or {_tokens(entry)}")
    return 1


def _play_two_calls(entry: CorpusEntry, backend: Any, device: str) -> int:
    """The requests one after the other, alone, on what the one before left in the backend's buffers."""
    assert isinstance(entry.case, VerifyCase)
    for request, want in zip(entry.case.requests, _tokens(entry), strict=True):
        call = entry.case.replace_requests([request]).tensors(device)
        got = backend.verify_probs(call.batch, call.rows, call.coins, call.depth_cap).tokens[0]
        if got != want:
            raise _broken(entry, backend, f"tokens {got} after another call", f"{want}, as alone")
    return len(entry.case.requests)


def _play_offsets(entry: CorpusEntry, backend: Any, device: str) -> int:
    """Every request's root row has its mass on the request's number; no request has children."""
    import torch  # noqa: PLC0415

    from treeconv._gpu_checks import no_room  # noqa: PLC0415
    from treeconv.convert import to_verify_input  # noqa: PLC0415

    B, N, V = (int(entry.parameters[name]) for name in ("batch_size", "num_draft_tokens", "vocab_size"))
    if (reason := no_room((B, N, V), 8, device)) is not None:  # rows and scratch
        raise NotLaunched(reason)
    batch = to_verify_input([DraftTree((-1,), (0,))] * B, N, device=device)
    rows = torch.zeros((B, N, V), device=device)
    numbers = torch.arange(B, device=device)
    rows[numbers, 0, numbers] = 1.0
    coins = Coins(torch.full((B, N), 0.5, device=device), torch.full((B,), 0.5, device=device))
    try:
        drawn = backend.verify_probs(batch, rows, coins, 2).predicts.view(B, N)[:, 0].long()
    except InvalidArgument:  # refused, as it may be
        return 1
    wrong = (drawn != numbers).nonzero()
    if len(wrong):
        first = int(wrong[0])
        got = f"{len(wrong)} of {B} requests wrong, request {first} first: token {int(drawn[first])}"
        raise _broken(entry, backend, got, f"token {first} for request {first}")
    return B


def _request(
    parents: list[int], tokens: list[int], row: list[float], coin: float, final: float = 0.5
) -> Request:
    size = len(parents)
    rows = np.tile(np.array(row, np.float32), (size, 1))
    return Request(
        DraftTree(tuple(parents), tuple(tokens)), rows, 1.0, np.full(size, coin, np.float32), final
    )


def _entries() -> dict[str, CorpusEntry]:
    """The stored cases, by finding: the smallest that show each fault."""
    below_one = 1 - 2.0**-24

    def entry(name: str, case: Any, law: str, **more: Any) -> CorpusEntry:
        finding = LEDGER[name]
        return CorpusEntry(
            law=law, case=case, note=finding.summary, source=finding.source, backend="sgl-raw", **more
        )

    def probs(*requests: Request) -> VerifyCase:
        return VerifyCase(requests, kind="probs")

    nan = float("nan")
    return {
        "sgl-coin-zero": entry(
            "sgl-coin-zero", probs(_request([-1, 0], [0, 1], [1.0, 0.0], 0.0)), "positive-mass"
        ),
        "sgl-inclusive-boundary": entry(
            "sgl-inclusive-boundary", probs(_request([-1, 0], [0, 0], [0.5, 0.5], 0.5)), "critical-coins"
        ),
        "sgl-empty-residual": entry(
            "sgl-empty-residual",
            probs(_request([-1, 0, 0, 0], [0, 0, 1, 2], [0.333333] * 3 + [0.0], below_one)),
            "oracle-agreement",
        ),
        "sgl-unreported-rows": entry(
            "sgl-unreported-rows", VerifyCase((_request([-1], [0], [nan, 0.0], 0.5),)), "bad-rows"
        ),
        "sgl-duplicate-siblings": entry(
            "sgl-duplicate-siblings",
            RawCase(
                candidates=((9, 1, 1),),
                retrieve_next_token=((1, -1, -1),),
                retrieve_next_sibling=((-1, 2, -1),),
                rows=np.tile(np.array([0.2, 0.3, 0.4, 0.1], np.float32), (1, 3, 1)),
                temperature=(1.0,),
                accept=np.full((1, 3), 0.45, np.float32),
                final=np.array([0.5], np.float32),
                depth_cap=2,
                kind="probs",
            ),
            "duplicate-siblings",
            expected=Expected(tokens=((2,),)),
        ),
        "sgl-offsets-wrap": entry(
            "sgl-offsets-wrap",
            probs(_request([-1], [0], [1.0, 0.0], 0.5)),
            "offsets-64-bit",
            parameters={"batch_size": 430, "num_draft_tokens": 64, "vocab_size": 163840},
        ),
        # The first call rejects token 0 and emits 1; the second has no children, and token 0 half its mass.
        "sgl-scratch-in-graph": entry(
            "sgl-scratch-in-graph",
            VerifyCase(
                (
                    _request([-1, 0], [0, 0], [0.5, 0.5], 0.75, 0.25),
                    _request([-1], [0], [0.5, 0.5], 0.75, 0.25),
                ),
                kind="probs",
                num_draft_tokens=2,
                depth_cap=2,
            ),
            "graph-replay",
            expected=Expected(tokens=((1,), (0,))),
        ),
    }


def write_cases() -> dict[str, str]:
    """Save every case; finding -> its path under ``corpus/``."""
    placed = {}
    for name, entry in _entries().items():
        shelf = (
            "regressions"
            if entry.law not in ("duplicate-siblings", "offsets-64-bit", "graph-replay")
            else "device"
        )
        path = save_entry(CORPUS / shelf, entry)
        placed[name] = str(path.relative_to(CORPUS))
    return placed


def main(ledger: Ledger, write: Callable[[], dict[str, str]]) -> None:
    """Print a ledger's findings, or write their cases anew, as ``sys.argv`` says."""
    if "--write-cases" in sys.argv:
        for name, path in write().items():
            print(f"{name:<24} {path}")  # noqa: T201
    else:
        for finding in ledger:
            print(f"{finding.id:<24} {finding.law:<22} {', '.join(finding.versions)}: {finding.summary}")  # noqa: T201


if __name__ == "__main__":
    main(LEDGER, write_cases)
