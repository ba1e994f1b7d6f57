"""The step program: all layers of a batch, for as many steps as the driver has leased, with no Python between them.

Every thread of every worker runs `run` and finds in two tables where its shard lies: `p` (int64, one a worker, indexed by the
names below) and `layers` (int64 [layer][...]). Inside a worker threads meet at `_barrier`; workers meet at `_meet` after
attention and after the FFN, having written their partial sums to their slots. Every function returns OK or why it left.

NOTE addresses are not checked here. Whatever a file or a request can influence (sizes, token ids, block ids, positions) is
checked by `pack`, `plan`, `scheduler` and `driver` before it reaches these tables.
"""

from __future__ import annotations

import numpy as np

from hotneuron.actors import arena as A
from hotneuron.kernels import formats
from hotneuron.kernels.activations import interleave_block, quantize_32
from hotneuron.kernels.attention import store_kv
from hotneuron.kernels.elementwise import add_rows, embed, norm_head, rms_norm, rotate, silu_times
from hotneuron.kernels.jit import call, njit
from hotneuron.kernels.matmul import AHEAD_BYTES, matmul_tile
from hotneuron.kernels.memory import get_f32, get_i32, get_i64, put_f32, put_i32, put_i64
from hotneuron.kernels.sampling import OUT_BYTES, SAMPLING_BYTES
from hotneuron.kernels.simd import add, load_f32, splat, store_f32
from hotneuron.kernels.sync import (
    ABORTED,
    OK,
    load_acquire,
    now_ns,
    pause,
    sleep_on,
    store_release,
    team_barrier,
    wait_for,
    wake_all,
    yield_core,
)

# `p`: sizes of the engine.
(ARENA, N_WORKERS, ME, N_THREADS, TEAM, DEADLINE_NS, COUNTERS, COMMAND, SEGMENTS, STOP_IDS, TOKENS, POSITIONS, ROW_SLOTS,
 LOGIT_ROWS, LOGIT_SEGMENTS, TABLES, SAMPLING, HISTORY, DRAWN, LOGPROBS, LOGITS, SLOTS, BANK_BYTES, SLOT_BYTES, MAX_SLOTS,
 MAX_BLOCKS, HIDDEN, WIDTH, WIDE, VOCAB, LOGIT_STRIDE, N_LAYERS, HEAD_DIM, HEAD, ROPE_DIMS, ROPE, QUERY_SCALE, EPS, WINDOW,
 GROUP_HEADS, ATTENTION_MASK, FFN_MASK,
 # The shard.
 FIRST_HEAD, LAST_HEAD, FIRST_KV, LAST_KV, Q_TILES, K_TILES, O_COLUMNS, O_SKEW, NEURON_UNITS, VOCAB_TILE, VOCAB_TILES,
 # Weights outside the layers.
 EMBEDDING, EMBEDDING_FORMAT, EMBEDDING_TILE, OUTPUT_NORM, OUTPUT, OUTPUT_FORMAT, OUTPUT_TILE,
 # Memory of the worker.
 X, X8, XF, QKV, QKV_STRIDE, ATTENTION, A8, AF, H8, HF, KV, KV_LAYER_BYTES, KV_BLOCK_BYTES, KV_HEAD_BYTES,
 # Memory of a thread: base and size of its stretch, then offsets in it.
 THREAD, THREAD_BYTES, T_ROW, T_QUERIES, T_POSITIONS, T_HEADS, T_SCORES, SCORES_STRIDE, T_GATE, T_UP, T_SAMPLE,
 # Compiled kernels: int64 addresses [format][group size], [group size], and one.
 TILE_KERNELS, ATTEND_KERNELS, SAMPLE_KERNEL,
 TRACE,
 P_SIZE) = range(90)  # fmt: skip

# `layers`: a matrix is its address, format and bytes from tile to tile.
(ATTN_NORM, FFN_NORM, Q, Q_FORMAT, Q_TILE, K, K_FORMAT, K_TILE, V, V_FORMAT, V_TILE, O, O_FORMAT, O_TILE, GATE, GATE_FORMAT,
 GATE_TILE, UP, UP_FORMAT, UP_TILE, DOWN, DOWN_FORMAT, DOWN_TILE, Q_BIAS, K_BIAS, V_BIAS, Q_NORM, K_NORM, QKV_INPUT, O_INPUT,
 FFN_INPUT, DOWN_INPUT, LAYER_SIZE) = range(33)  # fmt: skip

INT8, FLOATS = 1, 2  # what a phase's input must be made as: bits of QKV_INPUT ...
GROUP_SIZES = 3
SUB_BATCH = 64  # rows that pass through gate and up together, so that their products stay in the first cache
UNIT = 32  # neurons of two tiles


@njit
def _part(count, thread, n_threads):
    return count * thread // n_threads, count * (thread + 1) // n_threads


@njit
def _group(n_rows):
    return 1 if n_rows == 1 else 4 if n_rows <= 4 else 8


@njit
def _size_index(n):
    return 0 if n == 1 else 1 if n == 4 else 2


@njit
def _int8_bytes(columns, n):
    return n * (columns + columns // 32 * 16 + columns // 16 * 4)


@njit
def _barrier(p, state):
    turn = get_i64(state) + 1
    put_i64(state, turn)
    return team_barrier(p[TEAM], p[N_THREADS], turn, p[ARENA] + A.ABORT_AT, p[DEADLINE_NS])


# Phases of a step, as `TRACE` counts their nanoseconds (int64 [phase]; first thread of each worker).
(EMBED, NORM, QKV_PRODUCT, ROTATE, ATTEND, O_PRODUCT, MEETING, NEURONS, DOWN_PRODUCT, HEAD_PRODUCT, DRAWING, N_PHASES) = range(12)
PHASES = ("embed", "norm", "qkv", "rotate", "attention", "output", "exchange", "gate_up", "down", "head", "sample")


@njit
def _mark(p, state, thread, phase):
    """Add the time since the last mark to a phase."""
    if p[TRACE] != 0 and thread == 0:
        t = now_ns()
        at = p[TRACE] + 8 * phase
        put_i64(at, get_i64(at) + t - get_i64(state + 32))
        put_i64(state + 32, t)


@njit
def _meet(p, state, thread):
    """All threads of all workers have arrived, and what each worker wrote to its slot may be read."""
    code = _barrier(p, state)
    if code != OK:
        return code
    number = get_i64(state + 8) + 1
    put_i64(state + 8, number)
    if thread == 0:
        store_release(p[COUNTERS] + A.LINE * p[ME], number)
    for w in range(p[N_WORKERS]):
        if w != p[ME]:
            code = wait_for(p[COUNTERS] + A.LINE * w, number, p[ARENA] + A.ABORT_AT, p[DEADLINE_NS])
            if code != OK:
                return code
    return OK


@njit
def _bank(p, state, ahead):
    """The bank of the last meeting (ahead = 0) or of the next one (1)."""
    return p[SLOTS] + ((get_i64(state + 8) + ahead) & 1) * p[BANK_BYTES]


@njit
def _add_partials(p, state, row, mask, x):
    """x += the sum of the slots of the workers in `mask`, added in the order of the workers."""
    first = _bank(p, state, 0) + row * 4 * p[WIDTH]
    for i in range(0, 4 * p[WIDTH], 64):
        total = splat(np.float32(0))
        for w in range(p[N_WORKERS]):
            if mask >> w & 1:
                total = add(total, load_f32(first + w * p[SLOT_BYTES] + i))
        store_f32(x + i, add(load_f32(x + i), total))


@njit
def _make_input(kind, values, block, columns, n, token, int8, floats):
    """The 32 floats at `values` as columns 32 block .. of a token of a group, in the kinds that the next product needs."""
    if kind & INT8:
        quantize_32(values, int8, columns, n, token, block)
    if kind & FLOATS:
        interleave_block(values, floats, n, token, block)


@njit
def _row_input(p, kind, values, index, n):
    """A row of WIDE floats (zeros past the hidden size) as row `index` of the normed inputs."""
    columns = p[WIDE]
    int8 = p[X8] + index // n * _int8_bytes(columns, n)
    floats = p[XF] + index // n * 4 * n * columns
    for block in range(columns // 32):
        _make_input(kind, values + 128 * block, block, columns, n, index % n, int8, floats)


@njit
def _normed_rows(p, state, thread, n_rows, norm, kind, mask):
    """Rows: add the partial sums of the last meeting, norm, and make the next product's input."""
    n = _group(n_rows)
    low, high = _part(n_rows, thread, p[N_THREADS])
    row_buffer = p[THREAD] + thread * p[THREAD_BYTES] + p[T_ROW]
    for row in range(low, high):
        x = p[X] + row * 4 * p[WIDE]
        if mask != 0:
            _add_partials(p, state, row, mask, x)
        rms_norm(x, norm, row_buffer, p[WIDE], p[HIDDEN], get_f32(p[EPS]))
        _row_input(p, kind, row_buffer, row, n)
    return _barrier(p, state)


@njit
def _embed_rows(p, thread, n_rows, step):
    low, high = _part(n_rows, thread, p[N_THREADS])
    for row in range(low, high):
        token = get_i32(p[TOKENS] + 4 * row)
        if step > 0:
            token = get_i32(p[DRAWN] + 4 * ((step - 1) * p[MAX_SLOTS] + get_i32(p[ROW_SLOTS] + 4 * row)))
        embed(p[EMBEDDING_FORMAT], p[EMBEDDING], p[EMBEDDING_TILE], token, p[HIDDEN], p[X] + row * 4 * p[WIDE])


@njit
def _tile(kernels, format_id, w, int8, floats, columns, n, n_rows, y, y_stride, ahead):
    """One tile times all rows."""
    kernel = get_i64(kernels + 8 * (GROUP_SIZES * format_id + _size_index(n)))
    n_groups = (n_rows + n - 1) // n
    if format_id < formats.HALF:
        matmul_tile(kernel, w, int8, _int8_bytes(columns, n), n, n_groups, columns, y, y_stride, ahead)
    else:
        matmul_tile(kernel, w, floats, 4 * n * columns, n, n_groups, columns, y, y_stride, ahead)


@njit
def _qkv(p, layer, state, thread, n_rows):
    n, columns = _group(n_rows), p[WIDE]
    q_tiles, k_tiles = p[Q_TILES], p[K_TILES]
    low, high = _part(q_tiles + 2 * k_tiles, thread, p[N_THREADS])
    for t in range(low, high):
        if t < q_tiles:
            format_id, w = layer[Q_FORMAT], layer[Q] + t * layer[Q_TILE]
        elif t < q_tiles + k_tiles:
            format_id, w = layer[K_FORMAT], layer[K] + (t - q_tiles) * layer[K_TILE]
        else:
            format_id, w = layer[V_FORMAT], layer[V] + (t - q_tiles - k_tiles) * layer[V_TILE]
        _tile(p[TILE_KERNELS], format_id, w, p[X8], p[XF], columns, n, n_rows, p[QKV] + 64 * t, p[QKV_STRIDE], AHEAD_BYTES)
    return _barrier(p, state)


@njit
def _prepare_head(p, head, bias, norm, angles):
    """Bias, norm and rotation of one head of q or k, in place."""
    if bias != 0:
        add_rows(head, bias, head, p[HEAD])
    if norm != 0:
        norm_head(head, norm, p[HEAD_DIM], get_f32(p[EPS]))
    rotate(head, angles, p[ROPE_DIMS])


@njit
def _rotate_and_store(p, layer, l, state, thread, n_rows, step):
    """Per row: turn the heads of q and k by their position, and write k and v to the KV cache."""
    n_q, n_kv, head_bytes = p[LAST_HEAD] - p[FIRST_HEAD], p[LAST_KV] - p[FIRST_KV], 4 * p[HEAD]
    low, high = _part(n_rows * (n_q + n_kv), thread, p[N_THREADS])
    for item in range(low, high):
        row, h = item // (n_q + n_kv), item % (n_q + n_kv)
        position = get_i32(p[POSITIONS] + 4 * row) + step
        angles = p[ROPE] + position * 4 * p[ROPE_DIMS]
        heads = p[QKV] + row * p[QKV_STRIDE]
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
            at = p[KV] + l * p[KV_LAYER_BYTES] + block * p[KV_BLOCK_BYTES] + kv * p[KV_HEAD_BYTES]
            store_kv(at, position, k, v, p[HEAD])
    return _barrier(p, state)


@njit
def _attend_group(p, l, memory, segment, kv, first, total, n, step):
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
    cache = p[KV] + l * p[KV_LAYER_BYTES] + kv * p[KV_HEAD_BYTES]
    table = p[TABLES] + 4 * slot * p[MAX_BLOCKS]
    attend = get_i64(p[ATTEND_KERNELS] + 8 * _size_index(n))
    call(attend, (count, queries, positions, p[WINDOW], cache, table, p[KV_BLOCK_BYTES], head, memory + p[T_SCORES],
                  p[SCORES_STRIDE], heads))  # fmt: skip
    for k in range(count):
        row, h = first_row + (first + k) // n_heads, low_head + (first + k) % n_heads - p[FIRST_HEAD]
        out = p[ATTENTION] + row * 4 * p[O_COLUMNS] + p[O_SKEW] + h * head_bytes
        for d in range(0, head_bytes, 64):
            store_f32(out + d, load_f32(heads + k * head_bytes + d))


@njit
def _attention(p, l, state, thread, step):
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
            n = _group(total)
            for first in range(0, total, n):
                if item % p[N_THREADS] == thread:
                    _attend_group(p, l, memory, segment, kv, first, total, n, step)
                item += 1
    return _barrier(p, state)


@njit
def _attention_input(p, layer, state, thread, n_rows):
    n, columns = _group(n_rows), p[O_COLUMNS]
    blocks = columns // 32
    low, high = _part(n_rows * blocks, thread, p[N_THREADS])
    for item in range(low, high):
        row, block = item // blocks, item % blocks
        values = p[ATTENTION] + 4 * (row * columns + 32 * block)
        int8 = p[A8] + row // n * _int8_bytes(columns, n)
        floats = p[AF] + row // n * 4 * n * columns
        _make_input(layer[O_INPUT], values, block, columns, n, row % n, int8, floats)
    return _barrier(p, state)


@njit
def _to_slot(p, state, thread, format_id, w, tile_bytes, int8, floats, columns, n_rows):
    """A product whose rows are the hidden size: my partial sum, into my slot of the next meeting."""
    out = _bank(p, state, 1) + p[ME] * p[SLOT_BYTES]
    # A shard is a part of each row's columns: what is wanted next is the same part of the next tile.
    ahead = tile_bytes if p[N_WORKERS] > 1 else AHEAD_BYTES
    low, high = _part((p[WIDTH] + 15) // 16, thread, p[N_THREADS])
    for t in range(low, high):
        _tile(p[TILE_KERNELS], format_id, w + t * tile_bytes, int8, floats, columns, _group(n_rows), n_rows, out + 64 * t, 4 * p[WIDTH], ahead)


@njit
def _neurons(p, layer, state, thread, n_rows):
    """Gate and up rows, activation, and the input of the down product, 32 neurons at a time."""
    n, columns, wide = _group(n_rows), p[WIDE], p[NEURON_UNITS] * UNIT
    memory = p[THREAD] + thread * p[THREAD_BYTES]
    gate, up = memory + p[T_GATE], memory + p[T_UP]
    in8, inf, out8, outf = _int8_bytes(columns, n), 4 * n * columns, _int8_bytes(wide, n), 4 * n * wide
    low, high = _part(p[NEURON_UNITS], thread, p[N_THREADS])
    for unit in range(low, high):
        for start in range(0, n_rows, SUB_BATCH):
            count, group = min(SUB_BATCH, n_rows - start), start // n
            int8, floats = p[X8] + group * in8, p[XF] + group * inf
            for half in range(2):
                t = 2 * unit + half
                _tile(p[TILE_KERNELS], layer[GATE_FORMAT], layer[GATE] + t * layer[GATE_TILE], int8, floats, columns, n, count, gate + 64 * half, 128, AHEAD_BYTES)
                _tile(p[TILE_KERNELS], layer[UP_FORMAT], layer[UP] + t * layer[UP_TILE], int8, floats, columns, n, count, up + 64 * half, 128, AHEAD_BYTES)
            silu_times(gate, up, gate, 32 * count)
            for k in range(count):
                group = (start + k) // n
                _make_input(layer[DOWN_INPUT], gate + 128 * k, unit, wide, n, (start + k) % n, p[H8] + group * out8, p[HF] + group * outf)
    return _barrier(p, state)


@njit
def _layer(p, layer, l, state, thread, n_rows, step):
    code = _normed_rows(p, state, thread, n_rows, layer[ATTN_NORM], layer[QKV_INPUT], p[FFN_MASK] if l > 0 else 0)
    if code != OK:
        return code
    _mark(p, state, thread, NORM)
    if p[LAST_HEAD] > p[FIRST_HEAD]:
        code = _qkv(p, layer, state, thread, n_rows)
        if code != OK:
            return code
        _mark(p, state, thread, QKV_PRODUCT)
        code = _rotate_and_store(p, layer, l, state, thread, n_rows, step)
        if code != OK:
            return code
        _mark(p, state, thread, ROTATE)
        code = _attention(p, l, state, thread, step)
        if code != OK:
            return code
        _mark(p, state, thread, ATTEND)
        code = _attention_input(p, layer, state, thread, n_rows)
        if code != OK:
            return code
        _to_slot(p, state, thread, layer[O_FORMAT], layer[O], layer[O_TILE], p[A8], p[AF], p[O_COLUMNS], n_rows)
        _mark(p, state, thread, O_PRODUCT)
    code = _meet(p, state, thread)
    if code != OK:
        return code
    _mark(p, state, thread, MEETING)
    code = _normed_rows(p, state, thread, n_rows, layer[FFN_NORM], layer[FFN_INPUT], p[ATTENTION_MASK])
    if code != OK:
        return code
    _mark(p, state, thread, NORM)
    if p[NEURON_UNITS] > 0:
        code = _neurons(p, layer, state, thread, n_rows)
        if code != OK:
            return code
        _mark(p, state, thread, NEURONS)
        _to_slot(p, state, thread, layer[DOWN_FORMAT], layer[DOWN], layer[DOWN_TILE], p[H8], p[HF], p[NEURON_UNITS] * UNIT, n_rows)
        _mark(p, state, thread, DOWN_PRODUCT)
    code = _meet(p, state, thread)
    _mark(p, state, thread, MEETING)
    return code


@njit
def _logits(p, state, thread, n_logits):
    """Logits of my vocabulary rows, for the rows of the batch that are to be drawn from or scored."""
    n = _group(n_logits)
    row_buffer = p[THREAD] + thread * p[THREAD_BYTES] + p[T_ROW]
    low, high = _part(n_logits, thread, p[N_THREADS])
    for i in range(low, high):
        row = get_i32(p[LOGIT_ROWS] + 4 * i)
        x = p[X] + row * 4 * p[WIDE]
        _add_partials(p, state, row, p[FFN_MASK], x)
        rms_norm(x, p[OUTPUT_NORM], row_buffer, p[WIDE], p[HIDDEN], get_f32(p[EPS]))
        _row_input(p, INT8 if p[OUTPUT_FORMAT] < formats.HALF else FLOATS, row_buffer, i, n)
    code = _barrier(p, state)
    if code != OK:
        return code
    low, high = _part(p[VOCAB_TILES], thread, p[N_THREADS])
    for t in range(low, high):
        w = p[OUTPUT] + t * p[OUTPUT_TILE]
        out = p[LOGITS] + 64 * (p[VOCAB_TILE] + t)
        _tile(p[TILE_KERNELS], p[OUTPUT_FORMAT], w, p[X8], p[XF], p[WIDE], n, n_logits, out, 4 * p[LOGIT_STRIDE], AHEAD_BYTES)
    return _meet(p, state, thread)


@njit
def _draw(p, state, thread, n_logits, step):
    """Draw the next token of each sampled segment; the segments are dealt to all threads of all workers."""
    for i in range(n_logits):
        s = get_i32(p[LOGIT_SEGMENTS] + 4 * i)
        if s < 0 or i % (p[N_WORKERS] * p[N_THREADS]) != p[ME] * p[N_THREADS] + thread:
            continue
        segment = p[SEGMENTS] + s * 8 * A.SEGMENT_WORDS
        slot = get_i64(segment + A.SEGMENT_SLOT)
        n_history = get_i64(segment + A.SEGMENT_HISTORY) + step
        n_last = min(get_i64(segment + A.SEGMENT_LAST), n_history)
        history = p[HISTORY] + slot * 4 * (A.HISTORY_TOKENS + A.MAX_LEASE)
        position = get_i32(p[POSITIONS] + 4 * get_i32(p[LOGIT_ROWS] + 4 * i)) + step + 1
        at = step * p[MAX_SLOTS] + slot
        scratch = p[THREAD] + thread * p[THREAD_BYTES] + p[T_SAMPLE]
        drawn = p[DRAWN] + 4 * at
        call(p[SAMPLE_KERNEL], (p[LOGITS] + i * 4 * p[LOGIT_STRIDE], p[VOCAB], p[SAMPLING] + slot * SAMPLING_BYTES,
                                history + 4 * (n_history - n_last), n_last, position, scratch, p[LOGPROBS] + at * OUT_BYTES, drawn))  # fmt: skip
        put_i32(history + 4 * n_history, get_i32(drawn))
    return _meet(p, state, thread)


@njit
def _has_ended(p, n_logits, step):
    """A sequence drew a stop id: the lease ends, so that the driver can put another in its place."""
    n_stop = get_i64(p[COMMAND] + A.N_STOP)
    for i in range(n_logits):
        s = get_i32(p[LOGIT_SEGMENTS] + 4 * i)
        if s < 0:
            continue
        segment = p[SEGMENTS] + s * 8 * A.SEGMENT_WORDS
        if get_i64(segment + A.SEGMENT_IGNORE_STOP) != 0:
            continue
        token = get_i32(p[DRAWN] + 4 * (step * p[MAX_SLOTS] + get_i64(segment + A.SEGMENT_SLOT)))
        for k in range(n_stop):
            if get_i32(p[STOP_IDS] + 4 * k) == token:
                return True
    return False


@njit
def _lease(p, layers, state, thread):
    """Run the command's batch for its steps."""
    n_rows, n_logits = get_i64(p[COMMAND] + A.N_ROWS), get_i64(p[COMMAND] + A.N_LOGIT_ROWS)
    for step in range(get_i64(p[COMMAND] + A.LEASE_STEPS)):
        if p[TRACE] != 0:
            put_i64(state + 32, now_ns())
        _embed_rows(p, thread, n_rows, step)
        _mark(p, state, thread, EMBED)
        for l in range(p[N_LAYERS]):
            code = _layer(p, layers[l], l, state, thread, n_rows, step)
            if code != OK:
                return code
        if n_logits > 0:
            code = _logits(p, state, thread, n_logits)
            if code != OK:
                return code
            _mark(p, state, thread, HEAD_PRODUCT)
            code = _draw(p, state, thread, n_logits, step)
            if code != OK:
                return code
            _mark(p, state, thread, DRAWING)
        if thread == 0 and p[ME] == 0:
            store_release(p[ARENA] + A.STEPS_AT, step + 1)
        if _has_ended(p, n_logits, step):
            break
    # Nobody may still look at this command when the driver writes the next.
    return _meet(p, state, thread)


SPINS_FOR_COMMAND = 300
YIELD_NS = 1_000_000
SLEEP_NS = 200_000_000


@njit
def _await_command(p, seen, state):
    """The number of the next command: spin, then yield, then sleep. -1 if the abort word is set."""
    at, abort = p[ARENA] + A.COMMAND_AT, p[ARENA] + A.ABORT_AT
    for _ in range(SPINS_FOR_COMMAND):
        number = load_acquire(at)
        if number != seen:
            return number
        pause()
    start = now_ns()
    put_i64(state + 16, 0)
    put_i64(state + 24, SLEEP_NS)
    while True:
        number = load_acquire(at)
        if number != seen:
            return number
        if load_acquire(abort) != 0:
            return -1
        if now_ns() - start < YIELD_NS:
            yield_core()
        else:
            sleep_on(at, seen & 0xFFFFFFFF, state + 16)


@njit
def run(p, layers, thread, state):
    """One thread's life: take commands until EXIT (returns OK) or until somebody aborts (returns why).

    state: the thread's own 64 bytes, zeroed: barriers passed, meetings passed, a timespec, last mark.
    """
    seen = 0
    while True:
        seen = _await_command(p, seen, state)
        if seen < 0:
            return ABORTED
        if get_i64(p[COMMAND] + A.KIND) == A.EXIT:
            return OK
        code = _lease(p, layers, state, thread)
        if code != OK:
            return code
        if thread == 0 and p[ME] == 0:
            store_release(p[ARENA] + A.DONE_AT, seen)
            wake_all(p[ARENA] + A.DONE_AT)
