"""Corpus entries that are no :class:`VerifyCase`: raw pointer arrays, and tree-building examples."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv import _corpus_codec as codec
from treeconv.case import CaseTensors, Request, RowsKind, VerifyCase
from treeconv.convert import EagleDraft
from treeconv.errors import CorpusError, InvalidArgument
from treeconv.processors import PENALTIES, RequestProcessors
from treeconv.tree import Coins, DraftTree, VerifyInput, as_float_array

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

__all__ = ["EagleCase", "RawCase", "decode_case", "encode_case", "schema_of"]

Ints = tuple[int, ...]
IntRows = tuple[tuple[int, ...], ...]
_LAYOUT = ("candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "positions")
_EAGLE_NDIM = {  # the lists of an EagleCase and how deep they nest
    "parent_list": 2,
    "top_scores_index": 2,
    "draft_tokens": 2,
    "root_token_ids": 1,
    "prefix_lens": 1,
    **dict.fromkeys(_LAYOUT, 2),
}


@dataclass(frozen=True, eq=False)
class RawCase:
    """A call as raw pointer arrays, for inputs that no :class:`DraftTree` in node order can hold.

    Siblings may come in any slot order, and the arrays may be malformed on purpose (a cycle, two
    siblings with one token): only shapes are checked.

    Args:
        candidates: ``[B, N]`` token ids; so are ``retrieve_next_token`` and ``retrieve_next_sibling``
            (slots, -1 for none).

        rows: ``[B, N, V]`` float32.

        temperature: B numbers >= 0; 0 is greedy. Unused where the rows are probabilities.

        accept: ``[B, N]`` float32 coins, ``final`` ``[B]``.

        kind, depth_cap, rows_dtype: as in :class:`VerifyCase`; the cap has no default here.
    """

    candidates: IntRows
    retrieve_next_token: IntRows
    retrieve_next_sibling: IntRows
    rows: NDArray[np.float32]
    temperature: tuple[float, ...]
    accept: NDArray[np.float32]
    final: NDArray[np.float32]
    depth_cap: int
    kind: RowsKind = "logits"
    rows_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("rows", "accept", "final"):
            array = np.ascontiguousarray(as_float_array(getattr(self, name)), np.float32)
            object.__setattr__(self, name, array)
        if self.rows.ndim != 3 or 0 in self.rows.shape:
            raise InvalidArgument(f"rows.shape={self.rows.shape}, but must be [B, N, V], none of them 0")
        batch, slots = self.rows.shape[:2]
        for name in ("candidates", "retrieve_next_token", "retrieve_next_sibling"):
            if [len(row) for row in getattr(self, name)] != [slots] * batch:
                raise InvalidArgument(f"{name} must hold {batch} rows of {slots}, as rows do")
        if self.accept.shape != (batch, slots) or self.final.shape != (batch,):
            raise InvalidArgument(
                f"accept.shape={self.accept.shape}, final.shape={self.final.shape}, but must be"
                f" {(batch, slots)} and {(batch,)}"
            )
        if len(self.temperature) != batch:
            raise InvalidArgument(f"len(temperature)={len(self.temperature)}, but must be {batch}")
        if self.depth_cap < 1:
            raise InvalidArgument(f"depth_cap={self.depth_cap}, but must be >= 1")
        # VerifyCase owns the rules for `kind` and `rows_dtype`; ask it with one request of one node.
        probe = Request(DraftTree((-1,), (0,)), self.rows[0, :1], 0.0, self.accept[0, :1], 0.0)
        VerifyCase((probe,), kind=self.kind, rows_dtype=self.rows_dtype)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RawCase):
            return False
        for name in self.__dataclass_fields__:
            mine, theirs = getattr(self, name), getattr(other, name)
            if isinstance(mine, np.ndarray):  # to the bit: NaN equals itself, 0.0 is not -0.0
                if mine.shape != theirs.shape or mine.tobytes() != theirs.tobytes():
                    return False
            elif mine != theirs:
                return False
        return True

    __hash__ = None  # type: ignore[assignment]  # holds arrays

    def _test_order(self, request: int) -> list[tuple[int, int]]:
        """Reachable ``(slot, parent slot)``, parents first, siblings as linked; a slot is taken once."""
        first, sibling = self.retrieve_next_token[request], self.retrieve_next_sibling[request]
        order, seen = [(0, -1)], {0}
        for node, _ in order:  # grows while it is read: breadth first
            child = first[node]
            while 0 <= child < len(first) and child not in seen:
                seen.add(child)
                order.append((child, node))
                child = sibling[child]
        return order

    def tensors(self, device: torch.device | str = "cpu") -> CaseTensors:
        """The call's tensors on a device; ``positions`` are depths (prefix 0), 0 in unreachable slots."""
        import torch  # noqa: PLC0415

        positions = np.zeros(self.rows.shape[:2], np.int64)
        for request in range(len(positions)):
            for slot, parent in self._test_order(request)[1:]:
                positions[request, slot] = positions[request, parent] + 1
        ints = {
            "candidates": np.array(self.candidates, np.int64),
            "retrieve_index": np.arange(positions.size).reshape(positions.shape),
            "retrieve_next_token": np.array(self.retrieve_next_token, np.int64),
            "retrieve_next_sibling": np.array(self.retrieve_next_sibling, np.int64),
            "positions": positions,
            "prefix_lens": np.zeros(len(positions), np.int64),
        }
        accept, final = (torch.from_numpy(a.copy()).to(device) for a in (self.accept, self.final))
        return CaseTensors(
            batch=VerifyInput(**{name: torch.from_numpy(array).to(device) for name, array in ints.items()}),
            rows=torch.from_numpy(self.rows.copy()).to(getattr(torch, self.rows_dtype)).to(device),
            temperature=torch.tensor(self.temperature, dtype=torch.float32, device=device),
            coins=Coins(accept, final),
            depth_cap=self.depth_cap,
        )

    def renumbered(self) -> VerifyCase:
        """The same call as trees in node order: breadth first, siblings as linked; padding dropped.

        Slot numbers change, so of an :class:`Expected` only ``accept_token_num`` and ``tokens`` carry over.

        Raises:
            InvalidTree: the pointers describe no :class:`DraftTree`.
        """
        requests = []
        for request in range(len(self.candidates)):
            order = self._test_order(request)
            slots = [slot for slot, _ in order]
            node_of = {-1: -1} | {slot: node for node, slot in enumerate(slots)}
            tree = DraftTree(
                parents=tuple(node_of[parent] for _, parent in order),
                token_ids=tuple(self.candidates[request][slot] for slot in slots),
            )
            rows, accept = self.rows[request, slots], self.accept[request, slots]
            temperature, final = self.temperature[request], float(self.final[request])
            requests.append(Request(tree, rows, temperature, accept, final))
        return VerifyCase(
            tuple(requests), self.kind, self.rows.shape[1], self.depth_cap, rows_dtype=self.rows_dtype
        )


@dataclass(frozen=True)
class EagleCase:
    """A tree-building example: EAGLE's tensors in, the layout that was published for them.

    The first six fields are :class:`EagleDraft`'s and ``prefix_lens``; the others ``[B, N]`` as in
    :class:`VerifyInput`.
    """

    parent_list: IntRows
    top_scores_index: IntRows
    draft_tokens: IntRows
    root_token_ids: Ints
    topk: int
    prefix_lens: Ints
    candidates: IntRows
    retrieve_index: IntRows
    retrieve_next_token: IntRows
    retrieve_next_sibling: IntRows
    positions: IntRows

    def __post_init__(self) -> None:
        batch, slots = len(self.root_token_ids), len(self.candidates[0]) if self.candidates else 0
        if batch < 1 or slots < 1:
            raise InvalidArgument("root_token_ids and candidates must not be empty")
        widths = dict.fromkeys(_LAYOUT, slots) | {"top_scores_index": slots - 1, "draft_tokens": slots - 1}
        for name, width in widths.items():
            if [len(row) for row in getattr(self, name)] != [width] * batch:
                raise InvalidArgument(f"{name} must hold {batch} rows of {width}")
        if len(self.parent_list) != batch or len(self.prefix_lens) != batch:
            raise InvalidArgument(f"parent_list and prefix_lens must hold {batch} items, one per request")

    def draft(self) -> EagleDraft:
        """The input as tensors, for :func:`treeconv.convert.from_eagle`."""
        import torch  # noqa: PLC0415

        lists = ("parent_list", "top_scores_index", "draft_tokens", "root_token_ids")
        tensors = {name: torch.tensor(getattr(self, name), dtype=torch.int64) for name in lists}
        return EagleDraft(**tensors, topk=self.topk)


def schema_of(case: VerifyCase | RawCase | EagleCase) -> int:
    """The lowest schema that can hold a case: 3 for processors or another rule, 2 for filters, else 1.

    So what has none is written as it always was, under the same name, and read by older readers.
    """
    if not isinstance(case, VerifyCase):
        return 1
    if case.rule != "target_only" or any(r.processors != RequestProcessors() for r in case.requests):
        return 3
    return 2 if case.has_filter_settings else 1


def encode_case(case: VerifyCase | RawCase | EagleCase) -> dict[str, Any]:
    """A case as JSON values; ``type`` says which."""
    if isinstance(case, EagleCase):
        return {"type": "eagle"} | {f.name: codec.encode_ints(getattr(case, f.name)) for f in fields(case)}
    if isinstance(case, RawCase):
        return {
            "type": "raw",
            "kind": case.kind,
            "rows_dtype": case.rows_dtype,
            "depth_cap": case.depth_cap,
            "candidates": codec.encode_ints(case.candidates),
            "retrieve_next_token": codec.encode_ints(case.retrieve_next_token),
            "retrieve_next_sibling": codec.encode_ints(case.retrieve_next_sibling),
            "temperature": [codec.encode_float(value) for value in case.temperature],
            "accept": codec.encode_floats(case.accept),
            "final": codec.encode_floats(case.final),
            "rows": codec.encode_floats(case.rows),
        }
    schema = schema_of(case)
    return {
        "type": "trees",
        "kind": case.kind,
        "rows_dtype": case.rows_dtype,
        "num_draft_tokens": case.num_draft_tokens,
        "depth_cap": case.depth_cap,
        **({"filter_order": case.filter_order} if schema >= 2 else {}),
        **({"rule": case.rule} if schema >= 3 else {}),
        "requests": [
            {
                "parents": list(request.tree.parents),
                "token_ids": list(request.tree.token_ids),
                "temperature": codec.encode_float(request.temperature),
                **(_encode_filters(request) if schema >= 2 else {}),
                "accept": codec.encode_floats(request.accept),
                "final": codec.encode_float(request.final),
                "rows": codec.encode_floats(request.rows),
                **({"draft_probs": _encode_optional(request.draft_probs)} if schema >= 3 else {}),
                **_encode_processors(request.processors),
            }
            for request in case.requests
        ],
    }


def _encode_optional(rows: NDArray[np.float32] | None) -> Any:
    return None if rows is None else codec.encode_floats(rows)


def _encode_processors(held: RequestProcessors) -> dict[str, Any]:
    """Under "processors" whatever is not off; nothing where all is."""
    found: dict[str, Any] = {}
    if held.logit_bias is not None:
        found["logit_bias"] = codec.encode_floats(held.logit_bias)
    if held.token_bitmask is not None:
        found["token_bitmask"] = held.token_bitmask.tolist()
    for name, off in PENALTIES.items():
        if getattr(held, name) != off:
            found[name] = codec.encode_float(getattr(held, name))
    if held.committed_tokens:
        found["committed_tokens"] = list(held.committed_tokens)
    return {"processors": found} if found else {}


def _decode_processors(value: Any, where: str) -> RequestProcessors:
    codec.take(value, (), where, ("logit_bias", "token_bitmask", *PENALTIES, "committed_tokens"))
    found: dict[str, Any] = {
        name: _single(value[name], f"{where}.{name}") for name in PENALTIES if name in value
    }
    if "logit_bias" in value:
        found["logit_bias"] = codec.decode_floats(value["logit_bias"], f"{where}.logit_bias", 1)
    if "token_bitmask" in value:
        words = codec.decode_ints(value["token_bitmask"], f"{where}.token_bitmask", 2)
        if len({len(row) for row in words}) > 1 or any(
            not -(2**31) <= w < 2**31 for row in words for w in row
        ):
            raise CorpusError(f"{where}.token_bitmask must hold int32 rows of one length")
        found["token_bitmask"] = np.array(words, np.int32)
    if "committed_tokens" in value:
        tokens = codec.decode_ints(value["committed_tokens"], f"{where}.committed_tokens", 1)
        found["committed_tokens"] = tokens
    return RequestProcessors(**found)


def _encode_filters(request: Request) -> dict[str, Any]:
    return {
        "top_k": request.top_k,
        "top_p": codec.encode_float(request.top_p),
        "min_p": codec.encode_float(request.min_p),
    }


def _decode_filters(item: dict[str, Any], where: str) -> dict[str, Any]:
    found: dict[str, Any] = {"top_k": _optional_int(item["top_k"], f"{where}.top_k")}
    for name in ("top_p", "min_p"):
        found[name] = _single(item[name], f"{where}.{name}")
    return found


def _single(value: Any, where: str) -> float:
    number = codec.decode_float(value, where)
    with np.errstate(over="ignore"):
        if float(np.float32(number)) != number:
            raise CorpusError(f"{where}={value!r}, but must be a float32 exactly")
    return number


def _temperature(value: Any, where: str) -> float:
    number = codec.decode_float(value, where)
    if not 0 <= number < float("inf"):
        raise CorpusError(f"{where}={value!r}, but must be finite and >= 0")
    return number


def _final_coin(value: Any, where: str) -> float:
    number = codec.decode_float(value, where)
    if not 0 <= number <= 1:
        raise CorpusError(f"{where}={value!r}, but must be in [0, 1]")
    return number


def _optional_int(value: Any, where: str) -> int | None:
    return None if value is None else codec.decode_int(value, where)


def decode_case(value: Any, schema: int) -> VerifyCase | RawCase | EagleCase:
    """The inverse of :func:`encode_case`; raises CorpusError, or what the case itself refuses."""
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "eagle":
        codec.take(value, {"type", "topk", *_EAGLE_NDIM}, "case")
        lists = {name: codec.decode_ints(value[name], f"case.{name}", n) for name, n in _EAGLE_NDIM.items()}
        return EagleCase(**lists, topk=codec.decode_int(value["topk"], "case.topk"))
    if kind == "raw":
        codec.take(value, {"type", *(f.name for f in fields(RawCase))}, "case")
        pointers = ("candidates", "retrieve_next_token", "retrieve_next_sibling")
        temperature = value["temperature"]
        if not isinstance(temperature, list):
            raise CorpusError("case.temperature must be a list, one per request")
        return RawCase(
            **{name: codec.decode_ints(value[name], f"case.{name}", 2) for name in pointers},
            rows=codec.decode_floats(value["rows"], "case.rows", 3),
            temperature=tuple(
                _temperature(item, f"case.temperature[{i}]") for i, item in enumerate(temperature)
            ),
            accept=codec.decode_floats(value["accept"], "case.accept", 2),
            final=codec.decode_floats(value["final"], "case.final", 1),
            depth_cap=codec.decode_int(value["depth_cap"], "case.depth_cap"),
            kind=value["kind"],
            rows_dtype=value["rows_dtype"],
        )
    if kind != "trees":
        raise CorpusError(f"case.type={kind!r}, but must be 'trees', 'raw' or 'eagle'")
    keys = ("type", "kind", "rows_dtype", "num_draft_tokens", "depth_cap", "requests")
    more = (("filter_order",) if schema >= 2 else ()) + (("rule",) if schema >= 3 else ())
    codec.take(value, (*keys, *more), "case")
    if not isinstance(value["requests"], list):
        raise CorpusError("case.requests must be a list")
    requests = []
    for index, item in enumerate(value["requests"]):
        where = f"case.requests[{index}]"
        keys = ("parents", "token_ids", "temperature", "accept", "final", "rows")
        more = (("top_k", "top_p", "min_p") if schema >= 2 else ()) + (
            ("draft_probs",) if schema >= 3 else ()
        )
        codec.take(item, (*keys, *more), where, ("processors",) if schema >= 3 else ())
        draft_probs = item.get("draft_probs")
        tree = DraftTree(
            codec.decode_ints(item["parents"], f"{where}.parents", 1),
            codec.decode_ints(item["token_ids"], f"{where}.token_ids", 1),
        )
        requests.append(
            Request(
                tree,
                rows=codec.decode_floats(item["rows"], f"{where}.rows", 2),
                temperature=_temperature(item["temperature"], f"{where}.temperature"),
                accept=codec.decode_floats(item["accept"], f"{where}.accept", 1),
                final=_final_coin(item["final"], f"{where}.final"),
                **(_decode_filters(item, where) if schema >= 2 else {}),
                draft_probs=None
                if draft_probs is None
                else codec.decode_floats(draft_probs, f"{where}.draft_probs", 2),
                processors=_decode_processors(item.get("processors", {}), f"{where}.processors"),
            )
        )
    case = VerifyCase(
        tuple(requests),
        kind=value["kind"],
        num_draft_tokens=_optional_int(value["num_draft_tokens"], "case.num_draft_tokens"),
        depth_cap=_optional_int(value["depth_cap"], "case.depth_cap"),
        rows_dtype=value["rows_dtype"],
        filter_order=value.get("filter_order", "sequential"),
        rule=value.get("rule", "target_only"),
    )
    largest = max(len(request.tree) for request in case.requests)
    if case.num_draft_tokens is not None and case.num_draft_tokens < largest:
        raise CorpusError(f"case.num_draft_tokens={case.num_draft_tokens}, but must be >= {largest}")
    if case.depth_cap is not None and case.depth_cap < 1:
        raise CorpusError(f"case.depth_cap={case.depth_cap}, but must be >= 1")
    return case
