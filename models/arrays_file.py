"""Named arrays in one .npz file: no pickle, nothing compressed, and every size known before anything is allocated."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np

from hotneuron.models.errors import ModelFileError, NotFoundError, StorageError

_MAX_HEADER_BYTES = 4096
_DAMAGE = (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, OSError)


def save_arrays(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    """Written beside and then renamed, so that no half-written file is left. Raises StorageError."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as stream:
            np.savez(stream, **arrays)  # type: ignore[arg-type]
        partial.replace(path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            partial.unlink()


def load_arrays(path: Path, wanted: Mapping[str, tuple[str, int]]) -> dict[str, np.ndarray]:
    """The arrays named, each of the dtype and number of axes asked for. Raises NotFoundError, ModelFileError."""
    with _opened(path) as archive:
        return {name: _array(path, archive, name, np.dtype(dtype), axes) for name, (dtype, axes) in wanted.items()}


@contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        stream = path.open("rb")
    except OSError as error:
        raise NotFoundError(f"{path}: cannot be read: {error.strerror or error}") from error
    with stream:
        try:
            with zipfile.ZipFile(stream) as archive:
                yield archive
        except _DAMAGE as error:  # NOTE a wild offset is an OSError of seek
            raise ModelFileError(path, "archive", f"not a .npz file of hotneuron, or damaged ({error})") from error


def _array(path: Path, archive: zipfile.ZipFile, name: str, dtype: np.dtype[Any], axes: int) -> np.ndarray:
    try:
        info = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise ModelFileError(path, name, "missing; was this file made by another program?") from None
    if info.compress_type != zipfile.ZIP_STORED or info.file_size > path.stat().st_size:
        raise ModelFileError(path, name, "compressed or larger than the file; only stored arrays are read")
    with archive.open(info) as stream:
        shape = _shape(path, stream, name, dtype, axes)
        n_bytes = int(np.prod(shape, dtype=object)) * dtype.itemsize
        if n_bytes > info.file_size:
            raise ModelFileError(path, name, f"claims {n_bytes} bytes where {info.file_size} are stored")
        data = stream.read(n_bytes)
        if len(data) != n_bytes:
            raise ModelFileError(path, name, "cut short")
    return np.frombuffer(data, dtype).reshape(shape)


def _shape(path: Path, stream: IO[bytes], name: str, dtype: np.dtype[Any], axes: int) -> tuple[int, ...]:
    try:
        version = np.lib.format.read_magic(stream)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, is_fortran, found = read(stream, max_header_size=_MAX_HEADER_BYTES)
    except (ValueError, KeyError, SyntaxError, TypeError) as error:
        raise ModelFileError(path, name, f"its header is damaged ({' '.join(str(error).split())[:80]})") from error
    if found != dtype or len(shape) != axes or is_fortran or any(size < 0 for size in shape):
        raise ModelFileError(path, name, f"is {found} with shape {shape}; expected {dtype} with {axes} axes")
    return shape
