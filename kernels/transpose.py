"""Sixteen lines of memory turned: dword j of each becomes vector j."""

from __future__ import annotations

from llvmlite import ir

from hotneuron.kernels.llvm import I8, I16, I64, INT32, VI, load_at, op, store_at

from numba import types  # isort: skip
from numba.core import cgutils  # isort: skip

_I64S = types.int64


def _shuffle(b, x, y, lanes):
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(INT32, 16), lanes))


def _by_quarter(pick):
    """Lanes of a shuffle that does the same in each 128-bit quarter: (which vector, dword) four times."""
    return [16 * which + 4 * quarter + dword for quarter in range(4) for which, dword in pick]


_LOW, _HIGH = _by_quarter([(0, 0), (1, 0), (0, 1), (1, 1)]), _by_quarter([(0, 2), (1, 2), (0, 3), (1, 3)])
_LOW_PAIRS, _HIGH_PAIRS = _by_quarter([(0, 0), (0, 1), (1, 0), (1, 1)]), _by_quarter([(0, 2), (0, 3), (1, 2), (1, 3)])


def _quarters(*picks):
    """Lanes of a shuffle of whole quarters: (which vector, quarter) four times."""
    return [16 * which + 4 * quarter + dword for which, quarter in picks for dword in range(4)]


_EVEN = _quarters((0, 0), (0, 2), (1, 0), (1, 2))
_ODD = _quarters((0, 1), (0, 3), (1, 1), (1, 3))


def _turned(b, rows, offset):
    """The 16 vectors of the line at `offset` of 16 rows, whose addresses lie at `rows`."""
    lines = [load_at(b, b.add(load_at(b, b.add(rows, I64(8 * i)), I64), offset), VI) for i in range(16)]
    quarters = []  # [group of four rows][dword of a quarter]: the four rows' dword of each quarter
    for g in range(0, 16, 4):
        r = lines[g : g + 4]
        low01, high01 = _shuffle(b, r[0], r[1], _LOW), _shuffle(b, r[0], r[1], _HIGH)
        low23, high23 = _shuffle(b, r[2], r[3], _LOW), _shuffle(b, r[2], r[3], _HIGH)
        quarters.append([_shuffle(b, x, y, lanes) for x, y in ((low01, low23), (high01, high23)) for lanes in (_LOW_PAIRS, _HIGH_PAIRS)])
    out: list[object] = [None] * 16
    for k in range(4):
        a, c, d, e = (quarters[g][k] for g in range(4))
        even0, even1, odd0, odd1 = _shuffle(b, a, c, _EVEN), _shuffle(b, d, e, _EVEN), _shuffle(b, a, c, _ODD), _shuffle(b, d, e, _ODD)
        out[k], out[8 + k] = _shuffle(b, even0, even1, _EVEN), _shuffle(b, even0, even1, _ODD)
        out[4 + k], out[12 + k] = _shuffle(b, odd0, odd1, _EVEN), _shuffle(b, odd0, odd1, _ODD)
    return out


@op(types.void(_I64S, _I64S, _I64S, _I64S, _I64S))
def transpose_16(b, rows, offset, out, stride, jump):
    """Dword j of the lines at `offset` of 16 rows to out + j stride + (j // 8) jump; rows: int64 [16] of addresses."""
    for j, vector in enumerate(_turned(b, rows, offset)):
        at = b.add(out, b.mul(stride, I64(j)))
        store_at(b, b.add(at, jump) if j >= 8 else at, vector)


@op(types.void(_I64S, _I64S, _I64S, _I64S, _I64S))
def transpose_pairs_16(b, rows, offset, out, stride, jump):
    """As `transpose_16`, of dwords that are pairs of halves: the 16 first ones, then the 16 second ones; jump after every two."""
    apart = ir.Constant(ir.VectorType(INT32, 32), [*range(0, 32, 2), *range(1, 32, 2)])
    halves = ir.VectorType(I16, 32)
    for j, vector in enumerate(_turned(b, rows, offset)):
        pairs = b.bitcast(vector, halves)
        at = b.add(b.add(out, b.mul(stride, I64(j))), b.mul(jump, I64(j // 2)))
        store_at(b, at, b.shuffle_vector(pairs, pairs, apart))


@op(types.void(_I64S))
def prefetch_far(b, address):
    """Ask for one cache line, into the second-level cache."""
    pointer = b.inttoptr(address, I8.as_pointer())
    signature = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), INT32, INT32, INT32])
    fn = cgutils.get_or_insert_function(b.module, signature, "llvm.prefetch.p0")
    b.call(fn, [pointer, INT32(0), INT32(2), INT32(1)])
