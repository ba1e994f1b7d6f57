"""Sign bits against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
from kernel_arrays import aligned

from hotneuron.kernels import signs


@pytest.mark.parametrize(("rows", "columns"), [(16, 64), (33, 72), (5, 100), (64, 4096)])
def test_scores_are_the_reference_s(rows: int, columns: int) -> None:
    rng, wide = np.random.default_rng(rows), (columns + 63) // 64 * 64
    values = rng.standard_normal((rows, columns)).astype(np.float32)
    values[:, 3] = 0
    packed = aligned(signs.matrix_bytes(rows, columns)).view(np.uint8)
    packed[:] = signs.pack_signs(values).reshape(-1)
    np.testing.assert_array_equal(signs.unpack_signs(packed, rows, columns), np.where(values < 0, -1, 1))
    x = aligned(4 * wide).view(np.float32)
    x[:columns] = rng.standard_normal(columns)
    bits, out = aligned(64 + wide // 8), aligned(64).view(np.float32)
    signs.take_signs(x.ctypes.data, wide, bits.ctypes.data)
    expected = signs.scores_reference(signs.unpack_signs(packed, rows, columns), x[None, :columns])[0]
    for tile in range((rows + 15) // 16):
        at = packed.ctypes.data + tile * signs.tile_bytes(columns)
        signs.sign_scores(at, bits.ctypes.data, wide, columns, out.ctypes.data)
        mine = expected[16 * tile : 16 * tile + 16]
        np.testing.assert_allclose(out[: len(mine)], mine, rtol=1e-5, atol=1e-5)
