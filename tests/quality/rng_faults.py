"""Deliberately wrong ways to draw coins, one fault each; and odd but right ones, which no law may flag.

:class:`Seeded` and :class:`Generated` are right samplers that draw their own coins; a fault overrides how.
"""

import os

import numpy as np
import torch
from faults import Sampler
from registry import planting

from treeconv.backends.base import BackendTraits
from treeconv.backends.eager import EagerBackend
from treeconv.sampling import draw_coins
from treeconv.tree import Coins

FAULTS, fault = planting()


class Seeded(Sampler):
    """A right sampler that draws each request's coins from its seed and its position."""

    name = "seeded"
    traits = BackendTraits(devices=("cpu",), coins="seeds")

    def run(self, batch, rows, temperatures, seeds, cap):
        return super().run(batch, rows, temperatures, self.coins(batch, seeds), cap)

    def coins(self, batch, seeds):
        return draw_coins(self.seeds(batch, seeds), self.steps(batch), batch.num_draft_tokens)

    def seeds(self, batch, seeds):
        return seeds

    def steps(self, batch):
        return batch.prefix_lens


class Generated(Sampler):
    """A right sampler that draws all coins of a call from one generator."""

    name = "generated"
    traits = BackendTraits(devices=("cpu",), coins="generator")

    def run(self, batch, rows, temperatures, generator, cap):
        return super().run(batch, rows, temperatures, self.coins(batch, generator), cap)

    def coins(self, batch, generator):
        draws = self.uniforms(batch.batch_size, batch.num_draft_tokens + 1, generator)
        return Coins(draws[:, 1:].contiguous(), draws[:, 0].contiguous())

    def uniforms(self, size, count, generator):
        return torch.rand(size, count, generator=generator)


class DrawAndMatch(Sampler):
    """Draws each next token from the target and accepts the child that has it (X1): right."""

    name = "draw-and-match"
    traits = BackendTraits(devices=("cpu",), coins="own")

    def test(self, walk, path, kids, p):
        self.drawn = self.draw(p, walk.accept[path[-1]])
        return next((kid for kid in kids if walk.tokens[kid] == self.drawn), None), []

    def walk(self, walk):
        path, bonus, status = super().walk(walk)
        return path, self.drawn if path else bonus, status


class SeededDrawAndMatch(DrawAndMatch, Seeded):
    name = "seeded-draw-and-match"
    traits = Seeded.traits


class StreamOfSteps(Seeded):
    """One stream a request and step, a coin for each step of the walk, whatever node it comes to."""

    name = "stream-of-steps"

    def coins(self, batch, seeds):
        return draw_coins(seeds, batch.prefix_lens, batch.num_draft_tokens + 1)

    def coin(self, walk, path, kid):
        return walk.accept[len(path) - 1]

    def final_coin(self, walk, path):
        return walk.accept[len(path)]


class KeyedByPosition(Seeded):
    """A node's coin is that of its absolute position; the final coin is of another stream, by the prefix.

    Right: a step that accepts k drafts moves the prefix by k + 1, so no text uses a coin twice.
    """

    name = "keyed-by-position"

    def coins(self, batch, seeds):
        size, slots = batch.candidates.shape
        keyed = draw_coins(seeds.repeat_interleave(slots), self.places(batch).reshape(-1), 1)
        return Coins(keyed.accept.view(size, slots), draw_coins(seeds, batch.prefix_lens, 1).final)

    def places(self, batch):
        return batch.positions.clamp(min=0)  # of padding anything


class KeyedByPrefixAndDepth(KeyedByPosition):
    """The same coins, whatever the batch says of positions."""

    name = "keyed-by-prefix-and-depth"

    def places(self, batch):
        depths = (batch.positions - batch.positions[:, :1]).clamp(min=0)
        return batch.prefix_lens[:, None] + depths


class PlainSamplersDraws(SeededDrawAndMatch, KeyedByPosition):
    """Each token by the draw of its position, with which a sampler without drafts would have drawn it.

    Right, though the coin that ends a step is the one that a longer step would test the next node with.
    """

    name = "plain-samplers-draws"


RIGHT = [
    Seeded,
    Generated,
    DrawAndMatch,
    SeededDrawAndMatch,
    StreamOfSteps,
    KeyedByPosition,
    KeyedByPrefixAndDepth,
    PlainSamplersDraws,
]


# --- coins of one text --------------------------------------------------------------------------------


@fault("K5", "sampled-law")
class OneUniformForAllNodes(Seeded):  # B30, flashinfer PR#424
    def coin(self, walk, path, kid):
        return walk.accept[0]


@fault("K5", "sampled-law")
class RejectingCoinDrawsTheBonus(Seeded):  # B29, sglang PR#7207
    def final_coin(self, walk, path):
        return walk.accept[path[-1]]


@fault("K5", "sampled-law")
class RecoversWithTheSameNoise(
    SeededDrawAndMatch
):  # B31's kind: what was refused decides what is drawn instead
    def test(self, walk, path, kids, p):
        accepted, rejected = super().test(walk, path, kids[:1], p)
        if accepted is None and kids:
            without = self.residual(walk, path, p, [walk.tokens[kids[0]]])
            self.drawn = self.draw(without if without.any() else p, walk.accept[path[-1]])
        return accepted, rejected


@fault("K5", "sampled-law")
class CoinsOfEightLevels(Seeded):
    def coins(self, batch, seeds):
        coins = super().coins(batch, seeds)
        return Coins(torch.floor(coins.accept * 8) / 8, torch.floor(coins.final * 8) / 8)


@fault("K5", "sampled-law")
class NormalTakenForUniform(Seeded):
    def coins(self, batch, seeds):
        coins = super().coins(batch, seeds)
        twice = super().coins(batch, seeds + 1)
        return Coins((coins.accept + twice.accept) / 2, (coins.final + twice.final) / 2)


# --- requests -----------------------------------------------------------------------------------------


@fault("K5", "sampled-law")
class RowsBehindTheFirstKeepZeros(Seeded):  # B33, vllm PR#10863
    def coins(self, batch, seeds):
        coins = super().coins(batch, seeds)
        coins.accept[1:], coins.final[1:] = 0, 0
        return coins


@fault("K5", "fresh-coins", "sampled-law")
class OneFinalCoinForTheBatch(Seeded):
    def coins(self, batch, seeds):
        coins = super().coins(batch, seeds)
        return Coins(coins.accept, coins.final[:1].expand(len(seeds)).contiguous())


@fault("K5", "seeded-text")
class SlotIsTheSeed(Seeded):
    def seeds(self, batch, seeds):
        return seeds[:1] + torch.arange(len(seeds))


@fault("K5", "seeded-text")
class SlotIsMixedIn(Seeded):
    def seeds(self, batch, seeds):
        return seeds ^ torch.arange(len(seeds))


@fault("K5", "seeded-text")
class PaddingMovesTheCoins(Seeded):
    """The final coin is drawn behind the padding."""

    def coins(self, batch, seeds):
        slots = batch.num_draft_tokens
        coins = draw_coins(seeds, batch.prefix_lens, slots + 1)
        return Coins(coins.accept[:, :slots].contiguous(), coins.accept[:, slots].contiguous())


@fault("K5", "fresh-coins")
class SeedsCutTo32Bits(Seeded):
    def seeds(self, batch, seeds):
        return seeds & 0xFFFFFFFF


# --- steps --------------------------------------------------------------------------------------------


@fault("K5", "fresh-coins", "sampled-law")
class StepIsNotInTheCounter(Seeded):  # B34, TensorRT-LLM#19487: the stream starts again at each step
    def steps(self, batch):
        return torch.zeros_like(batch.prefix_lens)


@fault("K5", "fresh-coins")
class StepsCountedIn8Bits(Seeded):
    def steps(self, batch):
        return batch.prefix_lens & 255


@fault("K5", "fresh-coins")
class StepsCountedIn16Bits(Seeded):
    def steps(self, batch):
        return batch.prefix_lens & 0xFFFF


@fault("K5", "fresh-coins")
class CoinsComeRoundAfterEightNodes(Seeded):
    """A block of eight coins a step, indexed by the node's last three bits."""

    period = 8

    def coins(self, batch, seeds):
        coins = super().coins(batch, seeds)
        return Coins(coins.accept[:, torch.arange(batch.num_draft_tokens) % self.period], coins.final)


@fault("K5", "fresh-coins")
class CoinsComeRoundAfterAWarp(CoinsComeRoundAfterEightNodes):
    period = 32


@fault("K5", "fresh-coins")
class SeedPlusStep(Seeded):
    """Then a seed's next step is the next seed's step."""

    def seeds(self, batch, seeds):
        return seeds + batch.prefix_lens

    def steps(self, batch):
        return torch.zeros_like(batch.prefix_lens)


@fault("K5", "fresh-coins")
class StreamsOverlap(Seeded):
    """One long stream a seed, each step one coin further on: a node's coin comes again at its parent."""

    def coins(self, batch, seeds):
        slots = batch.num_draft_tokens
        long = [draw_coins(seeds, batch.prefix_lens + offset, 1).final for offset in range(slots + 1)]
        draws = torch.stack(long, dim=1)
        return Coins(draws[:, :slots].contiguous(), draws[:, slots].contiguous())


@fault("K5", "seeded-text")
class CallsAreCounted(Seeded):
    """The step is how often it was called, not where the request is."""

    calls = 0

    def steps(self, batch):
        self.calls += 1
        return torch.full_like(batch.prefix_lens, self.calls)


# --- ranks --------------------------------------------------------------------------------------------


@fault("K5", "ranks-agree")
class RankIsMixedIn(Seeded):  # B35, vllm#17498
    def seeds(self, batch, seeds):
        return seeds + int(os.environ.get("RANK", "0"))


@fault("K5", "ranks-agree")
class RankMovesTheFinalCoin(Seeded):
    def coins(self, batch, seeds):
        coins = super().coins(batch, seeds)
        other = super().coins(batch, seeds + int(os.environ.get("LOCAL_RANK", "0")))
        return Coins(coins.accept, other.final)


@fault("K5", "seeded-text", "ranks-agree")
class SeedIgnored(Seeded):
    """Coins from the process's own generator, which nobody told the seed."""

    is_restless = True

    def coins(self, batch, seeds):
        shape = batch.candidates.shape
        return Coins(torch.rand(shape), torch.rand(shape[0]))


@fault("K5", "ranks-agree")
class GlobalNumpyDrawsTheBonus(Seeded):
    def coins(self, batch, seeds):
        coins = super().coins(batch, seeds)
        final = np.random.random(len(seeds)).astype(np.float32)  # noqa: NPY002
        return Coins(coins.accept, torch.from_numpy(final))


# --- generators ---------------------------------------------------------------------------------------


@fault("K5", "fresh-coins")
class GeneratorSetBackEachCall(Generated):
    def uniforms(self, size, count, generator):
        return super().uniforms(size, count, generator.manual_seed(generator.initial_seed()))


@fault("K5", "fresh-coins")
class GeneratorIsOnlyACopy(Generated):
    def uniforms(self, size, count, generator):
        return super().uniforms(size, count, generator.clone_state())


@fault("K5", "seeded-text", "ranks-agree")
class GeneratorIgnored(Generated):
    is_restless = True

    def uniforms(self, size, count, generator):
        return torch.rand(size, count)


@fault("K5", "fresh-coins", "sampled-law")
class EveryRowDrawsTheSame(Generated):
    def uniforms(self, size, count, generator):
        return super().uniforms(1, count, generator).repeat(size, 1)


@fault("K5", "fresh-coins")
class GeneratorsSeedIgnored(Generated):
    """A fixed seed of its own, and then it does go on."""

    def __init__(self):
        self.streams = {}

    def uniforms(self, size, count, generator):
        # The generator is kept, too: another one could be given the id of one that is gone.
        own = self.streams.setdefault(id(generator), (torch.Generator().manual_seed(0), generator))[0]
        return super().uniforms(size, count, own)


# --- behind a front door ------------------------------------------------------------------------------


@fault("K3", "sampled-law-logits")
class TemperatureIgnoredWithCoinsOfItsOwn(Seeded):
    def temperature(self, walk):
        return 1.0 if walk.temperature > 0 else 0.0


class FrontDoor:
    """``verify(seeds=)`` goes wrong; the verifier behind it is right."""

    patches = "treeconv._verify.draw_coins"
    backend = EagerBackend()


@fault("K5", "fresh-coins", "sampled-law")
class FrontDoorForgetsTheStep(FrontDoor):
    def __call__(self, seeds, positions, num_draft_tokens):
        return draw_coins(seeds, torch.zeros_like(positions), num_draft_tokens)


@fault("K5", "seeded-text")
class FrontDoorCountsSlots(FrontDoor):
    def __call__(self, seeds, positions, num_draft_tokens):
        return draw_coins(seeds + torch.arange(len(seeds)), positions, num_draft_tokens)
