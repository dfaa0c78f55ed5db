"""The authority: what a correct verifier does, exactly, and how far float32 may stray from it.

Imports nothing that it judges. :func:`walk` verifies one tree in rational arithmetic,
:func:`outcome_pmf` is the exact law of its emission, :func:`critical_coins` are the coins at which a
decision flips, and :func:`enclosure` is the band around them in which float32 may decide either way.
"""

from treeconv.oracle._bonus import Bonus
from treeconv.oracle._pmf import (
    Cell,
    CriticalCoins,
    acceptance_pmf,
    critical_coins,
    expected_accepted_length,
    outcome_cells,
    outcome_pmf,
    sweep_coins,
)
from treeconv.oracle._rows import EnclosedRow, ExactRow, Row, enclosure
from treeconv.oracle._target_rows import TargetRows
from treeconv.oracle._walk import Stop, Walk, admissible_stops, canonical_walk, child_tokens, walk

__all__ = [
    "Bonus",
    "Cell",
    "CriticalCoins",
    "EnclosedRow",
    "ExactRow",
    "Row",
    "Stop",
    "TargetRows",
    "Walk",
    "acceptance_pmf",
    "admissible_stops",
    "canonical_walk",
    "child_tokens",
    "critical_coins",
    "enclosure",
    "expected_accepted_length",
    "outcome_cells",
    "outcome_pmf",
    "sweep_coins",
    "walk",
]
