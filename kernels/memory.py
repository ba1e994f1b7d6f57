"""Scalars at int64 addresses. NOTE nothing checks these addresses: callers pass only what the plan and the pack laid out."""

from __future__ import annotations

from llvmlite import ir

from hotneuron.kernels import cpu  # noqa: F401  (before Numba, which it sets up)

from numba import types  # isort: skip
from numba.extending import intrinsic  # isort: skip

_TYPES = {"f32": (types.float32, ir.FloatType()), "i32": (types.int32, ir.IntType(32)), "i64": (types.int64, ir.IntType(64)),
          "u8": (types.uint8, ir.IntType(8)), "u16": (types.uint16, ir.IntType(16))}  # fmt: skip


def _get(kind):
    numba_type, llvm_type = _TYPES[kind]

    @intrinsic
    def get(typingctx, address):
        def codegen(context, builder, sig, args):
            value = builder.load(builder.inttoptr(args[0], llvm_type.as_pointer()))
            value.align = 1
            return value

        return numba_type(types.int64), codegen

    return get


def _put(kind):
    numba_type, llvm_type = _TYPES[kind]

    @intrinsic
    def put(typingctx, address, value):
        def codegen(context, builder, sig, args):
            store = builder.store(args[1], builder.inttoptr(args[0], llvm_type.as_pointer()))
            store.align = 1
            return context.get_dummy_value()

        return types.void(types.int64, numba_type), codegen

    return put


get_f32, get_i32, get_i64, get_u8, get_u16 = (_get(kind) for kind in ("f32", "i32", "i64", "u8", "u16"))
put_f32, put_i32, put_i64, put_u8 = (_put(kind) for kind in ("f32", "i32", "i64", "u8"))
