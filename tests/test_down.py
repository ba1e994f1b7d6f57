"""The down product by neuron against NumPy and, where scales are shared, against the dense kernels to the bit."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from kernel_arrays import TYPES, aligned, grouped, random_tensor

from hotneuron.kernels import down, formats, matmul
from hotneuron.kernels.down_layout import OWN, SHARED, UNIT, DownLayout, format_of, pack_down, unpack_down
from hotneuron.kernels.jit import call, njit


@njit
def _down(address, arguments):
    call(address, arguments)


@njit
def _list(values, stride, n_tokens, offset, n_units, lists, out):
    for unit in range(n_units):
        at = out + unit * n_tokens * down.VALUE_BYTES
        down.list_unit(values + 128 * unit, stride, n_tokens, offset, lists + unit * down.LIST_BYTES, at)


def product(packed: np.ndarray, layout: DownLayout, activations: np.ndarray, parts: int = 1) -> np.ndarray:
    """The kernel's f32 [tokens, outputs]; the lines are computed in `parts` calls, as threads do."""
    memory = aligned(packed.nbytes + 64)
    memory[: packed.nbytes] = packed.reshape(-1)
    n_units, n_tokens = len(packed), len(activations)
    values = np.zeros((n_tokens, n_units * UNIT), np.float32)
    values[:, : activations.shape[1]] = activations
    lists, out = aligned(n_units * down.LIST_BYTES), aligned(n_units * n_tokens * down.VALUE_BYTES)
    where = lists.ctypes.data, out.ctypes.data
    _list(values.ctypes.data, values.strides[0], n_tokens, down.down_offset(layout.format_id), n_units, *where)
    y = aligned(4 * n_tokens * layout.tall).view(np.float32).reshape(n_tokens, -1)
    scratch = aligned(down.scratch_bytes(layout), fill=0xFF)
    step = max(1, 128 // layout.line_outputs)
    lines = layout.tall // layout.line_outputs
    cuts = [lines // step * i // parts * step for i in range(parts)] + [lines]
    for first, last in pairwise(cuts):
        if first < last:
            _down(down.down_address(layout.format_id, layout.scaling), (
                memory.ctypes.data, layout.unit_bytes, layout.row_bytes, layout.scales_at, layout.minimums_at, n_units,
                *where, n_tokens, first, last, y.ctypes.data, y.strides[0], scratch.ctypes.data))  # fmt: skip
    return y[:, : layout.outputs].copy()


def sparse_activations(rng, n_tokens, neurons, share):
    a = rng.standard_normal((n_tokens, neurons)).astype(np.float32) * rng.choice([0.1, 3.0], (1, neurons))
    return np.where(rng.random((n_tokens, neurons)) < share, a, 0).astype(np.float32)


def matrix(rng, type_, scaling, outputs, neurons):
    raw = random_tensor(rng, type_, *((outputs, neurons) if scaling == SHARED else (neurons, outputs)))
    layout = DownLayout(format_of(type_), scaling, outputs)
    return raw, layout, pack_down(raw, type_, neurons, layout)


def case_name(value: T | int) -> str:
    return value.name if isinstance(value, T) else ("shared", "own")[value]


CASES = [(t, s) for t in TYPES for s in (SHARED, OWN) if format_of(t) == formats.FORMAT_OF[t]]


@pytest.mark.parametrize(("type_", "scaling"), CASES, ids=case_name)
def test_product_is_the_references(type_, scaling):
    rng = np.random.default_rng(1)
    is_float = formats.FORMAT_OF[type_] >= formats.HALF
    for outputs, neurons in ((200, 70), (640, 33)) if is_float else ((256, 256), (1280, 512)):
        raw, layout, packed = matrix(rng, type_, scaling, outputs, neurons)
        weights = unpack_down(packed, neurons, layout)
        scales = None
        if scaling == OWN and not is_float:
            scales = formats.to_quants(raw, type_, neurons, outputs).scale.astype(np.float32)
        for n_tokens, share in ((1, 0.1), (1, 1.0), (3, 0.3), (17, 0.02)):
            a = sparse_activations(rng, n_tokens, neurons, share)
            expected = a.astype(np.float64) @ weights
            y = product(packed, layout, a)
            size = np.abs(a).max() * np.abs(weights).max() * np.sqrt(neurons)
            assert np.abs(y - expected).max() <= (1e-5 if is_float else 0.03) * size
            if scaling == SHARED or is_float or not layout.has_min:
                reference = down.down_reference(weights, a, layout, scales)
                assert np.abs(y - reference).max() <= 2e-4 * size


@pytest.mark.parametrize(("type_", "scaling"), CASES, ids=case_name)
def test_a_tokens_bits_depend_neither_on_its_company_nor_on_the_threads(type_, scaling):
    rng = np.random.default_rng(2)
    _, layout, packed = matrix(rng, type_, scaling, 1280, 256)
    a = sparse_activations(rng, 9, 256, 0.2)
    alone = np.concatenate([product(packed, layout, a[k : k + 1]) for k in range(9)])
    assert np.abs(alone).max() > 0
    assert product(packed, layout, a).tobytes() == alone.tobytes()
    assert product(packed, layout, a[2:5], parts=3).tobytes() == alone[2:5].tobytes()
    assert product(packed, layout, a[:1], parts=2).tobytes() == alone[:1].tobytes()


@pytest.mark.parametrize("type_", [t for t in TYPES if format_of(t) == formats.FORMAT_OF[t]], ids=lambda t: t.name)
def test_shared_scales_give_the_dense_products_bits(type_):
    rng = np.random.default_rng(3)
    outputs, neurons = 400, 512
    raw, layout, packed = matrix(rng, type_, SHARED, outputs, neurons)
    a = sparse_activations(rng, 5, neurons, 0.15)
    tiles = aligned(formats.matrix_bytes(layout.format_id, outputs, neurons))
    tiles[:] = formats.pack(raw, type_, outputs, neurons).reshape(-1)
    groups, group_bytes, n_groups = grouped(a, layout.format_id, 8)
    dense = aligned(4 * 8 * outputs).view(np.float32).reshape(8, outputs)
    kernel = matmul.tile_address(layout.format_id, 8)
    for tile in range(outputs // 16):
        w = tiles.ctypes.data + tile * formats.tile_bytes(layout.format_id, neurons)
        at = dense.ctypes.data + 64 * tile
        matmul.matmul_tile(kernel, w, groups.ctypes.data, group_bytes, 8, n_groups, neurons, at, 4 * outputs)
    assert product(packed, layout, a).tobytes() == dense[:5].tobytes()
