"""Marks, lists and counters of active neurons against NumPy."""

from __future__ import annotations

import numpy as np
from kernel_arrays import aligned

from hotneuron.kernels import activate, active


def values_of(rng, n_tokens, width, share=0.2):
    memory = aligned(4 * n_tokens * width).view(np.float32).reshape(n_tokens, width)
    memory[:] = np.where(rng.random(memory.shape) < share, rng.standard_normal(memory.shape), 0)
    return memory


def test_marks_are_the_values_from_the_threshold_on():
    rng = np.random.default_rng(1)
    for threshold in (0.0, -0.5, 0.7):
        values = values_of(rng, 1, 96, 1.0)
        values[0, 3], values[0, 5], values[0, 7] = np.nan, threshold, -0.0
        expected = np.where(np.nan_to_num(values[0], nan=-np.inf) >= np.float32(threshold), 1, 0)
        expected[90:] = 0
        active.mark_from(values.ctypes.data, 96, 90, np.float32(threshold))
        np.testing.assert_array_equal(values[0], expected)


def test_gates_below_the_threshold_are_inactive():
    rng = np.random.default_rng(2)
    for name in ("relu", "silu", "gelu"):
        kind = activate.kind_of(name, "none", False)
        for threshold in (0.0, 0.4):
            values = values_of(rng, 1, 64, 1.0)
            expected = activate.activate_reference(kind, values[0].copy(), None)
            expected = np.where(np.abs(expected) < threshold, 0, expected)
            active.gate_from(kind, values.ctypes.data, 64, np.float32(threshold))
            np.testing.assert_allclose(values[0], expected, atol=1e-6)


def test_a_list_is_the_union_of_the_tokens_in_order():
    rng = np.random.default_rng(3)
    for n_tokens in (1, 2, 7):
        values = values_of(rng, n_tokens, 320, 0.05)
        out = np.full(321, -1, np.int32)
        count = active.list_active(values.ctypes.data, values.strides[0], n_tokens, 2, 10, out.ctypes.data)
        expected = np.flatnonzero(values[:, 64:].any(axis=0)) + 64
        np.testing.assert_array_equal(out[:count], expected)
        assert (out[count:] == -1).all()


def test_counters_add_up():
    rng = np.random.default_rng(4)
    fires, adds = np.zeros(32, np.int32), np.zeros(32, np.float32)
    values = values_of(rng, 50, 32)
    for row in values:
        active.count_block(row.ctypes.data, fires.ctypes.data, adds.ctypes.data)
    np.testing.assert_array_equal(fires, (values != 0).sum(axis=0))
    np.testing.assert_allclose(adds, np.abs(values).sum(axis=0), rtol=1e-5)
