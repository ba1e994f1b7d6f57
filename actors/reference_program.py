"""The step program again, in plain NumPy: `program.run` of a worker of one thread, to be read and to be believed.

HOTNEURON_REFERENCE=1 lets every worker run this instead. It speaks the same arena, so a worker cannot tell which of the
two its peers run. Nothing is kept from step to step but the KV rows; weights are unpacked whenever they are used.
"""

from __future__ import annotations

import ctypes

import numpy as np

from hotneuron.actors import arena as A
from hotneuron.actors.arena import Arena
from hotneuron.actors.tables import rope_table
from hotneuron.kernels import sync
from hotneuron.kernels.activate import activate_reference, kind_of
from hotneuron.kernels.attention import attention_reference
from hotneuron.kernels.formats import padded
from hotneuron.kernels.matmul import matmul_reference
from hotneuron.kernels.sampling import OUT_BYTES, SAMPLING_BYTES, read_sampling, write_logprobs
from hotneuron.kernels.sampling_reference import logprobs_reference, sample_reference
from hotneuron.kernels.signs import scores_reference
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Pack, head_width
from hotneuron.models.tensor_table import POSITION_OFFSET
from hotneuron.placement.plan import Plan

BLOCK = 16  # positions of a KV block


class Left(Exception):
    """The step was left, because of `code`."""

    def __init__(self, code: int):
        self.code = code


class ReferenceProgram:
    """Worker `me` of a plan, at the arena at `address`."""

    def __init__(
        self, pack: Pack, config: ModelConfig, plan: Plan, me: int, arena: Arena, address: int, deadline_ns: int
    ):
        self._pack, self._config, self._plan, self._me = pack, config, plan, me
        self._arena, self._address, self._deadline_ns = arena, address, deadline_ns
        self._shard, self._head = plan.shards[me], head_width(config)
        self._memory = np.ctypeslib.as_array((ctypes.c_uint8 * arena.n_bytes).from_address(address))
        self._slots = self._floats(arena.slots, 2, plan.n_workers, arena.max_rows, arena.width)
        self._drawn = self._ints(arena.drawn, A.MAX_LEASE, arena.max_slots)
        self._angles = rope_table(config, plan.context_tokens)
        first, last = self._shard.kv_heads(config)
        shape = config.n_layers, last - first, padded(plan.kv_tokens, BLOCK) // BLOCK, BLOCK, self._head
        self._keys, self._values = np.zeros(shape, np.float16), np.zeros(shape, np.float16)
        self._timespec = np.array([0, 100_000_000], np.int64)
        self._n_meetings = 0

    def run(self) -> int:
        """Take commands until EXIT (returns OK) or until somebody aborts (returns why)."""
        self._n_meetings = seen = 0
        try:
            while True:
                seen = self._await_command(seen)
                if self._word(self._arena.command + A.KIND) == A.EXIT:
                    return sync.OK
                self._lease()
                if self._me == 0:
                    sync.store_word(self._address + A.DONE_AT, seen)
                    sync.wake_all(self._address + A.DONE_AT)
        except Left as left:
            return left.code
        except BaseException:
            sync.store_word(self._address + A.ABORT_AT, sync.ABORTED)
            raise

    def _word(self, at: int) -> int:
        return int(sync.load_word(self._address + at))

    def _ints(self, at: int, *shape: int) -> np.ndarray:
        return self._memory[at : at + 4 * int(np.prod(shape))].view(np.int32).reshape(shape)

    def _floats(self, at: int, *shape: int) -> np.ndarray:
        return self._ints(at, *shape).view(np.float32)

    def _await_command(self, seen: int) -> int:
        while (number := self._word(A.COMMAND_AT)) == seen:
            if self._word(A.ABORT_AT) != sync.OK:
                raise Left(sync.ABORTED)
            sync.sleep_on(self._address + A.COMMAND_AT, seen & 0xFFFFFFFF, self._timespec.ctypes.data)
        return number

    def _meet(self) -> None:
        """All workers have arrived, and what each wrote before may be read."""
        self._n_meetings += 1
        counters, abort = self._address + A.WORKERS_AT, self._address + A.ABORT_AT
        sync.store_word(counters + A.LINE * self._me, self._n_meetings)
        for worker in range(self._plan.n_workers):
            code = sync.wait_for(counters + A.LINE * worker, self._n_meetings, abort, self._deadline_ns)
            if code != sync.OK:
                raise Left(code)

    def _sum(self, mine: np.ndarray | None, contributes: list[bool], n_rows: int) -> np.ndarray:
        """The sum over all workers that contribute, in their order, of what each computed: f32 [n_rows, hidden]."""
        bank = self._slots[(self._n_meetings + 1) % 2, :, :n_rows, : self._config.hidden]
        if mine is not None:
            bank[self._me] = mine
        self._meet()
        total = np.zeros(bank.shape[1:], np.float32)
        for worker in np.flatnonzero(contributes):
            total += bank[worker]
        return total

    def _lease(self) -> None:
        command, arena = self._arena.command, self._arena
        n_rows, n_logits = self._word(command + A.N_ROWS), self._word(command + A.N_LOGIT_ROWS)
        for step in range(self._word(command + A.LEASE_STEPS)):
            tokens = self._ints(arena.tokens, n_rows)
            if step > 0:
                tokens = self._drawn[step - 1, self._ints(arena.row_slots, n_rows)]
            positions = self._ints(arena.positions, n_rows) + step
            x = self._pack.values("token_embd")[tokens]
            if self._config.positions == "learned":
                x = x + self._pack.values("position_embd")[positions + POSITION_OFFSET]
            for layer in range(self._config.n_layers):
                x = self._layer(layer, x, positions)
            if n_logits > 0:
                self._logits(x, n_logits)
                self._draw(positions, n_logits, step)
            if self._me == 0:
                sync.store_word(self._address + A.STEPS_AT, step + 1)
            if self._has_ended(n_logits, step):
                break
        self._meet()  # nobody may still look at this command when the driver writes the next

    def _segment(self, index: int, field: int) -> int:
        return self._word(self._arena.segments + index * 8 * A.SEGMENT_WORDS + field)

    def _layer(self, layer: int, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        role, shards, config = f"{layer}.".__add__, self._plan.shards, self._config
        has_heads, has_neurons = [s.has_heads for s in shards], [s.has_neurons_in(layer) for s in shards]
        predicted = self._predicted(layer, x) if config.parallel else None
        normed = self._norm(x, role("attn_norm_2" if config.attn_norm_2 else "attn_norm"))
        mine = self._attention(layer, normed, positions) if self._shard.has_heads else None
        if not config.parallel:
            x = x + self._sum(mine, has_heads, len(x)) + self._bias(role("attn_output_bias"))
            mine = None
            predicted = self._predicted(layer, x)
        normed = self._norm(x, role("attn_norm" if config.parallel else "ffn_norm"))
        if self._shard.has_neurons_in(layer):
            neurons = self._neurons(layer, normed, predicted)
            mine = neurons if mine is None else mine + neurons
        contributes = [h or n for h, n in zip(has_heads, has_neurons, strict=True)] if config.parallel else has_neurons
        return x + self._sum(mine, contributes, len(x)) + self._bias(role("ffn_down_bias"))

    def _bias(self, role: str) -> np.ndarray:
        """A bias of the hidden size, or zeros."""
        hidden = self._config.hidden
        return self._pack.vector(role)[:hidden] if role in self._pack.vectors else np.zeros(hidden, np.float32)

    def _norm(self, x: np.ndarray, role: str) -> np.ndarray:
        """The model's norm of the last axis; the weight may be longer, as packs pad it."""
        weight = self._pack.vector(role)
        if self._config.norm == "rms":
            return self._rms_norm(x, weight)
        x = x - np.mean(x, axis=-1, keepdims=True, dtype=np.float32)
        mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
        return x / np.sqrt(mean + np.float32(self._config.norm_eps)) * weight[: x.shape[-1]] + self._bias(
            f"{role}_bias"
        )

    def _rms_norm(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        mean = np.mean(x * x, axis=-1, keepdims=True, dtype=np.float32)
        return x / np.sqrt(mean + np.float32(self._config.norm_eps)) * weight[: x.shape[-1]]

    def _product(self, role: str, x: np.ndarray, rows: slice = slice(None), columns: slice = slice(None)) -> np.ndarray:
        """Some of a matrix times the rows of x: f32 [rows of x, rows of the matrix]."""
        return matmul_reference(self._pack.values(role)[rows, columns], x, self._pack.matrices[role].format_id)

    def _heads(self, layer: int, name: str, normed: np.ndarray, heads: tuple[int, int]) -> np.ndarray:
        """q, k or v of a range of heads, f32 [rows, heads, head], its bias added."""
        span, role = slice(heads[0] * self._head, heads[1] * self._head), f"{layer}.{name}"
        rows = self._product(role, normed, span)
        if f"{role}_bias" in self._pack.vectors:
            rows = rows + self._pack.vector(f"{role}_bias")[span]
        return rows.reshape(len(normed), -1, self._head)

    def _turned(self, layer: int, name: str, heads: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Heads of q or k, normed where the model does that, and turned by their positions."""
        role, real, half = f"{layer}.{name}_norm", self._config.head_dim, self._config.rope.dims // 2
        if role in self._pack.vectors:
            heads[..., :real] = self._rms_norm(heads[..., :real], self._pack.vector(role))
        if self._config.positions != "rope":
            return heads
        cos, sin = self._angles[positions, None, :half], self._angles[positions, None, half:]
        a, b = heads[..., :half].copy(), heads[..., half : 2 * half].copy()
        heads[..., :half], heads[..., half : 2 * half] = a * cos - b * sin, a * sin + b * cos
        return heads

    def _attention(self, layer: int, normed: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """My heads' part of the output projection."""
        config, (first, last), kv = self._config, self._shard.heads, self._shard.kv_heads(self._config)
        q = self._turned(layer, "attn_q", self._heads(layer, "attn_q", normed, (first, last)), positions)
        k = self._turned(layer, "attn_k", self._heads(layer, "attn_k", normed, kv), positions)
        v = self._heads(layer, "attn_v", normed, kv)
        q = q * np.float32(1 / np.sqrt(config.head_dim))
        out = np.zeros((len(normed), config.n_heads, self._head), np.float32)  # zeros for the heads of others
        tables = self._ints(self._arena.tables, self._arena.max_slots, self._arena.max_blocks)
        for s in range(self._word(self._arena.command + A.N_SEGMENTS)):
            row, count = self._segment(s, A.SEGMENT_ROW), self._segment(s, A.SEGMENT_COUNT)
            rows, at = slice(row, row + count), positions[row : row + count]
            table = tables[self._segment(s, A.SEGMENT_SLOT), : at[-1] // BLOCK + 1]
            for h in range(kv[1] - kv[0]):
                keys, values = self._keys[layer, h], self._values[layer, h]
                keys[table[at // BLOCK], at % BLOCK] = k[rows, h]
                values[table[at // BLOCK], at % BLOCK] = v[rows, h]
            for head in range(first, last):
                h = head // (config.n_heads // config.n_kv_heads) - kv[0]
                keys, values = (c[layer, h, table].reshape(-1, self._head) for c in (self._keys, self._values))
                out[rows, head] = attention_reference(q[rows, head - first], keys, values, at, config.sliding_window)
        return self._product(f"{layer}.attn_output", out.reshape(len(normed), -1))

    def _predicted(self, layer: int, x: np.ndarray) -> np.ndarray | None:
        """relu(fc1 x) f32 [rows, rank], of whose rows each worker computes a part; None where nothing predicts."""
        if f"{layer}.fc1" not in self._pack.matrices:
            return None
        rank, n = self._pack.matrices[f"{layer}.fc1"].rows, self._plan.n_workers
        tiles = padded(rank, 16) // 16
        cuts = [slice(16 * (tiles * w // n), min(rank, 16 * (tiles * (w + 1) // n))) for w in range(n)]
        bank = self._slots[(self._n_meetings + 1) % 2, :, : len(x)]
        bank[self._me, :, cuts[self._me]] = self._product(f"{layer}.fc1", x, cuts[self._me])
        self._meet()
        return np.maximum(np.concatenate([bank[w, :, cut] for w, cut in enumerate(cuts)], axis=1), np.float32(0))

    def _active(self, layer: int, normed: np.ndarray, predicted: np.ndarray | None, gate: np.ndarray) -> np.ndarray:
        """Which of my neurons count, bool [rows, neurons]; gate: their activated first product."""
        config, mine = self._config, self._mine(layer)
        threshold = config.sparse_threshold if predicted is not None else 0.0
        if self._plan.thresholds:
            threshold = self._plan.thresholds[layer]
        if predicted is not None:
            return self._product(f"{layer}.fc2", predicted, mine) >= np.float32(threshold)
        if f"{layer}.ffn_signs" in self._pack.matrices:
            return scores_reference(self._pack.values(f"{layer}.ffn_signs")[mine], normed) >= np.float32(threshold)
        return np.abs(gate) >= np.float32(threshold)

    def _mine(self, layer: int) -> slice:
        first, last = self._shard.neurons[layer]
        return slice(first, min(last, self._config.ffn))

    def _neurons(self, layer: int, normed: np.ndarray, predicted: np.ndarray | None) -> np.ndarray:
        """My neurons' part of the FFN, where only some count: all computed, and the others taken for 0."""
        mine = self._mine(layer)
        config, up = self._config, self._product(f"{layer}.ffn_up", normed, mine)
        if config.linear_bias:
            up = up + self._pack.vector(f"{layer}.ffn_up_bias")[mine]
        gate = self._product(f"{layer}.ffn_gate", normed, mine) if config.gated else up
        kind = kind_of(config.activation, config.up_activation, config.gated)
        values = activate_reference(kind, gate, up)
        if self._pack.matrices[f"{layer}.ffn_down"].layout == "tiles":
            return self._product(f"{layer}.ffn_down", values, columns=mine)
        values *= self._active(layer, normed, predicted, activate_reference(kind & 3, gate, None))
        weights = np.ascontiguousarray(self._pack.values(f"{layer}.ffn_down")[mine].T)
        return matmul_reference(weights, values, self._pack.matrices[f"{layer}.ffn_down"].format_id)

    def _logits(self, x: np.ndarray, n_logits: int) -> None:
        """Logits of my vocabulary rows."""
        arena, (first, last) = self._arena, self._shard.vocab_tiles
        rows = x[self._ints(arena.logit_rows, n_logits)]
        normed = self._norm(rows, "output_norm")
        mine = slice(16 * first, min(16 * last, self._config.vocab))
        role = "token_embd" if self._config.tied_embeddings else "output"
        self._floats(arena.logits, n_logits, arena.vocab)[:, mine] = self._product(role, normed, mine)
        self._meet()

    def _draw(self, positions: np.ndarray, n_logits: int, step: int) -> None:
        """Draw the next token of each sampled segment; the segments are dealt to the workers."""
        arena, vocab = self._arena, self._config.vocab
        for i, s in enumerate(self._ints(arena.logit_segments, n_logits).tolist()):
            if s < 0 or i % self._plan.n_workers != self._me:
                continue
            slot = self._segment(s, A.SEGMENT_SLOT)
            n_history = self._segment(s, A.SEGMENT_HISTORY) + step
            history = self._ints(arena.history_of(slot), A.HISTORY_TOKENS + A.MAX_LEASE)
            recent = history[n_history - min(self._segment(s, A.SEGMENT_LAST), n_history) : n_history].tolist()
            logits = self._floats(arena.logits, n_logits, arena.vocab)[i, :vocab]
            at = arena.sampling + slot * SAMPLING_BYTES
            parameters = read_sampling(self._memory[at : at + SAMPLING_BYTES])
            position = int(positions[self._ints(arena.logit_rows, n_logits)[i]]) + 1
            token = sample_reference(logits, recent, position, **parameters)
            if parameters["logprobs"] is not None:
                logprobs = logprobs_reference(logits)
                top = np.argsort(-logprobs, kind="stable")[: parameters["logprobs"]]
                at = arena.logprobs + (step * arena.max_slots + slot) * OUT_BYTES
                write_logprobs(self._memory[at : at + OUT_BYTES], logprobs[token], [(t, logprobs[t]) for t in top])
            self._drawn[step, slot] = history[n_history] = token
        self._meet()

    def _has_ended(self, n_logits: int, step: int) -> bool:
        """A sequence drew a stop id: the lease ends."""
        stop_ids = self._ints(self._arena.stop_ids, A.MAX_STOP_IDS)[: self._word(self._arena.command + A.N_STOP)]
        segments = [s for s in self._ints(self._arena.logit_segments, n_logits).tolist() if s >= 0]
        heeding = [s for s in segments if not self._segment(s, A.SEGMENT_IGNORE_STOP)]
        return any(self._drawn[step, self._segment(s, A.SEGMENT_SLOT)] in stop_ids for s in heeding)
