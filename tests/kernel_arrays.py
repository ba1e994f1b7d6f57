"""Aligned memory and quantized tensors for the kernels' tests."""

from __future__ import annotations

import numpy as np
from gguf import GGML_QUANT_SIZES, quants
from gguf import GGMLQuantizationType as T

from hotneuron.kernels import activations, formats

K_QUANTS = (T.Q4_K, T.Q5_K, T.Q6_K)
TYPES = tuple(formats.FORMAT_OF)


def aligned(n_bytes: int, fill: int = 0) -> np.ndarray:
    """u8 [n_bytes], aligned to a cache line."""
    memory = np.full(n_bytes + 64, fill, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + n_bytes]


def width_of(type_: T) -> int:
    """Columns of a block of the type."""
    return GGML_QUANT_SIZES[type_][0]


def random_tensor(rng: np.random.Generator, type_: T, rows: int, columns: int) -> np.ndarray:
    """u8, flat: a tensor as a file holds it, every bit of its integers random and its scales of ordinary size."""
    width, size = GGML_QUANT_SIZES[type_]
    if width == 1:
        return (
            quants.quantize(rng.standard_normal((rows, columns)).astype(np.float32), type_).view(np.uint8).reshape(-1)
        )
    raw = rng.integers(0, 256, (rows, columns // width, size), dtype=np.uint8)
    places = {T.Q4_1: (0, 2), T.Q5_1: (0, 2), T.Q4_K: (0, 2), T.Q5_K: (0, 2), T.Q6_K: (208,)}.get(type_, (0,))
    for at in places:
        scale = rng.standard_normal(raw.shape[:2]) * 0.01
        raw[..., at : at + 2] = scale.astype(np.float16)[..., None].view(np.uint8)
    return raw.reshape(-1)


def packed_tensor(rng: np.random.Generator, type_: T, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """A random tensor in a pack's layout, aligned, and its f32 values."""
    packed = formats.pack(random_tensor(rng, type_, rows, columns), type_, rows, columns)
    memory = aligned(packed.nbytes)
    memory[:] = packed.reshape(-1)
    return memory, formats.unpack(packed, formats.FORMAT_OF[type_], rows, columns)


def grouped(x: np.ndarray, format_id: int, n: int) -> tuple[np.ndarray, int, int]:
    """f32 x [tokens, columns], padded with zeros, as groups of n tokens: memory, bytes of a group, groups."""
    tokens, columns = x.shape
    wide = formats.padded(columns, formats.BLOCK_COLUMNS)
    x = np.pad(x, ((0, 0), (0, wide - columns)))
    integer = format_id < formats.HALF
    group_bytes = activations.group_bytes(wide, n) if integer else 4 * wide * n
    n_groups = -(-tokens // n)
    memory = aligned(group_bytes * n_groups)
    write = activations.quantize_row if integer else activations.interleave_row
    for k in range(tokens):
        write(x[k].ctypes.data, memory.ctypes.data + k // n * group_bytes, wide, n, k % n)
    return memory, group_bytes, n_groups
