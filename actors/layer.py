"""One layer of the step program, phase by phase; every function returns OK or why it left.

NOTE addresses are not checked here. Whatever a file or a request can influence (sizes, token ids, block ids,
positions) is checked by `pack`, `plan`, `scheduler` and `driver` before it reaches the tables.
"""

from __future__ import annotations

from hotneuron.actors import arena as A
from hotneuron.actors.fields import (
    A8,
    AF,
    ATTEND,
    ATTEND_KERNELS,
    ATTENTION,
    ATTENTION_MASK,
    ATTN_NORM,
    COMMAND,
    DOWN,
    DOWN_FORMAT,
    DOWN_INPUT,
    DOWN_PRODUCT,
    DOWN_TILE,
    EPS,
    FFN_INPUT,
    FFN_NORM,
    FIRST_HEAD,
    FIRST_KV,
    FIRST_NEURON,
    FLOATS,
    GATE,
    GATE_FORMAT,
    GATE_TILE,
    GROUP_HEADS,
    GROUP_SIZES,
    H8,
    HEAD,
    HEAD_DIM,
    HF,
    HIDDEN,
    INT8,
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
    LAST_NEURON,
    MASK_BEFORE,
    MAX_BLOCKS,
    ME,
    MEETING,
    N_THREADS,
    N_WORKERS,
    NEURONS,
    NORM,
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
    QKV_INPUT,
    QKV_PRODUCT,
    QKV_STRIDE,
    QUERY_SCALE,
    ROPE,
    ROPE_DIMS,
    ROTATE,
    ROW_SLOTS,
    SCORES_STRIDE,
    SEGMENTS,
    SLOT_BYTES,
    SUB_BATCH,
    T_GATE,
    T_HEADS,
    T_POSITIONS,
    T_QUERIES,
    T_ROW,
    T_SCORES,
    T_UP,
    TABLES,
    THREAD,
    THREAD_BYTES,
    TILE_KERNELS,
    UNIT,
    UP,
    UP_FORMAT,
    UP_TILE,
    V_BIAS,
    V_FORMAT,
    V_TILE,
    WIDE,
    WIDTH,
    WINDOW,
    X8,
    XF,
    K,
    O,
    Q,
    V,
    X,
)  # fmt: skip
from hotneuron.actors.meeting import (
    add_partials,
    bank,
    barrier,
    mark,
    meet,
    padded_rows,
    part,
    query_group,
    size_index,
)
from hotneuron.kernels import formats
from hotneuron.kernels.activations import (
    blank_32,
    clear_block,
    group_bytes,
    group_of,
    interleave_block,
    quantize_32,
)
from hotneuron.kernels.attention import store_kv
from hotneuron.kernels.elementwise import add_rows, norm_head, rms_norm, rotate, silu_times
from hotneuron.kernels.jit import call, njit
from hotneuron.kernels.matmul import AHEAD_BYTES, matmul_tile
from hotneuron.kernels.memory import get_f32, get_i32, get_i64, put_f32, put_i32
from hotneuron.kernels.simd import load_f32, prefetch, store_f32
from hotneuron.kernels.sync import OK


@njit
def _make_input(kind, values, block, columns, n, token, int8, floats):
    """32 floats as columns 32 block .. of a token of a group, in the kinds that the next product needs.

    values: their address; 0 is a token that is not there, past the rows of the batch.
    """
    if kind & INT8:
        if values != 0:
            quantize_32(values, int8, columns, n, token, block)
        else:
            blank_32(int8, columns, n, token, block)
    if kind & FLOATS:
        if values != 0:
            interleave_block(values, floats, n, token, block)
        else:
            clear_block(floats, n, token, block)


@njit
def row_input(p, kind, values, index, n):
    """A row of WIDE floats (zeros past the hidden size) as row `index` of the normed inputs; 0 is a row not there."""
    columns = p[WIDE]
    int8 = p[X8] + index // n * group_bytes(columns, n)
    floats = p[XF] + index // n * 4 * n * columns
    for block in range(columns // 32):
        at = values + 128 * block if values != 0 else 0
        _make_input(kind, at, block, columns, n, index % n, int8, floats)


@njit
def normed_rows(p, state, thread, n_rows, norm, kind, mask):
    """Rows: add the partial sums of the last meeting, norm, and make the next product's input."""
    n = group_of(n_rows)
    low, high = part(padded_rows(n_rows), thread, p[N_THREADS])
    row_buffer = p[THREAD] + thread * p[THREAD_BYTES] + p[T_ROW]
    for row in range(low, high):
        if row >= n_rows:
            row_input(p, kind, 0, row, n)
            continue
        x = p[X] + row * 4 * p[WIDE]
        if mask != 0:
            add_partials(p, state, row, mask, x)
        rms_norm(x, norm, row_buffer, p[WIDE], p[HIDDEN], get_f32(p[EPS]))
        row_input(p, kind, row_buffer, row, n)
    return barrier(p, state)


@njit
def tile(kernels, format_id, w, int8, floats, columns, n, n_rows, y, y_stride, ahead):
    """One tile times all rows."""
    kernel = get_i64(kernels + 8 * (GROUP_SIZES * format_id + size_index(n)))
    n_groups = (n_rows + n - 1) // n
    if format_id < formats.HALF:
        matmul_tile(kernel, w, int8, group_bytes(columns, n), n, n_groups, columns, y, y_stride, ahead)
    else:
        matmul_tile(kernel, w, floats, 4 * n * columns, n, n_groups, columns, y, y_stride, ahead)


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
        _make_input(layer[O_INPUT], values, block, columns, n, row % n, int8, floats)
    return barrier(p, state)


@njit
def _to_slot(p, state, thread, format_id, w, tile_bytes, int8, floats, columns, n_rows):
    """A product whose rows are the hidden size: my partial sum, into my slot of the next meeting."""
    n, out = group_of(n_rows), bank(p, state, 1) + p[ME] * p[SLOT_BYTES]
    # A shard is a part of each row's columns: what is wanted next is the same part of the next tile.
    ahead = tile_bytes if p[N_WORKERS] > 1 else AHEAD_BYTES
    low, high = part((p[WIDTH] + 15) // 16, thread, p[N_THREADS])
    for t in range(low, high):
        at, y = w + t * tile_bytes, out + 64 * t
        tile(p[TILE_KERNELS], format_id, at, int8, floats, columns, n, n_rows, y, 4 * p[WIDTH], ahead)


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
            int8, floats = p[X8] + first * in8, p[XF] + first * inf
            for half in range(2):
                w = layer[GATE] + (2 * unit + half) * layer[GATE_TILE]
                y = gate + 64 * half
                tile(tiles, layer[GATE_FORMAT], w, int8, floats, columns, n, count, y, 4 * UNIT, AHEAD_BYTES)
                w = layer[UP] + (2 * unit + half) * layer[UP_TILE]
                y = up + 64 * half
                tile(tiles, layer[UP_FORMAT], w, int8, floats, columns, n, count, y, 4 * UNIT, AHEAD_BYTES)
            silu_times(gate, up, gate, UNIT * count)
            for k in range(padded_rows(n_rows) - start if start + count == n_rows else count):
                values = gate + 4 * UNIT * k if k < count else 0
                to8, tof = p[H8] + (start + k) // n * out8, p[HF] + (start + k) // n * outf
                _make_input(layer[DOWN_INPUT], values, unit, wide, n, (start + k) % n, to8, tof)
    return barrier(p, state)


@njit
def run_layer(p, layer, depth, state, thread, n_rows, step):
    code = normed_rows(p, state, thread, n_rows, layer[ATTN_NORM], layer[QKV_INPUT], layer[MASK_BEFORE])
    if code != OK:
        return code
    mark(p, state, thread, NORM)
    if p[LAST_HEAD] > p[FIRST_HEAD]:
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
        _to_slot(p, state, thread, layer[O_FORMAT], layer[O], layer[O_TILE], p[A8], p[AF], p[O_COLUMNS], n_rows)
        mark(p, state, thread, O_PRODUCT)
    code = meet(p, state, thread)
    if code != OK:
        return code
    mark(p, state, thread, MEETING)
    code = normed_rows(p, state, thread, n_rows, layer[FFN_NORM], layer[FFN_INPUT], p[ATTENTION_MASK])
    if code != OK:
        return code
    mark(p, state, thread, NORM)
    wide = layer[LAST_NEURON] - layer[FIRST_NEURON]
    if wide > 0:
        code = _neurons(p, layer, state, thread, n_rows)
        if code != OK:
            return code
        mark(p, state, thread, NEURONS)
        _to_slot(p, state, thread, layer[DOWN_FORMAT], layer[DOWN], layer[DOWN_TILE], p[H8], p[HF], wide, n_rows)
        mark(p, state, thread, DOWN_PRODUCT)
    code = meet(p, state, thread)
    mark(p, state, thread, MEETING)
    return code
