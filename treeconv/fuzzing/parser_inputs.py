"""Inputs for :mod:`.parsers`: something well-formed, then damaged; bytes alone would pass no check."""

from __future__ import annotations

import copy
import json
import tempfile
import zlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from treeconv import _corpus_codec as codec
from treeconv.case import Request, VerifyCase
from treeconv.convert import to_eagle, to_verify_input, tree_mask
from treeconv.corpus import CorpusEntry, save_entry
from treeconv.strategies import draft_trees
from treeconv.traces import Trace, save_trace
from treeconv.tree import DraftTree, TreeMaskMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = [
    "convert_inputs",
    "corpus_inputs",
    "eagle_inputs",
    "mask_inputs",
    "pointer_inputs",
    "scratch",
    "trace_inputs",
    "tree_inputs",
]

_NASTY = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63) - 1,
    1.5,
    "",
    "nan",
    "-inf",
    "0x1p+2000",
    "0x0p+0",
)
_NASTY_NESTED: tuple[Any, ...] = ([], {}, [[]], [0], {"type": "raw"}, [[[[1]]]])


_UNSIGNED = ("schema", "treeconv_trace", "sha256")


@cache
def scratch() -> tempfile.TemporaryDirectory[str]:
    """A directory of this process's own."""
    return tempfile.TemporaryDirectory(prefix="treeconv-fuzz-")


@st.composite
def _damaged_lists(draw: DrawFn, lists: dict[str, Any]) -> dict[str, Any]:
    """The same lists with up to three of their integers changed, an item left out or one put in."""
    damaged = copy.deepcopy(lists)
    names = [name for name, value in damaged.items() if isinstance(value, list)]
    for _ in range(draw(st.integers(0, 3))):
        name = draw(st.sampled_from(names))
        values = damaged[name]
        if not values:
            continue
        place = draw(st.integers(0, len(values) - 1))
        values[place] = draw(
            st.one_of(st.integers(-2, len(values) + 1), st.sampled_from([2**31, 2**62, -(2**62)]))
        )
    return damaged


@st.composite
def tree_inputs(draw: DrawFn) -> dict[str, Any]:
    """Two lists."""
    tree = draw(draft_trees(max_nodes=8))
    damaged = draw(_damaged_lists({"parents": list(tree.parents), "token_ids": list(tree.token_ids)}))
    for values in damaged.values():
        change = draw(st.sampled_from(["", "", "", "shorter", "longer", "nasty"]))
        if change == "shorter":
            values.pop()
        elif change:
            nasty = [*_NASTY[:12], [0]] if change == "nasty" else [0]
            values.append(draw(st.sampled_from(nasty)))
    return damaged


@st.composite
def pointer_inputs(draw: DrawFn) -> dict[str, Any]:
    """First-child / next-sibling arrays."""
    batch = to_verify_input([draw(draft_trees(max_nodes=8))])
    lists = {
        "candidates": batch.candidates[0].tolist(),
        "next": batch.retrieve_next_token[0].tolist(),
        "sibling": batch.retrieve_next_sibling[0].tolist(),
    }
    return draw(_damaged_lists(lists))


@st.composite
def mask_inputs(draw: DrawFn) -> dict[str, Any]:
    """Tree masks in any mode, with bits flipped."""
    tree = draw(draft_trees(max_nodes=10))
    slots, prefix = len(tree) + draw(st.integers(0, 2)), draw(st.integers(0, 3))
    mode = draw(st.sampled_from(list(TreeMaskMode)))
    batch = to_verify_input([tree], slots, [prefix])
    mask = tree_mask(batch, mode).long().flatten().tolist()
    for _ in range(draw(st.integers(0, 3))):
        place = draw(st.integers(0, len(mask) - 1))
        flip = 1 << draw(st.integers(0, slots - 1)) if mode == TreeMaskMode.QLEN_ONLY_BITPACKING else 1
        mask[place] ^= flip
    return {"mode": int(mode), "mask": mask, "token_ids": batch.candidates[0].tolist(), "prefix": prefix}


@st.composite
def eagle_inputs(draw: DrawFn) -> dict[str, Any]:
    """EAGLE's draft tensors."""
    tree = draw(draft_trees(max_nodes=8))
    draft = to_eagle([tree])
    lists = {
        "parent_list": draft.parent_list[0].tolist(),
        "top_scores_index": draft.top_scores_index[0].tolist(),
        "draft_tokens": draft.draft_tokens[0].tolist(),
    }
    damaged = draw(_damaged_lists(lists))
    return {**damaged, "root": int(draft.root_token_ids[0]), "topk": draft.topk}


def _places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    if isinstance(document, (dict, list)):
        items = document.items() if isinstance(document, dict) else enumerate(document)
        for key, value in items:
            found += _places(value, (*path, key))
    return found


def _edited(document: Any, path: Sequence[Any], value: Any, *, drop: bool) -> Any:
    if not path:
        return value
    document = copy.copy(document)
    if drop and len(path) == 1:
        del document[path[0]]
    else:
        document[path[0]] = _edited(document[path[0]], path[1:], value, drop=drop)
    return document


@st.composite
def _damaged_json(draw: DrawFn, documents: SearchStrategy[Any], signed_with: bytes | None = None) -> str:
    """A document with some of its values replaced or left out, now and then cut off or with bytes changed.

    ``signed_with``: what the checksum is taken of besides the document; None for one without.
    """
    document = draw(documents)
    for _ in range(draw(st.integers(0, 3), label="edits")):
        places = _places(document)
        path = draw(st.sampled_from(places))
        nasty = copy.deepcopy(draw(st.sampled_from([*_NASTY, *_NASTY_NESTED])))
        document = _edited(document, path, nasty, drop=bool(path) and draw(st.booleans(), label="drop"))
    if signed_with is not None and isinstance(document, dict) and draw(st.integers(0, 3), label="checksum"):
        bare = {key: value for key, value in document.items() if key not in _UNSIGNED}
        document = {**document, "sha256": codec.sha256(codec.canonical(bare), signed_with)}
    raw = bytearray(json.dumps(document).encode())
    return _damaged_bytes(draw, raw)


def _damaged_bytes(draw: DrawFn, raw: bytearray) -> str:
    damage = draw(st.sampled_from(["none", "none", "none", "cut", "byte", "nested"]), label="damage")
    if damage == "cut":
        del raw[draw(st.integers(0, len(raw))) :]
    elif damage == "byte" and raw:
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    elif damage == "nested":
        raw = bytearray(b"[" * draw(st.sampled_from([10, 5000]))) + raw
    return bytes(raw).decode("latin-1")


def _small_entries() -> list[Any]:
    tree = DraftTree((-1, 0, 0), (0, 1, 2))
    rows = np.array([[0.5, -np.inf, 1.0, np.nan]] * 3, np.float32)
    request = Request(tree, rows, 0.5, np.array([0.25, 0.0, 1.0], np.float32), 0.5)
    filtered = Request(tree, rows, 1.0, request.accept, 0.5, top_k=2, top_p=0.5, min_p=0.25)
    cases = [VerifyCase((request,)), VerifyCase((request, filtered), depth_cap=2, filter_order="joint")]
    documents = []
    for case in cases:
        path = save_entry(Path(scratch().name) / "seeds", CorpusEntry("oracle-agreement", case))
        documents.append(json.loads(path.read_bytes()))
    return documents


def corpus_inputs() -> SearchStrategy[str]:
    """Corpus files, their checksums often made to fit."""
    documents = _small_entries()
    repository = Path("corpus")
    for path in sorted(repository.glob("*/*.json")):  # RawCase and EagleCase, where the project's own is here
        if path.stat().st_size < 20_000:
            documents.append(json.loads(path.read_bytes()))
    return _damaged_json(st.sampled_from(documents).map(copy.deepcopy), b"")


@st.composite
def trace_inputs(draw: DrawFn) -> str:
    """Traces of two nodes."""
    tree = DraftTree((-1, 0), (1, 2))
    trace = Trace(
        "small", "m", "d", "p", (0,), tree, np.zeros((2, 4), np.float32), (1, 2), (0.0, 1.0),
        np.full((2, 2), 0.5, np.float32), np.full(2, 0.5, np.float32),
    )  # fmt: skip
    raw = save_trace(Path(scratch().name) / "seeds", trace).read_bytes()
    line, _, body = raw.partition(b"\n")
    header = draw(_damaged_json(st.just(json.loads(line)), zlib.decompress(body)))
    return header + "\n" + _damaged_bytes(draw, bytearray(body))


@st.composite
def _convert_documents(draw: DrawFn) -> Any:
    trees = draw(st.lists(draft_trees(max_nodes=5), min_size=1, max_size=2))
    items = [{"parents": list(tree.parents), "token_ids": list(tree.token_ids)} for tree in trees]
    form = draw(st.sampled_from(["one", "list", "trees"]))
    if form == "list":
        return items
    document: dict[str, Any] = dict(items[0]) if form == "one" else {"trees": items}
    if draw(st.booleans()):
        document |= {"num_draft_tokens": draw(st.integers(-1, 9)), "prefix_lens": [3]}
    return document


def convert_inputs() -> SearchStrategy[str]:
    """Documents of ``treeconv convert``."""
    return _damaged_json(_convert_documents())
