"""Compute formats: how a matrix lies in a pack. Few compute formats hold the many block formats of GGUF files.

A matrix is cut into tiles of 16 rows (lane = row) and each tile into blocks of 64 columns, padded with zeros to both.
A block holds, for each vector of 64 bytes, four neighbouring columns of 16 rows; then the scales (and minimums) of its rows.

    compute format   from                  value                     bytes a block (1024 weights)
    NIBBLE           Q4_0                  scale * (q - 8)           512 + 64
    NIBBLE_MIN       Q4_1, Q4_K            scale * q + minimum       512 + 64 + 64
    BYTE             Q8_0, Q5_0            scale * (q - 128)         1024 + 64
    BYTE_MIN         Q5_1, Q5_K            scale * q + minimum       1024 + 64 + 64
    BYTE_16          Q6_K                  scale * (q - 128)         1024 + 128 (a scale per 16 columns, else per 32)
    HALF, BFLOAT, FLOAT                    as in the file            2048, 2048, 4096
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as T

TILE_ROWS, BLOCK_COLUMNS = 16, 64

NIBBLE, NIBBLE_MIN, BYTE, BYTE_MIN, BYTE_16, HALF, BFLOAT, FLOAT = range(8)
BLOCK_BYTES = (576, 640, 1088, 1152, 1152, 2048, 2048, 4096)
NAMES = ("nibble", "nibble_min", "byte", "byte_min", "byte_16", "half", "bfloat", "float")

FORMAT_OF = {
    T.Q4_0: NIBBLE, T.Q4_1: NIBBLE_MIN, T.Q4_K: NIBBLE_MIN, T.Q8_0: BYTE, T.Q5_0: BYTE, T.Q5_1: BYTE_MIN,
    T.Q5_K: BYTE_MIN, T.Q6_K: BYTE_16, T.F16: HALF, T.BF16: BFLOAT, T.F32: FLOAT,
}  # fmt: skip


def padded(n: int, to: int) -> int:
    return -(-n // to) * to


def tile_bytes(format_id: int, columns: int) -> int:
    """Bytes of one tile of 16 rows."""
    return padded(columns, BLOCK_COLUMNS) // BLOCK_COLUMNS * BLOCK_BYTES[format_id]


def matrix_bytes(format_id: int, rows: int, columns: int) -> int:
    return padded(rows, TILE_ROWS) // TILE_ROWS * tile_bytes(format_id, columns)


@dataclass(frozen=True, slots=True)
class Quants:
    """A matrix in integers: value = scale * (q - offset) + minimum, offset by compute format."""

    q: np.ndarray  # u8 [rows, columns]
    scale: np.ndarray  # f16 [rows, columns / 32 or / 16]
    minimum: np.ndarray | None = None  # f16 [rows, columns / 32]


def _half(block: np.ndarray, at: int) -> np.ndarray:
    return block[..., at : at + 2].copy().view(np.float16)[..., 0]


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[..., k] bytes to [..., 2k]: all low nibbles, then all high ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(bits: np.ndarray) -> np.ndarray:
    """[..., 4] bytes to [..., 32]: bit i as 0 or 16."""
    return np.unpackbits(bits, axis=-1, bitorder="little") << 4


def _six_bit_scales(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The 12 bytes of Q4_K and Q5_K: eight scales and eight minimums of 6 bits (llama.cpp, get_scale_min_k4)."""
    low, middle, high = packed[..., 0:4], packed[..., 4:8], packed[..., 8:12]
    scale = np.concatenate([low & 63, (high & 15) | ((low >> 6) << 4)], axis=-1)
    minimum = np.concatenate([middle & 63, (high >> 4) | ((middle >> 6) << 4)], axis=-1)
    return scale.astype(np.float32), minimum.astype(np.float32)


def _k_quants(raw: np.ndarray, type_: T) -> Quants:
    scale, minimum = _six_bit_scales(raw[..., 4:16])
    d, dmin = (_half(raw, at).astype(np.float32)[..., None] for at in (0, 2))
    shape = raw.shape[:-1]
    packed = raw[..., -128:].reshape(*shape, 4, 32)  # 64 columns each: low nibbles the first 32, high ones the next
    q = np.stack([packed & 15, packed >> 4], axis=-2).reshape(*shape, 8, 32)
    if type_ is T.Q5_K:
        bits = raw[..., 16:48][..., None, :] >> np.arange(8, dtype=np.uint8)[:, None]
        q = q | ((bits & 1) << 4)
    return Quants(q, (d * scale).astype(np.float16), (-dmin * minimum).astype(np.float16))


def _q6_k(raw: np.ndarray) -> Quants:
    shape = raw.shape[:-1]
    low = raw[..., :128].reshape(*shape, 2, 1, 2, 32)
    low = np.concatenate([low & 15, low >> 4], axis=-3)  # [2, nibble, 2, 32]: 128 columns a half
    high = raw[..., 128:192].reshape(*shape, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8)[:, None]
    q = low.reshape(*shape, 256) | ((high & 3) << 4).reshape(*shape, 256)
    scale = raw[..., 192:208].view(np.int8).astype(np.float32)
    d = raw[..., 208:210].copy().view(np.float16).astype(np.float32)
    return Quants(q + np.uint8(128 - 32), (d * scale).astype(np.float16))


_TYPE_SIZE = {T.Q4_0: (32, 18), T.Q4_1: (32, 20), T.Q5_0: (32, 22), T.Q5_1: (32, 24), T.Q8_0: (32, 34),
              T.Q4_K: (256, 144), T.Q5_K: (256, 176), T.Q6_K: (256, 210)}  # fmt: skip


def to_quants(raw: np.ndarray, type_: T, rows: int, columns: int) -> Quants:
    """Blocks of a GGUF tensor (u8, flat) to integers, exactly; K-quants' products of scales are rounded to f16."""
    width, size = _TYPE_SIZE[type_]
    raw = raw.reshape(rows, columns // width, size)
    match type_:
        case T.Q4_0:
            out = Quants(_nibbles(raw[..., 2:]), _half(raw, 0))
        case T.Q4_1:
            out = Quants(_nibbles(raw[..., 4:]), _half(raw, 0), _half(raw, 2))
        case T.Q5_0:
            out = Quants((_nibbles(raw[..., 6:]) | _fifth_bits(raw[..., 2:6])) + np.uint8(112), _half(raw, 0))
        case T.Q5_1:
            out = Quants(_nibbles(raw[..., 8:]) | _fifth_bits(raw[..., 4:8]), _half(raw, 0), _half(raw, 2))
        case T.Q8_0:
            out = Quants(raw[..., 2:] ^ np.uint8(128), _half(raw, 0))
        case T.Q4_K | T.Q5_K:
            out = _k_quants(raw, type_)
        case T.Q6_K:
            out = _q6_k(raw)
        case _:
            raise AssertionError(type_)
    minimum = None if out.minimum is None else out.minimum.reshape(rows, -1)
    return Quants(out.q.reshape(rows, columns), out.scale.reshape(rows, -1), minimum)


def _lanes(a: np.ndarray, per_block: int) -> np.ndarray:
    """[rows, blocks * per_block] to bytes [tiles, blocks, per_block * 16 * itemsize], the 16 rows innermost."""
    rows, columns = a.shape
    tiles = a.reshape(rows // TILE_ROWS, TILE_ROWS, columns // per_block, per_block).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(tiles).view(np.uint8).reshape(rows // TILE_ROWS, columns // per_block, -1)


def _vectors(q: np.ndarray) -> np.ndarray:
    """u8 [rows, columns] to [tiles, blocks, 16 vectors of four columns, 16 rows, 4]."""
    rows, columns = q.shape
    t = q.reshape(rows // TILE_ROWS, TILE_ROWS, columns // BLOCK_COLUMNS, 16, 4).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(t)


def _fit(a: np.ndarray, rows: int, columns: int, fill: int = 0) -> np.ndarray:
    return np.pad(a, ((0, rows - a.shape[0]), (0, columns - a.shape[1])), constant_values=fill)


def pack(raw: np.ndarray, type_: T, rows: int, columns: int) -> np.ndarray:
    """A GGUF tensor's bytes in the pack's layout: u8 [tiles, blocks, BLOCK_BYTES]."""
    format_id = FORMAT_OF[type_]
    tall, wide = padded(rows, TILE_ROWS), padded(columns, BLOCK_COLUMNS)
    if format_id >= HALF:
        item = np.dtype(np.float32 if format_id == FLOAT else np.uint16)
        return _lanes(_fit(raw.view(item).reshape(rows, columns), tall, wide), BLOCK_COLUMNS)
    quants = to_quants(raw, type_, rows, columns)
    per_block = BLOCK_COLUMNS // (16 if format_id == BYTE_16 else 32)
    q = _vectors(_fit(quants.q, tall, wide))
    if format_id in (NIBBLE, NIBBLE_MIN):
        q = q[:, :, 0::2] | (q[:, :, 1::2] << 4)
    parts = [q.reshape(*q.shape[:2], -1)]
    for a in (quants.scale, quants.minimum):
        if a is not None:
            parts.append(_lanes(_fit(a, tall, wide // BLOCK_COLUMNS * per_block), per_block))
    return np.concatenate(parts, axis=-1)


def unpack(packed: np.ndarray, format_id: int, rows: int, columns: int) -> np.ndarray:
    """The f32 values [rows, columns] of a packed matrix: the reference of every kernel that reads tiles."""
    wide = padded(columns, BLOCK_COLUMNS)
    blocks = packed.reshape(-1, wide // BLOCK_COLUMNS, BLOCK_BYTES[format_id])

    def rows_of(part: np.ndarray, item: type, per_block: int) -> np.ndarray:
        a = np.ascontiguousarray(part).view(item).reshape(*blocks.shape[:2], per_block, TILE_ROWS)
        return a.transpose(0, 3, 1, 2).reshape(-1, blocks.shape[1] * per_block)

    if format_id == FLOAT:
        return rows_of(blocks, np.float32, 64)[:rows, :columns].copy()
    if format_id == HALF:
        return rows_of(blocks, np.float16, 64)[:rows, :columns].astype(np.float32)
    if format_id == BFLOAT:
        return (rows_of(blocks, np.uint16, 64)[:rows, :columns].astype(np.uint32) << 16).view(np.float32)
    nibbles = format_id in (NIBBLE, NIBBLE_MIN)
    q = blocks[:, :, : 512 if nibbles else 1024].reshape(*blocks.shape[:2], -1, TILE_ROWS, 4)
    if nibbles:
        q = np.stack([q & 15, q >> 4], axis=3).reshape(*blocks.shape[:2], 16, TILE_ROWS, 4)
    q = q.transpose(0, 3, 1, 2, 4).reshape(-1, wide).astype(np.float32)
    at, per_block = (512 if nibbles else 1024), 4 if format_id == BYTE_16 else 2
    scale = rows_of(blocks[:, :, at : at + 32 * per_block], np.float16, per_block).astype(np.float32)
    scale = scale.repeat(BLOCK_COLUMNS // per_block, axis=1)
    if format_id in (NIBBLE_MIN, BYTE_MIN):
        minimum = rows_of(blocks[:, :, at + 64 :], np.float16, 2).astype(np.float32)
        return (q * scale + minimum.repeat(32, axis=1))[:rows, :columns]
    return ((q - (8 if nibbles else 128)) * scale)[:rows, :columns]
