"""Vector types and operations for Numba kernels: sixteen lanes wide, written as LLVM vector IR.

A `Vec` is an LLVM vector, or an array of `count` of them (one a token), so that a kernel reads the same for one token and
for eight: `fma_each(acc, w, x)` multiplies the shared vector `w` by one broadcast float of each token. Addresses are int64.
LLVM splits the sixteen lanes for narrower machines; only the integer dot product differs by path (see `cpu.path`).
NOTE inline assembly does not work under Numba's JIT; every machine instruction here is an LLVM intrinsic.
"""

from __future__ import annotations

from llvmlite import ir

from hotneuron.kernels import cpu  # before Numba, which it sets up

from numba import types  # isort: skip
from numba.core import cgutils  # isort: skip
from numba.core.datamodel import models  # isort: skip
from numba.extending import intrinsic, register_model  # isort: skip

LANES = 16
PATH = cpu.path()

_I8, _I16, _I32, _I64, _F32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_ELEMENTS = {"f32": _F32, "i32": _I32, "u8": _I8}


class Vec(types.Type):
    """`count` LLVM vectors of `lanes` elements; a bare vector when count is 0."""

    def __init__(self, element: str, lanes: int, count: int = 0):
        self.element, self.lanes, self.count = element, lanes, count
        super().__init__(name=f"Vec({element}x{lanes}, {count})")

    @property
    def vector(self) -> ir.VectorType:
        return ir.VectorType(_ELEMENTS[self.element], self.lanes)

    @property
    def ir(self) -> ir.Type:
        return ir.ArrayType(self.vector, self.count) if self.count else self.vector


@register_model(Vec)
class _VecModel(models.PrimitiveModel):
    def __init__(self, dmm, fe_type):
        super().__init__(dmm, fe_type, fe_type.ir)


F32 = Vec("f32", LANES)
I32 = Vec("i32", LANES)
U8 = Vec("u8", 4 * LANES)
_VF, _VI, _VB = F32.vector, I32.vector, U8.vector


def _at(builder, address, kind, align=1):
    """Load `kind` from an int64 address."""
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def _put(builder, address, value, align=1):
    store = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
    store.align = align


def _splat(builder, scalar, lanes=LANES):
    vector = ir.VectorType(scalar.type, lanes)
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, _I32(0))
    return builder.shuffle_vector(single, single, ir.Constant(ir.VectorType(_I32, lanes), [0] * lanes))


def _const(vector, value):
    return ir.Constant(vector, [value] * vector.count)


def _call(builder, name, result, *args):
    signature = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def _offset(builder, address, n_bytes):
    return builder.add(address, n_bytes if isinstance(n_bytes, ir.Value) else _I64(n_bytes))


def _op(signature):
    """Make an intrinsic of fixed types from `emit(builder, *args)`."""

    def make(emit):
        def typing(typingctx, *args):
            def codegen(context, builder, sig, arguments):
                value = emit(builder, *arguments)
                return context.get_dummy_value() if value is None else value

            return signature, codegen

        # Numba reads the argument names of an intrinsic, so the general one is spelled out for this arity.
        names = ", ".join(f"a{i}" for i in range(len(signature.args)))
        scope = {"typing": typing}
        exec(f"def {emit.__name__}(typingctx{', ' + names if names else ''}):\n return typing(typingctx{', ' + names if names else ''})", scope)
        function = scope[emit.__name__]
        function.__doc__, function.__module__ = emit.__doc__, __name__
        return intrinsic(function)

    return make


ADDRESS = types.int64


@_op(U8(ADDRESS))
def load_u8(b, address):
    """64 bytes."""
    return _at(b, address, _VB)


@_op(F32(ADDRESS))
def load_f32(b, address):
    return _at(b, address, _VF)


@_op(types.void(ADDRESS, F32))
def store_f32(b, address, value):
    _put(b, address, value)


def _half_to_float(b, bits):
    """16 halves as i16 to f32."""
    if PATH != "portable":
        return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), _VF)
    # Without F16C: move exponent and mantissa into place, then scale by 2^112, which is exact for subnormals too.
    wide = b.zext(bits, _VI)
    magnitude = b.bitcast(b.shl(b.and_(wide, _const(_VI, 0x7FFF)), _const(_VI, 13)), _VF)
    scaled = b.bitcast(b.fmul(magnitude, _const(_VF, 2.0**112)), _VI)
    return b.bitcast(b.or_(scaled, b.shl(b.and_(wide, _const(_VI, 0x8000)), _const(_VI, 16))), _VF)


def _float_to_half(b, value):
    """16 floats to halves as i16."""
    bits16 = ir.VectorType(_I16, LANES)
    value = _call(b, "llvm.minnum.v16f32", _VF, value, _const(_VF, 65504.0))
    value = _call(b, "llvm.maxnum.v16f32", _VF, value, _const(_VF, -65504.0))
    if PATH != "portable":
        return b.bitcast(b.fptrunc(value, ir.VectorType(ir.HalfType(), LANES)), bits16)
    bits = b.bitcast(value, _VI)
    sign = b.lshr(b.and_(bits, _const(_VI, -0x80000000)), _const(_VI, 16))
    magnitude = b.and_(bits, _const(_VI, 0x7FFFFFFF))
    # Normal halves: rebias the exponent and round to even in integers. Subnormal ones: let an addition of 0.5 round.
    odd = b.and_(b.lshr(magnitude, _const(_VI, 13)), _const(_VI, 1))
    normal = b.lshr(b.add(b.add(magnitude, _const(_VI, (15 - 127) * (1 << 23) + 0xFFF)), odd), _const(_VI, 13))
    small = b.sub(b.bitcast(b.fadd(b.bitcast(magnitude, _VF), _const(_VF, 0.5)), _VI), _const(_VI, 0x3F000000))
    half = b.select(b.icmp_unsigned("<", magnitude, _const(_VI, 113 << 23)), small, normal)
    return b.trunc(b.or_(half, sign), bits16)


@_op(F32(ADDRESS))
def load_f16(b, address):
    """16 halves to f32."""
    return _half_to_float(b, _at(b, address, ir.VectorType(_I16, LANES)))


@_op(F32(ADDRESS))
def load_bf16(b, address):
    """16 bfloats to f32."""
    return b.bitcast(b.shl(b.zext(_at(b, address, ir.VectorType(_I16, LANES)), _VI), _const(_VI, 16)), _VF)


@_op(types.float32(ADDRESS))
def get_f16(b, address):
    """The half at an address."""
    return b.extract_element(_half_to_float(b, _splat(b, _at(b, address, _I16))), _I32(0))


@_op(types.float32(ADDRESS))
def get_bf16(b, address):
    """The bfloat at an address."""
    return b.bitcast(b.shl(b.zext(_at(b, address, _I16), _I32), _I32(16)), _F32)


@_op(types.void(ADDRESS, F32))
def store_f16(b, address, value):
    """f32 to 16 halves, to nearest even; what halves cannot hold is cut to their largest, so that no infinity is stored."""
    _put(b, address, _float_to_half(b, value))


@_op(F32(types.float32))
def splat(b, x):
    """x in every lane."""
    return _splat(b, x)


@_op(F32(ADDRESS))
def splat_at(b, address):
    """The float at an address, in every lane."""
    return _splat(b, _at(b, address, _F32))


@_op(F32(F32, F32, F32))
def fma(b, x, y, z):
    """x * y + z, rounded once."""
    return _call(b, "llvm.fma.v16f32", _VF, x, y, z)


@_op(F32(F32, F32))
def add(b, x, y):
    return b.fadd(x, y)


@_op(F32(F32, F32))
def sub(b, x, y):
    return b.fsub(x, y)


@_op(F32(F32, F32))
def mul(b, x, y):
    return b.fmul(x, y)


@_op(F32(F32, F32))
def div(b, x, y):
    return b.fdiv(x, y)


@_op(F32(F32, F32))
def maximum(b, x, y):
    return _call(b, "llvm.maxnum.v16f32", _VF, x, y)


@_op(F32(F32, F32))
def minimum(b, x, y):
    return _call(b, "llvm.minnum.v16f32", _VF, x, y)


@_op(F32(F32))
def absolute(b, x):
    return _call(b, "llvm.fabs.v16f32", _VF, x)


_MAGIC = 12582912.0  # 1.5 * 2^23: adding it rounds a small float to an integer, to nearest even, into the low bits
_MAGIC_BITS = 0x4B400000


@_op(F32(F32))
def rounded(b, x):
    """Each lane to the nearest integer, ties to even; |x| < 2^22."""
    return b.fsub(b.fadd(x, _const(_VF, _MAGIC)), _const(_VF, _MAGIC))


@_op(F32(F32))
def two_to_the(b, n):
    """2^n for integral n from -126 to 127."""
    exponent = b.sub(b.bitcast(b.fadd(n, _const(_VF, _MAGIC)), _VI), _const(_VI, _MAGIC_BITS - 127))
    return b.bitcast(b.shl(exponent, _const(_VI, 23)), _VF)


def _halves(b, v, op):
    """Fold sixteen lanes to one, always in the same order."""
    width = LANES
    while width > 1:
        width //= 2
        low = ir.Constant(ir.VectorType(_I32, width), list(range(width)))
        high = ir.Constant(ir.VectorType(_I32, width), list(range(width, 2 * width)))
        undefined = ir.Constant(v.type, ir.Undefined)
        v = op(b.shuffle_vector(v, undefined, low), b.shuffle_vector(v, undefined, high))
    return b.extract_element(v, _I32(0))


@_op(types.float32(F32))
def sum_lanes(b, v):
    return _halves(b, v, b.fadd)


@_op(types.float32(F32))
def max_lanes(b, v):
    return _halves(b, v, lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y))


@_op(F32(F32, F32, F32))
def zero_below(b, x, limit, y):
    """0 in the lanes where x < limit, y in the others."""
    return b.select(b.fcmp_ordered("<", x, limit), ir.Constant(_VF, None), y)


@_op(types.void(ADDRESS, types.float32))
def put_f16(b, address, x):
    """Store a float as a half, to nearest even, cut to the largest half."""
    half = _float_to_half(b, _splat(b, x))
    _put(b, address, b.extract_element(half, _I32(0)))


@_op(types.void(ADDRESS, types.int64, F32))
def scatter_f16(b, address, stride, v):
    """Store 16 floats as halves (see `store_f16`), `stride` bytes apart."""
    halves = _float_to_half(b, v)
    for i in range(LANES):
        _put(b, b.add(address, b.mul(stride, _I64(i))), b.extract_element(halves, _I32(i)))


@_op(F32(F32, types.int64))
def keep_first(b, v, n):
    """Lanes 0 to n-1 of v; minus infinity in the others."""
    lane = ir.Constant(_VI, list(range(LANES)))
    kept = b.icmp_signed("<", lane, _splat(b, b.trunc(n, _I32)))
    return b.select(kept, v, _const(_VF, float("-inf")))


@_op(F32(F32, types.int64))
def drop_first(b, v, n):
    """Minus infinity in lanes 0 to n-1; v in the others."""
    lane = ir.Constant(_VI, list(range(LANES)))
    dropped = b.icmp_signed("<", lane, _splat(b, b.trunc(n, _I32)))
    return b.select(dropped, _const(_VF, float("-inf")), v)


@_op(types.void(ADDRESS))
def prefetch(b, address):
    """Ask for one cache line, into all levels."""
    pointer = b.inttoptr(address, _I8.as_pointer())
    signature = ir.FunctionType(ir.VoidType(), [_I8.as_pointer(), _I32, _I32, _I32])
    fn = cgutils.get_or_insert_function(b.module, signature, "llvm.prefetch.p0")
    b.call(fn, [pointer, _I32(0), _I32(3), _I32(1)])


@_op(U8(U8))
def low_nibbles(b, v):
    return b.and_(v, _const(_VB, 15))


@_op(U8(U8))
def high_nibbles(b, v):
    return b.lshr(v, _const(_VB, 4))


def _dot(b, acc, u8, s8, small):
    """acc[lane] += sum over 4 of u8[4 lane + i] * s8[4 lane + i]; exact. `small`: every u8 is at most 127."""
    if PATH == "avx512":
        return _call(b, "llvm.x86.avx512.vpdpbusd.512", _VI, acc, b.bitcast(u8, _VI), s8)
    if PATH == "avx2":
        return _join(b, [_dot_avx2(b, *part, small) for part in zip(*(_split(b, v) for v in (acc, b.bitcast(u8, _VI), s8)), strict=True)])
    u = b.bitcast(u8, _VI)
    for i in range(4):
        unsigned = b.and_(b.lshr(u, _const(_VI, 8 * i)), _const(_VI, 255))
        signed = b.ashr(b.shl(s8, _const(_VI, 24 - 8 * i)), _const(_VI, 24))
        acc = b.add(acc, b.mul(unsigned, signed))
    return acc


_HALF_I32, _HALF_I16, _HALF_I8 = (ir.VectorType(t, n) for t, n in ((_I32, 8), (_I16, 16), (_I8, 32)))


def _split(b, v):
    undefined = ir.Constant(v.type, ir.Undefined)
    return [b.shuffle_vector(v, undefined, ir.Constant(ir.VectorType(_I32, 8), list(range(o, o + 8)))) for o in (0, 8)]


def _join(b, parts):
    return b.shuffle_vector(*parts, ir.Constant(ir.VectorType(_I32, 16), list(range(16))))


def _dot_avx2(b, acc, u, s, small):
    madd = "llvm.x86.avx2.pmadd.wd"
    if small:  # two products of 127 * 127 fit 16 bits
        pairs = _call(b, "llvm.x86.avx2.pmadd.ub.sw", _HALF_I16, b.bitcast(u, _HALF_I8), b.bitcast(s, _HALF_I8))
        return b.add(acc, _call(b, madd, _HALF_I32, pairs, ir.Constant(_HALF_I16, [1] * 16)))
    u, s = b.bitcast(u, _HALF_I16), b.bitcast(s, _HALF_I16)
    eight = ir.Constant(_HALF_I16, [8] * 16)
    even = _call(b, madd, _HALF_I32, b.and_(u, ir.Constant(_HALF_I16, [255] * 16)), b.ashr(b.shl(s, eight), eight))
    odd = _call(b, madd, _HALF_I32, b.lshr(u, eight), b.ashr(s, eight))
    return b.add(acc, b.add(even, odd))


# One vector a token: arrays of `n` vectors, n a literal.


def _each(emit, element="f32"):
    """An intrinsic over arrays: `emit(builder, k, *args)` makes element k; array arguments arrive as their element k."""

    def typing_of(args):
        return next(a for a in args if isinstance(a, Vec) and a.count)

    def make(names):
        def typing(typingctx, *args):
            array = typing_of(args)
            result = Vec(element, LANES, array.count)
            signature = result(*args)

            def codegen(context, builder, sig, values):
                out = ir.Constant(result.ir, ir.Undefined)
                for k in range(array.count):
                    picked = [
                        builder.extract_value(v, k) if isinstance(a, Vec) and a.count else v
                        for a, v in zip(sig.args, values, strict=True)
                    ]
                    out = builder.insert_value(out, emit(builder, k, *picked), k)
                return out

            return signature, codegen

        scope = {"typing": typing}
        exec(f"def {emit.__name__}(typingctx, {names}):\n return typing(typingctx, {names})", scope)
        function = scope[emit.__name__]
        function.__doc__, function.__module__ = emit.__doc__, __name__
        return intrinsic(function)

    code = emit.__code__
    return make(", ".join(code.co_varnames[2 : code.co_argcount]))


@intrinsic(prefer_literal=True)
def zeros_f32(typingctx, n):
    """n vectors of zeros; n a literal."""
    result = Vec("f32", LANES, n.literal_value)
    return result(n), lambda context, builder, sig, args: ir.Constant(result.ir, None)


@intrinsic(prefer_literal=True)
def zeros_i32(typingctx, n):
    """n vectors of integer zeros; n a literal."""
    result = Vec("i32", LANES, n.literal_value)
    return result(n), lambda context, builder, sig, args: ir.Constant(result.ir, None)


@intrinsic(prefer_literal=True)
def splats_i32(typingctx, n, address):
    """n vectors, vector k holding the k-th int32 at an address in every lane; n a literal."""
    result = Vec("i32", LANES, n.literal_value)

    def codegen(context, builder, sig, args):
        out = ir.Constant(result.ir, ir.Undefined)
        for k in range(result.count):
            out = builder.insert_value(out, _splat(builder, _at(builder, _offset(builder, args[1], 4 * k), _I32)), k)
        return out

    return result(n, types.int64), codegen


def _dot_token(b, k, acc, u8, address, small):
    return _dot(b, acc, u8, _splat(b, _at(b, _offset(b, address, 4 * k), _I32)), small)


def _integer(emit):
    return _each(emit, "i32")


@_integer
def dot_each(b, k, acc, u8, address):
    """Token k: dot product of u8 with the token's four int8 at address + 4k, added to acc."""
    return _dot_token(b, k, acc, u8, address, False)


@_integer
def dot_each_small(b, k, acc, u8, address):
    """As `dot_each`, for u8 of at most 127 (nibbles), which is cheaper on AVX2."""
    return _dot_token(b, k, acc, u8, address, True)


@_each
def scale_each(b, k, integers, address):
    """Token k: integers as floats, times the token's float at address + 4k."""
    return b.fmul(b.sitofp(integers, _VF), _splat(b, _at(b, _offset(b, address, 4 * k), _F32)))


@_each
def fma_shared(b, k, acc, x, shared):
    """Token k: x[k] * shared + acc[k]."""
    return _call(b, "llvm.fma.v16f32", _VF, x, shared, acc)


@_each
def add_each(b, k, x, y):
    """Token k: x[k] + y[k]."""
    return b.fadd(x, y)


@_each
def fma_each(b, k, acc, shared, address, stride):
    """Token k: shared * (the float at address + k stride) + acc[k]."""
    at = b.add(address, b.mul(stride, _I64(k)))
    return _call(b, "llvm.fma.v16f32", _VF, shared, _splat(b, _at(b, at, _F32)), acc)


@_each
def fma_near(b, k, acc, shared, address):
    """Token k: shared * (the float at address + 4k) + acc[k]."""
    return _call(b, "llvm.fma.v16f32", _VF, shared, _splat(b, _at(b, _offset(b, address, 4 * k), _F32)), acc)


@intrinsic
def store_each(typingctx, address, stride, vectors):
    """Vector k to address + k stride."""

    def codegen(context, builder, sig, args):
        for k in range(vectors.count):
            at = builder.add(args[0], builder.mul(args[1], _I64(k)))
            _put(builder, at, builder.extract_value(args[2], k))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, vectors), codegen


@_op(types.int32(types.int64, types.int64, F32))
def store_quads(b, address, stride, v):
    """Round 16 floats (|v| <= 127) to int8, four at a time to address, address + stride, ...; returns their sum."""
    integers = b.sub(b.bitcast(b.fadd(v, _const(_VF, _MAGIC)), _VI), _const(_VI, _MAGIC_BITS))
    quads = b.bitcast(b.trunc(integers, ir.VectorType(_I8, LANES)), ir.VectorType(_I32, 4))
    for i in range(4):
        _put(b, b.add(address, b.mul(stride, _I64(i))), b.extract_element(quads, _I32(i)))
    return _halves(b, integers, b.add)
