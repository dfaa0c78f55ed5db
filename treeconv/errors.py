"""Every exception treeconv raises on purpose; each docstring says when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = [
    "BackendUnavailable",
    "CorpusError",
    "InvalidArgument",
    "InvalidTree",
    "LawBroken",
    "TreeconvError",
]


class TreeconvError(Exception):
    """Base class: ``except TreeconvError`` catches whatever treeconv reports on purpose."""


class InvalidArgument(TreeconvError, ValueError):
    """An argument breaks a documented rule; the message reads ``name=value, but must be <rule>``."""


class InvalidTree(InvalidArgument):
    """A draft tree, or the converted form of one, is malformed; the message names the node and the rule."""


class BackendUnavailable(TreeconvError, RuntimeError):
    """A backend is unknown, cannot be imported here, or does not take this input; the message says why."""


class CorpusError(TreeconvError, ValueError):
    """A corpus file is missing, truncated, corrupt or of an unknown schema; the message names the file."""


class LawBroken(TreeconvError, AssertionError):
    """A sampler broke a law; the message holds the case as a picture, got, want, and why.

    Args:
        message: the whole text.

        law: the law's name.

        backend: the backend's name; None for laws about trees alone.

        case: the :class:`~treeconv.VerifyCase` to save for a replay; None where there is none.

        parameters: whatever else a replay needs, as JSON values.

        path: the file the case was loaded from, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        law: str,
        backend: str | None = None,
        case: Any = None,
        parameters: Mapping[str, Any] | None = None,
        path: Path | None = None,
    ) -> None:
        super().__init__(message)
        self.law = law
        self.backend = backend
        self.case = case
        self.parameters = dict(parameters or {})
        self.path = path
