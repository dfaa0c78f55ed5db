"""What ``fresh-coins`` does to a backend that draws coins, or to our front door: is any coin another one?

Trees are made whose text shows which part of [0, 1) a coin fell into. Then two things are asked.

* Of many streams: do two coins, known by name, agree in more of them than chance allows (a binomial tail)?
* Of many requests: how many show what an earlier one showed? A value of V that n drew before comes again
  with a chance of at most n / V, whatever they were; so ``r`` repeats among ``n`` have a chance of at most
  ``mu**r / r!`` with ``mu = n (n - 1) / 2 V`` (the union bound over which r). No pair need be named.

Both are also asked of mirrored coins, u and 1 - u. Only coins that one text may use, or texts of different
seeds, are ever compared: a sampler may key its coins by absolute position, for a step that accepts k drafts
moves the prefix by k + 1 (:func:`_may_meet`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv._rng_checks import FALSE_FAIL_RATE, doors_of, draw, generator_of, handed, seeds_of
from treeconv.case import Request, VerifyCase
from treeconv.judge import Violation
from treeconv.statistical_testing import binomial_p_value, split_rate
from treeconv.tree import DraftTree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from treeconv.backends.base import Backend

_WIDTH = 16  # outcomes of a node's coin
_FINE = 256  # outcomes of a final coin, where they are counted
_FINEST = 4096  # where it is all that a tree shows
_STREAMS = 16  # pairs of which most must not agree
_FAR = (8, 16, 20)  # log2 of how many steps on nothing may have come round
_CALLS, _REQUESTS = 4, 64  # from one generator
_SIDE, _PICKED = 8, 9  # of a grid of seeds and steps
_FANS = 5  # depths shown at each of its points
_RUN, _RUNS = 5, 128  # steps that accept nothing, one after the other

# What a careless sum, product, remainder or cut takes for nothing, or for a step or seed.
_STRIDES = (
    *(7, 8, 10, 16, 31, 32, 33, 37, 64, 100, 101, 127, 128, 255, 256, 257, 512, 997, 1000, 1024, 2048),
    *(4096, 8192, 10_000, 2**15, 65_535, 65_536, 65_537, 100_000, 2**18, 2**20, 1_000_003, 1_000_000, 2**23),
)
_SEED_STRIDES = (*_STRIDES, 1, 2, 3, 4, 8000, 80, 2**24, 2**31, 2**32, 2**40, 2**48, 2**53, 2**56, 2**63)


def fresh_coins(case: VerifyCase, backend: Backend, device: str) -> int:
    """Coins of other seeds, steps, calls and requests, and of one text, do not repeat one another."""
    words = [int(word) for word in seeds_of(case, 6)]
    doors = doors_of(backend)
    door = doors[words[0] % len(doors)]
    asked = _Asked(backend, device, door, words, len(case.requests[0].tree) % 4)
    judged = _streams_differ(asked)
    if door == "generator":
        return judged + _requests_differ(asked)
    turn = words[5] % 3
    return judged + (_texts_differ(asked) if turn == 2 else _points_differ(asked, of_steps=turn == 0))


@dataclass(frozen=True)
class _Asked:
    """Whom the law asks, and what the case fixes; ``rate`` is what each of the two questions may err by."""

    backend: Backend
    device: str
    door: str
    words: list[int]
    padding: int
    share: int = 1

    @property
    def rate(self) -> float:
        return split_rate(FALSE_FAIL_RATE, 2 * self.share)

    def numbers(self, count: int, of: int) -> list[int]:
        """More numbers that the case fixes."""
        state = np.random.SeedSequence([*self.words, of]).generate_state(count, np.uint64)
        return [int(word) for word in state]


# --- trees that show coins ----------------------------------------------------------------------------


def _revealing(depth: int, deepest: int, outcomes: int) -> Request:
    """A tree whose text shows one node's coin and the final coin: a chain of certain drafts, then a fan.

    All masses are 1, 1/16 or 1/outcomes, so that the logits 0 and -inf give the same law exactly. Drafts
    that cannot be come last, so that trees of every depth have as many nodes.
    """
    parents = [-1, *range(depth), *[depth] * _WIDTH, *[0] * (deepest - depth)]
    tokens = [0, *[0] * depth, *range(_WIDTH), *range(_WIDTH, _WIDTH + deepest - depth)]
    rows = np.zeros((len(parents), max(outcomes, _WIDTH + deepest)), np.float32)
    rows[:depth, 0] = 1
    rows[depth, :_WIDTH] = 1 / _WIDTH
    rows[depth + 1 :, :outcomes] = 1 / outcomes
    return Request(DraftTree(tuple(parents), tuple(tokens)), rows, 1.0, np.full(len(parents), 0.5, "f4"), 0.5)


def _calls(asked: _Asked, depths: Sequence[int], outcomes: int) -> VerifyCase:
    requests = tuple(_revealing(depth, max(depths), outcomes) for depth in depths)
    # As padded as the case is.
    slots = len(requests[0].tree) + asked.padding
    return handed(VerifyCase(requests, "probs", slots), asked.backend)


def _shown(
    asked: _Asked,
    calls: VerifyCase,
    depths: Sequence[int],
    outcomes: int,
    positions: Sequence[int],
    **drawn_from: Any,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """``[len(depths), len(positions)]``: nodes' coins, and final coins, as the texts show them."""
    size = len(depths)
    places = [position for position in positions for _ in depths]
    if "seeds" in drawn_from:
        drawn_from["seeds"] = [seed for seed in drawn_from["seeds"] for _ in depths]
    observed = draw(calls, asked.backend, asked.device, places, **drawn_from)
    coins = np.empty((2, size, len(positions)), np.int64)
    for which, depth in enumerate(depths):
        for place, one in enumerate(observed[which::size]):
            text = one.tokens
            is_shown = len(text) == depth + 2 and 0 <= text[-2] < _WIDTH and 0 <= text[-1] < outcomes
            if not is_shown:
                raise Violation(which, one, f"{depth} certain drafts, a child of node {depth}, a bonus")
            coins[:, which, place] = text[-2:]
    return coins[0], coins[1]


# --- two named coins in many streams ------------------------------------------------------------------


@dataclass(frozen=True)
class _Coin:
    """One coin by name, in each stream: which of 16 outcomes it drew.

    ``seed`` tells streams of one kind from another; ``step`` is the prefix length. It is a coin of the
    node at ``depth``, or the final coin behind a child of that node.
    """

    label: str
    seed: int
    step: int
    depth: int
    is_final: bool
    outcomes: NDArray[np.int64]

    def __str__(self) -> str:
        which = (
            f"the final coin at depth {self.depth + 1}" if self.is_final else f"the coin of node {self.depth}"
        )
        return f"{which} ({self.label})"


def _may_meet(one: _Coin, other: _Coin) -> bool:
    """Whether both may be used: in one text, or in the texts of different seeds.

    A coin that decides the token at position s + d is followed by the step at s + d + 1, or a later one.
    """
    if one.seed != other.seed:
        return True
    first, then = sorted((one, other), key=lambda coin: (coin.step, coin.is_final))
    if first.step < then.step:
        return first.step + first.depth + 1 + first.is_final <= then.step
    if first.is_final:
        return False  # one text, one final coin a step
    return first.depth <= then.depth if then.is_final else first.depth != then.depth


@cache
def _binomial(count: int, trials: int) -> float:
    return binomial_p_value(count, trials, 1 / _WIDTH)


def _streams_differ(asked: _Asked) -> int:
    """Nodes of one text, a step and a later one, a seed and another, a request and the next: 16 streams."""
    step, near, deep, far, other = asked.words[:5]
    # Up to a chain of 64 nodes now and then, so that coins that come round after any number are seen.
    some = deep // 4
    deepest = (4 + some % 14, 10 + some % 54, (8, 16)[some % 2], 32)[deep % 4]
    depths = (0, 1, 2 + near // 16 % min(8, deepest - 2), deepest)
    calls = _calls(asked, depths, _WIDTH)
    step %= 2**24
    coins: list[list[_Coin]] = []

    def show(label: str, seed: int, step: int, **drawn_from: Any) -> None:
        both = _shown(asked, calls, depths, _WIDTH, [step] * _STREAMS, **drawn_from)
        coins.append(
            [
                _Coin(label, seed, step, depth, bool(final), both[final][which])
                for which, depth in enumerate(depths)
                for final in (0, 1)
            ]
        )

    if asked.door == "generator":
        one, two = (generator_of(seed, asked.device) for seed in asked.numbers(2, 0))
        after = step + deepest + 2
        show("a call", 0, step, generator=one)
        show("the next call", 0, after, generator=one)
        show("a call from a generator of another seed", 1, step, generator=two)
        pairs = [(0, 1), (0, 2)]
    else:
        seeds = asked.numbers(_STREAMS, 0)
        # As many steps on as there are slots: where one step's coins are laid behind another's.
        further_on = (*(2**bits for bits in _FAR), calls.slots, calls.slots + 1)
        some_way, far_away = 1 + near % 9, further_on[far % len(further_on)]
        stride = (1, 2**32, _SEED_STRIDES[other // 3 % len(_SEED_STRIDES)])[other % 3]
        points = [
            ("a seed and step", 0, 0),
            ("the next step", 0, 1),
            (f"{some_way + 1} steps on", 0, some_way + 1),
            (f"{far_away} steps on", 0, far_away),
            (f"the seed plus {stride}", stride, 0),
        ]
        for label, seed, further in points:
            show(label, seed, step + further, seeds=[(base + seed) % 2**64 for base in seeds])
        pairs = [*((0, then) for then in range(1, len(points))), (1, 4)]
    tests = [(a, b) for left, right in pairs for a, b in product(coins[left], coins[right])]
    tests += [both for point in coins for both in combinations(point, 2)]
    compared: list[_Compared] = [(a, b, a.outcomes, b.outcomes) for a, b in tests if _may_meet(a, b)]
    for a, b in product(coins[0], repeat=2):
        compared.append((a, replace(b, label="the next request"), a.outcomes[:-1], b.outcomes[1:]))
    _compare(compared, asked, calls)
    return len(compared)


_Compared = tuple[
    object, object, "NDArray[np.int64]", "NDArray[np.int64]"
]  # two names, two arrays of one length


def _compare(tests: Sequence[_Compared], asked: _Asked, calls: VerifyCase) -> None:
    """Neither equal nor mirrored more often than all together allow to independent coins."""
    rate = split_rate(asked.rate, 2 * len(tests))
    for one, other, left, right in tests:
        for what, count in (
            ("agree", int(np.count_nonzero(left == right))),
            ("mirror each other", int(np.count_nonzero(left + right == _WIDTH - 1))),
        ):
            if _binomial(count, len(left)) <= rate:
                got = f"{count} of {len(left)} pairs {what}: {one} and {other}, drawn from {asked.door}"
                why = f"revealed to one of {_WIDTH}: {left[:16].tolist()} and {right[:16].tolist()}"
                want = f"about {len(left) / _WIDTH:.0f}, as independent coins do"
                raise Violation(0, got, want, why, case=calls.replace_requests(calls.requests[:1]))


# --- any coins of many requests -----------------------------------------------------------------------


@dataclass(frozen=True)
class _Repeats:
    """What many requests showed: names, and ``[requests, coins]`` values below ``outcomes [coins]``."""

    what: str
    names: Sequence[str]
    values: NDArray[np.int64]
    outcomes: tuple[int, ...]

    def judge(self, rate: float, door: str, calls: VerifyCase) -> None:
        """No more of them show what one before showed, or its mirror, than ``rate`` allows."""
        sizes = np.array(self.outcomes, np.int64)
        for what, shown in (("what", self.values), ("the mirrored coins (u and 1 - u) of what", None)):
            earlier: dict[tuple[int, ...], int] = {}
            again = []
            for place, row in enumerate(self.values):
                before = row if shown is not None else sizes - 1 - row
                if tuple(before.tolist()) in earlier:
                    again.append((earlier[tuple(before.tolist())], place))
                earlier.setdefault(tuple(row.tolist()), place)
            number = len(self.names)
            mean = number * (number - 1) / 2 / math.prod(self.outcomes)
            if again and _log_chance(len(again), mean) <= math.log(rate / 2):
                first, then = again[0]
                got = (
                    f"{len(again)} of {number} {self.what} show {what} an earlier one showed:"
                    f" {self.names[then]} and {self.names[first]}, and more, drawn from {door}"
                )
                why = (
                    f"its coins, each as one of {list(dict.fromkeys(self.outcomes))} parts of [0, 1):"
                    f" {self.values[then].tolist()} and {self.values[first].tolist()}"
                )
                raise Violation(
                    0,
                    got,
                    f"about {mean:.2g} by chance",
                    why,
                    case=calls.replace_requests(calls.requests[:1]),
                )


def _log_chance(repeats: int, mean: float) -> float:
    """The log of a bound of the chance of so many repeats: the module's docstring says why."""
    return repeats * math.log(mean) - math.lgamma(repeats + 1)


def _requests_differ(asked: _Asked) -> int:
    """64 requests in each of four calls from one generator: any two, at any distance, in any two calls."""
    depth = asked.words[3] % 4
    calls = _calls(asked, [depth], _FINE)
    generator = generator_of(asked.numbers(1, 1)[0], asked.device)
    step = asked.words[0] % 2**24
    drawn = [
        _shown(asked, calls, [depth], _FINE, [step + turn * (depth + 2)] * _REQUESTS, generator=generator)
        for turn in range(_CALLS)
    ]
    nodes = np.stack([coins[0] for coins, _ in drawn], axis=1)  # [requests, calls]
    finals = np.stack([coins[0] for _, coins in drawn], axis=1)
    requests = [f"request {b}" for b in range(_REQUESTS)]
    steps = [f"request {b} of call {turn}" for turn in range(_CALLS) for b in range(_REQUESTS)]
    texts = np.stack([nodes.T.ravel(), finals.T.ravel()], axis=1)
    tests = [
        _Repeats(
            f"requests over {_CALLS} calls",
            requests,
            np.concatenate([nodes, finals], axis=1),
            (*[_WIDTH] * _CALLS, *[_FINE] * _CALLS),
        ),
        _Repeats(f"requests' nodes over {_CALLS} calls", requests, nodes, (_WIDTH,) * _CALLS),
        _Repeats(f"requests' final coins over {_CALLS} calls", requests, finals, (_FINE,) * _CALLS),
        _Repeats("requests of all calls", steps, texts, (_WIDTH, _FINE)),
    ]
    for test in tests:
        test.judge(split_rate(asked.rate, 2 * len(tests)), asked.door, calls)
    # And one by one, at each distance: coins of two kinds, which no repeated request shows.
    named = [(f"call {turn}, the coin of node {depth}", nodes[:, turn]) for turn in range(_CALLS)]
    named += [
        (f"call {turn}, the final coin", finals[:, turn] // (_FINE // _WIDTH)) for turn in range(_CALLS)
    ]
    compared: list[_Compared] = []
    for (one, left), (other, right) in product(named, repeat=2):
        for distance in range(_REQUESTS // 2 + 1):
            if one != other or distance:
                names = f"{one} of a request", f"{other} of the request {distance} behind it"
                compared.append((*names, left[: _REQUESTS - distance], right[distance:]))
    # Half of it for each kind of question.
    _compare(compared, replace(asked, share=2), calls)
    return len(tests) + len(compared)


def _points_differ(asked: _Asked, *, of_steps: bool) -> int:
    """Seeds and steps that a careless mixture takes for one another.

    Eight seeds in a row at steps far and near (``of_steps``), or eight steps at seeds far and near.
    """
    depths = tuple(range(_FANS))
    calls = _calls(asked, depths, _FINE)
    seed, step, word, *picks = asked.numbers(3 + _PICKED, 2)
    step %= 2**24
    if word % 2:  # so that nothing is carried, and `^` or `|` is a sum
        seed, step = seed - seed % 2**8, step - step % 2**8
    else:
        seed -= seed % 8
    strides = _STRIDES if of_steps else _SEED_STRIDES
    far = sorted({0, 7, 1000, *(strides[pick % len(strides)] for pick in picks)})
    if of_steps:
        far = [one for one, before in zip(far, [-_SIDE, *far], strict=False) if one - before >= _FANS + 1]
        # Neighbours only 1 apart are no steps of one text.
        points = [(ahead, further) for ahead in range(_SIDE) for further in far]
    else:
        points = [(ahead, _SIDE * turn) for ahead in far for turn in range(_SIDE)]
    nodes, finals = _shown(
        asked,
        calls,
        depths,
        _FINE,
        [step + further for _, further in points],
        seeds=[(seed + ahead) % 2**64 for ahead, _ in points],
    )
    names = [f"seed {(seed + ahead) % 2**64} at position {step + further}" for ahead, further in points]
    last = finals[-1][:, None]  # at each point of one text
    tests = [
        _Repeats("seeds and positions", names, nodes.T, (_WIDTH,) * _FANS),
        _Repeats("seeds and positions (the final coin)", names, last, (_FINE,)),
        _Repeats(
            "seeds and positions (nodes and the final coin)",
            names,
            np.concatenate([nodes.T, last], axis=1),
            (*[_WIDTH] * _FANS, _FINE),
        ),
    ]
    for test in tests:
        test.judge(split_rate(asked.rate, len(tests)), asked.door, calls)
    return len(tests) * len(points)


def _texts_differ(asked: _Asked) -> int:
    """Steps without drafts, each one position on: stretches of five from all over one long text."""
    seed, *places = asked.numbers(1 + _RUNS, 3)
    blocks = sorted({place % 2**21 for place in places})  # of 8 positions
    rows = np.full((1, _FINEST), 1 / _FINEST, np.float32)
    root = Request(DraftTree((-1,), (0,)), rows, 1.0, np.full(1, 0.5, np.float32), 0.5)
    calls = handed(VerifyCase((root,), "probs", 1 + asked.padding), asked.backend)
    positions = [8 * block + ahead for block in blocks for ahead in range(_RUN)]
    observed = draw(calls, asked.backend, asked.device, positions, seeds=[seed] * len(positions))
    for which, one in enumerate(observed):
        if len(one.tokens) != 1 or not 0 <= one.tokens[0] < _FINEST:
            raise Violation(which, one, f"one token in [0, {_FINEST})")
    tokens = np.array([one.tokens[0] for one in observed])
    each = [f"the final coin at position {position}" for position in positions]
    runs = [f"final coins at positions {8 * block} to {8 * block + _RUN - 1}" for block in blocks]
    tests = [
        _Repeats(f"steps of seed {seed}", each, tokens[:, None], (_FINEST,)),
        _Repeats(f"stretches of seed {seed}", runs, tokens.reshape(-1, _RUN), (_FINEST,) * _RUN),
    ]
    for test in tests:
        test.judge(split_rate(asked.rate, len(tests)), asked.door, calls)
    return len(positions)
