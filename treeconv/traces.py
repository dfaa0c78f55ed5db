"""Recorded traces: a real model's logits at every node of a draft tree, one compressed file per tree.

``ci/record_traces.py`` writes them; ``corpus/README.md`` describes the format.
"""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv import _corpus_codec as codec
from treeconv.case import Request, VerifyCase
from treeconv.errors import CorpusError, InvalidArgument
from treeconv.tree import DraftTree, as_float_array

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Trace", "load_trace", "load_traces", "save_trace"]

SCHEMA = 1
_TEXTS = ("name", "model", "drafter", "prompt")


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """One draft tree scored by a real model.

    Args:
        name: what it is called, and its file.

        model: which model and weights.

        drafter: how the tree was drafted, in a sentence.

        prompt: the text; ``prompt_token_ids`` are the tokens *before* the root (``prefix_len`` of them).

        tree: n nodes; the root is the last token of the prompt.

        rows: ``[n, V]`` float32 holding bfloat16 values exactly: the model's logits, rounded to nearest even.

        positions: n integers: what the forward was given, prefix length + depth.

        temperatures: what the trace is to be verified at.

        accept: ``[temperatures, n]`` float32 coins; ``final`` ``[temperatures]``.
    """

    name: str
    model: str
    drafter: str
    prompt: str
    prompt_token_ids: tuple[int, ...]
    tree: DraftTree
    rows: NDArray[np.float32]
    positions: tuple[int, ...]
    temperatures: tuple[float, ...]
    accept: NDArray[np.float32]
    final: NDArray[np.float32]
    path: Path | None = None

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", self.name):
            raise InvalidArgument(
                f"name={self.name!r}, but must be letters, digits, _ and -: it names a file"
            )
        for name in ("rows", "accept", "final"):
            array = np.ascontiguousarray(as_float_array(getattr(self, name)), np.float32)
            object.__setattr__(self, name, array)
        nodes, count = len(self.tree), len(self.temperatures)
        if self.rows.ndim != 2 or self.rows.shape[0] != nodes or self.rows.shape[1] == 0:
            raise InvalidArgument(f"rows.shape={self.rows.shape}, but must be ({nodes}, V)")
        if (self.rows.view(np.uint32) & 0xFFFF).any():
            raise InvalidArgument("rows must hold bfloat16 values exactly")
        if self.accept.shape != (count, nodes) or self.final.shape != (count,):
            raise InvalidArgument(
                f"accept.shape={self.accept.shape}, final.shape={self.final.shape}, but must be"
                f" {(count, nodes)} and {(count,)}"
            )
        prefix = len(self.prompt_token_ids)
        if list(self.positions) != [prefix + depth for depth in self.tree.depths]:
            raise InvalidArgument(f"positions={self.positions}, but must be prefix length {prefix} + depth")
        if max(*self.tree.token_ids, *self.prompt_token_ids, 0) >= self.rows.shape[1]:
            raise InvalidArgument(f"a token is beyond the vocabulary of {self.rows.shape[1]}")

    def __repr__(self) -> str:
        return f"Trace({self.name!r}, nodes={len(self.tree)}, vocab_size={self.vocab_size}, path={self.path})"

    @property
    def prefix_len(self) -> int:
        """Committed tokens before the root."""
        return len(self.prompt_token_ids)

    @property
    def vocab_size(self) -> int:
        """V, the vocabulary size."""
        return int(self.rows.shape[1])

    def request(self, temperature: float) -> Request:
        """The trace at one of its temperatures, with the coins recorded for it."""
        if temperature not in self.temperatures:
            raise InvalidArgument(f"temperature={temperature!r}, but must be one of {self.temperatures}")
        index = self.temperatures.index(temperature)
        return Request(self.tree, self.rows, temperature, self.accept[index], float(self.final[index]))

    def case(self, temperature: float) -> VerifyCase:
        """The same as a call of one request, logits handed over as bfloat16."""
        return VerifyCase((self.request(temperature),), rows_dtype="bfloat16")


def _pack(rows: NDArray[np.float32]) -> bytes:
    """bfloat16 bits in two byte planes: sign and exponent compress to a quarter, the mantissa hardly."""
    bits = rows.view(np.uint32) >> 16
    return (bits >> 8).astype(np.uint8).tobytes() + (bits & 0xFF).astype(np.uint8).tobytes()


def _unpack(raw: bytes, shape: tuple[int, int]) -> NDArray[np.float32]:
    high, low = np.frombuffer(raw, np.uint8).reshape(2, *shape).astype(np.uint32)
    return ((high << 24) | (low << 16)).view(np.float32)


def save_trace(directory: str | Path, trace: Trace) -> Path:
    """Store a trace as ``<name>.trace``: one line of JSON, then the zlib-compressed rows. Atomic.

    Raises:
        OSError: the disk refuses.
    """
    raw = _pack(trace.rows)
    header = {
        **{name: getattr(trace, name) for name in _TEXTS},
        "prompt_token_ids": list(trace.prompt_token_ids),
        "parents": list(trace.tree.parents),
        "token_ids": list(trace.tree.token_ids),
        "positions": list(trace.positions),
        "temperatures": [codec.encode_float(value) for value in trace.temperatures],
        "accept": codec.encode_floats(trace.accept),
        "final": codec.encode_floats(trace.final),
        "rows": {"shape": list(trace.rows.shape), "dtype": "bfloat16", "layout": "high bytes, low bytes"},
    }
    # Over the rows as they are, not as compressed: another zlib may compress them otherwise.
    digest = codec.sha256(codec.canonical(header), raw)
    line = codec.canonical({"treeconv_trace": SCHEMA, "sha256": digest, **header})
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{trace.name}.trace"
    codec.atomic_write(path, line + b"\n" + zlib.compress(raw, 9))
    return path


def _decode(content: bytes) -> Trace:
    line, newline, packed = content.partition(b"\n")
    if not newline:
        raise CorpusError(f"truncated in the header ({len(content)} bytes), or no trace")
    header = codec.parse_object(line)
    schema = header.pop("treeconv_trace", None)
    if schema != SCHEMA or isinstance(schema, bool):
        raise CorpusError(f"treeconv_trace={schema!r}, but this treeconv reads schema {SCHEMA}")
    lists = ("prompt_token_ids", "parents", "token_ids", "positions")
    keys = (*_TEXTS, *lists, "temperatures", "accept", "final", "rows", "sha256")
    stored = codec.take(header, keys, "the header").pop("sha256")
    texts = {name: codec.decode_text(header[name], name) for name in _TEXTS}
    ints = {name: codec.decode_ints(header[name], name, 1) for name in lists}
    tree = DraftTree(ints["parents"], ints["token_ids"])
    about: dict[str, Any] = codec.take(header["rows"], ("shape", "dtype", "layout"), "rows")
    shape = codec.decode_ints(about["shape"], "rows.shape", 1)
    if len(shape) != 2 or shape[0] != len(tree) or not 0 < shape[1] < 2**31:
        raise CorpusError(f"rows.shape={list(shape)}, but must be [{len(tree)}, V]")
    if (about["dtype"], about["layout"]) != ("bfloat16", "high bytes, low bytes"):
        raise CorpusError(f"rows={about!r}, but must be bfloat16 in high bytes, low bytes")
    size = 2 * math.prod(shape)
    unzip = zlib.decompressobj()
    try:
        raw = unzip.decompress(packed, size + 1)  # bounded: a bad file must not fill the memory
    except zlib.error as error:
        raise CorpusError(f"the rows are not zlib data: {error}") from None
    if len(raw) != size or not unzip.eof or unzip.unused_data:
        raise CorpusError(f"the rows hold {len(raw)} bytes, but must hold {size}: truncated or too long")
    digest = codec.sha256(codec.canonical(header), raw)
    if stored != digest:
        raise CorpusError(f"checksum mismatch: sha256={stored!r}, but the content's is {digest}")
    if not isinstance(header["temperatures"], list):
        raise CorpusError("temperatures must be a list")
    temperatures = (codec.decode_float(value, "temperatures") for value in header["temperatures"])
    return Trace(
        name=texts["name"],
        model=texts["model"],
        drafter=texts["drafter"],
        prompt=texts["prompt"],
        prompt_token_ids=ints["prompt_token_ids"],
        tree=tree,
        rows=_unpack(raw, (shape[0], shape[1])),
        positions=ints["positions"],
        temperatures=tuple(temperatures),
        accept=codec.decode_floats(header["accept"], "accept", 2),
        final=codec.decode_floats(header["final"], "final", 1),
    )


def load_trace(path: str | Path) -> Trace:
    """Read one trace.

    Raises:
        CorpusError: missing, truncated, of an unknown schema, of wrong types or sizes, or with a checksum
            that does not fit. The message names the file and what is wrong.
    """
    path = Path(path)
    try:
        return replace(_decode(path.read_bytes()), path=path)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (CorpusError, InvalidArgument) as error:
        raise CorpusError(f"{path}: {error}") from error


def load_traces(path: str | Path) -> tuple[list[Trace], list[CorpusError]]:
    """Read every ``*.trace`` under a directory in name order; one bad file is reported, the rest load.

    Raises:
        CorpusError: no such directory.
    """
    path = Path(path)
    if not path.is_dir():
        raise CorpusError(f"{path}: no such directory")
    return codec.load_each(sorted(path.rglob("*.trace")), load_trace)
