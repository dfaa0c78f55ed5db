"""Triton's interpreter with the programs of a request side by side, each in a process of its own.

The interpreter runs one program after another, so one that waits for another's words would wait for ever,
and nothing about waiting is tried. Here tensors are put into shared memory and each rank runs in a forked
process: real waiting, in whatever order the machine has it. A deadlock, or programs that decide differently,
ends in :class:`TimeoutError`.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import time

import torch
from triton.runtime import interpreter

from treeconv.backends.triton import TritonBackend

_LIMIT_S = 60


def _share(argument):
    if isinstance(argument, torch.Tensor) and not argument.is_shared():
        argument.share_memory_()


def _launch(executor, *arguments, **options):
    """A launch over the grid (programs, B): rank 0 here, the others in processes that are forked."""
    names = inspect.getfullargspec(executor.fn).args
    options = {name: value for name, value in options.items() if name in names}
    for argument in (*arguments, *options.values()):
        _share(argument)
    on_host, options_on_host = executor._init_args_hst(arguments, options)
    scope = interpreter._patch_lang(executor.fn)
    bound = inspect.getcallargs(executor.fn, *on_host, **options_on_host)
    bound = {
        name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
        for name, value in bound.items()
    }
    programs, batch = executor.grid
    interpreter.interpreter_builder.set_grid_dim(programs, batch, 1)

    def run(rank):
        for request in range(batch):
            interpreter.interpreter_builder.set_grid_idx(rank, request, 0)
            executor.fn(**bound)

    others = []
    for rank in range(1, programs):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                run(rank)
                os._exit(0)
            os._exit(1)
        others.append(child)

    late = False

    def too_late(*_):
        nonlocal late
        late = True
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(_LIMIT_S)
    try:
        run(0)
        while others:
            ended, status = os.waitpid(-1, os.WNOHANG)
            if ended in others:
                others.remove(ended)
                assert status == 0, "a program raised"
            time.sleep(0.001)
    except Exception as error:  # the interpreter makes an error of its own of every other
        if late:
            raise TimeoutError(f"{programs} programs a request wait for each other") from error
        raise
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        for child in others:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        scope.restore()


@contextlib.contextmanager
def programs_a_request(monkeypatch, count):
    """Within this, a :class:`TritonBackend` launches so many programs for each request, side by side."""
    with monkeypatch.context() as patch:
        patch.setattr(TritonBackend, "programs_for", staticmethod(lambda *_: count))
        patch.setattr(interpreter.GridExecutor, "__call__", _launch)
        yield
