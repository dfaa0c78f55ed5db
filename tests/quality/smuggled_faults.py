"""Wrong samplers that an outsider smuggled past the laws, before the laws reached them."""

import numpy as np
from faults import Sampler
from registry import planting

FAULTS, fault = planting()


class Tiled(Sampler):
    """Another path for vocabularies beyond 16 tokens, where ``tiled`` reads a row."""

    def row(self, walk, node):
        row = super().row(walk, node)
        return self.tiled(walk, node, row.copy()) if row.size > 16 else row


@fault("K4", "oracle-agreement-wide")
class RowsOfRequestZeroInTiles(Tiled):
    def tiled(self, walk, node, row):
        return walk.batch.rows[0][node]


@fault("K7", "oracle-agreement-wide")
class LastWholeTileLost(Tiled):
    def tiled(self, walk, node, row):
        if row.size % 32 == 0:
            row[-32:] = -np.inf
        return row


@fault("K1", "oracle-agreement-wide")
class NothingInTheFirstTile(Sampler):
    """A running maximum of -inf: exp(-inf + inf) is NaN, and no comparison with it holds."""

    def softmax(self, row, temperature):
        p = super().softmax(row, temperature)
        if temperature > 0 and row.size > 128 and row[:128].max() == -np.inf:
            p = np.eye(1, row.size, row.size - 1, dtype=np.float32)[0]
        return p


@fault("K11", "greedy")
class LaterTileWinsATie(Tiled):
    """Tiles of 16."""

    def tiled(self, walk, node, row):
        if walk.temperature == 0:
            last = row.size - 1 - int(row[::-1].argmax())  # of equal ones
            row[: last // 16 * 16] = -np.inf
        return row


@fault("K3", "oracle-agreement-wide")
class TemperatureOfRequestZeroInTiles(Sampler):
    def temperature(self, walk):
        return walk.batch.temperatures[0] if walk.rows.shape[-1] > 16 else walk.temperature


@fault("K9", "oracle-agreement", "critical-coins")
class DepthsWithThePrefix(Sampler):
    """Slots used so far are read from positions."""

    def run(self, batch, *call):
        self.prefixes = batch.prefix_lens.tolist()
        return super().run(batch, *call)

    def kids(self, walk, path):
        return super().kids(walk, path) if len(path) + self.prefixes[walk.index] < walk.cap else []


@fault("K11", "greedy")
class MinusZeroBelowZero(Sampler):
    """Integer keys in the order of floats."""

    def softmax(self, row, temperature):
        if temperature > 0:
            return super().softmax(row, temperature)
        bits = np.ascontiguousarray(row).view(np.int32).astype(np.int64)
        keys = np.where(bits < 0, -(bits & 0x7FFFFFFF) - 1, bits)
        return np.eye(1, row.size, int(keys.argmax()), dtype=np.float32)[0]


@fault("K11", "oracle-agreement")
class MaximumStartsAtMinus65504(Sampler):
    """float16's lowest number in the place of -inf."""

    def softmax(self, row, temperature):
        if temperature > 0 and row.max() < -65504:
            return np.eye(1, row.size, row.size - 1, dtype=np.float32)[0]
        return super().softmax(row, temperature)


class TiledProbabilities(Tiled):
    """The same for probabilities alone."""

    def row(self, walk, node):
        return super().row(walk, node) if walk.temperature is None else walk.rows[node]


@fault("K4", "oracle-agreement-wide")
class ProbabilitiesOfRequestZeroInTiles(TiledProbabilities):
    def tiled(self, walk, node, row):
        return walk.batch.rows[0][node]


@fault("K7", "oracle-agreement-wide")
class ProbabilitiesBehindTheFirstTile(TiledProbabilities):
    def tiled(self, walk, node, row):
        row[1024:] = 0
        return row


@fault("K9", "depth-cap")
class CapsAboveEightIgnored(Sampler):
    """A path of eight is kept in registers; a longer one has room for all."""

    fewest_nodes = 10

    def kids(self, walk, path):
        return walk.children[path[-1]] if walk.cap > 8 else super().kids(walk, path)
