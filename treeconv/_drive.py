"""Ways to put a case to a backend: once, under many coins, or over the whole coin space."""

from __future__ import annotations

import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv import oracle
from treeconv.backends.base import handed_over
from treeconv.judge import Observed, Violation, judge, observe, target_rows
from treeconv.processors import PENALTIES, RequestProcessors
from treeconv.sampling import processed_logits, row_status, target_probs
from treeconv.tree import RowStatus, VerifyInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from fractions import Fraction

    import torch

    from treeconv.backends.base import Backend
    from treeconv.case import CaseTensors, Request, VerifyCase
    from treeconv.oracle import TargetRows
    from treeconv.tree import VerifyOutput

    CoinVector = tuple[Sequence[float], float]

__all__ = [
    "as_claimed",
    "as_handed",
    "as_probs",
    "as_views",
    "bytes_of",
    "call",
    "decide",
    "encodable",
    "input_tensors",
    "judge_all",
    "measure",
    "outcome_coins",
    "raised",
    "spread_coins",
    "submit",
]

_LONGEST_MESSAGE = 300
_ANY_DECISION = "a decision for every request"
_MAX_ELEMENTS = 2**24  # of the target rows in one call: 64 MB of float32


def as_probs(case: VerifyCase) -> VerifyCase:
    """The case with its processors and softmax done, for a verifier that takes probabilities only."""

    def law(request: Request, node: int) -> np.ndarray[Any, Any]:
        row = request.rows[node]
        if request.processors.kinds:
            held, tree = request.processors, request.tree
            row = processed_logits(
                row,
                [*held.committed_tokens, *(tree.token_ids[inner] for inner in tree.path(node))],
                **{name: getattr(held, name) for name in PENALTIES},
                logit_bias=held.logit_bias,
                token_bitmask=None if held.token_bitmask is None else held.token_bitmask[node],
            )
        status = row_status(row)
        if status is RowStatus.OK:
            return target_probs(row, request.temperature)
        return np.full_like(row, {RowStatus.NAN: np.nan, RowStatus.POS_INF: np.inf}.get(status, 0.0))

    requests = [
        replace(
            request,
            rows=np.stack([law(request, node) for node in range(len(request.tree))]),
            processors=RequestProcessors(),
        )
        for request in case.requests
    ]
    return replace(case, requests=tuple(requests), kind="probs", rows_dtype="float32")


def as_claimed(case: VerifyCase, backend: Backend) -> VerifyCase:
    """The case without filters, processors and a rule that the backend's traits do not claim."""
    traits = backend.traits
    without: dict[str, Any] = {}
    if case.is_filtered and not traits.takes_filters:
        without |= {"top_k": None, "top_p": 1.0, "min_p": 0.0}
    if case.rule not in traits.rules:
        without["draft_probs"] = None
    unknown = case.processor_kinds - set(traits.takes_processors)
    if without or unknown:
        requests = [
            replace(request, **without, processors=request.processors.without(unknown))
            for request in case.requests
        ]
        rule = case.rule if case.rule in traits.rules else "target_only"
        case = replace(case, requests=tuple(requests), rule=rule)
    return case


def as_handed(case: VerifyCase, backend: Backend) -> VerifyCase:
    """The case as the backend takes it: logits or probabilities, in a dtype that its traits claim."""
    traits = backend.traits
    if case.kind == "probs" and not traits.takes_probs:
        case = case.as_logits()
    if case.kind == "logits" and not traits.takes_logits:
        return as_probs(case)
    if case.kind == "logits" and case.rows_dtype not in traits.rows_dtypes:
        return case.with_rows_dtype(traits.rows_dtypes[0])
    return case


def input_tensors(tensors: CaseTensors) -> dict[str, torch.Tensor]:
    """Every tensor that a backend is handed, by what a failure calls it."""
    named = {
        **{name: getattr(tensors.batch, name) for name in tensors.batch.__dataclass_fields__},
        "target rows": tensors.rows,
        "temperature": tensors.temperature,
        "accept coins": tensors.coins.accept,
        "final coins": tensors.coins.final,
    }
    if tensors.filters is not None:
        named |= {name: getattr(tensors.filters, name) for name in ("top_k", "top_p", "min_p")}
    if tensors.processors is not None:
        named |= tensors.processors.tensors
    if tensors.rule is not None and tensors.rule.draft_probs is not None:
        named["draft probabilities"] = tensors.rule.draft_probs
    return named


def as_views(tensors: CaseTensors, *, aligned: bool = False) -> CaseTensors:
    """The same call, each tensor that a batch may bring as a view of a larger one.

    Requests lie along the last dimension but the vocabulary's, with a trap behind each: NaN, an id, a bit.
    ``aligned``: rows are padded to a multiple of 16, as engines pad a vocabulary, else by three.
    """
    import torch  # noqa: PLC0415

    def along_requests(tensor: torch.Tensor) -> torch.Tensor:
        buffer = torch.full((*tensor.shape[1:], 2 * tensor.shape[0]), 1, dtype=tensor.dtype).to(tensor.device)
        buffer[..., ::2] = tensor.movedim(0, -1)
        return buffer[..., ::2].movedim(-1, 0)

    def padded(tensor: torch.Tensor | None) -> Any:
        if tensor is None:
            return None
        trap = torch.nan if tensor.dtype.is_floating_point else -1
        inner = tensor.transpose(0, 1) if tensor.ndim == 3 else tensor
        width = inner.shape[-1]
        shape = (*inner.shape[:-1], (width // 16 + 1) * 16 if aligned else width + 3)
        buffer = torch.full(shape, trap, dtype=tensor.dtype, device=tensor.device)
        view = buffer[..., :width]
        view.copy_(inner)
        return view.transpose(0, 1) if tensor.ndim == 3 else view

    batch = VerifyInput(**{name: along_requests(tensor) for name, tensor in vars(tensors.batch).items()})
    processors, rule = tensors.processors, tensors.rule
    if processors is not None:
        penalties = processors.penalties
        if penalties is not None:
            penalties = replace(penalties, committed_tokens=along_requests(penalties.committed_tokens))
        processors = replace(
            processors,
            logit_bias=padded(processors.logit_bias),
            token_bitmask=padded(processors.token_bitmask),
            penalties=penalties,
        )
    if rule is not None:
        rule = replace(rule, draft_probs=padded(rule.draft_probs))
    return replace(tensors, batch=batch, rows=padded(tensors.rows), processors=processors, rule=rule)


def call(case: VerifyCase, backend: Backend, device: str) -> tuple[CaseTensors, VerifyOutput]:
    """Hand a case to a backend as it would be served."""
    tensors = case.tensors(device)
    return tensors, submit(tensors, case.kind, backend)


def submit(tensors: CaseTensors, kind: str, backend: Backend) -> VerifyOutput:
    """Call the backend on tensors.

    Raises:
        Violation: it raised, or returned something of another shape: no decision to judge.
        BackendUnavailable: the case has filters, processors or a rule that the backend does not claim.
    """
    import torch  # noqa: PLC0415

    more = handed_over(backend, tensors.filters, tensors.rule, tensors.processors)
    try:
        if kind == "probs":
            output = backend.verify_probs(
                tensors.batch, tensors.rows, tensors.coins, tensors.depth_cap, **more
            )
        else:
            output = backend.verify(
                tensors.batch, tensors.rows, tensors.temperature, tensors.coins, tensors.depth_cap, **more
            )
    except (Exception, SystemExit) as error:  # noqa: BLE001  # a stranger's sampler may raise anything: that is a finding
        raise Violation(0, raised(error), _ANY_DECISION) from None
    size, slots = tensors.batch.candidates.shape
    shapes = {
        "accept_index": (size, tensors.depth_cap),
        "accept_token_num": (size,),
        "predicts": (size * slots,),
        "status": (size,),
    }
    for name, shape in shapes.items():
        part = getattr(output, name, None)
        if not isinstance(part, torch.Tensor):
            found = f"returned {type(output).__name__}, of which {name} is {type(part).__name__}"
            raise Violation(0, found, "a VerifyOutput of torch tensors")
        if tuple(part.shape) != shape or part.dtype.is_floating_point or part.dtype is torch.bool:
            found = f"{name} of shape {tuple(part.shape)}, {part.dtype}"
            raise Violation(0, found, f"integers of shape {shape} (batch {size}, {slots} slots)")
        if part.device != tensors.rows.device:  # else it is read, or compared, where it does not lie
            want = f"tensors on {tensors.rows.device}, where the inputs are"
            raise Violation(0, f"{name} on device {part.device}", want)
        if name != "status" and torch.iinfo(part.dtype).bits < 32:
            want = "int32 or int64: token ids and flat indices of a large batch do not fit fewer bits"
            raise Violation(0, f"{name} of {part.dtype}", want)
    return output


def encodable(text: str) -> str:
    """A text that any file can hold: a lone surrogate, which UTF-8 has no bytes for, as its escape."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def raised(error: BaseException) -> str:
    """What was raised and where, on one line that a person can read and a file can hold."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    try:
        said = encodable(" ".join(str(error).split()))
    except Exception:  # noqa: BLE001  # its own __str__ raised
        said = "(a message that cannot be printed)"
    if len(said) > _LONGEST_MESSAGE:
        said = said[:_LONGEST_MESSAGE] + "..."
    return encodable(f"{type(error).__name__}: {said} (raised at {at.filename}:{at.lineno})")


def decide(case: VerifyCase, backend: Backend, device: str) -> list[Observed]:
    """What the backend did with each request.

    Raises:
        Violation: it raised, or returned something of another shape; on the first request alone that makes
            it do so, where one does, and with the coins that do.
    """
    try:
        _, output = call(case, backend, device)
    except Violation as violation:
        raise _alone(case, backend, device, violation) from None
    return observe([request.tree for request in case.requests], output, case.slots)


def _alone(case: VerifyCase, backend: Backend, device: str, violation: Violation) -> Violation:
    for request in case.requests:
        single = case.replace_requests([request])
        try:
            call(single, backend, device)
        except Violation as again:
            if again.want != _ANY_DECISION:
                return replace(again, case=single)
            rows = target_rows(request, case.kind, case.filter_order, case.rule)
            cap = case.effective_depth_cap
            walk = oracle.canonical_walk(request.tree, rows, request.accept.tolist(), request.final, cap)
            return replace(again, want=str(Observed(walk.path, walk.tokens, walk.status)), case=single)
    return violation


def judge_all(
    case: VerifyCase,
    backend: Backend,
    device: str,
    coins: Sequence[CoinVector],
    request: int = 0,
    rows: TargetRows | None = None,
) -> int:
    """The same request under every coin vector, as one batch (several over a large vocabulary), judged.

    The case's other requests stand before it: what is wrongly taken from them shows at its boundaries.

    ``rows``: the oracle's view of that request, where the caller has it already.
    """
    subject = case.requests[request]
    rows = rows or target_rows(subject, case.kind, case.filter_order, case.rule)
    cap = case.effective_depth_cap
    others = [*case.requests[:request], *case.requests[request + 1 :]]
    at_once = max(1, _MAX_ELEMENTS // (case.slots * case.vocab_size))
    for start in range(0, len(coins), at_once):
        part = coins[start : start + at_once]
        copies = [subject.with_coins(accept, final) for accept, final in part]
        decided = decide(case.replace_requests([*others, *copies]), backend, device)[len(others) :]
        for (accept, final), observed in zip(part, decided, strict=True):
            wrong = judge(subject.tree, rows, accept, final, cap, observed)
            if wrong:
                coin_vector = (tuple(float(coin) for coin in accept), float(final))
                raise Violation(request, observed, *wrong, coins=coin_vector)
    return len(coins)


def judge_made(cases: Sequence[VerifyCase], backend: Backend, device: str, count: int) -> int:
    """First requests of cases that a law made of its own, under so many spread coins; failures show them."""
    judged = 0
    for made in cases:
        try:
            judged += judge_all(made, backend, device, spread_coins(count, len(made.requests[0].tree)))
        except Violation as violation:
            raise replace(violation, case=made) from None
    return judged


def spread_coins(count: int, dimensions: int) -> list[CoinVector]:
    """Evenly spread coin vectors: a rank-1 lattice on the fractional parts of square roots."""
    roots = np.sqrt(np.arange(2, dimensions + 3, dtype=np.float64))
    points = (np.arange(1, count + 1)[:, None] * roots) % 1.0
    coins = np.minimum(points.astype(np.float32), np.float32(1 - 2**-24)).tolist()
    return [(row[1:], row[0]) for row in coins]


def outcome_coins(case: VerifyCase, request: Request) -> Iterator[tuple[Fraction, CoinVector]]:
    """The middle of every box of coins that the oracle names, with the box's exact volume."""
    rows = target_rows(request, case.kind, case.filter_order, case.rule)
    for cell in oracle.outcome_cells(request.tree, rows, case.effective_depth_cap):
        accept = [0.5] * len(request.tree)
        for slot, (low, high) in cell.accept.items():
            accept[slot] = float(np.float32(float((low + high) / 2)))
        yield cell.measure, (accept, float(np.float32(float(sum(cell.final) / 2))))


def measure(
    case: VerifyCase, request: Request, backend: Backend, device: str
) -> list[tuple[Fraction, Observed]]:
    """The backend's outcome in every box of coins, with the box's exact volume.

    A verifier is a step function of its coins; one coin vector from the middle of each box measures it.

    Raises:
        Violation: an output that contradicts itself.
    """
    vectors: list[CoinVector] = []
    volumes = []
    for volume, coins in outcome_coins(case, request):
        vectors.append(coins)
        volumes.append(volume)
    many = case.replace_requests([request.with_coins(*vector) for vector in vectors])
    outcomes = decide(many, backend, device)
    for vector, observed in zip(vectors, outcomes, strict=True):
        if observed.broken:
            coins = (tuple(vector[0]), vector[1])
            raise Violation(0, observed, "one root path and its bonus token", coins=coins)
    return list(zip(volumes, outcomes, strict=True))


def bytes_of(tensor: Any) -> bytes:
    import torch  # noqa: PLC0415

    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)  # flat: an empty one too
    return bytes(flat.numpy().tobytes())
