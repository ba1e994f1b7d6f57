"""Attention and the row kernels against NumPy, over odd contexts, windows and group sizes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from hotneuron.kernels import attention, elementwise
from hotneuron.kernels.activate import activate, activate_reference, kind_of
from hotneuron.kernels.jit import call, njit
from hotneuron.kernels.simd import load_f32, store_f32

N_BLOCKS = 20


@njit
def run(kernel, arguments):
    call(kernel, arguments)


def aligned(n_bytes: int) -> np.ndarray:
    memory = np.zeros(n_bytes + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + n_bytes]


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, window: int, n: int) -> np.ndarray:
    """As `attention_reference`, with keys and values in blocks that lie in random order."""
    count, head_dim = q.shape
    stride = attention.head_block_bytes(head_dim)
    cache, table = aligned(N_BLOCKS * stride), np.random.default_rng(1).permutation(N_BLOCKS).astype(np.int32)
    for position in range(len(k)):
        block = cache.ctypes.data + int(table[position // 16]) * stride
        attention.store_kv(block, position, k[position].ctypes.data, v[position].ctypes.data, head_dim)
    queries, out = np.zeros((head_dim, n), np.float32), np.zeros((n, head_dim), np.float32)
    queries[:, :count] = q.T
    places = np.concatenate([positions, np.repeat(positions[-1:], n - count)]).astype(np.int32)
    scores = np.full((n, 16 * N_BLOCKS), 7, np.float32)
    run(
        attention.attend_address(n),
        (count, queries.ctypes.data, places.ctypes.data, window, cache.ctypes.data, table.ctypes.data, stride, head_dim,
         scores.ctypes.data, scores.strides[0], out.ctypes.data),
    )  # fmt: skip
    return out[:count]


@pytest.mark.parametrize("head_dim", [16, 48, 64, 128])
@pytest.mark.parametrize("context", [1, 16, 17, 133])
@pytest.mark.parametrize("window", [0, 5, 30])
def test_attention_is_the_references(head_dim: int, context: int, window: int) -> None:
    rng = np.random.default_rng(head_dim * context + window)
    k, v = rng.standard_normal((2, context, head_dim)).astype(np.float32)
    halves = [a.astype(np.float16).astype(np.float32) for a in (k, v)]
    for n, count in ((1, 1), (2, 2), (3, 2), (4, 3), (8, 8), (8, 5)):
        q = (rng.standard_normal((count, head_dim)) / np.sqrt(head_dim)).astype(np.float32)
        positions = np.sort(rng.integers(0, context, count))
        expected = attention.attention_reference(q, *halves, positions, window)
        np.testing.assert_allclose(attend(q, k, v, positions, window, n), expected, atol=2e-6)


def test_a_query_does_not_depend_on_its_group() -> None:
    """The same bits alone, among earlier ones and among later ones."""
    rng = np.random.default_rng(5)
    k, v = rng.standard_normal((2, 100, 64)).astype(np.float32)
    q, positions = rng.standard_normal((8, 64)).astype(np.float32), np.array([3, 15, 16, 40, 41, 63, 64, 99])
    for window in (0, 20):
        together = attend(q, k, v, positions, window, 8)
        for i in range(8):
            alone = attend(q[i : i + 1], k, v, positions[i : i + 1], window, 1)
            np.testing.assert_array_equal(together[i], alone[0])


@njit
def exponentials(x, out, n):
    for i in range(0, 4 * n, 64):
        store_f32(out + i, elementwise.exp(load_f32(x + i)))


def test_exp_is_right_to_two_units_and_zero_far_below() -> None:
    x = np.concatenate([np.linspace(-87, 88, 4000), [-np.inf, -1e30, -87.5, -88], np.zeros(12)]).astype(np.float32)
    out = np.zeros_like(x)
    exponentials(x.ctypes.data, out.ctypes.data, len(x))
    np.testing.assert_allclose(out[:4000], np.exp(x[:4000].astype(np.float64)), rtol=2.5e-7)
    assert not out[4000:4004].any()


@pytest.mark.parametrize("n", [16, 50, 576])
def test_norm_activation_and_rotation(n: int) -> None:
    rng = np.random.default_rng(n)
    width = -(-n // 16) * 16
    x, w, out = np.zeros((3, width), np.float32)
    x[:n], w[:n] = rng.standard_normal((2, n))
    elementwise.rms_norm(x.ctypes.data, w.ctypes.data, out.ctypes.data, width, n, np.float32(1e-5))
    np.testing.assert_allclose(out, x / np.sqrt((x.astype(np.float64) ** 2).sum() / n + 1e-5) * w, rtol=2e-6, atol=1e-7)
    b = np.zeros_like(x)
    b[:n] = rng.standard_normal(n)
    far = np.where(np.arange(width) < n, x + 30, 0).astype(np.float32)  # a mean that is not small
    pointers = [array.ctypes.data for array in (far, w, b, out)]
    elementwise.layer_norm(*pointers, width, n, np.float32(1e-5))
    middle = far[:n].astype(np.float64) - far[:n].mean(dtype=np.float64)
    expected = middle / np.sqrt((middle**2).mean() + 1e-5) * w[:n] + b[:n]
    np.testing.assert_allclose(out[:n], expected, rtol=1e-5, atol=2e-5)
    assert not out[n:].any()
    gate = (5 * rng.standard_normal(width)).astype(np.float32)
    for activation, up_activation, gated in product(("silu", "gelu", "relu"), ("none", "relu"), (True, False)):
        kind = kind_of(activation, up_activation, gated)
        activate(kind, gate.ctypes.data, x.ctypes.data if gated else 0, out.ctypes.data, width)
        expected = activate_reference(kind, gate.astype(np.float64), x.astype(np.float64))
        np.testing.assert_allclose(out, expected, rtol=4e-6, atol=2e-6)
    half = n // 2
    angles = rng.uniform(0, 6, half)
    table = np.concatenate([np.cos(angles), np.sin(angles)]).astype(np.float32)
    a, b = x[:half].astype(np.float64), x[half : 2 * half].astype(np.float64)
    expected = np.concatenate([a * table[:half] - b * table[half:], a * table[half:] + b * table[:half]])
    elementwise.rotate(x.ctypes.data, table.ctypes.data, 2 * half)
    np.testing.assert_allclose(x[: 2 * half], expected, atol=1e-6)
