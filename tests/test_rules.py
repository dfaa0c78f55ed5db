"""Contract: each acceptance rule by hand, on the oracle and the CPU backends; biased pairings are refused."""

import random
from fractions import Fraction
from itertools import permutations, product

import numpy as np
import pytest
import torch

from treeconv import (
    Coins,
    DraftTree,
    InvalidArgument,
    Request,
    VerifyCase,
    oracle,
    to_verify_input,
    verify,
    verify_probs,
)
from treeconv._drive import decide
from treeconv.backends.base import FunctionBackend
from treeconv.backends.registry import choose_backend, get_backend
from treeconv.errors import BackendUnavailable, LawBroken
from treeconv.judge import judge, target_rows
from treeconv.laws import BACKEND_LAWS, law_named, why_not
from treeconv.oracle import TargetRows
from treeconv.oracle._rules import _Law
from treeconv.processors import RequestProcessors
from treeconv.rules import RULES, Rule, check_pairing
from treeconv.sampling import target_probs

F = Fraction
STAR = DraftTree([-1, 0, 0], [9, 0, 1])
FORK = DraftTree([-1, 0, 0, 1], [9, 2, 0, 1])
BACKENDS = ("reference", "eager")


def random_law(rng, vocab, parts=6):
    """A law in sixths, some of it zero."""
    counts = [0] * vocab
    for _ in range(parts):
        counts[rng.randrange(vocab)] += 1
    return [F(count, parts) for count in counts]


def by_hand(rule, tree, p, q, accept, final, cap):
    """Each rule as its paper words it, in Fractions; written without a look at the oracle."""

    def draw(law, coin):
        target, total = coin * sum(law), F(0)
        for token, mass in enumerate(law):
            total += mass
            if total > target:
                return token
        raise AssertionError

    path, text = [0], []
    while True:
        node = path[-1]
        kids = [kid for kid, parent in enumerate(tree.parents) if parent == node] if len(path) < cap else []
        chosen, law, coin = None, list(p[node]), final
        if rule == "draw_and_match":
            coin = accept[node]
            token = draw(law, coin)
            chosen = next((kid for kid in kids if tree.token_ids[kid] == token), None)
        proposal = list(q[node])
        for kid in kids if rule != "draw_and_match" else []:
            token = tree.token_ids[kid]
            chance = 1 if proposal[token] == 0 else min(F(1), law[token] / proposal[token])
            chance = 0 if law[token] == 0 else chance
            if accept[node if rule == "chain" else kid] < chance:
                chosen = kid
                break
            left = [max(a - b, F(0)) for a, b in zip(law, proposal, strict=True)]
            law = [a / sum(left) for a in left] if sum(left) else law
            rest = [b if other != token else F(0) for other, b in enumerate(proposal)]
            proposal = [b / sum(rest) for b in rest] if sum(rest) else rest
        if chosen is None:
            return tuple(path), (*text, draw(law, coin))
        path.append(chosen)
        text.append(tree.token_ids[chosen])


@pytest.mark.parametrize("cap", [1, 2, None])
@pytest.mark.parametrize(
    ("rule", "tree"),
    [
        ("chain", DraftTree.chain([9, 1, 0])),
        ("recursive", STAR),
        ("recursive", FORK),
        ("draw_and_match", FORK),
        ("draw_and_match", DraftTree([-1], [9])),
    ],
)
def test_the_oracle_walks_as_by_hand(rule, tree, cap):
    rng = random.Random(f"{rule}{len(tree)}{cap}")
    cap = cap or tree.depth + 1
    for _ in range(60):
        p, q = ([random_law(rng, 3) for _ in range(len(tree))] for _ in range(2))
        accept = [F(rng.randrange(997), 997) for _ in range(len(tree))]
        final = F(rng.randrange(997), 997)
        given = {"rule": rule} if rule == "draw_and_match" else {"rule": rule, "draft_probs": q}
        got = oracle.walk(tree, p, Coins(accept, final), cap, **given)
        assert (got.path, got.tokens) == by_hand(rule, tree, p, q, accept, final, cap)


@pytest.mark.parametrize("seed", range(5))
def test_cells_partition_the_coin_space_and_give_their_outcome(seed):
    rng = random.Random(seed)
    for rule, tree in (("chain", DraftTree.chain([9, 1, 0])), ("recursive", FORK), ("draw_and_match", FORK)):
        p, q = ([random_law(rng, 3) for _ in range(len(tree))] for _ in range(2))
        rows = TargetRows.exact(p).under(rule, None if rule == "draw_and_match" else q)
        cells = list(oracle.outcome_cells(tree, rows))
        assert sum(cell.measure for cell in cells) == 1
        for cell in cells:
            for weight in (F(0), F(1, 2), F(999, 1000)):
                accept = [F(1, 2)] * len(tree)
                for slot, (low, high) in cell.accept.items():
                    accept[slot] = low + weight * (high - low)
                final = cell.final[0] + weight * (cell.final[1] - cell.final[0])
                assert by_hand(rule, tree, p, q, accept, final, tree.depth + 1)[0] == cell.path
                assert oracle.walk(tree, rows, Coins(accept, final)).bonus == cell.bonus


def test_siblings_sampled_without_replacement_keep_the_law_and_fixed_ones_do_not():
    p, q = [[F(5, 10), F(3, 10), F(2, 10)]] * 3, [[F(6, 10), F(3, 10), F(1, 10)]] * 3
    law = [F(0)] * 3
    for first, second in permutations(range(3), 2):
        chance = q[0][first] * q[0][second] / (1 - q[0][first])
        rows = TargetRows.exact(p).under("recursive", q)
        for text, share in oracle.outcome_pmf(DraftTree([-1, 0, 0], [9, first, second]), rows).items():
            law[text[0]] += chance * share
    assert law == p[0]
    fixed = oracle.outcome_pmf(STAR, TargetRows.exact(p).under("recursive", q))
    assert sum(share for text, share in fixed.items() if text[0] == 0) == F(5, 6)


def test_critical_coins_are_named_by_slot():
    p, q = [[F(1, 2), F(1, 4), F(1, 4)]] * 3, [[F(3, 4), F(1, 8), F(1, 8)]] * 3
    critical = oracle.critical_coins(STAR, TargetRows.exact(p).under("recursive", q))
    assert set(critical.accept) == {1, 2}  # the children's own slots
    ((lower, upper),) = critical.accept[1]
    assert (upper, lower / upper) == (F(2, 3), F(2**24 - 1, 2**24))  # `coin * .75` may round up to .5
    chain = oracle.critical_coins(DraftTree.chain([9, 0]), TargetRows.exact(p).under("chain", q))
    assert set(chain.accept) == {0}
    match = oracle.critical_coins(STAR, TargetRows.exact(p).under("draw_and_match"))
    assert match.accept[0] == [(F(1, 2), F(1, 2)), (F(3, 4), F(3, 4))]
    assert match.final == {}


def test_a_power_of_two_leaves_no_band():
    p, q = [[F(3, 8), F(5, 8)]] * 2, [[F(1, 2), F(1, 2)]] * 2
    chain = oracle.critical_coins(DraftTree.chain([9, 0]), TargetRows.exact(p).under("chain", q))
    assert chain.accept[0] == [(F(3, 4), F(3, 4))]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("rule", "accept", "final", "tokens"),
    [
        ("recursive", [0.0, 0.83, 0.0], 0.4, [0, 0]),  # .5 / .6 = .8333
        ("recursive", [0.0, 0.84, 0.99], 0.5, [2]),  # relu(p - q) = [0, 0, .1]: 1 has nothing left
        ("draw_and_match", [0.6, 0.3, 0.9], 0.0, [1, 2]),  # node 0 draws 1, node 2 draws 2
        ("draw_and_match", [0.85, 0.3, 0.9], 0.0, [2]),
        ("target_only", [0.6, 0.3, 0.9], 0.0, [1, 0]),
    ],
)
def test_one_decision(rule, accept, final, tokens, backend):
    rows = torch.tensor([[0.5, 0.3, 0.2]]).expand(1, 3, 3)
    q = torch.tensor([[0.6, 0.3, 0.1]]).expand(1, 3, 3)
    more = {"draft_probs": q, "drafting": "sampled"} if rule == "recursive" else {}
    output = verify_probs(
        to_verify_input([STAR]), rows, Coins([accept], [final]), backend=backend, rule=rule, **more
    )
    assert output.tokens == [tokens]


@pytest.mark.parametrize("backend", BACKENDS)
def test_greedy_rows_and_filters_go_with_every_rule(backend):
    """T = 0 is the argmax by every rule; a token that top-k cuts is never accepted, whatever q says."""
    logits = torch.tensor([[[0.0, 2.0, 1.0]] * 3])
    q = torch.full((1, 3, 3), 1 / 3)
    for rule in RULES:
        more = {"draft_probs": q, "drafting": "sampled"} if rule in ("chain", "recursive") else {}
        tree = DraftTree.chain([9, 1, 0]) if rule == "chain" else DraftTree([-1, 0, 0], [9, 0, 1])
        batch = to_verify_input([tree])
        coins = Coins([[0.99, 0.99, 0.99]], [0.99])
        greedy = verify(batch, logits, 0.0, coins, backend=backend, rule=rule, **more)
        assert greedy.tokens == [[1, 1]]
        one = verify(batch, logits, 5.0, coins, backend=backend, rule=rule, top_k=1, **more)
        assert one.tokens == [[1, 1]]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
def test_unusable_rows_are_reported_by_every_rule(rule, backend):
    rows = torch.tensor([[[float("nan"), 1.0]] * 2, [[0.5, 0.5]] * 2])
    more = {"draft_probs": rows[1:].expand(2, 2, 2), "drafting": "sampled"}
    output = verify_probs(
        to_verify_input([DraftTree.chain([9, 0])] * 2),
        rows,
        backend=backend,
        rule=rule,
        **(more if rule in ("chain", "recursive") else {}),
    )
    assert output.status.tolist() == [1, 0]
    assert output.tokens[0] == []
    assert output.tokens[1]


REFUSED = {
    "an unknown rule": ({"rule": "typical"}, "rule='typical', but must be one of target_only"),
    "an unknown drafting": ({"drafting": "greedy"}, "drafting='greedy', but must be 'fixed' or 'sampled'"),
    "no draft law": ({"rule": "recursive", "drafting": "sampled"}, "draft_probs=None, but must be [B, N, V]"),
    "a fixed draft": ({"rule": "recursive", "draft_probs": 1}, ".8333 instead of .5"),
    "siblings in a chain": (
        {"rule": "chain", "draft_probs": 1, "drafting": "sampled"},
        "request 0, node 1 has a sibling",
    ),
    "a draft law that is never read": ({"draft_probs": 1}, "draft_probs was given, but must be None"),
    "a threshold of 0": ({"threshold_acc": 0.0}, "threshold_acc=0.0, but must be in (0, 1]"),
    "a threshold above 1": ({"threshold_single": 1.5}, "threshold_single=1.5, but must be in [0, 1]"),
    "a threshold that is no number": ({"threshold_acc": None}, "threshold_acc=None, but must be"),
    "a threshold that is True": ({"threshold_acc": True}, "threshold_acc=True, but must be in (0, 1]"),
    "a threshold that is text": ({"threshold_single": "1"}, "threshold_single='1', but must be in [0, 1]"),
    "a threshold each": (
        {"threshold_acc": np.array([0.5, 0.5])},
        "threshold_acc=array([0.5, 0.5]), but must",
    ),
    "one as a tensor": (
        {"threshold_acc": torch.tensor([0.5, 0.5])},
        "threshold_acc=tensor([0.5000, 0.5000])",
    ),
    "an array of rules": ({"rule": np.array(["chain"] * 2)}, "rule=array("),
    "an array of draftings": ({"drafting": np.array(["fixed"] * 2)}, "drafting=array("),
    "an array that is never read": (
        {"draft_probs": np.full((1, 3, 3), 1 / 3)},
        "draft_probs was given, but must be None",
    ),
    "a threshold elsewhere": (
        {"rule": "draw_and_match", "threshold_acc": 0.5},
        "thresholds are target_only's",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    settings, message = REFUSED[name]
    if isinstance(settings.get("draft_probs"), int):
        settings = settings | {"draft_probs": torch.full((1, 3, 3), 1 / 3)}
    with pytest.raises(InvalidArgument) as caught:
        verify_probs(to_verify_input([STAR]), torch.full((1, 3, 3), 1 / 3), backend="reference", **settings)
    assert message in str(caught.value)


@pytest.mark.parametrize("half", [0.5, np.float32(0.5), np.array(0.5), torch.tensor(0.5), Fraction(1, 2)])
def test_any_number_is_a_threshold(half):
    rule = Rule(threshold_single=half, threshold_acc=half)
    assert rule == Rule(threshold_single=0.5, threshold_acc=0.5)
    assert type(rule.threshold_acc) is float
    batch, rows = to_verify_input([STAR]), torch.full((1, 3, 3), 1 / 3)
    coins = Coins(torch.full((1, 3), 0.5), torch.full((1,), 0.5))
    accepted = [verify_probs(batch, rows, coins, threshold_acc=each).tokens for each in (half, 0.5)]
    assert accepted[0] == accepted[1]


def drafted_without_mass(rule, law, tree=None):
    tree = tree or (DraftTree.chain([9, 1, 2]) if rule == "chain" else FORK)
    laws = torch.full((2, len(tree), 3), 1 / 3)
    laws[1, 0] = torch.tensor(law)
    rows = torch.full(laws.shape, 1 / 3)
    batch = to_verify_input([tree, tree])
    more = {"rule": rule, "draft_probs": laws, "drafting": "sampled"}
    for made in (verify_probs(batch, rows, **more), verify(batch, rows, **more)):
        assert made.status.tolist() == [0, 0]


@pytest.mark.parametrize(
    ("rule", "token", "node"), [("chain", 1, 1), ("recursive", 2, 1), ("recursive", 0, 2)]
)
def test_a_draft_that_its_law_has_at_zero_was_not_sampled(rule, token, node):
    law = [0.5, 0.5, 0.5]
    law[token] = 0.0
    why = rf"draft_probs\[1, 0, {token}\]=0.0, but must be > 0: request 1, node {node} drafts token {token}"
    for without in (law, [0.0] * 3):
        if without is law or node == 1:
            with pytest.raises(InvalidArgument, match=why):
                drafted_without_mass(rule, without)
    with pytest.raises(InvalidArgument, match=why.replace("=0.0", "=-0.0")):
        drafted_without_mass(rule, [-0.0 if mass == 0 else mass for mass in law])


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("rule", ["chain", "recursive"])
def test_a_law_that_broke_costs_no_text(rule, broken):
    drafted_without_mass(rule, [broken] * 3)  # B65
    drafted_without_mass(rule, [broken, 0.0, 0.0])
    drafted_without_mass(rule, [broken, 0.25, 0.25])


def test_laws_that_nothing_was_drafted_from_are_not_looked_at():
    """Leaves', and those of padded slots."""
    chain = DraftTree.chain([9, 1])
    batch = to_verify_input([chain, chain], num_draft_tokens=3)
    laws = torch.zeros(2, 3, 3)
    laws[:, 0, 1] = 1
    more = {"rule": "chain", "draft_probs": laws, "drafting": "sampled"}
    assert verify_probs(batch, torch.full((2, 3, 3), 1 / 3), **more).status.tolist() == [0, 0]


def test_which_drafts_each_rule_is_right_for():
    for rule, drafting in product(RULES, ("fixed", "sampled")):
        if rule in ("chain", "recursive") and drafting == "fixed":
            with pytest.raises(InvalidArgument, match="drafting='fixed'"):
                check_pairing(rule, drafting)
        else:
            check_pairing(rule, drafting)


def test_a_backend_is_handed_a_rule_only_where_it_claims_it():
    def plain(batch, target_probs, coins, depth_cap):
        return get_backend("reference").verify_probs(batch, target_probs, coins, depth_cap)

    def ruled(batch, target_probs, coins, depth_cap, rule):
        seen.append(rule)
        return get_backend("reference").verify_probs(batch, target_probs, coins, depth_cap, rule=rule)

    ruled.rules = ("target_only", "draw_and_match")
    seen = []
    batch, rows = to_verify_input([STAR]), torch.full((1, 3, 3), 1 / 3)
    without, claiming = FunctionBackend(plain, "plain"), FunctionBackend(ruled, "ruled")
    assert without.traits.rules == ("target_only",)
    with pytest.raises(BackendUnavailable, match="has no rule 'draw_and_match', but target_only"):
        verify_probs(batch, rows, backend=without, rule="draw_and_match")
    verify_probs(batch, rows, backend=claiming)
    verify_probs(batch, rows, backend=claiming, rule="draw_and_match")
    assert seen == [None, Rule("draw_and_match")]
    with pytest.raises(BackendUnavailable, match="no acceptance thresholds below 1"):
        verify_probs(batch, rows, backend=claiming, threshold_acc=0.5)
    why = {law.name: why_not(law, claiming) for law in BACKEND_LAWS}
    assert why["chain-rule"] == "the backend does not claim the rule chain"
    assert why["match-rule"] is None


def test_auto_finds_a_backend_that_has_the_rule():
    for rule in RULES:
        assert rule in choose_backend(torch.device("cuda"), rule=rule).traits.rules
    assert choose_backend(torch.device("cuda"), takes_thresholds=True).traits.takes_thresholds


def test_a_forced_pairing_breaks_the_outcome_law_and_says_so():
    """The law that is about fixed drafts sees the bias; its message names rule, q and both numbers."""
    rows, q = np.array([[0.5, 0.25, 0.25]] * 3, np.float32), np.array([[0.625, 0.25, 0.125]] * 3, np.float32)
    request = Request(STAR, rows, 1.0, [0.5] * 3, 0.5, draft_probs=q)
    case = VerifyCase((request,), kind="probs", rule="recursive")
    with pytest.raises(LawBroken) as caught:
        law_named("outcome-law").run(case, get_backend("reference"))
    text = str(caught.value)
    assert "rule recursive" in text
    assert "q = {0: 0.625, 1: 0.25, 2: 0.125}" in text
    assert "P(text starts with [0]) = 4/5 (0.8)" in text
    assert "1/2 (0.5)" in text


def test_a_case_needs_what_its_rule_reads():
    rows = np.full((3, 3), 1 / 3, np.float32)
    bare = Request(STAR, rows, 1.0, [0.5] * 3, 0.5)
    full = Request(STAR, rows, 1.0, [0.5] * 3, 0.5, draft_probs=rows)
    assert bare != full
    for requests, rule, message in (
        ((bare,), "recursive", r"requests\[0\].draft_probs must be given"),
        ((full,), "target_only", r"requests\[0\].draft_probs must be None"),
        ((full,), "chain", "has a node with two children"),
        ((bare,), "typical", "rule='typical'"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            VerifyCase(requests, kind="probs", rule=rule)
    with pytest.raises(InvalidArgument, match=r"draft_probs.shape=\(2, 3\), but must be \(3, 3\)"):
        Request(STAR, rows, 1.0, [0.5] * 3, 0.5, draft_probs=rows[:2])


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_threshold_of_0_accepts_the_eldest_child_of_positive_mass(backend):
    rows = torch.tensor([0.25, 0.25, 0.5]).expand(1, 4, 3)
    output = verify_probs(
        to_verify_input([FORK]),
        rows,
        Coins([[0.99] * 4], [0.0]),
        backend=backend,
        threshold_single=0.0,
        threshold_acc=1e-9,
    )
    assert output.accept_index.tolist() == [[0, 1, 3]]


def test_laws_about_filters_want_a_backend_that_takes_them():
    without = FunctionBackend(lambda batch, target_probs, coins, depth_cap, rule: None, "ruled")  # noqa: ARG005
    skipped = {law.name for law in BACKEND_LAWS if "takes no filters" in (why_not(law, without) or "")}
    assert {"chain-rule-filters", "recursive-rule-filters", "match-rule-filters"} <= skipped


@pytest.mark.parametrize("name", ["reference", "eager"])
@pytest.mark.parametrize("rule", ["chain", "draw_and_match"])
def test_a_greedy_request_follows_the_processed_row_by_every_rule(rule, name):
    """B82 by another rule: at temperature 0, too, the bias decides who is the largest."""
    tree = DraftTree.chain([0, 1])
    rows = np.zeros((2, 3), np.float32)
    rows[:, 2] = 1.0  # token 2 is the largest before the bias, token 1 after it
    processors = RequestProcessors(logit_bias=np.array([0.0, 4.0, 0.0], np.float32))
    q = None if rule == "draw_and_match" else np.eye(3, dtype=np.float32)[[1, 1]]
    request = Request(tree, rows, 0.0, [0.5, 0.5], 0.5, processors=processors, draft_probs=q)
    case = VerifyCase((request,), rule=rule)
    (observed,) = decide(case, get_backend(name), "cpu")
    assert observed.tokens == (1, 1)
    assert judge(tree, target_rows(request, "logits", rule=rule), [0.5, 0.5], 0.5, 2, observed) is None


def test_a_tail_that_a_large_mass_dwarfs_is_not_lost_from_the_band():
    """p and q all but equal, nearly all on token 2: what is left there is rounding, the rest 1e-27 of it."""
    logits = np.array([0, 0, 100, 0, 0], np.float32)
    tree = DraftTree.chain([0, 0])
    for noise in (2.0**-12, 0.25):
        q = target_probs(logits + np.float32(noise) * np.cos(np.arange(5, dtype=np.float32)), 2.0)
        rows = TargetRows.from_logits([logits] * 2, 2.0).under("chain", [q] * 2)
        for accept, final in oracle.sweep_coins(tree, rows):
            walk = oracle.canonical_walk(tree, rows, accept, final, 2)
            stops = oracle.admissible_stops(tree, rows, accept, 2)
            assert any(stop.path == walk.path and stop.admits(walk.tokens[-1], final) for stop in stops)


def test_a_boundary_beyond_float32_is_swept_in_silence():
    """p / q = 5e38: every coin accepts, and no cast may warn of it (warnings are errors here)."""
    rows = TargetRows.from_probs([[0.5, 0.5]] * 2).under("chain", [[1e-39, 1.0]] * 2)
    coins = oracle.sweep_coins(DraftTree.chain([0, 0]), rows)
    assert {accept[0] for accept, _ in coins} >= {0.0, 1.0}


def test_bands_stay_in_order_where_little_is_left_of_a_draft_law():
    """What is left beside a token of nearly everything: who divides by 1 - q there may get anything.

    The band of the law after that was turned over, and a right sampler flagged.
    """
    q = np.array([2.0**-32, 2.0**-29, 1.0, 0.0, 0.0])
    law = _Law(q, q, q, is_exact=True)
    for token in (2, 4, 0):
        law = law.without(token)
        assert (law.low >= 0).all()
        assert (law.low <= law.best).all()
        assert (law.best <= law.high).all()
        assert np.isfinite(law.high).all()
    even = np.array([0.25, 0.25, 0.5])
    left = _Law(even, even, even, is_exact=True).without(2)
    assert np.allclose(left.low, left.high, rtol=1e-5)
