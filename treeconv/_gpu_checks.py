"""The checks behind :mod:`treeconv.gpu_laws`; each returns how many decisions it judged."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treeconv._scale import WideBatch, float64_law, random_batch, random_trees
from treeconv.backends.registry import get_backend
from treeconv.convert import to_verify_input
from treeconv.errors import BackendUnavailable, InvalidArgument
from treeconv.judge import Violation
from treeconv.tree import Coins, DraftTree, VerifyInput, VerifyOutput

if TYPE_CHECKING:
    from typing_extensions import Self

    from treeconv.backends.base import Backend

#: The band of a boundary is narrower than this in the batches below: 256 units of 2**-24.
_WIDE_BAND = 256 * 2.0**-24
#: Bytes that a large call leaves free for what else it needs.
ROOM = 2**30
_OUTPUTS = ("accept_index", "accept_token_num", "predicts", "status")


@dataclass(frozen=True)
class Sizes:
    """How much a run judges. The defaults are the full laws, for a GPU.

    Args:
        trees: random trees of the agreement laws.

        chunk: of them per launch; 1024 is the most that the Triton sampler takes.

        replays: of each captured graph.

        vocab: of the graph laws, and of some of the agreement's batches: large enough that a sampler may cut
            a row up.

        wide_batch, wide_slots, wide_vocab: the full-size calls.

        offset_shapes: ``(B, N, V)`` whose rows pass 2**31 and 2**32 elements; one of them has the most nodes
            and tokens that the Triton sampler takes.
    """

    trees: int = 102_400
    chunk: int = 1024
    replays: int = 300
    vocab: int = 5000
    wide_batch: int = 128
    wide_slots: int = 64
    wide_vocab: int = 163_840
    offset_shapes: tuple[tuple[int, int, int], ...] = (
        (210, 64, 163_840),
        (430, 64, 163_840),
        (12, 1024, 262_144),
    )

    @classmethod
    def small(cls) -> Sizes:
        """For the CPU: every law, none of the width."""
        return cls(
            trees=400,
            chunk=200,
            replays=25,
            vocab=300,
            wide_batch=12,
            wide_slots=8,
            wide_vocab=400,
            offset_shapes=((9, 4, 50),),
        )


class Judged(int):
    """How many decisions a law judged, and in ``left_out`` what it did not judge here, and why."""

    left_out: tuple[str, ...]

    def __new__(cls, decisions: int, left_out: tuple[str, ...] = ()) -> Self:
        made = super().__new__(cls, decisions)
        made.left_out = left_out
        return made


def free_bytes(device: torch.device | str) -> float:
    """Memory that can be allocated; on the CPU as much as anybody wants."""
    if torch.device(device).type != "cuda":
        return math.inf
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0]


def no_room(shape: tuple[int, int, int], bytes_each: int, device: torch.device | str) -> str | None:
    """Why rows of this shape, of so many bytes an element in all, do not fit the device; None if they do."""
    needed = int(math.prod(shape) * bytes_each * 1.15)
    if needed + ROOM <= free_bytes(device):
        return None
    return f"{' x '.join(map(str, shape))}: {needed} bytes do not fit beside the rest"


def fresh(backend: Backend) -> Backend:
    """The backend with nothing left in its buffers, where it can say how."""
    return backend.fresh() if hasattr(backend, "fresh") else backend


def verify_wide(backend: Backend, wide: WideBatch, depth_cap: int, **more: Any) -> VerifyOutput:
    if backend.traits.takes_logits:
        return backend.verify(wide.batch, wide.logits, wide.temperature, wide.coins, depth_cap, **more)
    law = float64_law(wide.logits, wide.temperature).float()
    return backend.verify_probs(wide.batch, law, wide.coins, depth_cap)


def hold_outputs(
    got: VerifyOutput, want: VerifyOutput, what: str, requests: torch.Tensor | None = None
) -> None:
    """Raise where two outputs differ, in one of the requests if only some count."""
    B = len(want.status)
    for name in _OUTPUTS:
        left, right = (getattr(output, name).reshape(B, -1) for output in (got, want))
        differs = (left != right).any(dim=1)
        if requests is not None:
            differs &= requests
        if bool(differs.any()):
            first = int(differs.int().argmax())
            raise Violation(
                first,
                f"{what}: {name} {left[first].tolist()[:16]}",
                f"{right[first].tolist()[:16]}, as without that",
                f"{int(differs.sum())} of {B} requests differ",
            )


def float64_agreement(backend: Backend, device: torch.device, rng: np.random.Generator, sizes: Sizes) -> int:
    """Decisions of ``sizes.trees`` random trees against the float64 walk, some over the larger vocabulary."""
    slots, cap = 12, 9
    few = max(1, sizes.chunk // 8)
    batches = [(sizes.chunk, 64)] * -(-sizes.trees // sizes.chunk) + [(few, sizes.vocab)] * 12
    judged = left_out = expected = 0
    for count, vocab in batches:
        wide = random_batch(rng, count, slots, vocab, device)
        output = verify_wide(fresh(backend), wide, cap)
        wrong, inside, walk = wide.disagreements(output, cap)
        judged += count
        left_out += int(inside.sum())
        # A coin meets the band of one of V boundaries, and of those of the nodes on its way.
        expected += int(count * (0.02 + 2 * _WIDE_BAND * vocab))
        if bool(wrong.any()):
            first = int(wrong.int().argmax())
            nodes = walk.nodes[first]
            raise Violation(
                first,
                f"flat indices {output.accept_index[first].tolist()}, tokens {output.tokens[first]}",
                f"nodes {nodes[nodes >= 0].tolist()}, tokens {walk.tokens[first][nodes >= 0].tolist()}",
                f"{int(wrong.sum())} of {count} requests over {vocab} tokens, outside the ambiguity band",
            )
    if left_out > expected + 5:
        raise Violation(
            0, f"{left_out} of {judged} trees inside the band", f"{expected}, as a band so wide leaves out"
        )
    return judged - left_out


def sgl_agreement(backend: Backend, device: torch.device, rng: np.random.Generator, sizes: Sizes) -> int:
    """``accept_index`` of a backend and of the raw sgl_kernel, outside the band."""
    try:
        theirs = get_backend("sgl-raw")
    except BackendUnavailable:
        return 0
    if device.type not in theirs.traits.devices:
        return 0
    judged = 0
    slots, vocab, cap = 12, 64, 9
    for _ in range(0, sizes.trees, sizes.chunk):
        wide = random_batch(rng, sizes.chunk, slots, vocab, device)
        mine = verify_wide(fresh(backend), wide, cap)
        other = verify_wide(fresh(theirs), wide, cap)
        clear = wide.disagreements(mine, cap)[1].logical_not()
        differs = (mine.accept_index != other.accept_index).any(dim=1) & clear
        if bool(differs.any()):
            first = int(differs.int().argmax())
            raise Violation(
                first,
                f"accept_index {mine.accept_index[first].tolist()}",
                f"{other.accept_index[first].tolist()}, as sgl_kernel",
                f"{int(differs.sum())} of {sizes.chunk} requests",
            )
        judged += int(clear.sum())
    return judged


def _peaked(
    rng: np.random.Generator, B: int, N: int, V: int, device: torch.device
) -> tuple[VerifyInput, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Trees, the one token each row has its mass on ``[B, N]``, and the path and bonus that follow."""
    parents, tokens, sizes = random_trees(rng, B, N, V)
    peaks = rng.integers(0, V, (B, N))
    for node in range(N - 1, 0, -1):  # some rows peak at a child: the lowest such node stands
        follow = (rng.random(B) < 0.7) & (parents[:, node] >= 0)
        peaks[follow, parents[follow, node]] = tokens[follow, node]
    path, bonus = np.full((B, N), -1), np.zeros(B, np.int64)
    for b in range(B):
        node, length = 0, 0
        while node >= 0:
            path[b, length] = node
            bonus[b] = peaks[b, node]
            kids = np.flatnonzero(
                (parents[b] == node) & (tokens[b] == peaks[b, node]) & (np.arange(N) < sizes[b])
            )
            node, length = (int(kids[0]) if kids.size else -1), length + 1
    trees = [DraftTree(tuple(p[:n].tolist()), tuple(t[:n].tolist())) for p, t, n in zip(parents, tokens, sizes, strict=True)]  # noqa: E501  # fmt: skip
    put = [torch.from_numpy(array).to(device) for array in (peaks, path, bonus)]
    return to_verify_input(trees, N, device=device), put[0], put[1], put[2]


def large_offsets(backend: Backend, device: torch.device, rng: np.random.Generator, sizes: Sizes) -> Judged:
    """All of each row's mass on one token, another in every row: a wrong offset reads another row's token."""
    judged, left_out = 0, []
    for B, N, V in sizes.offset_shapes:
        takes_probs = hasattr(backend, "kernels")  # sgl: its softmax would need the memory three times over
        if backend.name == "sgl" and B * N * V >= 2**32:
            batch = to_verify_input([DraftTree((-1,), (0,))] * B, N, device=device)
            rows = torch.empty(1, device=device).expand(B, N, V)
            coins = Coins(torch.zeros((B, N), device=device), torch.zeros(B, device=device))
            try:
                backend.verify_probs(batch, rows, coins, 2)
            except InvalidArgument:
                judged += 1
                continue
            raise Violation(0, f"{B} x {N} x {V} was taken", "InvalidArgument: the kernel's offsets wrap")
        if (reason := no_room((B, N, V), 8 if takes_probs else 2, device)) is not None:
            left_out.append(reason)
            continue
        batch, peaks, path, bonus = _peaked(rng, B, N, V, device)
        coins = Coins(torch.full((B, N), 0.5, device=device), torch.full((B,), 0.5, device=device))
        if takes_probs:
            rows = torch.zeros((B, N, V), device=device)
            rows.scatter_(2, peaks[:, :, None], 1.0)
            output = fresh(backend).verify_probs(batch, rows, coins, N)
        else:
            rows = torch.full((B, N, V), -60.0, dtype=torch.bfloat16, device=device)
            rows.scatter_(2, peaks[:, :, None], 60.0)
            temperature = torch.tensor([1.0, 0.0], device=device).repeat(B)[:B].contiguous()
            output = backend.verify(batch, rows, temperature, coins, N)
        del rows
        flat = torch.where(path >= 0, path + N * torch.arange(B, device=device)[:, None], -1)
        length = (path >= 0).sum(1)
        drawn = output.predicts.long()[flat.gather(1, length[:, None] - 1)[:, 0]]
        differs = (output.accept_index.long() != flat).any(1) | (drawn != bonus)
        if bool(differs.any()):
            first = int(differs.int().argmax())
            raise Violation(
                first,
                f"flat indices {output.accept_index[first].tolist()[: int(length[first]) + 1]}, then token"
                f" {int(drawn[first])}",
                f"{flat[first, : int(length[first])].tolist()}, then {int(bonus[first])}",
                f"{int(differs.sum())} of {B} requests of {N} x {V}, from request {first} on; its rows"
                f" start at element {first * N * V}",
            )
        judged += B
    return Judged(judged, tuple(left_out))


def covered_support(backend: Backend, device: torch.device, rng: np.random.Generator, sizes: Sizes) -> int:
    """Every token of a small vocabulary is a child of the root, and the coin is the last one below 1."""
    judged = 0
    for vocab in (3, 5, 8, 16):
        count = sizes.chunk
        tree = DraftTree((-1, *[0] * vocab), (0, *rng.permutation(vocab).tolist()))
        wide = random_batch(rng, count, 1, vocab, device, temperatures=(0.5, 1.0, 2.0))
        logits = wide.logits.repeat(1, vocab + 1, 1)
        coins = Coins(torch.full((count, vocab + 1), 1 - 2.0**-24, device=device), wide.coins.final)
        batch = to_verify_input([tree] * count, device=device)
        parents = torch.tensor(tree.parents, device=device).repeat(count, 1)
        asked = WideBatch(batch, logits, wide.temperature, coins, parents)
        output = verify_wide(fresh(backend), asked, 2)
        none = output.accept_token_num < 1
        if bool(none.any()):
            first = int(none.int().argmax())
            raise Violation(
                first,
                f"no child accepted, token {output.tokens[first]} drawn from an empty residual",
                "the last child of positive mass accepted: nothing else has mass",
                f"{int(none.sum())} of {count} rows of {vocab} tokens",
            )
        judged += count
    return judged


def wide_invariance(backend: Backend, device: torch.device, rng: np.random.Generator, sizes: Sizes) -> int:
    """Decisions of single requests at full width: in the large batch, in a sixteenth, alone, reversed."""
    B, N, V = sizes.wide_batch, sizes.wide_slots, sizes.wide_vocab
    wide = random_batch(
        rng, B, N, V, device, dtype=torch.bfloat16, temperatures=(0.0, 0.3, 0.8, 1.0), favoured=22.0
    )
    # More requests than the device has room for at several programs each: what that leaves behind in a
    # backend's buffers must not reach the calls that follow.
    verify_wide(backend, random_batch(rng, 5 * B, 2, V, device, dtype=torch.bfloat16), 2)
    together = verify_wide(backend, wide, 12)
    judged = 0
    order = torch.arange(B - 1, -1, -1, device=device)
    groups = [order, torch.arange(min(16, B), device=device), torch.arange(2, min(6, B), device=device)]
    groups += [torch.tensor([b], device=device) for b in (0, B // 2, B - 1)]
    for group in groups:
        output = verify_wide(backend, wide.take(group), 12)
        base = (N * (group - torch.arange(len(group), device=device)))[:, None]
        moved = torch.where(output.accept_index >= 0, output.accept_index + base.int(), -1)
        want = VerifyOutput(
            together.accept_index[group],
            together.accept_token_num[group],
            together.predicts.view(B, N)[group].reshape(-1),
            together.status[group],
        )
        hold_outputs(replace(output, accept_index=moved), want, f"in a batch of {len(group)}")
        judged += len(group)
    return judged


def wide_determinism(backend: Backend, device: torch.device, rng: np.random.Generator, sizes: Sizes) -> int:
    """One large call, twenty times."""
    wide = random_batch(
        rng, 16, sizes.wide_slots, sizes.wide_vocab, device, dtype=torch.bfloat16, favoured=14.0
    )
    first = verify_wide(fresh(backend), wide, 12)
    first = VerifyOutput(*(getattr(first, field.name).clone() for field in fields(first)))
    for repeat in range(19):
        hold_outputs(verify_wide(fresh(backend), wide, 12), first, f"call {repeat + 2}")
    return 19
