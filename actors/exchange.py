"""The exchange: an arena in Ray's object store, written by every process that holds its ObjectRef.

A `ray.put` array of more than 100 KB lives in shared memory, and every actor of the node maps the same pages; only
NumPy marks its view read-only. `attach` proves the sharing with a nonce, so that a worker on another node, which got a
copy, is an error.
"""

from __future__ import annotations

import ctypes
import secrets
from collections.abc import Sequence as ListLike
from dataclasses import asdict

import numpy as np

from hotneuron.actors import arena as A
from hotneuron.actors.activity import ActivityCounts
from hotneuron.actors.arena import Arena
from hotneuron.actors.batch import Batch
from hotneuron.actors.messages import SamplingParams
from hotneuron.kernels import sync
from hotneuron.kernels.sampling import OUT_BYTES, SAMPLING_BYTES, read_logprobs, write_sampling
from hotneuron.models.errors import EngineError
from hotneuron.placement.histogram import BINS

_WAIT_NS = 50_000_000


class Exchange:
    """The driver's end: gives commands, waits, reads results. `memory` is the arena as any process sees it."""

    def __init__(self, memory: np.ndarray, arena: Arena):
        assert memory.nbytes >= arena.n_bytes and memory.ctypes.data % A.LINE == 0
        self.arena, self._keep = arena, memory
        self.address = memory.ctypes.data
        self.view = np.ctypeslib.as_array((ctypes.c_uint8 * arena.n_bytes).from_address(self.address))
        self.nonce = secrets.randbits(62)
        self._words = self.view.view(np.int64)
        self._timespec = np.array([0, _WAIT_NS], np.int64)
        self._put(A.MAGIC_AT, A.MAGIC)
        self._put(A.VERSION_AT, A.VERSION)
        self._put(A.NONCE_AT, self.nonce)
        self._tokens = self._array(arena.tokens, arena.max_rows)
        self._positions = self._array(arena.positions, arena.max_rows)
        self._row_slots = self._array(arena.row_slots, arena.max_rows)
        self._logit_rows = self._array(arena.logit_rows, arena.max_logit_rows)
        self._logit_segments = self._array(arena.logit_segments, arena.max_logit_rows)
        self._tables = self._array(arena.tables, arena.max_slots * arena.max_blocks).reshape(arena.max_slots, -1)
        self._drawn = self._array(arena.drawn, A.MAX_LEASE * arena.max_slots).reshape(A.MAX_LEASE, -1)
        self._stop_ids = self._array(arena.stop_ids, A.MAX_STOP_IDS)
        history_tokens = A.HISTORY_TOKENS + A.MAX_LEASE
        self._histories = [self._array(arena.history_of(slot), history_tokens) for slot in range(arena.max_slots)]
        self._sampling_of: list[object] = [None] * arena.max_slots

    def _array(self, at: int, n: int, dtype: type = np.int32) -> np.ndarray:
        return self.view[at : at + n * np.dtype(dtype).itemsize].view(dtype)

    def _put(self, at: int, value: int) -> None:
        self._words[at // 8] = value

    def _get(self, at: int) -> int:
        return int(self._words[at // 8])

    @property
    def aborted(self) -> bool:
        return self._get(A.ABORT_AT) != sync.OK

    def abort(self) -> None:
        """Make every thread of every worker leave its step."""
        sync.store_word(self.address + A.ABORT_AT, sync.ABORTED)
        sync.wake_all(self.address + A.COMMAND_AT)

    def reset(self) -> None:
        """Back to the first command and meeting. NOTE only while no worker runs."""
        for at in (A.COMMAND_AT, A.DONE_AT, A.STEPS_AT):
            self._put(at, 0)
        for w in range(A.MAX_WORKERS):
            self._put(A.WORKERS_AT + w * A.LINE, 0)
        sync.store_word(self.address + A.ABORT_AT, sync.OK)

    def set_stop_ids(self, ids: ListLike[int]) -> None:
        assert len(ids) <= A.MAX_STOP_IDS
        self._stop_ids[: len(ids)] = ids
        self._put(self.arena.command + A.N_STOP, len(ids))

    def command(self, batch: Batch) -> None:
        """Give a batch to the workers."""
        row, n_logits, words = 0, 0, self._words
        for s, segment in enumerate(batch.segments):
            n, slot, request = len(segment.tokens), segment.slot, segment.sequence.request
            self._tokens[row : row + n] = segment.tokens
            self._positions[row : row + n] = range(segment.start, segment.start + n)
            self._row_slots[row : row + n] = slot
            table = segment.sequence.block_table
            self._tables[slot, : len(table)] = table
            n_history = 0
            if segment.sample:
                if self._sampling_of[slot] is not request.sampling:
                    self._write_sampling(slot, request.sampling)
                recent = segment.sequence.tokens[-A.HISTORY_TOKENS :]
                n_history = len(recent)
                if request.sampling.penalty_last_tokens:
                    self._histories[slot][:n_history] = recent
                self._logit_rows[n_logits], self._logit_segments[n_logits] = row + n - 1, s
                n_logits += 1
            at = (self.arena.segments + s * A.SEGMENT_WORDS * 8) // 8
            words[at : at + 6] = slot, row, n, n_history, request.sampling.penalty_last_tokens, request.ignore_eos
            row += n
        self._give(A.RUN, row, len(batch.segments), batch.lease_steps, n_logits)

    def command_scored(self, tokens: ListLike[int], start: int, table: ListLike[int], n_logits: int) -> None:
        """Give one sequence's rows, with logits of the last n_logits of them and nothing drawn."""
        n = len(tokens)
        self._tokens[:n], self._positions[:n], self._row_slots[:n] = tokens, range(start, start + n), 0
        self._tables[0, : len(table)] = table
        self._logit_rows[:n_logits], self._logit_segments[:n_logits] = range(n - n_logits, n), -1
        at = self.arena.segments // 8
        self._words[at : at + 6] = 0, 0, n, 0, 0, 1
        self._sampling_of[0] = None
        self._give(A.RUN, n, 1, 1, n_logits)

    def exit(self) -> None:
        """End every worker's threads."""
        self._give(A.EXIT, 0, 0, 0, 0)

    def _write_sampling(self, slot: int, sampling: SamplingParams) -> None:
        write_sampling(self.address + self.arena.sampling + slot * SAMPLING_BYTES, **asdict(sampling))
        self._sampling_of[slot] = sampling

    def _give(self, kind: int, n_rows: int, n_segments: int, steps: int, n_logits: int) -> None:
        assert n_rows <= self.arena.max_rows and n_segments <= self.arena.max_slots
        assert n_logits <= self.arena.max_logit_rows
        assert steps <= A.MAX_LEASE
        at = self.arena.command // 8
        self._words[at : at + 5] = kind, n_rows, n_segments, steps, n_logits
        self._put(A.STEPS_AT, 0)
        sync.store_word(self.address + A.COMMAND_AT, self._get(A.COMMAND_AT) + 1)
        sync.wake_all(self.address + A.COMMAND_AT)

    def wait(self) -> bool:
        """Sleep until the last command is done (True), or for a while (False)."""
        done = self._get(A.DONE_AT)
        if done == self._get(A.COMMAND_AT):
            return True
        sync.sleep_on(self.address + A.DONE_AT, done & 0xFFFFFFFF, self._timespec.ctypes.data)
        return sync.load_word(self.address + A.DONE_AT) == self._get(A.COMMAND_AT)

    def drawn(self, batch: Batch) -> dict[int, list[int]]:
        """Tokens drawn so far in this lease, by slot."""
        steps = self._get(A.STEPS_AT)
        return {s.slot: self._drawn[:steps, s.slot].tolist() for s in batch.segments if s.sample}

    def logprobs(self, slot: int, step: int) -> tuple[float, tuple[tuple[int, float], ...]]:
        at = self.arena.logprobs + (step * self.arena.max_slots + slot) * OUT_BYTES
        return read_logprobs(self.view[at : at + OUT_BYTES])

    def logits(self, n_rows: int, vocab: int) -> np.ndarray:
        """f32 [n_rows, vocab] of the last command; a view, good until the next."""
        rows = self._array(self.arena.logits, n_rows * self.arena.vocab, np.float32)
        return rows.reshape(n_rows, -1)[:, :vocab]

    def activity(self) -> ActivityCounts:
        """What fired so far; copies, taken while the workers go on counting."""
        a = self.arena
        lines = self._array(a.layer_counts, a.n_workers * a.n_layers * A.LINE // 8, np.int64)
        counts = lines.reshape(a.n_workers, a.n_layers, -1)
        histogram = np.zeros((a.n_layers, BINS), np.int64)
        if a.has_histogram:
            every = self._array(a.histogram, a.n_workers * a.n_layers * BINS, np.int64)
            histogram = every.reshape(a.n_workers, a.n_layers, -1).sum(axis=0)
        shape = a.n_layers, a.neurons
        return ActivityCounts(
            counts[..., A.COUNTED // 8].max(axis=0),
            counts[..., A.LISTS // 8].max(axis=0),
            counts[..., A.LISTED // 8].sum(axis=0),
            self._array(a.fires, a.n_layers * a.neurons).reshape(shape).astype(np.int64),
            self._array(a.adds, a.n_layers * a.neurons, np.float32).reshape(shape).astype(np.float64),
            histogram,
        )

    def clear_activity(self) -> None:
        """Count from zero, as when neurons change their places. NOTE only while no worker runs."""
        a = self.arena
        self._array(a.layer_counts, a.n_workers * a.n_layers * A.LINE // 8, np.int64)[:] = 0
        if a.has_histogram:
            self._array(a.histogram, a.n_workers * a.n_layers * BINS, np.int64)[:] = 0
        self._array(a.fires, a.n_layers * a.neurons)[:] = 0
        self._array(a.adds, a.n_layers * a.neurons, np.float32)[:] = 0

    def trace_ns(self) -> np.ndarray:
        """int64 [worker][phase] since the engine began, zeros where it is not traced; phases as in `fields.PHASES`."""
        if not self.arena.is_traced:
            return np.zeros((self.arena.n_workers, A.TRACED_PHASES), np.int64)
        every = self._array(self.arena.trace, self.arena.n_workers * A.TRACED_PHASES, np.int64)
        return every.reshape(self.arena.n_workers, -1).copy()


def attach(memory: np.ndarray, arena: Arena, nonce: int) -> int:
    """The address of an arena in this process. Raises EngineError if it is not the driver's own memory."""
    words = memory[: A.PAGE].view(np.int64)
    if words[A.MAGIC_AT // 8] != A.MAGIC or words[A.VERSION_AT // 8] != A.VERSION or words[A.NONCE_AT // 8] != nonce:
        raise EngineError(
            "this worker does not share memory with its driver; all actors of an engine must be on one node: "
            "give its placement group the strategy STRICT_PACK"
        )
    assert memory.nbytes >= arena.n_bytes
    return memory.ctypes.data
