"""The status and the softmax of rows met a moment ago: most requests of a law's call are copies of one.

The same bits as :mod:`treeconv.sampling`'s, keyed by the row's own.
"""

from functools import lru_cache

import numpy as np

from treeconv import sampling

_KEPT = 512  # rows


def row_status(row, *, is_probs=False):
    """As :func:`treeconv.sampling.row_status`."""
    return _status(row.tobytes(), row.dtype, is_probs)


def target_probs(row, temperature):
    """As :func:`treeconv.sampling.target_probs`."""
    return _probs(row.tobytes(), row.dtype, temperature).copy()


@lru_cache(_KEPT)
def _status(row, dtype, is_probs):
    return sampling.row_status(np.frombuffer(row, dtype), is_probs=is_probs)


@lru_cache(_KEPT)
def _probs(row, dtype, temperature):
    return sampling.target_probs(np.frombuffer(row, dtype), temperature)
