"""Without a GPU, Triton's kernels run in its interpreter; it looks at this when it is first imported."""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
