"""Vector operations of the down product by neuron: rows of four neurons woven, so that one integer dot product adds all four.

A line is 64 bytes of a neuron's row: 128 outputs in a 4-bit format, 64 in an 8-bit one (see `down`), that is 8 or 4 vectors of sums.
"""

from __future__ import annotations

from llvmlite import ir

from hotneuron.kernels.llvm import (
    F32,
    FLOAT32,
    I16,
    INT32,
    MAGIC,
    MAGIC_BITS,
    VB,
    VF,
    VI,
    Vec,
    add_bytes,
    call_intrinsic,
    constant,
    load_at,
    op,
    splat_value,
    store_at,
)
from hotneuron.kernels.simd import half_to_float
from hotneuron.kernels.tokens import dot_product

from numba import types  # isort: skip

_AT = types.int64
_SUMS = {8: Vec("i32", 16, 8), 4: Vec("i32", 16, 4)}


def _weave(b, x, y, size):
    """The low and the high halves of each 16 bytes of x and y, their elements of `size` bytes in turn."""
    n = 64 // size
    kind = ir.VectorType(ir.IntType(8 * size), n)
    x, y = b.bitcast(x, kind), b.bitcast(y, kind)
    half, out = n // 8, []
    for first in (0, half):
        lanes = [at + e for q in range(4) for e in range(2 * half * q + first, 2 * half * q + first + half) for at in (0, n)]
        out.append(b.shuffle_vector(x, y, ir.Constant(ir.VectorType(INT32, n), lanes)))
    return out


@op(types.void(_AT, _AT, _AT, _AT, _AT))
def weave(b, r0, r1, r2, r3, out):
    """A line of four rows to four vectors: dword 4L + i of vector k holds byte 16L + 4k + i of each row."""
    low01, high01 = _weave(b, load_at(b, r0, VB), load_at(b, r1, VB), 1)
    low23, high23 = _weave(b, load_at(b, r2, VB), load_at(b, r3, VB), 1)
    for k, v in enumerate([*_weave(b, low01, low23, 2), *_weave(b, high01, high23, 2)]):
        store_at(b, add_bytes(b, out, 64 * k), b.bitcast(v, VB))


def _dword(b, address, index):
    return splat_value(b, load_at(b, add_bytes(b, address, 4 * index), INT32))


def _dots(count, own):
    """`dots(sums, woven, coefficients)`: add four neurons to a line's sums. own: a coefficient for each 32 outputs."""

    @op(_SUMS[count](_SUMS[count], _AT, _AT))
    def dots(b, sums, woven, coefficients):
        for j in range(count):
            k = j // 2 if count == 8 else j
            bytes_ = load_at(b, add_bytes(b, woven, 64 * k), VB)
            if count == 8:
                bytes_ = b.lshr(bytes_, constant(VB, 4)) if j % 2 else b.and_(bytes_, constant(VB, 15))
            coefficient = _dword(b, coefficients, j // 2 if own else 0)
            total = dot_product(b, b.extract_value(sums, j), bytes_, coefficient, count == 8)
            sums = b.insert_value(sums, total, j)
        return sums

    return dots


def _starts(count, own):
    """`starts(at)`: sums that begin at the int32 at an address; own: one for each 32 outputs."""

    @op(_SUMS[count](_AT))
    def starts(b, at):
        sums = ir.Constant(_SUMS[count].ir, ir.Undefined)
        for j in range(count):
            sums = b.insert_value(sums, _dword(b, at, j // 2 if own else 0), j)
        return sums

    return starts


def _half_vector(b, address):
    return half_to_float(b, load_at(b, address, ir.VectorType(I16, 16)))


def _add_shared(count, has_min):
    """`add(sums, scales, scale, total, y)`: y += sums * scales of the outputs * the activations' scale (+ minimum * total)."""

    @op(types.void(_SUMS[count], _AT, _AT, types.float32, types.float32, _AT))
    def add(b, sums, scales, minimums, scale, total, y):
        scale, total = splat_value(b, scale), splat_value(b, total)
        for j in range(count):
            by_output = _half_vector(b, add_bytes(b, scales, 32 * j))
            minus = b.fmul(by_output, constant(VF, -MAGIC))
            value = call_intrinsic(b, "llvm.fma.v16f32", VF, b.bitcast(b.extract_value(sums, j), VF), by_output, minus)
            at = add_bytes(b, y, 64 * j)
            out = call_intrinsic(b, "llvm.fma.v16f32", VF, value, scale, load_at(b, at, VF))
            if has_min:
                by_output = _half_vector(b, add_bytes(b, minimums, 32 * j))
                out = call_intrinsic(b, "llvm.fma.v16f32", VF, by_output, total, out)
            store_at(b, at, out)

    return add


def _add_own(count, has_min):
    """`add(sums, scales, minimums, y)`: y += sums * the float for each 32 outputs (+ the other float for them)."""

    @op(types.void(_SUMS[count], _AT, _AT, _AT))
    def add(b, sums, scales, minimums, y):
        for j in range(count):
            value = b.fsub(b.bitcast(b.extract_value(sums, j), VF), constant(VF, MAGIC))
            scale = splat_value(b, load_at(b, add_bytes(b, scales, 4 * (j // 2)), FLOAT32))
            at = add_bytes(b, y, 64 * j)
            out = call_intrinsic(b, "llvm.fma.v16f32", VF, value, scale, load_at(b, at, VF))
            if has_min:
                out = b.fadd(out, splat_value(b, load_at(b, add_bytes(b, minimums, 4 * (j // 2)), FLOAT32)))
            store_at(b, at, out)

    return add


@op(F32(_AT, F32, F32, F32, F32, F32))
def store_coefficients(b, at, sums, v0, v1, v2, v3):
    """Round four vectors (|v| <= 127) to int8 and store them woven, lane by lane, as dwords; returns sums + all four."""
    packed, total = None, sums
    for i, v in enumerate((v0, v1, v2, v3)):
        integer = b.sub(b.bitcast(b.fadd(v, constant(VF, MAGIC)), VI), constant(VI, MAGIC_BITS))
        total = b.fadd(total, b.sitofp(integer, VF))
        byte = b.shl(b.and_(integer, constant(VI, 255)), constant(VI, 8 * i))
        packed = byte if packed is None else b.or_(packed, byte)
    store_at(b, at, packed)
    return total


@op(types.void(_AT, F32, types.float32))
def store_starts(b, at, total, offset):
    """MAGIC_BITS - offset * total of each lane, total integral, as int32: what sums start with."""
    product = b.fptosi(b.fmul(total, splat_value(b, offset)), VI)
    store_at(b, at, b.sub(constant(VI, MAGIC_BITS), product))


@op(types.int32(_AT))
def nonzero_32(b, at):
    """Bit i: whether float i of 32 is not 0."""
    out = None
    for i in range(2):
        differs = b.fcmp_unordered("!=", load_at(b, add_bytes(b, at, 64 * i), VF), ir.Constant(VF, None))
        bits = b.zext(b.bitcast(differs, I16), INT32)
        out = bits if out is None else b.or_(out, b.shl(bits, INT32(16)))
    return out


DOTS = {(count, own): _dots(count, own) for count in (4, 8) for own in (False, True)}
STARTS = {(count, own): _starts(count, own) for count in (4, 8) for own in (False, True)}
ADD_SHARED = {(count, has_min): _add_shared(count, has_min) for count in (4, 8) for has_min in (False, True)}
ADD_OWN = {(count, has_min): _add_own(count, has_min) for count in (4, 8) for has_min in (False, True)}
