"""One vector a token: arrays of n sixteen-lane vectors, n a literal, and the integer dot product of each instruction path.

`fma_near(acc, w, x)` multiplies the shared vector `w` by one broadcast float of each token, and so on: a kernel reads the same for
one token and for eight. LLVM keeps an array's elements apart, each in a register.
"""

from __future__ import annotations

from llvmlite import ir

from hotneuron.kernels.llvm import (
    FLOAT32,
    I8,
    I16,
    I64,
    INT32,
    LANES,
    MAGIC_BITS,
    PATH,
    VF,
    VI,
    Vec,
    add_bytes,
    call_intrinsic,
    constant,
    load_at,
    splat_value,
    store_at,
)

from numba import types  # isort: skip
from numba.extending import intrinsic  # isort: skip


def dot_product(b, acc, u8, s8, small):
    """acc[lane] += sum over 4 of u8[4 lane + i] * s8[4 lane + i]; exact. `small`: every u8 is at most 127."""
    if PATH == "avx512":
        return call_intrinsic(b, "llvm.x86.avx512.vpdpbusd.512", VI, acc, b.bitcast(u8, VI), s8)
    if PATH == "avx2":
        return _join(b, [_dot_avx2(b, *part, small) for part in zip(*(_split(b, v) for v in (acc, b.bitcast(u8, VI), s8)), strict=True)])
    u = b.bitcast(u8, VI)
    for i in range(4):
        unsigned = b.and_(b.lshr(u, constant(VI, 8 * i)), constant(VI, 255))
        signed = b.ashr(b.shl(s8, constant(VI, 24 - 8 * i)), constant(VI, 24))
        acc = b.add(acc, b.mul(unsigned, signed))
    return acc


_HALF_I32, _HALF_I16, _HALF_I8 = (ir.VectorType(t, n) for t, n in ((INT32, 8), (I16, 16), (I8, 32)))


def _split(b, v):
    undefined = ir.Constant(v.type, ir.Undefined)
    return [b.shuffle_vector(v, undefined, ir.Constant(ir.VectorType(INT32, 8), list(range(o, o + 8)))) for o in (0, 8)]


def _join(b, parts):
    return b.shuffle_vector(*parts, ir.Constant(ir.VectorType(INT32, 16), list(range(16))))


def _dot_avx2(b, acc, u, s, small):
    madd = "llvm.x86.avx2.pmadd.wd"
    if small:  # two products of 127 * 127 fit 16 bits
        pairs = call_intrinsic(b, "llvm.x86.avx2.pmadd.ub.sw", _HALF_I16, b.bitcast(u, _HALF_I8), b.bitcast(s, _HALF_I8))
        return b.add(acc, call_intrinsic(b, madd, _HALF_I32, pairs, ir.Constant(_HALF_I16, [1] * 16)))
    u, s = b.bitcast(u, _HALF_I16), b.bitcast(s, _HALF_I16)
    eight = ir.Constant(_HALF_I16, [8] * 16)
    even = call_intrinsic(b, madd, _HALF_I32, b.and_(u, ir.Constant(_HALF_I16, [255] * 16)), b.ashr(b.shl(s, eight), eight))
    odd = call_intrinsic(b, madd, _HALF_I32, b.lshr(u, eight), b.ashr(s, eight))
    return b.add(acc, b.add(even, odd))


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
def magic_i32(typingctx, n):
    """n vectors of MAGIC_BITS: integer sums that start here can be read as floats (see `scale_each`); n a literal."""
    result = Vec("i32", LANES, n.literal_value)

    def codegen(context, builder, sig, args):
        out = ir.Constant(result.ir, ir.Undefined)
        for k in range(result.count):
            out = builder.insert_value(out, constant(VI, MAGIC_BITS), k)
        return out

    return result(n), codegen


@intrinsic(prefer_literal=True)
def splats_i32(typingctx, n, address):
    """n vectors, vector k holding the k-th int32 at an address in every lane; n a literal."""
    result = Vec("i32", LANES, n.literal_value)

    def codegen(context, builder, sig, args):
        out = ir.Constant(result.ir, ir.Undefined)
        for k in range(result.count):
            out = builder.insert_value(out, splat_value(builder, load_at(builder, add_bytes(builder, args[1], 4 * k), INT32)), k)
        return out

    return result(n, types.int64), codegen


def _dot_token(b, k, acc, u8, address, small):
    return dot_product(b, acc, u8, splat_value(b, load_at(b, add_bytes(b, address, 4 * k), INT32)), small)


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
def scale_each(b, k, integers, scale, minus_magic):
    """Token k: sums that began at MAGIC_BITS, as floats, times the shared `scale`; minus_magic is -MAGIC * scale.

    Read as a float, MAGIC_BITS + q is MAGIC + q for |q| < 2^22. With a scale that was a half, -MAGIC * scale is exact, so the
    product is rounded once: one instruction instead of a conversion and a multiplication.
    """
    return call_intrinsic(b, "llvm.fma.v16f32", VF, b.bitcast(integers, VF), scale, minus_magic)


@_each
def fma_by_token(b, k, acc, x, address):
    """Token k: x[k] * (the float at address + 4k) + acc[k]."""
    factor = splat_value(b, load_at(b, add_bytes(b, address, 4 * k), FLOAT32))
    return call_intrinsic(b, "llvm.fma.v16f32", VF, x, factor, acc)


@_each
def add_each(b, k, x, y):
    """Token k: x[k] + y[k]."""
    return b.fadd(x, y)


@_each
def fma_each(b, k, acc, shared, address, stride):
    """Token k: shared * (the float at address + k stride) + acc[k]."""
    at = b.add(address, b.mul(stride, I64(k)))
    return call_intrinsic(b, "llvm.fma.v16f32", VF, shared, splat_value(b, load_at(b, at, FLOAT32)), acc)


@_each
def fma_near(b, k, acc, shared, address):
    """Token k: shared * (the float at address + 4k) + acc[k]."""
    return call_intrinsic(b, "llvm.fma.v16f32", VF, shared, splat_value(b, load_at(b, add_bytes(b, address, 4 * k), FLOAT32)), acc)


@intrinsic
def store_each(typingctx, address, stride, vectors):
    """Vector k to address + k stride."""

    def codegen(context, builder, sig, args):
        for k in range(vectors.count):
            at = builder.add(args[0], builder.mul(args[1], I64(k)))
            store_at(builder, at, builder.extract_value(args[2], k))
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, vectors), codegen
