"""Verification cases on disk: small JSON files, floats to the bit, one bad file never stops the rest.

``corpus/README.md`` describes the format. Recorded traces of a real model: :mod:`treeconv.traces`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from treeconv import _corpus_codec as codec
from treeconv._corpus_cases import EagleCase, IntRows, Ints, RawCase, decode_case, encode_case, schema_of
from treeconv.errors import CorpusError, InvalidArgument
from treeconv.traces import Trace, load_trace, load_traces, save_trace

if TYPE_CHECKING:
    from collections.abc import Mapping

    from treeconv.case import VerifyCase

__all__ = [
    "CorpusEntry",
    "EagleCase",
    "Expected",
    "RawCase",
    "Trace",
    "load_corpus",
    "load_entry",
    "load_trace",
    "load_traces",
    "save_entry",
    "save_trace",
]

SCHEMA = 3  # the newest; a case is written in the oldest that can hold it
_LAW = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")  # it begins a file name
_ENTRY = ("law", "note", "source", "issue", "backend", "lossless", "thresholds", "parameters", "expected")


@dataclass(frozen=True)
class Expected:
    """What the call must return, as far as the source says; ``None`` where it does not.

    Args:
        accept_index: ``[B, depth_cap]`` flat indices, -1 padded.

        accept_token_num: ``[B]`` accepted drafts, bonus not counted.

        predicts: ``[B * N]``, -1 where nothing was emitted.

        tokens: per request the emitted ids, bonus last.
    """

    accept_index: IntRows | None = None
    accept_token_num: Ints | None = None
    predicts: Ints | None = None
    tokens: IntRows | None = None


@dataclass(frozen=True)
class CorpusEntry:
    """One stored case and what is known about it.

    Args:
        law: the law it belongs to; letters, digits, ``_`` and ``-`` (the file name starts with it).

        case: a :class:`VerifyCase`; a :class:`RawCase` where no tree in node order can hold it; an
            :class:`EagleCase` for tree building.

        note: what it shows, in a sentence.

        source: where it comes from (a repository, file and commit), or "".

        issue: the report it belongs to, or "".

        backend: the implementation that was found broken by it, or "".

        lossless: False for a call that is *meant* to leave the target's law: no law may judge it.

        thresholds: SGLang's ``(threshold_single, threshold_acc)``; both 1 is lossless. None: no such knob.

        parameters: whatever else the law needs to replay (a seed, a permutation): JSON values without
            floats; write those as ``float.hex()``.

        expected: the right answer, where one was published.

        path: the file it was loaded from; not part of its content.

    Raises:
        InvalidArgument: a law that cannot name a file, ``lossless`` with a threshold under 1, or
            ``expected`` of another shape than the case.
    """

    law: str
    case: VerifyCase | RawCase | EagleCase
    note: str = ""
    source: str = ""
    issue: str = ""
    backend: str = ""
    lossless: bool = True
    thresholds: tuple[float, float] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    expected: Expected | None = None
    path: Path | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not _LAW.fullmatch(self.law):
            raise InvalidArgument(f"law={self.law!r}, but must be letters, digits, _ and -, at most 100")
        if self.lossless and self.thresholds is not None and min(self.thresholds) < 1:
            raise InvalidArgument(
                f"thresholds={self.thresholds} under 1 accept too much: lossless must be False"
            )
        if self.expected is None:
            return
        if isinstance(self.case, EagleCase):
            raise InvalidArgument("expected must be None for an EagleCase: its layout says what is expected")
        if isinstance(self.case, RawCase):
            (batch, slots), cap = self.case.accept.shape, self.case.depth_cap
        else:
            batch, slots, cap = len(self.case.requests), self.case.slots, self.case.effective_depth_cap
        wanted = {
            "accept_index": batch,
            "accept_token_num": batch,
            "predicts": batch * slots,
            "tokens": batch,
        }
        for name, size in wanted.items():
            value = getattr(self.expected, name)
            if value is not None and len(value) != size:
                raise InvalidArgument(f"expected.{name} holds {len(value)} items, but must hold {size}")
        for row in self.expected.accept_index or ():
            if len(row) != cap:
                raise InvalidArgument(f"expected.accept_index has a row of {len(row)}, but must have {cap}")


def _encode_entry(entry: CorpusEntry) -> dict[str, Any]:
    document: dict[str, Any] = {name: getattr(entry, name) for name in _ENTRY}
    if entry.thresholds is not None:
        document["thresholds"] = [codec.encode_float(float(value)) for value in entry.thresholds]
    if entry.expected is not None:
        expected = {f.name: codec.encode_ints(getattr(entry.expected, f.name)) for f in fields(Expected)}
        document["expected"] = expected
    document["parameters"] = dict(entry.parameters)
    return document | {"case": encode_case(entry.case)}


def _decode_entry(document: dict[str, Any], schema: int) -> CorpusEntry:
    codec.take(document, (*_ENTRY, "case"), "the entry")
    texts = {name: codec.decode_text(document[name], name) for name in _ENTRY[:5]}
    if not isinstance(document["lossless"], bool):
        raise CorpusError(f"lossless={document['lossless']!r}, but must be true or false")
    thresholds = document["thresholds"]
    if thresholds is not None:
        if not isinstance(thresholds, list) or len(thresholds) != 2:
            raise CorpusError(f"thresholds={thresholds!r}, but must be null or two numbers")
        single, acc = (codec.decode_float(value, "thresholds") for value in thresholds)
        thresholds = (single, acc)
    if not isinstance(document["parameters"], dict):
        raise CorpusError(f"parameters={document['parameters']!r}, but must be an object")
    expected = document["expected"]
    if expected is not None:
        depth = {"accept_index": 2, "accept_token_num": 1, "predicts": 1, "tokens": 2}
        codec.take(expected, depth, "expected")
        found = {
            name: None
            if expected[name] is None
            else codec.decode_ints(expected[name], f"expected.{name}", ndim)
            for name, ndim in depth.items()
        }
        expected = Expected(**found)
    return CorpusEntry(
        case=decode_case(document["case"], schema),
        law=texts["law"],
        note=texts["note"],
        source=texts["source"],
        issue=texts["issue"],
        backend=texts["backend"],
        lossless=document["lossless"],
        thresholds=thresholds,
        parameters=document["parameters"],
        expected=expected,
    )


def _parse(raw: bytes) -> tuple[CorpusEntry, str]:
    document = codec.parse_object(raw)
    schema = document.pop("schema", None)
    if isinstance(schema, bool) or schema not in range(1, SCHEMA + 1):
        raise CorpusError(f"schema={schema!r}, but this treeconv reads schema 1 to {SCHEMA}")
    stored = document.pop("sha256", None)
    digest = codec.sha256(codec.canonical(document))
    entry = _decode_entry(document, schema)  # before the checksum: it says *what* is wrong
    if stored != digest:
        raise CorpusError(
            f"checksum mismatch: sha256={stored!r}, but the content's is {digest}; after editing by hand,"
            " save it again (corpus/README.md)"
        )
    return entry, digest


def _read(path: Path) -> tuple[CorpusEntry, str]:
    """The entry in a file and its checksum, verified."""
    try:
        entry, digest = _parse(path.read_bytes())
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (CorpusError, InvalidArgument) as error:
        raise CorpusError(f"{path}: {error}") from error
    return replace(entry, path=path), digest


def save_entry(directory: str | Path, entry: CorpusEntry) -> Path:
    """Store an entry as ``<law>-<first 12 digits of its sha256>.json``.

    The write is atomic, and the name is fixed by the content: an entry that is there already is left
    untouched, a damaged file of that name is replaced.

    Args:
        directory: made if missing.

        entry: what to store; everything but ``path`` counts as content.

    Returns:
        The file's path.

    Raises:
        InvalidArgument: ``parameters`` hold something that is no JSON, or a float.
        OSError: the disk refuses.
    """
    if not codec.is_exact_json(entry.parameters):
        raise InvalidArgument(f"parameters={entry.parameters!r}, but must be JSON values without floats")
    document = _encode_entry(entry)
    digest = codec.sha256(codec.canonical(document))
    content = (codec.pretty({"schema": schema_of(entry.case), "sha256": digest, **document}) + "\n").encode()
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{entry.law}-{digest[:12]}.json"
    try:
        found = _read(path)[1]
    except CorpusError:
        found = None
    if found == digest:
        return path
    if found is not None:  # another entry with the same 48 bits
        path = directory / f"{entry.law}-{digest}.json"
    codec.atomic_write(path, content)
    return path


def load_entry(path: str | Path) -> CorpusEntry:
    """Read one file.

    Raises:
        CorpusError: missing, truncated, not JSON, an unknown schema, a wrong type or shape, or a
            checksum that does not fit. The message names the file and what is wrong.
    """
    return _read(Path(path))[0]


def load_corpus(directory: str | Path) -> tuple[list[CorpusEntry], list[CorpusError]]:
    """Read every ``*.json`` under a directory, in name order; hidden folders (``.fuzz``) are workshops.

    Returns:
        The entries, and one error for each file that could not be read: report those, run the rest.

    Raises:
        CorpusError: no such directory.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise CorpusError(f"{directory}: no such directory")
    found = sorted(directory.rglob("*.json"))
    hidden = [path for path in found if any(part[0] == "." for part in path.relative_to(directory).parts)]
    return codec.load_each([path for path in found if path not in hidden], load_entry)
