"""PowerInfer's split of a model, `MODEL.generated.gpuidx`: which neurons of each layer it keeps on the GPU.

The file is a PWRI of three keys and two I32 tensors a layer, and its exporter always writes the same header. So the
header is compared, field by field, with the one that is expected, rather than parsed.
NOTE: its types have ggml's numbers of 2023. I32 was 18, which gguf-py and models/gguf_header.py take for IQ3_XXS.
Source: PowerInfer, powerinfer-py/powerinfer/export_split.py.
"""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from gguf.constants import GGUFValueType

from hotneuron.kernels.formats import padded
from hotneuron.models.errors import ModelFileError, StorageError
from hotneuron.models.gguf_header import DEFAULT_ALIGNMENT_BYTES
from hotneuron.placement.side_file import read_side_file

_MAGIC, _VERSION = b"PWRI", 3
_ARCHITECTURE = "generic.gpu_index"
_CAPACITY = "split.vram_capacity"
_I32 = 18
_U32, _U64 = partial(struct.pack, "<I"), partial(struct.pack, "<Q")


@dataclass(frozen=True, slots=True, eq=False)
class GPUIndex:
    """Of one model; neurons as in its file."""

    vram_capacity_bytes: int  # that the split was made for
    hot: tuple[np.ndarray, ...]  # of each layer: int64 [n], ids of the neurons on the GPU, ascending; n may be 0

    @classmethod
    def load(cls, path: Path, n_layers: int, ffn: int) -> GPUIndex:
        """Of a model with so many layers of so many neurons. Raises NotFoundError, ModelFileError."""
        what = f"a GPU index of {n_layers} layers of {ffn} neurons"
        full = _header(0, [ffn] * (2 * n_layers))
        data_start = padded(sum(len(piece) for _, piece in full), DEFAULT_ALIGNMENT_BYTES)
        data = read_side_file(path, data_start + 2 * n_layers * _stored_bytes(ffn), what)

        found, at = {}, 0
        for field, piece in full:
            found[field] = data[at : at + len(piece)]
            at += len(piece)
        # Two kinds of fields are free. A bucket beyond its bound differs from what is then expected.
        capacity = int.from_bytes(found[_CAPACITY], "little")
        lengths: list[int] = []
        for layer in range(n_layers):
            length = int.from_bytes(found[f"blk.{layer}.gpu_bucket length"], "little")
            lengths += [ffn, min(length, ffn)]
        for field, piece in _header(capacity, lengths):
            if len(found[field]) < len(piece):
                raise ModelFileError(path, field, f"the file ends here, after {len(data)} bytes; {what} is expected")
            if found[field] != piece:
                most = "at most " if field.endswith(".gpu_bucket length") else ""
                there = f"{_shown(found[field])} is there, {most}{_shown(piece)} is expected"
                raise ModelFileError(path, field, f"{there} in {what}")

        tensors, at = [], data_start
        for number, length in enumerate(lengths):
            if at + 4 * length > len(data):
                problem = f"ends at byte {at + 4 * length}, but the file has {len(data)}; it is truncated"
                raise ModelFileError(path, _name(number), problem)
            tensors.append(np.frombuffer(data[at : at + 4 * length], "<i4"))
            at += _stored_bytes(length)
        pairs = zip(tensors[::2], tensors[1::2], strict=True)
        return cls(capacity, tuple(_hot(path, layer, *pair) for layer, pair in enumerate(pairs)))

    def save(self, path: Path, ffn: int) -> None:
        """As PowerInfer's exporter writes it, for layers of so many neurons. Raises StorageError."""
        tensors: list[np.ndarray] = []
        for hot in self.hot:
            assert np.all(np.diff(hot) > 0) and np.all((hot >= 0) & (hot < ffn))
            is_hot = np.zeros(ffn, "<i4")
            is_hot[hot] = 1
            tensors += [is_hot, hot.astype("<i4")]
        header = b"".join(piece for _, piece in _header(self.vram_capacity_bytes, [len(one) for one in tensors]))
        partial_path = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            with partial_path.open("wb") as stream:
                for piece in (header, *(tensor.tobytes() for tensor in tensors)):
                    stream.write(piece.ljust(padded(len(piece), DEFAULT_ALIGNMENT_BYTES), b"\0"))
            partial_path.replace(path)
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error
        finally:
            with suppress(OSError):
                partial_path.unlink()


def default_path(model_path: Path) -> Path:
    """Where PowerInfer keeps a model's split: beside it."""
    return model_path.with_name(f"{model_path.name}.generated.gpuidx")


def _hot(path: Path, layer: int, is_hot: np.ndarray, bucket: np.ndarray) -> np.ndarray:
    """int64 [n]: a layer's neurons, told twice: i32 [ffn] of 0 and 1, and i32 [n] of ids."""
    odd = np.flatnonzero(is_hot & ~1)
    if len(odd):
        problem = f"neuron {odd[0]} is {is_hot[odd[0]]}; 0 (CPU) or 1 (GPU) is expected"
        raise ModelFileError(path, f"blk.{layer}.gpu_idx", problem)
    hot = np.flatnonzero(is_hot).astype(np.int64)
    if not np.array_equal(hot, bucket):
        asked = f"the {len(hot)} neurons that are 1 in blk.{layer}.gpu_idx are expected, ascending"
        raise ModelFileError(path, f"blk.{layer}.gpu_bucket", f"{len(bucket)} ids that differ; {asked}")
    return hot


def _header(capacity_bytes: int, lengths: list[int]) -> list[tuple[str, bytes]]:
    """Each field and its bytes, up to the data. lengths: of the tensors, in the order of the file."""
    fields = [
        ("magic", _MAGIC),
        ("version", _U32(_VERSION)),
        ("tensor count", _U64(len(lengths))),
        ("key count", _U64(3)),
        *_key(0, "general.architecture", GGUFValueType.STRING, _text(_ARCHITECTURE)),
        *_key(1, f"{_ARCHITECTURE}.block_count", GGUFValueType.UINT32, _U32(len(lengths) // 2)),
        *_key(2, _CAPACITY, GGUFValueType.UINT64, _U64(capacity_bytes)),
    ]
    offset = 0
    for number, length in enumerate(lengths):
        name = _name(number)
        fields += [
            (f"tensor {number} name", _text(name)),
            (f"{name} dimensions", _U32(1)),
            (f"{name} length", _U64(length)),
            (f"{name} type", _U32(_I32)),
            (f"{name} offset", _U64(offset)),
        ]
        offset += _stored_bytes(length)
    return fields


def _key(number: int, key: str, kind: GGUFValueType, value: bytes) -> list[tuple[str, bytes]]:
    return [(f"key {number}", _text(key)), (f"{key} value type", _U32(kind)), (key, value)]


def _name(number: int) -> str:
    return f"blk.{number // 2}.gpu_{'bucket' if number % 2 else 'idx'}"


def _text(value: str) -> bytes:
    return _U64(len(value)) + value.encode()


def _stored_bytes(length: int) -> int:
    return padded(4 * length, DEFAULT_ALIGNMENT_BYTES)


def _shown(piece: bytes) -> str:
    """A field's bytes, fit for a one-line message: all but texts and the magic are numbers."""
    if len(piece) in (4, 8) and not piece.isalpha():
        return str(int.from_bytes(piece, "little"))
    return repr(piece if piece.isalpha() else piece[8 : 8 + int.from_bytes(piece[:8], "little")])
