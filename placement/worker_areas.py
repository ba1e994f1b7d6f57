"""The memory of a worker besides its weights and the arena: every area by name, and its bytes.

`actors.tables` takes exactly these areas, so that what a plan promises is what a worker has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hotneuron.kernels import down, formats, rows
from hotneuron.kernels.activations import group_bytes
from hotneuron.kernels.attention import GROUP_SIZES as QUERY_GROUPS
from hotneuron.kernels.attention import head_block_bytes
from hotneuron.kernels.batches import SPARSE_BATCH, SUB_BATCH, TILE_SIZES, UNIT
from hotneuron.kernels.formats import padded
from hotneuron.kernels.sampling import scratch_bytes
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Matrix, head_width
from hotneuron.placement.plan import Plan, Shard

Areas = dict[str, int]


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The largest batch; both are multiples of 8."""

    rows: int
    logit_rows: int  # of them, that have logits


def is_sparse(matrices: Mapping[str, Matrix]) -> bool:
    """Whether an FFN's matrices are read by neuron."""
    return matrices["0.ffn_down"].layout != "tiles"


def ranks(matrices: Mapping[str, Matrix]) -> list[int]:
    """Of the layers' predictors, padded to their inputs' blocks."""
    return [padded(m.columns, 64) for role, m in matrices.items() if role.endswith(".fc2")]


def scores_stride(plan: Plan) -> int:
    """Bytes from one query's scores to the next. NOTE not a power of two: rows would share cache sets."""
    return 4 * padded(plan.context_tokens, 16) + 64


def active_stride(shard: Shard) -> int:
    """Bytes from one row's neurons to the next. NOTE not a power of two."""
    return 4 * (max(shard.most_neurons, 64) + 32)


def output_columns(shard: Shard, config: ModelConfig) -> tuple[int, int]:
    """Columns of the output projection around a shard's heads, whole blocks of 64."""
    head = head_width(config)
    return shard.heads[0] * head // 64 * 64, padded(shard.heads[1] * head, 64)


def qkv_stride(shard: Shard, config: ModelConfig) -> int:
    kv_low, kv_high = shard.kv_heads(config)
    return 4 * head_width(config) * (shard.heads[1] - shard.heads[0] + 2 * (kv_high - kv_low))


def worker_areas(
    matrices: Mapping[str, Matrix], config: ModelConfig, plan: Plan, me: int, batch: BatchSizes, n_threads: int
) -> Areas:
    """Bytes of each area of worker `me`."""
    shard, head, n_rows = plan.shards[me], head_width(config), batch.rows
    low, high = output_columns(shard, config)
    wide, o_columns = padded(config.hidden, 64), max(high - low, 64)
    kv_low, kv_high = shard.kv_heads(config)
    kv_blocks = padded(plan.kv_tokens, 16) // 16
    output = "token_embd" if config.tied_embeddings else "output"
    attention, ffn = ("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up")
    areas = {
        "constants": 64,
        "team": 64,
        "states": 64 * n_threads,
        "rope": plan.context_tokens * 4 * max(2, config.rope.dims),
        "kernels": 8 * (TILE_SIZES * len(formats.NAMES) + len(QUERY_GROUPS)),
        "x": 4 * n_rows * wide,
        "qkv": n_rows * max(qkv_stride(shard, config), 64),
        "attention": 4 * n_rows * o_columns,
        "kv": config.n_layers * kv_blocks * (kv_high - kv_low) * head_block_bytes(head),
        "threads": n_threads * thread_stride(matrices, config, plan),
    }
    shared = (*attention, output) if config.attn_norm_2 else (*attention, *ffn, output)
    areas |= _input("x", matrices, shared, max(n_rows, batch.logit_rows), wide)
    if config.attn_norm_2:
        areas |= _input("n", matrices, ffn, n_rows, wide)
    areas |= _input("a", matrices, ("attn_output",), n_rows, o_columns)
    if is_sparse(matrices):
        return areas | _sparse_areas(matrices, config, shard, n_rows, n_threads)
    return areas | _input("h", matrices, ("ffn_down",), n_rows, max(shard.most_neurons, 64))


def _input(name: str, matrices: Mapping[str, Matrix], roles: Iterable[str], n_rows: int, columns: int) -> Areas:
    """Inputs of products with these matrices: quantized, in floats, or both, as their formats ask for."""
    asked = set(roles)
    found = [m.format_id for role, m in matrices.items() if role.rpartition(".")[2] in asked]
    return {
        f"{name}8": n_rows // 8 * group_bytes(columns, 8) if min(found) < formats.HALF else 0,
        f"{name}f": 4 * n_rows * columns if max(found) >= formats.HALF else 0,
    }


def _sparse_areas(
    matrices: Mapping[str, Matrix], config: ModelConfig, shard: Shard, n_rows: int, n_threads: int
) -> Areas:
    most, wide = max(shard.most_neurons, 64), padded(config.hidden, 64)
    units = most // UNIT
    areas = {
        "active": SPARSE_BATCH * active_stride(shard),
        "active_lists": 4 * n_threads * most,
        "active_counts": 64 * n_threads,
        "unit_lists": units * down.LIST_BYTES,
        "down_values": units * SPARSE_BATCH * down.VALUE_BYTES,
        "sum": 4 * SPARSE_BATCH * padded(config.hidden, 128),
        "thresholds": 4 * config.n_layers,
    }
    if rank := ranks(matrices):
        areas |= _input("predicted", matrices, ("fc1",), n_rows, wide)
        areas |= _input("hidden", matrices, ("fc2",), n_rows, max(rank))
    if "0.ffn_signs" in matrices:
        areas["input_signs"] = n_rows * wide // 8
    return areas


def thread_areas(matrices: Mapping[str, Matrix], config: ModelConfig, plan: Plan) -> Areas:
    """Bytes of each area in one thread's stretch, in its order."""
    head = head_width(config)
    areas = {
        "row": 4 * max(padded(config.hidden, 64), *ranks(matrices), 0),
        "queries": 32 * head,
        "positions": 64,
        "heads": 32 * head,
        "scores": 8 * scores_stride(plan),
        "gate": 4 * UNIT * SUB_BATCH,
        "up": 4 * UNIT * SUB_BATCH,
        "sample": scratch_bytes(config.vocab),
    }
    if is_sparse(matrices):
        by_row = [m.format_id for m in matrices.values() if m.layout == "rows"]
        layouts = [matrices[f"{layer}.ffn_down"].down for layer in range(config.n_layers)]
        areas |= {
            "tile": max((rows.scratch_bytes(format_id, config.hidden) for format_id in by_row), default=0),
            "rows": 6 * 16 * 8,
            "down": max(down.scratch_bytes(layout) for layout in layouts),
        }
    return areas


def thread_stride(matrices: Mapping[str, Matrix], config: ModelConfig, plan: Plan) -> int:
    """Bytes of a thread's stretch. NOTE threads' stretches must not fall on the same cache sets."""
    return padded(sum(padded(size, 128) for size in thread_areas(matrices, config, plan).values()), 4096) + 256
