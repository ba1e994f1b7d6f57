"""The tables that the step program reads: where a worker's shard of the weights, its memory and the arena lie."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotneuron.actors import fields as P
from hotneuron.actors.arena import TRACED_PHASES, WORKERS_AT, Arena
from hotneuron.actors.ffn_tables import put_ffn, put_sparse_memory
from hotneuron.actors.held_weights import HeldWeights, put_columns, put_rows
from hotneuron.actors.meeting import part
from hotneuron.actors.worker_memory import Memory, copy_to, inputs_of
from hotneuron.kernels import formats
from hotneuron.kernels.activate import kind_of
from hotneuron.kernels.attention import GROUP_SIZES as QUERY_GROUPS
from hotneuron.kernels.attention import attend_address, head_block_bytes
from hotneuron.kernels.formats import padded
from hotneuron.kernels.matmul import tile_address
from hotneuron.kernels.sampling import sample_address
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Pack, head_width
from hotneuron.placement.plan import Plan
from hotneuron.placement.worker_areas import (
    BatchSizes,
    is_sparse,
    output_columns,
    qkv_stride,
    scores_stride,
    thread_areas,
    thread_stride,
    worker_areas,
)

_THREAD_WORDS = {
    "row": P.T_ROW, "queries": P.T_QUERIES, "positions": P.T_POSITIONS, "heads": P.T_HEADS, "scores": P.T_SCORES,
    "gate": P.T_GATE, "up": P.T_UP, "sample": P.T_SAMPLE, "tile": P.T_TILE, "rows": P.T_ROWS, "down": P.T_DOWN,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tables:
    p: np.ndarray  # int64 [P_SIZE]
    layers: np.ndarray  # int64 [n_layers, LAYER_SIZE]
    memory: Memory  # what the addresses in them point to, besides weights and arena
    held: HeldWeights  # and the weights
    states: int  # address of 64 bytes a thread


def _layer_table(held: HeldWeights, config: ModelConfig, plan: Plan, me: int) -> np.ndarray:
    table = np.zeros((config.n_layers, P.LAYER_SIZE), np.int64)
    shard, head = plan.shards[me], head_width(config)
    heads, kv = shard.heads, shard.kv_heads(config)

    for layer in range(config.n_layers):
        row, name, neurons = table[layer], f"{layer}.".__add__, shard.neurons[layer]
        attn_norm = "attn_norm_2" if config.attn_norm_2 else "attn_norm"
        ffn_norm = "attn_norm" if config.parallel else "ffn_norm"
        for at, role in ((P.ATTN_NORM, attn_norm), (P.ATTN_NORM_BIAS, f"{attn_norm}_bias"), (P.FFN_NORM, ffn_norm),
                         (P.FFN_NORM_BIAS, f"{ffn_norm}_bias"), (P.O_BIAS, "attn_output_bias")):  # fmt: skip
            row[at] = held.vector(name(role))
        q = put_rows(row, P.Q, held, name("attn_q"), (heads[0] * head, heads[1] * head))
        k = put_rows(row, P.K, held, name("attn_k"), (kv[0] * head, kv[1] * head))
        v = put_rows(row, P.V, held, name("attn_v"), (kv[0] * head, kv[1] * head))
        o = put_columns(row, P.O, held, name("attn_output"), output_columns(shard, config))
        row[P.QKV_INPUT], row[P.O_INPUT] = inputs_of(q, k, v), inputs_of(o)
        put_ffn(row, held, layer, neurons, _fc1_tiles(held.pack, layer, plan.n_workers, me))
        row[P.FIRST_NEURON : P.LAST_NEURON + 1] = neurons
        row[P.MASK_BEFORE] = _ffn_mask(plan, config, layer - 1) if layer > 0 else 0
        if config.parallel and not config.attn_norm_2:  # one input for both
            row[P.QKV_INPUT] |= row[P.FFN_INPUT]
        if layer > 0:
            row[P.IN_BIAS] = held.vector(f"{layer - 1}.ffn_down_bias")
        for at, role in ((P.Q_BIAS, "attn_q_bias"), (P.K_BIAS, "attn_k_bias"), (P.V_BIAS, "attn_v_bias"),
                         (P.Q_NORM, "attn_q_norm"), (P.K_NORM, "attn_k_norm")):  # fmt: skip
            row[at] = held.vector(name(role))
    return table


def _fc1_tiles(pack: Pack, layer: int, n_workers: int, me: int) -> tuple[int, int]:
    """Of a predictor's first layer, which all workers share evenly, the tiles that are mine."""
    fc1 = pack.matrices.get(f"{layer}.fc1")
    return part.py_func(padded(fc1.rows, 16) // 16, me, n_workers) if fc1 is not None else (0, 0)


def _ffn_mask(plan: Plan, config: ModelConfig, layer: int) -> int:
    """Bit w: worker w has a partial sum when this layer ends; side by side with the FFN, attention is in it."""
    has_part = (s.has_neurons_in(layer) or (config.parallel and s.has_heads) for s in plan.shards)
    return sum(1 << w for w, has in enumerate(has_part) if has)


def rope_table(config: ModelConfig, context_tokens: int) -> np.ndarray:
    """f32 [context, dims]: cosines, then sines, of every pair's angle at every position."""
    frequencies, scale = config.rope.inverse_frequencies()
    angles = np.arange(context_tokens, dtype=np.float32)[:, None] * frequencies.astype(np.float32)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32) * np.float32(scale)


def build(pack: Pack, config: ModelConfig, plan: Plan, me: int, n_threads: int, arena: Arena, address: int, deadline_ns: int) -> Tables:
    """The tables of worker `me`; allocates its rows, KV cache and scratch. address: where this process sees the arena."""
    assert not (config.parallel and config.linear_bias), "a parallel layer has one meeting, and a meeting one bias"
    shard, memory, held, p = plan.shards[me], Memory(), HeldWeights(pack), np.zeros(P.P_SIZE, np.int64)
    head, kv, wide = head_width(config), shard.kv_heads(config), padded(config.hidden, 64)
    n_kv, n_q = kv[1] - kv[0], shard.heads[1] - shard.heads[0]
    o_low, o_high = output_columns(shard, config)
    areas = worker_areas(pack.matrices, config, plan, me, BatchSizes(arena.max_rows, arena.max_logit_rows), n_threads)
    at_area = {name: memory.take(n_bytes) for name, n_bytes in areas.items()}
    output_role = "token_embd" if config.tied_embeddings else "output"
    output, embedding, embedding_at = pack.matrices[output_role], pack.matrices["token_embd"], held.whole("token_embd")
    if config.tied_embeddings:
        output_at = embedding_at + shard.vocab_tiles[0] * output.tile_bytes
    else:
        output_at = held.mapped("output", *(tile * output.tile_bytes for tile in shard.vocab_tiles))
    floats, rope = np.array([1 / np.sqrt(config.head_dim), config.norm_eps], np.float32), rope_table(config, plan.context_tokens)
    assert rope.nbytes <= areas["rope"]
    for name, values in (("constants", floats), ("rope", rope)):
        copy_to(at_area[name], values)
    kernels = at_area["kernels"]
    attend_kernels = kernels + 8 * P.GROUP_SIZES * len(formats.NAMES)
    for i, n in enumerate((1, 4, 8)):
        for format_id in {m.format_id for m in pack.matrices.values() if not m.layout.startswith("down")}:
            copy_to(kernels + 8 * (P.GROUP_SIZES * format_id + i), np.array([tile_address(format_id, n)]))
    for i, n in enumerate(QUERY_GROUPS):
        copy_to(attend_kernels + 8 * i, np.array([attend_address(n)]))
    max_kv_blocks = padded(plan.kv_tokens, 16) // 16
    kv_block_bytes = n_kv * head_block_bytes(head)
    thread_at = 0
    for name, n_bytes in thread_areas(pack.matrices, config, plan).items():
        p[_THREAD_WORDS[name]] = thread_at
        thread_at += padded(n_bytes, 128)
    attention_mask = sum(1 << w for w, s in enumerate(plan.shards) if s.has_heads)
    values = {
        P.ARENA: address, P.N_WORKERS: plan.n_workers, P.ME: me, P.N_THREADS: n_threads, P.TEAM: at_area["team"],
        P.DEADLINE_NS: deadline_ns, P.COUNTERS: address + WORKERS_AT, P.COMMAND: address + arena.command,
        P.SEGMENTS: address + arena.segments, P.STOP_IDS: address + arena.stop_ids, P.TOKENS: address + arena.tokens,
        P.POSITIONS: address + arena.positions, P.ROW_SLOTS: address + arena.row_slots,
        P.LOGIT_ROWS: address + arena.logit_rows, P.LOGIT_SEGMENTS: address + arena.logit_segments,
        P.TABLES: address + arena.tables, P.SAMPLING: address + arena.sampling, P.HISTORY: address + arena.history,
        P.DRAWN: address + arena.drawn, P.LOGPROBS: address + arena.logprobs, P.LOGITS: address + arena.logits,
        P.SLOTS: address + arena.slots, P.BANK_BYTES: arena.bank_bytes(), P.SLOT_BYTES: arena.max_rows * arena.width * 4,
        P.MAX_SLOTS: arena.max_slots, P.MAX_BLOCKS: arena.max_blocks, P.HIDDEN: config.hidden, P.WIDTH: arena.width,
        P.WIDE: wide, P.VOCAB: config.vocab, P.LOGIT_STRIDE: arena.vocab, P.N_LAYERS: config.n_layers,
        P.HEAD_DIM: config.head_dim, P.HEAD: head, P.ROPE_DIMS: config.rope.dims if config.positions == "rope" else 0, P.ROPE: at_area["rope"], P.QUERY_SCALE: at_area["constants"],
        P.EPS: at_area["constants"] + 4, P.WINDOW: config.sliding_window, P.GROUP_HEADS: config.n_heads // config.n_kv_heads,
        P.ATTENTION_MASK: attention_mask, P.FFN_MASK: _ffn_mask(plan, config, config.n_layers - 1), P.LAYER_NORM: config.norm == "layer",
        P.ACTIVATION: kind_of(config.activation, config.up_activation, config.gated), P.PARALLEL: config.parallel,
        P.FIRST_HEAD: shard.heads[0], P.LAST_HEAD: shard.heads[1],
        P.FIRST_KV: kv[0], P.LAST_KV: kv[1], P.Q_TILES: n_q * head // 16, P.K_TILES: n_kv * head // 16,
        P.O_COLUMNS: o_high - o_low, P.O_SKEW: 4 * (shard.heads[0] * head - o_low), P.NEURON_UNITS: shard.most_neurons // P.UNIT,
        P.VOCAB_TILE: shard.vocab_tiles[0], P.VOCAB_TILES: shard.vocab_tiles[1] - shard.vocab_tiles[0],
        P.EMBEDDING: embedding_at, P.EMBEDDING_FORMAT: embedding.format_id,
        P.EMBEDDING_TILE: embedding.tile_bytes, P.OUTPUT_NORM: held.vector("output_norm"),
        P.OUTPUT_NORM_BIAS: held.vector("output_norm_bias"),
        P.LAST_BIAS: held.vector(f"{config.n_layers - 1}.ffn_down_bias"), P.OUTPUT: output_at,
        P.OUTPUT_FORMAT: output.format_id, P.OUTPUT_TILE: output.tile_bytes, P.X: at_area["x"], P.X8: at_area["x8"],
        P.XF: at_area["xf"], P.N8: at_area.get("n8", at_area["x8"]), P.NF: at_area.get("nf", at_area["xf"]),
        P.QKV: at_area["qkv"], P.QKV_STRIDE: qkv_stride(shard, config),
        P.ATTENTION: at_area["attention"], P.A8: at_area["a8"], P.AF: at_area["af"], P.H8: at_area.get("h8", 0), P.HF: at_area.get("hf", 0),
        P.KV: at_area["kv"], P.KV_LAYER_BYTES: max_kv_blocks * kv_block_bytes,
        P.KV_BLOCK_BYTES: kv_block_bytes, P.KV_HEAD_BYTES: head_block_bytes(head), P.THREAD: at_area["threads"],
        P.THREAD_BYTES: thread_stride(pack.matrices, config, plan), P.SCORES_STRIDE: scores_stride(plan),
        P.TILE_KERNELS: kernels, P.ATTEND_KERNELS: attend_kernels, P.SAMPLE_KERNEL: sample_address(),
    }  # fmt: skip
    for at, value in values.items():
        p[at] = value
    if config.positions == "learned":
        places = pack.matrices["position_embd"]
        p[P.PLACES : P.PLACES + 3] = held.whole("position_embd"), places.format_id, places.tile_bytes
    if arena.is_traced:
        p[P.TRACE] = address + arena.trace + 8 * TRACED_PHASES * me
    layers = _layer_table(held, config, plan, me)
    if is_sparse(pack.matrices):
        put_sparse_memory(p, layers, pack, config, plan, me, arena, at_area)
    return Tables(p, layers, memory, held, at_area["states"])
