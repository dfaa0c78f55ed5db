"""Checks shared by the public functions; each raises with ``name=value, but must be <rule>``."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv._validate_places import check_places
from treeconv.errors import InvalidArgument, InvalidTree
from treeconv.filters import Cuts, FilterOrder, Filters, check_order
from treeconv.tree import Coins, VerifyInput

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

__all__ = [
    "as_int64",
    "check_coins",
    "check_depth_cap",
    "check_filters",
    "check_int",
    "check_one_temperature",
    "check_rows",
    "check_seeds",
    "check_temperature",
    "check_tensors",
    "check_trees",
    "tree_pointers",
]

_TINIEST = 2.0**-149  # the smallest positive float32
_WORD_OF_ONE = 0x3F800000
_LARGEST = (2 - 2.0**-23) * 2.0**127  # the largest finite float32


def check_int(value: Any, name: str, at_least: int) -> int:
    """``value`` as an int that is at least ``at_least``."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name}={value!r}, but must be an integer >= {at_least}") from None
    if isinstance(value, bool) or number < at_least:
        raise InvalidArgument(f"{name}={value!r}, but must be an integer >= {at_least}")
    return number


def as_int64(values: Sequence[Any], name: str) -> NDArray[np.int64]:
    """The 64 bits of integers in [0, 2**64)."""
    for index, value in enumerate(values):
        if check_int(value, f"{name}[{index}]", 0) >= 2**64:
            raise InvalidArgument(f"{name}[{index}]={value!r}, but must be below 2**64")
    return np.array(list(values), np.uint64).view(np.int64)


def tree_pointers(first: Sequence[int], sibling: Sequence[int], where: str = "") -> list[int | None]:
    """Parents from first-child / next-sibling pointers: -1 for the root, None where nothing points.

    Raises:
        InvalidTree: a pointer out of range, or a slot that two pointers reach (a cycle, or a child of
            two parents). At most N steps are taken.
    """
    num_slots = len(first)
    parents: list[int | None] = [None] * num_slots
    parents[0] = -1
    if sibling[0] != -1:
        raise InvalidTree(f"{where}node 0: next sibling {sibling[0]}, but the root must have none (-1)")
    queue = [0]
    while queue:
        node = queue.pop()
        child = first[node]
        while child != -1:
            if not 0 <= child < num_slots:
                raise InvalidTree(
                    f"{where}node {node}: points at child {child}, but must be -1 or in [0, {num_slots - 1}]"
                )
            if parents[child] is not None:
                raise InvalidTree(
                    f"{where}node {child}: reached twice (a child of node {node} and of node"
                    f" {parents[child]}), but must be reached once: this is a cycle or a shared child"
                )
            parents[child] = node
            queue.append(child)
            child = sibling[child]
    return parents


def check_tensors(batch: VerifyInput) -> None:
    """Shapes, dtypes and devices."""
    import torch  # noqa: PLC0415

    if not isinstance(batch, VerifyInput):
        raise InvalidArgument(f"batch={type(batch).__name__}, but must be a VerifyInput (to_verify_input)")
    shape: tuple[int, ...] = ()
    for name, tensor in vars(batch).items():
        if not isinstance(tensor, torch.Tensor):
            raise InvalidArgument(f"{name}={type(tensor).__name__}, but must be a torch.Tensor")
        if name == "candidates":
            shape, device = tensor.shape, tensor.device
            if len(shape) != 2 or 0 in shape:
                raise InvalidArgument(f"candidates.shape={tuple(shape)}, but must be [B, N] with B, N >= 1")
        want = shape[:1] if name == "prefix_lens" else shape
        if tensor.shape != want:
            raise InvalidArgument(f"{name}.shape={tuple(tensor.shape)}, but must be {tuple(want)}")
        if tensor.dtype is not torch.int64:
            raise InvalidArgument(f"{name}.dtype={tensor.dtype}, but must be torch.int64")
        if tensor.device != device:
            raise InvalidArgument(
                f"{name}.device={tensor.device}, but must be {device}, the device of candidates"
            )


def check_trees(batch: VerifyInput, vocab_size: int | None = None) -> None:
    """On the CPU: pointers make trees, siblings differ, and drafts are in the vocabulary, if one is given.

    The root's token is never tested, nor looked at. On a CUDA device nothing is read back, so that no call
    waits for it: convert with :func:`treeconv.to_verify_input`, which only makes valid batches.
    """
    if not batch.candidates.is_cpu or batch.is_sealed(vocab_size):
        return
    # Small batches are checked faster one node at a time than with array operations.
    is_surely_valid = _is_surely_valid_small if batch.candidates.numel() <= 128 else _is_surely_valid
    if not is_surely_valid(batch, vocab_size):
        _name_the_fault(batch)
        if vocab_size is not None:
            _check_tokens(batch, vocab_size)
    if vocab_size is not None:  # about to be verified
        check_places(batch)


def _is_surely_valid_small(batch: VerifyInput, vocab_size: int | None) -> bool:
    """As :func:`_is_surely_valid`, one node at a time."""
    slots = batch.candidates.shape[1]
    rows = zip(
        batch.candidates.tolist(),
        batch.retrieve_next_token.tolist(),
        batch.retrieve_next_sibling.tolist(),
        strict=True,
    )
    for tokens, first, sibling in rows:
        if vocab_size is not None and (min(tokens) < 0 or max(tokens) >= vocab_size):
            return False
        links = first + sibling
        pointed_at = {*links}
        pointed_at.discard(-1)
        if not pointed_at:
            continue
        # No slot is pointed at twice and the root never: nothing is reached twice.
        if len(pointed_at) + links.count(-1) < len(links) or min(pointed_at) < 1 or max(pointed_at) >= slots:
            return False
        if sibling[0] != -1:
            return False
        for eldest in first:
            if eldest == -1:
                continue
            child = sibling[eldest]
            if child == -1:
                continue
            family = [tokens[eldest]]
            while child != -1:
                family.append(tokens[child])
                child = sibling[child]
            if len(set(family)) < len(family):
                return False
    return True


def _is_surely_valid(batch: VerifyInput, vocab_size: int | None) -> bool:
    """A quick sufficient test: every slot is pointed at once at most, and no sibling repeats a token.

    And every token is in the vocabulary, if one is given, padding's and the root's included.
    """
    tokens = batch.candidates.numpy()
    if vocab_size is not None and tokens.view(np.uint64).max() >= vocab_size:  # negative ids are greater
        return False
    first, sibling = batch.retrieve_next_token.numpy(), batch.retrieve_next_sibling.numpy()
    size, slots = tokens.shape
    if min(first.min(), sibling.min()) < -1 or max(first.max(), sibling.max()) >= slots:
        return False
    row = slots * np.arange(size)[:, None]
    is_first, has_younger = first >= 0, sibling >= 0
    firsts = (first + row)[is_first]
    youngers = (sibling + row)[has_younger]
    pointed_at = np.bincount(np.concatenate([firsts, youngers]), minlength=tokens.size)
    if pointed_at.max(initial=0) > 1 or pointed_at[::slots].any() or (sibling[:, 0] != -1).any():
        return False
    # The eldest sibling stands for the parent; found by pointer doubling.
    eldest = np.arange(tokens.size)
    eldest[youngers] = np.flatnonzero(has_younger)
    while True:
        further = eldest[eldest]
        if np.array_equal(further, eldest):
            break
        eldest = further
    children = np.concatenate([firsts, youngers])
    order = np.lexsort((tokens.ravel()[children], eldest[children]))
    same = (np.diff(eldest[children][order]) == 0) & (np.diff(tokens.ravel()[children][order]) == 0)
    return not same.any()


def _name_the_fault(batch: VerifyInput) -> None:
    rows = zip(
        batch.candidates.tolist(),
        batch.retrieve_next_token.tolist(),
        batch.retrieve_next_sibling.tolist(),
        strict=True,
    )
    for request, (tokens, first, sibling) in enumerate(rows):
        seen: set[tuple[int, int]] = set()
        for node, parent in enumerate(tree_pointers(first, sibling, f"request {request}, ")):
            if parent is None or parent == -1:
                continue
            if (parent, tokens[node]) in seen:
                raise InvalidTree(
                    f"request {request}, node {node}: token {tokens[node]} repeats a sibling's (children of"
                    f" node {parent}), but siblings must carry distinct tokens: the mass would count twice"
                )
            seen.add((parent, tokens[node]))


def _check_tokens(batch: VerifyInput, vocab_size: int) -> None:
    """Every drafted token is in the vocabulary."""
    tokens = batch.candidates.numpy()
    first, sibling = batch.retrieve_next_token.numpy(), batch.retrieve_next_sibling.numpy()
    for pointer in (first, sibling):
        request, node = np.nonzero((pointer >= 0) & (pointer < tokens.shape[1]))  # only padding's are behind
        child = pointer[request, node]
        drafted = tokens[request, child]
        if drafted.min(initial=0) < 0 or drafted.max(initial=0) >= vocab_size:
            bad = np.flatnonzero((drafted < 0) | (drafted >= vocab_size))
            place = f"candidates[{request[bad[0]]}, {child[bad[0]]}]"
            value = tokens[request[bad[0]], child[bad[0]]]
            raise InvalidArgument(f"{place}={value}, but must be in [0, {vocab_size - 1}], the vocabulary")


def _to_tensor(values: Any, name: str, shape: str, device: torch.device) -> torch.Tensor:
    """Lists and arrays as float32; NumPy's own default is float64."""
    import torch  # noqa: PLC0415

    reason: object = "complex numbers"  # torch would drop their imaginary parts
    try:
        if not torch.as_tensor(values).is_complex():
            return torch.as_tensor(values, dtype=torch.float32, device=device)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, None, text
        reason = error
    raise InvalidArgument(f"{name}={type(values).__name__}, but must be numbers of shape {shape}: {reason}")


def check_rows(rows: Any, name: str, batch: VerifyInput, dtypes: tuple[str, ...]) -> torch.Tensor:
    """``rows`` as a tensor ``[B, N, V]`` of an allowed dtype on the batch's device.

    Lists and NumPy arrays are rounded to float32.
    """
    import torch  # noqa: PLC0415

    shape = tuple(batch.candidates.shape)
    if not isinstance(rows, torch.Tensor):
        rows = _to_tensor(rows, name, f"{(*shape, 'V')}", batch.device)
    if rows.ndim != 3 or tuple(rows.shape[:2]) != shape or rows.shape[2] == 0:
        raise InvalidArgument(
            f"{name}.shape={tuple(rows.shape)}, but must be {(*shape, 'V')} with V >= 1: one row per slot"
        )
    if str(rows.dtype).removeprefix("torch.") not in dtypes:
        raise InvalidArgument(f"{name}.dtype={rows.dtype}, but must be one of {', '.join(dtypes)}")
    if rows.device != batch.device:
        raise InvalidArgument(f"{name}.device={rows.device}, but must be {batch.device}, the batch's device")
    tensor: torch.Tensor = rows.detach() if rows.requires_grad else rows
    return tensor


def check_one_temperature(value: float) -> None:
    """Refuse what no float32 temperature is; see :func:`check_temperature`."""
    if not 0 <= value < float("inf"):
        raise InvalidArgument(f"temperature={value!r}, but must be finite and >= 0")
    if value > _LARGEST:
        raise InvalidArgument(f"temperature={value!r}, but must be <= 3.4e38, the largest float32")
    if 0 < value < _TINIEST:
        raise InvalidArgument(f"temperature={value!r}, but must be 0 or >= 1.4e-45, the smallest float32")


def check_temperature(temperature: Any, batch: VerifyInput) -> torch.Tensor:
    """A scalar or ``[B]`` as a float32 tensor ``[B]`` on the batch's device; finite and >= 0.

    A positive value under the smallest float32 (1.4e-45) is refused rather than turned into greedy, and
    one above the largest rather than turned into infinity.
    Tensors on a CUDA device are taken as they are: reading them back would wait for the device. A backend
    answers for what is in them: see :class:`~treeconv.tree.RowStatus`.
    """
    import torch  # noqa: PLC0415

    size = batch.batch_size
    if isinstance(temperature, torch.Tensor) and temperature.device.type != "cpu":
        if tuple(temperature.shape) != (size,) or temperature.dtype != torch.float32:
            raise InvalidArgument(
                f"temperature has shape {tuple(temperature.shape)} and dtype {temperature.dtype}, but on a"
                f" device must be float32 [{size}]"
            )
        if temperature.device != batch.device:
            raise InvalidArgument(f"temperature.device={temperature.device}, but must be {batch.device}")
        return temperature
    if isinstance(temperature, float) and (temperature == 0 or _TINIEST <= temperature <= _LARGEST):
        return torch.full((size,), temperature, dtype=torch.float32, device=batch.device)
    try:
        values = torch.as_tensor(temperature, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        raise InvalidArgument(
            f"temperature={temperature!r}, but must be a number or {size} numbers"
        ) from None
    if values.ndim and tuple(values.shape) != (size,):
        raise InvalidArgument(
            f"temperature.shape={tuple(values.shape)}, but must be a scalar or ({size},), one per request"
        )
    for value in values.reshape(-1).tolist():
        check_one_temperature(value)
    return values.to(torch.float32).expand(size).contiguous().to(batch.device)


def _are_surely_in_0_1(coins: torch.Tensor) -> bool:
    """Whether all are (False may also mean a -0.0): lists are faster while short, words of memory after."""
    if coins.numel() <= 128:
        rows = coins.tolist() if coins.ndim == 2 else [coins.tolist()]
        return all(min(row) >= 0 and max(row) <= 1 and not math.isnan(sum(row)) for row in rows)
    # The words of floats in [0, 1] are the integers up to 1.0's; others are greater.
    return bool(coins.numpy().view(np.uint32).max() <= _WORD_OF_ONE)


def check_coins(coins: Coins, batch: VerifyInput) -> Coins:
    """Coins as contiguous float32 tensors ``[B, N]`` and ``[B]``, on the CPU checked to be in [0, 1]."""
    import torch  # noqa: PLC0415

    if not (hasattr(coins, "accept") and hasattr(coins, "final")):
        raise InvalidArgument(f"coins={type(coins).__name__}, but must be Coins(accept=[B, N], final=[B])")
    checked = {}
    shape = batch.candidates.shape
    for name, want in (("accept", shape), ("final", shape[:1])):
        values = getattr(coins, name)
        if not isinstance(values, torch.Tensor):
            values = _to_tensor(values, f"coins.{name}", str(tuple(want)), batch.device)
        if values.shape != want:
            raise InvalidArgument(f"coins.{name}.shape={tuple(values.shape)}, but must be {tuple(want)}")
        if values.dtype is not torch.float32:
            raise InvalidArgument(f"coins.{name}.dtype={values.dtype}, but must be torch.float32")
        if values.device != batch.device:
            raise InvalidArgument(f"coins.{name}.device={values.device}, but must be {batch.device}")
        values = values.detach()
        if values.is_cpu and not _are_surely_in_0_1(values):
            outside = values[~((values >= 0) & (values <= 1))]
            if len(outside):
                raise InvalidArgument(
                    f"coins.{name} holds {float(outside[0])!r}, but must be in [0, 1)"
                    " (1.0 from a rounding generator is tolerated)"
                )
        checked[name] = values.contiguous()
    return Coins(**checked)


def check_seeds(seeds: Any, batch: VerifyInput) -> torch.Tensor:
    """One seed per request as an int64 tensor ``[B]`` on the batch's device, holding the seed's 64 bits."""
    import torch  # noqa: PLC0415

    size = batch.batch_size
    if isinstance(seeds, torch.Tensor):
        if tuple(seeds.shape) != (size,) or seeds.dtype != torch.int64 or seeds.device != batch.device:
            raise InvalidArgument(
                f"seeds is {tuple(seeds.shape)} {seeds.dtype} on {seeds.device}, but must be ({size},)"
                f" torch.int64 on {batch.device}"
            )
        return seeds
    values = list(seeds) if hasattr(seeds, "__len__") else [seeds]
    if len(values) != size:
        raise InvalidArgument(f"len(seeds)={len(values)}, but must be {size}, one per request")
    return torch.from_numpy(as_int64(values, "seeds")).to(batch.device)


def check_filters(
    top_k: Any, top_p: Any, min_p: Any, order: FilterOrder, batch: VerifyInput, vocab_size: int
) -> Filters | None:
    """The batch's filters, each given as None, a scalar or one per request; None where all are off.

    Tensors on a CUDA device are taken as they are, as in :func:`check_temperature`.
    """
    import torch  # noqa: PLC0415

    size = batch.batch_size
    check_order(order)
    if top_k is None and top_p is None and min_p is None:
        return None
    given = {"top_k": top_k, "top_p": top_p, "min_p": min_p}
    on_device: dict[str, Any] = {
        name: value
        for name, value in given.items()
        if isinstance(value, torch.Tensor) and value.device.type != "cpu"
    }
    columns = {
        name: _per_request(value, name, size) for name, value in given.items() if name not in on_device
    }
    off = Cuts()
    cuts = []
    for request in range(size):
        values = {}
        for name, column in columns.items():
            value = column[request]
            values[name] = getattr(off, name) if value is None else value
        try:
            cuts.append(Cuts(**values))
        except InvalidArgument as error:
            where = "" if size == 1 else f" (request {request})"
            raise InvalidArgument(f"{error}{where}") from None
    if not on_device and not any(cut.are_on(vocab_size) for cut in cuts):
        return None
    filters = Filters.of(cuts, vocab_size, order, batch.device)
    for name, tensor in on_device.items():
        wanted = torch.int64 if name == "top_k" else torch.float32
        if tuple(tensor.shape) != (size,) or tensor.dtype != wanted or tensor.device != batch.device:
            raise InvalidArgument(
                f"{name} has shape {tuple(tensor.shape)} and dtype {tensor.dtype} on {tensor.device}, but on"
                f" a device must be {wanted} [{size}] on {batch.device}"
            )
    return replace(filters, **on_device)


def _per_request(value: Any, name: str, size: int) -> list[Any]:
    """A scalar, None, or one of them per request, as a list of ``size``."""
    if hasattr(value, "tolist"):  # a tensor, an array or a NumPy number
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return [value] * size
    if len(value) != size:
        raise InvalidArgument(f"{name}={value!r}, but must be one number, or {size}, one per request")
    return list(value)


def check_depth_cap(depth_cap: int | None, batch: VerifyInput) -> int:
    """``depth_cap`` as an int >= 1; the default is the deepest tree's depth + 1 (read from positions)."""
    if depth_cap is not None:
        return check_int(depth_cap, "depth_cap", 1)
    if batch.positions.is_cpu and batch.positions.numel() <= 128:  # several times faster at this size
        rows = zip(batch.positions.tolist(), batch.prefix_lens.tolist(), strict=True)
        deepest: int = max(max(positions) - prefix for positions, prefix in rows)
        return deepest + 1
    return int((batch.positions - batch.prefix_lens[:, None]).max()) + 1
