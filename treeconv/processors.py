"""What processors a request carries: one request's :class:`RequestProcessors`, a batch's :class:`Processors`.

The law at a node is that of its logits x after, in this order (SGLang's), each step in float32:

* ``repetition_penalty`` r: a token seen before gets x / r where x > 0, else x * r (Keskar et al., "CTRL",
  2019; HF, vLLM and SGLang).
* ``frequency_penalty`` and ``presence_penalty``: a token seen n times loses ``frequency * n``, and one seen
  at all loses ``presence`` (OpenAI's API; vLLM and SGLang).
* ``logit_bias`` is added.
* ``token_bitmask``: a forbidden token gets -inf.

Temperature and filters come after. *Seen* at a node are the committed tokens, all of them before the root,
and then the tokens of the path from the root to the node, both ends included: each occurrence once. An id
outside the vocabulary (an image's placeholder) counts for nobody.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from treeconv._numbers import as_number
from treeconv.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import torch
    from numpy.typing import NDArray

__all__ = [
    "PENALTIES",
    "PROCESSORS",
    "Penalties",
    "ProcessorKind",
    "Processors",
    "RequestProcessors",
    "bitmask_words",
    "check_penalty",
    "check_token_ids",
    "pack_bitmask",
]

ProcessorKind = Literal["bias", "bitmask", "penalties"]
PROCESSORS: tuple[ProcessorKind, ...] = ("bias", "bitmask", "penalties")
#: name -> the value at which it does nothing
PENALTIES = {"repetition_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}


def bitmask_words(vocab_size: int) -> int:
    """How many int32 words hold one bit per token: bit ``t % 32`` of word ``t // 32`` (xgrammar's layout)."""
    return -(-vocab_size // 32)


def pack_bitmask(allowed: NDArray[np.bool_], *, rest: bool = False) -> NDArray[np.int32]:
    """``[n, V]`` booleans as ``[n, ceil(V / 32)]`` int32 words; the bits behind V are all ``rest``."""
    nodes, vocab = allowed.shape
    bits = np.full((nodes, 32 * bitmask_words(vocab)), rest)
    bits[:, :vocab] = allowed
    words: NDArray[np.int32] = np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)
    return words


def check_penalty(name: str, value: Any) -> float:
    """A penalty as the float32 that backends take.

    Raises:
        InvalidArgument: not a finite number; a repetition penalty that is not positive.
    """
    with np.errstate(over="ignore"):
        single = float(np.float32(as_number(value)))
    low = name == "repetition_penalty"
    if not math.isfinite(single) or (low and not single > 0):
        raise InvalidArgument(f"{name}={value!r}, but must be a finite float32{' > 0' if low else ''}")
    return single + 0.0  # -0.0 is 0.0


def check_token_ids(tokens: Any, *, least: int = 0) -> list[int]:
    """Ids before a root as integers; ``least`` is -1 where padding may be among them.

    Raises:
        InvalidArgument: no iterable, text, or something in it that is no token id.
    """
    if isinstance(tokens, (str, bytes, bytearray)) or not hasattr(tokens, "__iter__"):
        raise InvalidArgument(f"committed_tokens={tokens!r}, but must be a list of token ids")
    found = tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)
    if not isinstance(found, list):  # an array without dimensions
        raise InvalidArgument(f"committed_tokens={tokens!r}, but must be a list of token ids")
    if set(map(type, found)) != {int}:
        found = [_token_id(token) for token in found]
    if found and not (least <= min(found) and max(found) < 2**63):
        bad = next(token for token in found if not least <= token < 2**63)
        rule = "token ids >= 0" if bad < 0 else "token ids below 2**63"
        also = ", or -1 in padding" if least < 0 else ""
        raise InvalidArgument(f"committed_tokens holds {bad}, but must hold {rule}{also}")
    return found


def _token_id(token: Any) -> int:
    plain = token.tolist() if hasattr(token, "tolist") else token
    if isinstance(plain, bool) or not isinstance(plain, int):
        raise InvalidArgument(f"committed_tokens holds {token!r}, but must hold integers: token ids")
    return plain


def _check_bias(bias: Any) -> NDArray[np.float32]:
    """A bias as float32: no text, no complex numbers, and no finite number made infinite."""
    try:
        given = np.asarray(bias)
    except ValueError as error:  # ragged
        raise InvalidArgument(f"logit_bias={type(bias).__name__}, but must be an array: {error}") from None
    if given.dtype.kind not in "fiu":
        raise InvalidArgument(f"logit_bias.dtype={given.dtype}, but must be numbers that float32 can hold")
    with np.errstate(over="ignore"):
        singles = np.ascontiguousarray(given, np.float32)
    if (np.isinf(singles) & np.isfinite(given)).any():
        value = given[np.isinf(singles) & np.isfinite(given)].flat[0]
        raise InvalidArgument(f"logit_bias holds {float(value)!r}, but must hold what float32 can (3.4e38)")
    return singles


@dataclass(frozen=True, eq=False)
class RequestProcessors:
    """The processors of one request, all off by default.

    Args:
        logit_bias: ``[V]`` float32, or None. -inf forbids a token; NaN or +inf make the rows unusable.

        token_bitmask: ``[n, ceil(V / 32)]`` int32, a row per node, or None: bit ``t % 32`` of word
            ``t // 32`` is set where token ``t`` is allowed *after* that node.

        repetition_penalty: > 0; 1 is off.

        frequency_penalty: finite; 0 is off. Negative ones reward.

        presence_penalty: likewise.

        committed_tokens: ids >= 0 before the root, -1 in padding (anywhere). The root's own token is in the
            tree: not here.

    Raises:
        InvalidArgument: a value outside its range, or an array of another dimension or dtype.
    """

    logit_bias: NDArray[np.float32] | None = None
    token_bitmask: NDArray[np.int32] | None = None
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    committed_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _check_bias(self.logit_bias))
        if self.token_bitmask is not None:
            words = np.ascontiguousarray(self.token_bitmask)
            if words.dtype != np.int32:
                raise InvalidArgument(f"token_bitmask.dtype={words.dtype}, but must be int32")
            object.__setattr__(self, "token_bitmask", words)
        for name in PENALTIES:
            object.__setattr__(self, name, check_penalty(name, getattr(self, name)))
        committed = tuple(check_token_ids(self.committed_tokens, least=-1))
        object.__setattr__(self, "committed_tokens", committed)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RequestProcessors) and self._key() == other._key()

    __hash__ = None  # type: ignore[assignment]  # holds arrays

    def _key(self) -> tuple[Any, ...]:
        arrays = (self.logit_bias, self.token_bitmask)
        held = [None if array is None else (array.shape, array.tobytes()) for array in arrays]
        return (*held, *(getattr(self, name) for name in PENALTIES), self.committed_tokens)

    def check_shapes(self, num_nodes: int, vocab_size: int) -> None:
        """Refuse arrays that do not fit a request of this size.

        Raises:
            InvalidArgument: names the array and its shape.
        """
        wanted = {"logit_bias": (vocab_size,), "token_bitmask": (num_nodes, bitmask_words(vocab_size))}
        for name, shape in wanted.items():
            array = getattr(self, name)
            if array is not None and array.shape != shape:
                raise InvalidArgument(f"{name}.shape={array.shape}, but must be {shape}")

    @property
    def kinds(self) -> frozenset[ProcessorKind]:
        """Which of :data:`PROCESSORS` are on."""
        on = {
            "bias": self.logit_bias is not None,
            "bitmask": self.token_bitmask is not None,
            "penalties": any(getattr(self, name) != off for name, off in PENALTIES.items()),
        }
        return frozenset(kind for kind in PROCESSORS if on[kind])

    def without(self, kinds: Collection[ProcessorKind]) -> RequestProcessors:
        """The processors of the other kinds."""
        off: dict[str, Any] = {}
        if "bias" in kinds:
            off["logit_bias"] = None
        if "bitmask" in kinds:
            off["token_bitmask"] = None
        if "penalties" in kinds:
            off |= PENALTIES
        return replace(self, **off)

    def at_nodes(self, nodes: Sequence[int], committed: Sequence[int] = ()) -> RequestProcessors:
        """The processors of a tree that keeps these nodes, with further tokens committed before its root."""
        mask = None if self.token_bitmask is None else self.token_bitmask[list(nodes)]
        return replace(self, token_bitmask=mask, committed_tokens=(*self.committed_tokens, *committed))

    def at_tokens(self, kept: Sequence[int], vocab_size: int) -> RequestProcessors:
        """The processors over a smaller vocabulary: these ids, closed up, others forgotten."""
        bias = None if self.logit_bias is None else self.logit_bias[list(kept)]
        mask = self.token_bitmask
        if mask is not None:
            bits = np.unpackbits(mask.astype("<i4").view(np.uint8), axis=1, bitorder="little")
            mask = pack_bitmask(bits[:, list(kept)] == 1)
        place = {old: new for new, old in enumerate(kept)}
        place |= {t: len(kept) for t in self.committed_tokens if t >= vocab_size} | {-1: -1}
        committed = [place[t] for t in self.committed_tokens if t in place]
        return replace(self, logit_bias=bias, token_bitmask=mask, committed_tokens=tuple(committed))

    def plainer(self) -> Iterator[RequestProcessors]:
        """The same with one thing off, or one committed token fewer: what a failure is shrunk by."""
        off = RequestProcessors()
        for name in ("logit_bias", "token_bitmask", *PENALTIES):
            less = replace(self, **{name: getattr(off, name)})
            if less != self:
                yield less
        for place in range(len(self.committed_tokens)):
            committed = self.committed_tokens[:place] + self.committed_tokens[place + 1 :]
            yield replace(self, committed_tokens=committed)

    def __str__(self) -> str:
        parts = []
        if self.logit_bias is not None:
            (tokens,) = np.nonzero(self.logit_bias)
            shown = [f"{t}: {float(self.logit_bias[t]):g}" for t in tokens[:8].tolist()]
            parts.append("bias {" + ", ".join([*shown, *(["..."] if len(tokens) > 8 else [])]) + "}")
        if self.token_bitmask is not None:
            parts.append("a bitmask")
        named = {"repetition_penalty": "repetition", "frequency_penalty": "frequency"}
        penalties = [
            f"{named.get(name, 'presence')} penalty {getattr(self, name):g}"
            for name, off in PENALTIES.items()
            if getattr(self, name) != off
        ]
        if penalties or self.committed_tokens:
            committed = ", ".join(map(str, self.committed_tokens[-8:]))
            more = "..., " if len(self.committed_tokens) > 8 else ""
            parts += [*penalties, f"committed [{more}{committed}]"]
        return ", ".join(parts) or "no processors"


@dataclass(frozen=True)
class Penalties:
    """The penalties of a batch; a request's may all be off.

    Args:
        repetition_penalty: ``[B]`` float32 > 0; 1 is off.

        frequency_penalty: ``[B]`` float32; 0 is off.

        presence_penalty: ``[B]`` float32; 0 is off.

        committed_tokens: ``[B, L]`` int64, L >= 0, the ids before each root, -1 in padding (anywhere).
    """

    repetition_penalty: torch.Tensor
    frequency_penalty: torch.Tensor
    presence_penalty: torch.Tensor
    committed_tokens: torch.Tensor


@dataclass(frozen=True)
class Processors:
    """The processors of a batch, as a backend takes them; each None where no request has it.

    Args:
        logit_bias: ``[B, V]`` float32. NaN or +inf make the rows unusable that they are added to.

        token_bitmask: ``[B, N, ceil(V / 32)]`` int32; bits at V and beyond mean nothing.

        penalties: repetition, frequency and presence, and what was committed.
    """

    logit_bias: torch.Tensor | None = None
    token_bitmask: torch.Tensor | None = None
    penalties: Penalties | None = None

    @classmethod
    def of(
        cls,
        requests: Sequence[RequestProcessors],
        num_draft_tokens: int,
        vocab_size: int,
        device: torch.device | str = "cpu",
    ) -> Processors | None:
        """The tensors of these requests' processors, on a device; None where all are off.

        A request without a bias has one of 0, one without a mask allows everything. Padded slots of one
        with a mask allow nothing: who visits one shows it.
        """
        import torch  # noqa: PLC0415

        kinds = frozenset().union(*(request.kinds for request in requests))
        if not kinds:
            return None

        def to(array: NDArray[Any]) -> torch.Tensor:
            return torch.from_numpy(array).to(device)

        size = len(requests)
        bias = np.zeros((size, vocab_size), np.float32)
        mask = np.zeros((size, num_draft_tokens, bitmask_words(vocab_size)), np.int32)
        longest = max(len(request.committed_tokens) for request in requests)
        committed = np.full((size, longest), -1, np.int64)
        for index, request in enumerate(requests):
            if request.logit_bias is not None:
                bias[index] = request.logit_bias
            if request.token_bitmask is None:
                mask[index] = -1
            else:
                mask[index, : len(request.token_bitmask)] = request.token_bitmask
            committed[index, : len(request.committed_tokens)] = request.committed_tokens
        values = {
            name: to(np.array([getattr(request, name) for request in requests], np.float32))
            for name in PENALTIES
        }
        penalties = Penalties(**values, committed_tokens=to(committed))
        return cls(
            logit_bias=to(bias) if "bias" in kinds else None,
            token_bitmask=to(mask) if "bitmask" in kinds else None,
            penalties=penalties if "penalties" in kinds else None,
        )

    @property
    def kinds(self) -> frozenset[ProcessorKind]:
        """Which of :data:`PROCESSORS` some request may have."""
        given = (self.logit_bias, self.token_bitmask, self.penalties)
        return frozenset(kind for kind, value in zip(PROCESSORS, given, strict=True) if value is not None)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by its name."""
        found = {"logit_bias": self.logit_bias, "token_bitmask": self.token_bitmask}
        if self.penalties is not None:
            found |= vars(self.penalties)
        return {name: tensor for name, tensor in found.items() if tensor is not None}
