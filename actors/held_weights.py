"""The parts of a pack that one worker holds: rows mapped from the file, columns and vectors copied.

NOTE At a fault Linux maps not a page but the whole folio of the page cache that holds it, though never beyond the
mapping (6.18; up to 2 MiB, as large as the reads or writes that made it). Through one mapping of the whole pack a
worker would come to hold parts of its neighbours', by an amount that nobody can plan. So every part has its own.
"""

from __future__ import annotations

import mmap
import os

import numpy as np

from hotneuron.actors.worker_memory import Memory
from hotneuron.kernels import formats
from hotneuron.models.errors import StorageError
from hotneuron.models.pack import Matrix, Pack


class HeldWeights:
    """Addresses of a worker's parts, good as long as this object lives."""

    def __init__(self, pack: Pack):
        self.pack = pack
        self._maps: list[mmap.mmap] = []
        self._copies = Memory()
        self._at_vector: dict[str, int] = {}
        self._file = pack.path.open("rb")

    def matrix(self, role: str) -> Matrix:
        return self.pack.matrices[role]

    def mapped(self, role: str, first_byte: int, last_byte: int) -> int:
        """The address of bytes first..last-1 of a matrix; 0 where there are none."""
        if first_byte == last_byte:
            return 0
        first = self.matrix(role).offset_bytes + first_byte
        start = first // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        length = first - start + last_byte - first_byte
        part = mmap.mmap(self._file.fileno(), length, access=mmap.ACCESS_READ, offset=start)
        self._maps.append(part)
        return np.frombuffer(part, np.uint8).ctypes.data + first - start

    def whole(self, role: str) -> int:
        return self.mapped(role, 0, self.matrix(role).n_bytes)

    def tile_rows(self, role: str, first_row: int, last_row: int) -> int:
        """The address of the tiles of some rows, whole tiles."""
        tile_bytes, high = self.matrix(role).tile_bytes, formats.padded(last_row, formats.TILE_ROWS)
        return self.mapped(role, *(row // formats.TILE_ROWS * tile_bytes for row in (first_row, high)))

    def tile_columns(self, role: str, first: int, last: int) -> tuple[int, int]:
        """The address of all tiles' columns first..last-1, whole blocks, and the bytes from a tile to the next.

        Copied, for in the file they lie closer together than what is mapped at once.
        """
        matrix = self.matrix(role)
        block = formats.BLOCK_BYTES[matrix.format_id]
        low, high = first // formats.BLOCK_COLUMNS * block, last // formats.BLOCK_COLUMNS * block
        n_tiles = matrix.n_bytes // matrix.tile_bytes
        if low == high:
            return 0, 0
        if high - low == matrix.tile_bytes:
            return self.whole(role), matrix.tile_bytes
        own = self._copies.take_array(n_tiles * (high - low)).reshape(n_tiles, -1)
        for t in range(n_tiles):
            self._read(matrix.offset_bytes + t * matrix.tile_bytes + low, own[t])
        return own.ctypes.data, high - low

    def vector(self, role: str) -> int:
        """The address of a vector, copied; 0 where the model has none."""
        if role not in self.pack.vectors:
            return 0
        if role not in self._at_vector:
            vector = self.pack.vectors[role]
            own = self._copies.take_array(4 * vector.length)
            self._read(vector.offset_bytes, own)
            self._at_vector[role] = own.ctypes.data
        return self._at_vector[role]

    def _read(self, offset: int, out: np.ndarray) -> None:
        """Fill u8 [bytes] from the file. Raises StorageError."""
        done = 0
        while done < len(out):
            n = os.preadv(self._file.fileno(), [out[done:]], offset + done)  # type: ignore[list-item]
            if n == 0:
                raise StorageError(f"{self.pack.path}: the pack is cut short; delete it and it is made again")
            done += n


def put_rows(row: np.ndarray, at: int, held: HeldWeights, role: str, rows: tuple[int, int]) -> int:
    """Words `at`, at + 1, at + 2 of a layer's table: a matrix of tiles, of which some rows are held; its format."""
    matrix = held.matrix(role)
    row[at : at + 3] = held.tile_rows(role, *rows), matrix.format_id, matrix.tile_bytes
    return matrix.format_id


def put_columns(row: np.ndarray, at: int, held: HeldWeights, role: str, columns: tuple[int, int]) -> int:
    """The same, where some columns are held, whole blocks."""
    format_id = held.matrix(role).format_id
    address, tile_bytes = held.tile_columns(role, *columns)
    row[at : at + 3] = address, format_id, tile_bytes
    return format_id
