"""The judge: reads an output back, holds it against the oracle, and says what is wrong."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from treeconv import DraftTree, LawBroken, Request, RowStatus, VerifyCase, VerifyOutput, oracle
from treeconv.backends.base import BackendTraits
from treeconv.backends.reference import ReferenceBackend
from treeconv.judge import Observed, Violation, explain, is_ambiguous, judge, observe, target_rows
from treeconv.laws import law_named

TREE = DraftTree([-1, 0, 0, 1], [9, 5, 7, 2])
ROOT = DraftTree([-1], [3])


def output(accept_index, count, predicts, status=0):
    """Two requests of four slots; the first is a root that emitted 6, the second as given."""
    return VerifyOutput(
        torch.tensor([[0, -1, -1], accept_index]),
        torch.tensor([0, count]),
        torch.tensor([6, -1, -1, -1, *predicts]),
        torch.tensor([0, status]),
    )


def test_a_sound_output_is_read_back():
    got = observe([ROOT, TREE], output([4, 5, 7], 2, [5, 2, -1, 8]), slots=4)
    assert got == [Observed((0,), (6,), RowStatus.OK), Observed((0, 1, 3), (5, 2, 8), RowStatus.OK)]


def test_a_status_is_read_back():
    got = observe([ROOT, TREE], output([-1, -1, -1], 0, [-1] * 4, RowStatus.EMPTY), slots=4)
    assert got[1] == Observed((), (), RowStatus.EMPTY)


BROKEN = {
    "count below 0": ([4, -1, -1], -1, [5, -1, -1, -1], 0, r"the count must be in \[0, 2\]"),
    "count over the slots": ([4, 5, 7], 3, [5, 2, -1, 8], 0, r"the count must be in \[0, 2\]"),
    "count too small": ([4, 5, 7], 1, [5, 2, -1, 8], 0, "slots behind the accepted path must be -1"),
    "count too large": ([4, 5, -1], 2, [5, 2, -1, 8], 0, "flat index -1 is no child of 5"),
    "no root": ([5, 7, -1], 1, [-1, 2, -1, 8], 0, "must begin at the root's flat index 4"),
    "local indices": ([0, 1, 3], 2, [5, 2, -1, 8], 0, "must begin at the root's flat index 4"),
    "another request's slot": (
        [4, 1, -1],
        1,
        [5, 2, -1, 8],
        0,
        "flat index 1 is no child of 4: not one root",
    ),
    "two branches": ([4, 6, 7], 2, [7, -1, 2, 8], 0, "flat index 7 is no child of 6: not one root path"),
    "a slot of padding": ([4, 8, -1], 1, [7, -1, 2, 8], 0, "flat index 8 is no child of 4"),
    "another token": ([4, 5, -1], 1, [7, 2, -1, -1], 0, "predicts says 7 before node 1, whose token is 5"),
    "status and count": ([-1, -1, -1], 1, [-1] * 4, 1, "status 1 but something was emitted"),
    "status and index": ([4, -1, -1], 0, [-1] * 4, 1, "status 1 but something was emitted"),
    "status and tokens": ([-1, -1, -1], 0, [5, -1, -1, -1], 1, "status 1 but predicts holds tokens"),
}


@pytest.mark.parametrize(("index", "count", "predicts", "status", "what"), BROKEN.values(), ids=list(BROKEN))
def test_an_output_that_contradicts_itself(index, count, predicts, status, what):
    first, second = observe([ROOT, TREE], output(index, count, predicts, status), slots=4)
    assert first.broken is None
    with pytest.raises(AssertionError, match=what):
        raise AssertionError(second.broken)


DYADIC = oracle.TargetRows.from_probs(
    np.array([[0.25, 0.25, 0.5, 0], [0.5, 0.5, 0, 0], [0, 0, 1, 0]], np.float32)
)
FORK = DraftTree([-1, 0, 0], [9, 0, 1])


def seen(*path, tokens):
    return Observed(tuple(path), tokens, RowStatus.OK)


@pytest.mark.parametrize(
    ("coin", "final", "right"),
    [
        (0.0, 0.5, seen(0, 1, tokens=(0, 1))),
        (0.25, 0.5, seen(0, 2, tokens=(1, 2))),
        (0.5, 0.0, seen(0, tokens=(2,))),
    ],
)
def test_exactly_the_right_decision_passes(coin, final, right):
    others = [
        seen(0, 1, tokens=(0, 1)),
        seen(0, 1, tokens=(0, 0)),
        seen(0, 2, tokens=(1, 2)),
        seen(0, tokens=(2,)),
    ]
    others += [seen(0, tokens=(3,)), seen(0, tokens=(0,)), Observed((), (), RowStatus.NAN)]
    passed = [got for got in others if judge(FORK, DYADIC, [coin] * 3, final, 2, got) is None]
    assert passed == [right]


@pytest.mark.parametrize(
    ("coin", "got", "why"),
    [
        (
            0.25,
            seen(0, 1, tokens=(0, 1)),
            r"node 0: coin 0.25 against boundary 0.25: distance \+0, ambiguity band 0",
        ),
        (0.3, seen(0, 1, tokens=(0, 1)), r"node 0: coin 0.3 against boundary 0.25: distance \+0.05"),
        (0.0, seen(0, tokens=(2,)), r"node 0: coin 0.0 against boundary 0.25: distance -0.25"),
        (0.5, seen(0, tokens=(3,)), r"node 0: token 3 has no mass there \(p = 0\)"),
        (
            0.5,
            seen(0, tokens=(1,)),
            "node 0: token 1 was tested and rejected there, so it is not in the residual",
        ),
        (0.0, seen(0, 1, tokens=(0, 0)), r"node 1: final coin 0.5 against boundary 0.5: distance \+0"),
        (0.5, Observed((), (), RowStatus.NAN), ""),
        (0.5, Observed((), (), RowStatus.OK, "no path"), ""),
    ],
)
def test_the_deciding_number_is_named(coin, got, why):
    _, because = judge(FORK, DYADIC, [coin] * 3, 0.5, 2, got)
    with pytest.raises(AssertionError, match=f"^{why}"):
        raise AssertionError(because)


def test_at_the_cap_no_child_may_be_accepted():
    want, because = judge(FORK, DYADIC, [0.0] * 3, 0.0, 1, seen(0, 1, tokens=(0, 0)))
    assert want == "path 0, then bonus token 0 (emitted [0])"
    assert because == "node 0: no child may be accepted here (accept slots: 1)"


@pytest.mark.parametrize(("status", "coin"), [(RowStatus.NAN, 0.3), (RowStatus.OK, 0.6)])
def test_statuses_are_judged_where_visited(status, coin):
    tree = DraftTree.chain([9, 0])
    rows = oracle.TargetRows.from_probs(np.array([[0.5, 0.5], [np.nan, 1]], np.float32))
    right = Observed((), (), status) if status else seen(0, tokens=(1,))
    wrong = seen(0, tokens=(1,)) if status else Observed((), (), RowStatus.NAN)
    assert judge(tree, rows, [coin] * 2, 0.5, 2, right) is None
    assert judge(tree, rows, [coin] * 2, 0.5, 2, wrong)[0] == str(right)


def test_inside_the_band_both_answers_pass_and_outside_only_one():
    tree = DraftTree.chain([9, 0])
    logits = np.array([[0.1, 0.7]] * 2, np.float32)
    rows = oracle.TargetRows.from_logits(logits, 0.9)
    ((lower, upper),) = rows[0].accept_bounds([0])
    kept, refused = seen(0, 1, tokens=(0, 1)), seen(0, tokens=(1,))
    for coin, right in (
        ((lower + upper) / 2, [kept, refused]),
        (lower - 1e-9, [kept]),
        (upper + 1e-9, [refused]),
    ):
        verdicts = [judge(tree, rows, [coin] * 2, 0.9, 2, got) for got in (kept, refused)]
        assert [got for got, wrong in zip((kept, refused), verdicts, strict=True) if wrong is None] == right
        assert is_ambiguous(tree, rows, [coin] * 2, 0.9, 2) is (len(right) == 2)


def test_a_final_coin_in_the_band_is_ambiguous():
    rows = oracle.TargetRows.from_logits(np.array([[0.1, 0.7]], np.float32), 0.9)
    ((lower, upper),) = rows[0].bonus([]).boundaries()
    assert is_ambiguous(ROOT, rows, [0.5], (lower + upper) / 2, 1)
    assert not is_ambiguous(ROOT, rows, [0.5], upper + 1e-9, 1)


def test_an_unusable_row_is_not_ambiguous():
    rows = oracle.TargetRows.from_logits(np.array([[np.nan, 0.7]], np.float32), 0.9)
    assert not is_ambiguous(ROOT, rows, [0.5], 0.5, 1)


def test_the_failure_a_person_reads():
    request = Request(FORK, np.array([[0.25, 0.25, 0.5]] * 3), 1.0, [0.25] * 3, 0.5)
    case = VerifyCase((request,), kind="probs")
    violation = Violation(0, "got this", "wanted that", "node 0: a number", coins=((0.25, 0.5, 0.5), 0.75))
    error = explain("outcome-law", "what it means", "mine", case, violation)
    assert isinstance(error, LawBroken)
    assert (error.law, error.backend, error.case) == ("outcome-law", "mine", case)
    want = """\
law broken: outcome-law
  meaning:  what it means
  backend:  mine
  case:     request 0 of 1, vocabulary 3, probs float32, 2 accept slots, final coin 0.75
  node 0: token 9   p = {0: 0.25, 1: 0.25, 2: 0.5}  coin 0.25
  ├─ node 1: token 0   p = {0: 0.25, 1: 0.25, 2: 0.5}
  └─ node 2: token 1   p = {0: 0.25, 1: 0.25, 2: 0.5}
  got:      got this
  want:     wanted that
  because:  node 0: a number"""
    assert str(error) == want


def test_a_large_failure_stays_readable():
    """A wide tree shows the paths and the siblings tested beside them, a deep one its first nodes."""
    star = DraftTree([-1] + [0] * 40, [9, *range(40)])
    request = Request(star, np.zeros((41, 50)), 0.5, [0.49] * 41, 0.5)
    text = str(explain("law", "meaning", "mine", VerifyCase((request,)), Violation(0, "got", "want")))
    assert "temperature 0.5" in text
    drawn = [line.split("node ")[1].split(":")[0] for line in text.splitlines() if "node " in line]
    assert drawn == ["0", "24", "25", "26"]  # the coin .49 falls to the 25th of 50 equal masses
    chain = DraftTree.chain([0] * 30)
    request = Request(chain, np.ones((30, 1)), 1.0, [0.5] * 30, 0.5)
    case = VerifyCase((request,), kind="probs")
    lines = str(explain("law", "meaning", "mine", case, Violation(0, "got", "want"))).splitlines()
    assert lines[4 + 15] == "  ... (30 nodes in all)"
    assert len(lines) == 4 + 16 + 2


def test_long_rows_list_their_largest_masses():
    request = Request(ROOT, np.log(np.arange(1, 101))[None], 1.0, [0.5], 0.5)
    text = str(explain("law", "meaning", "mine", VerifyCase((request,)), Violation(0, "got", "want")))
    assert "p = {99: 0.0198, 98: 0.0196, " in text
    assert "92: 0.01842, ...}" in text


@pytest.mark.parametrize(("kind", "mass"), [("probs", 0.25), ("logits", 0.0)])
def test_target_rows_by_kind(kind, mass):
    request = Request(ROOT, np.array([[0.25, 0.75]], np.float32), 0.0, [0.5], 0.5)
    assert target_rows(request, kind)[0].mass(0) == mass


def probs_case(rows, coin, final=0.5, **filters):
    tree = DraftTree((-1, 0), (0, 0))
    rows = np.array(rows, np.float32)
    return VerifyCase(
        (Request(tree, rows, 1.0, np.array([coin, 0.5], np.float32), final, **filters),), "probs"
    )


def failure(case, got, law="critical-coins"):
    request = case.requests[0]
    rows = target_rows(request, case.kind, case.filter_order)
    want, why = judge(request.tree, rows, request.accept.tolist(), request.final, 2, got)
    return str(explain(law, "m", "b", case, Violation(0, got, want, why)))


def test_children_that_hold_all_the_mass_are_explained():
    """A boundary at distance 0 would send the reader to write `<=`."""
    text = failure(probs_case([[1, 0], [1, 0]], 1.0), Observed((0,), (1,), RowStatus.OK))
    assert "its children hold all the mass there is" in text
    assert "the last child with mass is accepted" in text
    assert "distance" not in text


def test_a_filtered_failure_shows_the_row_before_the_filters():
    case = probs_case([[0.5, 0.5], [1, 0]], 0.5, top_k=1)
    text = failure(case, Observed((0,), (1,), RowStatus.OK))
    assert "p = {0: 1} of p = {0: 0.5, 1: 0.5} before filters" in text


@pytest.mark.parametrize(("temperature", "is_noted"), [(1e-40, True), (1.0, False), (0.0, False)])
def test_a_quotient_that_overflows_is_noted(temperature, is_noted):
    rows = np.array([[0, 5], [0, 5]], np.float32)
    request = Request(DraftTree((-1, 0), (0, 0)), rows, temperature, np.full(2, 0.5, np.float32), 0.5)
    case = VerifyCase((request,))
    text = str(explain("l", "m", "b", case, Violation(0, "x", "y")))
    assert ("take (x - max) / T, unclamped" in text) == is_noted


class Raises:
    """A sampler that breaks where a coin is 1."""

    name = "raises"
    traits = BackendTraits(takes_logits=False)

    def verify_probs(self, batch, target_probs, coins, depth_cap):
        if (coins.accept == 1).any():
            raise IndexError("off the row")
        return ReferenceBackend().verify_probs(batch, target_probs, coins, depth_cap)


def test_a_sampler_that_raises_is_shown_the_coins_it_raises_for():
    case = probs_case([[0.5, 0.5], [1, 0]], 0.25)
    with pytest.raises(LawBroken) as broken:
        law_named("critical-coins").run(case, Raises())
    text = str(broken.value)
    assert "IndexError: off the row (raised at" in text
    assert "coin 1.0" in text
    assert "want:     path 0, then bonus token 1" in text


def test_draw_and_match_is_explained_without_a_draft_law():
    tree = DraftTree((-1,), (0,))
    request = Request(tree, np.array([[1, 0]], np.float32), 1.0, np.array([0.5], np.float32), 0.5)
    rows = target_rows(request, "probs", rule="draw_and_match")
    _, why = judge(tree, rows, [0.5], 0.5, 1, Observed((0,), (1,), RowStatus.OK))
    assert why == "node 0: token 1 has no mass there (p = 0)"


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no words")


class Nonsense:
    """A sampler that does what ``does`` does with a right output."""

    name = "nonsense"
    traits = BackendTraits(takes_logits=False)

    def __init__(self, does):
        self.does = does

    def verify_probs(self, *call):
        return self.does(ReferenceBackend().verify_probs(*call))


def raises(error):
    def does(_):
        raise error

    return does


@pytest.mark.parametrize(
    ("does", "said"),
    [
        (lambda _: None, "got:      returned NoneType, of which accept_index is NoneType"),
        (
            lambda right: SimpleNamespace(**{k: v.numpy() for k, v in vars(right).items()}),
            "got:      returned SimpleNamespace, of which accept_index is ndarray",
        ),
        (lambda right: replace(right, status=right.status + 7), "status 7 is none of 0, 1, 2, 3"),
        (lambda right: replace(right, status=right.status.float()), "status of shape (1,), torch.float32"),
        (lambda right: replace(right, predicts=right.predicts.to("meta")), "predicts on device meta"),
        (raises(ValueError("\ud800")), "got:      ValueError: \\ud800 (raised at"),
        (raises(SystemExit(3)), "got:      SystemExit: 3 (raised at"),
        (raises(Unprintable()), "got:      Unprintable: (a message that cannot be printed) (raised at"),
        (raises(ValueError("one\n  two")), "got:      ValueError: one two (raised at"),
        (raises(ValueError("x" * 999)), "got:      ValueError: " + "x" * 300 + "... (raised at"),
    ],
)
def test_nonsense_is_said_in_a_line(does, said):
    with pytest.raises(LawBroken) as broken:
        law_named("oracle-agreement").run(probs_case([[0.5, 0.5], [1, 0]], 0.25), Nonsense(does))
    (line,) = [line for line in str(broken.value).splitlines() if line.startswith("  got:")]
    assert said in line
