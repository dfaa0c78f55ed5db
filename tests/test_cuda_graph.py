"""The graph runner's bookkeeping on the CPU, where replay calls the backend on the same static buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from treeconv import Coins, DraftTree, InvalidArgument, VerifyInput, draw_coins, to_verify_input, verify
from treeconv.backends.reference import ReferenceBackend
from treeconv.cuda_graph import CudaGraphRunner

N, V, CAP = 6, 9, 4


def runner(**options):
    made = CudaGraphRunner(
        options.pop("backend", "reference"),
        num_draft_tokens=N,
        vocab_size=V,
        depth_cap=CAP,
        batch_sizes=options.pop("batch_sizes", (4, 1, 2)),
        rows_dtype=torch.float32,
        device="cpu",
        **options,
    )
    made.capture()
    return made


def random_batch(rng, size, slots):
    trees = []
    for _ in range(size):
        nodes = int(rng.integers(1, slots + 1))
        parents = (-1, *(int(rng.integers(i)) for i in range(1, nodes)))
        trees.append(DraftTree(parents, tuple(int(t) for t in rng.permutation(V)[:nodes])))
    batch = to_verify_input(trees, slots)
    logits = torch.from_numpy(rng.normal(size=(size, slots, V)).astype(np.float32))
    temperature = torch.tensor(rng.choice([0.0, 0.3, 1.0, 2.0], size), dtype=torch.float32)
    drawn = draw_coins(rng.integers(0, 99, size).tolist(), [7] * size, slots)
    return batch, logits, temperature, Coins(torch.from_numpy(drawn.accept), torch.from_numpy(drawn.final))


def test_replay_is_the_plain_call():
    """Other trees, sizes, rows, temperatures and coins every time, after whatever the last one left."""
    rng = np.random.default_rng(0)
    run = runner()
    for turn in range(60):
        size, slots = int(rng.integers(1, 5)), int(rng.integers(1, N + 1))
        batch, logits, temperature, coins = random_batch(rng, size, slots)
        got = run.replay(batch, logits, temperature, coins)
        want = verify(batch, logits, temperature, coins, backend="reference", depth_cap=CAP)
        for name in ("accept_index", "accept_token_num", "predicts", "status"):
            assert torch.equal(getattr(got, name), getattr(want, name)), (turn, name)


def test_bad_row_touches_its_own_request_only():
    rng = np.random.default_rng(1)
    run = runner()
    batch, logits, temperature, coins = random_batch(rng, 3, N)
    want = run.replay(batch, logits, temperature, coins).tokens
    logits[1] = float("nan")
    got = run.replay(batch, logits, temperature, coins)
    assert got.status.tolist() == [0, 1, 0]
    assert got.tokens == [want[0], [], want[2]]
    # The next, smaller batch pads over it.
    batch, logits, temperature, coins = random_batch(rng, 1, N)
    assert run.replay(batch, logits, temperature, coins).status.tolist() == [0]


def test_coins_are_fresh_and_follow_the_seed():
    rng = np.random.default_rng(2)
    batch, logits, temperature, _ = random_batch(rng, 4, N)

    def drawn(seed, replays=20):
        run = runner(generator=torch.Generator().manual_seed(seed))
        seen = []
        for _ in range(replays):
            run.replay(batch, logits, temperature)
            seen.append(torch.cat([run.coins.accept.reshape(-1), run.coins.final]))
        return torch.stack(seen)

    first = drawn(5)
    assert torch.equal(first, drawn(5))
    assert not torch.equal(first, drawn(6))
    assert ((first >= 0) & (first < 1)).all()
    assert len(torch.unique(first, dim=0)) == len(first)
    assert torch.unique(first).numel() > 0.99 * first.numel()


def test_model_writes_to_the_static_rows():
    rng = np.random.default_rng(3)
    room = torch.zeros((4, N, V))
    run = runner(rows=room)
    batch, logits, temperature, coins = random_batch(rng, 2, N)
    room[:2] = logits
    got = run.replay(batch, temperature=temperature, coins=coins)
    assert got.tokens == verify(batch, logits, temperature, coins, backend="reference", depth_cap=CAP).tokens


def test_probabilities():
    rng = np.random.default_rng(4)
    run = runner(interface="probs")
    batch, logits, _, coins = random_batch(rng, 2, N)
    probs = logits.softmax(-1)
    want = verify(batch, logits, 1.0, coins, backend="reference", depth_cap=CAP)
    assert run.replay(batch, probs, coins=coins).tokens == want.tokens


def test_replays_carry_their_own_bias_and_bitmask():
    """Some with both, one or none, in smaller batches and trees: nothing is left of an earlier replay's."""
    rng = np.random.default_rng(6)
    run = runner(processors=("bias", "bitmask"))
    for turn in range(40):
        size, slots = int(rng.integers(1, 5)), int(rng.integers(1, N + 1))
        batch, logits, temperature, coins = random_batch(rng, size, slots)
        held = {}
        if rng.random() < 0.6:
            held["logit_bias"] = torch.from_numpy(rng.choice([0, 2, -3, -np.inf], (size, V)).astype("f4"))
        if rng.random() < 0.6:
            held["token_bitmask"] = torch.from_numpy(rng.integers(0, 2**V, (size, slots, 1), dtype=np.int32))
        got = run.replay(batch, logits, temperature, coins, **held)
        want = verify(batch, logits, temperature, coins, backend="reference", depth_cap=CAP, **held)
        for name in ("accept_index", "accept_token_num", "predicts", "status"):
            assert torch.equal(getattr(got, name), getattr(want, name)), (turn, name)


def test_processors_that_were_not_captured_are_refused():
    rng = np.random.default_rng(7)
    batch, logits, temperature, coins = random_batch(rng, 2, N)
    mask = torch.zeros((2, N, 1), dtype=torch.int32)
    with pytest.raises(InvalidArgument, match="token_bitmask was given, but must be captured"):
        runner(processors=("bias",)).replay(batch, logits, temperature, coins, token_bitmask=mask)
    one = random_batch(rng, 1, N)
    with pytest.raises(InvalidArgument, match=r"token_bitmask.shape=\(2, 6, 1\), but must be \(1, 6, 1\)"):
        runner(processors=("bitmask",)).replay(*one, token_bitmask=mask)
    with pytest.raises(InvalidArgument, match=r"processors=\['penalties'\], but must be of 'bias'"):
        runner(processors=("bias", "penalties"))
    with pytest.raises(InvalidArgument, match="interface='probs' has none"):
        runner(processors=("bias",), interface="probs")


def test_eligibility_compares_requests_with_requests():
    """B63: 2 requests of 5 nodes in graphs captured up to batch 4."""
    run = runner(batch_sizes=(4,))
    batch = to_verify_input([DraftTree.chain(range(5))] * 2)
    assert run.can_run(batch)
    assert run.bucket(2) == 4
    assert not run.can_run(to_verify_input([DraftTree((-1,), (0,))] * 5))
    assert not run.can_run(batch, depth_cap=CAP + 1)
    assert not run.can_run(batch, torch.zeros((2, 5, V + 1)))


def test_refuses_what_was_not_captured():
    rng = np.random.default_rng(5)
    run = runner()
    batch, logits, temperature, coins = random_batch(rng, 2, N)
    wide = to_verify_input([DraftTree((-1,), (0,))], N + 1)
    many = to_verify_input([DraftTree((-1,), (0,))] * 5)
    with pytest.raises(InvalidArgument, match="batch_size=5, but must be <= 4"):
        run.replay(many, temperature=1.0)
    with pytest.raises(InvalidArgument, match=f"num_draft_tokens={N + 1}, but must be <= {N}"):
        run.replay(wide, temperature=1.0)
    with pytest.raises(InvalidArgument, match="vocab_size=10, but must be 9"):
        run.replay(batch, torch.zeros((2, N, V + 1)), temperature)
    with pytest.raises(InvalidArgument, match=r"rows.dtype=torch.float16, but must be torch.float32"):
        run.replay(batch, logits.half(), temperature)
    with pytest.raises(InvalidArgument, match="depth_cap=9, but must be 4"):
        run.replay(batch, logits, temperature, depth_cap=9)
    with pytest.raises(InvalidArgument, match="temperature=None"):
        run.replay(batch, logits)
    with pytest.raises(InvalidArgument, match="must be <= 4"):
        run.replay(VerifyInput(**{k: v.repeat_interleave(3, 0) for k, v in vars(batch).items()}), logits)
    idle = CudaGraphRunner("reference", num_draft_tokens=N, vocab_size=V, depth_cap=CAP, device="cpu")
    with pytest.raises(InvalidArgument, match="must be captured first"):
        idle.replay(batch, logits.bfloat16(), temperature, coins)


def test_refuses_bad_settings():
    sizes = {"num_draft_tokens": N, "vocab_size": V, "depth_cap": CAP, "device": "cpu"}
    with pytest.raises(InvalidArgument, match="batch_sizes=0, but must be an integer >= 1"):
        CudaGraphRunner("reference", **sizes, batch_sizes=(0,))
    with pytest.raises(InvalidArgument, match=r"batch_sizes=\(\)"):
        CudaGraphRunner("reference", **sizes, batch_sizes=())
    with pytest.raises(InvalidArgument, match="interface='rows'"):
        CudaGraphRunner("reference", **sizes, interface="rows")
    with pytest.raises(InvalidArgument, match=r"rows is \(1, 2, 3\)"):
        CudaGraphRunner("reference", **sizes, rows=torch.zeros((1, 2, 3)))


def test_replays_carry_their_own_filters():
    """Some with all three, one or none, one value or one a request: nothing is left of an earlier one's."""
    rng = np.random.default_rng(8)
    for order in ("sequential", "joint"):
        run = runner(filter_order=order, processors=("bitmask",))
        for turn in range(30):
            size, slots = int(rng.integers(1, 5)), int(rng.integers(1, N + 1))
            batch, logits, temperature, coins = random_batch(rng, size, slots)
            held = {}
            if rng.random() < 0.5:
                held["top_k"] = [None if k == 0 else int(k) for k in rng.integers(0, 5, size)]
            if rng.random() < 0.5:
                held["top_p"] = float(rng.choice([0.2, 0.9, 1.0]))
            if rng.random() < 0.5:
                held["min_p"] = rng.choice([0.0, 0.1, 1.0], size).tolist()
            got = run.replay(batch, logits, temperature, coins, **held)
            held["filter_order"] = order
            want = verify(batch, logits, temperature, coins, backend="reference", depth_cap=CAP, **held)
            for name in ("accept_index", "accept_token_num", "predicts", "status"):
                assert torch.equal(getattr(got, name), getattr(want, name)), (order, turn, name)


def test_filters_that_were_not_captured_are_refused():
    rng = np.random.default_rng(9)
    one = random_batch(rng, 2, N)
    with pytest.raises(InvalidArgument, match="filters were given, but must be captured: filter_order="):
        runner().replay(*one, top_k=3)
    with pytest.raises(InvalidArgument, match=r"top_p=1\.5, but must be"):
        runner(filter_order="joint").replay(*one, top_p=1.5)
    with pytest.raises(
        InvalidArgument, match="filter_order='both', but must be None, 'sequential' or 'joint'"
    ):
        runner(filter_order="both")


def test_rows_may_be_a_list_as_for_verify():
    rng = np.random.default_rng(10)
    run = runner()
    batch, logits, temperature, coins = random_batch(rng, 2, N)
    want = run.replay(batch, logits, temperature, coins).tokens
    assert run.can_run(batch, logits.tolist())
    assert run.replay(batch, logits.tolist(), temperature, coins).tokens == want
    assert not run.can_run(batch, [[1.0, 2.0], [3.0]])
    with pytest.raises(InvalidArgument, match="logits=list, but must be numbers of shape"):
        run.replay(batch, [[1.0, 2.0], [3.0]], temperature, coins)


def test_can_run_says_no_wherever_replay_refuses():
    rng = np.random.default_rng(11)
    run = runner()
    batch, logits, temperature, coins = random_batch(rng, 2, N)
    assert run.can_run(batch, logits)
    refused = {
        r"rows.shape=\(1, 6, 9\), but must be \(2, 6, 9\)": logits[:1],
        r"rows.shape=\(2, 5, 9\), but must be \(2, 6, 9\)": logits[:, :5],
        r"rows.shape=\(6, 9\), but must be \(2, 6, 9\)": logits[0],
        r"rows.shape=\(\), but must be \(2, 6, 9\)": logits[0, 0, 0],
        "rows.device=meta, but must be cpu": logits.to("meta"),
    }
    for says, rows in refused.items():
        assert not run.can_run(batch, rows), says
        with pytest.raises(InvalidArgument, match=says):
            run.replay(batch, rows, temperature, coins)
    assert not run.can_run(None)
    assert not run.can_run([batch])
    with pytest.raises(InvalidArgument, match="batch=list, but must be a VerifyInput"):
        run.replay([batch], logits, temperature, coins)


@pytest.mark.parametrize(
    ("name", "place", "value", "says"),
    [
        ("candidates", (1, 1), V, rf"candidates\[1, 1\]={V}, but must be in \[0, {V - 1}\], the vocabulary"),
        ("candidates", (0, 2), -1, r"candidates\[0, 2\]=-1, but must be in"),
        ("retrieve_index", (1, 0), 0, rf"retrieve_index\[1, 0\]=0, but must be {N}"),
        ("positions", (1, 2), 7, r"positions\[1, 2\]=7, but must be 1"),
    ],
)
def test_replay_refuses_the_trees_that_verify_refuses(name, place, value, says):
    given = to_verify_input([DraftTree((-1, 0, 0), (0, 1, 2))] * 2, N)
    batch = VerifyInput(**vars(given))
    getattr(batch, name)[place] = value
    logits = torch.zeros((2, N, V))
    with pytest.raises(InvalidArgument, match=says):
        verify(batch, logits, 1.0, backend="reference")
    with pytest.raises(InvalidArgument, match=says):
        runner().replay(batch, logits, 1.0)


def test_refuses_what_is_no_generator():
    with pytest.raises(InvalidArgument, match=r"generator=5, but must be a torch.Generator on cpu, or None"):
        runner(generator=5)


class HoldsScratch(ReferenceBackend):
    """A backend whose calls leave something behind for the next."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    @staticmethod
    def with_own_scratch():
        return HoldsScratch()

    def verify(self, *call):
        self.calls += 1
        return super().verify(*call)


def test_runners_share_no_scratch():
    """Two may replay on two streams at once, though torch's pool gave them the same one to capture on."""
    rng = np.random.default_rng(12)
    shared = HoldsScratch()
    first, second = runner(backend=shared), runner(backend=shared)
    first.replay(*random_batch(rng, 2, N))
    assert (first.backend.calls, second.backend.calls, shared.calls) == (1, 0, 0)
    held = ReferenceBackend()  # nothing is left behind: nothing is made anew
    assert runner(backend=held).backend is held
