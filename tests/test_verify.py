"""The front door: what verify and verify_probs take, and what they give back."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from treeconv import (
    BackendUnavailable,
    Coins,
    DraftTree,
    InvalidArgument,
    RowStatus,
    draw_coins,
    to_verify_input,
    verify,
    verify_probs,
)
from treeconv.backends.eager import EagerBackend
from treeconv.backends.registry import get_backend

BACKENDS = ("reference", "eager")
TREE = DraftTree([-1, 0, 0, 1], [9, 5, 7, 2])
ROOT = DraftTree([-1], [3])
INF = float("inf")


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def rows_for(trees, vocab=8, slots=None, seed=0):
    slots = slots or max(map(len, trees))
    return torch.from_numpy(
        np.random.default_rng(seed).normal(0, 2, (len(trees), slots, vocab)).astype(np.float32)
    )


def coins_for(trees, slots=None, seed=0):
    rng = np.random.default_rng(seed)
    slots = slots or max(map(len, trees))
    return Coins(
        torch.from_numpy(rng.random((len(trees), slots), dtype=np.float32)),
        torch.from_numpy(rng.random(len(trees), dtype=np.float32)),
    )


def same(left, right):
    return all(torch.equal(getattr(left, f.name), getattr(right, f.name)) for f in fields(left))


def test_the_readme_example_emits_path_and_bonus(backend):
    """Node 1 has mass .75 and its child .5; a leaf's row draws the bonus."""
    probs = torch.zeros(1, 4, 8)
    probs[0, 0, [5, 7]] = torch.tensor([0.75, 0.25])
    probs[0, 1, [2, 3]] = 0.5
    probs[0, 3, [0, 6]] = 0.5
    probs[0, 2] = float("nan")  # never visited
    output = verify_probs(to_verify_input([TREE]), probs, Coins([[0.7, 0.4, 0, 0]], [0.6]), backend=backend)
    assert output.tokens == [[5, 2, 6]]
    assert output.accept_index.tolist() == [[0, 1, 3]]
    assert output.accept_token_num.tolist() == [2]
    assert output.predicts.tolist() == [5, 2, -1, 6]
    assert output.status.tolist() == [RowStatus.OK]


@pytest.mark.parametrize("depth_cap", [None, 1, 2, 7])
def test_shapes_and_dtypes_are_sglangs(depth_cap, backend):
    trees = [TREE, ROOT]
    output = verify(to_verify_input(trees, 6), rows_for(trees, slots=6), backend=backend, depth_cap=depth_cap)
    shapes = {field.name: tuple(getattr(output, field.name).shape) for field in fields(output)}
    cap = depth_cap or TREE.depth + 1
    assert shapes == {"accept_index": (2, cap), "accept_token_num": (2,), "predicts": (12,), "status": (2,)}
    assert {getattr(output, field.name).dtype for field in fields(output)} == {torch.int32}


def test_auto_is_eager_on_the_cpu():
    batch, rows, coins = to_verify_input([TREE]), rows_for([TREE], 10), coins_for([TREE])
    assert same(verify(batch, rows, 1.0, coins), verify(batch, rows, 1.0, coins, backend="eager"))


def test_a_backend_object_is_used_as_it_is():
    class Recording(EagerBackend):
        calls = 0

        def verify(self, *args):
            self.calls += 1
            return super().verify(*args)

    mine = Recording()
    verify(to_verify_input([TREE]), rows_for([TREE], 10), backend=mine)
    assert mine.calls == 1


@pytest.mark.parametrize(
    "temperature",
    [0.7, np.float32(0.7), [0.7] * 2, np.array([0.7, 0.7]), torch.tensor([0.7, 0.7]), torch.tensor(0.7)],
)
def test_temperature_is_a_scalar_or_one_per_request(temperature, backend):
    trees = [TREE, ROOT]
    batch, rows, coins = to_verify_input(trees), rows_for(trees), coins_for(trees)
    want = verify(batch, rows, [np.float32(0.7)] * 2, coins, backend=backend)
    assert same(want, verify(batch, rows, temperature, coins, backend=backend))


def test_integer_temperatures_are_numbers_too(backend):
    batch, rows, coins = to_verify_input([TREE]), rows_for([TREE], 10), coins_for([TREE])
    want = verify(batch, rows, 2.0, coins, backend=backend)
    assert same(want, verify(batch, rows, torch.tensor([2]), coins, backend=backend))


def test_each_request_has_its_own_temperature(backend):
    """One row, [0, 1] logits, final coin .25: greedy takes 1, cold 1, hot 0."""
    logits = torch.tensor([[[0.0, 1.0]]] * 3)
    coins = Coins([[0.5]] * 3, [0.25] * 3)
    output = verify(to_verify_input([ROOT] * 3), logits, [0.0, 0.1, 100.0], coins, backend=backend)
    assert output.tokens == [[1], [1], [0]]


@pytest.mark.parametrize(
    "make", [torch.Tensor.tolist, torch.Tensor.numpy, lambda rows: rows.double().numpy()]
)
def test_logits_and_coins_may_be_lists_or_arrays(make, backend):
    batch, rows, coins = to_verify_input([TREE]), rows_for([TREE], 10), coins_for([TREE])
    want = verify(batch, rows, 1.0, coins, backend=backend)
    given = Coins(make(coins.accept), make(coins.final))
    assert same(want, verify(batch, make(rows), 1.0, given, backend=backend))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_are_taken_at_their_values(dtype, backend):
    batch, coins = to_verify_input([TREE]), coins_for([TREE])
    rows = rows_for([TREE]).to(dtype)
    want = verify(batch, rows.float(), 0.8, coins, backend=backend)
    assert same(want, verify(batch, rows, 0.8, coins, backend=backend))


@pytest.mark.parametrize("vocab", [1, 2, 3, 511, 512, 513, 1000, 1024, 1025])
def test_any_vocabulary_size(vocab, backend):
    """All mass on the last token, then on the first: found at every size, by child and bonus alike."""
    for token in {0, vocab - 1}:
        tree = DraftTree.chain([0, token])
        logits = torch.full((1, 2, vocab), -INF)
        logits[..., token] = 3.0
        for temperature in (0.0, 1.0):
            output = verify(to_verify_input([tree]), logits, temperature, backend=backend)
            assert output.tokens == [[token, token]]


def strided(rows):
    """The same numbers in memory that is transposed, sliced, and offset."""
    big = torch.full((rows.shape[2] + 3, rows.shape[0], 2 * rows.shape[1]), float("nan"), dtype=rows.dtype)
    view = big[3:, :, ::2].permute(1, 2, 0)
    view.copy_(rows)
    return view


def test_strided_rows_decide_alike(backend):
    trees = [TREE, ROOT, TREE]
    batch, rows, coins = to_verify_input(trees), rows_for(trees), coins_for(trees)
    view = strided(rows)
    assert not view.is_contiguous()
    assert same(
        verify(batch, rows, 0.9, coins, backend=backend), verify(batch, view, 0.9, coins, backend=backend)
    )


def test_one_row_shared_by_all_slots(backend):
    """``expand`` makes rows of stride 0."""
    trees = [TREE, ROOT, TREE]
    batch, coins = to_verify_input(trees), coins_for(trees)
    rows = rows_for([ROOT]).expand(3, 4, 8)
    want = verify(batch, rows.contiguous(), 0.9, coins, backend=backend)
    assert same(want, verify(batch, rows, 0.9, coins, backend=backend))


def test_logits_that_require_grad_are_read_all_the_same(backend):
    batch, coins = to_verify_input([TREE]), coins_for([TREE])
    rows = rows_for([TREE])
    want = verify(batch, rows, 0.9, coins, backend=backend)
    got = verify(batch, rows.clone().requires_grad_(), 0.9, coins, backend=backend)
    assert same(want, got)


def test_bias_and_draft_laws_that_require_grad_are_read_all_the_same(backend):
    batch, coins = to_verify_input([TREE]), coins_for([TREE])
    rows = rows_for([TREE])
    laws = rows.softmax(-1)
    for name, value, more in [
        ("logit_bias", rows[:, 1], {}),
        ("draft_probs", laws, {"rule": "recursive", "drafting": "sampled"}),
    ]:
        want = verify(batch, rows, 0.9, coins, backend=backend, **{name: value}, **more)
        given = {name: value.clone().requires_grad_()}
        assert same(want, verify(batch, rows, 0.9, coins, backend=backend, **given, **more))


def test_inputs_are_not_written_to(backend):
    trees = [TREE, ROOT]
    batch, rows, coins = to_verify_input(trees), rows_for(trees), coins_for(trees)
    temperature = torch.tensor([0.8, 0.0])
    probs = rows.softmax(-1)
    inputs = [
        *(getattr(batch, field.name) for field in fields(batch)),
        rows,
        probs,
        temperature,
        coins.accept,
    ]
    before = [tensor.clone() for tensor in inputs]
    for call in (lambda: verify(batch, rows, temperature, coins, backend=backend),) * 2 + (
        lambda: verify_probs(batch, probs, coins, backend=backend),
    ):
        call()
        assert all(torch.equal(one, two) for one, two in zip(before, inputs, strict=True))


def test_rows_that_are_not_visited_are_never_looked_at(backend):
    logits = torch.full((1, 4, 8), float("nan"))
    logits[0, 0] = torch.nn.functional.one_hot(torch.tensor(7), 8) * 100.0
    logits[0, 2] = torch.nn.functional.one_hot(torch.tensor(1), 8) * 100.0
    output = verify(to_verify_input([TREE]), logits, 1.0, Coins([[0.5] * 4], [0.5]), backend=backend)
    assert (output.tokens, output.status.tolist()) == ([[7, 1]], [RowStatus.OK])


@pytest.mark.parametrize(
    ("value", "status"), [(float("nan"), RowStatus.NAN), (INF, RowStatus.POS_INF), (-INF, RowStatus.EMPTY)]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("node", [0, 1])
def test_a_visited_unusable_row_stops_its_request_and_no_other(value, status, temperature, node, backend):
    """At node 1 a draft was accepted already: it is not emitted either."""
    tree = DraftTree.chain([9, 5])
    logits = torch.zeros(3, 2, 8)
    logits[..., 5] = 50.0
    logits[1, node] = value if status is RowStatus.EMPTY else torch.tensor([0.0] * 7 + [value])
    output = verify(to_verify_input([tree] * 3), logits, temperature, backend=backend)
    assert output.status.tolist() == [0, status, 0]
    assert output.tokens == [[5, 5], [], [5, 5]]
    assert output.accept_index.tolist() == [[0, 1], [-1, -1], [4, 5]]
    assert output.predicts.tolist() == [5, 5, -1, -1, 5, 5]
    assert output.accept_token_num.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("row", "status"),
    [
        ([0.5, float("nan"), 0.5], RowStatus.NAN),
        ([0.5, -0.5, 0.5], RowStatus.NAN),
        ([0.5, INF, 0.5], RowStatus.POS_INF),
        ([0.0, 0.0, 0.0], RowStatus.EMPTY),
    ],
)
def test_unusable_probabilities_are_reported(row, status, backend):
    probs = torch.tensor([[row], [[0.0, 1.0, 0.0]]])
    output = verify_probs(to_verify_input([ROOT, ROOT]), probs, backend=backend)
    assert (output.status.tolist(), output.tokens) == ([status, 0], [[], [1]])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("row", "tokens", "coin", "path"),
    [
        ([0.5, 0.5, 0], (0, 1, 2), 1.0, [0, 2, -1]),  # the last child has no mass: the one before takes it
        ([0.25, 0.25, 0], (0, 1), 0.75, [0, 2, -1]),  # rows need not sum to 1
        ([0, 1, 0], (0, 2), 0.0, [0, -1, -1]),
        ([0, 1, 0], (2, 1), 0.0, [0, 2, -1]),
        ([0.125, 0.5, 0.375], (0, 1), 0.625, [0, -1, -1]),
        ([0.125, 0.5, 0.375], (0, 1), 0.625 - 2**-24, [0, 2, -1]),
        ([0.125, 0.5, 0.375], (0, 1), 0.125, [0, 2, -1]),
        ([0.125, 0.5, 0.375], (0, 1), 0.125 - 2**-27, [0, 1, -1]),
    ],
)
def test_acceptance_at_the_edges(row, tokens, coin, path, backend):
    tree = DraftTree([-1] + [0] * len(tokens), [9, *tokens])
    slots = len(tree)
    probs = torch.tensor([[row] * slots], dtype=torch.float32)
    output = verify_probs(
        to_verify_input([tree]), probs, Coins([[coin] * slots], [0.5]), backend=backend, depth_cap=3
    )
    assert output.accept_index.tolist() == [path]


@pytest.mark.parametrize(
    ("final", "token"), [(0.0, 1), (0.25 - 2**-26, 1), (0.25, 3), (1 - 2**-24, 3), (1.0, 3)]
)
def test_bonus_at_the_edges(final, token, backend):
    probs = torch.tensor([[[0.0, 0.25, 0.0, 0.75, 0.0]]])
    output = verify_probs(to_verify_input([ROOT]), probs, Coins([[0.5]], [final]), backend=backend)
    assert output.tokens == [[token]]


def test_bonus_is_drawn_from_the_residual_of_what_was_tested(backend):
    """Children 0 and 3 refused: [.25, .25] of [.25, .25, .25, .25] is left, in token order."""
    tree = DraftTree([-1, 0, 0], [9, 3, 0])
    probs = torch.full((1, 3, 4), 0.25)
    for final, token in ((0.0, 1), (0.49, 1), (0.5, 2), (0.99, 2)):
        output = verify_probs(to_verify_input([tree]), probs, Coins([[0.6] * 3], [final]), backend=backend)
        assert output.tokens == [[token]]


def test_at_the_depth_cap_nothing_was_tested_so_nothing_is_refused(backend):
    """The drafted token 0 comes back as the bonus."""
    output = verify_probs(
        to_verify_input([DraftTree.chain([9, 0])]),
        torch.tensor([[[0.5, 0.5]] * 2]),
        Coins([[0.9] * 2], [0.25]),
        backend=backend,
        depth_cap=1,
    )
    assert (output.tokens, output.accept_index.tolist()) == ([[0]], [[0]])


@pytest.mark.parametrize("depth_cap", [None, 1, 2])
def test_batch_order_and_padding_change_nothing(depth_cap, backend):
    rng = np.random.default_rng(5)
    trees = []
    for size in (1, 5, 12, 3, 9):
        parents = [-1] + [int(rng.integers(0, node)) for node in range(1, size)]
        trees.append(DraftTree(parents, [0, *(node % 16 for node in range(1, size))]))
    cap = depth_cap or 1 + max(tree.depth for tree in trees)
    rows, coins = rows_for(trees, vocab=16, slots=14), coins_for(trees, slots=14)
    temperatures = torch.tensor([0.0, 0.6, 1.0, 2.0, 0.0])
    together = verify(to_verify_input(trees, 14), rows, temperatures, coins, backend=backend, depth_cap=cap)
    for place, tree in enumerate(trees):
        one, size = slice(place, place + 1), len(tree)
        alone = verify(
            to_verify_input([tree]),
            rows[one, :size],
            temperatures[one],
            Coins(coins.accept[one, :size], coins.final[one]),
            backend=backend,
            depth_cap=cap,
        )
        assert together.tokens[place] == alone.tokens[0]


def test_a_generator_decides_the_coins(backend):
    trees = [TREE] * 30
    batch, rows = to_verify_input(trees), rows_for(trees)

    def call(seed):
        return verify(batch, rows, generator=torch.Generator().manual_seed(seed), backend=backend).tokens

    assert call(1) == call(1)
    assert call(1) != call(2)


def test_seeds_fix_the_coins_wherever_a_request_is(backend):
    trees = [TREE] * 30
    seeds = list(range(2**64 - 30, 2**64))
    batch, rows = to_verify_input(trees, 6, list(range(30))), rows_for(trees, slots=6)
    together = verify(batch, rows, seeds=seeds, backend=backend).tokens
    assert verify(batch, rows, seeds=[seed - 30 for seed in seeds], backend=backend).tokens != together
    later = to_verify_input(trees, 6, list(range(1, 31)))
    assert verify(later, rows, seeds=seeds, backend=backend).tokens != together
    for place in (0, 7, 29):
        alone = to_verify_input([TREE], len(TREE), [place])
        one = verify(alone, rows[place, : len(TREE)][None], seeds=seeds[place : place + 1], backend=backend)
        assert one.tokens == [together[place]]
    coins = draw_coins(seeds, list(range(30)), 6)
    assert verify(batch, rows, coins=coins, backend=backend).tokens == together
    tensor = torch.arange(-30, 0)  # the same 64 bits
    assert verify(batch, rows, seeds=tensor, backend=backend).tokens == together


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seeds": [1, 2]}, r"len\(seeds\)=2, but must be 1, one per request"),
        ({"seeds": [-1]}, r"seeds\[0\]=-1, but must be an integer >= 0"),
        ({"seeds": [2**64]}, r"seeds\[0\]=18446744073709551616, but must be below 2\*\*64"),
        ({"seeds": torch.ones(1)}, r"seeds is \(1,\) torch.float32 on cpu, but must be \(1,\) torch.int64"),
        ({"seeds": [1], "generator": torch.Generator()}, "generator and seeds were both given"),
    ],
)
def test_bad_seeds(given, message):
    with pytest.raises(InvalidArgument, match=message):
        verify(to_verify_input([TREE]), rows_for([TREE], 10), **given)


class DrawsItself(EagerBackend):
    name = "draws-itself"

    def __init__(self, coins):
        self.traits = replace(EagerBackend.traits, coins=coins, rows_dtypes=("float32",))

    def verify(self, batch, logits, temperature, coins, depth_cap):
        self.given = coins
        shape = batch.candidates.shape
        return super().verify(
            batch, logits, temperature, Coins(torch.zeros(shape), torch.zeros(shape[0])), depth_cap
        )


def test_a_backend_that_draws_its_coins_itself_is_handed_seeds_or_a_generator():
    batch, rows = to_verify_input([TREE]), rows_for([TREE], 10)
    seeded, generated = DrawsItself("seeds"), DrawsItself("generator")
    verify(batch, rows, seeds=[5], backend=seeded)
    assert seeded.given.tolist() == [5]
    generator = torch.Generator()
    verify(batch, rows, generator=generator, backend=generated)
    assert generated.given is generator
    verify(batch, rows, backend=generated)
    assert generated.given is torch.default_generator
    coins = draw_coins([1], [1], len(TREE))
    for backend in (seeded, generated):
        with pytest.raises(InvalidArgument, match="coins was given, but backend 'draws-itself' draws its"):
            verify(batch, rows, coins=coins, backend=backend)
    with pytest.raises(InvalidArgument, match="nothing was given"):
        verify(batch, rows, backend=seeded)
    with pytest.raises(BackendUnavailable, match=r"takes logits of float32, not of torch.bfloat16"):
        verify(batch, rows.bfloat16(), seeds=[5], backend=seeded)


def test_without_coins_each_call_draws_fresh_ones(backend):
    trees = [TREE] * 30
    batch, rows = to_verify_input(trees), rows_for(trees)
    torch.manual_seed(0)
    assert verify(batch, rows, backend=backend).tokens != verify(batch, rows, backend=backend).tokens


def test_drawn_coins_are_in_range_and_shaped():
    class Keeping(EagerBackend):
        def verify(self, batch, logits, temperature, coins, depth_cap):
            self.coins = coins
            return super().verify(batch, logits, temperature, coins, depth_cap)

    keeping = Keeping()
    verify(to_verify_input([TREE] * 100), rows_for([TREE] * 100), backend=keeping)
    accept, final = keeping.coins.accept, keeping.coins.final
    assert (tuple(accept.shape), tuple(final.shape)) == ((100, 4), (100,))
    assert (accept.dtype, accept.is_contiguous(), final.is_contiguous()) == (torch.float32, True, True)
    assert min(accept.min(), final.min()) >= 0
    assert max(accept.max(), final.max()) < 1


def test_the_roots_token_need_not_be_in_the_vocabulary(backend):
    output = verify(to_verify_input([DraftTree([-1], [999])]), [[[0.0, 5.0]]], 0.0, backend=backend)
    assert output.tokens == [[1]]


def test_backends_agree_with_each_other_on_their_names():
    assert [get_backend(name).name for name in BACKENDS] == list(BACKENDS)


def test_a_generator_that_is_none():
    batch = to_verify_input([DraftTree.chain([9, 1])])
    with pytest.raises(InvalidArgument, match=r"generator=5, but must be a torch.Generator or None"):
        verify(batch, torch.zeros(1, 2, 4), generator=5)


def test_a_negative_probability_is_called_one():
    batch = to_verify_input([DraftTree.chain([9, 1])])
    output = verify_probs(batch, torch.full((1, 2, 2), -0.5), backend="reference")
    with pytest.raises(InvalidArgument, match="holds NaN, or a negative probability"):
        output.raise_for_status()
