"""The converter and every reader of outside data, held to one rule: refused in words, or understood exactly.

Each parser takes JSON values (bytes as Latin-1 text), so that any input that breaks it can be stored and
judged again. Inputs begin with something well-formed and are then damaged: random bytes would not get past
the first check.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv import _corpus_codec as codec
from treeconv.convert import (
    EagleDraft,
    from_eagle,
    from_tree_mask,
    to_draft_trees,
    to_eagle,
    to_verify_input,
    tree_mask,
)
from treeconv.corpus import load_entry, save_entry
from treeconv.errors import CorpusError, InvalidArgument, LawBroken, TreeconvError
from treeconv.fuzzing.parser_inputs import (
    convert_inputs,
    corpus_inputs,
    eagle_inputs,
    mask_inputs,
    pointer_inputs,
    scratch,
    trace_inputs,
    tree_inputs,
)
from treeconv.fuzzing.signature import Signature, signature_of
from treeconv.traces import load_trace, save_trace
from treeconv.tree import DraftTree, TreeMaskMode, VerifyInput
from treeconv.tree_documents import parse_trees

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hypothesis.strategies import SearchStrategy

__all__ = ["PARSERS", "Parser", "load_input", "parser_named", "save_input", "shrink_input"]

_SUFFIX = ".input"


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


# --- files --------------------------------------------------------------------------------------------


def _written(name: str, text: str) -> Path:
    path = Path(scratch().name) / name
    path.write_bytes(text.encode("latin-1"))
    return path


def _check_corpus_file(text: str) -> None:
    try:
        entry = load_entry(_written("entry.json", text))
    except CorpusError:
        return
    again = load_entry(save_entry(Path(scratch().name) / "again", entry))
    _same("the entry, saved and loaded", again, entry)


def _check_trace_file(text: str) -> None:
    try:
        trace = load_trace(_written("trace.trace", text))
    except CorpusError:
        return
    again = load_trace(save_trace(Path(scratch().name) / "again", trace))
    _same("the rows, saved and loaded", again.rows.tobytes(), trace.rows.tobytes())
    _same("the tree, saved and loaded", again.tree, trace.tree)


def _check_convert(text: str) -> None:
    try:
        trees, prefix_lens, slots = parse_trees(text.encode("latin-1"), "input")
        batch = to_verify_input(trees, slots, prefix_lens)
    except TreeconvError:
        return
    _same("the layout and back", to_draft_trees(batch), trees)


PARSERS: tuple[Parser, ...] = (
    Parser(
        "tree",
        "two lists are a draft tree that survives every layout, or are refused",
        _check_tree,
        tree_inputs,
    ),
    Parser(
        "pointers",
        "first-child / next-sibling arrays come back as they were, or are refused",
        _check_pointers,
        pointer_inputs,
    ),
    Parser("mask", "a tree mask comes back as it was, or is refused", _check_mask, mask_inputs),
    Parser(
        "eagle", "EAGLE's tensors give the tree that they name, or are refused", _check_eagle, eagle_inputs
    ),
    Parser(
        "corpus-file",
        "a corpus file is read to the bit, or refused by name",
        _check_corpus_file,
        corpus_inputs,
    ),
    Parser("trace-file", "a trace is read to the bit, or refused by name", _check_trace_file, trace_inputs),
    Parser(
        "convert-input",
        "the JSON of `treeconv convert` is trees, or is refused",
        _check_convert,
        convert_inputs,
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
