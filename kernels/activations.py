"""Activations as the matrix kernels read them: groups of n = 1, 4 or 8 tokens, interleaved.

A quantized group of n tokens and c columns (c a multiple of 64) is one stretch of memory:

    int8   x        [c / 4][n][4]     round(value / scale)
    f32    scale    [c / 32][n]       largest magnitude of the 32 columns / 127
    int32  bias8    [c / 32][n]       MAGIC_BITS - 8 * sum of x over the 32 columns (weights stored as q + 8)
    int32  bias128  [c / 32][n]       MAGIC_BITS - 128 * that sum
    f32    total    [c / 32][n]       scale * sum of x (for formats with a minimum)
    int32  bias16   [c / 16][n]       MAGIC_BITS - 128 * sum of x over 16 columns

A float group is f32 [c][n].
"""

from __future__ import annotations

import numpy as np

from hotneuron.kernels.jit import njit
from hotneuron.kernels.llvm import MAGIC_BITS
from hotneuron.kernels.memory import get_f32, put_f32, put_i32
from hotneuron.kernels.simd import absolute, load_f32, max_lanes, maximum, mul, splat, store_quads

ONE_127TH = np.float32(1 / 127)


@njit
def group_of(n_tokens):
    """Tokens in an interleaved group, for a batch of n_tokens."""
    return 1 if n_tokens == 1 else 4 if n_tokens <= 4 else 8


@njit
def group_bytes(columns, n):
    """Bytes of a quantized group of n tokens."""
    return n * (columns + columns // 32 * 16 + columns // 16 * 4)


@njit
def quantize_32(values, group, columns, n, token, block):
    """Quantize the 32 floats at address `values` as columns 32 block.. of one token of a group."""
    a, b = load_f32(values), load_f32(values + 64)
    largest = max_lanes(maximum(absolute(a), absolute(b)))
    scale = largest * ONE_127TH
    inverse = splat(np.float32(1) / scale if scale > np.float32(1e-30) else np.float32(0))
    x = group + (block * 8 * n + token) * 4
    low = store_quads(x, 4 * n, mul(a, inverse))
    high = store_quads(x + 16 * n, 4 * n, mul(b, inverse))
    part = columns // 32 * 4 * n
    at = group + columns * n + (block * n + token) * 4
    put_f32(at, scale)
    put_i32(at + part, MAGIC_BITS - 8 * (low + high))
    put_i32(at + 2 * part, MAGIC_BITS - 128 * (low + high))
    put_f32(at + 3 * part, scale * np.float32(low + high))
    halves = group + columns * n + 4 * part + (2 * block * n + token) * 4
    put_i32(halves, MAGIC_BITS - 128 * low)
    put_i32(halves + 4 * n, MAGIC_BITS - 128 * high)


@njit
def blank_32(group, columns, n, token, block):
    """Zeros as columns 32 block .. of a token that is not there.

    NOTE what another batch left in its place would be computed too: harmless numbers, but denormal ones cost 100 cycles each.
    """
    x = group + (block * 8 * n + token) * 4
    for i in range(8):
        put_i32(x + 4 * n * i, 0)
    part = columns // 32 * 4 * n
    at = group + columns * n + (block * n + token) * 4
    put_f32(at, np.float32(0))
    put_i32(at + part, MAGIC_BITS)
    put_i32(at + 2 * part, MAGIC_BITS)
    put_f32(at + 3 * part, np.float32(0))
    halves = group + columns * n + 4 * part + (2 * block * n + token) * 4
    put_i32(halves, MAGIC_BITS)
    put_i32(halves + 4 * n, MAGIC_BITS)


@njit
def quantize_row(values, group, columns, n, token):
    """Quantize one token's `columns` floats at address `values` into its place in a group."""
    for block in range(columns // 32):
        quantize_32(values + 128 * block, group, columns, n, token, block)


@njit
def interleave_block(values, group, n, token, block):
    """Copy the 32 floats at address `values` as columns 32 block.. of one token of a float group."""
    for c in range(32):
        put_f32(group + ((32 * block + c) * n + token) * 4, get_f32(values + 4 * c))


@njit
def clear_block(group, n, token, block):
    """Zeros as columns 32 block.. of a token of a float group."""
    for c in range(32):
        put_f32(group + ((32 * block + c) * n + token) * 4, np.float32(0))


@njit
def interleave_row(values, group, columns, n, token):
    """Copy one token's `columns` floats at address `values` into its place in a float group."""
    for block in range(columns // 32):
        interleave_block(values + 128 * block, group, n, token, block)


def quantize_reference(x: np.ndarray) -> np.ndarray:
    """What the kernels see of f32 [tokens, columns], columns a multiple of 32."""
    blocks = x.astype(np.float32).reshape(len(x), -1, 32)
    scale = np.abs(blocks).max(axis=2, keepdims=True) * ONE_127TH
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 1e-30)
    return (np.rint(blocks * inverse) * scale).reshape(x.shape).astype(np.float32)
