"""Known faults K8 to K12: ragged batches, committing, buffers, per-request values, offsets."""

from __future__ import annotations

from itertools import permutations

import numpy as np
import pytest
import torch

from treeconv import (
    Coins,
    DraftTree,
    RowStatus,
    build_draft_tree,
    commit,
    to_verify_input,
    verify,
    verify_probs,
)
from treeconv.backends.reference import ReferenceBackend
from treeconv.cuda_graph import CudaGraphRunner

BRANCHED = DraftTree([-1, 0, 0, 2], [9, 1, 2, 3])  # B52's tree; path 0, 2, 3 is accepted below
NAN = float("nan")


def one_hot(*tokens: int, vocab: int = 4) -> torch.Tensor:
    """``[len(tokens), vocab]``"""
    return torch.nn.functional.one_hot(torch.tensor(tokens), vocab).float()


def still(size: int, slots: int, coin: float = 0.5) -> Coins:
    return Coins(torch.full((size, slots), coin), torch.full((size,), coin))


def branched_output(backend):
    rows = one_hot(2, 0, 3, 0)[None]
    return verify_probs(to_verify_input([BRANCHED]), rows, still(1, 4), backend=backend)


def test_b48_padding_slots_emit_nothing(backend):
    batch = to_verify_input([DraftTree.chain([9, 2, 0])], num_draft_tokens=5)
    rows = torch.cat([one_hot(2, 0, 1, vocab=3), torch.zeros(2, 3)])[None]
    for coin in (0.0, 0.5, 1.0):
        output = verify_probs(batch, rows, still(1, 5, coin), backend=backend)
        assert (output.tokens, output.accept_token_num.tolist()) == ([[2, 0, 1]], [2])


@pytest.mark.parametrize("order", [(2, 1), *permutations(range(3))], ids=str)
def test_b49_rows_move_with_their_requests(order, backend):
    batch = to_verify_input([DraftTree.chain([9, draft]) for draft in order])
    rows = torch.stack([one_hot(request, request, vocab=3) for request in order])
    output = verify_probs(batch, rows, still(len(order), 2), backend=backend)
    assert [1] * len(order) == output.accept_token_num.tolist()


@pytest.mark.parametrize("coin", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_b50_greedy_rows_inside_a_sampled_batch(coin, backend):
    root = DraftTree([-1], [9])
    logits = torch.tensor([[[1.0, 3, 2]], [[0.5, 1, 0.7]]])
    together = verify(to_verify_input([root, root]), logits, [0.0, 1.0], still(2, 1, coin), backend=backend)
    alone = verify(to_verify_input([root]), logits[1:], 1.0, still(1, 1, coin), backend=backend)
    assert [[1], alone.tokens[0]] == together.tokens
    assert (together.accept_token_num.tolist(), together.status.tolist()) == ([0, 0], [0, 0])


def test_b52_slots_follow_the_accepted_path(backend):
    """KV slots 20..23 hold nodes 0..3; after the move 20, 21, 22 hold nodes 0, 2, 3."""
    output = branched_output(backend)
    kept = output.accept_index[0, : output.accept_token_num[0] + 1].tolist()
    slots = dict(zip(range(20, 24), range(4), strict=True))
    moved = {20 + place: slots[20 + index] for place, index in enumerate(kept)}
    assert moved == {20: 0, 21: 2, 22: 3}


def test_b57_side_outputs_follow_the_accepted_path(backend):
    output = branched_output(backend)
    kept = output.accept_index[0][output.accept_index[0] >= 0].tolist()
    assert [list("abcd")[index] for index in kept] == ["a", "c", "d"]


def test_b54_count_is_the_run_before_the_first_refusal(backend):
    """Flags [1, 0, 1, 1]: 1 accepted, 2 emitted; their sum would be 3."""
    rows = one_hot(1, 0, 1, 1, 1)[None]
    batch = to_verify_input([DraftTree.chain([9, 1, 1, 1, 1])])
    output = verify_probs(batch, rows, still(1, 5), backend=backend)
    assert (output.accept_token_num.tolist(), [len(tokens) for tokens in output.tokens]) == ([1], [2])


@pytest.mark.parametrize(("block", "budget"), [(4, 7), (8, 3)])
def test_b56_verify_rows_are_sized_by_the_tree(block, budget):
    """The root adds one to the budget: a server needs max(block, budget + 1) = 8 rows for either."""
    logits = np.random.default_rng(0).normal(size=(block, 50))
    batch = to_verify_input([build_draft_tree(logits, budget, root_token_id=9)])
    assert (budget + 1, 8) == (batch.num_draft_tokens, max(block, batch.num_draft_tokens))


def test_b56_nothing_lies_past_the_accept_slots(backend):
    rows = torch.tensor([[1.0, 0.0]] * 4)[None]
    batch = to_verify_input([DraftTree.chain([9, 0, 0, 0])])
    output = verify_probs(batch, rows, still(1, 4), backend=backend, depth_cap=3)
    assert (output.accept_index.tolist(), output.predicts.tolist()) == ([[0, 1, 2]], [0, 0, 0, -1])


def test_b58_the_next_step_starts_from_what_was_emitted(backend):
    output = verify_probs(
        to_verify_input([DraftTree.chain([9, 1, 2])], prefix_lens=[4]),
        one_hot(0, 1, 2, vocab=3)[None],
        still(1, 3),
        backend=backend,
    )
    emitted = output.tokens[0]
    after = to_verify_input([DraftTree([-1], [emitted[-1]])], prefix_lens=[4 + len(emitted)])
    assert (emitted, after.candidates.item(), after.positions.item()) == ([0], 0, 5)


@pytest.mark.parametrize(
    ("first_tree", "steps"),
    [(DraftTree([-1], [9]), 3), (DraftTree.chain([9, 1, 2]), 1), (DraftTree.chain([9, 2, 2]), 3)],
    ids=["root only", "right draft", "wrong draft"],
)
def test_b59_greedy_text_is_the_same_with_every_drafter(first_tree, steps, backend):
    follows = {9: 1, 1: 2, 2: 0}
    text, tree, taken = [], first_tree, 0
    while len(text) < 3 and taken < 4:
        logits = one_hot(*(follows[token] for token in tree.token_ids), vocab=10)[None]
        output = verify(to_verify_input([tree]), logits, 0.0, backend=backend)
        text += output.tokens[0]
        tree, taken = DraftTree([-1], [text[-1]]), taken + 1
    assert ([1, 2, 0], steps) == (text, taken)


def test_b60_a_call_leaves_nothing_for_the_next(backend):
    """Call 1 rejects token 0; in call 2 on the same rows nothing is tested: P(0) is still one half."""
    rows = torch.tensor([[0.5, 0.5]] * 2)[None]
    rejecting = Coins(torch.full((1, 2), 0.75), torch.tensor([0.25]))
    first = verify_probs(to_verify_input([DraftTree.chain([9, 0])]), rows, rejecting, backend=backend)
    alone = to_verify_input([DraftTree([-1], [9])], num_draft_tokens=2)
    ticks = [0.125, 0.375, 0.625, 0.875]
    second = [
        verify_probs(alone, rows, Coins(torch.zeros(1, 2), torch.tensor([v])), backend=backend).tokens[0]
        for v in ticks
    ]
    assert (first.tokens, second) == ([[1]], [[0], [0], [1], [1]])
    assert torch.equal(torch.full((1, 2, 2), 0.5), rows)


def test_b62_padding_minus_one_writes_nowhere(backend):
    """8 slots, path [0, 3] then -1: only slots 0 and 3 are written, not the last one."""
    tree = DraftTree([-1, 0, 0, 0, 1, 1, 1, 4], [9, 1, 2, 3, 1, 2, 3, 1])
    output = verify_probs(to_verify_input([tree]), one_hot(3, *[2] * 7)[None], still(1, 8), backend=backend)
    assert output.accept_index.tolist() == [[0, 3, -1, -1]]
    assert output.predicts.tolist() == [3, -1, -1, 2, -1, -1, -1, -1]


@pytest.mark.parametrize("temperatures", [1.0, 0.0, [0.0, 1.0], [1.0, 0.0]], ids=str)
def test_b64_a_nan_row_is_its_own_requests_problem(temperatures, backend):
    root = DraftTree([-1], [9])
    logits = torch.tensor([[[NAN] * 3], [[-np.inf, 0, -np.inf]]])
    output = verify(to_verify_input([root, root]), logits, temperatures, still(2, 1), backend=backend)
    assert (output.tokens, output.status.tolist()) == ([[], [1]], [RowStatus.NAN, RowStatus.OK])
    assert output.predicts.tolist() == [-1, 1]


@pytest.mark.parametrize(
    ("row", "start"), [(14134, 2147463424), (14135, 2147615360)], ids=["last safe", "first unsafe"]
)
def test_b74_row_offsets_are_64_bit(row, start):
    """Offsets of target rows in elements: in int32 row 14135 would start at -2147351936."""
    index = to_verify_input([DraftTree([-1], [9])] * 221, num_draft_tokens=64).retrieve_index
    offset = index.flatten()[row] * 151936
    assert (torch.int64, start) == (offset.dtype, offset.item())


def test_b75_request_offsets_are_64_bit():
    """In 32 unsigned bits request 442 would start at 2998272: node 19, token 111488 of request 0."""
    index = to_verify_input([DraftTree([-1], [9])] * 443, num_draft_tokens=64).retrieve_index
    offset = index[442, 0] * 151936
    assert (torch.int64, 4297965568) == (offset.dtype, offset.item())
    wrapped = offset.item() % 2**32
    assert (wrapped, *divmod(wrapped, 151936)) == (2998272, 19, 111488)
    first_bad = int((index.flatten() * 151936 >= 2**32).nonzero()[0])
    assert (first_bad, *divmod(first_bad, 64)) == (28269, 441, 45)


class Seeing(ReferenceBackend):
    """Keeps the positions that it was handed."""

    def verify(self, batch, *call, **more):
        self.positions = batch.positions[:, 0].tolist()
        return super().verify(batch, *call, **more)


def captured(backend, **sizes):
    """A runner of one bucket, of four requests."""
    run = CudaGraphRunner(backend, batch_sizes=(4,), rows_dtype=torch.float32, device="cpu", **sizes)
    run.capture()
    return run


def test_b61_replay_with_fewer_rows_forgets_old_positions():
    backend = Seeing()
    run = captured(backend, num_draft_tokens=1, vocab_size=2, depth_cap=1)
    for prefixes, seen in (([50, 60, 70, 80], [50, 60, 70, 80]), ([5, 6], [5, 6, 0, 0])):
        size = len(prefixes)
        batch = to_verify_input([DraftTree([-1], [0])] * size, prefix_lens=prefixes)
        run.replay(batch, torch.zeros(size, 1, 2), 1.0, still(size, 1))
        assert backend.positions == seen


def test_b63_graph_eligibility_compares_requests_with_requests():
    """10 tokens of 2 requests fit into a graph of 4 requests; and the replay is the plain call."""
    run = captured("reference", num_draft_tokens=5, vocab_size=4, depth_cap=5)
    batch, rows = to_verify_input([DraftTree.chain([3, 1, 2, 3, 1])] * 2), torch.zeros(2, 5, 4)
    assert run.can_run(batch, rows)
    coins = still(2, 5, 0.3)
    plain = verify(batch, rows, 1.0, coins, backend="reference")
    assert run.replay(batch, rows, 1.0, coins).tokens == plain.tokens


def test_b35_ranks_share_their_coins():
    """Seeded, each rank computes the coins that the others have, whatever its own generator's state."""
    batch = to_verify_input([DraftTree([-1, 0], [9, 0])], prefix_lens=[7])
    probs = torch.full((1, 2, 2), 0.5)
    for seed in range(20):
        said = []
        for rank in range(2):
            torch.manual_seed(rank)
            said.append(verify_probs(batch, probs, seeds=[seed], backend="reference").tokens)
        assert said[0] == said[1]


def stopped(tree, rows, stops, backend):
    output = verify_probs(to_verify_input([tree]), rows[None], still(1, len(tree)), backend=backend)
    return commit(output, stops)


def test_b84_tokens_after_an_accepted_stop_are_cut(backend):
    tree = DraftTree.chain([9, 4, 2, 5])
    made = stopped(tree, one_hot(4, 2, 5, 1, vocab=10), [2], backend)
    assert (made.tokens, made.is_finished.tolist()) == ([[4, 2]], [True])
    assert made.accept_index.tolist() == [[0, 1, -1, -1]]


def test_b85_counts_end_at_the_stop(backend):
    made = stopped(DraftTree.chain([9, 4, 2, 5]), one_hot(4, 2, 5, 1, vocab=10), [2], backend)
    assert (made.num_emitted.tolist(), made.num_accepted.tolist()) == ([2], [2])


def test_b87_a_refused_stop_ends_nothing(backend):
    rows = torch.tensor([[0.9, 0.1, 0.0], [1.0, 0.0, 0.0]])
    made = stopped(DraftTree([-1, 0], [9, 2]), rows, [2], backend)
    assert (made.tokens, made.is_finished.tolist()) == ([[0]], [False])
