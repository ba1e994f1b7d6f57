"""Stored tensor bytes to float32: the reference that fast kernels are tested against."""

from __future__ import annotations

import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType


def dequantize(raw: np.ndarray, type: GGMLQuantizationType, shape: tuple[int, ...]) -> np.ndarray:
    """u8[n_bytes] to f32 in C order, so shape (ne0, ne1) gives [ne1, ne0]. Raises ValueError if the sizes disagree."""
    row = shape[0] if shape else 1
    block_elements, block_bytes = GGML_QUANT_SIZES[type]
    rows = raw.reshape(*reversed(shape[1:]), row // block_elements * block_bytes)
    return quants.dequantize(rows, type).reshape(tuple(reversed(shape)))
