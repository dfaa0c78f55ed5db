"""Ways to draw coins that are wrong between seeds and steps, requests and calls, nodes, or processes.

What ``rng_faults.py`` has are the plain ones; these share coins in a pattern that one must think of to try.
"""

import os

import torch
from registry import planting
from rng_faults import CoinsComeRoundAfterEightNodes, Generated, Seeded

from treeconv.sampling import draw_coins
from treeconv.tree import Coins

FAULTS, fault = planting()


# --- seeds and steps mixed ----------------------------------------------------------------------------


@fault("K5", "fresh-coins")
class SeedXorStep(Seeded):
    def seeds(self, batch, seeds):
        return seeds ^ batch.prefix_lens

    def steps(self, batch):
        return torch.zeros_like(batch.prefix_lens)


@fault("K5", "fresh-coins")
class SeedTimesAThousandPlusStep(SeedXorStep):
    def seeds(self, batch, seeds):
        return seeds * 1000 + batch.prefix_lens


@fault("K5", "fresh-coins")
class SeedsLoseTheirLowestBit(Seeded):
    def seeds(self, batch, seeds):
        return seeds & ~1


@fault("K5", "fresh-coins")
class StepsComeRoundAfterAThousand(Seeded):
    def steps(self, batch):
        return batch.prefix_lens % 1000


@fault("K5", "fresh-coins")
class StepsComeRoundAfterAPrime(Seeded):
    """A table of 4133 steps."""

    def steps(self, batch):
        return batch.prefix_lens % 4133


@fault("K5", "fresh-coins")
class TwoStepsShareCoins(Seeded):
    """A step is thought to emit two tokens at least; one that accepts nothing emits one."""

    def steps(self, batch):
        return batch.prefix_lens // 2


@fault("K5", "fresh-coins")
class CoinsComeRoundAfterTenNodes(CoinsComeRoundAfterEightNodes):
    period = 10


@fault("K5", "fresh-coins")
class CoinsComeRoundAfterTwelveNodes(CoinsComeRoundAfterEightNodes):
    period = 12


@fault("K5", "fresh-coins")
class FinalCoinIsTheRootsTwoStepsOn(Seeded):
    def coins(self, batch, seeds):
        coins = super().coins(batch, seeds)
        later = draw_coins(seeds, batch.prefix_lens + 2, 1)
        return Coins(coins.accept, later.accept[:, 0].contiguous())


# --- requests and calls --------------------------------------------------------------------------------


@fault("K5", "fresh-coins")
class NeighboursShareCoins(Generated):
    """One draw for two requests, the second of which is taken for the first one's second sample."""

    def uniforms(self, size, count, generator):
        return super().uniforms((size + 1) // 2, count, generator).repeat_interleave(2, 0)[:size]


@fault("K5", "fresh-coins")
class HalvesShareCoins(Generated):
    def uniforms(self, size, count, generator):
        return super().uniforms((size + 1) // 2, count, generator).repeat(2, 1)[:size]


@fault("K5", "fresh-coins")
class NeighboursMirrorCoins(Generated):
    """Antithetic draws: of less variance, and not independent."""

    def uniforms(self, size, count, generator):
        drawn = super().uniforms((size + 1) // 2, count, generator)
        return torch.stack([drawn, (1 - 2**-24) - drawn], 1).reshape(-1, count)[:size]


@fault("K5", "fresh-coins")
class NextCallBeginsInThisOne(Generated):
    """The generator advances by half of what was used."""

    def uniforms(self, size, count, generator):
        first = super().uniforms((size + 1) // 2, count, generator)
        after = generator.get_state()
        second = super().uniforms((size + 1) // 2, count, generator)
        generator.set_state(after)
        return torch.cat([first, second])[:size]


@fault("K5", "fresh-coins")
class ShuffledRequestsShareCoins(Generated):
    """Half as many draws as requests, each for two that lie anywhere."""

    def uniforms(self, size, count, generator):
        places = torch.randperm(size, generator=torch.Generator().manual_seed(0)) // 2
        return super().uniforms((size + 1) // 2, count, generator)[places]


# --- processes ----------------------------------------------------------------------------------------


@fault("K5", "ranks-agree")
class SeedsByPythonsHash(Seeded):
    """The hash of a string is another number in every process."""

    def seeds(self, batch, seeds):
        both = zip(seeds.tolist(), batch.prefix_lens.tolist(), strict=True)
        return torch.tensor([hash(f"{seed}/{step}") for seed, step in both])


@fault("K5", "ranks-agree")
class ProcessIsMixedIn(Seeded):
    def seeds(self, batch, seeds):
        return seeds + os.getpid()
