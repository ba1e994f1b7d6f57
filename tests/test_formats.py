"""Packing loses nothing of a tensor, whatever its type and shape."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from gguf import quants
from kernel_arrays import K_QUANTS, TYPES, random_tensor, width_of

from hotneuron.kernels import formats


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 50])
@pytest.mark.parametrize("blocks", [1, 2, 3, 5])
def test_unpacked_is_what_gguf_says(type_, rows, blocks):
    columns = blocks * width_of(type_) if width_of(type_) > 1 else (1, 63, 65, 100)[blocks // 2]
    raw = random_tensor(np.random.default_rng(rows * 10 + blocks), type_, rows, columns)
    expected = quants.dequantize(raw.reshape(rows, -1), type_).astype(np.float32).reshape(rows, columns)
    format_id = formats.FORMAT_OF[type_]
    packed = formats.pack(raw, type_, rows, columns)
    assert packed.nbytes == formats.matrix_bytes(format_id, rows, columns)
    unpacked = formats.unpack(packed, format_id, rows, columns)
    assert unpacked.shape == expected.shape and unpacked.dtype == np.float32
    if type_ in K_QUANTS:  # products of two scales, rounded to f16
        np.testing.assert_allclose(unpacked, expected, atol=5e-4 * np.abs(expected).max())
        assert np.abs(unpacked).max() > 0
    else:
        np.testing.assert_array_equal(unpacked, expected)


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_padding_is_zero(type_):
    """A kernel may read whole tiles: what lies past the matrix adds nothing."""
    rows, columns = 17, max(width_of(type_), 33 if width_of(type_) == 1 else 32)
    format_id = formats.FORMAT_OF[type_]
    packed = formats.pack(random_tensor(np.random.default_rng(5), type_, rows, columns), type_, rows, columns)
    tall, wide = formats.padded(rows, formats.TILE_ROWS), formats.padded(columns, formats.BLOCK_COLUMNS)
    everything = formats.unpack(packed, format_id, tall, wide)
    assert not everything[rows:].any() and not everything[:, columns:].any()
    assert everything[:rows, :columns].any()


@pytest.mark.parametrize("bits", [0x0001, 0x03FF, 0x8001, 0x7BFF, 0xFBFF, 0x0000])
def test_scales_of_any_size_are_kept(bits):
    """The smallest subnormal, the largest and the negative halves."""
    raw = random_tensor(np.random.default_rng(6), T.Q8_0, 3, 64).reshape(3, 2, 34)
    raw[..., 0:2] = np.array([bits], np.uint16).view(np.uint8)
    raw = raw.reshape(-1)
    unpacked = formats.unpack(formats.pack(raw, T.Q8_0, 3, 64), formats.BYTE, 3, 64)
    np.testing.assert_array_equal(unpacked, quants.dequantize(raw.reshape(3, -1), T.Q8_0))


def test_every_type_has_a_format_and_every_format_a_size():
    assert len(TYPES) == 11
    assert sorted(set(formats.FORMAT_OF.values())) == list(range(len(formats.BLOCK_BYTES))) == list(range(8))
    for format_id, block in enumerate(formats.BLOCK_BYTES):
        assert formats.tile_bytes(format_id, 1) == formats.tile_bytes(format_id, 64) == block
        assert formats.matrix_bytes(format_id, 17, 65) == 4 * block
