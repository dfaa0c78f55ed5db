"""When two failures are the same finding: the law, the backend, and the violation without its numbers."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from treeconv._drive import encodable

if TYPE_CHECKING:
    from treeconv.errors import LawBroken

__all__ = ["Signature", "kind_of", "signature_of"]

_PATH = re.compile(r"path ([\d >-]+), then bonus token (-?\d+)")
_NUMBER = re.compile(r"[-+]?(?:0x[0-9a-f.]+p[-+]\d+|\d+(?:\.\d*)?(?:e[-+]?\d+)?|\binf\b|\bnan\b)")
_REPEATS = re.compile(r"#(?:(?:, | -> |/)#)+")
_AT_THE_BOUNDARY = re.compile(r"distance [+-]0,")
_LONGEST = 160


@dataclass(frozen=True)
class Signature:
    """What tells one finding from another.

    Args:
        law: the law broken; "crash", "hang" or a parser's name where no law was.

        backend: the backend's name; "" for what needs none.

        kind: how it was broken, in words, without numbers.
    """

    law: str
    backend: str
    kind: str

    @property
    def digest(self) -> str:
        """Twelve hexadecimal digits: it names files."""
        return hashlib.sha256(f"{self.law}\n{self.backend}\n{self.kind}".encode()).hexdigest()[:12]


def _field(text: str, name: str) -> str:
    found = re.search(rf"^  {name}: +(.*)$", text, re.MULTILINE)
    return found.group(1) if found else ""


def _without_numbers(text: str) -> str:
    text = re.sub(r"\S*/(?=[^/\s]+:\d+\))", "", text)  # a folder before file:line
    text = _NUMBER.sub("#", text)
    return _REPEATS.sub("#", text)[:_LONGEST]


def kind_of(text: str) -> str:
    """How a law was broken, from the failure's own text, so that larger and smaller cases of it agree."""
    text = encodable(text)
    got, want, because = (_field(text, name) for name in ("got", "want", "because"))
    paths = [_PATH.search(part) for part in (got, want)]
    if not paths[0] or not paths[1]:
        return f"{_without_numbers(got)}, not {_without_numbers(want)}"
    (got_path, want_path) = ([int(node) for node in path[1].split(" -> ")] for path in paths if path)
    if got_path == want_path:
        kind = "draws another token"
    elif got_path[: len(want_path)] == want_path:
        kind = "accepts a child too many"
    elif want_path[: len(got_path)] == got_path:
        kind = "rejects a child"
    else:
        kind = "accepts another child"
    for sign, words in (
        ("has no mass there", ", of no mass"),
        ("tested and rejected there", ", rejected before"),
        ("no child may be accepted here", ", beyond the cap"),
        ("its children hold all the mass", ", with nothing left to draw"),
    ):
        if sign in because:
            kind += words
    if _AT_THE_BOUNDARY.search(because):
        kind += ", exactly at a boundary"
    return kind


def signature_of(error: LawBroken) -> Signature:
    """The signature of a broken law."""
    return Signature(error.law, error.backend or "", kind_of(str(error)))
