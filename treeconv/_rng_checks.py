"""What the laws about coins do to a backend that draws them, or to our front door; like ``_law_checks``.

Only texts are looked at, so any sampler can be judged. Where one text must equal another, laws are exact; the
others fail a right sampler at most once in 10**12 cases: three such laws over 1000 cases each, once in 10**8
runs.
"""

from __future__ import annotations

import os
import random
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv import _other_process
from treeconv._drive import submit
from treeconv._verify import choose_coins
from treeconv.judge import Observed, Violation, observe, target_rows
from treeconv.statistical_testing import EProcess, split_rate
from treeconv.tree import DraftTree, RowStatus, VerifyInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from numpy.typing import NDArray

    from treeconv.backends.base import Backend
    from treeconv.case import CaseTensors, VerifyCase

FALSE_FAIL_RATE = 1e-12  # of one law on one case

_FEWEST, _MOST = 256, 8192  # texts of one case
_WORTH_GOING_ON = 3.0  # log of the e-value at which more texts are drawn
# Coins are multiples of 2**-24, which moves a bucket by as much; a claim blurred by 2**-16 holds all the
# same, and its evidence grows falsely by no more than exp(8192 / 2**16).
_BLUR = 2.0**-16


def seeds_of(case: VerifyCase, count: int) -> list[int]:
    """Seeds that the case fixes: by its first request's coins, which are drawn with it and not used."""
    subject = case.requests[0]
    words = [*subject.accept.view(np.uint32).tolist(), int(np.float32(subject.final).view(np.uint32))]
    return [int(seed) for seed in np.random.SeedSequence(words).generate_state(count, np.uint64)]


def handed(case: VerifyCase, backend: Backend, *, exact: bool = False) -> VerifyCase:
    """The case as the backend takes it: in logarithms where it has no probability interface.

    ``exact``: then each row becomes even over a power of two of its tokens, which float32 divides exactly.
    """
    if case.kind == "logits" or backend.traits.takes_probs:
        return case
    if exact:
        even = [
            replace(request, rows=np.stack([_even(row) for row in request.rows])) for request in case.requests
        ]
        case = replace(case, requests=tuple(even))
    dtypes = backend.traits.rows_dtypes
    case = case.as_logits()
    return case if case.rows_dtype in dtypes else case.with_rows_dtype(dtypes[0])


def _even(row: NDArray[np.float32]) -> NDArray[np.float32]:
    support = np.flatnonzero(row)
    kept = support[: 1 << (support.size.bit_length() - 1)]
    even = np.zeros_like(row)
    even[kept] = 1 / kept.size
    return even


def doors_of(backend: Backend) -> list[str]:
    """Ways to have coins drawn: the backend's own, or both of our front door's."""
    own = backend.traits.coins
    return [own] if own in ("seeds", "generator") else ["seeds", "generator"]


def draw(
    case: VerifyCase,
    backend: Backend,
    device: str,
    positions: Sequence[int],
    *,
    seeds: Sequence[int] | None = None,
    generator: Any = None,
) -> list[Observed]:
    """One call whose coins are drawn from seeds or from a generator.

    ``positions`` are the prefix lengths; where they are more than the requests, the batch is so many copies.
    """
    tensors = _tiled(case.tensors(device), positions)
    coins = choose_coins(backend, tensors.batch, seeds=seeds, generator=generator)
    output = submit(replace(tensors, coins=coins), case.kind, backend)
    trees = [request.tree for request in case.requests] * (len(positions) // len(case.requests))
    observed = observe(trees, output, case.slots)
    for index, one in enumerate(observed):
        if one.broken:
            raise Violation(index, one, "one root path and its bonus token", case=case)
    return observed


def _tiled(tensors: CaseTensors, positions: Sequence[int]) -> CaseTensors:
    import torch  # noqa: PLC0415

    count, slots = len(positions), tensors.batch.num_draft_tokens
    copies = count // tensors.batch.batch_size
    device = tensors.rows.device
    prefix = torch.tensor(list(positions), dtype=torch.int64, device=device)
    pointers = ("candidates", "retrieve_next_token", "retrieve_next_sibling")
    depths = tensors.batch.positions - tensors.batch.prefix_lens[:, None]  # the case has a prefix of its own
    batch = VerifyInput(
        **{name: getattr(tensors.batch, name).repeat(copies, 1) for name in pointers},
        retrieve_index=torch.arange(count * slots, device=device).view(count, slots),
        positions=depths.repeat(copies, 1) + prefix[:, None],
        prefix_lens=prefix,
    )
    return replace(
        tensors,
        batch=batch,
        rows=tensors.rows.repeat(copies, 1, 1),
        temperature=tensors.temperature.repeat(copies),
        filters=_repeated(tensors.filters, copies),
        processors=_repeated(tensors.processors, copies),
        rule=_repeated(tensors.rule, copies),
    )


def _repeated(settings: Any, copies: int) -> Any:
    """Every tensor of some settings, and of settings among them, for so many copies of their requests."""
    import torch  # noqa: PLC0415

    if isinstance(settings, torch.Tensor):
        return settings.repeat(copies, *[1] * (settings.ndim - 1))
    if is_dataclass(settings) and not isinstance(settings, type):
        parts = {part.name: _repeated(getattr(settings, part.name), copies) for part in fields(settings)}
        return replace(settings, **parts)
    return settings


def generator_of(seed: int, device: str) -> Any:
    import torch  # noqa: PLC0415

    return torch.Generator(device).manual_seed(seed % 2**63)


# --- the law of what is drawn -------------------------------------------------------------------------


def sampled_law(case: VerifyCase, backend: Backend, device: str) -> int:
    """Texts over fresh coins, the next token at each node counted: evidence against the target's law."""
    case = handed(case, backend)
    subject = case.requests[0]
    rows = target_rows(subject, case.kind, case.filter_order)
    if any(rows[node].status is not RowStatus.OK for node in range(len(subject.tree))):
        return 0
    claims = {}
    for node in range(len(subject.tree)):
        masses = np.array([float(rows[node].mass(token)) for token in range(case.vocab_size)])
        support = masses > 0
        claims[node] = (1 - _BLUR) * masses / masses.sum() + _BLUR * support / support.sum()
    judged = 0
    # From logits one door is enough: coins do not know what they are compared with.
    for door in doors_of(backend)[: 1 if case.kind == "logits" else None]:
        judged += _sampled_law_through(door, case, backend, device, claims)
    return judged


def _sampled_law_through(
    door: str, case: VerifyCase, backend: Backend, device: str, claims: dict[int, NDArray[np.float64]]
) -> int:
    subject = case.requests[0]
    alone, cap = case.replace_requests([subject]), case.effective_depth_cap
    # Half of the texts are one request's at successive steps, half are many requests' at one step.
    seeds = seeds_of(case, 2 + _MOST)
    steps, others, generator = seeds[0], seeds[2:], generator_of(seeds[1], device)
    evidence = {node: EProcess(claim.tolist()) for node, claim in claims.items()}
    rate = split_rate(FALSE_FAIL_RATE, 2 * len(claims)) / 1.2  # 1.2 > exp(8192 / 2**16)
    drawn, more = 0, _FEWEST
    while drawn < _MOST:
        if door == "generator":
            observed = draw(alone, backend, device, [0] * more, generator=generator)
        else:
            half = more // 2
            drawn_from = [steps] * half + others[drawn : drawn + half]
            places = [*range(drawn, drawn + half), *[0] * half]
            observed = draw(alone, backend, device, places, seeds=drawn_from)
        drawn += more
        counts = next_tokens(subject.tree, observed, cap, case.vocab_size)
        for node, process in evidence.items():
            if process.update(counts[node]) <= rate:
                raise _unlikely(case, door, node, process, drawn)
        if max(process.log_e_value for process in evidence.values()) < _WORTH_GOING_ON:
            break
        more = drawn
    return drawn


def next_tokens(
    tree: DraftTree, observed: Sequence[Observed], cap: int, vocab: int
) -> dict[int, NDArray[np.int64]]:
    """How often each token came next at each node, where the text is long enough to show it."""
    counts = {node: np.zeros(vocab, np.int64) for node in range(len(tree))}
    for one in observed:
        node = 0
        for token in one.tokens:
            if not 0 <= token < vocab:
                raise Violation(0, one, f"tokens in [0, {vocab})")
            counts[node][token] += 1
            kids = [kid for kid in tree.children[node] if tree.token_ids[kid] == token]
            if not kids or tree.depths[kids[0]] >= cap:
                break
            node = kids[0]
    return counts


def _unlikely(case: VerifyCase, door: str, node: int, process: EProcess, drawn: int) -> Violation:
    seen, total = process.counts, int(process.counts.sum())
    claim = np.asarray(process.probabilities)
    worst = int(np.abs(seen / total - claim).argmax())
    prefix = [case.requests[0].tree.token_ids[inner] for inner in case.requests[0].tree.path(node)[1:]]
    why = (
        f"node {node}, coins drawn from {door}: so unlikely that a right sampler shows it at most once in"
        f" {1 / process.p_value:.0e} cases"
    )
    return Violation(
        0,
        f"after {prefix}, token {worst} came {seen[worst]} times of {total} ({drawn} texts)",
        f"about {claim[worst] * total:.0f}: its probability there is {claim[worst]:.4g}",
        why,
    )


# --- one text for one (seed, position) ----------------------------------------------------------------


def seeded_text(case: VerifyCase, backend: Backend, device: str) -> int:
    """The same seeds and steps again: in the batch, reversed, padded, alone, and from a generator reset."""
    case = handed(case, backend, exact=True)
    judged = 0
    count = len(case.requests)
    seeds = seeds_of(case, 2 * count)
    positions = [seed % 2**24 for seed in seeds[count:]]
    if "seeds" in doors_of(backend):
        want = draw(case, backend, device, positions, seeds=seeds[:count])

        def again(where: str, places: Sequence[int], slots: int) -> None:
            part = replace(case.replace_requests([case.requests[i] for i in places]), num_draft_tokens=slots)
            got = draw(
                part, backend, device, [positions[i] for i in places], seeds=[seeds[i] for i in places]
            )
            for place, observed in zip(places, got, strict=True):
                if observed != want[place]:
                    why = f"seed {seeds[place]} at position {positions[place]} fixes the coins"
                    raise Violation(place, f"{where}: {observed}", f"as at first: {want[place]}", why)

        everyone = range(count)
        again("again", everyone, case.slots)
        again("in the reversed batch", everyone[::-1], case.slots)
        again("padded by 3 slots", everyone, case.slots + 3)
        for place in everyone:
            again("alone", [place], len(case.requests[place].tree))
        judged += 4 * count
    if "generator" in doors_of(backend):
        texts = [
            draw(case, backend, device, positions, generator=generator_of(seeds[0], device)) for _ in range(2)
        ]
        for place, (first, second) in enumerate(zip(*texts, strict=True)):
            if first != second:
                raise Violation(place, f"from the generator set back: {second}", f"as at first: {first}")
        judged += count
    return judged


@contextmanager
def _as_rank(rank: int) -> Iterator[None]:
    """What tells one rank from another: its environment, and the state of its global generators."""
    import torch  # noqa: PLC0415

    names = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")
    before = {name: os.environ.get(name) for name in names}
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    os.environ.update(dict.fromkeys(names, str(rank)))
    random.seed(rank)
    np.random.seed(rank)  # noqa: NPY002
    torch.manual_seed(rank)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
        torch.set_rng_state(states[2])


def _draw_there(
    backend: Backend, device: str, *, generator_seed: int | None = None, **call: Any
) -> list[Observed]:
    """:func:`draw` in another process, which no generator can be handed to."""
    generator = None if generator_seed is None else generator_of(generator_seed, device)
    return draw(backend=backend, device=device, generator=generator, **call)


def ranks_agree(case: VerifyCase, backend: Backend, device: str) -> int:
    """The same call as each of three ranks makes it, and now and then as another process does."""
    case = handed(case, backend, exact=True)
    count = len(case.requests)
    seeds = seeds_of(case, 2 * count)
    positions = [seed % 2**24 for seed in seeds[count:]]
    first: dict[str, Sequence[Observed]] = {}
    judged = 0

    def compare(door: str, who: str, text: Sequence[Observed]) -> None:
        for place in range(count):
            if text[place] != first[door][place]:
                why = f"coins drawn from {door}, the same on every rank"
                raise Violation(place, f"{who}: {text[place]}", f"as rank 0: {first[door][place]}", why)

    for door in doors_of(backend):
        for rank in range(3):
            with _as_rank(rank):
                given: dict[str, Any] = {"seeds": seeds[:count]}
                if door == "generator":
                    given = {"generator": generator_of(seeds[0], device)}
                text = draw(case, backend, device, positions, **given)
            first.setdefault(door, text)
            compare(door, f"rank {rank}", text)
            judged += count
    if seeds[0] % 2 == 0:  # not among the decisions: who can be asked there is no matter of the sampler
        calls: list[dict[str, Any]] = []
        for door in first:
            drawn_from = {"seeds": seeds[:count]} if door == "seeds" else {"generator_seed": seeds[0]}
            calls.append({"case": case, "positions": positions, **drawn_from})
        texts = _other_process.ask(backend, device, calls, _draw_there)
        for door, text in zip(first, texts or (), strict=False):
            compare(door, "another process (a new interpreter)", text)
    return judged
