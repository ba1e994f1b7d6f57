"""Matrices whose rows are read one by one: a row is one stretch of memory, in a form from which 16 of them make a tile.

A row is its dwords in the order of the columns, then its scales, then its minimums, each part filled up to 64 bytes:

    4-bit formats   dword d, byte i: column 8d + i in the low nibble, 8d + 4 + i in the high one
    8-bit formats   dword d, byte i: column 4d + i
    float formats   as in the file
    scales          f16 [columns / 32] (BYTE_16: / 16), minimums likewise

The same dword of 16 rows is one vector of a tile (see `formats`), so that 16 rows, wherever they lie, become a tile by a
transposition, and the kernels of tiles compute them, to the same bits.
"""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType as T

from hotneuron.kernels import formats
from hotneuron.kernels.formats import BLOCK_BYTES, BLOCK_COLUMNS, TILE_ROWS, padded
from hotneuron.kernels.jit import kernel, njit
from hotneuron.kernels.memory import get_i64
from hotneuron.kernels.transpose import prefetch_far, transpose_16, transpose_pairs_16

LINE = 64


def _parts(format_id: int, columns: int) -> tuple[int, int, int]:
    """Bytes of a row's dwords, scales and minimums, each filled up to a line."""
    wide = padded(columns, BLOCK_COLUMNS)
    if format_id >= formats.HALF:
        return padded(wide * (4 if format_id == formats.FLOAT else 2), LINE), 0, 0
    nibbles = format_id in (formats.NIBBLE, formats.NIBBLE_MIN)
    scales = padded(2 * wide // (16 if format_id == formats.BYTE_16 else 32), LINE)
    has_min = format_id in (formats.NIBBLE_MIN, formats.BYTE_MIN)
    return padded(wide // 2 if nibbles else wide, LINE), scales, scales if has_min else 0


def row_bytes(format_id: int, columns: int) -> int:
    """Bytes of one row."""
    return sum(_parts(format_id, columns))


def scratch_bytes(format_id: int, columns: int) -> int:
    """Bytes that `gather` may write: a tile, and what its last vectors write past the end."""
    return padded(columns, 16 * BLOCK_COLUMNS) // BLOCK_COLUMNS * BLOCK_BYTES[format_id] + 16 * LINE


def pack_rows(raw: np.ndarray, type_: T, rows: int, columns: int) -> np.ndarray:
    """A GGUF tensor's bytes as u8 [rows, row_bytes]."""
    format_id = formats.FORMAT_OF[type_]
    sizes, out = _parts(format_id, columns), np.zeros((rows, row_bytes(format_id, columns)), np.uint8)
    if format_id >= formats.HALF:
        data = raw.reshape(rows, -1)
        out[:, : data.shape[1]] = data
        return out
    quants = formats.to_quants(raw, type_, rows, columns)
    q = np.pad(quants.q, ((0, 0), (0, padded(columns, BLOCK_COLUMNS) - columns)))
    if format_id in (formats.NIBBLE, formats.NIBBLE_MIN):
        q = q.reshape(rows, -1, 2, 4)
        q = (q[:, :, 0] | (q[:, :, 1] << 4)).reshape(rows, -1)
    out[:, : q.shape[1]] = q
    at = sizes[0]
    for part, size in zip((quants.scale, quants.minimum), sizes[1:], strict=True):
        if part is not None:
            halves = np.ascontiguousarray(part).view(np.uint8)
            out[:, at : at + halves.shape[1]] = halves
        at += size
    return out


def unpack_rows(packed: np.ndarray, format_id: int, columns: int) -> np.ndarray:
    """The f32 values [rows, columns] of packed rows u8 [rows, row_bytes]."""
    rows, sizes = len(packed), _parts(format_id, columns)
    data, wide = packed[:, : sizes[0]], padded(columns, BLOCK_COLUMNS)
    if format_id == formats.FLOAT:
        return np.ascontiguousarray(data).view(np.float32)[:, :columns].copy()
    if format_id == formats.HALF:
        return np.ascontiguousarray(data).view(np.float16)[:, :columns].astype(np.float32)
    if format_id == formats.BFLOAT:
        return (np.ascontiguousarray(data).view(np.uint16)[:, :columns].astype(np.uint32) << 16).view(np.float32)
    nibbles = format_id in (formats.NIBBLE, formats.NIBBLE_MIN)
    if nibbles:
        dwords = data[:, : wide // 2].reshape(rows, -1, 4)
        data = np.stack([dwords & 15, dwords >> 4], axis=2).reshape(rows, -1)
    q = data[:, :wide].astype(np.float32)

    def of_columns(at: int) -> np.ndarray:
        per = 16 if format_id == formats.BYTE_16 else 32
        halves = np.ascontiguousarray(packed[:, at : at + 2 * wide // per]).view(np.float16)
        return halves.astype(np.float32).repeat(per, axis=1)

    scale = of_columns(sizes[0])
    if sizes[2]:
        return (q * scale + of_columns(sizes[0] + sizes[1]))[:, :columns]
    return ((q - (8 if nibbles else 128)) * scale)[:, :columns]


_NIBBLE, _NIBBLE_MIN, _BYTE_MIN, _BYTE_16 = formats.NIBBLE, formats.NIBBLE_MIN, formats.BYTE_MIN, formats.BYTE_16
_HALF, _FLOAT = formats.HALF, formats.FLOAT
_BLOCK_BYTES = np.array(BLOCK_BYTES)


@njit
def _gather_part(rows, ahead, offset, n_bytes, out, stride, jump, step, pairs):
    """Lines of 16 rows to vectors: dword j of a line goes to out + j stride + (j // 8) jump; the next line's, `step` on."""
    for at in range(offset, offset + n_bytes, LINE):
        for i in range(16):
            prefetch_far(get_i64(ahead + 8 * i) + at)
        if pairs:
            transpose_pairs_16(rows, at, out, stride, 0)
        else:
            transpose_16(rows, at, out, stride, jump)
        out += step


@kernel(5)
def gather(format_id, rows, ahead, columns, tile):
    """Make a tile of 16 rows.

    rows, ahead: int64 [16], addresses of the rows and of those that are wanted next. tile: `scratch_bytes`.
    """
    blocks, block_bytes = (columns + 63) // 64, _BLOCK_BYTES[format_id]
    if format_id == _FLOAT:
        _gather_part(rows, ahead, 0, 256 * blocks, tile, 64, 0, 1024, False)
    elif format_id >= _HALF:
        _gather_part(rows, ahead, 0, 128 * blocks, tile, 64, 0, 1024, True)
    else:
        nibbles = format_id == _NIBBLE or format_id == _NIBBLE_MIN
        if nibbles:  # a line of a row is two blocks
            data = (32 * blocks + 63) // 64 * 64
            _gather_part(rows, ahead, 0, data, tile, 64, block_bytes - 512, 2 * block_bytes, False)
        else:
            data = 64 * blocks
            _gather_part(rows, ahead, 0, data, tile, 64, 0, block_bytes, False)
        behind = 512 if nibbles else 1024
        if format_id == _BYTE_16:  # two dwords of scales a block
            size = (8 * blocks + 63) // 64 * 64
            for at in range(0, size, LINE):
                for i in range(16):
                    prefetch_far(get_i64(ahead + 8 * i) + data + at)
                to = tile + at // 8 * block_bytes + behind
                transpose_pairs_16(rows, data + at, to, 64, block_bytes - 128)
        else:
            size = (4 * blocks + 63) // 64 * 64
            _gather_part(rows, ahead, data, size, tile + behind, block_bytes, 0, 16 * block_bytes, True)
            if format_id == _NIBBLE_MIN or format_id == _BYTE_MIN:
                _gather_part(rows, ahead, data + size, size, tile + behind + 64, block_bytes, 0, 16 * block_bytes, True)


def gather_reference(rows: list[np.ndarray], format_id: int, columns: int) -> np.ndarray:
    """The values that the tile of 16 packed rows shall hold: f32 [16, columns]."""
    assert len(rows) == TILE_ROWS
    return unpack_rows(np.stack(rows), format_id, columns)
