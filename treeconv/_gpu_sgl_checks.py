"""The checks about SGLang's own operators and about the device converter."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from treeconv._gpu_checks import fresh, hold_outputs, verify_wide
from treeconv._scale import random_batch, random_trees
from treeconv.convert import to_eagle, to_verify_input, tree_mask
from treeconv.errors import InvalidArgument
from treeconv.judge import Violation
from treeconv.tree import Coins, DraftTree, TreeMaskMode

if TYPE_CHECKING:
    from treeconv._gpu_checks import Sizes

__all__ = ["device_converter", "duplicate_siblings", "greedy_operator", "sgl_build_tree"]


def _on_device(
    arrays: tuple[Any, Any, Any, Any], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    first, second, third, fourth = (torch.from_numpy(array).to(device) for array in arrays)
    return first, second, third, fourth


def duplicate_siblings(backend: Any, device: torch.device, rng: np.random.Generator, sizes: Sizes) -> int:
    """B13: siblings 1 and 2 both carry token 1; its mass .3 must not be accepted twice."""
    del rng, sizes
    batch = to_verify_input([DraftTree((-1, 0, 0), (9, 1, 2))], device=device)
    twins = replace(batch, candidates=torch.tensor([[9, 1, 1]], device=device))
    probs = torch.tensor([[[0.2, 0.3, 0.4, 0.1]] * 3], device=device)
    coins = Coins(torch.full((1, 3), 0.45, device=device), torch.full((1,), 0.5, device=device))
    try:
        output = backend.verify_probs(twins, probs, coins, 2)
    except InvalidArgument:
        return 1
    if int(output.accept_token_num[0]):
        raise Violation(
            0,
            f"accepts node {int(output.accept_index[0, 1])} at coin 0.45: P(token 1) = 0.6",
            "InvalidTree, or none accepted: P(token 1) = 0.3",
            "the twin's mass is added a second time",
        )
    return 1


def greedy_operator(backend: Any, device: torch.device, rng: np.random.Generator, sizes: Sizes) -> int:
    """``verify_greedy`` and ``verify`` at T = 0."""
    judged = 0
    for _ in range(4):
        wide = random_batch(rng, min(sizes.chunk, 1024), 12, 64, device, temperatures=(0.0,), favoured=6.0)
        hold_outputs(
            backend.verify_greedy(wide.batch, wide.logits, 9),
            verify_wide(fresh(backend), wide, 9),
            "verify_tree_greedy",
        )
        judged += len(wide.temperature)
    return judged


def sgl_build_tree(backend: Any, device: torch.device, rng: np.random.Generator, sizes: Sizes) -> int:
    """SGLang's builder and the CPU converter on trees of one size."""
    del sizes
    judged = 0
    for slots in (2, 8, 13, 31):
        parents, tokens, _ = random_trees(rng, 6, slots, 64)
        parents[:, 1:] = np.maximum(parents[:, 1:], 0)
        tokens = np.array([rng.permutation(64)[:slots] for _ in range(6)])
        trees = [
            DraftTree(tuple(p.tolist()), tuple(t.tolist())) for p, t in zip(parents, tokens, strict=True)
        ]
        prefixes = rng.integers(0, 40, 6).tolist()
        want = to_verify_input(trees, slots, prefixes)
        prefix_lens = torch.tensor(prefixes, device=device)
        for mode in TreeMaskMode:
            got, mask = backend.build_tree(to_eagle(trees), prefix_lens, sum(prefixes), mode)
            for field in fields(want):
                if not torch.equal(getattr(got, field.name).cpu(), getattr(want, field.name)):
                    raise Violation(0, f"{field.name} differs for {slots} nodes", "the converter's")
            ours = tree_mask(want, mode).reshape(-1).view(torch.uint8)
            if not torch.equal(mask.cpu().view(torch.uint8), ours):
                raise Violation(0, f"{mode.name} differs for {slots} nodes", "the converter's")
            judged += 6
    return judged


def device_converter(backend: None, device: torch.device, rng: np.random.Generator, sizes: Sizes) -> int:
    """Random batches in every mode, over poisoned outputs of another call; on CUDA a captured conversion."""
    del backend
    from treeconv.kernels.convert_tree import convert_tree  # noqa: PLC0415  (triton is optional)

    judged = 0
    shapes = [(sizes.wide_batch, 64), (3, 7), (33, 16), (5, 33)] + (
        [(4, 1024)] if device.type == "cuda" else []
    )
    for B, N in shapes:
        for mode in (None, *TreeMaskMode):
            parents, tokens, counts = random_trees(rng, B, N, max(4 * N, 64))
            prefixes = rng.integers(0, 300, B)
            trees = [DraftTree(tuple(p[:n].tolist()), tuple(t[:n].tolist())) for p, t, n in zip(parents, tokens, counts, strict=True)]  # noqa: E501  # fmt: skip
            wanted = torch.from_numpy(prefixes).to(device)
            inputs = _on_device((parents, tokens, counts, np.roll(prefixes, 1)), device)
            total = int(prefixes.sum())
            # The buffers were made for other prefixes, in another tensor; a graph is captured with them too.
            made = convert_tree(*inputs[:3], inputs[3].clone(), mode, total)
            for tensor in vars(made.batch).values():
                tensor.fill_(-77)
            if made.mask is not None:
                made.mask.view(torch.uint8).fill_(0x5A)
            if device.type == "cuda":
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    made = convert_tree(*inputs, mode, total, made)
                inputs[3].copy_(wanted)
                graph.replay()
            else:
                inputs[3].copy_(wanted)
                made = convert_tree(*inputs, mode, total, made)
            for tensor in inputs:  # the caller's, to be written to at any time
                tensor.fill_(-5)
            want = to_verify_input(trees, N, prefixes.tolist())
            for field in fields(want):
                if not torch.equal(getattr(made.batch, field.name).cpu(), getattr(want, field.name)):
                    raise Violation(0, f"{field.name} differs, {B} x {N}, {mode!r}", "the CPU converter's")
            if mode is not None and made.mask is not None:
                mask = tree_mask(want, mode)
                if not torch.equal(made.mask.cpu().view(torch.uint8), mask.view(torch.uint8)):
                    raise Violation(0, f"{mode.name} differs, {B} x {N}", "the CPU converter's")
            judged += B
    return judged
