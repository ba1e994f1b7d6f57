"""The FFN in one layer of the step program, all neurons of my shard, from the normed rows to my slot."""

from __future__ import annotations

from hotneuron.actors.fields import (
    ACTIVATION,
    DOWN,
    DOWN_FORMAT,
    DOWN_INPUT,
    DOWN_PRODUCT,
    DOWN_TILE,
    FIRST_NEURON,
    GATE,
    GATE_FORMAT,
    GATE_TILE,
    H8,
    HF,
    LAST_NEURON,
    N8,
    N_THREADS,
    NEURONS,
    NF,
    SUB_BATCH,
    T_GATE,
    T_UP,
    THREAD,
    THREAD_BYTES,
    TILE_KERNELS,
    UNIT,
    UP,
    UP_BIAS,
    UP_FORMAT,
    UP_TILE,
    WIDE,
)  # fmt: skip
from hotneuron.actors.meeting import barrier, mark, padded_rows, part
from hotneuron.actors.products import make_input, tile, to_slot
from hotneuron.kernels.activate import activate
from hotneuron.kernels.activations import group_bytes, group_of
from hotneuron.kernels.elementwise import add_rows
from hotneuron.kernels.jit import njit
from hotneuron.kernels.matmul import AHEAD_BYTES
from hotneuron.kernels.sync import OK


@njit
def _neurons(p, layer, state, thread, n_rows):
    """Gate and up rows, activation, and the input of the down product, 32 neurons at a time."""
    n, columns, wide = group_of(n_rows), p[WIDE], layer[LAST_NEURON] - layer[FIRST_NEURON]
    memory, tiles = p[THREAD] + thread * p[THREAD_BYTES], p[TILE_KERNELS]
    gate, up = memory + p[T_GATE], memory + p[T_UP]
    in8, inf, out8, outf = group_bytes(columns, n), 4 * n * columns, group_bytes(wide, n), 4 * n * wide
    low, high = part(wide // UNIT, thread, p[N_THREADS])
    for unit in range(low, high):
        for start in range(0, n_rows, SUB_BATCH):
            count, first = min(SUB_BATCH, n_rows - start), start // n
            int8, floats = p[N8] + first * in8, p[NF] + first * inf
            for half in range(2):
                if layer[GATE] != 0:
                    w = layer[GATE] + (2 * unit + half) * layer[GATE_TILE]
                    y = gate + 64 * half
                    tile(tiles, layer[GATE_FORMAT], w, int8, floats, columns, n, count, y, 4 * UNIT, AHEAD_BYTES)
                w = layer[UP] + (2 * unit + half) * layer[UP_TILE]
                y = up + 64 * half
                tile(tiles, layer[UP_FORMAT], w, int8, floats, columns, n, count, y, 4 * UNIT, AHEAD_BYTES)
            if layer[UP_BIAS] != 0:
                for k in range(count):
                    add_rows(up + 4 * UNIT * k, layer[UP_BIAS] + 4 * UNIT * unit, up + 4 * UNIT * k, UNIT)
            activate(p[ACTIVATION], gate if layer[GATE] != 0 else up, up, gate, UNIT * count)
            for k in range(padded_rows(n_rows) - start if start + count == n_rows else count):
                values = gate + 4 * UNIT * k if k < count else 0
                to8, tof = p[H8] + (start + k) // n * out8, p[HF] + (start + k) // n * outf
                make_input(layer[DOWN_INPUT], values, unit, wide, n, (start + k) % n, to8, tof)
    return barrier(p, state)


@njit
def neurons_to_slot(p, layer, state, thread, n_rows, is_second):
    """My neurons' part of the FFN; is_second: added to what attention has put there."""
    code = _neurons(p, layer, state, thread, n_rows)
    if code != OK:
        return code
    mark(p, state, thread, NEURONS)
    w, columns = layer[DOWN], layer[LAST_NEURON] - layer[FIRST_NEURON]
    to_slot(p, state, thread, layer[DOWN_FORMAT], w, layer[DOWN_TILE], p[H8], p[HF], columns, n_rows, is_second)
    mark(p, state, thread, DOWN_PRODUCT)
    return OK
