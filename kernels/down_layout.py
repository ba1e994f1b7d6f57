"""How the down product's weights lie by neuron, so that a neuron's weights for all outputs are one stretch of memory.

Neurons come in units of 32. Two scalings, as files have them:

    SHARED   unit: 32 rows, f16 scale [outputs] (and minimum [outputs]) of all of them     from `ffn_down`
    OWN      row: weights, f16 scale [outputs / 32] (and minimums)                         from `ffn_down_t` (PowerInfer)

A row's outputs are padded to 128. Float formats have no scales. In 4-bit formats byte 16L + 4k + i of a line of 64 bytes holds outputs
32k + 4L + i and 32k + 16 + 4L + i, in 8-bit ones output 16k + 4L + i: woven with three other rows (see `quads`), these come out in order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from gguf import GGMLQuantizationType as T

from hotneuron.kernels import formats
from hotneuron.kernels.formats import padded

UNIT = 32
OUTPUTS = 128
SHARED, OWN = 0, 1


@dataclass(frozen=True, slots=True)
class DownLayout:
    """Where things lie in one layer's down weights of a format and scaling, for a number of outputs."""

    format_id: int
    scaling: int
    outputs: int

    def __post_init__(self) -> None:
        assert self.format_id != formats.BYTE_16  # stored as halves, see `format_of`

    @property
    def tall(self) -> int:
        return padded(self.outputs, OUTPUTS)

    @property
    def is_float(self) -> bool:
        return self.format_id >= formats.HALF

    @property
    def has_min(self) -> bool:
        return self.format_id in (formats.NIBBLE_MIN, formats.BYTE_MIN)

    @property
    def line_outputs(self) -> int:
        """Outputs in 64 bytes of a row."""
        if self.is_float:
            return 16 if self.format_id == formats.FLOAT else 32
        return 128 if self.format_id in (formats.NIBBLE, formats.NIBBLE_MIN) else 64

    @property
    def weight_bytes(self) -> int:
        return self.tall // self.line_outputs * 64

    @property
    def own_bytes(self) -> int:
        """Bytes of one row's own scales, filled up to a line."""
        return 0 if self.is_float or self.scaling == SHARED else padded(self.tall // 16, 64)

    @property
    def row_bytes(self) -> int:
        return self.weight_bytes + self.own_bytes * (2 if self.has_min else 1)

    @property
    def scales_at(self) -> int:
        """Offset of the scales: in the unit if they are shared, in the row if they are its own."""
        return self.weight_bytes if self.scaling == OWN else UNIT * self.weight_bytes

    @property
    def minimums_at(self) -> int:
        return self.scales_at + (self.own_bytes if self.scaling == OWN else 2 * self.tall)

    @property
    def unit_bytes(self) -> int:
        shared = 0 if self.is_float or self.scaling == OWN else 2 * self.tall * (2 if self.has_min else 1)
        return UNIT * self.row_bytes + shared


def format_of(type_: T) -> int:
    """The compute format of a down matrix by neuron. Q6_K's scales of 16 have no place here: it is kept in halves."""
    format_id = formats.FORMAT_OF[type_]
    return formats.HALF if format_id == formats.BYTE_16 else format_id


def _encode(q: np.ndarray, layout: DownLayout) -> np.ndarray:
    """u8 [neurons, outputs] to the bytes of rows [neurons, weight_bytes]."""
    n = len(q)
    q = np.pad(q, ((0, 0), (0, layout.tall - q.shape[1])))
    if layout.line_outputs == 128:
        lines = q.reshape(n, -1, 4, 2, 4, 4).transpose(0, 1, 4, 2, 5, 3)  # line, L, k, i, half
        return (lines[..., 0] | (lines[..., 1] << 4)).reshape(n, -1)
    return q.reshape(n, -1, 4, 4, 4).transpose(0, 1, 3, 2, 4).reshape(n, -1)


def _decode(rows: np.ndarray, layout: DownLayout) -> np.ndarray:
    n = len(rows)
    if layout.line_outputs == 128:
        lines = rows.reshape(n, -1, 4, 4, 4)  # line, L, k, i
        both = np.stack([lines & 15, lines >> 4], axis=-1)
        return both.transpose(0, 1, 3, 5, 2, 4).reshape(n, -1)
    return rows.reshape(n, -1, 4, 4, 4).transpose(0, 1, 3, 2, 4).reshape(n, -1)


def pack_down(raw: np.ndarray, type_: T, neurons: int, layout: DownLayout) -> np.ndarray:
    """A GGUF tensor's bytes, `ffn_down` [outputs, neurons] if scales are shared, else `ffn_down_t` [neurons, outputs],
    as u8 [units, unit_bytes]."""
    shared = layout.scaling == SHARED
    shape = (layout.outputs, neurons) if shared else (neurons, layout.outputs)
    out = np.zeros((padded(neurons, 2 * UNIT) // UNIT, layout.unit_bytes), np.uint8)
    rows = out[:, : UNIT * layout.row_bytes].reshape(len(out), UNIT, layout.row_bytes)

    def fill(at: int, values: np.ndarray) -> None:
        """u8 [neurons, bytes] into the rows."""
        tall = np.pad(values, ((0, len(out) * UNIT - neurons), (0, 0)))
        rows[:, :, at : at + values.shape[1]] = tall.reshape(len(out), UNIT, -1)

    if layout.is_float:
        values = raw.view(np.float32 if layout.format_id == formats.FLOAT else np.uint16).reshape(shape)
        fill(0, np.ascontiguousarray(values.T if shared else values).view(np.uint8))
        return out
    quants = formats.to_quants(raw, type_, *shape)
    fill(0, _encode(quants.q.T if shared else quants.q, layout))
    for at, part in ((layout.scales_at, quants.scale), (layout.minimums_at, quants.minimum)):
        if part is None:
            continue
        halves = np.ascontiguousarray(part.T if shared else part).view(np.uint8)
        if shared:
            out[: len(halves), at : at + halves.shape[1]] = halves
        else:
            fill(at, halves)
    return out


def unpack_down(packed: np.ndarray, neurons: int, layout: DownLayout) -> np.ndarray:
    """The f32 values [neurons, outputs] of packed units."""
    units = packed.reshape(-1, layout.unit_bytes)
    rows = np.ascontiguousarray(units[:, : UNIT * layout.row_bytes]).reshape(-1, layout.row_bytes)
    weights = np.ascontiguousarray(rows[:, : layout.weight_bytes])
    if layout.is_float:
        bits = weights.view(np.float32 if layout.format_id == formats.FLOAT else np.uint16)
        match layout.format_id:
            case formats.HALF:
                bits = bits.view(np.float16).astype(np.float32)
            case formats.BFLOAT:
                bits = (bits.astype(np.uint32) << 16).view(np.float32)
        return bits[:neurons, : layout.outputs].copy()
    q = _decode(weights, layout).astype(np.float32)

    def by_weight(at: int) -> np.ndarray:
        if layout.scaling == SHARED:
            halves = np.ascontiguousarray(units[:, at : at + 2 * layout.tall]).view(np.float16)
            return halves.astype(np.float32).repeat(UNIT, axis=0)
        halves = np.ascontiguousarray(rows[:, at : at + layout.tall // 16]).view(np.float16)
        return halves.astype(np.float32).repeat(32, axis=1)

    if layout.has_min:
        values = q * by_weight(layout.scales_at) + by_weight(layout.minimums_at)
    else:
        values = (q - (8 if layout.line_outputs == 128 else 128)) * by_weight(layout.scales_at)
    return values[:neurons, : layout.outputs]
