"""A GGUF or PWRI model file, or the parts of a split one: metadata, tensor table, read-only bytes of each tensor."""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hotneuron.models.errors import ModelFileError, NotFoundError
from hotneuron.models.gguf_header import Header, TensorInfo, parse_header

__all__ = ["GGUFFile", "TensorInfo"]

MAX_PARTS = 1 << 10
_SAMPLE_BYTES = 64
_PART_NAME = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class _Part:
    path: Path
    header: Header
    pages: mmap.mmap
    mtime_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class GGUFFile:
    """An opened model file. `metadata` holds str, int, float, bool and lists of them; `tensors` is in file order.

    NOTE: tensor bytes are pages of the file. Whoever truncates the file while it is open kills the process (SIGBUS).
    """

    path: Path
    magic: str  # "GGUF" or "PWRI" (sparse)
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    paths: tuple[Path, ...]  # of all parts; TensorInfo.part indexes it
    _parts: tuple[_Part, ...]

    @classmethod
    def open(cls, path: str | Path) -> GGUFFile:
        """Reads the header and maps the data. Raises NotFoundError (no such file, a missing part), ModelFileError."""
        path = Path(path)
        first = _open_part(path, 0)
        parts = [first, *(_open_part(other, 1 + n) for n, other in enumerate(_other_parts(first)))]
        tensors: dict[str, TensorInfo] = {}
        for number, part in enumerate(parts):
            if part.header.metadata.get("split.no", 0) != number:
                raise ModelFileError(part.path, "split.no", f"{part.header.metadata['split.no']!r} is not {number}")
            for name, info in part.header.tensors.items():
                if name in tensors:
                    raise ModelFileError(part.path, f"tensor {name}", f"is also in {parts[tensors[name].part].path}")
                tensors[name] = info
        promised = first.header.metadata.get("split.tensors.count", len(tensors))
        if promised != len(tensors):
            raise ModelFileError(path, "split.tensors.count", f"{promised!r}, but the parts hold {len(tensors)}")
        paths = tuple(part.path for part in parts)
        return cls(path, first.header.magic, first.header.metadata, tensors, paths, tuple(parts))

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes as stored: u8[n_bytes], read only, no copy. Raises NotFoundError for an unknown name."""
        info = self.tensors.get(name)
        if info is None:
            raise NotFoundError(f"{self.path}: there is no tensor {name!r}; it has {len(self.tensors)} others")
        if not info.n_bytes:
            return np.frombuffer(b"", np.uint8)
        return np.frombuffer(self._parts[info.part].pages, np.uint8, info.n_bytes, info.offset_bytes)

    def sha_key(self) -> str:
        """A cheap identity, 64 hex digits: sha256 over size, modification time and header of every part."""
        digest = hashlib.sha256()
        for part in self._parts:
            digest.update(f"{len(part.pages)} {part.mtime_ns} ".encode())
            digest.update(part.pages[: part.header.n_bytes])
        return digest.hexdigest()

    def content_key(self) -> str:
        """An identity that copies share, 64 hex digits: sha256 over the headers and a sample of every tensor."""
        digest = hashlib.sha256()
        for part in self._parts:
            digest.update(part.pages[: part.header.n_bytes])
        for name in self.tensors:
            data = self.raw(name)
            middle = len(data) // 2
            digest.update(data[middle : middle + _SAMPLE_BYTES].tobytes())
        return digest.hexdigest()


def _open_part(path: Path, number: int) -> _Part:
    try:
        status = path.stat()
        # Checked before open(): opening a pipe would wait for its writer.
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError(path, "file", "is a folder; give the path of a .gguf file in it")
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(path, "file", "is not a regular file; give the path of a .gguf file")
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size == 0:
                raise ModelFileError(path, "file", "is empty; fetch the model again")
            pages = mmap.mmap(file.fileno(), status.st_size, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise NotFoundError(f"{path}: there is no such file") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(path, "file", f"cannot be read: {error}") from None
    return _Part(path, parse_header(path, pages, len(pages), number), pages, status.st_mtime_ns)


def _other_parts(first: _Part) -> list[Path]:
    """The paths of parts 2 to N, beside part 1. Raises ModelFileError where keys and file name disagree."""
    count = first.header.metadata.get("split.count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count <= MAX_PARTS:
        raise ModelFileError(first.path, "split.count", f"{count!r} is not a number from 0 to {MAX_PARTS}")
    if count < 2:
        return []
    match = _PART_NAME.fullmatch(first.path.name)
    if match is None or int(match["count"]) != count:
        name = f"NAME-00001-of-{count:05d}.gguf"
        raise ModelFileError(first.path, "split.count", f"is {count}, so the file must be named {name}")
    names = [f"{match['stem']}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
    if int(match["number"]) != 1:
        raise ModelFileError(first.path, "file", f"is part {match['number']} of {count}; open {names[0]}")
    paths = [first.path.with_name(name) for name in names[1:]]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
        raise NotFoundError(
            f"{first.path}: {len(missing)} of {count} parts are missing, first {missing[0]}; put them beside it"
        )
    return paths
