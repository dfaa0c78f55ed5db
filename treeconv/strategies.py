"""Hypothesis strategies for trees, target rows, coins and whole verification calls.

They draw :class:`DraftTree` directly, so shapes that no builder emits are covered: chains, stars, combs,
full k-ary trees, best-first and random ones. The rare is drawn often: token 0 and the last token, ties,
zero mass, -inf, huge and tiny temperatures, T = 0 beside T = 2, coins at and beside boundaries.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import strategies as st

from treeconv.case import Request, VerifyCase, round_rows
from treeconv.convert import to_verify_input
from treeconv.errors import InvalidArgument
from treeconv.filters import FILTER_ORDERS
from treeconv.tree import DraftTree, VerifyInput

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hypothesis.strategies import DrawFn, SearchStrategy
    from numpy.typing import NDArray

__all__ = [
    "cases_for",
    "coins",
    "draft_trees",
    "dyadic_rows",
    "filters_for",
    "give_mass_to_drafts",
    "seeded_coins",
    "target_logits",
    "temperatures",
    "tree_batches",
    "verify_cases",
    "verify_inputs",
]

#: shape -> parent of node i in a tree of n nodes, given a drawn integer and the arity k
_SHAPES: dict[str, Callable[[int, int, int], int]] = {
    "chain": lambda i, _pick, _k: i - 1,
    "star": lambda _i, _pick, _k: 0,
    "random": lambda i, pick, _k: pick % i,
    "comb": lambda i, _pick, _k: i - 1 if i % 2 else max(0, i - 2),
    "k-ary": lambda i, _pick, k: (i - 1) // k,
    "best-first": lambda i, pick, _k: i - 1 - min(pick % i, 3) if i > 3 else pick % i,
}

_NICE_LOGITS = (0.0, -0.0, 1.0, -1.0, 2.0, 0.5, -math.inf, 5.0, 10.0, -10.0, 30.0, -80.0, 100.0, 3e4, -3e4)
_USUAL, _SMALL, _TINY, _FAR = (
    (1.0, 0.0, 0.5, 2.0, 0.6, 0.8, 0.01),
    (0.005, 0.002, 1e-3, 1e-4),
    (1e-6, 1e-40),
    (100.0, 2.0**99),
)
_NICE_TEMPERATURES = (*_USUAL, *_SMALL, *_TINY, *_FAR)
_LEAST_SCALED = 1e-7  # below it, the products would be subnormal
_LAST_COIN = float(np.float32(1 - 2**-24))


def _check_bounds(name: str, low: int, high: int, least: int) -> None:
    if low < least:
        raise InvalidArgument(f"min_{name}={low!r}, but must be >= {least}")
    if high < low:
        raise InvalidArgument(f"max_{name}={high!r}, but must be >= min_{name}={low!r}")


def _sizes(least: int, most: int) -> SearchStrategy[int]:
    """Any size, and the upper half more often: three siblings below a path need some room."""
    return st.one_of(st.integers(least, most), st.integers((least + most + 1) // 2, most))


@st.composite
def draft_trees(
    draw: DrawFn,
    *,
    min_nodes: int = 1,
    max_nodes: int = 10,
    vocab_size: int = 8,
    shapes: Sequence[str] = tuple(_SHAPES),
) -> DraftTree:
    """Draft trees over a small vocabulary.

    * ``min_nodes``, ``max_nodes``: size, root included. A node whose children use up the vocabulary takes
      no more, so a tree over one or two tokens may stay smaller than drawn (never below ``min_nodes``:
      then the nodes go deeper instead).
    * ``vocab_size``: tokens are in [0, vocab_size), distinct among siblings.
    * ``shapes``: any of chain, star, random, comb, k-ary, best-first.

    Shrinks towards a root alone with token 0, then towards chains of low tokens.
    """
    _check_bounds("nodes", min_nodes, max_nodes, 1)
    unknown = set(shapes) - set(_SHAPES)
    if unknown or not shapes:
        raise InvalidArgument(f"shapes={list(shapes)!r}, but must be some of {', '.join(_SHAPES)}")
    size = draw(_sizes(min_nodes, max_nodes), label="nodes")
    shape = draw(st.sampled_from(list(shapes)), label="shape")
    arity = draw(st.integers(2, 4), label="arity") if shape == "k-ary" else 2
    tokens = [draw(st.integers(0, vocab_size - 1), label="root token")]
    parents = [-1]
    used: list[set[int]] = [set()]
    for node in range(1, size):
        pick = draw(st.integers(0, node - 1)) if shape in ("random", "best-first") else 0
        parent = _SHAPES[shape](node, pick, arity)
        while len(used[parent]) == vocab_size:  # full: hang it from a later node, the newest is never full
            parent += 1
        free = [token for token in range(vocab_size) if token not in used[parent]]
        token = draw(st.sampled_from(free))
        used[parent].add(token)
        used.append(set())
        parents.append(parent)
        tokens.append(token)
    return DraftTree(tuple(parents), tuple(tokens))


@st.composite
def tree_batches(
    draw: DrawFn, *, max_requests: int = 4, max_nodes: int = 10, vocab_size: int = 8, max_prefix: int = 5
) -> tuple[list[DraftTree], int, list[int]]:
    """``(trees, num_draft_tokens, prefix_lens)`` of a ragged, padded batch.

    Shrinks towards one root without prefix or padding.
    """
    trees = draw(
        st.lists(draft_trees(max_nodes=max_nodes, vocab_size=vocab_size), min_size=1, max_size=max_requests)
    )
    padding = draw(st.integers(0, 3), label="padding")
    prefixes = [draw(st.integers(0, max_prefix), label="prefix") for _ in trees]
    return trees, max(map(len, trees)) + padding, prefixes


@st.composite
def verify_inputs(
    draw: DrawFn, *, max_requests: int = 4, max_nodes: int = 10, vocab_size: int = 8
) -> VerifyInput:
    """Converted batches on the CPU, ragged and padded.

    Shrinks towards one root without prefix or padding.
    """
    batch = tree_batches(max_requests=max_requests, max_nodes=max_nodes, vocab_size=vocab_size)
    return to_verify_input(*draw(batch))


def temperatures(*, min_temperature: float = 0.0, max_temperature: float = 1e30) -> SearchStrategy[float]:
    """Temperatures, each exactly a float32: greedy, tiny, usual, huge.

    * ``min_temperature``, ``max_temperature``: inclusive bounds, >= 0.

    Shrinks towards 1.0 where that is allowed, then to the other usual values.
    """
    if not 0 <= min_temperature <= max_temperature < math.inf:
        raise InvalidArgument(
            f"min_temperature={min_temperature!r}, max_temperature={max_temperature!r}, but must be finite"
            " with 0 <= min <= max"
        )
    nice = [float(np.float32(t)) for t in _NICE_TEMPERATURES]
    nice = [t for t in nice if min_temperature <= t <= max_temperature]
    low, high = math.ceil(max(min_temperature, 2.0**-7) * 128), math.floor(min(max_temperature, 4.0) * 128)
    options: list[SearchStrategy[float]] = [st.sampled_from(nice)] if nice else []
    if low <= high:
        # Multiples of 2**-7: exact in float32, and short to print.
        options.append(st.integers(low, high).map(lambda k: k / 128))
    if not options:
        least, most = np.float32(min_temperature), np.float32(max_temperature)
        least = np.nextafter(least, np.float32(np.inf)) if float(least) < min_temperature else least
        most = np.nextafter(most, np.float32(0)) if float(most) > max_temperature else most
        if least > most:
            raise InvalidArgument(
                f"min_temperature={min_temperature!r}, max_temperature={max_temperature!r}, but must have a"
                " float32 between them"
            )
        options.append(st.floats(float(least), float(most), width=32))
    return st.one_of(options)


@st.composite
def target_logits(
    draw: DrawFn,
    num_nodes: int = 3,
    vocab_size: int = 8,
    *,
    dtype: str = "float32",
    allow_neg_inf: bool = True,
) -> NDArray[np.float32]:
    """``[num_nodes, vocab_size]`` rows of logits, float32 holding exact values of ``dtype``.

    * ``dtype``: "float32", "bfloat16" or "float16".
    * ``allow_neg_inf``: whether tokens without mass appear; one value per row stays finite.

    Ties and shared values are common, and so are rows of which a grammar allows only some tokens. Shrinks
    towards rows of 0.0.
    """
    nice = [x for x in _NICE_LOGITS if allow_neg_inf or x > -math.inf]
    # 1/16 steps up to 16: exact in every dtype; the odd fractions come from the float32 branch.
    # Half of the laws are flat: among logits so far apart that one token has it all, little can go wrong.
    reach = draw(st.sampled_from([16, 2]), label="reach")
    elements: SearchStrategy[float] = st.integers(-16 * reach, 16 * reach).map(lambda k: k / 16)
    if reach > 2:
        elements = st.one_of(st.sampled_from(nice), elements)
    if dtype == "float32":
        elements = st.one_of(elements, st.floats(-reach, reach, width=32, allow_subnormal=False))
    rows = np.array(
        [draw(st.lists(elements, min_size=vocab_size, max_size=vocab_size)) for _ in range(num_nodes)],
        np.float32,
    ).reshape(num_nodes, vocab_size)
    offset = draw(
        st.sampled_from(["none", "none", "none", "none", "signed zeros", "far below"]), label="offset"
    )
    if offset == "signed zeros":  # the top is 0, which -0.0 equals
        tops = rows.max(axis=1, keepdims=True)
        rows -= np.where(tops == -np.inf, 0, tops)
        rows[:, draw(st.integers(0, (vocab_size - 1) // 2))] = -0.0
    elif offset == "far below" and dtype != "float16":
        rows -= np.float32(2**17)  # below any finite stand-in for -inf; in bfloat16 all the same there
    rows = round_rows(rows, dtype)
    for node in range(num_nodes if allow_neg_inf else 0):
        if draw(st.integers(0, 3), label="grammar mask?") == 3:
            rows[node, list(draw(st.sets(st.integers(0, vocab_size - 1))))] = -np.inf
    empty = rows.max(axis=1) == -np.inf
    rows[empty, 0] = 0
    return rows


@st.composite
def dyadic_rows(
    draw: DrawFn, num_nodes: int, vocab_size: int, *, min_bits: int = 1, max_bits: int = 12
) -> NDArray[np.float32]:
    """``[num_nodes, vocab_size]`` probability rows whose masses are multiples of ``2**-max_bits``.

    * ``min_bits``, ``max_bits``: a row's masses are multiples of one power of two between these.

    Every float32 sum of them is exact, so a sampler's decision at a boundary and at its float neighbours
    is known exactly. Small denominators are common, and with them zero masses and ties.

    Shrinks towards all mass on token 0.
    """
    rows = np.zeros((num_nodes, vocab_size), np.float32)
    for node in range(num_nodes):
        bits = draw(
            st.sampled_from([b for b in (1, 2, 4, max_bits) if min_bits <= b <= max_bits]), label="bits"
        )
        whole = 1 << bits
        cuts = sorted(draw(st.lists(st.integers(0, whole), min_size=vocab_size - 1, max_size=vocab_size - 1)))
        # Measured from the top, so that zeros (the simplest cuts) leave all mass on token 0.
        edges = [whole, *reversed(cuts), 0]
        rows[node] = -np.diff(np.array(edges)) / whole
        if draw(st.booleans(), label="shuffle"):
            rows[node] = rows[node][draw(st.permutations(range(vocab_size)))]
    return rows


@st.composite
def coins(draw: DrawFn, *, near: float | Sequence[float] = ()) -> float:
    """A coin: a float32 in [0, 1), now and then exactly 1.

    * ``near``: a boundary or several; their float32 value and both float neighbours are drawn often.

    Shrinks towards 0.5, then 0.
    """
    edges = {0.5, 0.0, _LAST_COIN, 1.0}
    for boundary in np.atleast_1d(np.asarray(near, np.float64)).tolist():
        at = np.float32(boundary)
        edges |= {float(at), float(np.nextafter(at, np.float32(-1))), float(np.nextafter(at, np.float32(2)))}
    usable = [0.5, *sorted(edge for edge in edges - {0.5} if 0 <= edge <= 1)]
    anywhere = st.integers(0, 2**24 - 1).map(lambda k: k / 2**24)
    return draw(st.one_of(st.sampled_from(usable), anywhere))


def seeded_coins(draw: DrawFn, count: int) -> NDArray[np.float32]:
    """Coins for one tree from a single drawn integer: cheap, and 0.5 throughout when shrunk."""
    seed = draw(st.integers(0, 2**16), label="coins")
    if seed == 0:
        return np.full(count, 0.5, np.float32)
    return np.random.default_rng(seed).random(count, dtype=np.float32)


def give_mass_to_drafts(tree: DraftTree, rows: NDArray[np.float32]) -> None:
    """Trade a draft without mass for the likeliest token that is none, so that walks go deep."""
    for node, kids in enumerate(tree.children):
        tokens = [tree.token_ids[kid] for kid in kids]
        for token in tokens:
            others = rows[node].copy()
            others[tokens] = 0
            likeliest = int(others.argmax())
            if rows[node, token] == 0 < others[likeliest]:
                rows[node, [token, likeliest]] = rows[node, [likeliest, token]]


def _edges(values: NDArray[np.float64], step: float | None) -> list[float]:
    """Float32 values at and beside these, within [0, 1]; multiples of ``step`` where one is given."""
    found: set[float] = set()
    for value in values.tolist():
        at = round(value / step) * step if step else float(np.float32(value))
        apart = step or float(np.spacing(np.float32(at))) * 64  # beyond what a law's own rounding blurs
        found |= {at, at - apart, at + apart}
    return sorted(edge for edge in found if 0 <= edge <= 1)


@st.composite
def filters_for(draw: DrawFn, rows: NDArray[np.float32], temperature: float | None = None) -> dict[str, Any]:
    """``top_k``, ``top_p`` and ``min_p`` of a request with these rows, as arguments of :class:`Request`.

    Each is off, at an extreme, or made for one of the rows: so that a cut falls between ties, exactly on a
    running sum of that row's law, or on one token's share of the largest mass, and just beside those.

    * ``temperature``: of rows of logits; None where they are probabilities. Then top-p is a multiple of
      2**-24, so that 1 - top_p is exact too: comparing with either is right.

    Shrinks towards no filters at all.
    """
    kinds = ["", "k", "p", "m", "kp", "kp", "km", "pm", "kpm"]
    which = draw(st.sampled_from(kinds), label="filters")
    if not which:
        return {}
    # The root is always visited; other nodes are not.
    node = draw(st.one_of(st.just(0), st.integers(0, len(rows) - 1)), label="filters made for node")
    row = rows[node].astype(np.float64)
    if temperature is not None:
        with np.errstate(over="ignore", under="ignore"):
            row = np.exp((row - row.max()) / (temperature or 1.0))
    law = np.sort(row)[::-1] / row.sum()
    filters: dict[str, Any] = {}
    left = law  # what the filters other than top-p leave
    if "k" in which:
        support = int((law > 0).sum())
        inside_k = st.integers(min(2, support), max(1, support - 1)) if support > 2 else st.just(1)
        extremes_k = st.sampled_from([1, max(1, law.size - 1), law.size, law.size + 1, support, 2**30])
        filters["top_k"] = draw(st.one_of(inside_k, inside_k, extremes_k), label="top_k")
        left = left[: filters["top_k"]]
    if "m" in which:
        inside_m = st.sampled_from(_edges(law[:64][law[:64] > 0] / law[0], None))
        extremes_m = st.sampled_from([1.0, 0.0, 0.5, 0.25, 0.1, 2.0**-24])
        filters["min_p"] = draw(st.one_of(inside_m, inside_m, extremes_m), label="min_p")
        left = left[left >= filters["min_p"] * law[0]]
    if "p" in which:
        step = 2.0**-24 if temperature is None else None
        sums, total = np.cumsum(left[:64]), left.sum()
        # At and beside a boundary as the joint order sees it, as the sequential one does, and between.
        places = [
            _edges(sums, step),
            _edges(sums / total, step),
            _edges(sums[:-1] * (1 + 1 / total) / 2, step),
        ]
        inside_p = [st.sampled_from([p for p in edges if p > 0]) for edges in places if any(edges)]
        extremes_p = st.sampled_from([1.0, 0.5, 2.0**-24, round(0.9 * 2**24) / 2**24, 1 - 2.0**-24])
        filters["top_p"] = draw(st.one_of(*inside_p, inside_p[-1], extremes_p), label="top_p")
    return filters


@st.composite
def verify_cases(
    draw: DrawFn,
    *,
    kind: str = "logits",
    min_requests: int = 1,
    max_requests: int = 1,
    min_nodes: int = 1,
    max_nodes: int = 8,
    min_vocab: int = 1,
    max_vocab: int = 9,
    max_bits: int = 12,
    shapes: Sequence[str] = tuple(_SHAPES),
    allow_depth_cap: bool = True,
    allow_filters: bool = False,
    rows_dtypes: Sequence[str] = ("float32", "bfloat16", "float16"),
) -> VerifyCase:
    """Whole verification calls: trees, rows, temperatures and coins.

    * ``kind``: "logits" (with temperatures, in several dtypes) or "probs" (dyadic laws).
    * ``min_requests``, ``max_requests``: trees in the batch, each with its own temperature.
    * ``min_nodes``, ``max_nodes``, ``min_vocab``, ``max_vocab``: sizes; V is often no multiple of 4.
    * ``max_bits``: dyadic masses are multiples of ``2**-max_bits``.
    * ``allow_depth_cap``: whether some calls cap the accepted path below the tree's depth.
    * ``allow_filters``: whether most requests carry top-k, top-p or min-p, in one of the two orders.

    Shrinks towards one root over one token, logits 0 or all mass on token 0, T = 1, coins 0.5, no filters.
    """
    _check_bounds("requests", min_requests, max_requests, 1)
    _check_bounds("vocab", min_vocab, max_vocab, 1)
    vocab = draw(_sizes(min_vocab, max_vocab), label="vocab")
    count = draw(st.integers(min_requests, max_requests), label="requests")
    dtype = draw(st.sampled_from(list(rows_dtypes)), label="dtype") if kind == "logits" else "float32"
    requests = []
    for _ in range(count):
        tree = draw(draft_trees(min_nodes=min_nodes, max_nodes=max_nodes, vocab_size=vocab, shapes=shapes))
        if kind == "logits":
            rows = draw(target_logits(len(tree), vocab, dtype=dtype))
            # The usual ones again, so that a batch often holds greedy beside sampled requests.
            usual, small = st.sampled_from([1.0, 0.0, 2.0]), st.sampled_from([0.01, *_SMALL, *_TINY, *_TINY])
            temperature = float(np.float32(draw(st.one_of(usual, temperatures(), small))))
            # Logits a few temperatures apart: else every small temperature is as good as greedy.
            if _LEAST_SCALED <= temperature <= 0.1 and draw(st.integers(0, 2), label="scale?"):
                rows = round_rows(rows * np.float32(temperature), dtype)
        else:
            min_bits = min(2, max_bits) if allow_filters else 1  # a filter wants something to cut
            rows = draw(dyadic_rows(len(tree), vocab, min_bits=min_bits, max_bits=max_bits))
            if draw(st.booleans(), label="likely drafts?"):
                give_mass_to_drafts(tree, rows)
            temperature = 1.0
        filters = draw(filters_for(rows, temperature if kind == "logits" else None)) if allow_filters else {}
        request = Request(tree, rows, temperature, seeded_coins(draw, len(tree)), draw(coins()), **filters)
        requests.append(request)
    cap = None
    if allow_depth_cap and draw(st.integers(0, 3), label="cap?") == 3:
        cap = draw(st.integers(1, 1 + max(request.tree.depth for request in requests)), label="depth cap")
    order = draw(st.sampled_from(FILTER_ORDERS), label="order") if allow_filters else FILTER_ORDERS[0]
    return VerifyCase(tuple(requests), kind, None, cap, dtype, order)  # type: ignore[arg-type]


def cases_for(kind: str) -> SearchStrategy[VerifyCase]:
    """The strategy behind a law's ``cases``.

    * ``kind``: logits, dyadic, dyadic_small, zero_mass, zero_mass_logits, chains, batches;
      drawn (dyadic, few outcomes), drawn_filtered: for verifiers that draw their own coins;
      with top-k, top-p and min-p: filtered (dyadic), filtered_small (one request), filtered_logits,
      filtered_batches; filtered_roots, for which the law makes the filters; by another rule than
      target-only: the keys of ``rule_strategies.RULE_CASES``; with processors: those of
      ``processor_strategies.PROCESSOR_CASES``; with unusable rows: of ``status_strategies.STATUS_CASES``;
      over large vocabularies: of ``wide_strategies.WIDE_CASES``.
    """
    filtered: dict[str, Any] = {"max_nodes": 5, "min_vocab": 2, "allow_filters": True}
    strategies: dict[str, Any] = {
        "logits": lambda: verify_cases(max_requests=2),
        "dyadic": lambda: verify_cases(kind="probs"),
        "dyadic_small": lambda: verify_cases(kind="probs", max_nodes=5, max_vocab=4, allow_depth_cap=False),
        "zero_mass_logits": lambda: verify_cases(kind="probs", max_bits=2).map(VerifyCase.as_logits),
        "zero_mass": lambda: verify_cases(kind="probs", max_bits=2),
        "chains": lambda: verify_cases(shapes=["chain"]),
        "batches": lambda: verify_cases(min_requests=2, max_requests=4, max_nodes=6),
        "drawn": lambda: verify_cases(
            kind="probs",
            max_requests=3,
            max_nodes=6,
            min_vocab=2,
            max_vocab=5,
            max_bits=4,
            allow_depth_cap=False,
        ),
        "drawn_filtered": lambda: st.one_of(
            *(
                verify_cases(kind=kind, max_requests=2, allow_depth_cap=False, **{**filtered, "max_vocab": 6})
                for kind in ("probs", "logits")
            )
        ),
        "filtered": lambda: verify_cases(kind="probs", max_requests=2, **filtered),
        "filtered_roots": lambda: verify_cases(kind="probs", max_nodes=1, min_vocab=2, max_bits=4),
        "filtered_small": lambda: verify_cases(kind="probs", **{**filtered, "max_nodes": 4, "max_vocab": 6}),
        "filtered_logits": lambda: verify_cases(max_requests=2, **filtered),
        "filtered_batches": lambda: verify_cases(min_requests=2, max_requests=4, **filtered),
    }
    if kind not in strategies:
        # Which are made of what is here.
        from treeconv.processor_strategies import PROCESSOR_CASES  # noqa: PLC0415
        from treeconv.rule_strategies import RULE_CASES  # noqa: PLC0415
        from treeconv.status_strategies import STATUS_CASES  # noqa: PLC0415
        from treeconv.wide_strategies import WIDE_CASES  # noqa: PLC0415

        strategies |= RULE_CASES | PROCESSOR_CASES | STATUS_CASES | WIDE_CASES
    if kind not in strategies:
        raise InvalidArgument(f"kind={kind!r}, but must be one of {', '.join(strategies)}")
    strategy: SearchStrategy[VerifyCase] = strategies[kind]()
    return strategy
