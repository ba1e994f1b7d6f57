"""Vector types and operations for Numba kernels: sixteen lanes wide, written as LLVM vector IR.

Addresses are int64. LLVM splits the sixteen lanes for narrower machines. `tokens` holds the operations on one vector a token.
NOTE inline assembly does not work under Numba's JIT; every machine instruction here is an LLVM intrinsic.
"""

from __future__ import annotations

from llvmlite import ir

from hotneuron.kernels.llvm import (
    ADDRESS,
    F32,
    FLOAT32,
    I8,
    I16,
    I64,
    INT32,
    LANES,
    MAGIC,
    MAGIC_BITS,
    PATH,
    U8,
    VB,
    VF,
    VI,
    call_intrinsic,
    constant,
    load_at,
    op,
    splat_value,
    store_at,
)

from numba import types  # isort: skip
from numba.core import cgutils  # isort: skip


@op(U8(ADDRESS))
def load_u8(b, address):
    """64 bytes."""
    return load_at(b, address, VB)


@op(F32(ADDRESS))
def load_f32(b, address):
    return load_at(b, address, VF)


@op(types.void(ADDRESS, F32))
def store_f32(b, address, value):
    store_at(b, address, value)


def half_to_float(b, bits):
    """16 halves as i16 to f32."""
    if PATH != "portable":
        return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), VF)
    # Without F16C: move exponent and mantissa into place, then scale by 2^112, which is exact for subnormals too.
    wide = b.zext(bits, VI)
    magnitude = b.bitcast(b.shl(b.and_(wide, constant(VI, 0x7FFF)), constant(VI, 13)), VF)
    scaled = b.bitcast(b.fmul(magnitude, constant(VF, 2.0**112)), VI)
    return b.bitcast(b.or_(scaled, b.shl(b.and_(wide, constant(VI, 0x8000)), constant(VI, 16))), VF)


def _float_to_half(b, value):
    """16 floats to halves as i16."""
    bits16 = ir.VectorType(I16, LANES)
    value = call_intrinsic(b, "llvm.minnum.v16f32", VF, value, constant(VF, 65504.0))
    value = call_intrinsic(b, "llvm.maxnum.v16f32", VF, value, constant(VF, -65504.0))
    if PATH != "portable":
        return b.bitcast(b.fptrunc(value, ir.VectorType(ir.HalfType(), LANES)), bits16)
    bits = b.bitcast(value, VI)
    sign = b.lshr(b.and_(bits, constant(VI, -0x80000000)), constant(VI, 16))
    magnitude = b.and_(bits, constant(VI, 0x7FFFFFFF))
    # Normal halves: rebias the exponent and round to even in integers. Subnormal ones: let an addition of 0.5 round.
    odd = b.and_(b.lshr(magnitude, constant(VI, 13)), constant(VI, 1))
    normal = b.lshr(b.add(b.add(magnitude, constant(VI, (15 - 127) * (1 << 23) + 0xFFF)), odd), constant(VI, 13))
    small = b.sub(b.bitcast(b.fadd(b.bitcast(magnitude, VF), constant(VF, 0.5)), VI), constant(VI, 0x3F000000))
    half = b.select(b.icmp_unsigned("<", magnitude, constant(VI, 113 << 23)), small, normal)
    return b.trunc(b.or_(half, sign), bits16)


@op(F32(ADDRESS))
def load_f16(b, address):
    """16 halves to f32."""
    return half_to_float(b, load_at(b, address, ir.VectorType(I16, LANES)))


@op(F32(ADDRESS))
def load_bf16(b, address):
    """16 bfloats to f32."""
    return b.bitcast(b.shl(b.zext(load_at(b, address, ir.VectorType(I16, LANES)), VI), constant(VI, 16)), VF)


@op(types.float32(ADDRESS))
def get_f16(b, address):
    """The half at an address."""
    return b.extract_element(half_to_float(b, splat_value(b, load_at(b, address, I16))), INT32(0))


@op(types.float32(ADDRESS))
def get_bf16(b, address):
    """The bfloat at an address."""
    return b.bitcast(b.shl(b.zext(load_at(b, address, I16), INT32), INT32(16)), FLOAT32)


@op(types.void(ADDRESS, F32))
def store_f16(b, address, value):
    """f32 to 16 halves, to nearest even; what halves cannot hold is cut to their largest, so that no infinity is stored."""
    store_at(b, address, _float_to_half(b, value))


@op(F32(types.float32))
def splat(b, x):
    """x in every lane."""
    return splat_value(b, x)


@op(F32(F32, F32, F32))
def fma(b, x, y, z):
    """x * y + z, rounded once."""
    return call_intrinsic(b, "llvm.fma.v16f32", VF, x, y, z)


@op(F32(F32, F32))
def add(b, x, y):
    return b.fadd(x, y)


@op(F32(F32, F32))
def sub(b, x, y):
    return b.fsub(x, y)


@op(F32(F32, F32))
def mul(b, x, y):
    return b.fmul(x, y)


@op(F32(F32, F32))
def div(b, x, y):
    return b.fdiv(x, y)


@op(F32(F32, F32))
def maximum(b, x, y):
    return call_intrinsic(b, "llvm.maxnum.v16f32", VF, x, y)


@op(F32(F32, F32))
def minimum(b, x, y):
    return call_intrinsic(b, "llvm.minnum.v16f32", VF, x, y)


@op(F32(F32))
def absolute(b, x):
    return call_intrinsic(b, "llvm.fabs.v16f32", VF, x)


@op(F32(F32))
def rounded(b, x):
    """Each lane to the nearest integer, ties to even; |x| < 2^22."""
    return b.fsub(b.fadd(x, constant(VF, MAGIC)), constant(VF, MAGIC))


@op(F32(F32))
def two_to_the(b, n):
    """2^n for integral n from -126 to 127."""
    exponent = b.sub(b.bitcast(b.fadd(n, constant(VF, MAGIC)), VI), constant(VI, MAGIC_BITS - 127))
    return b.bitcast(b.shl(exponent, constant(VI, 23)), VF)


def _halves(b, v, op):
    """Fold sixteen lanes to one, always in the same order."""
    width = LANES
    while width > 1:
        width //= 2
        low = ir.Constant(ir.VectorType(INT32, width), list(range(width)))
        high = ir.Constant(ir.VectorType(INT32, width), list(range(width, 2 * width)))
        undefined = ir.Constant(v.type, ir.Undefined)
        v = op(b.shuffle_vector(v, undefined, low), b.shuffle_vector(v, undefined, high))
    return b.extract_element(v, INT32(0))


@op(types.float32(F32))
def sum_lanes(b, v):
    return _halves(b, v, b.fadd)


@op(types.float32(F32))
def max_lanes(b, v):
    return _halves(b, v, lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y))


@op(F32(F32, F32, F32))
def zero_below(b, x, limit, y):
    """0 in the lanes where x < limit, y in the others."""
    return b.select(b.fcmp_ordered("<", x, limit), ir.Constant(VF, None), y)


@op(types.void(ADDRESS, types.int64, F32))
def scatter_f16(b, address, stride, v):
    """Store 16 floats as halves (see `store_f16`), `stride` bytes apart."""
    halves = _float_to_half(b, v)
    for i in range(LANES):
        store_at(b, b.add(address, b.mul(stride, I64(i))), b.extract_element(halves, INT32(i)))


@op(F32(F32, types.int64))
def keep_first(b, v, n):
    """Lanes 0 to n-1 of v; minus infinity in the others."""
    lane = ir.Constant(VI, list(range(LANES)))
    kept = b.icmp_signed("<", lane, splat_value(b, b.trunc(n, INT32)))
    return b.select(kept, v, constant(VF, float("-inf")))


@op(F32(F32, types.int64))
def drop_first(b, v, n):
    """Minus infinity in lanes 0 to n-1; v in the others."""
    lane = ir.Constant(VI, list(range(LANES)))
    dropped = b.icmp_signed("<", lane, splat_value(b, b.trunc(n, INT32)))
    return b.select(dropped, constant(VF, float("-inf")), v)


@op(types.void(ADDRESS))
def prefetch(b, address):
    """Ask for one cache line, into all levels."""
    pointer = b.inttoptr(address, I8.as_pointer())
    signature = ir.FunctionType(ir.VoidType(), [I8.as_pointer(), INT32, INT32, INT32])
    fn = cgutils.get_or_insert_function(b.module, signature, "llvm.prefetch.p0")
    b.call(fn, [pointer, INT32(0), INT32(3), INT32(1)])


@op(U8(U8))
def low_nibbles(b, v):
    return b.and_(v, constant(VB, 15))


@op(U8(U8))
def high_nibbles(b, v):
    return b.lshr(v, constant(VB, 4))


@op(types.int32(types.int64, types.int64, F32))
def store_quads(b, address, stride, v):
    """Round 16 floats (|v| <= 127) to int8, four at a time to address, address + stride, ...; returns their sum."""
    integers = b.sub(b.bitcast(b.fadd(v, constant(VF, MAGIC)), VI), constant(VI, MAGIC_BITS))
    quads = b.bitcast(b.trunc(integers, ir.VectorType(I8, LANES)), ir.VectorType(INT32, 4))
    for i in range(4):
        store_at(b, b.add(address, b.mul(stride, I64(i))), b.extract_element(quads, INT32(i)))
    return _halves(b, integers, b.add)
