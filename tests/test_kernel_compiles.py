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

from treeconv.kernels import launch  # noqa: E402  (after the environment is set)

ROOT = Path(__file__).resolve().parent.parent

COMPILE = """
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
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

TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
kernel = module._verify_tree_kernel
compiled = []

class Launcher:
    def __getitem__(self, grid):
        return lambda *arguments, **options: compiled.append(kernel.warmup(*arguments, grid=grid, **options))

def misplaced(ttgir):
    # Our PTX meets across warps as if thread t had element t of [THREADS], and that alone.
    layouts = dict(re.findall("(#\\\\w+) = (#ttg.blocked<.*?>)", ttgir))
    fitting = re.compile(
        "sizePerThread = .1(, 1, [0-9]+)?., threadsPerWarp = .(1, 32, 1|32)., warpsPerCTA = .(1, 4, 1|4)."
    )
    for line in ttgir.splitlines():
        if "elementwise_inline_asm" in line and ("bar.sync" in line or "redux" in line):
            for layout in re.findall("tensor<128x[a-z0-9]+, (#.*?)>(?:,| ->|$| loc)", line.split("} ")[-1]):
                name = re.search("(#(?!ttg)\\\\w+)", layout)[1]
                if not fitting.search(layouts.get(name, "")):
                    yield layouts.get(name, name)

module._verify_tree_kernel = Launcher()
for case in sys.argv[1:]:
    N, V, dtype, probs, order, programs, *held = case.split(",")
    B, N, V = 3, int(N), int(V)
    rows = torch.empty(1, dtype=getattr(torch, dtype)).as_strided((B, N, V), (0, 0, 0))

    padded = next((int(word[7:]) for word in held if word.startswith("stride=")), V)

    class Rows:
        shape, dtype = (B, N, V), rows.dtype
        stride = staticmethod(lambda axis: (N * padded, padded, 1)[axis])
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
    for layout in misplaced(compiled[-1].asm["ttgir"]):
        print("misplaced", case, layout, flush=True)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled[-1].asm["cubin"])
        usage = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True)
    print("compiled", case, "shared", max(map(int, re.findall("SHARED:([0-9]+)", usage.stdout))), flush=True)
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
        # Requests aligned to 16 and rows not; rows aligned, as a vocabulary is padded, and V not.
        ("4,4,float32,logits,,1", "8,1030,float16,logits,sequential,1", "4,1020,float32,probs,joint,1"),
        ("16,50257,bfloat16,logits,,13,stride=50304", "4,1030,float32,probs,joint,1,stride=1040"),
        ("16,50257,bfloat16,logits,sequential,13,stride=50304,bitmask",),
    ],
    ids=lambda cases: cases[0],
)
def test_every_way_to_launch_compiles(cases):
    said = compiled(*cases)
    assert said.count("compiled") == len(cases)
    assert "misplaced" not in said, said


def test_a_program_has_the_shared_memory_that_co_residency_counts_on():
    """The most that is compiled in; the system takes a KiB more."""
    said = compiled("1024,163840,bfloat16,logits,sequential,20,bias,bitmask")
    assert 0 < int(said.split("shared ")[1].split()[0]) + 1024 <= launch.SHARED_BYTES
