"""The checks of :mod:`treeconv.gpu_laws` about CUDA graphs and about what buffers held before."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treeconv._gpu_checks import fresh, hold_outputs, verify_wide
from treeconv._scale import WideBatch, float64_law, random_batch
from treeconv.cuda_graph import CudaGraphRunner
from treeconv.filters import FILTER_ORDERS, Filters
from treeconv.judge import Violation
from treeconv.processors import Processors, bitmask_words
from treeconv.tree import Coins, RowStatus, VerifyOutput

if TYPE_CHECKING:
    from treeconv._gpu_checks import Sizes
    from treeconv.backends.base import Backend
    from treeconv.filters import FilterOrder

__all__ = ["graph_coins", "graph_replay", "poisoned_buffers"]


def _runner(
    backend: Backend,
    device: torch.device,
    slots: int,
    vocab: int,
    generator: torch.Generator | None = None,
    **captured: Any,
) -> CudaGraphRunner:
    made = CudaGraphRunner(
        backend,
        num_draft_tokens=slots,
        vocab_size=vocab,
        depth_cap=6,
        batch_sizes=(1, 4, 16),
        rows_dtype=torch.float32,
        interface="logits" if backend.traits.takes_logits else "probs",
        device=device,
        generator=generator,
        **captured,
    )
    made.capture()
    return made


def _replay(runner: CudaGraphRunner, wide: WideBatch, coins: Coins | None) -> VerifyOutput:
    if runner.backend.traits.takes_logits:
        return runner.replay(wide.batch, wide.logits, wide.temperature, coins)
    return runner.replay(wide.batch, float64_law(wide.logits, wide.temperature).float(), coins=coins)


def graph_replay(backend: Backend, device: torch.device, rng: np.random.Generator, sizes: Sizes) -> int:
    """Replays against plain calls; every tenth batch has one request of unusable rows."""
    slots, vocab = 12, sizes.vocab
    runner = _runner(backend, device, slots, vocab)
    judged = 0
    for turn in range(sizes.replays):
        count, width = int(rng.integers(1, 17)), int(rng.integers(1, slots + 1))
        wide = random_batch(rng, count, width, vocab, device)
        before = None
        if turn % 10 == 9 and count > 1 and backend.traits.reports_status:
            before = verify_wide(fresh(backend), wide, runner.depth_cap)
            wide.logits[turn % count, 0] = (torch.nan, torch.inf, -torch.inf)[turn // 10 % 3]
        got = _replay(runner, wide, wide.coins)
        want = verify_wide(fresh(backend), wide, runner.depth_cap)
        hold_outputs(got, want, f"replay {turn} ({count} requests of {width} slots)")
        judged += count
        if before is not None:
            others = torch.arange(count, device=device) != turn % count
            hold_outputs(got, before, f"replay {turn}, beside a request of unusable rows", others)
            if int(got.status[turn % count]) == RowStatus.OK:
                raise Violation(turn % count, "status OK for an unusable root row", "NAN, POS_INF or EMPTY")
    for order in FILTER_ORDERS:
        judged += _replay_with_options(backend, device, rng, sizes, order)
    return judged


def _replay_with_options(
    backend: Backend, device: torch.device, rng: np.random.Generator, sizes: Sizes, order: FilterOrder
) -> int:
    """Replays with bias, bitmask and filters, some of them or none, as far as the backend takes them."""
    traits = backend.traits
    kinds = tuple(kind for kind in ("bias", "bitmask") if kind in traits.takes_processors)
    if not traits.takes_logits or not (kinds or traits.takes_filters):
        return 0
    slots, vocab, judged = 12, sizes.vocab, 0
    runner = _runner(
        backend,
        device,
        slots,
        vocab,
        processors=kinds,
        filter_order=order if traits.takes_filters else None,
    )
    for turn in range(sizes.replays // 3):
        count, width = int(rng.integers(1, 17)), int(rng.integers(1, slots + 1))
        wide = random_batch(rng, count, width, vocab, device)
        # Each drawn, and what does nothing, which a replay that brings none must equal: the plain calls then
        # differ from the captured ones in no option, and no kernel is compiled for each mixture.
        options: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        random = torch.Generator(device).manual_seed(int(rng.integers(2**62)))
        if "bias" in kinds:
            bias = torch.randn((count, vocab), generator=random, device=device).round()
            options["logit_bias"] = bias, torch.zeros_like(bias)
        if "bitmask" in kinds:
            words = (count, width, bitmask_words(vocab))
            mask = torch.randint(-(2**31), 2**31, words, generator=random, dtype=torch.int32, device=device)
            options["token_bitmask"] = mask, torch.full_like(mask, -1)
        if traits.takes_filters:
            top_k = torch.from_numpy(rng.choice([1, 3, vocab // 4, vocab], count)).to(device)
            options["top_k"] = top_k, torch.full_like(top_k, vocab)
            for name, values, off in (("top_p", [0.3, 0.9, 1.0], 1.0), ("min_p", [0.0, 0.02, 0.3], 0.0)):
                cut = torch.from_numpy(rng.choice(np.array(values, np.float32), count)).to(device)
                options[name] = cut, torch.full_like(cut, off)
        brought: dict[str, Any] = {name: pair[0] for name, pair in options.items() if rng.random() < 0.5}
        call = {name: brought.get(name, off) for name, (_, off) in options.items()}
        more: dict[str, Any] = {}
        if kinds:
            more["processors"] = Processors(call.get("logit_bias"), call.get("token_bitmask"))
        if traits.takes_filters:
            more["filters"] = Filters(call["top_k"], call["top_p"], call["min_p"], order)
        got = runner.replay(wide.batch, wide.logits, wide.temperature, wide.coins, **brought)
        want = verify_wide(fresh(backend), wide, runner.depth_cap, **more)
        what = ", ".join(brought) or "no option"
        hold_outputs(got, want, f"replay {turn} ({count} requests of {width} slots, {what})")
        judged += count
    return judged


def graph_coins(backend: Backend, device: torch.device, rng: np.random.Generator, sizes: Sizes) -> int:
    """Coins of successive replays: in [0, 1), never twice the same, uncorrelated, reproducible."""
    slots, vocab = 8, 40
    wide = random_batch(rng, 16, slots, vocab, device)

    def drawn(seed: int) -> torch.Tensor:
        runner = _runner(backend, device, slots, vocab, torch.Generator(device).manual_seed(seed))
        seen: list[torch.Tensor] = []
        for _ in range(sizes.replays):
            got = _replay(runner, wide, None)
            coins = Coins(runner.coins.accept.clone(), runner.coins.final.clone())
            # The coins that the runner shows are those that decided, says the float64 walk.
            if len(seen) % 25 == 24:
                wrong = wide.disagreements(got, runner.depth_cap, coins)[0]
                if bool(wrong.any()):
                    first = int(wrong.int().argmax())
                    raise Violation(
                        first,
                        f"replay {len(seen)}: flat indices {got.accept_index[first].tolist()}",
                        "what the float64 walk decides under the replay's own coins",
                        f"{int(wrong.sum())} of {len(wrong)} requests were decided by other coins",
                    )
            seen.append(torch.cat([coins.accept, coins.final[:, None]], dim=1).reshape(-1))
        return torch.stack(seen)

    coins = drawn(11)
    if bool(((coins < 0) | (coins >= 1)).any()):
        raise Violation(0, "a coin outside [0, 1)", "coins in [0, 1)")
    if len(torch.unique(coins, dim=0)) < len(coins):
        raise Violation(0, "two replays drew the same coins", f"{len(coins)} different draws")
    # One coin that stays while others change hides in the figures below. Four chance repeats: 1 in 10**17.
    stayed = (coins[1:] == coins[:-1]).sum(dim=0)
    if int(stayed.max()) > 3:
        which = f"coin {int(stayed.argmax())} of {coins.shape[1]}"
        raise Violation(0, f"{which} stayed what it was {int(stayed.max())} times", "a fresh one each replay")
    # Each of the three is within 6.5 standard deviations unless the coins are not fresh: 1 in 10**10.
    z = (coins.double() - 0.5) * 12**0.5
    count = z.numel()
    figures = {
        "mean": float(z.mean()) * count**0.5,
        "between replays": float((z[1:] * z[:-1]).mean()) * (count - z.shape[1]) ** 0.5,
        "between neighbours": float((z[:, 1:] * z[:, :-1]).mean()) * (count - len(z)) ** 0.5,
    }
    for what, deviations in figures.items():
        if abs(deviations) > 6.5:
            raise Violation(
                0, f"{what}: {deviations:+.1f} standard deviations", "within 6.5, as fresh coins are"
            )
    if not torch.equal(coins, drawn(11)):
        raise Violation(0, "the same seed drew other coins", "the same sequence")
    return sizes.replays


def _poison_memory(device: torch.device) -> None:
    """Fill freed memory with NaN patterns, so that whatever is allocated next holds them."""
    blocks = [
        torch.full((size,), torch.nan, device=device)
        for size in (128, 1 << 12, 1 << 16, 1 << 20, 1 << 24 if device.type == "cuda" else 1 << 20)
        for _ in range(8)
    ]
    del blocks


def poisoned_buffers(backend: Backend, device: torch.device, rng: np.random.Generator, sizes: Sizes) -> int:
    """The same call after memory, outputs and padding were filled with rubbish."""
    slots, vocab, judged = 12, sizes.vocab, 0
    for _ in range(max(4, sizes.replays // 15)):
        wide = random_batch(rng, 24, slots, vocab, device)
        want = verify_wide(fresh(backend), wide, 6)
        coins = Coins(wide.coins.accept.clone(), wide.coins.final)
        rubbish = replace(wide, logits=wide.logits.clone(), coins=coins)
        size = (
            (wide.batch.retrieve_next_token >= 0).sum(1) + (wide.batch.retrieve_next_sibling >= 0).sum(1) + 1
        )
        padding = torch.arange(slots, device=device) >= size[:, None]
        rubbish.logits[padding] = torch.nan
        coins.accept[padding] = 0.125
        # Another call leaves its own results and scratch behind; then the allocator's memory is poisoned.
        verify_wide(backend, random_batch(rng, 24, slots, vocab, device), 6)
        _poison_memory(device)
        hold_outputs(verify_wide(backend, rubbish, 6), want, "after poisoning")
        judged += 24
        if device.type == "cpu" or backend.traits.graph_safe:
            runner = _runner(backend, device, slots, vocab)
            for tensor in vars(runner._output).values():  # noqa: SLF001
                tensor.fill_(0x5A5A5A)
            runner.rows.fill_(torch.nan)
            few = rubbish.take(range(5))
            got = _replay(runner, few, few.coins)
            hold_outputs(
                got, verify_wide(fresh(backend), few, 6), "in a graph, over poisoned outputs and rows"
            )
            judged += 5
    return judged
