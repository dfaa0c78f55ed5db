"""Contract: an explicit case is made as small as what breaks allows, and what it becomes breaks alike."""

import numpy as np
import pytest

from treeconv.case import Request, VerifyCase
from treeconv.errors import LawBroken
from treeconv.shrink import shrink
from treeconv.tree import DraftTree


def case(kind="logits", requests=3, vocab=12):
    tree = DraftTree((-1, 0, 0, 1, 1, 3), (5, 3, 7, 3, 9, 0))
    generator = np.random.default_rng(0)
    rows = generator.normal(size=(6, vocab)).astype(np.float32)
    if kind == "probs":
        rows = np.tile(
            np.eye(1, vocab, 3, dtype=np.float32) / 2 + np.eye(1, vocab, 8, dtype=np.float32) / 2, (6, 1)
        )
    coins = generator.random(6, np.float32)
    return VerifyCase(tuple(Request(tree, rows, 0.7, coins, 0.25) for _ in range(requests)), kind, 9)


def breaks_if(condition):
    def run(subject):
        run.asked += 1
        if condition(subject):
            raise LawBroken("broken", law="some-law", case=subject)

    run.asked = 0
    return run


def shrunk(subject, condition, **more):
    return shrink(LawBroken("broken", law="some-law", case=subject), breaks_if(condition), **more).case


def test_everything_goes_that_does_not_matter():
    least = shrunk(case(), lambda _: True, values=True)
    (request,) = least.requests
    assert (len(request.tree), least.vocab_size, least.num_draft_tokens) == (1, 1, None)
    assert (request.temperature, request.final, request.accept.tolist()) == (1.0, 0.5, [0.5])
    assert not request.rows.any()


def test_what_matters_stays():
    def condition(subject):
        return any(r.final == 0.25 and 0 in r.tree.token_ids[1:] for r in subject.requests)

    (request,) = shrunk(case(), condition, values=True).requests
    assert request.final == 0.25
    assert request.tree.parents == (-1, 0)  # node 5 moved up, and its elders are gone
    assert request.tree.token_ids[1] == 0


def test_requests_that_a_fault_needs_stay():
    assert len(shrunk(case(requests=40), lambda subject: len(subject.requests) >= 7).requests) == 7


def test_without_values_only_nodes_requests_and_padding_go():
    subject = case()
    least = shrunk(subject, lambda _: True)
    assert least.vocab_size == subject.vocab_size
    assert least.requests[0].rows.tobytes() == subject.requests[0].rows[:1].tobytes()


@pytest.mark.parametrize("vocab", [12, 11])
def test_probabilities_keep_their_sum(vocab):
    def condition(subject):
        return bool((subject.requests[0].rows[0] == 0.5).any())

    least = shrunk(case("probs", vocab=vocab), condition, values=True)
    assert np.allclose(least.requests[0].rows.sum(axis=1), 1)
    assert least.vocab_size < vocab


def test_a_result_breaks_and_no_single_step_of_it_does():
    def condition(subject):
        return sum(len(request.tree) for request in subject.requests) >= 4

    least = shrunk(case(), condition)
    assert sum(len(request.tree) for request in least.requests) == 4


def test_it_stops_when_told():
    run = breaks_if(lambda _: True)
    shrink(LawBroken("b", law="x", case=case()), run, should_stop=lambda: run.asked >= 3)
    assert run.asked == 3


def test_large_trees_go_in_halves():
    size = 64
    tree = DraftTree((-1, *[0] * (size - 1)), tuple(range(size)))
    request = Request(tree, np.zeros((size, size), np.float32), 1.0, np.zeros(size, np.float32), 0.5)
    run = breaks_if(lambda subject: 40 in subject.requests[0].tree.token_ids)
    least = shrink(LawBroken("b", law="x", case=VerifyCase((request,))), run).case
    assert least.requests[0].tree == DraftTree((-1, 0), (0, 40))
    assert run.asked < 60


def test_a_boundary_stays_when_what_came_before_it_goes():
    """A coin on the third child's boundary: its elders go, and their mass is handed on."""
    row = np.array([0.25, 0.125, 0.125, 0.5], np.float32)
    tree = DraftTree((-1, 0, 0, 0), (0, 0, 1, 2))
    request = Request(tree, np.tile(row, (4, 1)), 1.0, np.full(4, 0.5, np.float32), 0.5)

    def condition(subject):
        (asked,) = subject.requests
        sums = np.cumsum([asked.rows[0, asked.tree.token_ids[kid]] for kid in asked.tree.children[0]])
        return bool((sums == asked.accept[0]).any())

    (least,) = shrunk(VerifyCase((request,), kind="probs"), condition, values=True).requests
    assert len(least.tree) == 2
    assert np.allclose(least.rows[0].sum(), 1)


def test_a_crash_on_a_smaller_case_loses_nothing():
    def condition(subject):
        if len(subject.requests) == 1:
            raise ZeroDivisionError
        return True

    assert len(shrunk(case(), condition).requests) == 2
