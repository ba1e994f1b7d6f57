"""Where threads and workers meet in the step program, and what they find there.

A thread's `state` is 64 bytes of its own: barriers passed, meetings passed, a timespec, its last mark.
"""

from __future__ import annotations

import numpy as np

from hotneuron.actors import arena as A
from hotneuron.actors.fields import (
    ARENA,
    BANK_BYTES,
    COUNTERS,
    DEADLINE_NS,
    ME,
    N_THREADS,
    N_WORKERS,
    SLOT_BYTES,
    SLOTS,
    TEAM,
    TRACE,
    WIDTH,
)  # fmt: skip
from hotneuron.kernels.activations import group_of
from hotneuron.kernels.elementwise import add_rows
from hotneuron.kernels.jit import njit
from hotneuron.kernels.memory import get_i64, put_i64
from hotneuron.kernels.simd import add, load_f32, splat, store_f32
from hotneuron.kernels.sync import OK, now_ns, store_release, team_barrier, wait_for


@njit
def barrier(p, state):
    turn = get_i64(state) + 1
    put_i64(state, turn)
    return team_barrier(p[TEAM], p[N_THREADS], turn, p[ARENA] + A.ABORT_AT, p[DEADLINE_NS])


@njit
def meet(p, state, thread):
    """All threads of all workers have arrived, and what each worker wrote to its slot may be read."""
    code = barrier(p, state)
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
def bank(p, state, ahead):
    """The bank of the last meeting (ahead = 0) or of the next one (1)."""
    return p[SLOTS] + ((get_i64(state + 8) + ahead) & 1) * p[BANK_BYTES]


@njit
def add_partials(p, state, row, mask, bias, x):
    """x += the sum of the slots of the workers in `mask`, added in the order of the workers, then the product's bias.

    bias: its address, or 0. Every worker keeps rows of its own and adds it once, whoever has computed the sum.
    """
    first = bank(p, state, 0) + row * 4 * p[WIDTH]
    if mask == 3:  # two workers, the common case, without a look at the mask in every vector
        second = first + p[SLOT_BYTES]
        for i in range(0, 4 * p[WIDTH], 64):
            store_f32(x + i, add(load_f32(x + i), add(load_f32(first + i), load_f32(second + i))))
    else:
        for i in range(0, 4 * p[WIDTH], 64):
            total = splat(np.float32(0))
            for w in range(p[N_WORKERS]):
                if mask >> w & 1:
                    total = add(total, load_f32(first + w * p[SLOT_BYTES] + i))
            store_f32(x + i, add(load_f32(x + i), total))
    if bias != 0:
        add_rows(x, bias, x, p[WIDTH])


@njit
def part(count, thread, n_threads):
    return count * thread // n_threads, count * (thread + 1) // n_threads


@njit
def size_index(n):
    return 0 if n == 1 else 1 if n == 4 else 2


@njit
def padded_rows(n_rows):
    """Rows up to the end of the last group; those past n_rows are blank."""
    n = group_of(n_rows)
    return (n_rows + n - 1) // n * n


@njit
def query_group(n_queries):
    """Queries that pass through attention together, and which of `attention.GROUP_SIZES` that is."""
    return (n_queries, n_queries - 1) if n_queries <= 4 else (8, 4)


@njit
def mark(p, state, thread, phase):
    """Add the time since the last mark to a phase."""
    if p[TRACE] != 0 and thread == 0:
        t = now_ns()
        at = p[TRACE] + 8 * phase
        put_i64(at, get_i64(at) + t - get_i64(state + 32))
        put_i64(state + 32, t)
