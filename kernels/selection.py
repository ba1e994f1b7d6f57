"""Passes over a row of logits: the largest, the k largest, all above a bound, and sums of exponentials.

A `row` is the address of n floats and `tail` of 64 bytes that hold the floats after the last whole vector, padded with
minus infinity (`copy_tail`). NaN counts as minus infinity, plus infinity as the largest float, everywhere.

Candidates are int64 keys: the float's bits in an order that integers share, then the id inverted. So a larger key is a
larger logit and, among equals, a lower id, and one integer comparison settles both.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from hotneuron.kernels.jit import njit
from hotneuron.kernels.llvm import ADDRESS, F32, I64, call_intrinsic, op
from hotneuron.kernels.memory import get_f32, get_i32, get_i64, put_f32, put_i64
from hotneuron.kernels.simd import (
    add,
    load_f32,
    max_lanes,
    mul,
    rounded,
    splat,
    store_f32,
    sub,
    sum_lanes,
    two_to_the,
)

from numba import types  # isort: skip

LARGEST = np.float32(3.4028235e38)
MINUS_INFINITY = np.float32(-np.inf)
_MINUS_INFINITY_BITS = -0x800000
_ID_MASK = 0x7FFFFFFF
_DIGIT_BITS = 11
COUNTS_BYTES = 8 << _DIGIT_BITS
# Below this many keys a heap sort beats the three passes of a radix sort.
_SMALL = 512
_BLOCK_VECTORS = 64
BLOCK = 16 * _BLOCK_VECTORS


def _bits(b, mask):
    return b.zext(b.bitcast(mask, ir.IntType(16)), I64)


@op(types.int64(F32, F32))
def mask_greater(b, x, y):
    """Bit i: x[i] > y[i]; false for NaN."""
    return _bits(b, b.fcmp_ordered(">", x, y))


@op(types.int64(F32, F32))
def mask_at_least(b, x, y):
    """Bit i: x[i] >= y[i]; false for NaN."""
    return _bits(b, b.fcmp_ordered(">=", x, y))


@op(types.int64(types.int64))
def lowest_bit(b, mask):
    """Index of the lowest set bit; mask is not 0."""
    return call_intrinsic(b, "llvm.cttz.i64", I64, mask, ir.Constant(ir.IntType(1), 1))


@op(F32(F32, F32))
def larger(b, x, floor):
    """The larger lane; floor where x is NaN."""
    return b.select(b.fcmp_ordered(">", x, floor), x, floor)


@op(F32(F32, F32))
def smaller(b, x, ceiling):
    """The smaller lane; ceiling where x is NaN."""
    return b.select(b.fcmp_ordered("<", x, ceiling), x, ceiling)


@op(F32(F32, F32, F32))
def zero_unless_greater(b, value, x, limit):
    """value where x > limit, else 0, also where x is NaN."""
    return b.select(b.fcmp_ordered(">", x, limit), value, ir.Constant(value.type, [0.0] * 16))


@op(types.float32(ADDRESS))
def value_at(b, address):
    """The logit at an address: NaN as minus infinity, plus infinity as the largest float."""
    value = b.load(b.inttoptr(address, ir.FloatType().as_pointer()))
    value.align = 4
    low, high = ir.Constant(value.type, float("-inf")), ir.Constant(value.type, float(LARGEST))
    value = b.select(b.fcmp_ordered(">", value, low), value, low)
    return b.select(b.fcmp_ordered("<", value, high), value, high)


@njit
def exp_16(x, limit):
    """e^x for x <= 0, to 2e-7 of itself; exactly 0 unless x > limit (>= -87). No FMA: the same bits on every path."""
    y = smaller(larger(x, splat(np.float32(-87))), splat(np.float32(0)))
    n = rounded(mul(y, splat(np.float32(1.44269504))))
    r = sub(sub(y, mul(n, splat(np.float32(0.693359375)))), mul(n, splat(np.float32(-2.12194440e-4))))
    p = splat(np.float32(1.9875691500e-4))  # Cephes' expf
    p = add(mul(p, r), splat(np.float32(1.3981999507e-3)))
    p = add(mul(p, r), splat(np.float32(8.3334519073e-3)))
    p = add(mul(p, r), splat(np.float32(4.1665795894e-2)))
    p = add(mul(p, r), splat(np.float32(1.6666665459e-1)))
    p = add(mul(p, r), splat(np.float32(5.0000001201e-1)))
    p = add(add(mul(mul(p, r), r), r), splat(np.float32(1)))
    return zero_unless_greater(mul(p, two_to_the(n)), x, splat(limit))


@njit
def copy_tail(row, n, tail):
    """Fill `tail` from the last n % 16 floats of the row."""
    store_f32(tail, splat(MINUS_INFINITY))
    for i in range(n // 16 * 16, n):
        put_f32(tail + 4 * (i % 16), get_f32(row + 4 * i))


@njit
def max_of(row, n, tail):
    """The largest float, at most LARGEST; minus infinity if there is none."""
    a = larger(load_f32(tail), splat(MINUS_INFINITY))
    b, c, d = a, a, a
    whole = n // 16
    for i in range(0, whole // 4 * 4, 4):
        at = row + 64 * i
        a = larger(load_f32(at), a)
        b = larger(load_f32(at + 64), b)
        c = larger(load_f32(at + 128), c)
        d = larger(load_f32(at + 192), d)
    for i in range(whole // 4 * 4, whole):
        a = larger(load_f32(row + 64 * i), a)
    return max_lanes(smaller(larger(larger(a, b), larger(c, d)), splat(LARGEST)))


@njit
def argmax(row, n, tail):
    """The lowest index of the largest float; 0 if all are minus infinity or NaN."""
    largest = max_of(row, n, tail)
    if largest == MINUS_INFINITY:
        return 0
    bound = splat(largest)
    for i in range((n + 15) // 16):
        mask = mask_at_least(load_f32(row + 64 * i if i < n // 16 else tail), bound)
        if mask != 0:
            return 16 * i + lowest_bit(mask)
    return 0


@njit
def exp_sum(row, n, tail, largest, scale, limit):
    """Sum of e^((x - largest) * scale) over the floats for which that exponent is greater than limit."""
    total = 0.0
    vectors = (n + 15) // 16
    origin, factor = splat(largest), splat(scale)
    for first in range(0, vectors, _BLOCK_VECTORS):
        a = splat(np.float32(0))
        for i in range(first, min(first + _BLOCK_VECTORS, vectors)):
            a = add(a, exp_16(mul(sub(load_f32(row + 64 * i if i < n // 16 else tail), origin), factor), limit))
        total += np.float64(sum_lanes(a))
    return total


@njit
def pick_by_mass(row, n, tail, largest, scale, uniform, work):
    """The first index whose running sum of e^((x - largest) * scale) passes uniform (0 to 1) of the whole.

    work: 4 bytes for each of the row's blocks of 1024 floats, then 4096 bytes.
    """
    vectors = (n + 15) // 16
    n_blocks = (vectors + _BLOCK_VECTORS - 1) // _BLOCK_VECTORS
    limit = np.float32(-87)
    total = 0.0
    for k in range(n_blocks):
        mass = exp_sum(row + 4 * BLOCK * k, min(BLOCK, n - BLOCK * k), tail, largest, scale, limit)
        put_f32(work + 4 * k, np.float32(mass))
        total += np.float64(np.float32(mass))
    target = uniform * total
    before, block = 0.0, 0
    running = 0.0
    for k in range(n_blocks):
        mass = np.float64(get_f32(work + 4 * k))
        if mass > 0:
            block, before = k, running
            running += mass
            if running > target:
                break
    values = work + 4 * n_blocks
    first = block * _BLOCK_VECTORS
    origin, factor = splat(largest), splat(scale)
    for i in range(first, min(first + _BLOCK_VECTORS, vectors)):
        x = mul(sub(load_f32(row + 64 * i if i < n // 16 else tail), origin), factor)
        store_f32(values + 64 * (i - first), exp_16(x, limit))
    chosen = 0
    for i in range(block * BLOCK, min((block + 1) * BLOCK, n)):
        mass = np.float64(get_f32(values + 4 * (i - block * BLOCK)))
        if mass > 0:
            chosen = i
            before += mass
            if before > target:
                break
    return chosen


@njit
def key_at(row, index):
    """The key of one float of the row."""
    value = get_f32(row + 4 * index)
    bits = np.int64(get_i32(row + 4 * index))
    if not value > MINUS_INFINITY:
        bits = _MINUS_INFINITY_BITS
    elif value > LARGEST:
        bits -= 1
    elif value == 0:
        bits = 0  # -0.0 ties with 0.0
    return (bits if bits >= 0 else bits ^ 0x7FFFFFFF) << 32 | (_ID_MASK - index)


@op(types.int64(types.int64))
def index_of(b, key):
    """The index that a key holds."""
    return b.xor(b.and_(key, I64(_ID_MASK)), I64(_ID_MASK))


@njit
def _sift_down(keys, n, at, key):
    """Put `key` into the min-heap's hole at `at`."""
    while True:
        child = 2 * at + 1
        if child >= n:
            break
        least = get_i64(keys + 8 * child)
        if child + 1 < n:
            right = get_i64(keys + 8 * (child + 1))
            if right < least:
                child += 1
                least = right
        if least >= key:
            break
        put_i64(keys + 8 * at, least)
        at = child
    put_i64(keys + 8 * at, key)


@njit
def _heapify(keys, n):
    for at in range(n // 2 - 1, -1, -1):
        _sift_down(keys, n, at, get_i64(keys + 8 * at))


@njit
def _sort_heap(keys, n):
    """A min-heap of keys to descending order."""
    for last in range(n - 1, 0, -1):
        least, moved = get_i64(keys), get_i64(keys + 8 * last)
        put_i64(keys + 8 * last, least)
        _sift_down(keys, last, np.int64(0), moved)


@njit
def largest_k(row, n, tail, k, keys):
    """Write the keys of the k largest floats (k <= n), in descending order."""
    for i in range(k):
        put_i64(keys + 8 * i, key_at(row, i))
    _heapify(keys, k)
    bound = value_at(row + 4 * index_of(get_i64(keys)))
    aligned = min((k + 15) // 16 * 16, n)
    for i in range(k, aligned):
        if value_at(row + 4 * i) > bound:
            _sift_down(keys, k, np.int64(0), key_at(row, i))
            bound = value_at(row + 4 * index_of(get_i64(keys)))
    for i in range((k + 15) // 16, (n + 15) // 16):
        mask = mask_greater(load_f32(row + 64 * i if i < n // 16 else tail), splat(bound))
        while mask != 0:
            index = 16 * i + lowest_bit(mask)
            mask &= mask - 1
            if value_at(row + 4 * index) > bound:
                _sift_down(keys, k, np.int64(0), key_at(row, index))
                bound = value_at(row + 4 * index_of(get_i64(keys)))
    _sort_heap(keys, k)


@njit
def keys_at_least(row, n, tail, bound, keys):
    """Write the keys of the floats >= bound (finite) by ascending index; returns how many."""
    found = 0
    limit = splat(bound)
    for i in range((n + 15) // 16):
        mask = mask_at_least(load_f32(row + 64 * i if i < n // 16 else tail), limit)
        while mask != 0:
            put_i64(keys + 8 * found, key_at(row, 16 * i + lowest_bit(mask)))
            found += 1
            mask &= mask - 1
    return found


@njit
def _digit(key, shift):
    """A digit of the key's upper half, for a descending sort."""
    digits = (1 << _DIGIT_BITS) - 1
    return digits - ((((key >> 32) + 0x80000000) >> shift) & digits)


@njit
def sort_descending(keys, n, other, counts):
    """Sort keys whose equal upper halves already lie in descending order. `other`: as large; counts: COUNTS_BYTES."""
    if n <= _SMALL:
        _heapify(keys, n)
        _sort_heap(keys, n)
        return
    source, target = keys, other
    for shift in range(0, 32, _DIGIT_BITS):
        for d in range(1 << _DIGIT_BITS):
            put_i64(counts + 8 * d, 0)
        for i in range(n):
            at = counts + 8 * _digit(get_i64(source + 8 * i), shift)
            put_i64(at, get_i64(at) + 1)
        before = 0
        for d in range(1 << _DIGIT_BITS):
            count = get_i64(counts + 8 * d)
            put_i64(counts + 8 * d, before)
            before += count
        for i in range(n):
            key = get_i64(source + 8 * i)
            at = counts + 8 * _digit(key, shift)
            put_i64(target + 8 * get_i64(at), key)
            put_i64(at, get_i64(at) + 1)
        source, target = target, source
    for i in range(n):
        put_i64(keys + 8 * i, get_i64(source + 8 * i))
