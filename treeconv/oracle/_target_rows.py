"""The rows of one request as the oracle sees them: built when first visited, filters applied."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from treeconv.oracle._filters import enclosed_alternatives, exact_alternatives, exactly_filtered
from treeconv.oracle._processors import ProcessedLogits, processed_alternatives
from treeconv.oracle._rows import EnclosedRow, ExactRow, enclosed_weights, enclosure, is_dyadic, unsampled
from treeconv.oracle._rules import Plan, draft_law, plans
from treeconv.tree import RowStatus, as_float_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from treeconv.filters import Cuts
    from treeconv.oracle._rows import Row
    from treeconv.processors import RequestProcessors
    from treeconv.rules import RuleName
    from treeconv.tree import DraftTree

__all__ = ["TargetRows"]

_NOMINAL = 1e-5  # a row of probabilities whose sum is this close to 1 is a law but for rounding


class TargetRows:
    """The rows of one request, built when first visited: a row never visited is never looked at.

    ``rows[node]`` is the row as defined. Filters may leave several that float32 may rightly see instead:
    :meth:`alternatives`. ``rule`` says by which rule the request is verified: :meth:`under`.
    """

    def __init__(self, rows: Any, make: Callable[[Any], list[Callable[[], Row]]]) -> None:
        self._rows = rows
        self._make = make
        self.rule: RuleName = "target_only"
        self._draft_rows: Any = None
        self._plans: dict[tuple[Any, ...], list[Plan]] = {}
        self._makers: dict[int, list[Callable[[], Row]]] = {}
        self._made: dict[tuple[int, int], Row] = {}

    @classmethod
    def exact(cls, target_probs: Any, cuts: Cuts | None = None) -> TargetRows:
        """Probabilities at their exact values, every boundary a point (``[n, V]``, floats or Fractions)."""
        if cuts is None:
            return cls(target_probs, lambda values: [partial(ExactRow, values)])
        return cls(target_probs, lambda values: [partial(exactly_filtered, values, cuts)])

    @classmethod
    def from_logits(cls, logits: Any, temperature: float, cuts: Cuts | None = None) -> TargetRows:
        """Enclosures of ``[n, V]`` logits at a temperature, after one request's filters."""

        def make(values: Any) -> list[Callable[[], Row]]:
            keys = as_float_array(values).astype(np.float64)
            if cuts is None or not cuts.are_on(keys.size) or unsampled(keys, temperature) is not None:
                return [partial(enclosure, values, temperature)]
            weights, errors = enclosed_weights(keys, temperature)
            return enclosed_alternatives(keys, weights, errors, keys > -np.inf, cuts, is_normalised=True)

        return cls(logits, make)

    @classmethod
    def from_processed(
        cls,
        logits: Any,
        tree: DraftTree,
        processors: RequestProcessors,
        temperature: float,
        cuts: Cuts | None = None,
    ) -> TargetRows:
        """Enclosures of ``[n, V]`` logits after one request's processors, which look at a node's path."""
        rows = ProcessedLogits(logits, tree, processors)
        return cls(rows, lambda row: processed_alternatives(row[0], row[1], temperature, cuts))

    @classmethod
    def from_probs(cls, target_probs: Any, cuts: Cuts | None = None) -> TargetRows:
        """What a float32 sampler sees of ``[n, V]`` probabilities: dyadic rows exactly, others enclosed."""

        def make(values: Any) -> list[Callable[[], Row]]:
            row = as_float_array(values).astype(np.float64)
            exact = ExactRow(row)
            is_filtered = cuts is not None and cuts.are_on(row.size)
            if exact.status is not RowStatus.OK or (is_dyadic(row) and not is_filtered):
                return [lambda: exact]
            if is_dyadic(row):
                assert cuts is not None
                return exact_alternatives(row, cuts)
            # A float32 softmax misses 1 by some roundings: who divides by its sum is right too.
            off = abs(1 - float(row.sum()))
            errors = np.full_like(row, off if off < _NOMINAL else 0.0)
            if cuts is None or not is_filtered:
                return [lambda: EnclosedRow(row, errors, row > 0, is_normalised=False)]
            return enclosed_alternatives(row, row, errors, row > 0, cuts, is_normalised=False)

        return cls(target_probs, make)

    def under(self, rule: RuleName, draft_probs: Any = None) -> TargetRows:
        """The same rows, verified by another rule.

        Args:
            rule: one of :data:`treeconv.rules.RULES`.

            draft_probs: ``[n, V]``, the laws that the children were sampled from (floats or Fractions), for
                ``chain`` and ``recursive``.
        """
        other = TargetRows(self._rows, self._make)
        other._makers, other._made = self._makers, self._made
        other.rule, other._draft_rows = rule, draft_probs
        return other

    def plans(self, tree: DraftTree, node: int, row: Row, *, is_capped: bool) -> list[Plan]:
        """What a rule besides target-only may do at a node whose law is ``row``, the definition's first."""
        key = (tree, node, id(row), is_capped)  # rows are kept, so their ids stay theirs
        if key not in self._plans:
            draft = None if self._draft_rows is None else draft_law(self._draft_rows[node])
            self._plans[key] = plans(self.rule, row, draft, tree, node, is_capped=is_capped)
        return self._plans[key]

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, node: int) -> Row:
        return next(self.alternatives(node))

    def alternatives(self, node: int) -> Iterator[Row]:
        """Every law that a careful float32 sampler may rightly see at a node, the exact one first.

        One without filters: there the ambiguity is in the row's boundaries alone. A filter whose cut is
        decided inside the ambiguity band keeps, or does not keep, the tokens there: as many laws.
        """
        if node not in self._makers:
            self._makers[node] = self._make(self._rows[node])
        for place, make in enumerate(self._makers[node]):
            if (node, place) not in self._made:
                self._made[node, place] = make()
            yield self._made[node, place]
