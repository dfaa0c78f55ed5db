"""Texts as another process draws them: nothing but the arguments of a call may decide its coins.

One process serves all laws of a run. It is a new interpreter, of another ``PYTHONHASHSEED``, in which the
backend is loaded by its name, so a backend without one is not asked there, and the reason is printed once.
Run as ``python -m treeconv._other_process``, it answers pickled questions until its input ends.
"""

from __future__ import annotations

import atexit
import importlib
import os
import pickle
import select
import struct
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from treeconv.backends.registry import BACKENDS, get_backend

if TYPE_CHECKING:
    from collections.abc import Callable

    from treeconv.backends.base import Backend

__all__ = ["ask", "name_of"]

_PATIENCE = 120.0  # seconds until an answer
_told: set[str] = set()


def name_of(backend: Backend) -> str | None:
    """What another process can load it by: a registered name, ``module:callable``, or its own class; or None.

    By its class only where its instances are alike: made without arguments, and holding a name at most.
    """
    if backend.name in BACKENDS or ":" in backend.name:
        return str(backend.name)
    made = type(backend)
    module, name = made.__module__, made.__qualname__
    try:
        held = set(vars(backend))
        found = getattr(importlib.import_module(module), name, None)
    except Exception:  # noqa: BLE001  # a stranger's module or class may do anything
        return None
    return f"{module}:{name}" if found is made and module != "__main__" and held <= {"name"} else None


def ask(
    backend: Backend, device: str, calls: list[dict[str, Any]], draw: Callable[..., Any]
) -> list[Any] | None:
    """What the backend emits in another process; None where it cannot be asked there, which is told once.

    Args:
        backend: loaded there by :func:`name_of`.

        device: where its tensors live.

        calls: further keyword arguments of ``draw``, once each.

        draw: called there, so a function of a module.
    """
    name = name_of(backend)
    if name is None:
        why = "it has no name (module:callable, or a class without arguments) to be loaded by there"
        _untried(backend, why)
        return None
    if backend.name in _told:
        return None
    answer, why = _Other.current().answer((draw, name, device, calls))
    if answer is None:
        _untried(backend, why)
    return answer


def _untried(backend: Backend, why: str) -> None:
    if backend.name not in _told:
        _told.add(backend.name)
        print(f"ranks-agree: {backend.name} was not tried in another process: {why}", file=sys.stderr)  # noqa: T201


class _Other:
    """The process that is asked; begun when first needed, and gone with this one."""

    one: _Other | None = None

    def __init__(self) -> None:
        self.pid = os.getpid()
        seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
        paths = os.pathsep.join(path or str(Path.cwd()) for path in sys.path)
        self.process = subprocess.Popen(  # noqa: S603  # this interpreter, and our own module
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths},
        )
        atexit.register(self.end)

    @classmethod
    def current(cls) -> _Other:
        if cls.one is None or cls.one.pid != os.getpid() or cls.one.process.poll() is not None:
            if cls.one is not None:
                cls.one.end()
            cls.one = cls()  # a fork does not talk into its parent's pipe
        return cls.one

    def answer(self, question: Any) -> tuple[list[Any] | None, str]:
        """The texts, or None and why there are none."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            _write(self.process.stdin, question)
            if not select.select([self.process.stdout], [], [], _PATIENCE)[0]:
                self.process.kill()
                return None, f"no answer in {_PATIENCE:.0f} s"
            found: tuple[list[Any] | None, str] = _read(self.process.stdout)
        except (OSError, EOFError, struct.error) as error:
            return None, f"that process ended ({type(error).__name__})"
        return found

    def end(self) -> None:
        """Its input ends, and so does it."""
        if self.pid != os.getpid():
            return
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()


def _write(pipe: BinaryIO | Any, what: Any) -> None:
    data = pickle.dumps(what)
    pipe.write(struct.pack("<q", len(data)) + data)
    pipe.flush()


def _read(pipe: BinaryIO | Any) -> Any:
    (size,) = struct.unpack("<q", pipe.read(8))
    return pickle.loads(pipe.read(size))  # noqa: S301  # from our own process


def _serve() -> None:
    """Answer until the input ends. What the backend prints goes to standard error, not among the answers."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            question = _read(sys.stdin.buffer)
        except struct.error:
            return
        try:
            draw, name, device, calls = question
            found: tuple[Any, str] = ([draw(get_backend(name), device, **call) for call in calls], "")
        except (Exception, SystemExit) as error:  # noqa: BLE001  # a stranger's sampler may raise anything
            found = (None, f"{type(error).__name__}: {error}")
        _write(answers, found)


if __name__ == "__main__":
    _serve()
