"""How long each neuron's row of the down projection is: what its activation is multiplied with when it adds."""

from __future__ import annotations

import numpy as np

from hotneuron.models.dequantize import dequantize
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig

_SLICE_ROWS = 512  # dequantized at once


def down_norms(file: GGUFFile, config: ModelConfig, layer: int) -> np.ndarray:
    """f32 [ffn]."""
    info = file.tensors[f"blk.{layer}.{'ffn_down_t' if config.down_transposed else 'ffn_down'}.weight"]
    columns, rows = info.shape[:2]
    raw = file.raw(info.name).reshape(rows, -1)
    squares = np.zeros(config.ffn, np.float64)
    for low in range(0, rows, _SLICE_ROWS):
        part = raw[low : low + _SLICE_ROWS]
        values = dequantize(part.reshape(-1), info.type, (columns, len(part)))
        if config.down_transposed:
            squares[low : low + len(part)] = np.einsum("ij,ij->i", values, values)
        else:
            squares += np.einsum("ij,ij->j", values, values)
    return np.sqrt(squares).astype(np.float32)
