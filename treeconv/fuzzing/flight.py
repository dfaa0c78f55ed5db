"""A worker's flight recorder: what it does right now, in a file that outlives it.

The supervisor reads it while the worker runs, to show progress and to see a hang; and after a crash, to
know the case that was under way. Nothing is synced to the disk: what a process wrote is there when the
process is not.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["COUNTERS", "FlightRecorder", "read_payload", "read_status", "reset"]

#: job: the number of the job under way. cases: judged. decisions: judged in them. repeats: failures that were
#: known. entries: inputs added to the working set. features: of coverage. done: 1 once nothing is left to do.
COUNTERS = ("job", "cases", "decisions", "repeats", "entries", "features", "done")
_NUMBER = struct.Struct("<Q")
_TIME = struct.Struct("<d")
_STARTED = _NUMBER.size * len(COUNTERS)
_LENGTH = _STARTED + _TIME.size
_HEADER = _LENGTH + _NUMBER.size


class FlightRecorder:
    """The writing side.

    Args:
        path: made anew, or taken over with its counters from the worker before.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        if os.fstat(self._file).st_size < _HEADER:
            os.ftruncate(self._file, _HEADER)
        self._map = mmap.mmap(self._file, _HEADER)
        self.counters = {name: self._get(name) for name in COUNTERS}
        self.idle()

    def _get(self, name: str) -> int:
        return int(_NUMBER.unpack_from(self._map, COUNTERS.index(name) * _NUMBER.size)[0])

    def set(self, name: str, value: int) -> None:
        """Set a counter."""
        self.counters[name] = value
        _NUMBER.pack_into(self._map, COUNTERS.index(name) * _NUMBER.size, value)

    def add(self, name: str, value: int = 1) -> None:
        """Add to a counter."""
        self.set(name, self.counters[name] + value)

    def under_way(self, payload: Any) -> None:
        """Before a backend is called: what it is called with, as something to pickle."""
        self.idle()
        raw = pickle.dumps(payload, protocol=pickle.HIGHEST_PROTOCOL)
        os.pwrite(self._file, raw, _HEADER)
        _NUMBER.pack_into(self._map, _LENGTH, len(raw))
        self.alive()

    def alive(self) -> None:
        """The call under way is getting on: the watchdog counts from here."""
        _TIME.pack_into(self._map, _STARTED, time.monotonic())

    def idle(self) -> None:
        """Nothing is under way that could hang."""
        _TIME.pack_into(self._map, _STARTED, 0.0)


def reset(path: Path) -> None:
    """Nothing is under way any more: the worker that wrote it is gone."""
    if path.exists():
        with path.open("r+b") as file:
            file.seek(_STARTED)
            file.write(_TIME.pack(0.0))


def read_status(path: Path) -> tuple[dict[str, int], float]:
    """The counters, and for how many seconds the call under way has run; 0 where none is."""
    try:
        with path.open("rb") as file:
            raw = file.read(_HEADER)
    except OSError:
        raw = b""
    if len(raw) < _HEADER:
        return dict.fromkeys(COUNTERS, 0), 0.0
    counters = {
        name: _NUMBER.unpack_from(raw, place * _NUMBER.size)[0] for place, name in enumerate(COUNTERS)
    }
    started = _TIME.unpack_from(raw, _STARTED)[0]
    return counters, time.monotonic() - started if started else 0.0


def read_payload(path: Path) -> Any:
    """What was under way, or None."""
    raw = path.read_bytes()
    if len(raw) < _HEADER or not _TIME.unpack_from(raw, _STARTED)[0]:
        return None
    (length,) = _NUMBER.unpack_from(raw, _LENGTH)
    return pickle.loads(raw[_HEADER : _HEADER + length])  # noqa: S301  # our own worker wrote it
