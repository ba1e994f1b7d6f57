"""Writing LLVM IR from Numba intrinsics: vector types, and the few instructions that the SIMD modules are made of."""

from __future__ import annotations

from llvmlite import ir

from hotneuron.kernels import cpu  # before Numba, which it sets up

from numba import types  # isort: skip
from numba.core import cgutils  # isort: skip
from numba.core.datamodel import models  # isort: skip
from numba.extending import intrinsic, register_model  # isort: skip

LANES = 16
PATH = cpu.path()
# 1.5 * 2^23: adding it rounds a small float to an integer, to nearest even, into its low bits.
MAGIC, MAGIC_BITS = 12582912.0, 0x4B400000

I8, I16, INT32, I64, FLOAT32 = ir.IntType(8), ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_ELEMENTS = {"f32": FLOAT32, "i32": INT32, "u8": I8}


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
VF, VI, VB = F32.vector, I32.vector, U8.vector
ADDRESS = types.int64


def load_at(builder, address, kind, align=1):
    """Load `kind` from an int64 address."""
    value = builder.load(builder.inttoptr(address, kind.as_pointer()))
    value.align = align
    return value


def store_at(builder, address, value, align=1):
    store = builder.store(value, builder.inttoptr(address, value.type.as_pointer()))
    store.align = align


def splat_value(builder, scalar, lanes=LANES):
    vector = ir.VectorType(scalar.type, lanes)
    single = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, INT32(0))
    return builder.shuffle_vector(single, single, ir.Constant(ir.VectorType(INT32, lanes), [0] * lanes))


def constant(vector, value):
    return ir.Constant(vector, [value] * vector.count)


def call_intrinsic(builder, name, result, *args):
    signature = ir.FunctionType(result, [a.type for a in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, signature, name), args)


def add_bytes(builder, address, n_bytes):
    return builder.add(address, n_bytes if isinstance(n_bytes, ir.Value) else I64(n_bytes))


def op(signature):
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
