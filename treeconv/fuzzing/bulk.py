"""The bulk engine: thousands of random trees a launch, judged where they lie; only what differs is looked at.

Every output is compared with the float64 walk of :mod:`treeconv.wide_oracle`, not with another backend's.
What is equal is right: that walk is one that a correct sampler may take. What differs goes to the exact
oracle (of each launch the first sixteen, those outside the ambiguity band before those that may lie inside
it), and what the exact oracle refuses is shrunk and recorded.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from treeconv._drive import submit
from treeconv.case import CaseTensors, VerifyCase
from treeconv.errors import LawBroken
from treeconv.fuzzing.signature import Signature, signature_of
from treeconv.judge import Violation, explain, judge, observe, target_rows
from treeconv.laws import law_named
from treeconv.shrink import shrink
from treeconv.tree import VerifyOutput
from treeconv.wide import WideCalls, random_calls
from treeconv.wide_oracle import WideDecisions, decide

if TYPE_CHECKING:
    from treeconv.backends.base import Backend
    from treeconv.fuzzing.session import Session

__all__ = ["BULK_SUBJECTS", "Launch", "Launched", "bulk_round", "case_of_launch", "launch", "rate"]

BULK_SUBJECTS = ("logits", "probs")
_LAW = "oracle-agreement"  # what a confirmed difference is stored under
_LOOKED_AT = 16  # differing requests of a launch that the exact oracle sees
_SHAPES = ((16, 64),) * 6 + ((16, 67), (8, 9))
_CAPS = (None, 3, 6, None, 2, None)


@dataclass(frozen=True)
class Launch:
    """What fixes one launch.

    Args:
        seed: of all that is random in it.

        count: B, trees.

        kind: "logits" or "probs".

        num_slots, vocab_size, rows_dtype, depth_cap, call_size: as for :func:`random_calls`.
    """

    seed: int
    count: int
    kind: str = "logits"
    num_slots: int = 16
    vocab_size: int = 64
    rows_dtype: str = "float32"
    depth_cap: int | None = None
    call_size: int = 1024

    def calls(self, device: str) -> WideCalls:
        """The launch's calls, on a device."""
        more: dict[str, Any] = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return random_calls(more.pop("seed"), more.pop("count"), device=device, **more)


@dataclass(frozen=True)
class Launched:
    """A judged launch.

    Args:
        calls: what was asked.

        output: what the backend said, call behind call.

        decisions: what float64 says.

        differing: ``[B]`` bool: where the two are not the same.
    """

    calls: WideCalls
    output: VerifyOutput
    decisions: WideDecisions
    differing: torch.Tensor


def _tensors(call: WideCalls) -> CaseTensors:
    return CaseTensors(call.batch, call.rows, call.temperature, call.coins, call.depth_cap)


def launch(what: Launch, backend: Backend, device: str, session: Session | None = None) -> Launched:
    """Make the trees, ask the backend, decide in float64, compare; all of it on the device.

    Raises:
        Violation: the backend raised, or returned something of another shape.
        TimeIsUp: the session's time is over.
    """
    calls = what.calls(device)
    decisions = decide(
        calls.parents,
        calls.batch.candidates,
        calls.rows,
        calls.temperature if what.kind == "logits" else None,
        calls.coins.accept,
        calls.coins.final,
        calls.depth_cap,
    )
    outputs = []
    for start in range(0, what.count, what.call_size):
        if session is not None:
            session.begin_case(("bulk", what.kind, backend.name, (what, start)))
        outputs.append(submit(_tensors(calls.call(start)), what.kind, backend))
    names = VerifyOutput.__dataclass_fields__
    output = VerifyOutput(**{name: torch.cat([getattr(one, name) for one in outputs]) for name in names})
    differing = decisions.differing(
        output, what.num_slots, what.call_size, reports_status=backend.traits.reports_status
    )
    return Launched(calls, output, decisions, differing)


def case_of_launch(what: Launch, start: int, device: str) -> VerifyCase:
    """One call of a launch as a case."""
    call = what.calls(device).call(start)
    return call.case(range(len(call)))


def _launches(kind: str, backend: Backend, session: Session, round_number: int) -> list[Launch]:
    """The launches of a round: large ones on a GPU, and of several shapes, dtypes and caps anyway."""
    is_cuda = session.config.device.startswith("cuda")
    count, number = (131072, 8) if is_cuda else (1024, 8)
    dtypes = [name for name in ("float32", "bfloat16", "float16") if name in backend.traits.rows_dtypes]
    launches = []
    for place in range(number):
        seed = session.number(f"bulk/{kind}/{backend.name}/{round_number}/{place}")
        slots, vocab = _SHAPES[place % len(_SHAPES)]
        launches.append(
            Launch(
                seed=seed,
                count=count,
                kind=kind,
                num_slots=slots,
                vocab_size=vocab,
                rows_dtype=dtypes[place % len(dtypes)] if kind == "logits" else "float32",
                depth_cap=_CAPS[(place + round_number) % len(_CAPS)],
            )
        )
    return launches


def bulk_round(kind: str, backend_name: str, session: Session, round_number: int) -> str | None:
    """Some launches on one backend.

    Returns:
        Why the backend cannot be asked, or None.
    """
    backend = session.backend(backend_name)
    if not (backend.traits.takes_logits if kind == "logits" else backend.traits.takes_probs):
        return f"the backend takes no {kind}"
    for what in _launches(kind, backend, session, round_number):
        try:
            done = launch(what, backend, session.config.device, session)
        except Violation as violation:
            call = case_of_launch(what, 0, session.config.device)
            _record(_explained(backend, call, violation), session, backend, what)
            continue
        sure = (done.differing & ~done.decisions.unsure).nonzero()[:_LOOKED_AT, 0].tolist()
        perhaps = (done.differing & done.decisions.unsure).nonzero()[:_LOOKED_AT, 0].tolist()
        session.recorder.idle()
        session.recorder.add("cases", what.count)
        session.recorder.add("decisions", what.count)
        for request in [*sure, *perhaps][:_LOOKED_AT]:
            _look_at(request, what, done, session, backend)
    return None


def _explained(backend: Backend, case: VerifyCase, violation: Violation) -> LawBroken:
    law = law_named(_LAW)
    return explain(law.name, law.meaning, backend.name, case, violation)


def _observed(done: Launched, request: int, case: VerifyCase) -> Any:
    slots, place = case.slots, request % done.calls.call_size
    index = done.output.accept_index[request : request + 1].cpu()
    alone = VerifyOutput(
        accept_index=torch.where(index >= 0, index - place * slots, index),
        accept_token_num=done.output.accept_token_num[request : request + 1].cpu(),
        predicts=done.output.predicts[request * slots : (request + 1) * slots].cpu(),
        status=done.output.status[request : request + 1].cpu(),
    )
    return observe([case.requests[0].tree], alone, slots)[0]


def _look_at(request: int, what: Launch, done: Launched, session: Session, backend: Backend) -> None:
    """One request whose output differs: settled by the exact oracle, recorded if it is wrong."""
    case = done.calls.case([request])
    subject = case.requests[0]
    observed = _observed(done, request, case)
    rows = target_rows(subject, case.kind)
    coins = (subject.accept.tolist(), subject.final)
    wrong = judge(subject.tree, rows, *coins, case.effective_depth_cap, observed)
    if wrong is None:
        if bool(done.decisions.unsure[request]):
            return
        if what.calls(session.config.device).case([request]) == case:
            raise AssertionError(
                f"{what}, request {request}: outside the band, yet the exact oracle admits it"
            )
        violation = Violation(0, "rows, coins or temperature were written to", "inputs unchanged")
        _record(_explained(backend, case, violation), session, backend, what)
        return
    place = request % what.call_size
    broken = _explained(backend, case, Violation(0, observed, *wrong))
    if session.store.has(signature_of(broken)):
        session.claim("bulk", broken)
        return
    if place:  # perhaps only there: alone is tried first, then with all that came before it
        start = request - place
        together = done.calls.case(range(start, request + 1))
        broken = _again(case, session, backend) or _again(together, session, backend) or broken
    _record(broken, session, backend, what)


def _again(case: VerifyCase, session: Session, backend: Backend) -> LawBroken | None:
    session.begin_case(("laws", _LAW, backend.name, case))
    try:
        law_named(_LAW).run(case, backend, session.config.device)
    except LawBroken as broken:
        return broken
    finally:
        session.recorder.idle()
    return None


def _record(broken: LawBroken, session: Session, backend: Backend, what: Launch) -> None:
    origin = {name: getattr(what, name) for name in what.__dataclass_fields__}
    signature = session.claim("bulk", broken, launch=origin)
    if signature is not None:
        broken = shrunk(broken, signature, session, backend)
        session.settle("bulk", signature, broken, launch=origin)


def shrunk(broken: LawBroken, signature: Signature, session: Session, backend: Backend) -> LawBroken:
    """The same violation on a smaller case, by leaving out and making plain."""

    def run(case: VerifyCase) -> None:
        session.begin_case(("laws", broken.law, backend.name, case))
        try:
            law_named(broken.law).run(case, backend, session.config.device)
        except LawBroken as error:
            if signature_of(error) == signature:
                raise
        finally:
            session.recorder.idle()

    return shrink(broken, run, values=True, should_stop=lambda: session.is_over)


def rate(backend: Backend, device: str, kind: str, seconds: float, count: int) -> tuple[float, float]:
    """Judged trees a second: made, put to the backend, decided in float64 and compared (V = 64, N = 16).

    Args:
        backend: the verifier.

        device: where everything happens.

        kind: "logits" or "probs".

        seconds: how long, after two launches to warm up.

        count: trees a launch.

    Returns:
        Trees a second, and the share of them whose decision float32 may take otherwise.
    """
    for seed in range(2):
        bool(launch(Launch(seed, count, kind), backend, device).differing.any())
    judged, unsure, started = 0, 0.0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        done = launch(Launch(100 + judged, count, kind), backend, device)
        unsure += float(done.decisions.unsure.sum())  # the launch's wait for the device
        judged += count
    return judged / (time.perf_counter() - started), unsure / judged
