"""The converter and every reader of outside data, held to one rule: refused in words, or understood exactly.

Each parser takes JSON values (bytes as Latin-1 text), so that any input that breaks it can be stored and
judged again. Inputs begin with something well-formed and are then damaged: random bytes would not get past
the first check.
"""

from __future__ import annotations

import copy
import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from treeconv import _corpus_codec as codec
from treeconv.case import Request, VerifyCase
from treeconv.convert import (
    EagleDraft,
    from_eagle,
    from_tree_mask,
    to_draft_trees,
    to_eagle,
    to_verify_input,
    tree_mask,
)
from treeconv.corpus import CorpusEntry, load_entry, save_entry
from treeconv.errors import CorpusError, InvalidArgument, LawBroken, TreeconvError
from treeconv.fuzzing.signature import Signature, signature_of
from treeconv.strategies import draft_trees
from treeconv.traces import Trace, load_trace, save_trace
from treeconv.tree import DraftTree, TreeMaskMode, VerifyInput
from treeconv.tree_documents import parse_trees

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["PARSERS", "Parser", "load_input", "parser_named", "save_input", "shrink_input"]

_SUFFIX = ".input"
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


@dataclass(frozen=True)
class Parser:
    """One reader of outside data.

    Args:
        name: what failures and tables call it.

        meaning: one line.

        check: judges an input; raises :class:`_Wrong`.

        inputs: makes the strategy of inputs.
    """

    name: str
    meaning: str
    check: Callable[[Any], None]
    inputs: Callable[[], SearchStrategy[Any]]

    def run(self, value: Any) -> int:
        """Judge one input.

        Raises:
            LawBroken: the readable failure.
        """
        try:
            self.check(copy.deepcopy(value))
        except _Wrong as wrong:
            got, want = wrong.args
        except Exception as error:  # noqa: BLE001  # whatever a reader lets through is a finding
            tb = error.__traceback__
            while tb is not None and tb.tb_next is not None:
                tb = tb.tb_next
            at = f" (raised at {tb.tb_frame.f_code.co_filename}:{tb.tb_lineno})" if tb else ""
            got, want = (
                f"{type(error).__name__}: {error}{at}",
                "refused with an error of treeconv's, or understood",
            )
        else:
            return 1
        shown = json.dumps(value)
        lines = [
            f"law broken: {self.name}",
            f"  meaning:  {self.meaning}",
            f"  case:     {shown if len(shown) <= 2000 else shown[:2000] + ' ...'}",
            f"  got:      {got}",
            f"  want:     {want}",
        ]
        raise LawBroken("\n".join(lines), law=self.name, parameters={"input": value})


class _Wrong(Exception):
    """What was got, and what was wanted."""


def _same(what: str, got: Any, want: Any) -> None:
    if got != want:
        raise _Wrong(f"{what}: {got}", str(want))


def _read_like(value: Any) -> Any:
    """Lists as int64 tensors of the batch; a ragged or too large one is refused before torch sees it."""
    import torch  # noqa: PLC0415

    return torch.tensor(value, dtype=torch.int64)


# --- trees and layouts --------------------------------------------------------------------------------


def _check_tree(value: dict[str, Any]) -> None:
    try:
        tree = DraftTree(tuple(value["parents"]), tuple(value["token_ids"]))
    except InvalidArgument:
        return
    _same("parents and token_ids", [list(tree.parents), list(tree.token_ids)], list(value.values()))
    batch = to_verify_input([tree], len(tree) + 1)
    _same("the layout and back", to_draft_trees(batch), [tree])
    for mode in TreeMaskMode:
        _same(f"{mode.name} and back", from_tree_mask(tree_mask(batch, mode), batch.candidates, mode), [tree])
    _same("EAGLE's tensors and back", from_eagle(to_eagle([tree])), [tree])


def _check_pointers(value: dict[str, Any]) -> None:
    fields = {name: _read_like([value[name]]) for name in ("candidates", "next", "sibling")}
    slots = len(value["next"])
    zero = _read_like([list(range(slots))])
    batch = VerifyInput(
        fields["candidates"], zero, fields["next"], fields["sibling"], zero * 0, _read_like([0])
    )
    try:
        (tree,) = to_draft_trees(batch)
    except InvalidArgument:
        return
    again = to_verify_input([tree], slots)
    for name, field in (
        ("candidates", "candidates"),
        ("next", "retrieve_next_token"),
        ("sibling", "retrieve_next_sibling"),
    ):
        _same(f"{name} of {tree}", getattr(again, field)[0, : len(tree)].tolist(), value[name][: len(tree)])


def _check_mask(value: dict[str, Any]) -> None:
    import torch  # noqa: PLC0415

    mode = TreeMaskMode(value["mode"])
    mask = torch.tensor(value["mask"], dtype=torch.int64)
    tokens = _read_like([value["token_ids"]])
    try:
        (tree,) = from_tree_mask(mask, tokens, mode, [value["prefix"]])
    except InvalidArgument:
        return
    slots = len(value["token_ids"])
    again = tree_mask(to_verify_input([tree], slots, [value["prefix"]]), mode)
    if mode == TreeMaskMode.QLEN_ONLY_BITPACKING:
        words = -(-slots // 32)
        used = 2 ** np.clip(slots - 32 * np.arange(words), 0, 32) - 1
        got = again.to(torch.int64).view(slots, words)[: len(tree)].tolist()
        want = (np.array(value["mask"]).reshape(slots, words)[: len(tree)] & used).tolist()
    else:
        width = slots + (value["prefix"] if mode == TreeMaskMode.FULL_MASK else 0)
        got = again.long().view(slots, width)[: len(tree), -slots:].tolist()
        want = (mask.view(slots, width)[: len(tree), -slots:] != 0).long().tolist()
    _same(f"the mask of {tree}", got, want)


def _check_eagle(value: dict[str, Any]) -> None:
    lists = ("parent_list", "top_scores_index", "draft_tokens")
    tensors = {name: _read_like([value[name]]) for name in lists}
    draft = EagleDraft(**tensors, root_token_ids=_read_like([value["root"]]), topk=value["topk"])
    try:
        (tree,) = from_eagle(draft)
    except InvalidArgument:
        return
    numbers = value["top_scores_index"]
    _same("tokens", list(tree.token_ids), [value["root"], *value["draft_tokens"]])
    _same("candidates selected twice", sorted({n for n in numbers if numbers.count(n) > 1}), [])
    for node, number in enumerate(numbers, start=1):
        beam = number // value["topk"]
        chosen = tree.parents[node]
        want = -1 if beam == 0 else value["parent_list"][beam]
        _same(f"candidate of node {node}'s parent", -1 if chosen == 0 else numbers[chosen - 1], want)


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
def _tree_inputs(draw: DrawFn) -> dict[str, Any]:
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
def _pointer_inputs(draw: DrawFn) -> dict[str, Any]:
    batch = to_verify_input([draw(draft_trees(max_nodes=8))])
    lists = {
        "candidates": batch.candidates[0].tolist(),
        "next": batch.retrieve_next_token[0].tolist(),
        "sibling": batch.retrieve_next_sibling[0].tolist(),
    }
    return draw(_damaged_lists(lists))


@st.composite
def _mask_inputs(draw: DrawFn) -> dict[str, Any]:
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
def _eagle_inputs(draw: DrawFn) -> dict[str, Any]:
    tree = draw(draft_trees(max_nodes=8))
    draft = to_eagle([tree])
    lists = {
        "parent_list": draft.parent_list[0].tolist(),
        "top_scores_index": draft.top_scores_index[0].tolist(),
        "draft_tokens": draft.draft_tokens[0].tolist(),
    }
    damaged = draw(_damaged_lists(lists))
    return {**damaged, "root": int(draft.root_token_ids[0]), "topk": draft.topk}


# --- files --------------------------------------------------------------------------------------------


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="treeconv-fuzz-")


def _written(name: str, text: str) -> Path:
    path = Path(_folder().name) / name
    path.write_bytes(text.encode("latin-1"))
    return path


def _check_corpus_file(text: str) -> None:
    try:
        entry = load_entry(_written("entry.json", text))
    except CorpusError:
        return
    again = load_entry(save_entry(Path(_folder().name) / "again", entry))
    _same("the entry, saved and loaded", again, entry)


def _check_trace_file(text: str) -> None:
    try:
        trace = load_trace(_written("trace.trace", text))
    except CorpusError:
        return
    again = load_trace(save_trace(Path(_folder().name) / "again", trace))
    _same("the rows, saved and loaded", again.rows.tobytes(), trace.rows.tobytes())
    _same("the tree, saved and loaded", again.tree, trace.tree)


def _check_convert(text: str) -> None:
    try:
        trees, prefix_lens, slots = parse_trees(text.encode("latin-1"), "input")
        batch = to_verify_input(trees, slots, prefix_lens)
    except TreeconvError:
        return
    _same("the layout and back", to_draft_trees(batch), trees)


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
def _damaged_json(draw: DrawFn, documents: SearchStrategy[Any], *, signed: bool = False) -> str:
    """A document with some of its values replaced or left out, now and then cut off or with bytes changed."""
    document = draw(documents)
    for _ in range(draw(st.integers(0, 3), label="edits")):
        places = _places(document)
        path = draw(st.sampled_from(places))
        nasty = copy.deepcopy(draw(st.sampled_from([*_NASTY, *_NASTY_NESTED])))
        document = _edited(document, path, nasty, drop=bool(path) and draw(st.booleans(), label="drop"))
    if signed and isinstance(document, dict) and draw(st.integers(0, 3), label="checksum"):
        bare = {key: value for key, value in document.items() if key not in ("schema", "sha256")}
        document = {**document, "sha256": codec.sha256(codec.canonical(bare))}
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
        path = save_entry(Path(_folder().name) / "seeds", CorpusEntry("oracle-agreement", case))
        documents.append(json.loads(path.read_bytes()))
    return documents


def _corpus_inputs() -> SearchStrategy[str]:
    documents = _small_entries()
    repository = Path("corpus")
    for path in sorted(repository.glob("*/*.json")):  # RawCase and EagleCase, where the project's own is here
        if path.stat().st_size < 20_000:
            documents.append(json.loads(path.read_bytes()))
    return _damaged_json(st.sampled_from(documents).map(copy.deepcopy), signed=True)


@st.composite
def _trace_inputs(draw: DrawFn) -> str:
    tree = DraftTree((-1, 0), (1, 2))
    trace = Trace(
        "small", "m", "d", "p", (0,), tree, np.zeros((2, 4), np.float32), (1, 2), (0.0, 1.0),
        np.full((2, 2), 0.5, np.float32), np.full(2, 0.5, np.float32),
    )  # fmt: skip
    raw = save_trace(Path(_folder().name) / "seeds", trace).read_bytes()
    line, _, body = raw.partition(b"\n")
    header = draw(_damaged_json(st.just(json.loads(line))))
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


PARSERS: tuple[Parser, ...] = (
    Parser(
        "tree",
        "two lists are a draft tree that survives every layout, or are refused",
        _check_tree,
        _tree_inputs,
    ),
    Parser(
        "pointers",
        "first-child / next-sibling arrays come back as they were, or are refused",
        _check_pointers,
        _pointer_inputs,
    ),
    Parser("mask", "a tree mask comes back as it was, or is refused", _check_mask, _mask_inputs),
    Parser(
        "eagle", "EAGLE's tensors give the tree that they name, or are refused", _check_eagle, _eagle_inputs
    ),
    Parser(
        "corpus-file",
        "a corpus file is read to the bit, or refused by name",
        _check_corpus_file,
        _corpus_inputs,
    ),
    Parser("trace-file", "a trace is read to the bit, or refused by name", _check_trace_file, _trace_inputs),
    Parser(
        "convert-input",
        "the JSON of `treeconv convert` is trees, or is refused",
        _check_convert,
        lambda: _damaged_json(_convert_documents()),
    ),
)


def parser_named(name: str) -> Parser:
    """The parser of that name.

    Raises:
        InvalidArgument: there is none.
    """
    for parser in PARSERS:
        if parser.name == name:
            return parser
    raise InvalidArgument(f"parser={name!r}, but must be one of {', '.join(p.name for p in PARSERS)}")


def _smaller_inputs(value: Any) -> Iterator[Any]:
    """The input without some of its parts, then with plainer ones."""
    if isinstance(value, str):
        run = len(value) // 2
        while run:
            for start in range(0, len(value), run):
                yield value[:start] + value[start + run :]
            run //= 2
    elif isinstance(value, list):
        yield from (value[:place] + value[place + 1 :] for place in reversed(range(len(value))))
        for place, item in enumerate(value):
            yield from ([*value[:place], less, *value[place + 1 :]] for less in _smaller_inputs(item))
    elif isinstance(value, dict):  # its keys are what the parser asks for
        for key, item in value.items():
            yield from ({**value, key: less} for less in _smaller_inputs(item))
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > 1:
        yield from (0, 1, value // 2)


def shrink_input(
    parser: Parser, broken: LawBroken, signature: Signature, should_stop: Callable[[], bool]
) -> LawBroken:
    """The same violation by a smaller input."""
    smaller = _smaller_inputs(broken.parameters["input"])
    while not should_stop() and (value := next(smaller, None)) is not None:
        try:
            parser.run(value)
        except LawBroken as still:
            if signature_of(still) == signature:
                broken, smaller = still, _smaller_inputs(value)
    return broken


def save_input(directory: Path, parser: str, value: Any) -> Path:
    """Store an input that broke a parser, as ``<parser>-<hash>.input`` (JSON). Atomic."""
    document = {"parser": parser, "input": value}
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{parser}-{codec.sha256(codec.canonical(document))[:12]}{_SUFFIX}"
    codec.atomic_write(path, (json.dumps(document) + "\n").encode())
    return path


def load_input(path: Path) -> tuple[Parser, Any]:
    """A stored input and the parser that it is for.

    Raises:
        CorpusError: no such file, or none of that form.
    """
    try:
        document = codec.take(json.loads(path.read_bytes()), ("parser", "input"), "the input")
        return parser_named(document["parser"]), document["input"]
    except (OSError, ValueError) as error:
        raise CorpusError(f"{path}: {error}") from None
