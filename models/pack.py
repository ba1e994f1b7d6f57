"""A pack: a model's weights re-laid for the kernels, one file that all workers map and share through the page cache.

    magic "HNPK", u32 layout version, u64 header bytes, JSON header (source key, table of matrices and vectors), data

Matrices are tiles (see `kernels.formats`), vectors f32 padded to 64; each begins on a page. Three re-layings make the
kernels simpler and change no result: heads are padded to a multiple of 16 dimensions, the rows of q and k whose RoPE
pairs are neighbours are reordered so that pairs lie half a head apart, and the FFN is padded to a multiple of 64
neurons.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotneuron.kernels import formats, rows, signs
from hotneuron.kernels.down_layout import OWN, SHARED, DownLayout, unpack_down
from hotneuron.models.errors import StorageError
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack_sources import Layout

MAGIC, LAYOUT_VERSION = b"HNPK", 2


@dataclass(frozen=True, slots=True)
class Matrix:
    offset_bytes: int
    format_id: int
    rows: int
    columns: int
    layout: Layout = "tiles"

    @property
    def tile_bytes(self) -> int:
        assert self.layout == "tiles"
        return formats.tile_bytes(self.format_id, self.columns)

    @property
    def row_bytes(self) -> int:
        assert self.layout == "rows"
        return rows.row_bytes(self.format_id, self.columns)

    @property
    def down(self) -> DownLayout:
        """The layout of a down matrix by neuron; its rows are neurons, its columns outputs."""
        assert self.layout in ("down_shared", "down_own")
        return DownLayout(self.format_id, SHARED if self.layout == "down_shared" else OWN, self.columns)

    @property
    def n_bytes(self) -> int:
        if self.layout == "tiles":
            return formats.matrix_bytes(self.format_id, self.rows, self.columns)
        if self.layout == "rows":
            return self.rows * self.row_bytes
        if self.layout == "signs":
            return signs.matrix_bytes(self.rows, self.columns)
        return self.rows // 32 * self.down.unit_bytes


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

    def values(self, role: str) -> np.ndarray:
        """A matrix as f32 [rows, columns], for the reference."""
        m = self.matrices[role]
        data = self.data[m.offset_bytes : m.offset_bytes + m.n_bytes]
        if m.layout == "tiles":
            return formats.unpack(data, m.format_id, m.rows, m.columns)
        if m.layout == "rows":
            return rows.unpack_rows(data.reshape(m.rows, -1), m.format_id, m.columns)
        if m.layout == "signs":
            return signs.unpack_signs(data, m.rows, m.columns)
        return unpack_down(data, m.rows, m.down)

    def vector(self, role: str) -> np.ndarray:
        v = self.vectors[role]
        return self.data[v.offset_bytes : v.offset_bytes + 4 * v.length].view(np.float32)

    def neuron_order(self, layer: int, ffn: int) -> np.ndarray:
        """int64 [ffn padded to 64]: the file's neuron at each position; -1 where there is none."""
        role, wide = f"{layer}.neuron_order", formats.padded(ffn, 64)
        if role in self.vectors:
            return self.vector(role)[:wide].astype(np.int64)
        return np.where(np.arange(wide) < ffn, np.arange(wide), -1)


def head_width(config: ModelConfig) -> int:
    """Floats that one head takes in a pack and in the workers' rows."""
    return formats.padded(config.head_dim, 16)
