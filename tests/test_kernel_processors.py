"""Bias and bitmask inside the Triton sampler, beside ``reference``, and by the laws at small sizes.

Without a CUDA device the kernel runs in Triton's interpreter. On one, the laws judge it in ``ci/gpu.sh``.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

from treeconv import Request, VerifyCase, suite, verify
from treeconv.backends.reference import ReferenceBackend
from treeconv.backends.triton import TritonBackend
from treeconv.convert import to_verify_input
from treeconv.errors import BackendUnavailable, InvalidArgument
from treeconv.filters import FILTER_ORDERS, Cuts, Filters
from treeconv.kernels.verify_tree import INTERPRETED
from treeconv.laws import BACKEND_LAWS, law_named, why_not
from treeconv.processors import Penalties, Processors, RequestProcessors, bitmask_words, pack_bitmask
from treeconv.tree import Coins, DraftTree, RowStatus

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu" and not INTERPRETED:
    pytest.skip("triton was imported without TRITON_INTERPRET=1", allow_module_level=True)


def gpu(test):
    """Marks a test ``gpu`` and skips it without a CUDA device."""
    return pytest.mark.gpu(pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")(test))


FORK = DraftTree((-1, 0, 0, 1), (0, 1, 2, 0))
INF = float("inf")


@pytest.fixture(scope="module")
def backend():
    return TritonBackend()


def moved(value, device):
    """The same tensors on a device: of batches, coins, filters, processors."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if value is None or isinstance(value, str):
        return value
    return type(value)(**{name: moved(field, device) for name, field in vars(value).items()})


def assert_as_reference(backend, batch, logits, T, coins, processors, filters=None):
    """Also with what a call before left in scratch; returns the reference's output."""
    call = (batch, logits, T, coins, 7, filters)
    want = ReferenceBackend().verify(*call, processors=processors)
    got = backend.verify(*(moved(each, DEVICE) if i != 4 else each for i, each in enumerate(call)),
                         processors=moved(processors, DEVICE))  # fmt: skip
    for name in vars(want):
        assert getattr(got, name).tolist() == getattr(want, name).tolist(), name
    return want


def drawn(seed, B, V, dtype=torch.float32):
    """Trees of one to six nodes in six slots; likely drafts; bias and bitmask of every kind.

    Coins are off every boundary. Padding is NaN and forbids everything.
    """
    rng = np.random.default_rng(seed)
    trees, requests = [], []
    logits = np.full((B, 6, V), np.nan, np.float32)
    for b in range(B):
        parents, used = [-1], {}
        tokens = [int(rng.integers(V))]
        for _ in range(int(rng.integers(0, 6))):
            parent = int(rng.integers(0, len(parents)))
            free = sorted(set(range(V)) - used.setdefault(parent, set()))
            if free:
                parents.append(parent)
                tokens.append(int(rng.choice(free)))
                used[parent].add(tokens[-1])
        rows = rng.normal(size=(len(parents), V)).astype(np.float32)
        for node, parent in enumerate(parents[1:], 1):
            rows[parent, tokens[node]] += np.log(V) + 1
        bias = rng.choice([0, 0, 0.5, -1, 2, -np.inf], V).astype(np.float32)
        allowed = rng.random((len(parents), V)) < rng.choice([0.3, 0.9, 1.0], (len(parents), 1))
        for node, parent in enumerate(parents[1:], 1):  # so that walks go deep
            allowed[parent, tokens[node]] |= rng.random() < 0.7
        left = int(rng.integers(V))  # some token is left
        bias[left] = 0
        allowed[:, left] = True
        rows[~allowed & (rng.random(rows.shape) < 0.5)] = np.nan  # nobody's business
        mask = pack_bitmask(allowed, rest=bool(b % 2))
        trees.append(DraftTree(tuple(parents), tuple(tokens)))
        logits[b, : len(parents)] = rows
        requests.append(RequestProcessors(logit_bias=bias, token_bitmask=mask))
    coins = (rng.integers(0, 2**12, (B, 6)) + 0.37) / 2**12, (rng.integers(0, 2**12, B) + 0.37) / 2**12
    T = torch.tensor(np.resize([0.0, 2.0, 1.0, 0.6], B), dtype=torch.float32)
    batch = to_verify_input(trees, 6)
    singles = [torch.tensor(c, dtype=torch.float32) for c in coins]
    return batch, torch.from_numpy(logits).to(dtype), T, Coins(*singles), Processors.of(requests, 6, V)


def small(requests, rows=None, T=(0.0, 2.0), V=4):
    """Forks of 4 nodes, one a request, zero logits unless given; coins of a half."""
    B = len(requests)
    logits = torch.zeros(B, 4, V) if rows is None else torch.tensor(rows, dtype=torch.float32)
    coins = Coins(torch.full((B, 4), 0.51), torch.full((B,), 0.51))
    processors = Processors.of(requests, 4, V)
    return to_verify_input([FORK] * B), logits, torch.tensor(T[:B]), coins, processors


# ------------------------------------------------------------------------------------ beside `reference`


@pytest.mark.parametrize("V", [1, 31, 32, 33, 4097])
@pytest.mark.parametrize("kinds", ["both", "bias", "bitmask"])
def test_the_walk_is_that_of_the_processed_rows(backend, V, kinds):
    """Vocabularies about a word's end and of several chunks; greedy beside sampled, padded trees."""
    B = 5 if V > 1000 else 8
    batch, logits, T, coins, processors = drawn([V, len(kinds)], B, V)
    if kinds != "both":
        logits = logits.nan_to_num(0.0)
        only = {"bias": "logit_bias", "bitmask": "token_bitmask"}[kinds]
        processors = Processors(**{only: getattr(processors, only)})
    want = assert_as_reference(backend, batch, logits, T, coins, processors)
    assert want.status.tolist() == [0] * B
    assert int(want.accept_token_num.max()) >= 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bias_is_added_in_float32(backend, dtype):
    """Logits of 16 bits and biases that those do not hold: 1 + 2**-12 is above 1, though in neither dtype."""
    batch, logits, T, coins, processors = drawn(3, 8, 1100, dtype)
    assert_as_reference(backend, batch, logits, T, coins, processors)
    tie = [RequestProcessors(logit_bias=[0, 0, 0, 2.0**-12])] * 2
    batch, logits, T, coins, processors = small(tie, T=(0.0, 0.0))
    want = assert_as_reference(backend, batch, logits.add(1).to(dtype), T, coins, processors)
    assert want.tokens == [[3], [3]]


@pytest.mark.parametrize("order", FILTER_ORDERS)
@pytest.mark.parametrize(("V", "dtype"), [(9, torch.float32), (1060, torch.bfloat16)])
def test_filters_cut_the_processed_rows(backend, order, V, dtype):
    """Cuts between values that only the bias makes different, forbidden tokens that would have been kept."""
    B = 6 if V == 9 else 3
    batch, logits, T, coins, processors = drawn([V, len(order)], B, V, dtype)
    rng = np.random.default_rng(V)
    cuts = [
        Cuts(
            top_k=rng.choice([None, 1, 2, 3, V // 2]),
            top_p=float(rng.choice([1.0, 0.9, 0.5])),
            min_p=float(rng.choice([0.0, 0.05, 0.5])),
        )
        for _ in range(B)
    ]
    filters = Filters.of(cuts, V, order)
    assert_as_reference(backend, batch, logits, T, coins, processors, filters)
    if V == 9:  # ties, and the biases alone
        flat = torch.where(logits.isnan(), logits, 0.0)
        assert_as_reference(backend, batch, flat, T, coins, processors, filters)
    else:  # the cut is searched in units of the logits' 16 bits
        masks = Processors(token_bitmask=processors.token_bitmask)
        assert_as_reference(backend, batch, logits, T, coins, masks, filters)


@pytest.mark.parametrize("order", FILTER_ORDERS)
def test_a_cut_falls_between_values_that_16_bits_do_not_tell_apart(backend, order):
    """Equal bf16 logits, biases 2**-12 apart: the three highest are kept, not the three lowest ids."""
    held = [RequestProcessors(logit_bias=np.arange(8) * np.float32(2.0**-12))] * 2
    batch, logits, T, coins, processors = small(held, T=(1.0, 2.0), V=8)
    filters = Filters.of([Cuts(top_k=3), Cuts(top_k=3, top_p=0.3)], 8, order)
    want = assert_as_reference(backend, batch, logits.add(1).bfloat16(), T, coins, processors, filters)
    assert want.tokens == ([[6], [7]] if order == "sequential" else [[6], [6]])


def test_a_cut_is_searched_where_chunks_hold_several_blocks(backend):
    """More than 64 Ki tokens: the only ones allowed lie in the second half of a chunk of 2048."""
    V = 65600
    allowed = np.zeros((1, V), bool)
    allowed[0, [1030, 1040, 1100, 2000]] = True
    rows = torch.zeros(1, 1, V)
    rows[0, 0, [6, 16, 76, 1030, 1040, 1100, 2000]] = torch.tensor([8.0, 9, 9, 1, 4, 3, 2])
    coins = Coins(torch.full((1, 1), 0.5), torch.full((1,), 0.01))
    processors = Processors.of([RequestProcessors(token_bitmask=pack_bitmask(allowed))], 1, V)
    filters = Filters.of([Cuts(top_k=3)], V)
    batch = to_verify_input([DraftTree((-1,), (0,))])
    want = assert_as_reference(backend, batch, rows, torch.ones(1), coins, processors, filters)
    assert want.tokens == [[1040]]  # 1030 is the fourth


def test_each_request_has_its_own_bias_and_each_node_its_own_mask(backend):
    """Request 1's bias is not request 0's; the mask after a node is not its parent's."""
    only = {token: np.eye(4, dtype=bool)[token] for token in range(4)}
    # Root: 1 alone, or 2; behind node 1 token 0; behind node 2 token 3, behind node 3 token 2.
    path = pack_bitmask(np.array([only[1], only[0], only[3], only[2]]))
    other = pack_bitmask(np.array([only[2], only[0], only[3], only[2]]))
    requests = [RequestProcessors(token_bitmask=path), RequestProcessors(token_bitmask=other)]
    want = assert_as_reference(backend, *small(requests))
    assert want.tokens == [[1, 0, 2], [2, 3]]
    biased = [RequestProcessors(logit_bias=[0, 0, 0, 99]), RequestProcessors(logit_bias=[0, 0, 99, 0])]
    want = assert_as_reference(backend, *small(biased))
    assert want.tokens == [[3], [2, 2]]
    want = assert_as_reference(backend, *small(biased[::-1]))
    assert want.tokens == [[2, 2], [3]]


@pytest.mark.parametrize("T", [0.0, 2.0])
def test_a_visited_node_that_allows_nothing_is_empty(backend, T):
    """Its own request alone, and only if the walk comes there: node 1 is visited, node 2 is not."""
    allowed = np.ones((3, 4, 4), bool)
    allowed[0, 1] = allowed[1, 2] = allowed[2, 0] = False
    allowed[:2, 0] = [False, True, False, False]
    requests = [RequestProcessors(token_bitmask=pack_bitmask(each, rest=True)) for each in allowed]
    want = assert_as_reference(backend, *small(requests, T=[T] * 3))
    assert want.status.tolist() == [RowStatus.EMPTY, RowStatus.OK, RowStatus.EMPTY]
    assert want.tokens[1][:1] == [1]


@pytest.mark.parametrize("T", [0.0, 2.0])
@pytest.mark.parametrize(
    ("bias", "row", "status"),
    [
        ([np.nan, 0, 0, 0], [0, 0, 0, 0], RowStatus.NAN),
        ([INF, 0, 0, 0], [0, 0, 0, 0], RowStatus.POS_INF),
        ([INF, 0, 0, 0], [-INF, 0, 0, 0], RowStatus.NAN),
        ([3e38, 0, 0, 0], [3e38, 0, 0, 0], RowStatus.POS_INF),
        ([-INF] * 4, [0, 0, 0, 0], RowStatus.EMPTY),
        ([-INF, -INF, -INF, 0], [9, 9, 9, 0], RowStatus.OK),
        ([-3e38, 0, 0, 0], [-3e38, 0, 0, 0], RowStatus.OK),
    ],
    ids=str,
)
def test_a_bias_makes_rows_unusable_as_logits_do(backend, T, bias, row, status):
    """The request beside it is not touched; what is forbidden may hold anything."""
    requests = [RequestProcessors(logit_bias=bias), RequestProcessors(logit_bias=[0, 1, 0, 0])]
    want = assert_as_reference(backend, *small(requests, [[row] * 4, [[0] * 4] * 4], T=[T, T]))
    assert want.status.tolist() == [status, RowStatus.OK]
    spared = np.array([[False, True, True, True]] * 4)
    requests[0] = RequestProcessors(logit_bias=bias, token_bitmask=pack_bitmask(spared))
    want = assert_as_reference(backend, *small(requests, [[row] * 4, [[0] * 4] * 4], T=[T, T]))
    assert want.status.tolist() == [RowStatus.EMPTY if status == RowStatus.EMPTY else 0, 0]


def test_every_layout_of_bias_and_mask_is_read_alike(backend):
    """Cut out of larger tensors, shared by all requests, transposed."""
    batch, logits, T, coins, processors = drawn(5, 4, 70)
    bias, mask = processors.logit_bias, processors.token_bitmask
    wide = torch.full((4, 77), np.nan)
    wide[:, 3:73] = bias
    padded = torch.zeros(4, 8, 5, dtype=torch.int32)
    padded[:, 1:7, 1:4] = mask
    for layout in (
        Processors(wide[:, 3:73], padded[:, 1:7, 1:4]),
        Processors(bias.T.contiguous().T, mask.permute(2, 0, 1).contiguous().permute(1, 2, 0)),
        Processors(bias[:1].expand(4, 70), mask.transpose(0, 1).contiguous().transpose(0, 1)),
        Processors(torch.zeros(()).expand(4, 70), mask),
    ):
        kept = assert_as_reference(backend, batch, logits, T, coins, layout)
    assert kept.status.tolist() == [0] * 4
    shared = Processors(bias[1:2].expand(4, 70), mask[1, :1].expand(4, 6, 3))
    assert_as_reference(backend, batch, logits.nan_to_num(0.0), T, coins, shared)


@gpu
def test_offsets_are_kept_in_64_bits(backend):
    """K12: the bias of request 2 and the mask of node 2 lie past 2**31 elements, their strides below it."""
    stride, V = 2**30 + 64, 4
    bias = torch.empty(3 * stride, device=DEVICE).as_strided((3, V), (stride, 1))
    mask = torch.empty(3 * stride, dtype=torch.int32, device=DEVICE).as_strided((3, 3, 1), (16, stride, 1))
    bias[:] = torch.tensor([[0.0] * 4, [0.0] * 4, [0.0, 0.0, 0.0, 9.0]])
    mask[:] = -1
    mask[0, 2] = 1 << 3  # behind node 2 of request 0 only token 3
    rows = torch.zeros(3, 3, V, device=DEVICE)
    rows[:2, 0, 2] = 9.0  # to node 2
    batch = to_verify_input([DraftTree((-1, 0, 0), (0, 1, 2))] * 3, device=DEVICE)
    coins = Coins(torch.full((3, 3), 0.5, device=DEVICE), torch.full((3,), 0.1, device=DEVICE))
    T = torch.ones(3, device=DEVICE)
    got = backend.verify(batch, rows, T, coins, 3, processors=Processors(bias, mask))
    assert got.tokens == [[2, 3], [2, 0], [3]]


def test_a_call_without_processors_after_one_with_them(backend):
    """Nothing of a bias or a mask is left for the next call: logits, probabilities."""
    batch, logits, T, coins, processors = drawn(8, 3, 1100)
    plain = logits.nan_to_num(0.0)
    probs = torch.softmax(plain, 2)
    on = [moved(each, DEVICE) for each in (batch, plain, T, coins)]
    for _ in range(2):
        got = backend.verify(*on, 7), backend.verify_probs(on[0], probs.to(DEVICE), on[3], 7)
        want = (
            ReferenceBackend().verify(batch, plain, T, coins, 7),
            ReferenceBackend().verify_probs(batch, probs, coins, 7),
        )
        assert [out.tokens for out in got] == [out.tokens for out in want]
        assert_as_reference(backend, batch, logits, T, coins, processors)


# ------------------------------------------------------------------------------------- what is refused


def test_penalties_are_refused_by_name(backend):
    batch = moved(to_verify_input([FORK]), DEVICE)
    with pytest.raises(BackendUnavailable, match="'triton' takes no penalties; of the processors it takes"):
        verify(batch, torch.zeros(1, 4, 9, device=DEVICE), backend=backend, presence_penalty=1.0)
    penalties = Penalties(torch.ones(1), torch.ones(1), torch.ones(1), torch.zeros(1, 0, dtype=torch.int64))
    logits = torch.zeros(1, 4, 9, device=DEVICE)
    with pytest.raises(AssertionError, match="do not claim"):
        backend.verify(batch, logits, None, None, 4, processors=Processors(penalties=penalties))


@pytest.mark.parametrize(
    ("processors", "message"),
    [
        (Processors(logit_bias=torch.zeros(1, 8)), r"logit_bias.shape=\(1, 8\), but must be \(1, 9\)"),
        (
            Processors(logit_bias=torch.zeros(1, 9, dtype=torch.float64)),
            "logit_bias.dtype=torch.float64, but must be torch.float32",
        ),
        (
            Processors(token_bitmask=torch.zeros(1, 4, 2, dtype=torch.int32)),
            r"token_bitmask.shape=\(1, 4, 2\), but must be \(1, 4, 1\)",
        ),
        (
            Processors(token_bitmask=torch.zeros(1, 4, 1, dtype=torch.int64)),
            "token_bitmask.dtype=torch.int64, but must be torch.int32",
        ),
        (
            Processors(logit_bias=torch.zeros(1, 9, device="meta")),
            "logit_bias.device=meta, but must be that of logits",
        ),
    ],
)
def test_what_does_not_fit_is_named(backend, processors, message):
    held = processors if processors.tensors.popitem()[1].device.type == "meta" else moved(processors, DEVICE)
    coins = Coins(torch.zeros(1, 4, device=DEVICE), torch.zeros(1, device=DEVICE))
    rows, T = torch.zeros(1, 4, 9, device=DEVICE), torch.ones(1, device=DEVICE)
    with pytest.raises(InvalidArgument, match=message):
        backend.verify(moved(to_verify_input([FORK]), DEVICE), rows, T, coins, 4, processors=held)


# -------------------------------------------------------------------------------------------- the laws

interpreted = pytest.mark.skipif(DEVICE == "cuda", reason="ci/gpu.sh runs all laws on the device")


def test_the_laws_about_bias_and_bitmask_apply(backend):
    laws = {law.name for law in BACKEND_LAWS if law.name.startswith("masks") and not why_not(law, backend)}
    assert laws == {"masks", "masks-wide", "masks-empty", "masks-batch", "masks-purity"}
    assert why_not(law_named("processors-filtered"), backend) is None  # without penalties


@interpreted
@pytest.mark.parametrize("law", ["masks-empty", "masks-batch", "masks-purity", "masks-wide"])
def test_a_law_is_kept_on_a_few_cases(backend, law):
    outcome = suite.check_law(law_named(law), backend, "cpu", max_examples=1 if law == "masks-wide" else 2)
    assert outcome.broken is None
    assert outcome.decisions > 0


@interpreted
@pytest.mark.parametrize("T", [0.0, 0.75])
def test_every_boundary_of_a_processed_law(backend, T):
    """The law ``masks`` on one small case: its sweep of coins is long for the interpreter."""
    V = 33
    allowed = np.zeros((2, V), bool)
    allowed[:, [2, 31, 32]] = True
    held = RequestProcessors(
        logit_bias=np.where(np.arange(V) == 32, 1.5, 0.25).astype(np.float32),
        token_bitmask=pack_bitmask(allowed, rest=True),
    )
    rows = np.full((2, V), 3.0, np.float32)
    request = Request(DraftTree((-1, 0), (5, 32)), rows, T, [0.5, 0.5], 0.5, processors=held)
    assert bitmask_words(V) == 2
    assert law_named("masks").run(VerifyCase((request,)), backend) > 0
