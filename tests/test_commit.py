"""Contract: ``commit`` cuts behind the first stop token, in every way that stop tokens can be given."""

import pytest
import torch

from treeconv import DraftTree, InvalidArgument, VerifyOutput, commit
from treeconv.tree_laws import tree_law_named


def output(status=0):
    """Request 0 accepted nodes 0, 1, 3 and emits 7, 8, 9; request 1 accepted its root and emits 8."""
    index = torch.tensor([[0, 1, 3, -1], [4, -1, -1, -1]], dtype=torch.int32)
    predicts = torch.tensor([7, 8, 5, 9, 8, 8, 7, 9], dtype=torch.int32)
    counts = torch.tensor([2, 0], dtype=torch.int32)
    return VerifyOutput(index, counts, predicts, torch.tensor([0, status], dtype=torch.int32))


@pytest.mark.parametrize(
    ("stops", "tokens", "accepted", "finished"),
    [
        ((), [[7, 8, 9], [8]], [2, 0], [False, False]),
        ([5], [[7, 8, 9], [8]], [2, 0], [False, False]),
        ([9], [[7, 8, 9], [8]], [2, 0], [True, False]),
        ([9, 8], [[7, 8], [8]], [2, 0], [True, True]),
        ([7, 9], [[7], [8]], [1, 0], [True, False]),
        ([[], [8]], [[7, 8, 9], [8]], [2, 0], [False, True]),
        ([[8, 9, 5], [9]], [[7, 8], [8]], [2, 0], [True, False]),
        (torch.tensor([7]), [[7], [8]], [1, 0], [True, False]),
        (torch.tensor([[9, 7], [-1, -1]]), [[7], [8]], [1, 0], [True, False]),
        (torch.tensor([[-1], [8]], dtype=torch.int32), [[7, 8, 9], [8]], [2, 0], [False, True]),
    ],
    ids=str,
)
def test_cut_behind_the_first_stop(stops, tokens, accepted, finished):
    made = commit(output(), stops)
    assert made.tokens == tokens
    assert made.num_emitted.tolist() == [len(text) for text in tokens]
    assert (made.num_accepted.tolist(), made.is_finished.tolist()) == (accepted, finished)
    kept = [[place for place in row if place >= 0] for row in made.accept_index.tolist()]
    assert kept == [[0, 1, 3][: len(tokens[0])], [4]]


def test_a_request_that_emitted_nothing_stays_so():
    bad = output(status=1)
    bad.accept_index[1], bad.predicts[4:] = -1, -1
    made = commit(bad, [8])
    assert (made.tokens, made.num_accepted.tolist()) == ([[7, 8], []], [2, 0])
    assert made.is_finished.tolist() == [True, False]


@pytest.mark.parametrize(
    ("stops", "message"),
    [
        ([-1], r"stop_token_ids\[0\]\[0\]=-1, but must be an integer >= 0"),
        ([[1], [2.5]], r"stop_token_ids\[1\]\[0\]=2.5"),
        ([[1]], r"len\(stop_token_ids\)=1, but must be 2"),
        (torch.tensor([1.0]), "torch.float32, but must be integers"),
        (torch.tensor([[1], [1], [1]]), r"\(3, 1\) torch.int64, but must be integers"),
    ],
    ids=str,
)
def test_refuses(stops, message):
    with pytest.raises(InvalidArgument, match=message):
        commit(output(), stops)


def test_the_law_judges_deep_trees():
    assert (
        tree_law_named("stop-tokens").run([DraftTree.chain(range(9)), DraftTree([-1], [3])], 12, [0, 4]) == 2
    )
