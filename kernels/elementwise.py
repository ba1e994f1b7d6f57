"""Row kernels between the matrix products: norms, rotary embedding, sums. Rows are f32 at int64 addresses.

Widths are multiples of 16 floats, padded with zeros; `n` is how many are real.
"""

from __future__ import annotations

import numpy as np

from hotneuron.kernels import formats
from hotneuron.kernels.jit import njit
from hotneuron.kernels.memory import get_f32, get_u8, put_f32
from hotneuron.kernels.simd import (
    add,
    fma,
    get_bf16,
    get_f16,
    load_f32,
    maximum,
    minimum,
    mul,
    rounded,
    splat,
    store_f32,
    sub,
    sum_lanes,
    two_to_the,
    zero_below,
)

LOG2_E = np.float32(1.44269504088896341)
LN2_HIGH, LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
C2, C3, C4, C5, C6, C7 = (np.float32(c) for c in (5.0000001201e-1, 1.6666665459e-1, 4.1665795894e-2, 8.3334519073e-3, 1.3981999507e-3, 1.9875691500e-4))
SMALLEST, LARGEST = np.float32(-87.3), np.float32(88.0)
ONE = np.float32(1)


@njit
def exp(x):
    """e^x of sixteen lanes, to 2 units in the last place; exactly 0 below -87.3 (Cephes expf)."""
    v = minimum(maximum(x, splat(SMALLEST)), splat(LARGEST))
    n = rounded(mul(v, splat(LOG2_E)))
    r = fma(n, splat(-LN2_HIGH), v)
    r = fma(n, splat(-LN2_LOW), r)
    p = fma(splat(C7), r, splat(C6))
    p = fma(p, r, splat(C5))
    p = fma(p, r, splat(C4))
    p = fma(p, r, splat(C3))
    p = fma(p, r, splat(C2))
    y = fma(p, mul(r, r), add(r, splat(ONE)))
    return zero_below(x, splat(SMALLEST), mul(y, two_to_the(n)))


@njit
def rms_norm(x, weight, out, width, n, eps):
    """out = x / sqrt(mean(x^2) + eps) * weight."""
    acc = splat(np.float32(0))
    for i in range(0, 4 * width, 64):
        v = load_f32(x + i)
        acc = fma(v, v, acc)
    scale = splat(ONE / np.sqrt(sum_lanes(acc) / np.float32(n) + eps))
    for i in range(0, 4 * width, 64):
        store_f32(out + i, mul(mul(load_f32(x + i), scale), load_f32(weight + i)))


@njit
def layer_norm(x, weight, bias, out, width, n, eps):
    """out = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias; weight and bias are zeros past n."""
    acc = splat(np.float32(0))
    for i in range(0, 4 * width, 64):
        acc = add(acc, load_f32(x + i))
    mean = sum_lanes(acc) / np.float32(n)
    middle, acc = splat(mean), splat(np.float32(0))
    whole = n - n % 16
    for i in range(0, 4 * whole, 64):
        v = sub(load_f32(x + i), middle)
        acc = fma(v, v, acc)
    total = sum_lanes(acc)
    for i in range(whole, n):
        rest = get_f32(x + 4 * i) - mean
        total += rest * rest
    scale = splat(ONE / np.sqrt(total / np.float32(n) + eps))
    for i in range(0, 4 * width, 64):
        v = mul(sub(load_f32(x + i), middle), scale)
        store_f32(out + i, fma(v, load_f32(weight + i), load_f32(bias + i)))


@njit
def add_rows(x, y, out, width):
    for i in range(0, 4 * width, 64):
        store_f32(out + i, add(load_f32(x + i), load_f32(y + i)))


@njit
def rotate(x, cos_sin, dims):
    """Rotary embedding in place: element i with i + dims / 2, by angle i; cos_sin: f32 [dims / 2] cosines, then sines."""
    half = dims // 2
    for i in range(0, half - half % 16, 16):
        a, b = load_f32(x + 4 * i), load_f32(x + 4 * (i + half))
        c, s = load_f32(cos_sin + 4 * i), load_f32(cos_sin + 4 * (half + i))
        store_f32(x + 4 * i, sub(mul(a, c), mul(b, s)))
        store_f32(x + 4 * (i + half), add(mul(a, s), mul(b, c)))
    for i in range(half - half % 16, half):
        e, f = get_f32(x + 4 * i), get_f32(x + 4 * (i + half))
        g, h = get_f32(cos_sin + 4 * i), get_f32(cos_sin + 4 * (half + i))
        put_f32(x + 4 * i, e * g - f * h)
        put_f32(x + 4 * (i + half), e * h + f * g)


@njit
def norm_head(x, weight, n, eps):
    """RMS norm of one head in place, any n."""
    total = np.float32(0)
    for i in range(n):
        v = get_f32(x + 4 * i)
        total += v * v
    scale = ONE / np.sqrt(total / np.float32(n) + eps)
    for i in range(n):
        put_f32(x + 4 * i, get_f32(x + 4 * i) * scale * get_f32(weight + 4 * i))


@njit
def embed(format_id, w, tile_bytes, row, columns, out):
    """Row `row` of a packed matrix as f32 [columns]: the token embedding."""
    tile = w + row // 16 * tile_bytes
    lane = row % 16
    for c in range(columns):
        block, i = c // 64, c % 64
        if format_id == formats.NIBBLE or format_id == formats.NIBBLE_MIN:
            base = tile + block * (576 if format_id == formats.NIBBLE else 640)
            packed = get_u8(base + i // 8 * 64 + lane * 4 + i % 4)
            q = np.float32(packed >> 4 if i % 8 >= 4 else packed & 15)
            scale = get_f16(base + 512 + i // 32 * 32 + lane * 2)
            if format_id == formats.NIBBLE:
                value = (q - np.float32(8)) * scale
            else:
                value = q * scale + get_f16(base + 576 + i // 32 * 32 + lane * 2)
        elif format_id == formats.BYTE or format_id == formats.BYTE_MIN or format_id == formats.BYTE_16:
            base = tile + block * (1088 if format_id == formats.BYTE else 1152)
            q = np.float32(get_u8(base + i // 4 * 64 + lane * 4 + i % 4))
            per_scale = 16 if format_id == formats.BYTE_16 else 32
            scale = get_f16(base + 1024 + i // per_scale * 32 + lane * 2)
            if format_id == formats.BYTE_MIN:
                value = q * scale + get_f16(base + 1088 + i // 32 * 32 + lane * 2)
            else:
                value = (q - np.float32(128)) * scale
        elif format_id == formats.HALF:
            value = get_f16(tile + (c * 16 + lane) * 2)
        elif format_id == formats.BFLOAT:
            value = get_bf16(tile + (c * 16 + lane) * 2)
        else:
            value = get_f32(tile + (c * 16 + lane) * 4)
        put_f32(out + 4 * c, value)
