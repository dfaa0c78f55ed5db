"""Thousands of trees decided at once in float64, on any device, and where float32 may decide otherwise.

The same walk and the same error budget as :mod:`treeconv.oracle` (``_rows.EnclosedRow`` states it, the
constants are its), as tensor operations: parents and tokens in, no layout, nothing of a backend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from treeconv.oracle._rows import FLOAT64_SLACK, FLUSH, ROUNDING, sum_error
from treeconv.tree import RowStatus

if TYPE_CHECKING:
    from treeconv.tree import VerifyOutput

__all__ = ["WideDecisions", "WideLaw", "decide", "law_of_rows"]

_LEAST = 2.0**-149


@dataclass(frozen=True)
class WideLaw:
    """The laws of A rows.

    Args:
        masses: ``[A, V]`` float64 >= 0; sums to 1 where it comes from logits.

        arguments: ``[A, V]`` float64, the exponents ``(x - max) / T``, at least -1000; 0 where every
            float32 sum is exact (greedy, dyadic probabilities).

        total: ``[A, 1]`` the softmax's sum, from 1 to V; 1 where there is none.

        is_enclosed: ``[A, 1]`` float64: 0 where every float32 sum is exact, else 1.

        status: ``[A]`` int64 :class:`RowStatus`.
    """

    masses: torch.Tensor
    arguments: torch.Tensor
    total: torch.Tensor
    is_enclosed: torch.Tensor
    status: torch.Tensor

    def children(self, is_child: torch.Tensor, tokens: torch.Tensor) -> WideChildren:
        """The children of each row: ``is_child [A, N]`` bool, in node order, ``tokens [A, N]``."""
        V = self.masses.shape[1]
        at = torch.where(is_child, tokens, 0)
        masses = self.masses.gather(1, at).masked_fill_(~is_child, 0.0)
        own = _error(self.arguments.gather(1, at).abs())
        mean = (self.masses * self.arguments).sum(1, keepdim=True).abs()
        scale = _error(mean) + (sum_error(V) + ROUNDING + FLOAT64_SLACK)
        error = (own + scale) * self.is_enclosed
        low = torch.where(masses >= FLUSH * self.total, masses * (1 - error), masses * (1 - self.is_enclosed))
        high = masses * (1 + error) + is_child * (self.is_enclosed * _LEAST)
        rounding = is_child.cumsum(1).double() * (self.is_enclosed * ROUNDING)
        return WideChildren(
            masses=masses,
            sums=masses.cumsum(1),
            lower=low.cumsum(1) * (1 - rounding),
            upper=high.cumsum(1) * (1 + rounding),
        )

    def residual(self, is_child: torch.Tensor, tokens: torch.Tensor) -> WideResidual:
        """What is left of each row without its children."""
        A, V = self.masses.shape
        left = torch.empty((A, V + 1), dtype=torch.float64, device=self.masses.device)
        left[:, :V] = self.masses
        left.scatter_(1, torch.where(is_child, tokens, V), 0.0)  # what is no child lands in a spare column
        left = left[:, :V]
        sums = left.cumsum(1)
        total = sums[:, -1:]
        share = 1 / torch.where(total > 0, total, 1.0)
        # Twice the mean error, both sums' rounding and what may underflow bound the band of every boundary.
        mean = (left * self.arguments).sum(1, keepdim=True).abs() * share
        enclosed = 2 * _error(mean) + (2 * sum_error(V) + 4 * ROUNDING + FLOAT64_SLACK + _LEAST)
        enclosed = enclosed + V * FLUSH * self.total * share
        # Exact rows: a running sum against coin * total rounds once, unless the total is a power of two.
        is_rounded = (torch.frexp(total).mantissa != 0.5).double()
        exact = is_rounded * ((1 + 2.0**20) / 2.0**44)
        width = self.is_enclosed * enclosed + (1 - self.is_enclosed) * exact
        may_be_empty = (total <= V * FLUSH * self.total) & (self.is_enclosed > 0)
        return WideResidual(left, sums, width, may_be_empty[:, 0])


def _error(argument: torch.Tensor) -> torch.Tensor:
    """The relative error that float32 may make in ``exp`` of it; see ``_rows.enclosure``."""
    return (4 * argument + 8) * ROUNDING


@dataclass(frozen=True)
class WideChildren:
    """Children's masses, running sums and the bounds of those, ``[A, N]``; zero mass where no child is."""

    masses: torch.Tensor
    sums: torch.Tensor
    lower: torch.Tensor
    upper: torch.Tensor


@dataclass(frozen=True)
class WideResidual:
    """Masses and running sums, ``[A, V]``; the half-width ``[A, 1]`` of the band around a normalised sum.

    ``may_be_empty [A]``: a correct sampler may find nothing here.
    """

    masses: torch.Tensor
    sums: torch.Tensor
    width: torch.Tensor
    may_be_empty: torch.Tensor


def law_of_rows(rows: torch.Tensor, temperature: torch.Tensor | None) -> WideLaw:
    """The law at each of A nodes.

    Args:
        rows: ``[A, V]`` logits of any float dtype; or dyadic probabilities (multiples of 2**-12).

        temperature: ``[A]`` float32 >= 0, 0 being greedy; None where the rows are probabilities.
    """
    values = rows.double()
    peak, top = values.max(1, keepdim=True)  # NaN, if there is one; else the first of the largest
    status = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    status.masked_fill_(peak[:, 0] == (0.0 if temperature is None else -math.inf), int(RowStatus.EMPTY))
    status.masked_fill_(peak[:, 0] == math.inf, int(RowStatus.POS_INF))
    is_nan = peak[:, 0].isnan()
    zero = torch.zeros_like(peak)
    if temperature is None:
        status.masked_fill_(is_nan | (values.amin(1) < 0), int(RowStatus.NAN))
        return WideLaw(values, zero.expand_as(values), zero + 1, zero, status)
    status.masked_fill_(is_nan, int(RowStatus.NAN))
    is_greedy = (temperature == 0)[:, None]
    arguments = values.sub_(peak).div_(torch.where(is_greedy, 1.0, temperature[:, None].double()))
    masses = arguments.exp()
    total = masses.sum(1, keepdim=True)
    masses /= total
    arguments.clamp_(min=-1e3)
    masses.masked_fill_(is_greedy, 0.0).scatter_add_(1, top, is_greedy.double())
    arguments.masked_fill_(is_greedy, 0.0)
    return WideLaw(masses, arguments, total.masked_fill_(is_greedy, 1.0), (~is_greedy).double(), status)


@dataclass(frozen=True)
class WideDecisions:
    """What float64 decides.

    Args:
        nodes: ``[B, depth_cap]`` accepted nodes, root first, -1 behind; all -1 where ``status`` is not OK.

        tokens: ``[B, depth_cap]`` what is emitted at each of them, the bonus at the last; -1 behind.

        status: ``[B]`` :class:`RowStatus` of the first unusable visited row.

        unsure: ``[B]`` bool: some coin that was used may lie inside the ambiguity band, so that a correct
            float32 sampler may decide otherwise. Never False where it does; now and then True where it does
            not, since simple bounds stand in for the oracle's.
    """

    nodes: torch.Tensor
    tokens: torch.Tensor
    status: torch.Tensor
    unsure: torch.Tensor

    def differing(
        self, output: VerifyOutput, num_slots: int, call_size: int, *, reports_status: bool = True
    ) -> torch.Tensor:
        """``[B]`` bool: where a backend's output is not this, in whatever it says.

        Args:
            output: of all requests, one behind the other.

            num_slots: N.

            call_size: requests a call: flat indices start anew with each.

            reports_status: False leaves out requests that visit an unusable row.
        """
        count = len(self.status)
        request = torch.arange(count, device=self.nodes.device)[:, None]
        used = self.nodes >= 0
        want = torch.where(used, self.nodes + num_slots * (request % call_size), -1)
        differs = (output.accept_index.long() != want).any(1)
        differs |= output.accept_token_num.long() != (used.sum(1) - 1).clamp(min=0)
        at = self.nodes.clamp(min=0) + num_slots * request
        drawn = output.predicts.long().view(-1)[at]
        differs |= (used & (drawn != self.tokens)).any(1)
        if not reports_status:
            return differs & (self.status == 0)
        return differs | (output.status.long() != self.status)


def decide(
    parents: torch.Tensor,
    tokens: torch.Tensor,
    rows: torch.Tensor,
    temperature: torch.Tensor | None,
    accept: torch.Tensor,
    final: torch.Tensor,
    depth_cap: int,
) -> WideDecisions:
    """The target-only walk of every request; see ``oracle.canonical_walk``.

    Args:
        parents: ``[B, N]`` int64, -1 at the root, -2 in padding; a parent comes before its child.

        tokens: ``[B, N]`` int64, distinct among siblings.

        rows: ``[B, N, V]`` logits of any float dtype, or dyadic probabilities.

        temperature: ``[B]`` float32; None where the rows are probabilities.

        accept: ``[B, N]`` float32 coins in [0, 1].

        final: ``[B]`` likewise.

        depth_cap: accept slots, root included, >= 1.

    Returns:
        Tensors on the rows' device, which is waited for twice a level: requests that stopped are left out.
    """
    count, slots, vocab = rows.shape
    device = rows.device
    nodes = torch.full((count, depth_cap), -1, dtype=torch.int64, device=device)
    emitted = torch.full((count, depth_cap), -1, dtype=torch.int64, device=device)
    status = torch.zeros(count, dtype=torch.int64, device=device)
    unsure = torch.zeros(count, dtype=torch.bool, device=device)
    lanes = torch.arange(count, device=device)  # the requests still walking, and where each is
    node = torch.zeros_like(lanes)
    place = torch.arange(vocab, device=device)
    order = torch.arange(slots, device=device)
    for level in range(depth_cap):
        law = law_of_rows(rows[lanes, node], None if temperature is None else temperature[lanes])
        status[lanes] = law.status
        usable = law.status == 0
        nodes[lanes, level] = node
        names = tokens[lanes]
        is_child = (parents[lanes] == node[:, None]) & (level + 1 < depth_cap)
        kids = law.children(is_child, names)
        coin = accept[lanes, node].double()[:, None]
        accepted = _first(is_child & (kids.masses > 0) & (coin < kids.sums))
        doubt = (is_child & (kids.lower <= coin) & (coin < kids.upper)).any(1)

        # The residual is half the work, and of no use to those that go on.
        at = (accepted < 0).nonzero()[:, 0]
        law = WideLaw(**{name: getattr(law, name)[at] for name in law.__dataclass_fields__})
        left = law.residual(is_child[at], names[at])
        # Nothing left: the last child with mass is accepted, also by a coin above the sum.
        last = torch.where(is_child[at] & (kids.masses[at] > 0), order, -1).amax(1)
        doubt[at] |= left.may_be_empty & is_child[at].any(1)
        accepted[at] = torch.where(left.sums[:, -1] <= 0, last, -1)

        stops = accepted[at] < 0
        toss = final[lanes[at]].double()[:, None]
        target = toss * left.sums[:, -1:]
        drawn = _first(left.sums > target)
        highest = torch.where(left.masses > 0, place, -1).amax(1)
        drawn = torch.where(drawn < 0, highest, drawn)
        nearest = (left.sums - target).abs_().amin(1)
        doubt[at] |= stops & (nearest < left.width[:, 0] * left.sums[:, -1])
        unsure[lanes] |= usable & doubt
        going = accepted.clamp(min=0)
        says = names.gather(1, going[:, None])[:, 0]
        says[at] = torch.where(stops, drawn, says[at])
        emitted[lanes, level] = says
        on = (usable & (accepted >= 0)).nonzero()[:, 0]
        lanes, node = lanes[on], going[on]
        if not len(lanes):
            break
    bad = (status != 0)[:, None]
    return WideDecisions(nodes.masked_fill(bad, -1), emitted.masked_fill(bad, -1), status, unsure)


def _first(found: torch.Tensor) -> torch.Tensor:
    """The first place in each row that is True, or -1."""
    place = found.to(torch.uint8).argmax(1)
    return torch.where(found.gather(1, place[:, None])[:, 0], place, -1)
