"""Known faults of samplers that are not ours, kept honest: each is run, and must still be found.

A *tolerated* finding is launched like any other check and must break its law: one that passes was fixed, or
the suite lost the eye for it, and either way somebody must look. A *quarantined* one (it hangs or takes the
device down) is never launched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from treeconv.errors import InvalidArgument, LawBroken

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

__all__ = ["Finding", "Ledger", "NotLaunched", "Verdict"]

Outcome = Literal["found again", "unexpected pass", "quarantined", "absent in this version", "not launched"]


class NotLaunched(Exception):
    """An attempt that cannot be made here, as on a card too small for it; the message says why."""


@dataclass(frozen=True)
class Finding:
    """One fault of one implementation.

    Args:
        id: short and stable, for tables.

        law: the law it breaks.

        backend: the backend it was found in.

        versions: those it was seen in, as the backend names them.

        summary: what is wrong, in a sentence.

        source: where it is reported or can be read; our own measurement if nowhere.

        sees: what the caller notices.

        case: the stored case, a path under ``corpus/``; "" where there is none.

        quarantine: why it must not be launched; "" for a tolerated one.

    Raises:
        InvalidArgument: an empty id, law, backend, summary or source, or no version.
    """

    id: str
    law: str
    backend: str
    versions: tuple[str, ...]
    summary: str
    source: str
    sees: str = ""
    case: str = ""
    quarantine: str = ""

    def __post_init__(self) -> None:
        for name in ("id", "law", "backend", "summary", "source"):
            if not getattr(self, name):
                raise InvalidArgument(f"{name}='', but must say something: a finding cites what it is")
        if not self.versions:
            raise InvalidArgument("versions=(), but must hold at least one: a finding is about a version")


@dataclass(frozen=True)
class Verdict:
    """What became of one finding in a run.

    Args:
        finding: the finding.

        outcome: "found again"; "unexpected pass"; "quarantined"; "absent in this version" (it passed, in a
            version that the finding does not list); or "not launched" (the backend is not here, or no attempt
            could be made).

        message: the broken law's text, which attempt passed, or why nothing was launched.
    """

    finding: Finding
    outcome: Outcome
    message: str = ""

    @property
    def ok(self) -> bool:
        """False for an unexpected pass, which fails a run."""
        return self.outcome != "unexpected pass"


class Ledger:
    """The findings of a project.

    Raises:
        InvalidArgument: two findings with one id.
    """

    def __init__(self, findings: Iterable[Finding]) -> None:
        self._findings: dict[str, Finding] = {}
        for finding in findings:
            if finding.id in self._findings:
                raise InvalidArgument(f"id={finding.id!r} twice, but must name one finding")
            self._findings[finding.id] = finding

    def __iter__(self) -> Iterator[Finding]:
        return iter(self._findings.values())

    def __len__(self) -> int:
        return len(self._findings)

    def __getitem__(self, name: str) -> Finding:
        return self._findings[name]

    def about(self, law: str, backend: str) -> tuple[Finding, ...]:
        """The findings about one law on one backend."""
        return tuple(f for f in self if (f.law, f.backend) == (law, backend))

    def explains(self, law: str, backend: str, version: str) -> bool:
        """Whether a failure of this law on this backend is a known one; a new version needs its own entry."""
        return any(version in finding.versions for finding in self.about(law, backend))

    def judge(self, name: str, version: str | None, attempts: Mapping[str, Callable[[], object]]) -> Verdict:
        """Run a finding's attempts; every one of them must break a law.

        Args:
            name: the finding's id.

            version: of the backend that is here; None where it is not.

            attempts: what -> a call that raises :class:`LawBroken` while the fault is there, such as
                "the stored case" and "the suite", or :class:`NotLaunched` where it cannot be made here. Any
                other exception is passed on: a check that cannot run has found nothing.

        Raises:
            InvalidArgument: no attempt, so that nothing could have been found.
        """
        finding = self[name]
        if finding.quarantine:
            return Verdict(finding, "quarantined", finding.quarantine)
        if version is None:
            return Verdict(finding, "not launched", f"backend {finding.backend} is not here")
        if not attempts:
            raise InvalidArgument(f"attempts={{}}, but must hold at least one for finding {name!r}")
        texts, passed, skipped = [], [], {}
        for what, attempt in attempts.items():
            try:
                attempt()
            except LawBroken as broken:
                texts.append(f"{what}: {broken}")
            except NotLaunched as reason:
                skipped[what] = reason
            else:
                passed.append(what)
        if not passed and not texts:
            return Verdict(
                finding, "not launched", "\n".join(f"{what}: {reason}" for what, reason in skipped.items())
            )
        if not passed:
            texts += [f"{what}, not launched: {reason}" for what, reason in skipped.items()]
            return Verdict(finding, "found again", "\n".join(texts))
        where = f"{' and '.join(passed)} broke no law with {version}"
        if version in finding.versions:
            return Verdict(
                finding, "unexpected pass", f"{where}: fixed, or no longer seen; look, then edit it"
            )
        return Verdict(finding, "absent in this version", where)
