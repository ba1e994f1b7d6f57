"""The tree of errors that users, files and machines can cause: each names the thing, the value and the remedy."""

from __future__ import annotations

from pathlib import Path


class HotneuronError(Exception):
    """Root of the tree; the command line prints the message alone, on one line, and exits with 1."""


class ModelFileError(HotneuronError):
    """A model file is damaged or hostile."""

    def __init__(self, path: str | Path, field: str, problem: str):
        super().__init__(f"{path}: {field}: {problem}")


class UnsupportedError(HotneuronError):
    """The file is sound, but asks for something that hotneuron does not have; says what is supported."""


class NotFoundError(HotneuronError):
    """A model, file or name does not exist."""


class RequestError(HotneuronError):
    """A request's field is out of range, or its prompt does not fit the context."""


class StorageError(HotneuronError):
    """The cache folder cannot be written (full disk, permissions)."""


class EngineError(HotneuronError):
    """The running engine failed: a worker died and could not be replaced, or a meeting passed its deadline."""
