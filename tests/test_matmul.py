"""Tiles of every format times groups of tokens, against NumPy, over odd shapes and batches."""

from __future__ import annotations

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from kernel_arrays import TYPES, aligned, grouped, packed_tensor, width_of

from hotneuron.kernels import activations, formats, matmul
from hotneuron.kernels.llvm import MAGIC_BITS

GUARD = np.float32(-12345)


def multiply(memory, format_id, x, rows, columns, n=None):
    """The kernel's product [tokens, rows]; nothing but it is written."""
    tokens = len(x)
    n = activations.group_of(tokens) if n is None else n
    wide = formats.padded(columns, formats.BLOCK_COLUMNS)
    groups, group_bytes, n_groups = grouped(x, format_id, n)
    tall = formats.padded(rows, formats.TILE_ROWS)
    y = aligned(4 * (n_groups * n + 1) * tall).view(np.float32).reshape(-1, tall)
    y[:] = GUARD
    for tile in range(tall // formats.TILE_ROWS):
        w = memory.ctypes.data + tile * formats.tile_bytes(format_id, columns)
        to = y.ctypes.data + 4 * formats.TILE_ROWS * tile
        kernel, x_at = matmul.tile_address(format_id, n), groups.ctypes.data
        matmul.matmul_tile(kernel, w, x_at, group_bytes, n, n_groups, wide, to, 4 * tall)
    assert (y[n_groups * n :] == GUARD).all()
    assert not y[:tokens, rows:].any()
    return y[:tokens, :rows].copy()


def bound(weights, x, scale=1.0):
    """What rounding can do to a sum of f32 products, generously."""
    return scale * x.shape[1] * 2.0**-23 * np.abs(weights).max() * np.abs(x).sum(axis=1, keepdims=True) + 1e-30


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_product_is_the_references(type_):
    rng = np.random.default_rng(1)
    format_id, width = formats.FORMAT_OF[type_], width_of(type_)
    shapes = [(1, 3), (17, 1), (33, 5)] if width > 1 else [(1, 1), (17, 63), (33, 129)]
    for rows, blocks in shapes:
        columns = blocks * width
        memory, weights = packed_tensor(rng, type_, rows, columns)
        for tokens in range(1, 18):
            x = (rng.standard_normal((tokens, columns)) * rng.choice([0.01, 1, 50], (tokens, 1))).astype(np.float32)
            y = multiply(memory, format_id, x, rows, columns)
            padded = np.pad(x, ((0, 0), (0, -columns % 32)))
            wide = np.pad(weights, ((0, 0), (0, -columns % 32)))
            expected = matmul.matmul_reference(wide, padded, format_id)
            assert (np.abs(y - expected) <= bound(weights, x)).all()
            assert np.abs(expected).max() > 0


@pytest.mark.parametrize("type_", TYPES, ids=lambda t: t.name)
def test_a_tokens_bits_do_not_depend_on_its_company(type_):
    rng = np.random.default_rng(2)
    format_id, rows, columns = formats.FORMAT_OF[type_], 16, 512
    memory, _ = packed_tensor(rng, type_, rows, columns)
    x = rng.standard_normal((17, columns)).astype(np.float32)
    alone = np.concatenate([multiply(memory, format_id, x[k : k + 1], rows, columns) for k in range(17)])
    for tokens in (2, 4, 5, 8, 13, 17):
        order = rng.permutation(17)[:tokens]
        assert multiply(memory, format_id, x[order], rows, columns).tobytes() == alone[order].tobytes()
    assert multiply(memory, format_id, x[3:4], rows, columns, n=8).tobytes() == alone[3:4].tobytes()


@pytest.mark.parametrize("type_", [T.Q4_0, T.Q4_1, T.Q8_0, T.Q5_1, T.Q6_K], ids=lambda t: t.name)
@pytest.mark.parametrize("sign", [-1, 1])
def test_extreme_integers_do_not_saturate(type_, sign):
    """Every weight at its largest integer and every activation at +-127: sums that a 16-bit step would clip."""
    rng = np.random.default_rng(3)
    format_id, rows, columns = formats.FORMAT_OF[type_], 16, 256
    packed, _ = packed_tensor(rng, type_, rows, columns)
    blocks = packed.reshape(-1, formats.BLOCK_BYTES[format_id])
    blocks[:, : 512 if format_id in (formats.NIBBLE, formats.NIBBLE_MIN) else 1024] = 255
    weights = formats.unpack(packed, format_id, rows, columns)
    x = np.full((9, columns), sign * 0.75, np.float32)
    x[4:] *= np.where(np.arange(columns) % 2, 1, -1)
    expected = matmul.matmul_reference(weights, x, format_id)
    assert (np.abs(multiply(packed, format_id, x, rows, columns) - expected) <= bound(weights, x, 0.1)).all()


def rows_to_quantize(rng, columns):
    x = rng.standard_normal((11, columns)) * 10.0 ** rng.integers(-6, 6, (11, columns // 32)).repeat(32, axis=1)
    x[1] = 0
    x[2] = 1e-33
    x[3, ::2] = 1e30
    x[4] = np.arange(columns) % 255 - 127  # with 127 as the largest: integers exactly
    x[5] = (np.arange(columns) % 254 - 127) + 0.5  # halves: ties to even
    x[5, ::32] = 127
    x[6] = -0.0
    return x.astype(np.float32)


@pytest.mark.parametrize("columns", [64, 192, 576])
@pytest.mark.parametrize("n", [1, 4, 8])
def test_quantized_activations_are_the_references(columns, n):
    x = rows_to_quantize(np.random.default_rng(4), columns)
    memory, group_bytes, n_groups = grouped(x, formats.NIBBLE, n)
    for k in range(n_groups * n):
        group = memory[k // n * group_bytes : (k // n + 1) * group_bytes]
        q = group[: columns * n].view(np.int8).reshape(columns // 4, n, 4)[:, k % n].reshape(columns)
        part = columns // 32 * 4 * n
        fields = group[columns * n : columns * n + 4 * part].reshape(4, -1, n, 4)[:, :, k % n].copy()
        scale, total = fields[0].view(np.float32)[:, 0], fields[3].view(np.float32)[:, 0]
        bias8, bias128 = fields[1].view(np.int32)[:, 0], fields[2].view(np.int32)[:, 0]
        bias16 = group[columns * n + 4 * part :].view(np.int32).reshape(-1, n)[:, k % n]
        if k >= len(x):
            assert not q.any() and not fields.any() and not bias16.any()
            continue
        values = q.reshape(-1, 32) * scale[:, None]
        np.testing.assert_array_equal(values.reshape(-1), activations.quantize_reference(x[k : k + 1])[0])
        sums = q.reshape(-1, 16).astype(np.int32).sum(axis=1)
        np.testing.assert_array_equal(bias16, MAGIC_BITS - 128 * sums)
        sums = sums.reshape(-1, 2).sum(axis=1)
        np.testing.assert_array_equal(bias8, MAGIC_BITS - 8 * sums)
        np.testing.assert_array_equal(bias128, MAGIC_BITS - 128 * sums)
        np.testing.assert_array_equal(total, scale * sums.astype(np.float32))


def test_float_groups_are_copies():
    x = np.random.default_rng(5).standard_normal((5, 70)).astype(np.float32)
    memory, _, n_groups = grouped(x, formats.FLOAT, 4)
    copies = memory.view(np.float32).reshape(n_groups, 128, 4).transpose(0, 2, 1).reshape(-1, 128)
    np.testing.assert_array_equal(copies[:5, :70], x)
    assert not copies[5:].any() and not copies[:, 70:].any()


def test_groups():
    assert [activations.group_of(n) for n in (1, 2, 4, 5, 8, 17)] == [1, 4, 4, 8, 8, 8]
