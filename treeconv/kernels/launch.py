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
    "REGISTERS",
    "WARPS_PER_SM",
    "Workspace",
    "chunk_size",
    "programs_per_request",
    "speaks_ptx",
    "vector_size",
    "warps_per_program",
]

MAX_BATCH = 1024
MAX_NODES = 1024
MAX_VOCAB = 262144

MAX_CHUNKS = 64  # at most, per row: what every program repeats for a row is twice a warp's lanes wide
_TOKENS_PER_THREAD = 32
REGISTERS = 128  # per thread, so that the 64 Ki registers of a multiprocessor hold 16 warps
WARPS_PER_SM = 16


def chunk_size(V: int) -> int:
    """Tokens per chunk: few and large ones are less work, many share a row among more programs.

    A row has at most 64 chunks. The bounds are measured: see ``ci/evidence/NOTES.md``.
    """
    if V <= 16 * 1024:
        return 1024
    return 2048 if V <= 40 * 2048 else 4096


def warps_per_program(chunk: int) -> int:
    """Warps per program: a function of the chunk alone, since it shapes the sums."""
    # Triton 3.6 fails to compile the kernel for one warp, and with filters for two.
    return max(4, chunk // (32 * _TOKENS_PER_THREAD))


def vector_size(rows: torch.Tensor) -> int:
    """Elements Triton loads at once: 16 bytes where it can prove the alignment, else one."""
    numbers = (rows.shape[2], rows.stride(0), rows.stride(1), rows.data_ptr())
    return 16 // rows.element_size() if all(number % 16 == 0 for number in numbers) else 1


@functools.lru_cache
def speaks_ptx(device: torch.device) -> bool:
    """Whether a kernel for this device may use PTX of sm_80; for a CPU, where it is only compiled, it may."""
    if torch.version.hip is not None:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def programs_per_request(B: int, V: int, multiprocessors: int) -> int:
    """How many programs share a request: at most one a chunk, and as many as the device holds at once.

    Unless it is one program a request, which waits for nobody, B times this never exceeds the 16 warps a
    multiprocessor which the kernel's register limit lets be co-resident.
    """
    chunk = chunk_size(V)
    chunks = triton.cdiv(V, chunk)
    share = min(chunks, max(1, WARPS_PER_SM // warps_per_program(chunk) * multiprocessors // B))
    return triton.cdiv(chunks, triton.cdiv(chunks, share))  # no more than finish as soon


class Workspace:
    """Scratch for one stream of launches on one device; 3.2 MB, whatever N and V.

    Holds the published chunk triples and the epochs. Launches that use it must not overlap in time.
    """

    def __init__(self, device: torch.device | str) -> None:
        # A word's place belongs to one request, whatever the shapes of a call: tags count per request, so a
        # place shared between requests could hold another's word under the very tag that is waited for.
        self.words = torch.full((MAX_BATCH, 2, 3 * MAX_CHUNKS), -1, dtype=torch.int64, device=device)
        self.epochs = torch.zeros(MAX_BATCH, dtype=torch.int32, device=device)
