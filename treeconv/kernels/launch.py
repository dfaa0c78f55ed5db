"""How a launch of :mod:`.verify_tree` is cut up, from shapes and the device alone, and its scratch."""

from __future__ import annotations

import functools

import torch
import triton

__all__ = [
    "MAX_BATCH",
    "MAX_CHUNKS",
    "MAX_NODES",
    "MAX_VOCAB",
    "PROGRAMS_PER_SM",
    "REGISTERS",
    "SHARED_BYTES",
    "WARPS",
    "Workspace",
    "chunk_size",
    "programs_per_request",
    "speaks_ptx",
    "vector_size",
]

MAX_BATCH = 1024
MAX_NODES = 1024
MAX_VOCAB = 262144

MAX_CHUNKS = 64  # at most, per row: what every program repeats for a row is twice a warp's lanes wide
WARPS = 4  # per program: the reductions across warps are written for it
REGISTERS = 128  # per thread, so that the 64 Ki registers of a multiprocessor hold four programs
SHARED_BYTES = 40 * 1024  # a program has less of shared memory, whatever is compiled in
PROGRAMS_PER_SM = 4


def chunk_size(V: int) -> int:
    """Tokens per chunk: few and large ones are less work, many share a row among more programs.

    A row has at most 64 chunks. The bounds are measured: see ``ci/evidence/NOTES.md``.
    """
    if V <= 16 * 1024:
        return 1024
    return 2048 if V <= 40 * 2048 else 4096


def vector_size(rows: torch.Tensor) -> int:
    """Elements of a chunk side by side in a thread: 16 bytes where Triton can prove the alignment, else one.

    The reductions across warps rest on it. V does not matter: it is in the mask of a load alone.
    """
    numbers = (rows.stride(0), rows.stride(1), rows.data_ptr())
    return 16 // rows.element_size() if all(number % 16 == 0 for number in numbers) else 1


@functools.lru_cache
def speaks_ptx(device: torch.device) -> bool:
    """Whether a kernel for this device may use PTX of sm_80; for a CPU, where it is only compiled, it may."""
    if torch.version.hip is not None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def programs_per_request(B: int, V: int, multiprocessors: int, shared_memory: int) -> int:
    """How many programs share a request: at most one a chunk, and as many as the device holds at once.

    Unless it is one program a request, which waits for nobody, B times this never exceeds what the registers
    and the ``shared_memory`` (bytes) of the device's multiprocessors let be co-resident.
    """
    chunks = triton.cdiv(V, chunk_size(V))
    held = min(PROGRAMS_PER_SM, shared_memory // SHARED_BYTES) * multiprocessors
    share = min(chunks, max(1, held // B))
    return triton.cdiv(chunks, triton.cdiv(chunks, share))  # no more than finish as soon


class Workspace:
    """Scratch for one stream of launches on one device; 5.2 MB, whatever N and V.

    Holds what programs publish, the histograms and the epochs. Launches that use it must not overlap in time.
    """

    def __init__(self, device: torch.device | str) -> None:
        # A word's place belongs to one request, whatever the shapes of a call: tags count per request, so a
        # place shared between requests could hold another's word under the very tag that is waited for.
        # Two places, -1 no tag; three histograms of 256 int32, zero.
        self.words = torch.full((MAX_BATCH, 5, 2 * MAX_CHUNKS), -1, dtype=torch.int64, device=device)
        self.words[:, 2:] = 0
        self.epochs = torch.zeros(MAX_BATCH, dtype=torch.int32, device=device)
