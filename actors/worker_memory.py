"""Memory of a worker, and how the words of its tables name what lies there and in the pack."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np

from hotneuron.actors import fields as P
from hotneuron.kernels import formats
from hotneuron.models.pack import Pack


class Memory:
    """Zeroed memory on 64-byte borders that lives as long as this object; pages are taken when first written."""

    def __init__(self) -> None:
        self._maps: list[mmap.mmap] = []
        self.n_bytes = 0

    def take(self, n_bytes: int) -> int:
        """The address of n_bytes of zeros."""
        area = mmap.mmap(-1, max(n_bytes, mmap.PAGESIZE))
        self._maps.append(area)
        self.n_bytes += n_bytes
        return np.frombuffer(area, np.uint8).ctypes.data


def inputs_of(*format_ids: int) -> int:
    """What a product's input must be made as, for matrices of these formats."""
    return (P.INT8 if min(format_ids) < formats.HALF else 0) | (P.FLOATS if max(format_ids) >= formats.HALF else 0)


def put_matrix(row: np.ndarray, at: int, pack: Pack, role: str, first_row: int = 0, first_column: int = 0) -> int:
    """Words `at`, at + 1, at + 2 of a layer's table: a matrix of tiles from a row and column on; returns its format."""
    m = pack.matrices[role]
    skip = first_column // formats.BLOCK_COLUMNS * formats.BLOCK_BYTES[m.format_id]
    row[at : at + 3] = pack.matrix_address(role) + first_row // 16 * m.tile_bytes + skip, m.format_id, m.tile_bytes
    return m.format_id


def copy_to(address: int, values: np.ndarray) -> None:
    source = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
    np.ctypeslib.as_array((ctypes.c_uint8 * source.nbytes).from_address(address))[:] = source
