"""Processes that end with the one that started them, whatever becomes of that one."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys

__all__ = ["die_with", "end_group"]

_PARENT_DIES = 1  # prctl's PR_SET_PDEATHSIG


def die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent ends (Linux); a fork does not inherit that.

    Args:
        parent: its process id, as the parent knows it: it may be gone already.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PARENT_DIES, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)


def end_group(leader: int) -> None:
    """Kill what is left of a process group: forks, and what a backend started, unless it left the group."""
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(leader, signal.SIGKILL)
