"""The step program: all layers of a batch, for as many steps as the driver has leased, with no Python between them.

Every thread of every worker runs `run` and finds in two tables (see `fields`) where its shard lies. Inside a worker
threads meet at `barrier`; workers meet at `meet` after attention and after the FFN, having written their partial sums
to their slots.
"""

from __future__ import annotations

from hotneuron.actors import arena as A
from hotneuron.actors.fields import (
    ARENA,
    COMMAND,
    DRAWING,
    DRAWN,
    EMBED,
    EMBEDDING,
    EMBEDDING_FORMAT,
    EMBEDDING_TILE,
    FFN_MASK,
    FLOATS,
    HEAD_PRODUCT,
    HIDDEN,
    HISTORY,
    INT8,
    LAST_BIAS,
    LOGIT_ROWS,
    LOGIT_SEGMENTS,
    LOGIT_STRIDE,
    LOGITS,
    LOGPROBS,
    MAX_SLOTS,
    ME,
    N_LAYERS,
    N_THREADS,
    N_WORKERS,
    OUTPUT,
    OUTPUT_FORMAT,
    OUTPUT_NORM,
    OUTPUT_NORM_BIAS,
    OUTPUT_TILE,
    PLACES,
    PLACES_FORMAT,
    PLACES_TILE,
    POSITIONS,
    ROW_SLOTS,
    SAMPLE_KERNEL,
    SAMPLING,
    SEGMENTS,
    STOP_IDS,
    T_ROW,
    T_SAMPLE,
    THREAD,
    THREAD_BYTES,
    TILE_KERNELS,
    TOKENS,
    TRACE,
    VOCAB,
    VOCAB_TILE,
    VOCAB_TILES,
    WIDE,
    WIDTH,
    X8,
    XF,
    X,
)  # fmt: skip
from hotneuron.actors.layer import run_layer
from hotneuron.actors.meeting import add_partials, barrier, mark, meet, padded_rows, part
from hotneuron.actors.products import norm_row, row_input, tile
from hotneuron.kernels import formats
from hotneuron.kernels.activations import group_of
from hotneuron.kernels.elementwise import add_rows, embed
from hotneuron.kernels.jit import call, njit
from hotneuron.kernels.matmul import AHEAD_BYTES
from hotneuron.kernels.memory import get_i32, get_i64, put_i32, put_i64
from hotneuron.kernels.sampling import OUT_BYTES, SAMPLING_BYTES
from hotneuron.kernels.sync import (
    ABORTED,
    OK,
    load_acquire,
    now_ns,
    pause,
    sleep_on,
    store_release,
    wake_all,
    yield_core,
)
from hotneuron.models.tensor_table import POSITION_OFFSET


@njit
def _embed_rows(p, thread, n_rows, step):
    # NOTE each thread takes the rows that it will norm, for there is no barrier between the two.
    low, high = part(padded_rows(n_rows), thread, p[N_THREADS])
    row_buffer = p[THREAD] + thread * p[THREAD_BYTES] + p[T_ROW]
    for row in range(low, min(high, n_rows)):
        token = get_i32(p[TOKENS] + 4 * row)
        if step > 0:
            token = get_i32(p[DRAWN] + 4 * ((step - 1) * p[MAX_SLOTS] + get_i32(p[ROW_SLOTS] + 4 * row)))
        x = p[X] + row * 4 * p[WIDE]
        embed(p[EMBEDDING_FORMAT], p[EMBEDDING], p[EMBEDDING_TILE], token, p[HIDDEN], x)
        if p[PLACES] != 0:
            place = get_i32(p[POSITIONS] + 4 * row) + step + POSITION_OFFSET
            embed(p[PLACES_FORMAT], p[PLACES], p[PLACES_TILE], place, p[HIDDEN], row_buffer)
            add_rows(x, row_buffer, x, p[WIDTH])


@njit
def _logits(p, state, thread, n_logits):
    """Logits of my vocabulary rows, for the rows of the batch that are to be drawn from or scored."""
    n = group_of(n_logits)
    row_buffer = p[THREAD] + thread * p[THREAD_BYTES] + p[T_ROW]
    kind = INT8 if p[OUTPUT_FORMAT] < formats.HALF else FLOATS
    low, high = part(padded_rows(n_logits), thread, p[N_THREADS])
    for i in range(low, high):
        if i >= n_logits:
            row_input(p, kind, 0, i, n, p[X8], p[XF])
            continue
        row = get_i32(p[LOGIT_ROWS] + 4 * i)
        x = p[X] + row * 4 * p[WIDE]
        add_partials(p, state, row, p[FFN_MASK], p[LAST_BIAS], x)
        norm_row(p, x, p[OUTPUT_NORM], p[OUTPUT_NORM_BIAS], row_buffer)
        row_input(p, kind, row_buffer, i, n, p[X8], p[XF])
    code = barrier(p, state)
    if code != OK:
        return code
    low, high = part(p[VOCAB_TILES], thread, p[N_THREADS])
    for t in range(low, high):
        w = p[OUTPUT] + t * p[OUTPUT_TILE]
        out = p[LOGITS] + 64 * (p[VOCAB_TILE] + t)
        stride = 4 * p[LOGIT_STRIDE]
        tile(p[TILE_KERNELS], p[OUTPUT_FORMAT], w, p[X8], p[XF], p[WIDE], n, n_logits, out, stride, AHEAD_BYTES)
    return meet(p, state, thread)


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
        drawn, logits = p[DRAWN] + 4 * at, p[LOGITS] + i * 4 * p[LOGIT_STRIDE]
        sampling = p[SAMPLING] + slot * SAMPLING_BYTES
        recent, out = history + 4 * (n_history - n_last), p[LOGPROBS] + at * OUT_BYTES
        call(p[SAMPLE_KERNEL], (logits, p[VOCAB], sampling, recent, n_last, position, scratch, out, drawn))
        put_i32(history + 4 * n_history, get_i32(drawn))
    return meet(p, state, thread)


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
        mark(p, state, thread, EMBED)
        for depth in range(p[N_LAYERS]):
            code = run_layer(p, layers[depth], depth, state, thread, n_rows, step)
            if code != OK:
                return code
        if n_logits > 0:
            code = _logits(p, state, thread, n_logits)
            if code != OK:
                return code
            mark(p, state, thread, HEAD_PRODUCT)
            code = _draw(p, state, thread, n_logits, step)
            if code != OK:
                return code
            mark(p, state, thread, DRAWING)
        if thread == 0 and p[ME] == 0:
            store_release(p[ARENA] + A.STEPS_AT, step + 1)
        if _has_ended(p, n_logits, step):
            break
    # Nobody may still look at this command when the driver writes the next.
    return meet(p, state, thread)


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
