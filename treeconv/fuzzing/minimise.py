"""``treeconv corpus minimise``: found cases made smaller, and one kept of those that break alike."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from treeconv.case import VerifyCase
from treeconv.corpus import CorpusEntry, load_entry, save_entry
from treeconv.errors import BackendUnavailable, CorpusError, LawBroken
from treeconv.fuzzing.signature import Signature, signature_of
from treeconv.fuzzing.store import Store
from treeconv.laws import Law
from treeconv.replay import law_of, replay_entry, why_not_judged
from treeconv.shrink import shrink
from treeconv.suite import load_backend

if TYPE_CHECKING:
    from collections.abc import Iterator

    from treeconv.backends.base import Backend

__all__ = ["minimise"]

_OURS = "found by the campaign"  # begins the note of what a campaign stored


def minimise(corpus: Path, device: str, seconds: float, *, dry_run: bool = False) -> Iterator[str]:
    """Make ``regressions/`` smaller; a published case, or one that a person described, is never touched.

    Backends are called in this process. So ``crashes/`` is left as it is: those cases would end it. They were
    shrunk in forks when they were found.

    Args:
        corpus: the corpus directory.

        device: where backends run. Those that are not here leave their cases as they are.

        seconds: at most so long.

        dry_run: change nothing.

    Yields:
        A line for each change, and a last one.

    Raises:
        CorpusError: no such directory.
    """
    corpus = Path(corpus).absolute()  # a backend may call os.chdir
    shelf = corpus / "regressions"
    if not shelf.is_dir():
        raise CorpusError(f"{shelf}: no such directory")
    until = time.monotonic() + seconds
    store = Store(corpus)
    kept: dict[Signature, Path] = {}
    removed = changed = 0
    paths = sorted(shelf.glob("*.json"), key=lambda path: path.stat().st_size)
    for path in paths:
        if time.monotonic() >= until:
            break
        try:
            entry = load_entry(path)
        except CorpusError as error:
            yield f"unreadable: {error}"
            continue
        if not entry.note.startswith(_OURS):
            continue
        broken = _breaks(entry, device)
        if broken is None:
            continue
        failure, backend = broken
        signature = signature_of(failure)
        if kept.get(signature) == path:  # what a larger one became
            continue
        if signature in kept:
            yield f"removed:  {path.name}: breaks as {kept[signature].name} does"
            removed += 1
            if not dry_run:
                path.unlink()
                _now_at(store, path, kept[signature])
            continue
        kept[signature] = path
        if not isinstance(entry.case, VerifyCase):
            continue
        smaller = _shrunk(failure, signature, backend, device, until)
        if smaller.case == entry.case:
            continue
        yield f"smaller:  {path.name}: {_size(entry.case)} -> {_size(smaller.case)}"
        changed += 1
        if not dry_run:
            kept[signature] = save_entry(shelf, replace(entry, case=smaller.case, path=None))
            path.unlink()
            _now_at(store, path, kept[signature])
            found = store.get(signature)
            if found is not None:
                store.put(
                    signature, replace(found, text=str(smaller), entry=f"regressions/{kept[signature].name}")
                )
    crashes = len(list((corpus / "crashes").glob("*.json")))
    if crashes:
        yield f"crashes/: {crashes} cases left as they are: they would end this process"
    yield f"{len(paths)} cases: {changed} made smaller, {removed} removed" + (" (dry run)" if dry_run else "")


def _now_at(store: Store, gone: Path, kept: Path) -> None:
    """Let the records that name a file which is gone name the one that was kept in its place."""
    before, after = (path.relative_to(store.corpus).as_posix() for path in (gone, kept))
    for found in store.load().values():
        if found.entry == before:
            store.put(Signature(found.law, found.backend, found.kind), replace(found, entry=after))


def _size(case: VerifyCase) -> str:
    nodes = sum(len(request.tree) for request in case.requests)
    return f"{len(case.requests)} requests, {nodes} nodes, {case.vocab_size} tokens"


def _breaks(entry: CorpusEntry, device: str) -> tuple[LawBroken, Backend | None] | None:
    """How an entry breaks its law on the backend that it was found on; None where it does not, or cannot."""
    try:
        backend = load_backend(entry.backend, device) if entry.backend else None
        if backend is None and isinstance(law_of(entry), Law):
            return None
        if why_not_judged(entry, backend) is not None:
            return None
        replay_entry(entry, backend, device)
    except LawBroken as error:
        error.path = None
        return error, backend
    except BackendUnavailable:
        return None
    return None


def _shrunk(
    error: LawBroken, signature: Signature, backend: Backend | None, device: str, until: float
) -> LawBroken:
    law = law_of(CorpusEntry(error.law, error.case))

    def run(case: VerifyCase) -> None:
        if backend is None or not isinstance(law, Law):
            return
        try:
            law.run(case, backend, device)
        except LawBroken as still:
            if signature_of(still) == signature:
                raise

    return shrink(error, run, values=True, should_stop=lambda: time.monotonic() >= until)
