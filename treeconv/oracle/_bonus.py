"""The draw of a bonus token, and which tokens float32 may rightly draw with a coin."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from fractions import Fraction

    from numpy.typing import NDArray

    Number = Fraction | float
    Bounds = Sequence[Number] | NDArray[np.float64]

__all__ = ["Bonus"]


class Bonus:
    """The draw that ends a walk at one node: from the law there, less what the rule took from it.

    Args:
        tokens: ``[m]`` the tokens that may have residual mass, ascending.

        sums: ``[m]`` their running sums, up to a common factor: the canonical decision.

        certain: ``[m]`` whether the token has mass in every correct sampler.

        bounds: gives, when asked, ``[m]`` lower and ``[m]`` upper bounds of the *normalised* running sums.
    """

    def __init__(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        sums: Sequence[Number] | NDArray[np.float64],
        certain: NDArray[np.bool_] | None,
        bounds: Callable[[], tuple[Bounds, Bounds]],
    ) -> None:
        self.tokens = tokens
        self.sums = sums
        self._bounds = bounds
        self._certain = certain

    @property
    def may_have_mass(self) -> bool:
        """Whether any token is left to draw."""
        return len(self.tokens) > 0

    def _place(self, token: int) -> int | None:
        place = bisect_left(self.tokens, token)
        return place if place < len(self.tokens) and self.tokens[place] == token else None

    @cached_property
    def _first_last(self) -> int:
        """From this place on a token may be the last one with mass, to which a coin of 1 falls."""
        if self._certain is None:
            return len(self.tokens) - 1
        return int(np.flatnonzero(self._certain)[-1]) if self._certain.any() else 0

    @cached_property
    def bounds(self) -> tuple[Bounds, Bounds]:
        """``[m]`` lower and upper bounds of the normalised running sum up to and including each token."""
        return self._bounds()

    def admits(self, token: int, coin: float) -> bool:
        """Whether a correct sampler may draw ``token`` with this coin."""
        place = self._place(token)
        lower, upper = self.bounds
        if place is None or (place and lower[place - 1] > coin):
            return False
        return bool(upper[place] > coin) or place >= self._first_last

    def draw(self, coin: Number) -> int:
        """The canonical token: smallest t with ``sum(t) > coin * total``, else the last of positive mass."""
        target = coin * self.sums[-1]
        # The last place is where a coin of 1 falls: no sum exceeds the target.
        return int(self.tokens[bisect_right(self.sums, target, 0, len(self.sums) - 1)])

    def admitted(self, coin: float) -> list[int]:
        """Every token that a correct sampler may draw with this coin."""
        lower, upper = self.bounds
        if isinstance(lower, np.ndarray):  # a large vocabulary is looked at at once
            is_open = np.asarray(upper) > coin
            is_open[self._first_last :] = True
            is_open[1:] &= lower[:-1] <= coin
            return [int(self.tokens[place]) for place in np.flatnonzero(is_open).tolist()]
        return [int(token) for token in self.tokens if self.admits(token, coin)]

    def boundaries(self) -> list[tuple[Number, Number]]:
        """``(lower, upper)`` of each boundary between one token and the next."""
        lower, upper = self.bounds
        return list(zip(lower[:-1], upper[:-1], strict=True))
