"""Checks of a call's processors; like :mod:`treeconv._validate`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from treeconv.errors import InvalidArgument
from treeconv.processors import PENALTIES, Penalties, Processors, bitmask_words, check_penalty

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

    if logit_bias is None and token_bitmask is None and all(value is None for value in penalties.values()):
        return None
    size, slots = batch.candidates.shape
    if logit_bias is not None:
        if not isinstance(logit_bias, torch.Tensor):  # NumPy's own default is float64
            logit_bias = _tensor(logit_bias, "logit_bias", torch.float32, batch.device)
        logit_bias = _array(logit_bias, "logit_bias", (size, vocab_size), torch.float32, batch.device)
    if token_bitmask is not None:
        shape = (size, slots, bitmask_words(vocab_size))
        token_bitmask = _array(token_bitmask, "token_bitmask", shape, torch.int32, batch.device)
    found = Processors(logit_bias, token_bitmask, _penalties(batch, penalties, committed_tokens))
    return found if found.kinds else None


def _tensor(value: Any, name: str, dtype: torch.dtype | None, device: torch.device) -> torch.Tensor:
    import torch  # noqa: PLC0415

    try:
        return torch.as_tensor(value, dtype=dtype, device=device)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, None, text
        raise InvalidArgument(f"{name}={type(value).__name__}, but must be an array: {error}") from None


def _array(
    value: Any, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    import torch  # noqa: PLC0415

    tensor = value if isinstance(value, torch.Tensor) else _tensor(value, name, None, device)
    if tuple(tensor.shape) != shape:
        raise InvalidArgument(f"{name}.shape={tuple(tensor.shape)}, but must be {shape}")
    if tensor.dtype != dtype:
        raise InvalidArgument(f"{name}.dtype={tensor.dtype}, but must be {dtype}")
    if tensor.device != device:
        raise InvalidArgument(f"{name}.device={tensor.device}, but must be {device}, the batch's device")
    return tensor.detach()


def _penalties(batch: VerifyInput, given: Mapping[str, Any], committed_tokens: Any) -> Penalties | None:
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
    committed = _committed(committed_tokens, size, device)
    return Penalties(**columns, committed_tokens=committed) if are_on else None


def _committed(value: Any, size: int, device: torch.device) -> torch.Tensor:
    """Lists of ids as ``[B, L]`` int64, -1 in padding; a tensor of that shape as it is."""
    import torch  # noqa: PLC0415

    if value is None:
        return torch.empty((size, 0), dtype=torch.int64, device=device)
    if hasattr(value, "shape"):
        width = value.shape[1] if len(value.shape) == 2 else -1
        return _array(value, "committed_tokens", (size, width), torch.int64, device)
    try:
        texts = [[int(token) for token in text] for text in value]
    except TypeError:
        texts = []
    if len(texts) != size:
        raise InvalidArgument(
            f"committed_tokens={value!r}, but must be {size} lists of token ids, one per request"
        )
    least = min((token for text in texts for token in text), default=0)
    if least < 0:
        raise InvalidArgument(f"committed_tokens holds {least}, but must hold token ids >= 0")
    longest = max(map(len, texts))
    padded = [text + [-1] * (longest - len(text)) for text in texts]
    return torch.tensor(padded, dtype=torch.int64, device=device).reshape(size, longest)
