"""Weights times activations: tiles of 16 rows by groups of n tokens, for every compute format (see `formats`).

The tokens of a batch come in groups of n = 1, 4 or 8, interleaved (see `activations`), so that one loaded weight vector serves
all of them. Per row and token the order of operations does not depend on n: a token's result is the same bits in any batch.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from hotneuron.kernels import formats
from hotneuron.kernels.activations import quantize_reference
from hotneuron.kernels.jit import call, kernel, njit
from hotneuron.kernels.llvm import MAGIC
from hotneuron.kernels.simd import (
    high_nibbles,
    load_bf16,
    load_f16,
    load_f32,
    load_u8,
    low_nibbles,
    mul,
    prefetch,
    splat,
)
from hotneuron.kernels.tokens import (
    dot_each,
    dot_each_small,
    fma_by_token,
    fma_near,
    magic_i32,
    scale_each,
    splats_i32,
    store_each,
    zeros_f32,
)

# How far ahead of itself a kernel asks for weights that lie in one stretch; hardware prefetchers stop at each 4 KiB page.
AHEAD_BYTES = 5760
MINUS_MAGIC = np.float32(-MAGIC)


def _nibble_tile(n, has_min, block_bytes):
    lines = block_bytes // 64

    @kernel(6)
    def tile(w, x, columns, y, y_stride, ahead):
        scale = x + columns * n
        part = columns // 32 * 4 * n
        acc = zeros_f32(n)
        for _ in range(columns // 64):
            for line in range(lines):
                prefetch(w + ahead + 64 * line)
            for half in range(2):
                total = magic_i32(n) if has_min else splats_i32(n, scale + part)
                for j in range(4):
                    v = load_u8(w + 256 * half + 64 * j)
                    total = dot_each_small(total, low_nibbles(v), x)
                    total = dot_each_small(total, high_nibbles(v), x + 4 * n)
                    x += 8 * n
                by_row = load_f16(w + 512 + 32 * half)
                acc = fma_by_token(acc, scale_each(total, by_row, mul(by_row, splat(MINUS_MAGIC))), scale)
                if has_min:
                    acc = fma_near(acc, load_f16(w + 576 + 32 * half), scale + 3 * part)
                scale += 4 * n
            w += block_bytes
        store_each(y, y_stride, acc)

    return tile


def _byte_tile(n, has_min, block_bytes):
    lines = block_bytes // 64

    @kernel(6)
    def tile(w, x, columns, y, y_stride, ahead):
        scale = x + columns * n
        part = columns // 32 * 4 * n
        acc = zeros_f32(n)
        for _ in range(columns // 64):
            for line in range(lines):
                prefetch(w + ahead + 64 * line)
            for half in range(2):
                total = magic_i32(n) if has_min else splats_i32(n, scale + 2 * part)
                for j in range(8):
                    total = dot_each(total, load_u8(w + 512 * half + 64 * j), x)
                    x += 4 * n
                by_row = load_f16(w + 1024 + 32 * half)
                acc = fma_by_token(acc, scale_each(total, by_row, mul(by_row, splat(MINUS_MAGIC))), scale)
                if has_min:
                    acc = fma_near(acc, load_f16(w + 1088 + 32 * half), scale + 3 * part)
                scale += 4 * n
            w += block_bytes
        store_each(y, y_stride, acc)

    return tile


def _byte_16_tile(n, block_bytes):
    lines = block_bytes // 64

    @kernel(6)
    def tile(w, x, columns, y, y_stride, ahead):
        scale = x + columns * n
        bias = scale + columns // 32 * 16 * n
        acc = zeros_f32(n)
        for _ in range(columns // 64):
            for line in range(lines):
                prefetch(w + ahead + 64 * line)
            for quarter in range(4):
                total = splats_i32(n, bias)
                for j in range(4):
                    total = dot_each(total, load_u8(w + 256 * quarter + 64 * j), x)
                    x += 4 * n
                by_row = load_f16(w + 1024 + 32 * quarter)
                acc = fma_by_token(acc, scale_each(total, by_row, mul(by_row, splat(MINUS_MAGIC))), scale)
                bias += 4 * n
                if quarter % 2 == 1:
                    scale += 4 * n
            w += block_bytes
        store_each(y, y_stride, acc)

    return tile


def _float_tile(n, load, item_bytes):
    step = 16 * item_bytes

    @kernel(6)
    def tile(w, x, columns, y, y_stride, ahead):
        acc = zeros_f32(n)
        for _ in range(columns):
            prefetch(w + ahead)
            acc = fma_near(acc, load(w), x)
            w += step
            x += 4 * n
        store_each(y, y_stride, acc)

    return tile


@cache
def tile_address(format_id: int, n: int) -> int:
    """The compiled kernel for one compute format and group size: tile(w, x, columns, y, y_stride, ahead).

    w: one tile of 16 rows. x: one group of n tokens (see `activations`). y: n rows of 16 floats, y_stride bytes apart. ahead:
    how many bytes after each weight the one lies that is wanted soon.
    """
    block_bytes = formats.BLOCK_BYTES[format_id]
    match format_id:
        case formats.NIBBLE | formats.NIBBLE_MIN:
            tile = _nibble_tile(n, format_id == formats.NIBBLE_MIN, block_bytes)
        case formats.BYTE | formats.BYTE_MIN:
            tile = _byte_tile(n, format_id == formats.BYTE_MIN, block_bytes)
        case formats.BYTE_16:
            tile = _byte_16_tile(n, block_bytes)
        case formats.HALF:
            tile = _float_tile(n, load_f16, 2)
        case formats.BFLOAT:
            tile = _float_tile(n, load_bf16, 2)
        case _:
            tile = _float_tile(n, load_f32, 4)
    _KEPT.append(tile)
    return tile.address


_KEPT: list[object] = []  # NOTE compiled code lives only as long as the object that holds it


@njit
def matmul_tile(tile, w, x, group_bytes, n, n_groups, columns, y, y_stride, ahead=AHEAD_BYTES):
    """One tile of 16 rows times all groups, by the kernel at address `tile`: y[token][16 rows], tokens y_stride bytes apart."""
    for g in range(n_groups):
        call(tile, (w, x + g * group_bytes, columns, y + n * g * y_stride, y_stride, ahead))


def matmul_reference(weights: np.ndarray, x: np.ndarray, format_id: int) -> np.ndarray:
    """f32 weights [rows, columns] times f32 x [tokens, columns], x quantized as the integer kernels do."""
    if format_id < formats.HALF:
        x = quantize_reference(x)
    return (x.astype(np.float64) @ weights.T.astype(np.float64)).astype(np.float32)
