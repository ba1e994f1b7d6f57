"""Files that other programs leave beside a model: read whole, after their kind and size were looked at."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from hotneuron.models.errors import ModelFileError, NotFoundError


def read_side_file(path: Path, limit_bytes: int, what: str) -> bytes:
    """The bytes of a file that can hold no more than the limit, being `what` it is.

    Raises NotFoundError (no such file), ModelFileError (too large, not a file, unreadable).
    """
    try:
        # Checked before open(): opening a pipe would wait for its writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise ModelFileError(path, "file", f"is not a regular file; {what} is expected")
        with path.open("rb") as stream:
            n_bytes = os.fstat(stream.fileno()).st_size
            if n_bytes > limit_bytes:
                raise ModelFileError(path, "file", f"has {n_bytes} bytes; {what} has at most {limit_bytes}")
            return stream.read(n_bytes)
    except FileNotFoundError:
        raise NotFoundError(f"{path}: there is no such file; {what} is expected") from None
    except OSError as error:
        raise ModelFileError(path, "file", f"cannot be read: {error.strerror or error}") from None
