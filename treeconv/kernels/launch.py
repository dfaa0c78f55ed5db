"""How a launch of :mod:`.verify_tree` is cut up, from shapes and the device alone, and its scratch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

__all__ = [
    "AHEAD_BATCH",
    "CHUNK",
    "JUMP_LIMIT",
    "MAX_BATCH",
    "MAX_CHUNKS",
    "MAX_NODES",
    "MAX_VOCAB",
    "REGISTERS",
    "WARPS_PER_SM",
    "LaunchPlan",
    "Workspace",
    "launch_plan",
    "vector_size",
]

MAX_BATCH = 1024
MAX_NODES = 1024
MAX_VOCAB = 262144
AHEAD_BATCH = 64  # requests for which scratch has two places for a row's words

CHUNK = 1024  # tokens that one warp sums at a time
MAX_CHUNKS = MAX_VOCAB // CHUNK  # per row
REGISTERS = 128  # per thread, so that the 64 Ki registers of a multiprocessor hold 16 warps
WARPS_PER_SM = 16
JUMP_LIMIT = 64  # N up to which sibling lists are followed through tables in registers
_MAX_GUESSES = 4


@dataclass(frozen=True)
class LaunchPlan:
    """How a launch is cut up; a function of shapes and of the device alone. Never changes a result.

    Args:
        programs: one-warp programs per request, >= 1, at most the row's chunks and one more.

        leads: whether the first program sums no chunks, but only decides; then there are two at least.

        speculates: whether the row of a visited node's first child is summed before it is known to be visited;
            with ``leads``, and up to ``AHEAD_BATCH`` requests, only.

        guesses: children of each visited node whose rows are asked for ahead of the decision, >= 0.
    """

    programs: int
    leads: bool = False
    speculates: bool = False
    guesses: int = 1


def vector_size(rows: torch.Tensor) -> int:
    """Elements Triton loads at once: 16 bytes where it can prove the alignment, else one."""
    numbers = (rows.shape[2], rows.stride(0), rows.stride(1), rows.data_ptr())
    return 16 // rows.element_size() if all(number % 16 == 0 for number in numbers) else 1


def launch_plan(B: int, V: int, multiprocessors: int) -> LaunchPlan:
    """Cut B requests over rows of V tokens over a device.

    Unless it is one program a request, which waits for nobody, ``B * programs`` never exceeds the 16 warps
    a multiprocessor which the kernel's register limit lets be co-resident. With warps to spare, bandwidth
    is to spare as well, and more than the likeliest next row is asked for.
    """
    chunks = triton.cdiv(V, CHUNK)
    share = max(1, WARPS_PER_SM * multiprocessors // B)
    programs = triton.cdiv(chunks, triton.cdiv(chunks, min(share, chunks)))  # no more than finish as soon
    leads = share > programs
    guesses = min(max(share // chunks, 1), _MAX_GUESSES)
    speculates = leads and B <= AHEAD_BATCH and 2 * programs >= chunks
    return LaunchPlan(programs + leads, leads, speculates, guesses)


class Workspace:
    """Scratch for one stream of launches on one device; 6.7 MB, whatever N and V.

    Holds the published words, the commands and the epochs. Launches that use it must not overlap in time.
    """

    def __init__(self, device: torch.device | str) -> None:
        # A word's place belongs to one request, whatever the shapes of a call: tags count per request, so a
        # place shared between requests could hold another's word under the very tag that is waited for.
        self.words = torch.full((MAX_BATCH + AHEAD_BATCH, 3, MAX_CHUNKS), -1, dtype=torch.int64, device=device)
        self.orders = torch.full((MAX_BATCH, 4), -1, dtype=torch.int64, device=device)
        self.epochs = torch.zeros(MAX_BATCH, dtype=torch.int32, device=device)
