"""Attention in one layer of the step program, from the normed rows to a partial sum in my slot.

Addresses are not checked: see `products`.
"""

from __future__ import annotations

from hotneuron.actors import arena as A
from hotneuron.actors.fields import (
    A8,
    AF,
    ATTEND,
    ATTEND_KERNELS,
    ATTENTION,
    COMMAND,
    EPS,
    FIRST_HEAD,
    FIRST_KV,
    GROUP_HEADS,
    HEAD,
    HEAD_DIM,
    K_BIAS,
    K_FORMAT,
    K_NORM,
    K_TILE,
    K_TILES,
    KV,
    KV_BLOCK_BYTES,
    KV_HEAD_BYTES,
    KV_LAYER_BYTES,
    LAST_HEAD,
    LAST_KV,
    MAX_BLOCKS,
    N_THREADS,
    O_COLUMNS,
    O_FORMAT,
    O_INPUT,
    O_PRODUCT,
    O_SKEW,
    O_TILE,
    POSITIONS,
    Q_BIAS,
    Q_FORMAT,
    Q_NORM,
    Q_TILE,
    Q_TILES,
    QKV,
    QKV_PRODUCT,
    QKV_STRIDE,
    QUERY_SCALE,
    ROPE,
    ROPE_DIMS,
    ROTATE,
    ROW_SLOTS,
    SCORES_STRIDE,
    SEGMENTS,
    T_HEADS,
    T_POSITIONS,
    T_QUERIES,
    T_SCORES,
    TABLES,
    THREAD,
    THREAD_BYTES,
    TILE_KERNELS,
    V_BIAS,
    V_FORMAT,
    V_TILE,
    WIDE,
    WINDOW,
    X8,
    XF,
    K,
    O,
    Q,
    V,
)  # fmt: skip
from hotneuron.actors.meeting import barrier, mark, padded_rows, part, query_group
from hotneuron.actors.products import make_input, tile, to_slot
from hotneuron.kernels.activations import group_bytes, group_of
from hotneuron.kernels.attention import store_kv
from hotneuron.kernels.elementwise import add_rows, norm_head, rotate
from hotneuron.kernels.jit import call, njit
from hotneuron.kernels.matmul import AHEAD_BYTES
from hotneuron.kernels.memory import get_f32, get_i32, get_i64, put_f32, put_i32
from hotneuron.kernels.simd import load_f32, prefetch, store_f32
from hotneuron.kernels.sync import OK


@njit
def _qkv(p, layer, state, thread, n_rows):
    n, columns = group_of(n_rows), p[WIDE]
    q_tiles, k_tiles = p[Q_TILES], p[K_TILES]
    low, high = part(q_tiles + 2 * k_tiles, thread, p[N_THREADS])
    for t in range(low, high):
        if t < q_tiles:
            format_id, w = layer[Q_FORMAT], layer[Q] + t * layer[Q_TILE]
        elif t < q_tiles + k_tiles:
            format_id, w = layer[K_FORMAT], layer[K] + (t - q_tiles) * layer[K_TILE]
        else:
            format_id, w = layer[V_FORMAT], layer[V] + (t - q_tiles - k_tiles) * layer[V_TILE]
        y = p[QKV] + 64 * t
        tile(p[TILE_KERNELS], format_id, w, p[X8], p[XF], columns, n, n_rows, y, p[QKV_STRIDE], AHEAD_BYTES)
    return barrier(p, state)


@njit
def _prepare_head(p, head, bias, norm, angles):
    """Bias, norm and rotation of one head of q or k, in place."""
    if bias != 0:
        add_rows(head, bias, head, p[HEAD])
    if norm != 0:
        norm_head(head, norm, p[HEAD_DIM], get_f32(p[EPS]))
    rotate(head, angles, p[ROPE_DIMS])


@njit
def _prefetch_keys(p, depth, row, position):
    """Ask for the lines that a row's keys will be written to: one of each block's positions lies on every line."""
    block = get_i32(p[TABLES] + 4 * (get_i32(p[ROW_SLOTS] + 4 * row) * p[MAX_BLOCKS] + position // 16))
    at = p[KV] + depth * p[KV_LAYER_BYTES] + block * p[KV_BLOCK_BYTES]
    for kv in range(p[LAST_KV] - p[FIRST_KV]):
        for offset in range(0, 32 * p[HEAD], 64):
            prefetch(at + kv * p[KV_HEAD_BYTES] + offset)


@njit
def _rotate_and_store(p, layer, depth, state, thread, n_rows, step):
    """Per row: turn the heads of q and k by their position, and write k and v to the KV cache."""
    n_q, n_kv, head_bytes = p[LAST_HEAD] - p[FIRST_HEAD], p[LAST_KV] - p[FIRST_KV], 4 * p[HEAD]
    low, high = part(n_rows * (n_q + n_kv), thread, p[N_THREADS])
    for item in range(low, high):
        row, h = item // (n_q + n_kv), item % (n_q + n_kv)
        position = get_i32(p[POSITIONS] + 4 * row) + step
        angles = p[ROPE] + position * 4 * p[ROPE_DIMS]
        heads = p[QKV] + row * p[QKV_STRIDE]
        if h == 0:
            _prefetch_keys(p, depth, row, position)
        if h < n_q:
            bias = layer[Q_BIAS] + (p[FIRST_HEAD] + h) * head_bytes if layer[Q_BIAS] != 0 else 0
            _prepare_head(p, heads + h * head_bytes, bias, layer[Q_NORM], angles)
        else:
            kv = h - n_q
            k = heads + (n_q + kv) * head_bytes
            v = k + n_kv * head_bytes
            offset = (p[FIRST_KV] + kv) * head_bytes
            _prepare_head(p, k, layer[K_BIAS] + offset if layer[K_BIAS] != 0 else 0, layer[K_NORM], angles)
            if layer[V_BIAS] != 0:
                add_rows(v, layer[V_BIAS] + offset, v, p[HEAD])
            slot = get_i32(p[ROW_SLOTS] + 4 * row)
            block = get_i32(p[TABLES] + 4 * (slot * p[MAX_BLOCKS] + position // 16))
            at = p[KV] + depth * p[KV_LAYER_BYTES] + block * p[KV_BLOCK_BYTES] + kv * p[KV_HEAD_BYTES]
            store_kv(at, position, k, v, p[HEAD])
    return barrier(p, state)


@njit
def _attend_group(p, depth, memory, segment, kv, first, total, n, step):
    """Queries first..first+n-1 of one segment and KV head (ordered by row, then head): gather, attend, scatter."""
    head, head_bytes = p[HEAD], 4 * p[HEAD]
    low_head = max(p[FIRST_HEAD], (p[FIRST_KV] + kv) * p[GROUP_HEADS])
    high_head = min(p[LAST_HEAD], (p[FIRST_KV] + kv + 1) * p[GROUP_HEADS])
    n_heads = high_head - low_head
    first_row, slot = get_i64(segment + A.SEGMENT_ROW), get_i64(segment + A.SEGMENT_SLOT)
    queries, positions, heads = memory + p[T_QUERIES], memory + p[T_POSITIONS], memory + p[T_HEADS]
    count = min(n, total - first)
    scale = get_f32(p[QUERY_SCALE])
    for k in range(n):
        index = first + min(k, count - 1)
        row, h = first_row + index // n_heads, low_head + index % n_heads - p[FIRST_HEAD]
        put_i32(positions + 4 * k, get_i32(p[POSITIONS] + 4 * row) + step)
        q = p[QKV] + row * p[QKV_STRIDE] + h * head_bytes
        for d in range(head):
            put_f32(queries + 4 * (d * n + k), get_f32(q + 4 * d) * scale)
    cache = p[KV] + depth * p[KV_LAYER_BYTES] + kv * p[KV_HEAD_BYTES]
    table = p[TABLES] + 4 * slot * p[MAX_BLOCKS]
    attend = get_i64(p[ATTEND_KERNELS] + 8 * query_group(n)[1])
    call(attend, (count, queries, positions, p[WINDOW], cache, table, p[KV_BLOCK_BYTES], head, memory + p[T_SCORES],
                  p[SCORES_STRIDE], heads))  # fmt: skip
    for k in range(count):
        row, h = first_row + (first + k) // n_heads, low_head + (first + k) % n_heads - p[FIRST_HEAD]
        out = p[ATTENTION] + row * 4 * p[O_COLUMNS] + p[O_SKEW] + h * head_bytes
        for d in range(0, head_bytes, 64):
            store_f32(out + d, load_f32(heads + k * head_bytes + d))


@njit
def _attention(p, depth, state, thread, step):
    """Attention of my heads: the groups of all segments and KV heads are dealt to the threads in turn."""
    memory = p[THREAD] + thread * p[THREAD_BYTES]
    item = 0
    for s in range(get_i64(p[COMMAND] + A.N_SEGMENTS)):
        segment = p[SEGMENTS] + s * 8 * A.SEGMENT_WORDS
        n_rows = get_i64(segment + A.SEGMENT_COUNT)
        for kv in range(p[LAST_KV] - p[FIRST_KV]):
            low_head = max(p[FIRST_HEAD], (p[FIRST_KV] + kv) * p[GROUP_HEADS])
            high_head = min(p[LAST_HEAD], (p[FIRST_KV] + kv + 1) * p[GROUP_HEADS])
            total = n_rows * (high_head - low_head)
            n = query_group(total)[0]
            for first in range(0, total, n):
                if item % p[N_THREADS] == thread:
                    _attend_group(p, depth, memory, segment, kv, first, total, n, step)
                item += 1
    return barrier(p, state)


@njit
def _attention_input(p, layer, state, thread, n_rows):
    n, columns = group_of(n_rows), p[O_COLUMNS]
    blocks = columns // 32
    low, high = part(padded_rows(n_rows) * blocks, thread, p[N_THREADS])
    for item in range(low, high):
        row, block = item // blocks, item % blocks
        values = p[ATTENTION] + 4 * (row * columns + 32 * block) if row < n_rows else 0
        int8 = p[A8] + row // n * group_bytes(columns, n)
        floats = p[AF] + row // n * 4 * n * columns
        make_input(layer[O_INPUT], values, block, columns, n, row % n, int8, floats)
    return barrier(p, state)


@njit
def attend_to_slot(p, layer, depth, state, thread, n_rows, step):
    """My heads' part of the output projection."""
    code = _qkv(p, layer, state, thread, n_rows)
    if code != OK:
        return code
    mark(p, state, thread, QKV_PRODUCT)
    code = _rotate_and_store(p, layer, depth, state, thread, n_rows, step)
    if code != OK:
        return code
    mark(p, state, thread, ROTATE)
    code = _attention(p, depth, state, thread, step)
    if code != OK:
        return code
    mark(p, state, thread, ATTEND)
    code = _attention_input(p, layer, state, thread, n_rows)
    if code != OK:
        return code
    w, columns = layer[O], p[O_COLUMNS]
    to_slot(p, state, thread, layer[O_FORMAT], w, layer[O_TILE], p[A8], p[AF], columns, n_rows, False)
    mark(p, state, thread, O_PRODUCT)
    return OK
