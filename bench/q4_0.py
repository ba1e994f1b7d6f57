"""Q4_0 blocks from integers and scales, exactly: what a synthetic model's matrices are made of."""

from __future__ import annotations

import numpy as np

BLOCK = 32
NIBBLE_SD = 4.32  # of uniform integers from -7 to 7


def pack(integers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """int8 [rows, columns] of -8 to 7, f16 [rows, columns / 32] (or what broadcasts to it) as u8 [rows, bytes]."""
    rows, columns = integers.shape
    nibbles = (integers + np.int8(8)).astype(np.uint8).reshape(rows, -1, 2, BLOCK // 2)
    blocks = np.empty((rows, columns // BLOCK, 18), np.uint8)
    blocks[..., :2] = np.broadcast_to(scales, blocks.shape[:2]).astype("<f2")[..., None].view(np.uint8)
    blocks[..., 2:] = nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)
    return blocks.reshape(rows, -1)


def values(integers: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The same as f32 [rows, columns]."""
    wide = np.broadcast_to(scales, (len(integers), integers.shape[1] // BLOCK)).astype(np.float16).astype(np.float32)
    return integers.astype(np.float32) * np.repeat(wide, BLOCK, axis=1)


def random_integers(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Uniform int8 [rows, columns] of -7 to 7."""
    return rng.integers(-7, 8, (rows, columns), np.int8)
