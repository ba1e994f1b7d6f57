"""Which neurons are active: marks from a predictor's logits or from the gate, lists of neurons, and counters of what fired.

Values of a batch lie as f32 [tokens][neurons]; 0 is an inactive neuron. Neurons come in blocks of 32.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from hotneuron.kernels.activate import activate
from hotneuron.kernels.jit import njit
from hotneuron.kernels.llvm import F32, INT32, VF, VI, call_intrinsic, constant, load_at, op, store_at
from hotneuron.kernels.memory import put_i32
from hotneuron.kernels.quads import nonzero_32
from hotneuron.kernels.simd import absolute, add, load_f32, splat, store_f32, zero_below

from numba import types  # isort: skip

_AT = types.int64


@op(F32(F32, F32))
def one_from(b, x, limit):
    """1 in the lanes where x >= limit, 0 in the others (also where x is not a number)."""
    return b.select(b.fcmp_ordered(">=", x, limit), constant(VF, 1.0), ir.Constant(VF, None))


@op(types.void(_AT, _AT))
def count_nonzero(b, values, counts):
    """Add 1 to each of 16 int32 whose float is not 0."""
    differs = b.fcmp_unordered("!=", load_at(b, values, VF), ir.Constant(VF, None))
    store_at(b, counts, b.sub(load_at(b, counts, VI), b.sext(differs, ir.VectorType(INT32, 16))))


@op(F32(F32, F32))
def where_active(b, decided, values):
    """`values` in the lanes where `decided` is not 0, and 0 in the others."""
    differs = b.fcmp_unordered("!=", decided, ir.Constant(VF, None))
    return b.select(differs, values, ir.Constant(VF, None))


@op(types.int32(types.uint32))
def lowest_bit(b, bits):
    """The number of the lowest bit that is set."""
    return call_intrinsic(b, "llvm.cttz.i32", INT32, bits, ir.IntType(1)(0))


@njit
def mark_from(values, width, real, threshold):
    """Floats to marks: 1 for those of at least the threshold, 0 for the others and for all from `real` on."""
    limit = splat(threshold)
    for i in range(0, 4 * width, 64):
        store_f32(values + i, one_from(load_f32(values + i), limit))
    for i in range(real, width):
        put_i32(values + 4 * i, 0)


@njit
def gate_from(kind, values, width, threshold):
    """The first product to its activation in place; those below the threshold in magnitude become 0."""
    activate(kind, values, values, values, width)
    if threshold > np.float32(0):
        limit = splat(threshold)
        for i in range(0, 4 * width, 64):
            v = load_f32(values + i)
            store_f32(values + i, zero_below(absolute(v), limit, v))


@njit
def list_active(values, stride, n_tokens, first, last, out):
    """Append to int32 `out` the neurons of blocks first..last-1 that any token has a value for; returns how many."""
    count = 0
    for block in range(first, last):
        union = np.uint32(0)
        for t in range(n_tokens):
            union |= np.uint32(nonzero_32(values + t * stride + 128 * block))
        while union != 0:
            put_i32(out + 4 * count, 32 * block + lowest_bit(union))
            count += 1
            union &= union - np.uint32(1)
    return count


@njit
def count_block(values, fires, adds):
    """Count a token's 32 neurons: fires int32 [32] += 1, adds f32 [32] += |value|, for those that are active."""
    for i in range(0, 128, 64):
        count_nonzero(values + i, fires + i)
        store_f32(adds + i, add(load_f32(adds + i), absolute(load_f32(values + i))))
