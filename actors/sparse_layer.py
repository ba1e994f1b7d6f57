"""The FFN in one layer of the step program where only active neurons of my shard are computed, into my slot.

What decides comes first: a predictor's logits, or the first product itself (`gate` here, `up` where a model has no gate). Then the
threads share one list of the neurons that are active for any row, gather their rows sixteen at a time into tiles, and
add their columns of the down projection. Rows that a neuron is not active for get exactly 0 from it.
"""

from __future__ import annotations

import numpy as np

from hotneuron.actors.arena import COUNTED, LISTED, LISTS
from hotneuron.actors.fields import (
    ACTIVATION,
    ACTIVE,
    ACTIVE_COUNTS,
    ACTIVE_LISTS,
    ACTIVE_STRIDE,
    ADDS,
    COUNTS,
    DOWN_KERNEL,
    DOWN_MINIMUMS_AT,
    DOWN_OFFSET,
    DOWN_PRODUCT,
    DOWN_ROW_BYTES,
    DOWN_ROWS,
    DOWN_SCALES_AT,
    DOWN_STRIPE_LINES,
    DOWN_UNIT_BYTES,
    DOWN_VALUES,
    FC1,
    FC1_FORMAT,
    FC1_INPUT,
    FC1_TILE,
    FC1_TILES,
    FC2,
    FC2_FORMAT,
    FC2_INPUT,
    FC2_TILE,
    FIRES,
    FIRST_NEURON,
    GATE,
    GATE_FORMAT,
    GATE_ROW_BYTES,
    GATE_ROWS,
    GATE_TILE,
    GATHER_KERNEL,
    HIDDEN,
    HIDDEN8,
    HIDDENF,
    HISTOGRAM,
    HISTOGRAM_BYTES,
    INPUT_SIGNS,
    LAST_NEURON,
    ME,
    N8,
    N_THREADS,
    N_WORKERS,
    NEURONS,
    NF,
    PREDICTED8,
    PREDICTEDF,
    PREDICTOR,
    RANK,
    REAL_NEURONS,
    SIGNS,
    SIGNS_TILE,
    SLOT_BYTES,
    SPARSE_BATCH,
    SUM,
    T_DOWN,
    T_GATE,
    T_ROW,
    T_ROWS,
    T_TILE,
    T_UP,
    TALL,
    THREAD,
    THREAD_BYTES,
    THRESHOLD,
    TILE_KERNELS,
    UNIT,
    UNIT_LISTS,
    UP,
    UP_BIAS,
    UP_FORMAT,
    UP_ROW_BYTES,
    UP_ROWS,
    UP_TILE,
    WIDE,
    WIDTH,
    X,
)  # fmt: skip
from hotneuron.actors.meeting import bank, barrier, mark, meet, padded_rows, part
from hotneuron.actors.products import make_input, tile
from hotneuron.kernels.activate import GATED, UP_RELU, activate
from hotneuron.kernels.activations import group_bytes, group_of
from hotneuron.kernels.active import count_block, gate_from, list_active, mark_from, where_active
from hotneuron.kernels.down import LIST_BYTES, VALUE_BYTES, list_unit
from hotneuron.kernels.elementwise import add_rows
from hotneuron.kernels.jit import call, njit
from hotneuron.kernels.matmul import AHEAD_BYTES
from hotneuron.kernels.memory import get_f32, get_i32, get_i64, put_f32, put_i64
from hotneuron.kernels.signs import SCORE_BINS, score_bin, sign_scores
from hotneuron.kernels.simd import add, load_f32, maximum, mul, splat, store_f32
from hotneuron.kernels.sync import OK

ZERO = np.float32(0)
DENSE_FROM = 0.78  # share of the neurons listed, from which on all are computed; where it is one matrix that is listed
DENSE_FROM_OF_TWO = 0.9  # both as bench/crossover.py measures them


@njit
def _wide_input(kind, values, columns, n, index, int8, floats):
    """A row of floats as row `index` of an input of that many columns; 0 is a row not there."""
    int8 += index // n * group_bytes(columns, n)
    floats += index // n * 4 * n * columns
    for block in range(columns // 32):
        make_input(kind, values + 128 * block if values != 0 else 0, block, columns, n, index % n, int8, floats)


@njit
def predict(p, layer, state, thread, n_rows):
    """The predictor's first layer, of all workers: relu(fc1 x) of each row, as the input of fc2. Meets once.

    Its rows are dealt to the workers, who read each other's through the slots.
    """
    n, tiles, rank = group_of(n_rows), layer[FC1_TILES], layer[RANK]
    low, high = part(padded_rows(n_rows), thread, p[N_THREADS])
    for row in range(low, high):
        values = p[X] + row * 4 * p[WIDE] if row < n_rows else 0
        _wide_input(layer[FC1_INPUT], values, p[WIDE], n, row, p[PREDICTED8], p[PREDICTEDF])
    code = barrier(p, state)
    if code != OK:
        return code
    first, last = part(tiles, p[ME], p[N_WORKERS])
    low, high = part(last - first, thread, p[N_THREADS])
    out = bank(p, state, 1) + p[ME] * p[SLOT_BYTES]
    for t in range(first + low, first + high):
        w, y = layer[FC1] + t * layer[FC1_TILE], out + 64 * t
        tile(p[TILE_KERNELS], layer[FC1_FORMAT], w, p[PREDICTED8], p[PREDICTEDF], p[WIDE], n, n_rows, y, 4 * p[WIDTH], AHEAD_BYTES)
    code = meet(p, state, thread)
    if code != OK:
        return code
    row_buffer = p[THREAD] + thread * p[THREAD_BYTES] + p[T_ROW]
    low, high = part(padded_rows(n_rows), thread, p[N_THREADS])
    for row in range(low, high):
        if row < n_rows:
            for w in range(p[N_WORKERS]):
                first, last = part(tiles, w, p[N_WORKERS])
                slot = bank(p, state, 0) + w * p[SLOT_BYTES] + row * 4 * p[WIDTH]
                for t in range(first, last):
                    store_f32(row_buffer + 64 * t, maximum(load_f32(slot + 64 * t), splat(ZERO)))
            for t in range(tiles, rank // 16):
                store_f32(row_buffer + 64 * t, splat(ZERO))
        _wide_input(layer[FC2_INPUT], row_buffer if row < n_rows else 0, rank, n, row, p[HIDDEN8], p[HIDDENF])
    code = barrier(p, state)
    mark(p, state, thread, PREDICTOR)
    return code


@njit
def _decide_by_product(p, layer, start, count, n, first_tile, last_tile):
    """The predictor's second layer, or the first product itself, of some tiles."""
    if layer[FC2] != 0:
        columns, format_id, w, tile_bytes = layer[RANK], layer[FC2_FORMAT], layer[FC2], layer[FC2_TILE]
        int8, floats = p[HIDDEN8], p[HIDDENF]
    else:
        format_id, w, tile_bytes = layer[GATE_FORMAT], layer[GATE], layer[GATE_TILE]
        if w == 0:
            format_id, w, tile_bytes = layer[UP_FORMAT], layer[UP], layer[UP_TILE]
        columns, int8, floats = p[WIDE], p[N8], p[NF]
    int8 += start // n * group_bytes(columns, n)
    floats += start // n * 4 * n * columns
    for t in range(first_tile, last_tile):
        out = p[ACTIVE] + 64 * t
        tile(p[TILE_KERNELS], format_id, w + t * tile_bytes, int8, floats, columns, n, count, out, p[ACTIVE_STRIDE], AHEAD_BYTES)


@njit
def _decide(p, layer, thread, start, count, n):
    """Of my part of the neurons: what decides, row by row, and the list of those that are active for any row."""
    wide = layer[LAST_NEURON] - layer[FIRST_NEURON]
    low, high = part(wide // UNIT, thread, p[N_THREADS])
    stride, active = p[ACTIVE_STRIDE], p[ACTIVE]
    has_predictor = layer[FC2] != 0 or layer[SIGNS] != 0
    if layer[SIGNS] != 0:
        for t in range(2 * low, 2 * high):
            for row in range(count):
                signs = p[INPUT_SIGNS] + (start + row) * (p[WIDE] // 8)
                sign_scores(layer[SIGNS] + t * layer[SIGNS_TILE], signs, p[WIDE], p[HIDDEN], active + 64 * t + row * stride)
    else:
        _decide_by_product(p, layer, start, count, n, 2 * low, 2 * high)
    threshold, real = get_f32(layer[THRESHOLD]), layer[REAL_NEURONS] - UNIT * low
    for row in range(count):
        values = active + row * stride + 4 * UNIT * low
        if has_predictor:
            mark_from(values, UNIT * (high - low), max(0, real), threshold)
        else:
            if layer[GATE] == 0 and layer[UP_BIAS] != 0:
                add_rows(values, layer[UP_BIAS] + 4 * UNIT * low, values, UNIT * (high - low))
            gate_from(p[ACTIVATION] & 3, values, UNIT * (high - low), threshold)
    out = p[ACTIVE_LISTS] + thread * 4 * wide
    put_i64(p[ACTIVE_COUNTS] + 64 * thread, list_active(active, stride, count, low, high, out))


@njit
def _listed(p):
    """How many of my neurons are listed."""
    total = 0
    for t in range(p[N_THREADS]):
        total += get_i64(p[ACTIVE_COUNTS] + 64 * t)
    return total


@njit
def _take_rows(p, thread, wide, first, count, w, row_bytes, rows, ids):
    """Addresses of the rows of `count` listed neurons from the first-th of all threads' lists on, filled up to 16."""
    source, before = 0, 0
    for k in range(count):
        while first + k >= before + get_i64(p[ACTIVE_COUNTS] + 64 * source):
            before += get_i64(p[ACTIVE_COUNTS] + 64 * source)
            source += 1
        neuron = get_i32(p[ACTIVE_LISTS] + source * 4 * wide + 4 * (first + k - before))
        put_i64(ids + 8 * k, neuron)
        put_i64(rows + 8 * k, w + neuron * row_bytes)
    for k in range(count, 16):
        put_i64(ids + 8 * k, get_i64(ids + 8 * (count - 1)))
        put_i64(rows + 8 * k, get_i64(rows + 8 * (count - 1)))


@njit
def _gathered(p, format_id, rows, ahead, scratch, int8, floats, n, count, out):
    """Rows of 16 neurons times all rows of the batch: f32 [count][16]."""
    call(p[GATHER_KERNEL], (format_id, rows, ahead, p[WIDE], scratch))
    tile(p[TILE_KERNELS], format_id, scratch, int8, floats, p[WIDE], n, count, out, 64, 0)


@njit
def _products(p, layer, thread, start, count, n):
    """Values of my share of the listed neurons, in the place of what decided."""
    wide, is_gated = layer[LAST_NEURON] - layer[FIRST_NEURON], p[ACTIVATION] & GATED
    low, high = part(_listed(p), thread, p[N_THREADS])
    memory = p[THREAD] + thread * p[THREAD_BYTES]
    gate, up, scratch, rows = memory + p[T_GATE], memory + p[T_UP], memory + p[T_TILE], memory + p[T_ROWS]
    gates, ups, next_gates, next_ups = rows, rows + 128, rows + 256, rows + 384
    ids, next_ids = rows + 512, rows + 640
    int8 = p[N8] + start // n * group_bytes(p[WIDE], n)
    floats = p[NF] + start // n * 4 * n * p[WIDE]
    reads_gate = layer[GATE_ROWS] != 0
    for first in range(low, high, 16):
        here, after = min(16, high - first), min(16, high - first - 16)
        if first == low:
            _take_rows(p, thread, wide, first, here, layer[GATE_ROWS], layer[GATE_ROW_BYTES], gates, ids)
            _take_rows(p, thread, wide, first, here, layer[UP_ROWS], layer[UP_ROW_BYTES], ups, ids)
        if after > 0:
            _take_rows(p, thread, wide, first + 16, after, layer[GATE_ROWS], layer[GATE_ROW_BYTES], next_gates, next_ids)
            _take_rows(p, thread, wide, first + 16, after, layer[UP_ROWS], layer[UP_ROW_BYTES], next_ups, next_ids)
        last_ahead = (next_gates if reads_gate else next_ups) if after > 0 else ups
        if reads_gate:
            _gathered(p, layer[GATE_FORMAT], gates, ups, scratch, int8, floats, n, count, gate)
        _gathered(p, layer[UP_FORMAT], ups, last_ahead, scratch, int8, floats, n, count, up)
        if layer[UP_BIAS] != 0:
            for k in range(16):
                bias = get_f32(layer[UP_BIAS] + 4 * get_i64(ids + 8 * k))
                for row in range(count):
                    at = up + 64 * row + 4 * k
                    put_f32(at, get_f32(at) + bias)
        if reads_gate or not is_gated:
            activate(p[ACTIVATION], gate if reads_gate else up, up, gate, 16 * count)
        for row in range(count):
            for k in range(here):
                at = p[ACTIVE] + row * p[ACTIVE_STRIDE] + 4 * get_i64(ids + 8 * k)
                if get_f32(at) == ZERO:
                    continue
                if reads_gate or not is_gated:
                    put_f32(at, get_f32(gate + 64 * row + 4 * k))
                else:
                    u = get_f32(up + 64 * row + 4 * k)
                    put_f32(at, get_f32(at) * (max(u, ZERO) if p[ACTIVATION] & UP_RELU else u))
        gates, next_gates, ups, next_ups, ids, next_ids = next_gates, gates, next_ups, ups, next_ids, ids


@njit
def _products_of_all(p, layer, thread, start, count, n):
    """What `_products` does, where nearly all neurons are listed: of all of them, sixteen neighbours at a time.

    To the same bits; dearer by the neurons that are not listed, cheaper by 16 values being put in their places at once.
    """
    real, is_gated = layer[REAL_NEURONS], p[ACTIVATION] & GATED
    low, high = part((real + 15) // 16, thread, p[N_THREADS])
    memory = p[THREAD] + thread * p[THREAD_BYTES]
    gate, up, scratch, rows = memory + p[T_GATE], memory + p[T_UP], memory + p[T_TILE], memory + p[T_ROWS]
    ups, ahead = rows, rows + 128
    int8 = p[N8] + start // n * group_bytes(p[WIDE], n)
    floats = p[NF] + start // n * 4 * n * p[WIDE]
    reads_gate = layer[GATE_ROWS] != 0
    for t in range(low, high):
        if reads_gate:
            _neighbour_rows(layer[GATE_ROWS], layer[GATE_ROW_BYTES], t, real, ups)
            _neighbour_rows(layer[UP_ROWS], layer[UP_ROW_BYTES], t, real, ahead)
            _gathered(p, layer[GATE_FORMAT], ups, ahead, scratch, int8, floats, n, count, gate)
        _neighbour_rows(layer[UP_ROWS], layer[UP_ROW_BYTES], t, real, ups)
        _neighbour_rows(layer[GATE_ROWS] if reads_gate else layer[UP_ROWS],
                        layer[GATE_ROW_BYTES] if reads_gate else layer[UP_ROW_BYTES], t + 1, real, ahead)  # fmt: skip
        _gathered(p, layer[UP_FORMAT], ups, ahead, scratch, int8, floats, n, count, up)
        if layer[UP_BIAS] != 0:
            for row in range(count):
                add_rows(up + 64 * row, layer[UP_BIAS] + 64 * t, up + 64 * row, 16)
        if reads_gate or not is_gated:
            activate(p[ACTIVATION], gate if reads_gate else up, up, gate, 16 * count)
        for row in range(count):
            at = p[ACTIVE] + row * p[ACTIVE_STRIDE] + 64 * t
            decided = load_f32(at)
            if reads_gate or not is_gated:
                value = load_f32(gate + 64 * row)
            else:
                u = load_f32(up + 64 * row)
                value = mul(decided, maximum(u, splat(ZERO)) if p[ACTIVATION] & UP_RELU else u)
            store_f32(at, where_active(decided, value))


@njit
def _neighbour_rows(w, row_bytes, t, real, rows):
    """Addresses of the 16 rows of tile t; past the last real neuron, its row again."""
    for k in range(16):
        put_i64(rows + 8 * k, w + min(16 * t + k, real - 1) * row_bytes)


@njit
def _list_units(p, layer, thread, count):
    """Active neurons of my part of the units of 32, made ready for the down product, and counted."""
    wide = layer[LAST_NEURON] - layer[FIRST_NEURON]
    low, high = part(wide // UNIT, thread, p[N_THREADS])
    for unit in range(low, high):
        values, unit_list = p[ACTIVE] + 4 * UNIT * unit, p[UNIT_LISTS] + unit * LIST_BYTES
        out = p[DOWN_VALUES] + unit * count * VALUE_BYTES
        list_unit(values, p[ACTIVE_STRIDE], count, layer[DOWN_OFFSET], unit_list, out)
        if get_i32(unit_list) > 0:
            for row in range(count):
                count_block(values + row * p[ACTIVE_STRIDE], layer[FIRES] + 4 * UNIT * unit, layer[ADDS] + 4 * UNIT * unit)


@njit
def _count(p, layer, count):
    """Count the rows of a list, the list, and its neurons."""
    listed, counts = _listed(p), layer[COUNTS]
    put_i64(counts + COUNTED, get_i64(counts + COUNTED) + count)
    put_i64(counts + LISTS, get_i64(counts + LISTS) + 1)
    put_i64(counts + LISTED, get_i64(counts + LISTED) + listed)


@njit
def _add_to_histogram(p, layer, count):
    """Count what each neuron's activation is, by the upper bits of its magnitude."""
    for row in range(count):
        for k in range(layer[REAL_NEURONS]):
            bits = get_i32(p[ACTIVE] + row * p[ACTIVE_STRIDE] + 4 * k) & 0x7FFFFFFF
            at = layer[HISTOGRAM] + 8 * (bits >> 20)
            put_i64(at, get_i64(at) + 1)


@njit
def _add_scores_to_histogram(p, layer, thread, start, count):
    """Count each neuron's score by signs: neurons that fired in the first half of the bins, the others in the second."""
    scores = p[THREAD] + thread * p[THREAD_BYTES] + p[T_GATE]
    for row in range(count):
        signs = p[INPUT_SIGNS] + (start + row) * (p[WIDE] // 8)
        for k in range(layer[REAL_NEURONS]):
            if k % 16 == 0:
                sign_scores(layer[SIGNS] + k // 16 * layer[SIGNS_TILE], signs, p[WIDE], p[HIDDEN], scores)
            has_fired = get_f32(p[ACTIVE] + row * p[ACTIVE_STRIDE] + 4 * k) != ZERO
            at = layer[HISTOGRAM] + 8 * (score_bin(get_f32(scores + 4 * (k % 16))) + (0 if has_fired else SCORE_BINS))
            put_i64(at, get_i64(at) + 1)


@njit
def _down(p, layer, state, thread, start, count, is_second):
    """My stripe of the outputs, of all active neurons, to my slot."""
    units = (layer[LAST_NEURON] - layer[FIRST_NEURON]) // UNIT
    first, last = part(p[TALL] // 128, thread, p[N_THREADS])
    lines = layer[DOWN_STRIPE_LINES]
    y_stride = 4 * p[TALL]
    for row in range(count):
        for at in range(512 * first, 512 * last, 64):
            store_f32(p[SUM] + row * y_stride + at, splat(ZERO))
    scratch = p[THREAD] + thread * p[THREAD_BYTES] + p[T_DOWN]
    call(layer[DOWN_KERNEL], (layer[DOWN_ROWS], layer[DOWN_UNIT_BYTES], layer[DOWN_ROW_BYTES], layer[DOWN_SCALES_AT],
                              layer[DOWN_MINIMUMS_AT], units, p[UNIT_LISTS], p[DOWN_VALUES], count, lines * first, lines * last, p[SUM],
                              y_stride, scratch))  # fmt: skip
    out = bank(p, state, 1) + p[ME] * p[SLOT_BYTES]
    for row in range(count):
        to, values = out + (start + row) * 4 * p[WIDTH], p[SUM] + row * y_stride
        for at in range(512 * first, min(512 * last, 4 * p[WIDTH]), 64):
            v = load_f32(values + at)
            store_f32(to + at, add(load_f32(to + at), v) if is_second else v)


@njit
def active_to_slot(p, layer, state, thread, n_rows, is_second):
    """My active neurons' part of the FFN; is_second: added to what attention has put there."""
    n = group_of(n_rows)
    for start in range(0, n_rows, SPARSE_BATCH):
        count = min(SPARSE_BATCH, n_rows - start)
        _decide(p, layer, thread, start, count, n)
        code = barrier(p, state)
        if code != OK:
            return code
        if p[HISTOGRAM_BYTES] != 0:  # only while profiling
            if thread == 0 and layer[SIGNS] == 0:
                _add_to_histogram(p, layer, count)
            code = barrier(p, state)
            if code != OK:
                return code
        mark(p, state, thread, PREDICTOR)
        if layer[UP_ROWS] != 0:
            dense_from = DENSE_FROM if layer[GATE_ROWS] == 0 else DENSE_FROM_OF_TWO
            if _listed(p) >= dense_from * layer[REAL_NEURONS]:
                _products_of_all(p, layer, thread, start, count, n)
            else:
                _products(p, layer, thread, start, count, n)
            code = barrier(p, state)
            if code != OK:
                return code
        if p[HISTOGRAM_BYTES] != 0 and layer[SIGNS] != 0:
            if thread == 0:
                _add_scores_to_histogram(p, layer, thread, start, count)
            code = barrier(p, state)
            if code != OK:
                return code
        _list_units(p, layer, thread, count)
        if thread == 0:
            _count(p, layer, count)
        code = barrier(p, state)
        if code != OK:
            return code
        mark(p, state, thread, NEURONS)
        _down(p, layer, state, thread, start, count, is_second)
        code = barrier(p, state)
        if code != OK:
            return code
        mark(p, state, thread, DOWN_PRODUCT)
    return OK
