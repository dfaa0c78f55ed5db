"""Backends that take their process down, or never come back: recorded by their last case, shrunk in forks."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from treeconv.case import VerifyCase
from treeconv.corpus import load_entry
from treeconv.errors import LawBroken
from treeconv.fuzzing.lifeline import die_with
from treeconv.fuzzing.session import saver
from treeconv.fuzzing.signature import Signature
from treeconv.fuzzing.store import Discovery
from treeconv.laws import law_named
from treeconv.shrink import shrink
from treeconv.suite import load_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from treeconv.fuzzing.session import Config, Session
    from treeconv.fuzzing.store import Store

__all__ = ["HANG", "how_it_ended", "record_death", "shrink_crash"]

HANG = "does not come back"
_BULK_LAW = "oracle-agreement"
_SHRINK_SECONDS = 10.0


def how_it_ended(code: int) -> str:
    """A process's end in words, from its exit status: negative for a signal."""
    if code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = "unknown"
        return f"takes the process down by {name}"
    return f"ends the process with exit code {code}"


@dataclass(frozen=True)
class _Death:
    """A case and what it did to the process."""

    law: str
    backend: str
    how: str
    case: VerifyCase | None

    def broken(self) -> LawBroken:
        lines = [
            f"law broken: {self.law}",
            "  meaning:  a backend answers or raises; its process lives on",
            f"  backend:  {self.backend or 'none'}",
        ]
        if self.case is not None:
            request = self.case.requests[0]
            lines.append(
                f"  case:     requests: {len(self.case.requests)}, vocabulary {self.case.vocab_size},"
                f" {self.case.kind} {self.case.rows_dtype}, temperature {request.temperature!r}"
            )
            lines += ["  " + line for line in request.tree.draw().splitlines()[:12]]
        lines += [f"  got:      it {self.how}", "  want:     a decision for every request"]
        return LawBroken("\n".join(lines), law=self.law, backend=self.backend or None, case=self.case)

    @property
    def signature(self) -> Signature:
        return Signature(self.law, self.backend, self.how)


def record_death(payload: Any, how: str, config: Config, store: Store) -> Signature:
    """Record the case under way when a worker died or hung.

    Args:
        payload: what the flight recorder holds: campaign, subject, backend, and what was asked.

        how: in words; see :func:`how_it_ended` and :data:`HANG`.

        config: the campaign's.

        store: where to.

    Returns:
        Its signature; recorded once, however often it is met.
    """
    campaign, subject, backend, asked = payload or ("unknown", "unknown", "", None)
    case, law, origin = None, str(subject), {}
    if isinstance(asked, VerifyCase):
        case = asked
    elif campaign == "bulk":
        from treeconv.fuzzing.bulk import case_of_launch  # noqa: PLC0415

        law = _BULK_LAW
        assert asked is not None
        what, start = asked
        case = case_of_launch(what, start, config.device)
    elif isinstance(asked, dict):
        origin = asked
    death = _Death(law, backend or "", how, case)
    found = Discovery.of(death.signature, campaign, str(death.broken()), origin=origin)
    if store.claim(death.signature, found) and case is not None:
        # Straight to its shelf: should shrinking never come to it, the next campaign still replays it.
        store.settle(death.signature, found, saver(death.broken(), campaign), "crashes")
    return death.signature


def shrink_crash(digest: str, session: Session) -> None:
    """Make a crash's case smaller, each attempt in a fork of this process, which called no backend."""
    found = session.store.load().get(digest)
    if (
        found is None
        or not found.entry.startswith("crashes/")
        or found.kind == HANG
        or not hasattr(os, "fork")
    ):
        return
    path = session.store.corpus / found.entry
    case = load_entry(path).case
    if not isinstance(case, VerifyCase):
        return
    until = min(time.monotonic() + _SHRINK_SECONDS, session.deadline)

    def run(smaller: VerifyCase) -> None:
        left = min(session.config.timeout, until - time.monotonic())
        how = _in_a_fork(lambda: _judge(smaller, found, session), left)
        if how == found.kind:
            raise _Death(found.law, found.backend, how, smaller).broken()

    first = _Death(found.law, found.backend, found.kind, case)
    try:
        run(case)
    except LawBroken as broken:
        least = shrink(broken, run, values=True, should_stop=lambda: time.monotonic() >= until)
    else:
        return  # it needs more than its case: what calls before it left, or a device
    if least.case is not case:
        session.store.settle(
            first.signature, _with_text(found, least), saver(least, found.campaign), "crashes"
        )
        path.unlink(missing_ok=True)


def _with_text(found: Discovery, broken: LawBroken) -> Discovery:
    signature = Signature(found.law, found.backend, found.kind)
    return Discovery.of(signature, found.campaign, str(broken), origin=found.origin, known=found.known)


def _judge(case: VerifyCase, found: Discovery, session: Session) -> None:
    """In a fork: the flight recorder is the parent's, and stays untouched."""
    with contextlib.suppress(LawBroken):
        device = session.config.device
        law_named(found.law).run(case, load_backend(found.backend, device), device)


def _in_a_fork(call: Callable[[], object], timeout: float) -> str:
    """How a call ends its process; "" where it does not. The process ends with this one at the latest."""
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        try:
            die_with(parent)
            call()
        finally:
            os._exit(0)
    until = time.monotonic() + timeout
    is_done = False
    try:
        while time.monotonic() < until:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                is_done = True
                code = os.waitstatus_to_exitcode(status)
                return how_it_ended(code) if code else ""
            time.sleep(0.002)
    finally:
        if not is_done:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return HANG
