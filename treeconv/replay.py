"""Judge what is stored: a corpus entry by its law, a recorded trace beside its exact boundaries."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from treeconv import oracle
from treeconv._drive import judge_all, submit
from treeconv.convert import from_eagle, to_draft_trees, to_verify_input
from treeconv.corpus import CorpusEntry, EagleCase, RawCase
from treeconv.errors import CorpusError, LawBroken
from treeconv.judge import Violation, target_rows
from treeconv.laws import BACKEND_LAWS, Law, why_not
from treeconv.tree_laws import TREE_LAWS, TreeLaw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from treeconv.backends.base import Backend
    from treeconv.case import VerifyCase
    from treeconv.traces import Trace

__all__ = ["law_of", "replay_entry", "replay_trace", "why_not_judged"]

_LAYOUT = ("candidates", "retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "positions")


def law_of(entry: CorpusEntry) -> Law | TreeLaw:
    """The law a stored case belongs to.

    Raises:
        CorpusError: there is no law of that name.
    """
    laws: list[Law | TreeLaw] = [*TREE_LAWS, *BACKEND_LAWS]
    for law in laws:
        if law.name == entry.law:
            return law
    raise CorpusError(
        f"{entry.path}: law={entry.law!r}, but must be one of {', '.join(law.name for law in laws)}"
    )


def why_not_judged(entry: CorpusEntry, backend: Backend | None) -> str | None:
    """Why a stored case says nothing about a backend, or None where it does.

    Raises:
        CorpusError: there is no law of the entry's name.
    """
    law = law_of(entry)
    if not entry.lossless:
        return f"recorded at thresholds {entry.thresholds}, which are meant to leave the target's law"
    if backend is None or not isinstance(law, Law):
        return None
    if not isinstance(entry.case, EagleCase):
        kind, traits = entry.case.kind, backend.traits
        if kind == "probs" and not traits.takes_probs:
            return "the case holds probabilities, and the backend takes logits only"
        if getattr(entry.case, "is_filtered", False) and not traits.takes_filters:
            return "the case has filters, and the backend takes none"
        needed: frozenset[str] = getattr(entry.case, "processor_kinds", frozenset())
        if missing := needed - set(traits.takes_processors):
            return f"the case has processors ({', '.join(sorted(missing))}), and the backend takes none"
    return why_not(law, backend)


def replay_entry(entry: CorpusEntry, backend: Backend | None, device: str = "cpu") -> int:
    """Hold a backend to a stored case: to its law, and to the published answer where there is one.

    Args:
        entry: see :func:`why_not_judged` for those that judge nothing.

        backend: the verifier; None for laws about trees alone.

        device: where its tensors live.

    Returns:
        How many decisions were judged.

    Raises:
        LawBroken: the readable failure; its ``path`` is the entry's.

        CorpusError: no law of that name, or parameters that it cannot use.
    """
    try:
        return _replay(entry, backend, device)
    except LawBroken as error:
        error.path = entry.path
        raise


def _replay(entry: CorpusEntry, backend: Backend | None, device: str) -> int:
    law = law_of(entry)
    if isinstance(entry.case, EagleCase):
        return _replay_layout(entry, entry.case)
    if isinstance(law, TreeLaw):
        if isinstance(entry.case, RawCase):
            raise CorpusError(f"{entry.path}: law {law.name} needs trees, but the case holds raw pointers")
        trees = [request.tree for request in entry.case.requests]
        prefixes = entry.parameters.get("prefix_lens", [0] * len(trees))
        if not isinstance(prefixes, list) or len(prefixes) != len(trees):
            raise CorpusError(f"{entry.path}: prefix_lens={prefixes!r}, but must be {len(trees)} integers")
        return law.run(trees, entry.case.slots, prefixes)
    assert backend is not None
    if isinstance(entry.case, RawCase):  # as published first, then as trees in node order
        judged = _replay_expected(entry, entry.case, entry.case.renumbered(), law, backend, device)
        return judged + law.run(entry.case.renumbered(), backend, device)
    judged = _replay_expected(entry, entry.case, entry.case, law, backend, device)
    return judged + law.run(entry.case, backend, device)


def _replay_layout(entry: CorpusEntry, case: EagleCase) -> int:
    trees = from_eagle(case.draft())
    batch = to_verify_input(trees, prefix_lens=case.prefix_lens)
    pairs: dict[str, tuple[Any, Any]] = {
        name: (getattr(batch, name).tolist(), [list(row) for row in getattr(case, name)]) for name in _LAYOUT
    }
    pairs["the trees and back"] = (to_draft_trees(batch), trees)
    for name, (got, want) in pairs.items():
        if got != want:
            lines = [
                f"law broken: {entry.law}",
                f"  meaning:  {entry.note}, as published: {entry.source}",
                f"  got:      {name} {got}",
                f"  want:     {want}",
            ]
            raise LawBroken("\n".join(lines), law=entry.law)
    return len(trees)


def _replay_expected(
    entry: CorpusEntry,
    case: VerifyCase | RawCase,
    trees: VerifyCase,
    law: Law,
    backend: Backend,
    device: str,
) -> int:
    """Compare with the published answer, field by field; slots that nothing was emitted at are undefined."""
    if entry.expected is None or (case.kind == "logits" and not backend.traits.takes_logits):
        return 0

    def broken(request: int, got: str, want: str) -> LawBroken:
        lines = [
            f"law broken: {law.name}",
            f"  meaning:  {entry.note}, as published: {entry.source}",
            f"  backend:  {backend.name}",
            f"  case:     request {request} of {len(trees.requests)}, vocabulary {trees.vocab_size}",
            *("  " + line for line in trees.requests[request].tree.draw().splitlines()[:15]),
            f"  got:      {got}",
            f"  want:     {want}",
        ]
        return LawBroken("\n".join(lines), law=law.name, backend=backend.name, case=trees)

    tensors = case.tensors(device)
    try:
        output = submit(tensors, case.kind, backend)
    except Violation as violation:
        raise broken(violation.request, str(violation.got), violation.want) from None
    slots = tensors.batch.num_draft_tokens
    got: dict[str, list[Any]] = {
        "tokens": output.tokens,
        "accept_token_num": output.accept_token_num.tolist(),
        "accept_index": output.accept_index.tolist(),
    }
    predicts = output.predicts.tolist()
    for name, values in got.items():
        wanted: Sequence[Any] | None = getattr(entry.expected, name)
        for request, (one, want) in enumerate(zip(values, wanted or (), strict=wanted is not None)):
            if one != (list(want) if isinstance(want, tuple) else want):
                raise broken(request, f"{name} {one}", f"{want}")
    for index, want in enumerate(entry.expected.predicts or ()):
        if want != -1 and predicts[index] != want:
            raise broken(index // slots, f"predicts[{index}] = {predicts[index]}", f"{want}")
    return len(trees.requests)


def replay_trace(
    trace: Trace, temperature: float, backend: Backend, device: str = "cpu", max_coins: int = 150
) -> int:
    """Hold a backend to a recorded tree: at its own coins, spread ones, and beside exact boundaries.

    Args:
        trace: real logits over a real vocabulary.

        temperature: one of the trace's.

        backend: the verifier.

        device: where its tensors live.

        max_coins: coin vectors beside boundaries, taken evenly from the sweep: the whole one holds
            thousands, and each reads rows of the whole vocabulary.

    Returns:
        How many decisions were judged.

    Raises:
        LawBroken: the readable failure.
    """

    def check(case: VerifyCase, backend: Backend, device: str) -> int:
        subject = case.requests[0]
        rows = target_rows(subject, case.kind, case.filter_order, case.rule)
        cap = case.effective_depth_cap
        own = (subject.accept.tolist(), subject.final)
        sweep = oracle.sweep_coins(subject.tree, rows, cap, max_final=4)
        coins = [own, *sweep[:: -(-len(sweep) // max_coins)]]
        return judge_all(case, backend, device, coins, rows=rows)

    base = next(law for law in BACKEND_LAWS if law.name == "critical-coins-logits")
    return replace(base, check=check).run(trace.case(temperature), backend, device)
