"""The sampler compiles for sm_90, with the Triton that is here, without a GPU: ptxas is inside the wheel.

Which arguments become constants (1, multiples of 16) decides what Triton's compiler sees, so every way of
launching is tried: Triton 3.6 failed on some, found only on a GPU. Each compile runs in a process of its own,
since a compiler that fails may end the process, and since this one may have imported Triton's interpreter.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():  # other tests of this process take Triton's interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")

ROOT = Path(__file__).resolve().parent.parent

COMPILE = """
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

class Driver:  # what a launch asks before it compiles
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device=None: 0)
    get_active_torch_device = staticmethod(lambda: torch.device("cpu"))

driver.set_active(Driver())
from treeconv.filters import Filters
from treeconv.kernels import launch
from treeconv.kernels import verify_tree as module
from treeconv.processors import Processors, bitmask_words

kernel = module._verify_tree_kernel

class Launcher:
    def __getitem__(self, grid):
        return lambda *arguments, **options: kernel.warmup(*arguments, grid=grid, **options)

module._verify_tree_kernel = Launcher()
for case in sys.argv[1:]:
    N, V, dtype, probs, order, programs, *held = case.split(",")
    B, N, V = 3, int(N), int(V)
    rows = torch.empty(1, dtype=getattr(torch, dtype)).as_strided((B, N, V), (0, 0, 0))

    class Rows:
        shape, dtype, stride = (B, N, V), rows.dtype, staticmethod(lambda axis: (N * V, V, 1)[axis])
        data_ptr, element_size, device = staticmethod(lambda: 0), rows.element_size, rows.device

    def of(kind, *shape):
        return torch.zeros(shape, dtype=kind)

    trees = [of(torch.int64, B, N) for _ in range(3)]
    temperature = None if probs == "probs" else of(torch.float32, B)
    coins = of(torch.float32, B, N), of(torch.float32, B)
    outputs = [of(torch.int32, B, 5), of(torch.int32, B), of(torch.int32, B * N), of(torch.int32, B)]
    filters = None
    if order:
        filters = Filters(of(torch.int64, B), of(torch.float32, B), of(torch.float32, B), order)
    processors = None
    if held:
        bias = of(torch.float32, B, V) if "bias" in held else None
        mask = of(torch.int32, B, N, bitmask_words(V)) if "bitmask" in held else None
        processors = Processors(bias, mask)
    launched = launch.Workspace("cpu"), int(programs), filters, processors
    module.verify_tree(*trees, Rows(), temperature, *coins, *outputs, *launched)
    print("compiled", case, flush=True)
"""


def compiled(*cases: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, *cases],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if "No module named 'triton.backends" in done.stderr:
        pytest.skip("this Triton brings no compiler")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(
    "cases",
    [
        # One node, one token, one chunk; sizes that are multiples of 16 or not; both ways to list siblings.
        ("1,1,bfloat16,logits,,1", "1,5,float32,probs,,1", "64,4096,bfloat16,logits,,2"),
        ("71,1030,float16,logits,,2", "16,163840,bfloat16,logits,,40"),
        ("1,37,float32,probs,joint,1",),
        ("64,163840,bfloat16,logits,sequential,20",),
        # Bias and bitmask, each alone and both: one word, several, V no multiple of 32; with filters.
        ("1,1,bfloat16,logits,,1,bias,bitmask", "64,4096,bfloat16,logits,,2,bitmask"),
        ("71,1030,float16,logits,,2,bias,bitmask", "16,163840,bfloat16,logits,,40,bias"),
        ("1,37,float32,logits,joint,1,bias,bitmask",),
    ],
    ids=lambda cases: cases[0],
)
def test_every_way_to_launch_compiles(cases):
    assert compiled(*cases).count("compiled") == len(cases)
