"""How a launch of :mod:`.verify_tree` is cut up, from shapes and the device alone, and its scratch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton

__all__ = [
    "AHEAD_BATCH",
    "AHEAD_ROWS",
    "JUMP_LIMIT",
    "MAX_BATCH",
    "MAX_CHUNKS",
    "MAX_NODES",
    "MAX_VOCAB",
    "REGISTERS",
    "WARPS_PER_SM",
    "LaunchPlan",
    "Workspace",
    "chunk_size",
    "launch_plan",
    "vector_size",
    "warps_per_program",
]

MAX_BATCH = 1024
MAX_NODES = 1024
MAX_VOCAB = 262144
AHEAD_BATCH = 64  # requests, and rows of each, for which scratch has room to read ahead
AHEAD_ROWS = 16

MAX_CHUNKS = 64  # at most, per row: what every program repeats for a row is twice a warp's lanes wide
_TOKENS_PER_THREAD = 32
REGISTERS = 128  # per thread, so that the 64 Ki registers of a multiprocessor hold 16 warps
WARPS_PER_SM = 16
JUMP_LIMIT = 64  # N up to which sibling lists are followed through tables in registers


@dataclass(frozen=True)
class LaunchPlan:
    """How a launch is cut up; a function of shapes and of the device alone. Never changes a result.

    Args:
        programs: programs per request, >= 1.

        read_ahead: rows (nodes ``0 .. read_ahead - 1``) whose chunks are taken in the first step, at most
            ``min(N, AHEAD_ROWS)``, and 0 if B is above ``AHEAD_BATCH``; 0 takes the root's row alone, as
            any later one.
    """

    programs: int
    read_ahead: int = 0


def chunk_size(V: int) -> int:
    """Tokens per chunk: a power of two >= 1024 that cuts a row into at most 64 chunks."""
    return max(1024, triton.next_power_of_2(triton.cdiv(V, MAX_CHUNKS)))


def warps_per_program(chunk: int) -> int:
    """Warps per program: a function of the chunk alone, since it shapes the sums."""
    return max(2, chunk // (32 * _TOKENS_PER_THREAD))  # Triton 3.6 fails to compile the kernel for one


def vector_size(rows: torch.Tensor) -> int:
    """Elements Triton loads at once: 16 bytes where it can prove the alignment, else one."""
    numbers = (rows.shape[2], rows.stride(0), rows.stride(1), rows.data_ptr())
    return 16 // rows.element_size() if all(number % 16 == 0 for number in numbers) else 1


def launch_plan(B: int, N: int, V: int, multiprocessors: int) -> LaunchPlan:
    """Cut B requests of N rows of V tokens over a device.

    Unless it is one program a request, which waits for nobody, ``B * programs`` never exceeds the 16 warps
    a multiprocessor which the kernel's register limit lets be co-resident. With programs to spare, each
    takes one chunk and later nodes' rows are read ahead.
    """
    chunk = chunk_size(V)
    chunks = triton.cdiv(V, chunk)
    share = max(1, WARPS_PER_SM // warps_per_program(chunk) * multiprocessors // B)
    if share < 2 * chunks or B > AHEAD_BATCH:
        return LaunchPlan(programs=triton.cdiv(chunks, triton.cdiv(chunks, min(share, chunks))))
    read_ahead = min(N, share // chunks, AHEAD_ROWS)
    return LaunchPlan(programs=read_ahead * chunks, read_ahead=read_ahead)


class Workspace:
    """Scratch for one stream of launches on one device; 4.7 MB, whatever N and V.

    Holds the published chunk triples and the epochs. Launches that use it must not overlap in time.
    """

    # A word's place belongs to one request, whatever the shapes of a call: tags count per request, so a
    # place shared between requests could hold another one's word under the very tag that is waited for.
    places = 2 * MAX_BATCH + AHEAD_BATCH * AHEAD_ROWS

    def __init__(self, device: torch.device | str) -> None:
        self.words = torch.full((self.places, 3, MAX_CHUNKS), -1, dtype=torch.int64, device=device)
        self.epochs = torch.zeros((3, MAX_BATCH), dtype=torch.int32, device=device)
