"""How every kernel is compiled: no GIL, C division, cached on disk under a key of all sources (see `cpu.source_key`).

Numba links what a function calls into it and optimizes the whole again, at every level. So the large kernels stand alone behind
their addresses: `kernel` compiles one to a C function, and `call` calls an address. Only those that a model needs are compiled.
"""

from __future__ import annotations

from llvmlite import ir

from hotneuron.kernels import cpu  # noqa: F401  (sets Numba up before its import)

from numba import cfunc, types  # isort: skip
from numba import njit as _njit  # isort: skip
from numba.extending import intrinsic  # isort: skip

njit = _njit(nogil=True, cache=True, error_model="numpy")


def kernel(n_arguments: int, returns: types.Type = types.void):
    """Decorator: compile to a C function of int64 arguments, whose `.address` may be called by `call`. It must not raise."""
    return cfunc(returns(*[types.int64] * n_arguments), cache=True, error_model="numpy")


@intrinsic
def call(typingctx, address, arguments):
    """Call the C function at an address with a tuple of int64; returns nothing."""

    def codegen(context, builder, sig, args):
        i64 = ir.IntType(64)
        values = [builder.extract_value(args[1], i) for i in range(len(sig.args[1]))]
        function = ir.FunctionType(ir.VoidType(), [i64] * len(values))
        builder.call(builder.inttoptr(args[0], function.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.int64, types.UniTuple(types.int64, len(arguments))), codegen
