"""A pack: a model's weights re-laid for the kernels, one file that all workers map and share through the page cache.

    magic "HNPK", u32 layout version, u64 header bytes, JSON header (source key, table of matrices and vectors), data

Matrices are tiles (see `kernels.formats`), vectors f32 padded to 64; each begins on a page. Three re-layings make the
kernels simpler and change no result: heads are padded to a multiple of 16 dimensions, the rows of q and k whose RoPE
pairs are neighbours are reordered so that pairs lie half a head apart, and the FFN is padded to a multiple of 64
neurons.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType as T

from hotneuron.kernels import cpu, formats
from hotneuron.models.dequantize import dequantize
from hotneuron.models.errors import StorageError
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack_sources import Kind, Source, sources_of
from hotneuron.models.tensor_table import VECTOR_TYPES

MAGIC, LAYOUT_VERSION, PAGE = b"HNPK", 2, 4096
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True)
class Matrix:
    offset_bytes: int
    format_id: int
    rows: int
    columns: int

    @property
    def tile_bytes(self) -> int:
        return formats.tile_bytes(self.format_id, self.columns)

    @property
    def n_bytes(self) -> int:
        return formats.matrix_bytes(self.format_id, self.rows, self.columns)


@dataclass(frozen=True, slots=True)
class Vector:
    offset_bytes: int
    length: int


class Pack:
    """An open pack: mapped, read only, checked against its file's size."""

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        magic, version, header_bytes = struct.unpack_from("<4sIQ", self._map)
        if magic != MAGIC or version != LAYOUT_VERSION:
            raise StorageError(f"{path}: not a pack of this version; delete it and it is made again")
        table = json.loads(self._map[16 : 16 + header_bytes])
        self.matrices = {role: Matrix(**m) for role, m in table["matrices"].items()}
        self.vectors = {role: Vector(**v) for role, v in table["vectors"].items()}
        ends = [m.offset_bytes + m.n_bytes for m in self.matrices.values()]
        ends += [v.offset_bytes + 4 * v.length for v in self.vectors.values()]
        if max(ends) > size:
            raise StorageError(f"{path}: the pack is cut short; delete it and it is made again")
        self.data = np.frombuffer(self._map, np.uint8)
        self.address = self.data.ctypes.data

    def matrix_address(self, role: str) -> int:
        return self.address + self.matrices[role].offset_bytes

    def vector_address(self, role: str) -> int:
        """0 where the model has no such vector."""
        return self.address + self.vectors[role].offset_bytes if role in self.vectors else 0

    def values(self, role: str) -> np.ndarray:
        """A matrix as f32 [rows, columns], for the reference."""
        m = self.matrices[role]
        return formats.unpack(self.data[m.offset_bytes : m.offset_bytes + m.n_bytes], m.format_id, m.rows, m.columns)

    def vector(self, role: str) -> np.ndarray:
        v = self.vectors[role]
        return self.data[v.offset_bytes : v.offset_bytes + 4 * v.length].view(np.float32)


def head_width(config: ModelConfig) -> int:
    """Floats that one head takes in a pack and in the workers' rows."""
    return formats.padded(config.head_dim, 16)


def ensure_pack(
    file: GGUFFile,
    config: ModelConfig,
    progress: Progress | None = None,
    folder: Path | None = None,
    kind: Kind = "dense",
) -> Path:
    """The pack of a model, made now if it is not in `folder` (default: in the cache).

    Raises StorageError; leaves no half-written file.
    """
    folder = folder or cpu.cache_folder() / "packs"
    path = folder / f"{file.path.stem[:60]}-{file.sha_key()[:20]}-{LAYOUT_VERSION}.pack"
    if path.exists():
        return path
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(part, file, config, kind, progress or (lambda *_: None))
        os.replace(part, path)
    except OSError as error:
        problem = f"cannot write the pack: {error.strerror}; free space there or set HOTNEURON_CACHE"
        raise StorageError(f"{path}: {problem}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return path


def _head_rows(config: ModelConfig, n_heads: int, paired: bool) -> np.ndarray:
    """For each padded row of n_heads heads, the row of the file it comes from; -1 is a row of zeros."""
    order = np.arange(config.head_dim)
    if paired and config.rope.style == "interleaved":
        turned = order[: config.rope.dims]
        order = np.concatenate([turned[0::2], turned[1::2], order[config.rope.dims :]])
    padded = np.full(head_width(config), -1)
    padded[: config.head_dim] = order
    rows = np.arange(n_heads)[:, None] * config.head_dim + padded
    return np.where(padded < 0, -1, rows).ravel()


def _row_order(role: str, config: ModelConfig) -> np.ndarray | None:
    match role.split(".")[-1]:
        case "attn_q" | "attn_q_bias":
            return _head_rows(config, config.n_heads, True)
        case "attn_k" | "attn_k_bias":
            return _head_rows(config, config.n_kv_heads, True)
        case "attn_v" | "attn_v_bias":
            return _head_rows(config, config.n_kv_heads, False)
        case "attn_q_norm" | "attn_k_norm":
            return _head_rows(config, 1, True)
        case "ffn_gate" | "ffn_up" | "ffn_up_bias":
            wide = formats.padded(config.ffn, 64)
            return np.where(np.arange(wide) < config.ffn, np.arange(wide), -1)
    return None


def _gather(rows: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    """rows[order], zeros for -1."""
    if order is None:
        return rows
    out = rows[order]
    out[order < 0] = 0
    return out


def _tiles(file: GGUFFile, source: Source, config: ModelConfig) -> tuple[Matrix, np.ndarray]:
    info = file.tensors[source.name]
    columns, rows = info.shape[:2]
    raw, type_ = file.raw(source.name).reshape(rows, -1), T(info.type)
    if source.rows is not None:
        raw = raw[slice(*source.rows)]
    if source.is_transposed:
        # The blocks of its type run along the neurons' rows, so turned round it can only be kept in floats.
        values = np.ascontiguousarray(dequantize(raw.reshape(-1), type_, (columns, rows)).T)
        type_ = type_ if type_ in VECTOR_TYPES else T.F16
        raw, columns = quants.quantize(values, type_).view(np.uint8), rows
    if source.role.endswith("attn_output") and head_width(config) != config.head_dim:
        # Padded heads make new columns, which blocks of 32 cannot follow: keep this one in floats.
        heads = dequantize(raw.reshape(-1), type_, info.shape).reshape(rows, config.n_heads, config.head_dim)
        values = np.pad(heads, ((0, 0), (0, 0), (0, head_width(config) - config.head_dim))).reshape(rows, -1)
        raw, type_, columns = np.ascontiguousarray(values).view(np.uint8), T.F32, values.shape[1]
    # NOTE a row of zero bytes has scale 0 in every block format, so it is a row of zeros.
    raw = _gather(raw, _row_order(source.role, config))
    tiles = formats.pack(np.ascontiguousarray(raw).reshape(-1), type_, len(raw), columns)
    return Matrix(0, formats.FORMAT_OF[type_], len(raw), columns), tiles.reshape(-1)


def _vector(file: GGUFFile, source: Source, config: ModelConfig) -> tuple[Vector, np.ndarray]:
    info = file.tensors[source.name]
    values = dequantize(file.raw(source.name), info.type, info.shape).astype(np.float32).reshape(-1)
    values = _gather(values, _row_order(source.role, config))
    padded = np.zeros(formats.padded(len(values), 64), np.float32)
    padded[: len(values)] = values
    return Vector(0, len(padded)), padded.view(np.uint8)


def _source_bytes(file: GGUFFile, source: Source) -> int:
    info = file.tensors[source.name]
    if source.rows is None:
        return info.n_bytes
    return info.n_bytes // info.shape[1] * (source.rows[1] - source.rows[0])


def _write(path: Path, file: GGUFFile, config: ModelConfig, kind: Kind, progress: Progress) -> None:
    sources = sources_of(config, kind)
    total = sum(_source_bytes(file, source) for source in sources)
    matrices: dict[str, dict[str, int]] = {}
    vectors: dict[str, dict[str, int]] = {}
    room = formats.padded(4096 + 160 * len(sources), PAGE)
    done, offset = 0, room
    with path.open("wb") as out:
        out.seek(room)
        for source in sources:
            make, table = (_vector, vectors) if source.is_vector else (_tiles, matrices)
            entry, data = make(file, source, config)
            table[source.role] = asdict(entry) | {"offset_bytes": offset}
            out.write(data.data)
            offset = formats.padded(offset + data.nbytes, PAGE)
            out.seek(offset)
            done += _source_bytes(file, source)
            progress("packing weights", done, total)
        out.truncate(offset)
        header = json.dumps({"matrices": matrices, "vectors": vectors}).encode()
        assert 16 + len(header) <= room
        out.seek(0)
        out.write(struct.pack("<4sIQ", MAGIC, LAYOUT_VERSION, len(header)) + header)
        out.flush()
        os.fsync(out.fileno())
