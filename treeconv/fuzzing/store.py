"""What campaigns found, as files that survive any of them: written whole or not at all, each signature once.

Below a corpus directory::

    regressions/<law>-<hash>.json   the shrunk case of each finding; crashes/ where the backend died or hung
    .fuzz/findings/<digest>.json    one record a signature: the failure's text, where its case lies
    .fuzz/raw/                      cases that were found and are not shrunk yet
    .fuzz/...                       working sets of the campaigns: may be deleted

A record is claimed with ``os.link``, which fails where the name is taken: of any number of workers that
find the same thing at once, one wins. A worker that is killed while it shrinks leaves a record in state
"raw", which the next campaign takes up.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeconv._corpus_codec import atomic_write
from treeconv._drive import encodable

if TYPE_CHECKING:
    from collections.abc import Callable

    from treeconv.fuzzing.signature import Signature

    Save = Callable[[Path], Path]  # writes a case into a directory, and says where

__all__ = ["Discovery", "Store"]


@dataclass(frozen=True)
class Discovery:
    """One finding of a campaign.

    Args:
        law, backend, kind: its signature.

        campaign: the campaign that found it.

        text: the failure as a person reads it.

        state: "raw" until its case was shrunk, then "done".

        entry: its case, a path relative to the corpus directory; "" where no file can hold it.

        origin: whatever else says where it comes from: JSON values.

        known: the id of the ledger's finding that explains it, or "".
    """

    law: str
    backend: str
    kind: str
    campaign: str
    text: str
    state: str = "raw"
    entry: str = ""
    origin: dict[str, Any] = field(default_factory=dict)
    known: str = ""

    @classmethod
    def of(cls, signature: Signature, campaign: str, text: str, **more: Any) -> Discovery:
        """A finding with this signature."""
        return cls(signature.law, signature.backend, signature.kind, campaign, encodable(text), **more)


class Store:
    """The findings under a corpus directory, shared by every process that works on it.

    Args:
        corpus: made if missing.
    """

    def __init__(self, corpus: Path) -> None:
        self.corpus = Path(corpus)
        self.work = self.corpus / ".fuzz"
        self._records = self.work / "findings"
        self._records.mkdir(parents=True, exist_ok=True)
        ignore = self.work / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n", encoding="utf-8")

    def _path(self, signature: Signature) -> Path:
        return self._records / f"{signature.digest}.json"

    def has(self, signature: Signature) -> bool:
        """Whether somebody has found it already."""
        return self.get(signature) is not None

    def get(self, signature: Signature) -> Discovery | None:
        """Its record; None where there is none that can be read."""
        return _read(self._path(signature))

    def load(self) -> dict[str, Discovery]:
        """Every record that can be read, by digest."""
        read = {path.stem: _read(path) for path in sorted(self._records.glob("[0-9a-f]*.json"))}
        return {digest: found for digest, found in read.items() if found is not None}

    def claim(self, signature: Signature, found: Discovery, save: Save | None = None) -> bool:
        """Record a finding, its case not shrunk yet.

        Returns:
            False where somebody else has it: then nothing is written.

        Raises:
            OSError: the disk refuses.
        """
        if self.has(signature):
            return False
        if save is not None:
            found = replace(found, entry=self._relative(save(self.work / "raw")))
        temporary = self._records / f".{signature.digest}.{os.getpid()}-{secrets.token_hex(4)}.tmp"
        atomic_write(temporary, _encode(found))
        try:
            os.link(temporary, self._path(signature))
        except FileExistsError:
            if self.has(signature):
                return False
            os.replace(temporary, self._path(signature))  # noqa: PTH105  # a damaged record stood there
        finally:
            temporary.unlink(missing_ok=True)
        return True

    def settle(
        self, signature: Signature, found: Discovery, save: Save | None, shelf: str = "regressions"
    ) -> Discovery:
        """Put a claimed finding's shrunk case on its shelf, and close the record.

        Args:
            signature: it was claimed under.

            found: the finding as it now reads.

            save: writes its shrunk case; None leaves what was claimed.

            shelf: the folder under the corpus directory.
        """
        before = _read(self._path(signature))
        raw = before.entry if before else ""
        if save is not None:
            found = replace(found, entry=self._relative(save(self.corpus / shelf)))
        else:
            found, raw = replace(found, entry=raw), ""
        found = replace(found, state="done")
        self.put(signature, found)
        self._drop_raw(raw)
        return found

    def forget(self, signature: Signature) -> None:
        """Remove a record, and its case where that was not shrunk: the failure is none any more."""
        found = self.get(signature)
        self._path(signature).unlink(missing_ok=True)
        if found is not None:
            self._drop_raw(found.entry)

    def _drop_raw(self, entry: str) -> None:
        """Remove an unshrunk case that no record names."""
        if entry.startswith(".fuzz/raw/") and all(other.entry != entry for other in self.load().values()):
            (self.corpus / entry).unlink(missing_ok=True)

    def put(self, signature: Signature, found: Discovery) -> None:
        """Write a record over the one that is there."""
        atomic_write(self._path(signature), _encode(found))

    def _relative(self, path: Path) -> str:
        return path.relative_to(self.corpus).as_posix()


def _encode(found: Discovery) -> bytes:
    return (json.dumps(asdict(found), indent=1) + "\n").encode()


def _read(path: Path) -> Discovery | None:
    """A record; None where it is missing or damaged (a finding is then made again)."""
    try:
        return Discovery(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
