"""A worker: one shard of a model, computed by a standing team of threads that take commands from the exchange.

The hot and the cold workers are the same program over different shards. Knows nothing of requests, nor of Ray.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from hotneuron.actors import fields, program, tables
from hotneuron.actors.arena import LINE, WORKERS_AT, Arena
from hotneuron.actors.exchange import attach
from hotneuron.kernels import knobs
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Pack
from hotneuron.placement.plan import Plan


class Worker:
    """Holds the tables of one shard and runs its threads, from `start` to `stop` or the driver's EXIT."""

    def __init__(self, pack_path: Path, config: ModelConfig, plan: Plan, me: int, n_threads: int):
        self.pack, self.config, self.plan = Pack(pack_path), config, plan
        self._is_reference = knobs.REFERENCE.get()
        self.me, self.n_threads = me, 1 if self._is_reference else n_threads
        self._threads: list[threading.Thread] = []
        self._tables: tables.Tables | None = None
        self._memory: np.ndarray | None = None
        self.codes: list[int] = []

    def start(self, memory: np.ndarray, arena: Arena, nonce: int) -> int:
        """Attach to an arena and begin to take its commands; returns this process's id."""
        self.join(0)
        address = attach(memory, arena, nonce)
        self._memory = memory  # NOTE the object store frees the arena when its last reader goes
        run = self._reference(arena, address) if self._is_reference else self._compiled(arena, address)
        pid_at = ctypes.c_int64.from_address(address + WORKERS_AT + LINE * self.me + 8)
        pid_at.value = os.getpid()
        self.codes = []
        self._threads = [
            threading.Thread(target=self._run, args=(run, i), name=f"hotneuron-{self.me}-{i}", daemon=True)
            for i in range(self.n_threads)
        ]
        for thread in self._threads:
            thread.start()
        return os.getpid()

    def _compiled(self, arena: Arena, address: int) -> Callable[[int], int]:
        deadline_ns = knobs.DEADLINE_MS.get() * 1_000_000
        if self._tables is None or self._tables.p[fields.ARENA] != address:
            shard = self.pack, self.config, self.plan, self.me, self.n_threads
            self._tables = tables.build(*shard, arena, address, deadline_ns)
        t = self._tables
        ctypes.memset(t.states, 0, 64 * self.n_threads)
        ctypes.memset(int(t.p[fields.TEAM]), 0, 64)
        return lambda thread: program.run(t.p, t.layers, thread, t.states + 64 * thread)

    def _reference(self, arena: Arena, address: int) -> Callable[[int], int]:
        from hotneuron.actors.reference_program import ReferenceProgram

        deadline_ns = knobs.DEADLINE_MS.get() * 1_000_000
        reference = ReferenceProgram(self.pack, self.config, self.plan, self.me, arena, address, deadline_ns)
        return lambda thread: reference.run()

    def _run(self, run: Callable[[int], int], thread: int) -> None:
        self.codes.append(run(thread))

    def join(self, timeout_s: float | None) -> bool:
        """Wait until all threads have left the program."""
        for thread in self._threads:
            thread.join(timeout_s)
        if any(thread.is_alive() for thread in self._threads):
            return False
        self._threads = []
        return True

    def describe(self) -> dict[str, int]:
        shard = self.plan.shards[self.me]
        return {
            "pid": os.getpid(),
            "threads": self.n_threads,
            "weight_bytes": shard.weight_bytes,
            "memory_bytes": self._tables.memory.n_bytes if self._tables else 0,
        }


def compile_program() -> None:
    """Compile the step program, or load it from the cache, without running it."""
    if knobs.REFERENCE.get():
        return
    from numba import int64

    program.run.compile((int64[::1], int64[:, ::1], int64, int64))
