"""What the jobs of one worker share: the store, the flight recorder, the clock, and what is known already."""

from __future__ import annotations

import hashlib
import importlib
import sys
import time
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeconv._drive import raised
from treeconv.corpus import CorpusEntry, save_entry
from treeconv.errors import InvalidArgument, LawBroken
from treeconv.fuzzing.signature import Signature, signature_of
from treeconv.fuzzing.store import Discovery, Store
from treeconv.ledger import Ledger
from treeconv.suite import load_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from treeconv.backends.base import Backend
    from treeconv.fuzzing.flight import FlightRecorder

__all__ = ["Config", "Job", "Session", "TimeIsUp", "load_ledger", "version_of"]

_OWN_LEDGER = "fuzz.findings:LEDGER"  # found where the project's checkout is the current directory


class TimeIsUp(KeyboardInterrupt):
    """The campaign is over in the middle of a search. Hypothesis lets it through, as it does Ctrl-C."""


@dataclass(frozen=True)
class Config:
    """One call of ``treeconv fuzz``.

    Args:
        corpus: the directory that everything found goes to.

        backends: names, or ``module:callable``.

        campaigns: their names.

        device: where the backends run.

        seed: fixes every job.

        seconds: begin no job, and stop every search, after this long.

        rounds: stop after so many rounds of jobs, or None.

        workers: processes.

        timeout: seconds that one case may take before it counts as a hang.

        ledger: ``module:attribute`` of the known findings; "" for none.
    """

    corpus: str
    backends: tuple[str, ...]
    campaigns: tuple[str, ...]
    device: str = "cpu"
    seed: str = "0"
    seconds: float = 60.0
    rounds: int | None = None
    workers: int = 1
    timeout: float = 60.0
    ledger: str = _OWN_LEDGER

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Config:
        """The inverse of :meth:`to_json`."""
        lists = {name: tuple(document[name]) for name in ("backends", "campaigns")}
        return cls(**{**document, **lists})


@dataclass(frozen=True)
class Job:
    """One piece of work: a subject of a campaign, on one backend, in one round.

    Args:
        campaign: "replay", "shrink", or a campaign's name.

        subject: a law, a parser, a stored file: what the campaign makes of it.

        backend: its name; "" where none is needed.

        round: the same subject again, with other cases.
    """

    campaign: str
    subject: str
    backend: str = ""
    round: int = 0

    def __str__(self) -> str:
        on = f" on {self.backend}" if self.backend else ""
        return f"{self.campaign} {self.subject}{on}"


def load_ledger(name: str) -> Ledger:
    """The known findings behind ``module:attribute``; none where the project's own is not importable here.

    Raises:
        InvalidArgument: a ledger that was asked for is not there.
    """
    if not name:
        return Ledger(())
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    module, _, attribute = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # noqa: BLE001  # a stranger's module may raise anything; "" and ".." name none
        if name == _OWN_LEDGER and isinstance(error, ImportError | AttributeError):
            return Ledger(())
        raise InvalidArgument(
            f"ledger={name!r}, but must be module:attribute: {type(error).__name__}: {error}"
        ) from None
    if not isinstance(found, Ledger):
        raise InvalidArgument(f"ledger={name!r} is a {type(found).__name__}, but must be a treeconv Ledger")
    return found


def version_of(backend: Backend) -> str:
    """The version that a ledger's findings name; "" where the backend does not say."""
    kernels = getattr(backend, "kernels", None)
    return str(getattr(kernels, "version", "") or getattr(backend, "version", ""))


@dataclass
class Session:
    """The state of one worker."""

    config: Config
    store: Store
    recorder: FlightRecorder
    deadline: float  # of time.monotonic
    found: list[str] = field(default_factory=list)  # digests met in the job under way, known ones included
    _backends: dict[str, Backend] = field(default_factory=dict)
    _kinds: dict[tuple[str, str], str] = field(default_factory=dict)

    @cached_property
    def ledger(self) -> Ledger:
        """The findings that are known."""
        return load_ledger(self.config.ledger)

    def backend(self, name: str) -> Backend:
        """A backend, loaded once."""
        if name not in self._backends:
            self.recorder.under_way(("load", "load", name, None))  # importing a stranger's module may end us
            self._backends[name] = load_backend(name, self.config.device)
            self.recorder.idle()
        return self._backends[name]

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.deadline

    def number(self, what: str) -> int:
        """A seed below 2**48 for one piece of work, fixed by the campaign's."""
        digest = hashlib.sha256(f"{self.config.seed}/{what}".encode()).digest()
        return int.from_bytes(digest[:6], "big")

    def begin_case(self, payload: Any) -> None:
        """Before each case: stop when the time is up; else note the case, should it be the last.

        Raises:
            TimeIsUp: it is.
        """
        if self.is_over:
            raise TimeIsUp
        self.recorder.under_way(payload)

    def known_as(self, signature: Signature) -> str:
        """The id of the ledger's finding that explains a failure, or "".

        One explains it that names its law, backend and version; or one whose own stored case, replayed on
        this backend, broke in the same kind.
        """
        if not signature.backend:
            return ""
        try:
            version = version_of(self.backend(signature.backend))
        except Exception:  # noqa: BLE001  # a backend that cannot be loaded has no known findings
            return ""
        if self.ledger.explains(signature.law, signature.backend, version):
            return self.ledger.about(signature.law, signature.backend)[0].id
        return self._kinds.get((signature.backend, signature.kind), "")

    def learn(self, signature: Signature) -> None:
        """A stored case of the ledger broke in this kind."""
        known = self.known_as(signature)
        if known:
            self._kinds[signature.backend, signature.kind] = known

    def claim(self, campaign: str, error: LawBroken, **origin: Any) -> Signature | None:
        """Record a failure at once, unshrunk; None where its signature is known already."""
        signature = signature_of(error)
        if signature.digest not in self.found:
            self.found.append(signature.digest)
        found = self._discovery(campaign, signature, error, origin)
        save = saver(error, campaign)
        if error.path is not None:  # a stored case broke: its file is the finding's
            found, save = replace(found, entry=self.relative(error.path), state="done"), None
        if self.store.claim(signature, found, save):
            return signature
        self.recorder.add("repeats")
        return None

    def settle(self, campaign: str, signature: Signature, error: LawBroken, **origin: Any) -> None:
        """Record the shrunk case of a claimed failure."""
        self.store.settle(
            signature, self._discovery(campaign, signature, error, origin), saver(error, campaign)
        )

    def _discovery(
        self, campaign: str, signature: Signature, error: LawBroken, origin: dict[str, Any]
    ) -> Discovery:
        known = self.known_as(signature)
        return Discovery.of(signature, campaign, str(error), origin=origin, known=known)

    def relative(self, path: Path) -> str:
        """A path as records name it: relative to the corpus where it lies there."""
        try:
            return path.resolve().relative_to(self.store.corpus.resolve()).as_posix()
        except ValueError:
            return str(path)


def saver(error: LawBroken, campaign: str) -> Callable[[Path], Path] | None:
    """What writes a failure's case, or its input; None where it has neither."""
    if error.case is not None:
        entry = CorpusEntry(
            law=error.law,
            case=error.case,
            note=f"found by the campaign {campaign}",
            backend=error.backend or "",
            parameters=error.parameters,
        )
        return lambda directory: save_entry(directory, entry)
    if "input" in error.parameters:
        from treeconv.fuzzing.parsers import save_input  # noqa: PLC0415

        return lambda directory: save_input(directory, error.law, error.parameters["input"])
    return None


def as_broken(error: Exception, law: str, meaning: str, backend: str | None, case: Any) -> LawBroken:
    """An error of our own, met while a case was judged: a finding like any other, about us."""
    lines = [
        f"law broken: {law}",
        f"  meaning:  {meaning}",
        f"  backend:  {backend or 'none'}",
        f"  got:      {raised(error)}",
        "  want:     a verdict: this is treeconv's own fault",
    ]
    return LawBroken("\n".join(lines), law=law, backend=backend, case=case)
