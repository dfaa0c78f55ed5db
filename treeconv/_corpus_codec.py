"""How corpus files hold numbers and reach the disk: bit-exact floats, strict readers, atomic writes."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import math
import os
import re
import secrets
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from treeconv.errors import CorpusError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from numpy.typing import NDArray

__all__ = [
    "atomic_write",
    "canonical",
    "decode_float",
    "decode_floats",
    "decode_int",
    "decode_ints",
    "decode_text",
    "encode_float",
    "encode_floats",
    "encode_ints",
    "is_exact_json",
    "load_each",
    "parse_object",
    "pretty",
    "sha256",
    "take",
]

_BASE64_ABOVE = 8192  # values; up to here a case is worth reading, above it only size counts
_HEX_FLOAT = re.compile(r"-?0x[01](\.[0-9a-f]+)?p[+-]\d+|-?inf|nan")
_HEX_NAN = re.compile(r"nan:0x[0-9a-f]{8}")
_QUIET_NAN = 0x7FC00000
_Loaded = TypeVar("_Loaded")


def encode_float(value: float) -> int | str:
    """A double: an integer where it is one (``10``), else ``float.hex()`` cut short; "nan", "inf", "-inf"."""
    minus_zero = value == 0 and math.copysign(1.0, value) < 0  # keeps its sign as "-0x0p+0"
    return int(value) if value.is_integer() and abs(value) < 2**53 and not minus_zero else _hex(value)


def _hex(value: float) -> str:
    return re.sub(r"\.?0+p", "p", value.hex())  # 0x1.99999a0000000p-4 -> 0x1.99999ap-4


def decode_float(value: Any, where: str) -> float:
    """The inverse of :func:`encode_float`."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**53:
        return float(value)
    if isinstance(value, str) and _HEX_FLOAT.fullmatch(value):
        try:
            return float.fromhex(value)
        except OverflowError:
            pass
    raise CorpusError(
        f"{where}={value!r}, but must be an integer under 2**53 or a string from float.hex(), nan, inf, -inf"
    )


def encode_floats(array: NDArray[np.float32]) -> Any:
    """A float32 array: nested lists of :func:`encode_float`, or base64 of its little-endian bytes if big.

    A NaN other than the usual quiet one is written with its bits: ``"nan:0xffc00001"``.
    """
    if array.size > _BASE64_ABOVE:
        raw = np.ascontiguousarray(array, "<f4").tobytes()
        return {"shape": list(array.shape), "float32_base64": base64.b64encode(raw).decode()}
    if array.ndim > 1:
        return [encode_floats(part) for part in array]
    bits = array.view(np.uint32).tolist()
    return [
        f"nan:{b:#010x}" if math.isnan(value) and b != _QUIET_NAN else encode_float(value)
        for value, b in zip(array.tolist(), bits, strict=True)
    ]


def decode_floats(value: Any, where: str, ndim: int) -> NDArray[np.float32]:
    """The inverse of :func:`encode_floats`: a float32 array of ``ndim`` dimensions, at least one value."""
    if isinstance(value, dict):
        return _from_base64(value, where, ndim)
    if not isinstance(value, list) or not value:
        raise CorpusError(f"{where} is {_kind(value)}, but must be a non-empty list (or a base64 object)")
    if ndim > 1:
        parts = [decode_floats(part, f"{where}[{i}]", ndim - 1) for i, part in enumerate(value)]
        if len({part.shape for part in parts}) > 1:
            raise CorpusError(f"{where} holds lists of several lengths, but must be rectangular")
        return np.stack(parts)
    bits = np.zeros(len(value), np.uint32)
    for i, item in enumerate(value):
        if isinstance(item, str) and _HEX_NAN.fullmatch(item):
            bits[i] = int(item[4:], 16)
            if not np.isnan(bits[i : i + 1].view(np.float32)[0]):
                raise CorpusError(f"{where}[{i}]={item!r}, but must be the bits of a NaN")
            continue
        number = decode_float(item, f"{where}[{i}]")
        with np.errstate(over="ignore"):
            single = np.array([number]).astype(np.float32)
        if float(single[0]) != number and not math.isnan(number):
            raise CorpusError(f"{where}[{i}]={item!r}, but must be a float32 exactly")
        bits[i] = _QUIET_NAN if math.isnan(number) else single.view(np.uint32)[0]
    return bits.view(np.float32)


def _from_base64(value: dict[str, Any], where: str, ndim: int) -> NDArray[np.float32]:
    take(value, {"shape", "float32_base64"}, where)
    shape = decode_ints(value["shape"], f"{where}.shape", 1)
    text = decode_text(value["float32_base64"], f"{where}.float32_base64")
    try:
        raw = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise CorpusError(f"{where}.float32_base64 is not base64: {error}") from None
    if len(shape) != ndim or min(shape) < 1 or 4 * math.prod(shape) != len(raw):
        raise CorpusError(
            f"{where} has shape {list(shape)} and {len(raw)} bytes, but must be {ndim}-d and fit"
        )
    return np.frombuffer(raw, "<f4").astype(np.float32).reshape(shape)


def encode_ints(value: Any) -> Any:
    """Nested tuples of ints as nested lists."""
    return [encode_ints(part) for part in value] if isinstance(value, tuple) else value


def decode_int(value: Any, where: str) -> int:
    """A JSON integer that fits int64 (``true`` is none)."""
    if not isinstance(value, int) or isinstance(value, bool) or not -(2**63) <= value < 2**63:
        raise CorpusError(f"{where}={value!r}, but must be an integer that fits 64 bits")
    return value


def decode_ints(value: Any, where: str, ndim: int) -> tuple[Any, ...]:
    """Nested lists of integers, ``ndim`` deep, as tuples."""
    if not isinstance(value, list):
        raise CorpusError(f"{where} is {_kind(value)}, but must be a list")
    if ndim == 1:
        return tuple(decode_int(item, f"{where}[{i}]") for i, item in enumerate(value))
    return tuple(decode_ints(part, f"{where}[{i}]", ndim - 1) for i, part in enumerate(value))


def decode_text(value: Any, where: str) -> str:
    """A JSON string."""
    if not isinstance(value, str):
        raise CorpusError(f"{where} is {_kind(value)}, but must be a string")
    return value


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def take(value: Any, keys: Iterable[str], where: str, optional: Iterable[str] = ()) -> dict[str, Any]:
    """``value`` as an object with exactly these keys: a typing error is never taken for a default."""
    if not isinstance(value, dict):
        raise CorpusError(f"{where} is {_kind(value)}, but must be an object")
    wanted = set(keys)
    if missing := sorted(wanted - set(value)):
        raise CorpusError(f"{where} lacks {', '.join(map(repr, missing))}")
    if unknown := sorted(set(value) - wanted - set(optional)):
        raise CorpusError(f"{where} has unknown keys {', '.join(map(repr, unknown))}")
    return value


def parse_object(raw: bytes) -> dict[str, Any]:
    """A UTF-8 JSON object; NaN and Infinity literals, which are no JSON, are refused."""

    def refuse(literal: str) -> Any:
        raise ValueError(f"{literal} is no JSON")

    try:
        document = json.loads(raw.decode(), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise CorpusError(f"not JSON, or truncated ({len(raw)} bytes): {error}") from None
    if not isinstance(document, dict):
        raise CorpusError(f"holds {_kind(document)}, but must hold an object")
    return document


def is_exact_json(value: Any) -> bool:
    """Whether a value is JSON without floats (decimal floats are not kept to the bit by every reader)."""
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_exact_json(item) for key, item in value.items())
    if isinstance(value, list):  # a tuple would come back as a list
        return all(map(is_exact_json, value))
    return value is None or isinstance(value, (str, int))


def canonical(document: Any) -> bytes:
    """The one spelling of a document that checksums are taken of."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def pretty(value: Any, indent: str = "") -> str:
    """JSON with every list of plain values on one line, so that a small case can be read and compared."""
    deeper = indent + "  "
    if isinstance(value, dict) and value:
        lines = [f"{deeper}{json.dumps(key)}: {pretty(item, deeper)}" for key, item in value.items()]
    elif isinstance(value, list) and any(isinstance(item, (list, dict)) for item in value):
        lines = [deeper + pretty(item, deeper) for item in value]
    else:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    left, right = "{}" if isinstance(value, dict) else "[]"
    return left + "\n" + ",\n".join(lines) + "\n" + indent + right


def sha256(*parts: bytes) -> str:
    """Hex digest of the parts, one behind the other."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def atomic_write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: a crash leaves what was there before.

    The temporary file lies beside it (``os.replace`` does not cross file systems) and is synced before
    the rename, or a power cut could leave the new name over no content.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)  # noqa: PTH105  (named as what it is: the atomic step)
    finally:
        temporary.unlink(missing_ok=True)


def load_each(
    paths: Iterable[Path], load: Callable[[Path], _Loaded]
) -> tuple[list[_Loaded], list[CorpusError]]:
    """Load every file; a bad one is an error in the second list and stops none of the others."""
    loaded, errors = [], []
    for path in paths:
        try:
            loaded.append(load(path))
        except CorpusError as error:
            errors.append(error)
    return loaded, errors
