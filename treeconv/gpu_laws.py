"""Laws that need a device's width: graphs, large offsets, full vocabularies, 100,000 trees at once.

They stand beside :mod:`treeconv.laws`, which judge small cases exactly. Here every decision of a large batch
is held against a float64 walk on the device, outside the ambiguity band (``wide_oracle``), or against
the backend's own answer to the same question asked in another way. Each also runs on the CPU at small sizes,
where a graph is a plain call, so that wrong samplers can be shown to break it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treeconv import _gpu_checks as checks
from treeconv import _gpu_graph_checks as graph_checks
from treeconv import _gpu_sgl_checks as sgl_checks
from treeconv.errors import LawBroken
from treeconv.judge import Violation

if TYPE_CHECKING:
    from collections.abc import Callable

    from treeconv._gpu_checks import Sizes
    from treeconv.backends.base import Backend

__all__ = ["GPU_LAWS", "GpuLaw", "gpu_law_named"]


@dataclass(frozen=True)
class GpuLaw:
    """A law about a verifier on a device, or about the device converter.

    Args:
        name: what failures and tables call it.

        meaning: one line for a person who never read the design.

        check: ``(backend, device, rng, sizes) -> decisions judged`` (a :class:`~treeconv._gpu_checks.Judged`
            where some may be left out); raises :class:`Violation`.

        subject: "backend", "graph" (a backend that a graph can hold), "converter" or "sgl" (SGLang's kernels,
            which take trees that nothing here converted).
    """

    name: str
    meaning: str
    check: Callable[[Any, torch.device, np.random.Generator, Sizes], int]
    subject: str = "backend"

    def why_not(self, backend: Backend | None, device: torch.device | str) -> str | None:
        """Why the law does not apply, or None where it does."""
        kind = torch.device(device).type
        if self.subject == "converter":
            return None if backend is None else "a law about the converter, not about a backend"
        if backend is None:
            return "a law about a backend"
        if kind not in backend.traits.devices:
            return f"the backend does not run on {kind}"
        if self.subject == "graph" and kind == "cuda" and not backend.traits.graph_safe:
            return "the backend waits for the device: no graph can hold it"
        if self.subject == "sgl" and not hasattr(backend, "kernels"):
            return "about SGLang's own kernels"
        return None

    def run(
        self, backend: Backend | None, device: torch.device | str, sizes: Sizes, seed: int = 0
    ) -> checks.Judged:
        """Judge a backend.

        Returns:
            How many decisions were judged; what was left out, on a device too small for it, in ``left_out``.

        Raises:
            LawBroken: the readable failure.
        """
        device = torch.device(device)
        try:
            judged = self.check(backend, device, np.random.default_rng(seed), sizes)
            return judged if isinstance(judged, checks.Judged) else checks.Judged(judged)
        except Violation as violation:
            name = None if backend is None else backend.name
            lines = [
                f"law broken: {self.name}",
                f"  meaning:  {self.meaning}",
                f"  backend:  {name or 'none, the device converter'}, on {device}",
                f"  case:     seed {seed}, request {violation.request}, {sizes}",
                f"  got:      {violation.got}",
                f"  want:     {violation.want}",
            ]
            if violation.why:
                lines.append(f"  because:  {violation.why}")
            call = f"gpu_law_named({self.name!r}).run(<backend>, {str(device)!r}, {sizes}, seed={seed})"
            lines.append(f"  replay:   treeconv.gpu_laws.{call}")
            raise LawBroken("\n".join(lines), law=self.name, backend=name) from None


GPU_LAWS: tuple[GpuLaw, ...] = (
    GpuLaw(
        "float64-agreement",
        "on 100,000 random trees every decision outside the band is the float64 walk's",
        checks.float64_agreement,
    ),
    GpuLaw(
        "sgl-agreement",
        "on 100,000 random trees it accepts the nodes that sgl_kernel accepts under the same coins",
        checks.sgl_agreement,
    ),
    GpuLaw(
        "graph-replay",
        "a replay equals the plain call, over hundreds of replays with other trees, temperatures and sizes",
        graph_checks.graph_replay,
        "graph",
    ),
    GpuLaw(
        "graph-coins",
        "every replay draws fresh coins, and the seed fixes the sequence",
        graph_checks.graph_coins,
        "graph",
    ),
    GpuLaw(
        "poisoned-buffers",
        "what memory, outputs and the rest of a bucket held before changes nothing",
        graph_checks.poisoned_buffers,
    ),
    GpuLaw(
        "offsets-64-bit",
        "requests whose rows lie past 2**31 and 2**32 elements are decided on their own rows",
        checks.large_offsets,
    ),
    GpuLaw(
        "covered-support",
        "children that cover the whole support are accepted, also by a coin above their float32 sum",
        checks.covered_support,
    ),
    GpuLaw(
        "wide-batch-invariance",
        "at a full vocabulary a request decides alike alone, in 16 and in 128, and in any order",
        checks.wide_invariance,
    ),
    GpuLaw(
        "wide-determinism",
        "the same large call gives the same bits twenty times over",
        checks.wide_determinism,
    ),
    GpuLaw(
        "duplicate-siblings",
        "two siblings with one token are refused, or their mass counts once",
        sgl_checks.duplicate_siblings,
        "sgl",
    ),
    GpuLaw(
        "greedy-operator",
        "verify_tree_greedy is the verifier at temperature 0",
        sgl_checks.greedy_operator,
        "sgl",
    ),
    GpuLaw(
        "sgl-build-tree",
        "build_tree_kernel_efficient gives the converter's layout, positions and masks",
        sgl_checks.sgl_build_tree,
        "sgl",
    ),
    GpuLaw(
        "device-converter",
        "layout, positions and all three masks equal the CPU converter's, bit for bit, in a graph too",
        sgl_checks.device_converter,
        "converter",
    ),
)


def gpu_law_named(name: str) -> GpuLaw:
    """The law of that name.

    Raises:
        KeyError: there is none.
    """
    return {law.name: law for law in GPU_LAWS}[name]
