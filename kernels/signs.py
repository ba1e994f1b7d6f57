"""The training-free predictor: signs of a matrix's rows against signs of an input, by exclusive or and population count.

A tile is 16 rows: for each 32 columns one vector of 16 dwords, a bit a column, set where the value is negative. Columns are
filled up to 64 with bits that are not set. The score of a row is (columns that agree - columns that differ) / sqrt(columns),
which for unrelated signs has variance 1.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from hotneuron.kernels.formats import BLOCK_COLUMNS, TILE_ROWS, padded
from hotneuron.kernels.jit import njit
from hotneuron.kernels.llvm import (
    I32,
    INT32,
    VI,
    add_bytes,
    call_intrinsic,
    constant,
    load_at,
    op,
    splat_value,
    store_at,
)

from numba import types  # isort: skip

_AT = types.int64


SCORE_BINS = 1024  # of scores, for profiles: 64 to a unit
SCORE_BINS_A_UNIT = 64


def bin_edges() -> np.ndarray:
    """f64 [SCORE_BINS]: the least score of each bin; the first and the last hold whatever lies outside."""
    return (np.arange(SCORE_BINS) - SCORE_BINS // 2) / SCORE_BINS_A_UNIT


def tile_bytes(columns: int) -> int:
    return padded(columns, BLOCK_COLUMNS) // 32 * 64


def matrix_bytes(rows: int, columns: int) -> int:
    return padded(rows, TILE_ROWS) // TILE_ROWS * tile_bytes(columns)


def pack_signs(values: np.ndarray) -> np.ndarray:
    """f32 [rows, columns] as u8 [tiles, tile_bytes]."""
    rows, columns = values.shape
    shape = padded(rows, TILE_ROWS), padded(columns, BLOCK_COLUMNS)
    negative = np.zeros(shape, bool)
    negative[:rows, :columns] = values < 0
    dwords = np.packbits(negative, axis=1, bitorder="little").view("<u4")  # [rows, columns / 32]
    tiles = dwords.reshape(-1, TILE_ROWS, shape[1] // 32).transpose(0, 2, 1)
    return np.ascontiguousarray(tiles).view(np.uint8).reshape(len(tiles), -1)


def unpack_signs(tiles: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """-1 and 1 as f32 [rows, columns] of packed tiles."""
    wide = padded(columns, BLOCK_COLUMNS)
    dwords = np.ascontiguousarray(tiles).reshape(-1).view("<u4").reshape(-1, wide // 32, TILE_ROWS).transpose(0, 2, 1)
    bits = np.unpackbits(np.ascontiguousarray(dwords).view(np.uint8).reshape(-1, wide // 8), axis=1, bitorder="little")
    return np.where(bits[:rows, :columns] != 0, np.float32(-1), np.float32(1))


def scores_reference(signs: np.ndarray, x: np.ndarray) -> np.ndarray:
    """f32 [tokens, rows] of signs [rows, columns] and inputs [tokens, columns]."""
    return (np.where(x < 0, np.float32(-1), np.float32(1)) @ signs.T / np.sqrt(np.float32(signs.shape[1]))).astype(np.float32)


@op(types.void(_AT, _AT))
def take_signs_16(b, values, out):
    """The sign bits of 16 floats, -0 among the negative ones, to 16 bits."""
    store_at(b, out, b.bitcast(b.icmp_signed("<", load_at(b, values, VI), constant(VI, 0)), ir.IntType(16)))


@op(I32(I32, _AT, _AT))
def add_differing(b, total, signs, input_signs):
    """Add for 16 rows how many of 32 columns differ in sign."""
    differs = b.xor(load_at(b, signs, VI), splat_value(b, load_at(b, input_signs, INT32)))
    return b.add(total, call_intrinsic(b, "llvm.ctpop.v16i32", VI, differs))


@op(I32())
def no_columns(b):
    return constant(VI, 0)


@op(types.void(I32, types.float32, types.float32, _AT))
def store_scores(b, differing, columns, scale, out):
    """(columns - 2 * differing) * scale of 16 rows."""
    v = b.sitofp(differing, ir.VectorType(ir.FloatType(), 16))
    score = b.fmul(b.fsub(splat_value(b, columns), b.fadd(v, v)), splat_value(b, scale))
    store_at(b, add_bytes(b, out, 0), score)


@njit
def take_signs(values, columns, out):
    """Signs of f32 [columns, filled with zeros up to 64] to bits."""
    for i in range(0, columns, 16):
        take_signs_16(values + 4 * i, out + i // 8)


@njit
def score_bin(score):
    """The bin of a score."""
    at = int(np.floor(score * np.float32(SCORE_BINS_A_UNIT))) + SCORE_BINS // 2
    return min(max(at, 0), SCORE_BINS - 1)


@njit
def sign_scores(tile, input_signs, wide, columns, out):
    """Scores of a tile's 16 rows, f32 [16]; wide: columns filled up to 64."""
    total = no_columns()
    for i in range(wide // 32):
        total = add_differing(total, tile + 64 * i, input_signs + 4 * i)
    store_scores(total, np.float32(columns), np.float32(1) / np.sqrt(np.float32(columns)), out)
