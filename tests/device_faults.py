"""Deliberately wrong samplers for the laws that need a device: each wraps a right one and spoils one thing.

They never wait for the device, so a CUDA graph can hold them: ``ci/gpu.sh`` runs every one on the GPU, around
the Triton sampler or SGLang's, and ``tests/test_gpu_laws.py`` at small size on the CPU.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

if not torch.cuda.is_available():  # Triton looks at it when it is first imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from treeconv.errors import LawBroken
from treeconv.gpu_laws import gpu_law_named
from treeconv.kernels import convert_tree
from treeconv.tree import Coins, VerifyOutput

if TYPE_CHECKING:
    from collections.abc import Callable

FAULTS: list[DeviceFault] = []


@dataclass(frozen=True)
class DeviceFault:
    """A fault, the law that kills it, what it is put around on a device, and if it takes a device to show.

    ``around`` is "triton", "sgl", or "converter" for the device converter itself.
    """

    make: Callable[[Any], Any]
    law: str
    around: str
    takes_width: bool = False

    @property
    def name(self) -> str:
        return self.make.__name__


def fault(law, around="triton", *, takes_width=False):
    def register(make):
        FAULTS.append(DeviceFault(make, law, around, takes_width))
        return make

    return register


class Wraps:
    """A right sampler whose inputs or outputs a fault may spoil."""

    def __init__(self, right):
        self.right = right
        self.name = right.name
        self.traits = replace(right.traits, takes_logits=True, takes_probs=False)
        self.calls = 0

    def verify(self, *call, **more):
        self.calls += 1
        return self.spoil(self.right.verify(*self.hand_over(*call), **self.options(**more)), call)

    def verify_probs(self, *call):
        raise AssertionError("it claims logits only")

    def hand_over(self, *call):
        return call

    def options(self, **more):
        return more

    def spoil(self, out, call):
        return out


@fault("offsets-64-bit")
class LastRequestReadsTheFirstOnesRows(Wraps):
    """What an offset does that wraps."""

    def spoil(self, out, call):
        batch, logits, temperature, coins, cap = call
        size, slots = batch.candidates.shape
        last = slice(size - 1, size)
        tree = type(batch)(*(getattr(batch, name)[last] for name in batch.__dataclass_fields__))
        out = VerifyOutput(*(tensor.clone() for tensor in vars(out).values()))
        own = Coins(coins.accept[last], coins.final[last])
        wrong = self.right.verify(tree, logits[:1], temperature[last].contiguous(), own, cap)
        out.accept_index[-1] = torch.where(
            wrong.accept_index[0] >= 0, wrong.accept_index[0] + slots * (size - 1), -1
        )
        out.predicts[-slots:] = wrong.predicts
        out.accept_token_num[-1] = wrong.accept_token_num[0]
        return out


@fault("float64-agreement")
class FirstTemperatureForAll(Wraps):
    def hand_over(self, batch, logits, temperature, *rest):
        return batch, logits, temperature[:1].expand_as(temperature).contiguous(), *rest


@fault("float64-agreement", takes_width=True)
class CoinOneTenThousandthOff(Wraps):
    """A bias of 1e-4 in every bucket."""

    def hand_over(self, batch, logits, temperature, coins, cap):
        accept = (coins.accept - 1e-4).clamp(min=0)
        return batch, logits, temperature, Coins(accept, coins.final), cap


@fault("sgl-agreement")
class AcceptCoinsOfTheNextNode(Wraps):
    def hand_over(self, batch, logits, temperature, coins, cap):
        return batch, logits, temperature, Coins(coins.accept.roll(1, 1).contiguous(), coins.final), cap


@fault("graph-replay")
class TreeOfTheCapture(Wraps):
    """A layout that was read when the graph was captured: right on the first call only."""

    def hand_over(self, batch, *rest):
        if not hasattr(self, "first"):
            self.first = {}
        key = tuple(batch.candidates.shape)
        pointers = self.first.setdefault(
            key, (batch.retrieve_next_token.clone(), batch.retrieve_next_sibling.clone())
        )
        return replace(batch, retrieve_next_token=pointers[0], retrieve_next_sibling=pointers[1]), *rest


@fault("graph-replay")
class FiltersOfTheCapture(Wraps):
    """Filters that were read when the graph was captured."""

    def options(self, **more):
        if "filters" in more:
            self.first = getattr(self, "first", {})
            held = more["filters"]
            tensors = (held.top_k.clone(), held.top_p.clone(), held.min_p.clone())
            kept = self.first.setdefault(
                len(held.top_k), replace(held, top_k=tensors[0], top_p=tensors[1], min_p=tensors[2])
            )
            more["filters"] = kept
        return more


@fault("graph-replay")
class MaskOfTheCapture(Wraps):
    """A bitmask that was read when the graph was captured."""

    def options(self, **more):
        if more.get("processors") is not None and more["processors"].token_bitmask is not None:
            self.first = getattr(self, "first", {})
            mask = more["processors"].token_bitmask
            kept = self.first.setdefault(tuple(mask.shape), mask.clone())
            more["processors"] = replace(more["processors"], token_bitmask=kept)
        return more


@fault("graph-coins")
class CoinsOfTheCapture(Wraps):
    """Replays that use the coins of the first call: what a generator does that no graph registered."""

    def hand_over(self, batch, logits, temperature, coins, cap):
        if not hasattr(self, "first"):
            self.first = {}
        kept = self.first.setdefault(
            tuple(coins.accept.shape), Coins(coins.accept.clone(), coins.final.clone())
        )
        return batch, logits, temperature, kept, cap


@fault("poisoned-buffers")
class KeepsTheLastOutput(Wraps):
    """Old results shine through where nothing new was written."""

    def spoil(self, out, call):
        old, self.old = getattr(self, "old", None), out
        if old is None or old.predicts.shape != out.predicts.shape:
            return out
        return VerifyOutput(
            **{**vars(out), "predicts": torch.where(out.predicts < 0, old.predicts, out.predicts)}
        )


@fault("poisoned-buffers")
class ScratchIsAddedTo(Wraps):
    """A word per request that every call should have cleared."""

    def spoil(self, out, call):
        size = len(out.accept_token_num)
        if not hasattr(self, "scratch"):
            self.scratch = {}
        before = self.scratch.get(size, torch.zeros_like(out.accept_token_num))
        self.scratch[size] = out.predicts.view(size, -1).amax(1)
        return VerifyOutput(**{**vars(out), "accept_token_num": out.accept_token_num + before % 2})


@fault("covered-support")
class EmptyResidualEmitsTheLastToken(Wraps):
    """Every child refused by a coin above the float32 sum; the draw then runs off the row."""

    def spoil(self, out, call):
        batch, logits, _, coins, _ = call
        size, slots = batch.candidates.shape
        missed = coins.accept[:, 0] >= 1 - 2.0**-24
        index = torch.where(missed[:, None], torch.full_like(out.accept_index, -1), out.accept_index)
        index[:, 0] = out.accept_index[:, 0]
        predicts = torch.where(missed[:, None], logits.shape[2] - 1, out.predicts.view(size, slots))
        count = torch.where(missed, 0, out.accept_token_num)
        return VerifyOutput(index, count, predicts.reshape(-1).to(out.predicts.dtype), out.status)


@fault("wide-batch-invariance")
class MovesWithTheBatch(Wraps):
    """Another split of the row at another batch size, and sums that differ by more than rounding."""

    def hand_over(self, batch, logits, temperature, coins, cap):
        coin = (coins.accept + 0.1 * (len(temperature) % 3)).clamp(max=1 - 2.0**-24)
        return batch, logits, temperature, Coins(coin, coins.final), cap


@fault("wide-determinism")
class EveryFifthCallDiffers(Wraps):
    def spoil(self, out, call):
        return VerifyOutput(**{**vars(out), "predicts": out.predicts + (self.calls % 5 == 0)})


class WrapsSgl(Wraps):
    """Around SGLang's backend, whose own operators a law is about."""

    def __init__(self, right):
        super().__init__(right)
        self.traits = right.traits
        self.kernels = right.kernels

    def verify_greedy(self, *call):
        return self.right.verify_greedy(*call)

    def build_tree(self, *call):
        return self.right.build_tree(*call)

    def verify_probs(self, *call):
        return self.right.verify_probs(*call)


@fault("greedy-operator", around="sgl")
class GreedyReadsTheRowBefore(WrapsSgl):
    """Verification rows shifted by one (B27)."""

    def verify_greedy(self, batch, logits, cap):
        return self.right.verify_greedy(batch, logits.roll(1, dims=1), cap)


@fault("duplicate-siblings", around="sgl")
class TwinsCountTwice(WrapsSgl):
    """The mass of a token that two siblings carry, added for each (B13)."""

    def verify_probs(self, batch, target_probs, coins, cap):
        apart = replace(batch, candidates=torch.arange(3, device=target_probs.device)[None] + 1)
        twice = target_probs.clone()
        twice[..., 2:] = target_probs[..., 1:2]
        twice[..., 3] = target_probs[..., 1]
        return self.right.verify_probs(apart, twice, coins, cap)


@fault("sgl-build-tree", around="sgl")
class PositionIsTheFlatIndex(WrapsSgl):
    """A chain hides it (B42)."""

    def build_tree(self, *call):
        batch, mask = self.right.build_tree(*call)
        slots = torch.arange(batch.candidates.shape[1], device=mask.device)
        return replace(batch, positions=batch.prefix_lens[:, None] + slots), mask


@fault("sgl-build-tree", around="sgl")
class MaskIsCausal(WrapsSgl):
    """Not checked below the diagonal (B44), in the square mode."""

    def build_tree(self, draft, prefix_lens, prefix_sum, mode):
        batch, mask = self.right.build_tree(draft, prefix_lens, prefix_sum, mode)
        size, slots = batch.candidates.shape
        if mask.numel() == size * slots**2:
            mask = torch.ones(slots, slots, dtype=torch.bool, device=mask.device).tril().repeat(size, 1, 1)
        return batch, mask.reshape(-1)


def shifted_converter(right):
    """A device converter whose last node's sibling pointer is lost in trees of more than two nodes."""

    def convert_tree(*call):
        made = right(*call)
        made.batch.retrieve_next_sibling[:, 1] = -1
        return made

    return convert_tree


def mask_of_the_first_tree(right):
    """One mask serves the whole batch (B45)."""

    def convert_tree(*call):
        made = right(*call)
        if made.mask is not None and made.mask.ndim > 1:
            made.mask.copy_(made.mask[:1].clone().expand_as(made.mask))
        return made

    return convert_tree


def prefixes_of_the_buffers(right):
    """Buffers used again keep the prefixes of the call before, so that coins drawn by seeds repeat."""

    def convert_tree(*call):
        out = call[6] if len(call) > 6 else None
        old = None if out is None else out.batch.prefix_lens.clone()
        made = right(*call)
        if old is not None:
            made.batch.prefix_lens.copy_(old)
        return made

    return convert_tree


def prefixes_of_the_caller(right):
    """The caller's own tensor in the batch, so that what is written to it later changes the batch."""

    def convert_tree(*call):
        made = right(*call)
        return replace(made, batch=replace(made.batch, prefix_lens=call[3]))

    return convert_tree


FAULTS += [
    DeviceFault(shifted_converter, "device-converter", "converter"),
    DeviceFault(prefixes_of_the_buffers, "device-converter", "converter"),
    DeviceFault(prefixes_of_the_caller, "device-converter", "converter"),
    DeviceFault(mask_of_the_first_tree, "device-converter", "converter"),
]


def broken_by(fault, backends, device, sizes):
    """The failure that the fault's own law prints, or None where the fault survives it."""
    law = gpu_law_named(fault.law)
    try:
        if fault.around == "converter":
            right = convert_tree.convert_tree
            convert_tree.convert_tree = fault.make(right)
            try:
                law.run(None, device, sizes)
            finally:
                convert_tree.convert_tree = right
        else:
            law.run(fault.make(backends[fault.around]), device, sizes)
    except LawBroken as broken:
        return str(broken)
    return None
