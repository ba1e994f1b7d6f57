"""The header of one GGUF or PWRI file: every count, length and offset is checked before anything is allocated by it.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian). PWRI, PowerInfer's
container for sparse models, differs in its magic alone.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType

from hotneuron.models.errors import ModelFileError

Buffer = Any  # bytes or mmap: slices are bytes

MAX_HEADER_BYTES = 128 << 20
MAX_ENTRIES = 1 << 16  # tensors, and metadata keys
MAX_ARRAY_ITEMS = 1 << 22
MAX_KEY_BYTES = (1 << 16) - 1
MAX_TENSOR_NAME_BYTES = 64
MAX_DIMS = 4
MAX_ALIGNMENT_BYTES = 1 << 16
DEFAULT_ALIGNMENT_BYTES = 32
MAGICS = (b"GGUF", b"PWRI")

_NUMBERS: dict[int, struct.Struct] = {
    GGUFValueType.UINT8: struct.Struct("<B"),
    GGUFValueType.INT8: struct.Struct("<b"),
    GGUFValueType.UINT16: struct.Struct("<H"),
    GGUFValueType.INT16: struct.Struct("<h"),
    GGUFValueType.UINT32: struct.Struct("<I"),
    GGUFValueType.INT32: struct.Struct("<i"),
    GGUFValueType.FLOAT32: struct.Struct("<f"),
    GGUFValueType.BOOL: struct.Struct("<B"),
    GGUFValueType.UINT64: struct.Struct("<Q"),
    GGUFValueType.INT64: struct.Struct("<q"),
    GGUFValueType.FLOAT64: struct.Struct("<d"),
}
_U32 = _NUMBERS[GGUFValueType.UINT32]
_U64 = _NUMBERS[GGUFValueType.UINT64]
_I64 = _NUMBERS[GGUFValueType.INT64]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor lies. `shape` is in ne order (ne0, contiguous, first); `offset_bytes` is in its file."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset_bytes: int
    n_bytes: int
    part: int = 0  # index of the split file that holds it


@dataclass(frozen=True, slots=True)
class Header:
    magic: str  # "GGUF" or "PWRI"
    version: int
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    n_bytes: int  # of the header itself, without padding


class _Reader:
    """A cursor over the header that refuses to pass the end of the file or the header's limit."""

    def __init__(self, path: Path, buffer: Buffer):
        self.path = path
        self.buffer = buffer
        self.end = min(len(buffer), MAX_HEADER_BYTES)
        self.position = 0

    def fail(self, field: str, problem: str) -> NoReturn:
        raise ModelFileError(self.path, field, problem)

    def need(self, n_bytes: int, field: str) -> None:
        left = self.end - self.position
        if n_bytes > left:
            limit = "the file" if self.end == len(self.buffer) else f"the header's limit of {MAX_HEADER_BYTES} bytes"
            self.fail(field, f"needs {n_bytes} bytes at offset {self.position}, but {limit} ends after {left}")

    def number(self, kind: struct.Struct, field: str) -> Any:
        if self.position + kind.size > self.end:
            self.need(kind.size, field)
        (value,) = kind.unpack_from(self.buffer, self.position)
        self.position += kind.size
        return value

    def count(self, field: str, limit: int) -> int:
        value = self.number(_I64, field)
        if not 0 <= value <= limit:
            self.fail(field, f"{value} is out of range; 0 to {limit} are allowed")
        return int(value)

    def text(self, field: str, limit_bytes: int = MAX_HEADER_BYTES) -> str:
        length = self.count(f"{field} length", limit_bytes)
        self.need(length, field)
        start = self.position
        self.position += length
        try:
            return str(self.buffer[start : self.position], "utf-8")
        except UnicodeDecodeError:
            self.fail(field, "is not valid UTF-8")

    def texts(self, count: int, field: str) -> list[str]:
        # Vocabularies hold hundreds of thousands of strings, nearly all of them short: reading each length as one
        # byte, and checking afterwards that the other seven are zero, halves the time it takes to open a model.
        self.need(8 * count, field)
        out = self._short_texts(count)
        if out is None:
            out = [self.text(f"{field}[{index}]") for index in range(count)]
        return out

    def _short_texts(self, count: int) -> list[str] | None:
        """The strings if all are valid and shorter than 256 bytes, else None and the cursor stays."""
        buffer, position = self.buffer, self.position
        starts = [position]
        append = starts.append
        try:
            for _ in range(count):
                position += 8 + buffer[position]
                append(position)
        except IndexError:
            return None
        if position > self.end:
            return None
        data = np.frombuffer(buffer, np.uint8)
        heads = np.array(starts[:-1], np.int64)
        if any(data[heads + byte].any() for byte in range(1, 8)):
            return None
        try:
            out = [buffer[start + 8 : end].decode() for start, end in pairwise(starts)]
        except UnicodeDecodeError:
            return None
        self.position = position
        return out

    def numbers(self, kind: int, count: int, field: str) -> list[Any]:
        dtype = np.dtype("u1" if kind == GGUFValueType.BOOL else _NUMBERS[kind].format)
        self.need(count * dtype.itemsize, field)
        values = np.frombuffer(self.buffer, dtype, count, self.position) if count else np.empty(0, dtype)
        self.position += count * dtype.itemsize
        if kind == GGUFValueType.BOOL:
            if np.any(values > 1):
                self.fail(field, "holds a boolean that is neither 0 nor 1")
            values = values.astype(bool)
        return values.tolist()

    def value(self, kind: int, field: str) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text(field)
        if kind == GGUFValueType.ARRAY:
            item_kind = self.number(_U32, f"{field} item type")
            count = self.count(f"{field} length", MAX_ARRAY_ITEMS)
            if item_kind == GGUFValueType.STRING:
                return self.texts(count, field)
            if item_kind not in _NUMBERS:
                what = "nested arrays are not supported" if item_kind == GGUFValueType.ARRAY else "is not a value type"
                self.fail(f"{field} item type", f"{item_kind}: {what}")
            return self.numbers(item_kind, count, field)
        if kind not in _NUMBERS:
            self.fail(f"{field} value type", f"{kind} is not a value type; 0 to 12 are")
        value = self.number(_NUMBERS[kind], field)
        if kind != GGUFValueType.BOOL:
            return value
        if value > 1:
            self.fail(field, f"the boolean {value} is neither 0 nor 1")
        return bool(value)


def parse_header(path: Path, buffer: Buffer, file_bytes: int, part: int = 0) -> Header:
    """The header at the start of `buffer` (bytes or mmap of the file). Raises ModelFileError naming file and field."""
    reader = _Reader(path, buffer)
    reader.need(4, "magic")
    magic = bytes(buffer[:4])
    if magic not in MAGICS:
        reader.fail("magic", f"{magic!r} is not GGUF or PWRI; this is not a GGUF model file")
    reader.position = 4
    version = reader.number(_U32, "version")
    if version not in (2, 3):
        big_endian = version != 0 and version & 0xFFFF == 0
        hint = "the file is big endian" if big_endian else "2 and 3 are supported; convert the model again"
        reader.fail("version", f"{version}: {hint}")
    n_tensors = reader.count("tensor count", MAX_ENTRIES)
    n_keys = reader.count("key count", MAX_ENTRIES)

    metadata: dict[str, Any] = {}
    for index in range(n_keys):
        key = reader.text(f"key {index}", MAX_KEY_BYTES)
        if not key:
            reader.fail(f"key {index}", "is empty")
        field = _quoted(key)
        if key in metadata:
            reader.fail(field, "the key occurs twice")
        kind = reader.number(_U32, f"{field} value type")
        if key == "general.alignment" and kind != GGUFValueType.UINT32:
            reader.fail(field, f"has value type {kind}; it must be {int(GGUFValueType.UINT32)} (u32)")
        metadata[key] = reader.value(kind, field)

    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT_BYTES)
    if not 0 < alignment <= MAX_ALIGNMENT_BYTES or alignment & (alignment - 1):
        reader.fail("general.alignment", f"{alignment} is not a power of two from 1 to {MAX_ALIGNMENT_BYTES}")

    placed = [_tensor(reader, index) for index in range(n_tensors)]
    header_bytes = reader.position
    tensors = _lay_out(reader.fail, placed, alignment, header_bytes, file_bytes, part)
    return Header(magic.decode(), version, metadata, tensors, header_bytes)


def _tensor(reader: _Reader, index: int) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]:
    """One entry of the tensor table: name, shape, type, bytes, offset from the start of the data."""
    name = reader.text(f"tensor {index} name", MAX_TENSOR_NAME_BYTES)
    if not name:
        reader.fail(f"tensor {index} name", "is empty")
    field = f"tensor {_quoted(name)}"
    n_dims = reader.number(_U32, f"{field} dimensions")
    if n_dims > MAX_DIMS:
        reader.fail(f"{field} dimensions", f"{n_dims}; at most {MAX_DIMS} are allowed")
    shape = tuple(reader.count(f"{field} shape[{axis}]", 2**63 - 1) for axis in range(n_dims))
    n_elements = math.prod(shape)
    if n_elements >= 2**63:
        reader.fail(f"{field} shape", f"{shape} has {n_elements} elements; below 2^63 are allowed")
    code = reader.number(_U32, f"{field} type")
    try:
        kind = GGMLQuantizationType(code)
    except ValueError:
        reader.fail(f"{field} type", f"{code} is not a ggml tensor type")
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    row = shape[0] if shape else 1
    if row % block_elements:
        reader.fail(f"{field} shape", f"rows of {row} do not divide into {kind.name} blocks of {block_elements}")
    n_bytes = n_elements // block_elements * block_bytes
    return name, shape, kind, n_bytes, reader.number(_U64, f"{field} offset")


def _lay_out(
    fail: Callable[[str, str], NoReturn],
    placed: list[tuple[str, tuple[int, ...], GGMLQuantizationType, int, int]],
    alignment: int,
    header_bytes: int,
    file_bytes: int,
    part: int,
) -> dict[str, TensorInfo]:
    """Tensors follow one another, each padded to the alignment, as the writers make them and llama.cpp demands."""
    data_start = -(-header_bytes // alignment) * alignment
    expected = 0
    tensors: dict[str, TensorInfo] = {}
    for name, shape, kind, n_bytes, offset in placed:
        field = f"tensor {_quoted(name)}"
        if name in tensors:
            fail(field, "the name occurs twice")
        if offset != expected:
            fail(f"{field} offset", f"{offset}; {expected} is expected with an alignment of {alignment}")
        if n_bytes and data_start + offset + n_bytes > file_bytes:
            end = data_start + offset + n_bytes
            fail(field, f"its {n_bytes} bytes end at {end}, but the file has {file_bytes}; it is truncated or damaged")
        tensors[name] = TensorInfo(name, shape, kind, data_start + offset, n_bytes, part)
        expected += -(-n_bytes // alignment) * alignment
    return tensors


def _quoted(name: str) -> str:
    """A name from the file, fit for a one-line message."""
    return name if name.isprintable() and len(name) <= 100 else repr(name[:100])
