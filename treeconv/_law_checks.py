"""What each law does to a backend. Named, explained and listed in :mod:`treeconv.laws`.

Each function takes ``(case, backend, device)``, returns how many decisions it judged, and raises
:class:`Violation`.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv import oracle
from treeconv._drive import (
    as_views,
    bytes_of,
    call,
    decide,
    input_tensors,
    judge_all,
    judge_made,
    measure,
    spread_coins,
    submit,
)
from treeconv._planted_cases import far_below, ties_of_zeros, unusable_roots, without_token_0
from treeconv.case import Request, VerifyCase
from treeconv.filters import Cuts, Filters
from treeconv.judge import Observed, Violation, is_ambiguous, judge, observe, target_rows
from treeconv.processors import RequestProcessors, pack_bitmask
from treeconv.rules import Rule
from treeconv.tree import DraftTree, RowStatus

if TYPE_CHECKING:
    from treeconv.backends.base import Backend
    from treeconv.case import CaseTensors


_MAX_FINAL = 16  # boundaries of a bonus draw that are swept: all, but over wide vocabularies
_LEAST_TEMPERED_GAP = 200  # exp(-200) is 0 in float32


def oracle_agreement(case: VerifyCase, backend: Backend, device: str) -> int:
    """Every request of the case under its own coins, then the first under coins spread over the cube."""
    cap = case.effective_depth_cap
    for index, observed in enumerate(decide(case, backend, device)):
        request = case.requests[index]
        wrong = judge(
            request.tree,
            target_rows(request, case.kind, case.filter_order, case.rule),
            request.accept.tolist(),
            request.final,
            cap,
            observed,
        )
        if wrong:
            raise Violation(index, observed, *wrong)
    spread = spread_coins(32, len(case.requests[0].tree))
    judged = len(case.requests) + judge_all(case, backend, device, spread)
    return judged + judge_made(far_below(case), backend, device, 4)


def critical_coins(case: VerifyCase, backend: Backend, device: str) -> int:
    """Each bucket boundary and its float neighbours on both sides, of every request."""
    judged = 0
    for index, request in enumerate(case.requests):
        rows = target_rows(request, case.kind, case.filter_order, case.rule)
        coins = oracle.sweep_coins(request.tree, rows, case.effective_depth_cap, _MAX_FINAL)
        judged += judge_all(case, backend, device, coins, index, rows)
    return judged


def positive_mass(case: VerifyCase, backend: Backend, device: str) -> int:
    """Coins at 0, just below 1 and exactly 1: every emitted token has mass where it was drawn."""
    edges = [0.0, 2.0**-149, 2.0**-24, 0.5, 1 - 2.0**-24, 1.0]
    judged = 0
    for one in (case.replace_requests(case.requests[:1]), *without_token_0(case)):
        (subject,) = one.requests
        rows = target_rows(subject, case.kind, case.filter_order, case.rule)
        size = len(subject.tree)
        coins = [([accept] * size, final) for accept in edges for final in edges]
        many = one.replace_requests([subject.with_coins(*coin) for coin in coins])
        for (accept, final), observed in zip(coins, decide(many, backend, device), strict=True):
            tossed, nodes = (tuple(accept), final), observed.path
            if observed.broken or observed.status is not RowStatus.OK or not nodes:
                raise Violation(0, observed, "some token of positive mass", coins=tossed, case=one)
            for node, token in zip(nodes, observed.tokens, strict=True):
                if not rows[node].may_have_mass(token):
                    why = f"node {node}: token {token} has no mass there (p = 0)"
                    raise Violation(0, observed, "only tokens with p > 0", why, coins=tossed, case=one)
        judged += len(coins)
    return judged


def outcome_law(case: VerifyCase, backend: Backend, device: str) -> int:
    """Measure the exact outcome law of the backend: one call per box of coins, weighted by its volume."""
    subject = case.requests[0]
    tree, cap = subject.tree, case.effective_depth_cap
    rows = target_rows(subject, case.kind, case.filter_order, case.rule)
    starts: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    for weight, observed in measure(case, subject, backend, device):
        for length in range(1, len(observed.tokens) + 1):
            starts[observed.tokens[:length]] += weight
    # Node i (within the cap) shows the law of the token after its path: P(starts with path + t).
    judged = 0
    reach = {0: Fraction(1)}
    for node in range(len(tree)):
        if node not in reach or tree.depths[node] >= cap:
            continue
        row: Any = rows[node]
        prefix = tuple(tree.token_ids[inner] for inner in tree.path(node)[1:])
        for token in range(case.vocab_size):
            want = reach[node] * row.mass(token)
            got = starts.get((*prefix, token), Fraction(0))
            if got != want:
                text = f"P(text starts with {[*prefix, token]})"
                why = f"the target's own law there, off by {float(got - want):+.3g}"
                raise Violation(0, f"{text} = {got} ({float(got):.6g})", f"{want} ({float(want):.6g})", why)
            judged += 1
        for child in tree.children[node]:
            mass = row.mass(tree.token_ids[child])
            if mass > 0:
                reach[child] = reach[node] * mass
    return judged


def _argmax_walk(request: Request, cap: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Greedy decoding along the tree, said in its own words: follow the lowest-index argmax."""
    tree, path, tokens = request.tree, [0], []
    while True:
        top = int(np.argmax(request.rows[path[-1]]))
        tokens.append(top)
        kids = [kid for kid in tree.children[path[-1]] if tree.token_ids[kid] == top]
        if not kids or len(path) >= cap:
            return tuple(path), tuple(tokens)
        path.append(kids[0])


def greedy(case: VerifyCase, backend: Backend, device: str) -> int:
    """T = 0 is the lowest-index argmax whatever the coins, and tiny T agrees where the argmax is clear."""
    if case.kind == "probs":  # the softmax was taken before: only its limit can be checked
        return 0
    cap = case.effective_depth_cap
    subject = replace(case.requests[0], temperature=0.0)
    coins = [([coin] * len(subject.tree), 1 - coin) for coin in (0.0, 0.5, 1 - 2.0**-24, 1.0)]
    want = _argmax_walk(subject, cap)
    wanted = str(Observed(*want, RowStatus.OK))
    finite = [row[np.isfinite(row)] for row in subject.rows]
    gaps = [float(np.diff(np.sort(row)[-2:])[0]) if row.size > 1 else np.inf for row in finite]
    temperatures = [0.0]
    if min(gaps) > 0 and np.isfinite(min(gaps)):
        temperatures.append(min(1.0, float(np.float32(min(gaps) / _LEAST_TEMPERED_GAP))))
    for temperature in temperatures:
        # A coin of exactly 0 or 1 may find the masses that underflow: the limit is about the rest.
        usable = coins if temperature == 0 else coins[1:3]
        at = replace(subject, temperature=temperature)
        many = case.replace_requests([at.with_coins(*coin) for coin in usable])
        for coin, observed in zip(usable, decide(many, backend, device), strict=True):
            if (observed.path, observed.tokens) != want:
                why = f"temperature {temperature!r}: the lowest-index argmax of each row decides"
                raise Violation(0, observed, wanted, why, coins=(tuple(coin[0]), coin[1]))
    return len(coins) + _ties_of_zeros(case, subject, backend, device)


def _ties_of_zeros(case: VerifyCase, subject: Request, backend: Backend, device: str) -> int:
    tied = ties_of_zeros(case, subject)
    (observed,) = decide(tied, backend, device)
    want = _argmax_walk(tied.requests[0], case.effective_depth_cap)
    if (observed.path, observed.tokens) != want:
        why = f"token 0 has -0.0 and token {tied.vocab_size - 1} 0.0: a tie, which goes to the lowest index"
        raise Violation(0, observed, str(Observed(*want, RowStatus.OK)), why, case=tied)
    return 1


def chain(case: VerifyCase, backend: Backend, device: str) -> int:
    """A tree of width 1 is a linear DFlash block: token i + 1 is kept iff coin_i < p_i(token), in a row."""
    subject = case.requests[0]
    tokens = subject.tree.token_ids
    linear = replace(subject, tree=DraftTree.chain(tokens))
    coins = [(subject.accept.tolist(), subject.final), *spread_coins(7, len(tokens))]
    many = replace(case, requests=tuple(linear.with_coins(*coin) for coin in coins))
    rows = target_rows(subject, case.kind, case.filter_order, case.rule)
    outcomes = decide(replace(many, num_draft_tokens=None, depth_cap=None), backend, device)
    for (accept, final), observed in zip(coins, outcomes, strict=True):
        kept, certain = 0, True
        while kept + 1 < len(tokens):
            ((lower, upper),) = rows[kept].accept_bounds([tokens[kept + 1]])
            certain &= not lower <= accept[kept] < upper
            only = not rows[kept].bonus([tokens[kept + 1]]).may_have_mass
            if not (accept[kept] < upper or only):
                break
            certain &= not rows[kept].residual_may_be_empty([tokens[kept + 1]]) or only
            kept += 1
        if certain and observed.path != tuple(range(kept + 1)):
            want = f"the first {kept} draft tokens kept: path {' -> '.join(map(str, range(kept + 1)))}"
            raise Violation(0, observed, want, coins=(tuple(accept), final))
    return len(coins)


def more_children(case: VerifyCase, backend: Backend, device: str) -> int:
    """Append one leaf behind a node's children: under the same coins nothing accepted is lost."""
    subject = case.requests[0]
    tree = subject.tree
    coins = [(subject.accept.tolist(), subject.final), *spread_coins(3, len(tree))]
    target = target_rows(subject, case.kind, case.filter_order, case.rule)
    judged = 0
    for parent in range(min(len(tree), 4)):
        taken = {tree.token_ids[kid] for kid in tree.children[parent]}
        free = next((token for token in range(case.vocab_size) if token not in taken), None)
        if free is None:
            continue
        grown = DraftTree((*tree.parents, parent), (*tree.token_ids, free))
        rows = np.concatenate([subject.rows, subject.rows[-1:]])
        cap = max(case.effective_depth_cap, grown.depth + 1)
        fewer = [subject.with_coins(*coin) for coin in coins]
        grown_subject = replace(
            subject, tree=grown, rows=rows, accept=np.append(subject.accept, np.float32(0))
        )
        wider = [grown_subject.with_coins([*accept, 0.5], final) for accept, final in coins]
        base = replace(case, depth_cap=cap, num_draft_tokens=len(grown))
        before = decide(replace(base, requests=tuple(fewer)), backend, device)
        after = decide(replace(base, requests=tuple(wider)), backend, device)
        for (accept, final), less, more in zip(coins, before, after, strict=True):
            if is_ambiguous(tree, target, accept, final, cap):
                continue
            if more.path[: len(less.path)] != less.path:
                why = f"a child with token {free} was appended behind node {parent}'s"
                want = f"at least {less.path}, as without it"
                raise Violation(0, f"accepts {more.path} with it", want, why, coins=(tuple(accept), final))
            judged += 1
    return judged


def accepted_length(case: VerifyCase, backend: Backend, device: str) -> int:
    """E[accepted drafts], measured exactly over coin boxes, against the closed form."""
    subject = case.requests[0]
    rows = target_rows(subject, case.kind, case.filter_order, case.rule)
    outcomes = measure(case, subject, backend, device)
    got = sum((weight * (len(observed.path) - 1) for weight, observed in outcomes), Fraction(0))
    want = oracle.expected_accepted_length(subject.tree, rows, case.effective_depth_cap)
    if got != want:
        raise Violation(0, f"{float(got):.9g} accepted drafts expected", f"{float(want):.9g}")
    return len(outcomes)


def batch_invariance(case: VerifyCase, backend: Backend, device: str) -> int:
    """A request decides alike alone, in the batch, permuted and padded; and where its tensors are views."""
    together = decide(case, backend, device)
    views, aligned = together, together
    if backend.traits.takes_views:
        trees = [request.tree for request in case.requests]
        output = submit(as_views(case.tensors(device)), case.kind, backend)
        views = observe(trees, output, case.slots)
        output = submit(as_views(case.tensors(device), aligned=True), case.kind, backend)
        aligned = observe(trees, output, case.slots)
    reverse = decide(case.replace_requests(case.requests[::-1]), backend, device)
    padded = decide(
        replace(case.replace_requests(case.requests), num_draft_tokens=case.slots + 3), backend, device
    )
    for index, request in enumerate(case.requests):
        rows = target_rows(request, case.kind, case.filter_order, case.rule)
        cap = case.effective_depth_cap
        if is_ambiguous(request.tree, rows, request.accept.tolist(), request.final, cap):
            continue
        alone = case.replace_requests([request])
        alone = replace(alone, num_draft_tokens=len(request.tree))
        want = decide(alone, backend, device)[0]
        others = {
            "in the batch": together[index],
            "in the reversed batch": reverse[::-1][index],
            "padded by 3 slots": padded[index],
            "handed over as views, strided": views[index],
            "handed over as views, rows padded to a multiple of 16": aligned[index],
        }
        for where, got in others.items():
            if got != want:
                raise Violation(index, f"{where}: {got}", f"as alone: {want}")
    return 5 * len(case.requests)


def purity(case: VerifyCase, backend: Backend, device: str) -> int:
    """Inputs come back as they were, and another call in between changes nothing."""
    tensors = case.tensors(device)
    named = input_tensors(tensors)
    before = {name: bytes_of(tensor) for name, tensor in named.items()}

    trees = [request.tree for request in case.requests]
    first = observe(trees, submit(tensors, case.kind, backend), case.slots)
    for name, tensor in named.items():
        if bytes_of(tensor) != before[name]:
            raise Violation(0, f"{name} was written to", "inputs unchanged: later readers share them")
    # A call in between that leaves something else in every buffer: stars whose children are all rejected.
    vocab = case.vocab_size
    size = min(max(case.slots, 4), vocab)
    star = DraftTree((-1, *[0] * (size - 1)), tuple(range(size)))
    flat = np.full((size, vocab), 1 / vocab if case.kind == "probs" else 0, np.float32)
    reject = np.full(size, 1 - 2.0**-24, np.float32)
    between = Request(star, flat, 1.0, reject, 0.5, processors=_other_processors(case, size))
    others = replace(case, requests=(between,) * len(trees), num_draft_tokens=None).tensors(device)
    views = [target_rows(request, case.kind, case.filter_order, case.rule) for request in case.requests]
    for other in (others, _with_other_settings(others, backend)):
        submit(other, case.kind, backend)
        again = observe(trees, submit(tensors, case.kind, backend), case.slots)
        for index, (want, got) in enumerate(zip(first, again, strict=True)):
            if want != got:
                raise Violation(index, f"after another call: {got}", f"as at first: {want}")
            # And the right thing both times: what earlier calls left may have spoilt the first one too.
            request = case.requests[index]
            accept, cap = request.accept.tolist(), case.effective_depth_cap
            wrong = judge(request.tree, views[index], accept, request.final, cap, got)
            if wrong:
                raise Violation(index, str(got), *wrong)
    return 2 * len(trees)


def _with_other_settings(tensors: CaseTensors, backend: Backend) -> CaseTensors:
    """The same call with thresholds and a filter, as far as the backend takes them; the next has none."""
    size, _, vocab = tensors.rows.shape
    if backend.traits.takes_thresholds:
        tensors = replace(tensors, rule=Rule(threshold_single=0.5, threshold_acc=0.5))
    if backend.traits.takes_filters:
        one = Filters.of([Cuts(top_k=1)] * size, vocab, device=tensors.rows.device)
        tensors = replace(tensors, filters=one)
    return tensors


def _other_processors(case: VerifyCase, num_nodes: int) -> RequestProcessors:
    """Of the kinds that the case has, with every token committed, but not the values it has."""
    kinds = frozenset().union(*(request.processors.kinds for request in case.requests))
    vocab = case.vocab_size
    everything = np.ones((num_nodes, vocab), np.bool_)
    return RequestProcessors(
        logit_bias=np.arange(vocab, dtype=np.float32) if "bias" in kinds else None,
        token_bitmask=pack_bitmask(everything) if "bitmask" in kinds else None,
        frequency_penalty=1.0 if "penalties" in kinds else 0.0,
        committed_tokens=tuple(range(vocab)) if "penalties" in kinds else (),
    )


def determinism(case: VerifyCase, backend: Backend, device: str) -> int:
    """The same call gives the same bits, five times over."""
    _, first = call(case, backend, device)
    for repeat in range(4):
        _, again = call(case, backend, device)
        for name in ("accept_index", "accept_token_num", "status"):
            if bytes_of(getattr(first, name)) != bytes_of(getattr(again, name)):
                got = getattr(again, name).tolist()
                want = getattr(first, name).tolist()
                raise Violation(0, f"call {repeat + 2}: {name} {got}", f"as in call 1: {want}")
    return 4


def bad_rows(case: VerifyCase, backend: Backend, device: str) -> int:
    """Requests that visit an unusable row say so; the others decide as if it were not there.

    The case as it is, and with a root's row of each kind.
    """
    cases = [case, *unusable_roots(case)]
    for one in cases:
        observed = decide(one, backend, device)
        for index, request in enumerate(one.requests):
            rows = target_rows(request, one.kind, one.filter_order, one.rule)
            accept = request.accept.tolist()
            wrong = judge(request.tree, rows, accept, request.final, one.effective_depth_cap, observed[index])
            if wrong:
                raise Violation(index, observed[index], *wrong, case=one)
    return len(cases) * len(case.requests)


def depth_cap(case: VerifyCase, backend: Backend, device: str) -> int:
    """At every cap from 1 to the depth + 1: at most cap - 1 drafts, the bonus from the full law there."""
    judged = 0
    subject = case.requests[0]
    for cap in range(1, subject.tree.depth + 2):
        capped = replace(case.replace_requests([subject]), depth_cap=cap)
        # All accept coins 0: the walk runs into the cap.
        into_the_cap = [([0.0] * len(subject.tree), coin) for coin in (0.0, 0.3, 0.9)]
        coins = [*spread_coins(8, len(subject.tree)), *into_the_cap]
        try:
            judged += judge_all(capped, backend, device, coins)
        except Violation as violation:  # the picture's case has a cap of its own
            raise replace(violation, why=f"at {cap} accept slots; {violation.why}".rstrip("; ")) from None
    if subject.tree.depth == 0:  # or a cap that is always ignored would be shown on a chain of ten
        return judged
    return judged + _long_chain_into_the_cap(case, backend, device)


def _long_chain_into_the_cap(case: VerifyCase, backend: Backend, device: str) -> int:
    """Caps beyond what a register or a small array holds: a chain of sure drafts, one longer than the cap."""
    subject = case.requests[0]
    cap = 9 + 4 * (int(1 + subject.final * 2**10) % 3)  # 9 at a coin of 0.5, the simplest
    row = subject.rows[0]
    nodes = cap + 1
    chain = replace(
        subject,
        tree=DraftTree.chain([subject.tree.token_ids[0], *[int(row.argmax())] * cap]),
        rows=np.repeat(row[None], nodes, axis=0),
        accept=np.zeros(nodes, np.float32),
    )
    capped = replace(case, requests=(chain,), num_draft_tokens=None, depth_cap=cap)
    try:
        return judge_all(capped, backend, device, [([0.0] * nodes, coin) for coin in (0.0, 0.3, 0.9)])
    except Violation as violation:
        raise replace(violation, case=capped) from None


def autoregressive(case: VerifyCase, backend: Backend, device: str) -> int:
    """Chained steps have the law of plain sampling, whatever is drafted: checked to two steps, exactly.

    The target here is a Markov chain: the row after a token is row ``token % n`` of the case. Each step
    drafts its own tree; the text of two steps, cut to the two tokens every step is long enough to show,
    is compared with the target's own law.
    """
    subject = case.requests[0]
    vocab, size = case.vocab_size, len(subject.tree)

    def law(token: int) -> np.ndarray[Any, Any]:
        row: np.ndarray[Any, Any] = subject.rows[token % size]
        return row

    def step(root: int) -> dict[tuple[int, ...], Fraction]:
        tree = DraftTree(subject.tree.parents, (root, *subject.tree.token_ids[1:]))
        rows = np.stack([law(token) for token in tree.token_ids])
        request = replace(subject, tree=tree, rows=rows)
        pmf: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
        for weight, observed in measure(case, request, backend, device):
            if observed.broken or not all(0 <= token < vocab for token in observed.tokens):
                want = f"token ids in [0, {vocab - 1}], which the next step starts from"
                raise Violation(0, observed, want, case=case.replace_requests([request]))
            pmf[observed.tokens] += weight
        return pmf

    root = subject.tree.token_ids[0] % vocab
    texts: dict[tuple[int, ...], Fraction] = defaultdict(Fraction)
    second: dict[int, dict[tuple[int, ...], Fraction]] = {}
    for emitted, weight in step(root).items():
        if len(emitted) >= 2:
            texts[emitted[:2]] += weight
            continue
        last = emitted[-1]
        if last not in second:
            second[last] = step(last)
        for more, chance in second[last].items():
            texts[(last, more[0])] += weight * chance
    exact = oracle.TargetRows.exact(np.stack([law(token) for token in range(vocab)]))
    for one in range(vocab):
        for two in range(vocab):
            first_row, second_row = exact[root], exact[one]
            want = Fraction(first_row.mass(one)) * Fraction(second_row.mass(two))
            got = texts.get((one, two), Fraction(0))
            if got != want:
                text = f"P(the text goes on with {[one, two]})"
                why = f"off by {float(got - want):+.3g}; two chained verification steps"
                raise Violation(0, f"{text} = {float(got):.6g}", f"{float(want):.6g}", why)
    return vocab * vocab
