"""Checks of a call's processors; like :mod:`treeconv._validate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treeconv.errors import InvalidArgument
from treeconv.processors import (
    PENALTIES,
    Penalties,
    Processors,
    bitmask_words,
    check_penalty,
    check_token_ids,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from treeconv.tree import VerifyInput

__all__ = ["check_processors"]


def check_processors(
    batch: VerifyInput,
    vocab_size: int,
    logit_bias: Any,
    token_bitmask: Any,
    penalties: Mapping[str, Any],
    committed_tokens: Any,
) -> Processors | None:
    """The batch's processors, each given as None where it is off; None where all are.

    Tensors on a CUDA device are taken as they are: reading them back would wait for the device.
    """
    import torch  # noqa: PLC0415

    committed_tokens = _texts(committed_tokens, batch)
    if logit_bias is None and token_bitmask is None and all(value is None for value in penalties.values()):
        return None
    size, slots = batch.candidates.shape
    if logit_bias is not None:
        if not isinstance(logit_bias, torch.Tensor):  # NumPy's own default is float64
            logit_bias = _singles(logit_bias, "logit_bias", batch.device)
        logit_bias = _array(logit_bias, "logit_bias", (size, vocab_size), torch.float32, batch.device)
    if token_bitmask is not None:
        shape = (size, slots, bitmask_words(vocab_size))
        token_bitmask = _array(token_bitmask, "token_bitmask", shape, torch.int32, batch.device)
    found = Processors(logit_bias, token_bitmask, _penalties(batch, penalties, committed_tokens))
    return found if found.kinds else None


def _singles(value: Any, name: str, device: torch.device) -> torch.Tensor:
    """Numbers as float32: none loses its imaginary part, and no finite one is made infinite."""
    import torch  # noqa: PLC0415

    given = _tensor(value, name, None, torch.device("cpu"))
    if given.is_complex():
        raise InvalidArgument(f"{name}.dtype={given.dtype}, but must be real numbers")
    single = given.to(torch.float32)
    if not given.is_floating_point():
        return single.to(device)
    # Python's numbers came as float32: what overflowed is seen only where they are taken as they are.
    whole = given if hasattr(value, "dtype") else _tensor(value, name, torch.float64, torch.device("cpu"))
    lost = whole[single.isinf() & whole.isfinite()]
    if len(lost):
        raise InvalidArgument(f"{name} holds {float(lost[0])!r}, but must hold what float32 can (3.4e38)")
    return single.to(device)


def _tensor(value: Any, name: str, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    import torch  # noqa: PLC0415

    try:
        return torch.as_tensor(value, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:  # ragged, None, text
        raise InvalidArgument(f"{name}={type(value).__name__}, but must be an array: {error}") from None


def _array(
    value: Any, name: str, shape: tuple[int | str, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    import torch  # noqa: PLC0415

    tensor = value if isinstance(value, torch.Tensor) else _tensor(value, name, None, device)
    if tensor.layout != torch.strided:
        raise InvalidArgument(f"{name}.layout={tensor.layout}, but must be torch.strided: a dense tensor")
    if tuple(tensor.shape) != shape:
        raise InvalidArgument(f"{name}.shape={tuple(tensor.shape)}, but must be {shape}")
    if tensor.dtype != dtype:
        raise InvalidArgument(f"{name}.dtype={tensor.dtype}, but must be {dtype}")
    if tensor.device != device:
        raise InvalidArgument(f"{name}.device={tensor.device}, but must be {device}, the batch's device")
    return tensor.detach()


def _penalties(
    batch: VerifyInput, given: Mapping[str, Any], committed_tokens: torch.Tensor | list[list[int]] | None
) -> Penalties | None:
    """The three penalties as float32 ``[B]``, with what was committed; None where all are surely off."""
    import torch  # noqa: PLC0415

    size, device = batch.batch_size, batch.device
    columns: dict[str, torch.Tensor] = {}
    are_on = False
    for name, off in PENALTIES.items():
        value = off if given[name] is None else given[name]
        if isinstance(value, torch.Tensor) and value.device.type != "cpu":
            columns[name] = _array(value, name, (size,), torch.float32, device)
            are_on = True
            continue
        numbers = value.tolist() if hasattr(value, "tolist") else value
        numbers = list(numbers) if isinstance(numbers, (list, tuple)) else [numbers] * size
        if len(numbers) != size:
            raise InvalidArgument(f"{name}={value!r}, but must be one number, or {size}, one per request")
        checked = [check_penalty(name, off if number is None else number) for number in numbers]
        are_on |= any(number != off for number in checked)
        columns[name] = torch.tensor(checked, dtype=torch.float32, device=device)
    if not are_on:
        return None
    return Penalties(**columns, committed_tokens=_padded(committed_tokens, size, device))


def _texts(value: Any, batch: VerifyInput) -> torch.Tensor | list[list[int]] | None:
    """What was committed, checked, whether a penalty asks for it or not; an array as a tensor ``[B, L]``."""
    import torch  # noqa: PLC0415

    size = batch.batch_size
    if value is None:
        return None
    if hasattr(value, "shape"):
        width = value.shape[1] if len(value.shape) == 2 else "L"
        tensor = _array(value, "committed_tokens", (size, width), torch.int64, batch.device)
        if tensor.is_cpu and tensor.numel() and int(tensor.min()) < -1:
            raise InvalidArgument(
                f"committed_tokens holds {int(tensor.min())}, but must hold token ids >= 0, or -1 in padding"
            )
        return tensor
    is_nested = not isinstance(value, (str, bytes, bytearray)) and hasattr(value, "__iter__")
    texts = list(value) if is_nested else []
    if len(texts) != size or any(
        isinstance(text, (str, bytes, bytearray)) or not hasattr(text, "__iter__") for text in texts
    ):
        raise InvalidArgument(
            f"committed_tokens={value!r}, but must be {size} lists of token ids, one per request"
        )
    return [check_token_ids(text) for text in texts]


def _padded(texts: torch.Tensor | list[list[int]] | None, size: int, device: torch.device) -> torch.Tensor:
    """The texts as ``[B, L]`` int64, -1 in padding."""
    import torch  # noqa: PLC0415

    if isinstance(texts, torch.Tensor):
        return texts
    texts = texts or [[]] * size
    longest = max(map(len, texts))
    padded = [text + [-1] * (longest - len(text)) for text in texts]
    return torch.tensor(padded, dtype=torch.int64, device=device).reshape(size, longest)
