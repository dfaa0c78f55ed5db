"""Deliberately wrong graph runners: each stands in for ``CudaGraphRunner``.

On the CPU a replay is a plain call; ``ci/gpu.sh`` runs the same laws where a graph is a graph.
"""

import torch
from registry import planting

from treeconv.backends.eager import EagerBackend
from treeconv.cuda_graph import CudaGraphRunner
from treeconv.tree import VerifyOutput

FAULTS, fault = planting()


class Runner(CudaGraphRunner):
    replays = 0

    def replay(self, batch, rows=None, temperature=None, coins=None, depth_cap=None):
        self.replays += 1
        return super().replay(*self.before(batch, rows, temperature, coins), depth_cap)

    def before(self, batch, rows, temperature, coins):
        return batch, rows, temperature, coins


def graph_fault(*laws):
    """Plant a runner: the verifier behind it is right."""

    def register(runner):
        body = {
            "patches": "treeconv._gpu_graph_checks.CudaGraphRunner",
            "backend": EagerBackend(),
            "__call__": staticmethod(runner),
        }
        fault("K10", *laws)(type(runner.__name__, (), body))
        return runner

    return register


@graph_fault("graph-coins")
class CoinsDrawnAtCapture(Runner):
    """The draw is left outside the graph: every replay has the first one's coins."""

    def _call(self, size, *, draws):
        state = self._generator.get_state()
        super()._call(size, draws=draws)
        if draws:
            self._generator.set_state(state)


@graph_fault("graph-coins")
class FinalCoinOfTheFirstReplay(Runner):
    def _call(self, size, *, draws):
        if draws and self.replays > 1:
            self._draws[:size].uniform_(generator=self._generator)
            self._coins.accept[:size].copy_(self._draws[:size, 1:])
            draws = False
        super()._call(size, draws=draws)


@graph_fault("graph-coins")
class SeedOfTheRunnerIgnored(Runner):
    def __init__(self, *given, **named):
        super().__init__(*given, **{**named, "generator": None})


@graph_fault("graph-replay")
class CoinsOfTheFirstReplay(Runner):
    """Given coins are copied in once; stale from the second replay on."""

    def _call(self, size, *, draws):
        if not draws:
            if self.replays <= 1:
                self.kept = self._coins.accept.clone()
            self._coins.accept.copy_(self.kept)
        super()._call(size, draws=draws)


@graph_fault("graph-replay")
class TemperatureOfTheFirstReplay(Runner):
    kept = None

    def before(self, batch, rows, temperature, coins):
        if self.kept is None:
            self.kept = torch.full((self.batch_sizes[-1],), float(temperature[0]))
        return batch, rows, self.kept[: batch.batch_size], coins


@graph_fault("graph-replay")
class LastRowNotCopied(Runner):
    def before(self, batch, rows, temperature, coins):
        if self.replays > 3 and batch.batch_size > 1:
            rows = rows.clone()
            rows[-1] = self.rows[batch.batch_size - 1, : rows.shape[1]]
        return batch, rows, temperature, coins


@graph_fault("graph-replay")
class FlatIndicesOfTheCapture(Runner):
    """What is accepted is counted in captured slots, whatever the batch's own number."""

    def _result(self, B, slots):
        right = super()._result(B, slots)
        return VerifyOutput(
            self._output.accept_index[:B], right.accept_token_num, right.predicts, right.status
        )


@graph_fault("graph-replay")
class PointersOfTheLastReplay(Runner):
    """A tree smaller than the last one keeps the last one's siblings."""

    def _load(self, batch, size):
        kept = self._trees.retrieve_next_sibling.clone()
        super()._load(batch, size)
        ours = self._trees.retrieve_next_sibling
        ours.copy_(torch.where((ours == -1) & (kept > 0), kept, ours))
