"""Hypothesis over the laws: cases drawn, aimed at the rare, shrunk; what is known already is passed over."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import hypothesis
import numpy as np
from hypothesis import Phase
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.errors import HypothesisException

from treeconv.case import VerifyCase
from treeconv.errors import LawBroken
from treeconv.fuzzing.parsers import parser_named, shrink_input
from treeconv.fuzzing.session import Session, as_broken
from treeconv.fuzzing.signature import Signature, signature_of
from treeconv.laws import Law, why_not
from treeconv.shrink import shrink
from treeconv.strategies import cases_for, tree_batches
from treeconv.suite import broken_law, laws_named, suite_settings
from treeconv.tree_laws import TreeLaw

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from numpy.typing import NDArray

    from treeconv.case import Request
    from treeconv.fuzzing.store import Discovery

__all__ = ["aims", "explore", "search_law"]

_MOST_EXAMPLES = 200
_NEAREST = 2.0**-40


def examples_in(round_number: int) -> int:
    """Cases of a law in a round: few at first, so that a short campaign meets every law."""
    return min(_MOST_EXAMPLES, 25 << min(round_number, 8))


def _law64(request: Request, node: int, kind: str) -> NDArray[np.float64]:
    row: NDArray[np.float64] = request.rows[node].astype(np.float64)
    if kind == "probs":
        return row
    if request.temperature == 0 or not np.isfinite(row.max()):
        one_hot: NDArray[np.float64] = np.eye(1, row.size, int(row.argmax()))[0]
        return one_hot
    with np.errstate(over="ignore", under="ignore"):
        weights: NDArray[np.float64] = np.exp((row - row.max()) / request.temperature)
    weights /= weights.sum()
    return weights


def aims(case: VerifyCase) -> dict[str, float]:
    """What a search climbs towards: coins near a boundary, deep walks, ties.

    Returns:
        "nearest boundary": ``-log2`` of the least distance between a coin that is used and a boundary, at
        most 40; "depth": nodes on the deepest walk; "ties": tokens that share a row's largest mass. Over
        the first two requests; in float64, since nothing is judged by them.
    """
    nearest, depth, ties = 1.0, 0, 0
    cap = case.effective_depth_cap
    for request in case.requests[:2]:
        node, length = 0, 1
        while True:
            law = _law64(request, node, case.kind)
            ties = max(ties, int((law == law.max()).sum()))
            kids = request.tree.children[node] if length < cap else ()
            sums = np.cumsum(law[[request.tree.token_ids[kid] for kid in kids]])
            if sums.size:
                nearest = min(nearest, float(np.abs(sums - request.accept[node]).min()))
            taken = np.flatnonzero(sums > request.accept[node])
            if not taken.size:
                break
            node, length = kids[int(taken[0])], length + 1
        law[[request.tree.token_ids[kid] for kid in kids]] = 0
        if law.sum() > 0:
            shares = np.cumsum(law) / law.sum()
            nearest = min(nearest, float(np.abs(shares[:-1] - request.final).min(initial=1.0)))
        depth = max(depth, length)
    near = -float(np.log2(max(nearest, _NEAREST))) if nearest == nearest else 0.0  # noqa: PLR0124  # NaN rows
    return {"nearest boundary": near, "depth": float(depth), "ties": float(ties)}


def explore(
    run: Callable[[Any], object],
    strategy: Any,
    *,
    campaign: str,
    subject: str,
    meaning: str,
    backend: str | None,
    session: Session,
    round_number: int,
    examples: int,
    working_set: Path | None = None,
    shrinks_case: bool = False,
) -> None:
    """Draw cases until the examples are used up, and record and shrink the first failure of a new signature.

    Args:
        run: judges one case; raises :class:`LawBroken`.

        strategy: what is drawn.

        campaign: what records name.

        subject: likewise.

        meaning: likewise.

        backend: likewise.

        session: the worker's.

        round_number: together with the seed, subject and backend, it fixes the cases.

        examples: at most so many cases.

        working_set: a directory for Hypothesis's examples, which later rounds and campaigns begin with.

        shrinks_case: nodes and requests are left out besides; see :mod:`treeconv.shrink`.

    Raises:
        TimeIsUp: in the middle of it.
    """
    claimed: Signature | None = None
    met: dict[Signature, LawBroken] = {}  # others, while that one was shrunk

    def judged(case: Any) -> None:
        nonlocal claimed
        session.begin_case((campaign, subject, backend, case))
        try:
            decisions = run(case)
        except LawBroken as error:
            broken = error
        except HypothesisException:
            raise
        except Exception as error:  # noqa: BLE001  # whatever it is, it is one of ours
            broken = as_broken(
                error, subject, meaning, backend, case if isinstance(case, VerifyCase) else None
            )
        else:
            session.recorder.add("cases")
            session.recorder.add("decisions", int(decisions) if isinstance(decisions, int) else 1)
            return
        finally:
            session.recorder.idle()
        signature = signature_of(broken)
        if signature == claimed:
            raise broken
        session.recorder.add("cases")
        new = session.claim(campaign, broken, round=round_number)
        if new is None:
            return
        if claimed is None:
            claimed = new
            raise broken
        met[new] = broken

    def test(case: Any) -> None:
        judged(case)
        if isinstance(case, VerifyCase):
            for label, value in aims(case).items():
                hypothesis.target(value, label=label)

    base = suite_settings(examples)
    settings = hypothesis.settings(
        base,
        database=None if working_set is None else DirectoryBasedExampleDatabase(working_set),
        phases=[*base.phases, *([Phase.reuse] if working_set is not None else [])],
    )
    seed = f"{session.config.seed}/{campaign}/{subject}/{backend}/{round_number}"
    given = settings(hypothesis.seed(seed)(hypothesis.given(case=strategy)(test)))
    try:
        given()
    except Exception as error:
        broken = broken_law(error)
        if broken is None or claimed is None:
            raise
        if shrinks_case:
            broken = shrink(broken, judged, should_stop=lambda: session.is_over)
        session.settle(campaign, claimed, broken, round=round_number)
    while met:
        claimed, broken = met.popitem()
        if broken.case is not None:
            broken = shrink(broken, judged, values=True, should_stop=lambda: session.is_over)
        elif "input" in broken.parameters:
            broken = shrink_input(
                parser_named(broken.law), broken, claimed, should_stop=lambda: session.is_over
            )
        session.settle(campaign, claimed, broken, round=round_number)


def search_law(name: str, backend_name: str, session: Session, round_number: int) -> str | None:
    """One law on one backend for one round.

    Returns:
        Why the law does not apply, or None.
    """
    (law,) = laws_named([name])
    working_set = session.store.work / "examples" / f"{name}-{backend_name or 'trees'}".replace(":", "-")
    shared: dict[str, Any] = {
        "campaign": "laws",
        "subject": name,
        "meaning": law.meaning,
        "session": session,
        "round_number": round_number,
        "examples": examples_in(round_number),
        "working_set": working_set,
    }
    if isinstance(law, TreeLaw):
        explore(lambda case: law.run(*case), tree_batches(), backend=None, **shared)
        return None
    backend = session.backend(backend_name)
    reason = why_not(law, backend)
    if reason is None:
        device = session.config.device
        explore(
            lambda case: law.run(case, backend, device),
            cases_for(law.cases),
            backend=backend_name,
            shrinks_case=True,
            **shared,
        )
    return reason


def shrink_stored(digest: str, session: Session) -> str | None:
    """Take up a finding that a worker before left unshrunk.

    Returns:
        Why it was not shrunk, or None; beginning with "closed: " where it is no finding any more.
    """
    found = session.store.load().get(digest)
    if found is None or found.state != "raw" or not found.entry:
        return "shrunk already, or nothing to shrink"
    signature = Signature(found.law, found.backend, found.kind)
    what = f"closed: {found.law}" + (f" on {found.backend}" if found.backend else "")
    path = session.store.corpus / found.entry
    if not path.exists():
        session.store.forget(signature)
        return f"{what}: its case is gone"
    again, smaller, keep = (_stored_input if path.suffix == ".input" else _stored_case)(path, found, session)
    try:
        again()
    except LawBroken as error:
        error.path = None
        broken = error
    else:
        kept = session.relative(keep(session.store.corpus / "regressions"))
        session.store.forget(signature)
        return f"{what}: its law is kept now; {kept} is replayed from now on"
    finally:
        session.recorder.idle()
    session.recorder.add("cases")
    actual = signature_of(broken)
    if actual == signature:
        session.found.append(digest)
    else:
        is_new = session.claim(found.campaign, broken, **found.origin) is not None
        session.store.forget(signature)
        if not is_new:
            return f"{what}: breaks otherwise now: {actual.kind}"
    session.settle(found.campaign, actual, smaller(broken, actual), **found.origin)
    return None


def _stored_case(
    path: Path, found: Discovery, session: Session
) -> tuple[Callable[[], object], Callable[[LawBroken, Signature], LawBroken], Callable[[Path], Path]]:
    """How to judge a stored case again, to make it smaller, and to put it on a shelf."""
    from treeconv.corpus import load_entry, save_entry  # noqa: PLC0415
    from treeconv.replay import law_of, replay_entry  # noqa: PLC0415

    entry = load_entry(path)
    law = law_of(entry)
    backend = session.backend(found.backend) if found.backend else None

    def again() -> object:
        session.begin_case((found.campaign, found.law, found.backend, entry.case))
        return replay_entry(entry, backend, session.config.device)

    def smaller(broken: LawBroken, signature: Signature) -> LawBroken:
        def run(case: Any) -> None:
            session.begin_case((found.campaign, found.law, found.backend, case))
            try:
                law.run(case, backend, session.config.device) if isinstance(law, Law) else None  # type: ignore[arg-type]
            except LawBroken as error:
                if signature_of(error) == signature:
                    raise
            finally:
                session.recorder.idle()
            session.recorder.add("cases")

        if not broken.case:
            return broken
        return shrink(broken, run, values=True, should_stop=lambda: session.is_over)

    return again, smaller, lambda shelf: save_entry(shelf, replace(entry, path=None))


def _stored_input(
    path: Path, found: Discovery, session: Session
) -> tuple[Callable[[], object], Callable[[LawBroken, Signature], LawBroken], Callable[[Path], Path]]:
    """The same of an input that broke a parser."""
    from treeconv.fuzzing.parsers import load_input, save_input  # noqa: PLC0415

    parser, value = load_input(path)

    def again() -> object:
        session.begin_case((found.campaign, parser.name, None, value))
        return parser.run(value)

    def smaller(broken: LawBroken, signature: Signature) -> LawBroken:
        return shrink_input(parser, broken, signature, lambda: session.is_over)

    return again, smaller, lambda shelf: save_input(shelf, parser.name, value)
