"""Triton kernels, one and its launcher a file; no policy, no checks beyond what only they can know."""
