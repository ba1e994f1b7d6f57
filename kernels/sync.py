"""How threads and processes meet: atomic words, spinning politely, and the Linux futex.

A wait spins with `pause` for some microseconds, then yields its core between looks, so that it stays correct, and the
others get their turn, on a machine with fewer cores than threads.
"""

from __future__ import annotations

import platform

from llvmlite import ir

from hotneuron.kernels.jit import njit  # before Numba, which it sets up
from hotneuron.kernels.memory import get_i64

from numba import types  # isort: skip
from numba.core import cgutils  # isort: skip
from numba.extending import intrinsic  # isort: skip

_I32, _I64 = ir.IntType(32), ir.IntType(64)
_X86 = platform.machine() in ("x86_64", "AMD64")
SYS_FUTEX = 202 if _X86 else 98
FUTEX_WAIT, FUTEX_WAKE = 0, 1

SPINS_BEFORE_YIELD = 400
LOOKS_BEFORE_CLOCK = 64

OK, ABORTED, LATE = 0, 1, 2

_syscall = types.ExternalFunction("syscall", types.int64(*[types.int64] * 7))
_sched_yield = types.ExternalFunction("sched_yield", types.int32())
_clock_gettime = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.int64))


@intrinsic
def load_acquire(typingctx, address):
    """The int64 at an address; nothing after it is read before it."""

    def codegen(context, builder, sig, args):
        return builder.load_atomic(builder.inttoptr(args[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def store_release(typingctx, address, value):
    """Write an int64 after all earlier writes."""

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[1], builder.inttoptr(args[0], _I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def fetch_add(typingctx, address, value):
    """Add to an int64; returns what it was."""

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _I64.as_pointer()), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def pause(typingctx):
    """Tell the core that this is a spin."""

    def codegen(context, builder, sig, args):
        if _X86:
            name = "llvm.x86.sse2.pause"
            builder.call(cgutils.get_or_insert_function(builder.module, ir.FunctionType(ir.VoidType(), []), name), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _timespec(typingctx):
    """The address of 16 bytes on the stack."""

    def codegen(context, builder, sig, args):
        room = cgutils.alloca_once(builder, ir.ArrayType(_I64, 2))
        return builder.ptrtoint(room, _I64)

    return types.int64(), codegen


@njit
def now_ns():
    """The monotonic clock; a change of the wall clock does not move it."""
    at = _timespec()
    _clock_gettime(1, at)
    return get_i64(at) * 1_000_000_000 + get_i64(at + 8)


@njit
def yield_core():
    _sched_yield()


@njit
def wake_all(address):
    """Wake every thread, of any process, that sleeps on the 32-bit word at an address."""
    _syscall(SYS_FUTEX, address, FUTEX_WAKE, 2147483647, 0, 0, 0)


@njit
def sleep_on(address, seen, timespec_address):
    """Sleep while the 32-bit word at an address is `seen`, at most for the timespec (seconds, nanoseconds)."""
    _syscall(SYS_FUTEX, address, FUTEX_WAIT, seen, timespec_address, 0, 0)


@njit
def load_word(address):
    """`load_acquire` for Python callers."""
    return load_acquire(address)


@njit
def store_word(address, value):
    """`store_release` for Python callers."""
    store_release(address, value)


@njit
def wait_for(address, target, abort, deadline_ns):
    """Wait until the counter at an address has reached `target`. Returns OK, ABORTED (the abort word is set) or LATE.

    `deadline_ns` counts from now; a wait that passes it sets the abort word, so that nobody else waits for long.
    """
    for _ in range(SPINS_BEFORE_YIELD):
        if load_acquire(address) >= target:
            return OK
        pause()
    end = now_ns() + deadline_ns
    while True:
        for _ in range(LOOKS_BEFORE_CLOCK):
            if load_acquire(address) >= target:
                return OK
            if load_acquire(abort) != 0:
                return ABORTED
            yield_core()
        if now_ns() > end:
            store_release(abort, LATE)
            return LATE


@njit
def team_barrier(counter, n_threads, turn, abort, deadline_ns):
    """Meet the other threads of a team for the `turn`-th time (from 1). Returns as `wait_for`."""
    if n_threads == 1:
        return OK
    fetch_add(counter, 1)
    return wait_for(counter, turn * n_threads, abort, deadline_ns)
