"""Rows gathered into tiles: the same values, and the same bits from the kernels of tiles."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_arrays import TYPES, aligned, grouped, random_tensor, width_of

from hotneuron.kernels import formats, matmul, rows
from hotneuron.kernels.jit import call, njit


@njit
def _gather(address, format_id, at, ahead, columns, tile):
    call(address, (format_id, at, ahead, columns, tile))


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
@pytest.mark.parametrize("blocks", [1, 3, 17])
def test_any_16_rows_make_the_tile_that_they_would_be_in_a_matrix(type_, blocks):
    rng = np.random.default_rng(blocks)
    format_id = formats.FORMAT_OF[type_]
    columns = blocks * max(width_of(type_), 8) - (3 if width_of(type_) == 1 else 0)
    raw = random_tensor(rng, type_, 40, columns)
    packed = rows.pack_rows(raw, type_, 40, columns)
    memory = aligned(packed.nbytes)
    memory[:] = packed.reshape(-1)
    values = rows.unpack_rows(packed, format_id, columns)
    tiles = formats.pack(raw, type_, 40, columns)
    np.testing.assert_array_equal(values, formats.unpack(tiles, format_id, 40, columns))

    chosen = rng.integers(0, 40, 16)
    addresses = memory.ctypes.data + chosen * packed.shape[1]
    tile = aligned(rows.scratch_bytes(format_id, columns), fill=0xA5)
    at = addresses.astype(np.int64)
    _gather(rows.gather.address, format_id, at.ctypes.data, at.ctypes.data, columns, tile.ctypes.data)
    size = formats.tile_bytes(format_id, columns)
    expected = formats.pack(raw.reshape(40, -1)[chosen].reshape(-1), type_, 16, columns)
    assert tile[:size].tobytes() == expected.tobytes()
    np.testing.assert_array_equal(
        rows.gather_reference([packed[i] for i in chosen], format_id, columns),
        formats.unpack(tile[:size], format_id, 16, columns),
    )

    x = rng.standard_normal((3, columns)).astype(np.float32)
    groups, group_bytes, n_groups = grouped(x, format_id, 4)
    y = aligned(4 * 16 * 4).view(np.float32).reshape(4, 16)
    kernel = matmul.tile_address(format_id, 4)
    wide = formats.padded(columns, 64)
    matmul.matmul_tile(kernel, tile.ctypes.data, groups.ctypes.data, group_bytes, 4, n_groups, wide, y.ctypes.data, 64)
    assert np.abs(y[:3] - x @ values[chosen].T).max() < 0.05 * np.abs(x @ values[chosen].T).max() + 1e-3
