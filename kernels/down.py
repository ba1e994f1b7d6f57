"""The down product by neuron: outputs += activation * weights of each active neuron (layout: `down_layout`).

For each unit of 32 neurons `list_unit` names the neurons that are active for any token of the batch and quantizes each token's
activations to int8, exactly as a dense product does. Four neurons are woven together and one integer dot product adds them. A unit's
integer sums are exact in any order and units are added in their order, so that a token's result does not depend on which
neurons others listed, and with shared scales it is, to the bit, that of the dense product.

Where each row has its own scales, activation * scale is what is quantized, for each 32 outputs and each unit of neurons.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from hotneuron.kernels import formats
from hotneuron.kernels.activations import ONE_127TH
from hotneuron.kernels.down_layout import SHARED, UNIT, DownLayout
from hotneuron.kernels.jit import kernel, njit
from hotneuron.kernels.llvm import MAGIC_BITS
from hotneuron.kernels.memory import get_f32, get_i32, get_u8, put_f32, put_i32, put_u8
from hotneuron.kernels.quads import (
    ADD_OWN,
    ADD_SHARED,
    DOTS,
    STARTS,
    nonzero_32,
    store_coefficients,
    store_starts,
    weave,
)
from hotneuron.kernels.simd import (
    absolute,
    div,
    fma,
    load_bf16,
    load_f16,
    load_f32,
    max_lanes,
    maximum,
    mul,
    splat,
    store_f32,
    store_quads,
    zero_below,
)
from hotneuron.kernels.transpose import prefetch_far

LIST_BYTES = 160  # int32: quads, active neurons, then the neurons' numbers in the unit, filled up to whole quads
INDEX_AT = 16
# A token's values for one unit, in the order of the list.
VALUE_BYTES = 192  # f32 [32], int8 [32], int32 start, f32 scale, f32 total, int32 whether any is not 0
INT8_AT, START_AT, SCALE_AT, TOTAL_AT, USED_AT = 128, 160, 164, 168, 172
GROUP_OUTPUTS = 512  # outputs that pass through a unit together when there are several tokens
AHEAD_UNITS = 3


def scratch_bytes(layout: DownLayout) -> int:
    """Bytes of scratch that one thread needs: woven lines, and coefficients of one unit and token."""
    outputs = max(layout.tall, GROUP_OUTPUTS)
    return UNIT // 4 * 256 * (outputs // layout.line_outputs) + (UNIT // 4 + 3) * 4 * (outputs // 32 + 16)


@njit
def list_unit(values, stride, n_tokens, offset, unit_list, out):
    """List one unit's active neurons and make its tokens' values.

    values: f32 [tokens][32], `stride` bytes apart, 0 is inactive. offset: 8 or 128 for weights stored as q + offset, else 0.
    """
    union = np.uint32(0)
    for t in range(n_tokens):
        union |= np.uint32(nonzero_32(values + t * stride))
    count = 0
    for i in range(32):
        if union >> np.uint32(i) & np.uint32(1):
            put_i32(unit_list + INDEX_AT + 4 * count, i)
            count += 1
    quads = (count + 3) // 4
    for k in range(count, 4 * quads):
        put_i32(unit_list + INDEX_AT + 4 * k, get_i32(unit_list + INDEX_AT + 4 * (count - 1)))
    put_i32(unit_list, quads)
    put_i32(unit_list + 4, count)
    if count == 0:
        return
    for t in range(n_tokens):
        at, to = values + t * stride, out + t * VALUE_BYTES
        a, b = load_f32(at), load_f32(at + 64)
        scale = max_lanes(maximum(absolute(a), absolute(b))) * ONE_127TH
        put_i32(to + USED_AT, 1 if scale > np.float32(0) else 0)
        inverse = splat(np.float32(1) / scale if scale > np.float32(1e-30) else np.float32(0))
        total = store_quads(to, 4, mul(a, inverse)) + store_quads(to + 16, 4, mul(b, inverse))  # in the unit's order, for now
        for k in range(count):
            put_u8(to + INT8_AT + k, get_u8(to + get_i32(unit_list + INDEX_AT + 4 * k)))
        for k in range(count, 4 * quads):
            put_u8(to + INT8_AT + k, np.uint8(0))
        for k in range(count):
            put_f32(to + 4 * k, get_f32(at + 4 * get_i32(unit_list + INDEX_AT + 4 * k)))
        for k in range(count, 4 * quads):
            put_f32(to + 4 * k, np.float32(0))
        put_i32(to + START_AT, MAGIC_BITS - offset * total)
        put_f32(to + SCALE_AT, scale)
        put_f32(to + TOTAL_AT, scale * np.float32(total))


@njit
def _weave_lines(w, row_bytes, unit_list, quads, first, last, woven, ahead, ahead_list, ahead_quads):
    """Weave a unit's lines first..last-1, and ask for those of a unit ahead."""
    for line in range(first, last):
        for k in range(4 * ahead_quads):
            prefetch_far(ahead + get_i32(ahead_list + INDEX_AT + 4 * k) * row_bytes + 64 * line)
        for q in range(quads):
            at = unit_list + INDEX_AT + 16 * q
            weave(
                w + get_i32(at) * row_bytes + 64 * line,
                w + get_i32(at + 4) * row_bytes + 64 * line,
                w + get_i32(at + 8) * row_bytes + 64 * line,
                w + get_i32(at + 12) * row_bytes + 64 * line,
                woven,
            )
            woven += 256


@njit
def _ahead(lists, weights, unit_bytes, unit, n_units):
    """A unit a little ahead: its weights, its list and its quads; 0 quads past the end."""
    ahead = unit + AHEAD_UNITS
    if ahead >= n_units:
        return weights, lists, 0
    return weights + ahead * unit_bytes, lists + ahead * LIST_BYTES, get_i32(lists + ahead * LIST_BYTES)


def _shared(count, has_min, line_outputs):
    dots, starts, add = DOTS[count, False], STARTS[count, False], ADD_SHARED[count, has_min]

    @kernel(14)
    def down(weights, unit_bytes, row_bytes, scales_at, minimums_at, n_units, lists, values, n_tokens, first, last, y, y_stride, scratch):
        step = max(1, last - first) if n_tokens == 1 else GROUP_OUTPUTS // line_outputs
        for group in range(first, last, step):
            end = min(group + step, last)
            for unit in range(n_units):
                unit_list, w = lists + unit * LIST_BYTES, weights + unit * unit_bytes
                quads = get_i32(unit_list)
                if quads == 0:
                    continue
                ahead, ahead_list, ahead_quads = _ahead(lists, weights, unit_bytes, unit, n_units)
                if ahead_quads > 0:
                    for at in range(2 * line_outputs * group, 2 * line_outputs * end, 64):
                        prefetch_far(ahead + scales_at + at)
                        if has_min:
                            prefetch_far(ahead + minimums_at + at)
                _weave_lines(w, row_bytes, unit_list, quads, group, end, scratch, ahead, ahead_list, ahead_quads)
                for t in range(n_tokens):
                    value = values + (unit * n_tokens + t) * VALUE_BYTES
                    if get_i32(value + USED_AT) == 0:
                        continue
                    scale, total = get_f32(value + SCALE_AT), get_f32(value + TOTAL_AT)
                    woven = scratch
                    for line in range(group, end):
                        sums = starts(value + START_AT)
                        for q in range(quads):
                            sums = dots(sums, woven, value + INT8_AT + 4 * q)
                            woven += 256
                        at = 2 * line_outputs * line
                        add(sums, w + scales_at + at, w + minimums_at + at, scale, total, y + t * y_stride + 2 * at)

    return down


def _own(count, has_min, line_outputs):
    dots, starts, add = DOTS[count, True], STARTS[count, True], ADD_OWN[count, has_min]
    offset, blocks = np.float32(0 if has_min else 8 if count == 8 else 128), line_outputs // 32

    @njit
    def coefficients(w, row_bytes, scales_at, minimums_at, unit_list, quads, value, block, to, start, scale_at, min_at, n_blocks):
        """activation * scale of 16 blocks of 32 outputs from `block`, quantized over the unit's neurons."""
        largest, least = splat(np.float32(0)), splat(np.float32(0))
        for k in range(4 * quads):
            row = w + get_i32(unit_list + INDEX_AT + 4 * k) * row_bytes + 2 * block
            a = splat(get_f32(value + 4 * k))
            largest = maximum(largest, absolute(mul(load_f16(row + scales_at), a)))
            if has_min:
                least = fma(load_f16(row + minimums_at), a, least)
        scale = mul(largest, splat(ONE_127TH))
        inverse = zero_below(scale, splat(np.float32(1e-30)), div(splat(np.float32(1)), scale))
        total = splat(np.float32(0))
        for q in range(quads):
            at = unit_list + INDEX_AT + 16 * q
            r0, r1 = w + get_i32(at) * row_bytes + 2 * block + scales_at, w + get_i32(at + 4) * row_bytes + 2 * block + scales_at
            r2, r3 = w + get_i32(at + 8) * row_bytes + 2 * block + scales_at, w + get_i32(at + 12) * row_bytes + 2 * block + scales_at
            v = value + 16 * q
            c0, c1 = mul(mul(load_f16(r0), splat(get_f32(v))), inverse), mul(mul(load_f16(r1), splat(get_f32(v + 4))), inverse)
            c2, c3 = mul(mul(load_f16(r2), splat(get_f32(v + 8))), inverse), mul(mul(load_f16(r3), splat(get_f32(v + 12))), inverse)
            total = store_coefficients(to + 4 * q * n_blocks, total, c0, c1, c2, c3)
        store_starts(start, total, offset)
        store_f32(scale_at, scale)
        if has_min:
            store_f32(min_at, least)

    @kernel(14)
    def down(weights, unit_bytes, row_bytes, scales_at, minimums_at, n_units, lists, values, n_tokens, first, last, y, y_stride, scratch):
        step = max(1, last - first) if n_tokens == 1 else GROUP_OUTPUTS // line_outputs
        n_blocks = (step * blocks + 15) // 16 * 16
        start = scratch + 8 * 256 * step
        scale_at, min_at, coefficient = start + 4 * n_blocks, start + 8 * n_blocks, start + 12 * n_blocks
        for group in range(first, last, step):
            end = min(group + step, last)
            for unit in range(n_units):
                unit_list, w = lists + unit * LIST_BYTES, weights + unit * unit_bytes
                quads = get_i32(unit_list)
                if quads == 0:
                    continue
                ahead, ahead_list, ahead_quads = _ahead(lists, weights, unit_bytes, unit, n_units)
                for at in range(2 * blocks * group, 2 * blocks * end, 64):
                    for k in range(4 * ahead_quads):
                        row = ahead + get_i32(ahead_list + INDEX_AT + 4 * k) * row_bytes
                        prefetch_far(row + scales_at + at)
                        if has_min:
                            prefetch_far(row + minimums_at + at)
                _weave_lines(w, row_bytes, unit_list, quads, group, end, scratch, ahead, ahead_list, ahead_quads)
                for t in range(n_tokens):
                    value = values + (unit * n_tokens + t) * VALUE_BYTES
                    if get_i32(value + USED_AT) == 0:
                        continue
                    for b in range(0, (end - group) * blocks, 16):
                        coefficients(w, row_bytes, scales_at, minimums_at, unit_list, quads, value, group * blocks + b, coefficient + 4 * b,
                                     start + 4 * b, scale_at + 4 * b, min_at + 4 * b, n_blocks)  # fmt: skip
                    woven = scratch
                    for line in range(group, end):
                        at = 4 * blocks * (line - group)
                        sums = starts(start + at)
                        for q in range(quads):
                            sums = dots(sums, woven, coefficient + 4 * q * n_blocks + at)
                            woven += 256
                        add(sums, scale_at + at, min_at + at, y + t * y_stride + 4 * line_outputs * line)

    return down


def _floats(load, item_bytes):
    line_outputs = 64 // item_bytes

    @kernel(14)
    def down(weights, unit_bytes, row_bytes, scales_at, minimums_at, n_units, lists, values, n_tokens, first, last, y, y_stride, scratch):
        for unit in range(n_units):
            unit_list, w = lists + unit * LIST_BYTES, weights + unit * unit_bytes
            count = get_i32(unit_list + 4)
            ahead, ahead_list, ahead_quads = _ahead(lists, weights, unit_bytes, unit, n_units)
            for line in range(first, last):
                for k in range(4 * ahead_quads):
                    prefetch_far(ahead + get_i32(ahead_list + INDEX_AT + 4 * k) * row_bytes + 64 * line)
                for t in range(n_tokens):
                    value = values + (unit * n_tokens + t) * VALUE_BYTES
                    for part in range(0, line_outputs, 16):
                        at = y + t * y_stride + 4 * (line_outputs * line + part)
                        acc = load_f32(at)
                        for k in range(count):
                            row = w + get_i32(unit_list + INDEX_AT + 4 * k) * row_bytes
                            acc = fma(load(row + 64 * line + item_bytes * part), splat(get_f32(value + 4 * k)), acc)
                        store_f32(at, acc)

    return down


@cache
def down_address(format_id: int, scaling: int) -> int:
    """The compiled kernel for a format and scaling: it adds all units' active neurons to lines first..last-1 of the outputs.

    down(weights, unit_bytes, row_bytes, scales_at, minimums_at, n_units, lists, values, n_tokens, first, last, y, y_stride,
    scratch): weights and offsets as in `DownLayout`; lists [unit][LIST_BYTES] and values [unit][token][VALUE_BYTES] of
    `list_unit`; a line is `line_outputs` outputs; y: f32 [token][tall], y_stride bytes apart; scratch: `scratch_bytes`.
    """
    has_min = format_id in (formats.NIBBLE_MIN, formats.BYTE_MIN)
    nibbles = format_id in (formats.NIBBLE, formats.NIBBLE_MIN)
    count, line_outputs = (8, 128) if nibbles else (4, 64)
    match format_id:
        case formats.FLOAT:
            down = _floats(load_f32, 4)
        case formats.HALF:
            down = _floats(load_f16, 2)
        case formats.BFLOAT:
            down = _floats(load_bf16, 2)
        case _:
            down = (_shared if scaling == SHARED else _own)(count, has_min, line_outputs)
    _KEPT.append(down)
    return down.address


_KEPT: list[object] = []  # NOTE compiled code lives only as long as the object that holds it


def down_offset(format_id: int) -> int:
    """What `list_unit` must know of a format: weights are stored as q + offset."""
    return {formats.NIBBLE: 8, formats.BYTE: 128}.get(format_id, 0)


def down_reference(weights: np.ndarray, activations: np.ndarray, layout: DownLayout, scales: np.ndarray | None = None) -> np.ndarray:
    """f32 activations [tokens, neurons] times f32 weights [neurons, outputs], quantized as the kernels quantize.

    scales: f32 [neurons, outputs / 32], where each row has its own.
    """
    if layout.is_float:
        return (activations.astype(np.float64) @ weights).astype(np.float32)
    out = np.zeros((len(activations), weights.shape[1]))
    for first in range(0, len(weights), UNIT):
        a, w = activations[:, first : first + UNIT], weights[first : first + UNIT].astype(np.float64)
        if layout.scaling == SHARED:
            step = np.abs(a).max(axis=1, keepdims=True) * ONE_127TH
            seen = np.rint(np.divide(a, step, out=np.zeros_like(a), where=step > 1e-30)) * step
            out += seen @ w
            continue
        assert scales is not None
        for block in range(scales.shape[1]):
            s, outputs = scales[first : first + UNIT, block], slice(32 * block, 32 * block + 32)
            c = a * s
            step = np.abs(c).max(axis=1, keepdims=True) * ONE_127TH
            seen = np.rint(np.divide(c, step, out=np.zeros_like(c), where=step > 1e-30)) * step
            integers = np.divide(w[:, outputs], s[:, None], out=np.zeros_like(w[:, outputs]), where=s[:, None] != 0)
            out[:, outputs] += seen @ integers
    return out.astype(np.float32)
