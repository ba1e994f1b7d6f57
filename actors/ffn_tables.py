"""The FFN's words in the step program's tables: its matrices, dense or by neuron, and what computing only active neurons needs."""

from __future__ import annotations

import numpy as np

from hotneuron.actors import fields as P
from hotneuron.actors.arena import LINE, Arena
from hotneuron.actors.worker_memory import Memory, copy_to, inputs_of, put_matrix, take_input
from hotneuron.kernels import down, rows, signs
from hotneuron.kernels.formats import padded
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Pack
from hotneuron.placement.histogram import BINS
from hotneuron.placement.plan import Plan


def is_sparse(pack: Pack) -> bool:
    """Whether a pack's FFN is read by neuron."""
    return pack.matrices["0.ffn_down"].layout != "tiles"


def put_ffn(row: np.ndarray, pack: Pack, layer: int, neurons: tuple[int, int]) -> None:
    """A shard's part of one layer's FFN, whichever way its matrices lie."""
    name = f"{layer}.".__add__
    read = [pack.matrices[name(role)].format_id for role in ("ffn_gate", "ffn_up") if name(role) in pack.matrices]
    row[P.FFN_INPUT] = inputs_of(*read)
    for role, at in (("ffn_gate", P.GATE), ("ffn_up", P.UP)):
        matrix = pack.matrices.get(name(role))
        if matrix is None:
            continue
        if matrix.layout == "tiles":
            put_matrix(row, at, pack, name(role), first_row=neurons[0])
            continue
        rows_at, format_at = (P.GATE_ROWS, P.GATE_FORMAT) if role == "ffn_gate" else (P.UP_ROWS, P.UP_FORMAT)
        row[rows_at : rows_at + 2] = pack.matrix_address(name(role)) + neurons[0] * matrix.row_bytes, matrix.row_bytes
        row[format_at] = matrix.format_id
    if (bias := pack.vector_address(name("ffn_up_bias"))) != 0:
        row[P.UP_BIAS] = bias + 4 * neurons[0]
    if not is_sparse(pack):
        row[P.DOWN_INPUT] = inputs_of(put_matrix(row, P.DOWN, pack, name("ffn_down"), first_column=neurons[0]))
        return
    layout = pack.matrices[name("ffn_down")].down
    row[P.DOWN_KERNEL] = down.down_address(layout.format_id, layout.scaling)
    row[P.DOWN_ROWS] = pack.matrix_address(name("ffn_down")) + neurons[0] // P.UNIT * layout.unit_bytes
    row[P.DOWN_UNIT_BYTES], row[P.DOWN_ROW_BYTES] = layout.unit_bytes, layout.row_bytes
    row[P.DOWN_SCALES_AT], row[P.DOWN_MINIMUMS_AT] = layout.scales_at, layout.minimums_at
    row[P.DOWN_OFFSET], row[P.DOWN_STRIPE_LINES] = down.down_offset(layout.format_id), 128 // layout.line_outputs
    if name("ffn_signs") in pack.matrices:
        row[P.SIGNS_TILE] = signs.tile_bytes(pack.matrices[name("ffn_signs")].columns)
        row[P.SIGNS] = pack.matrix_address(name("ffn_signs")) + neurons[0] // 16 * row[P.SIGNS_TILE]
    if name("fc1") in pack.matrices:
        first, second = put_matrix(row, P.FC1, pack, name("fc1")), put_matrix(row, P.FC2, pack, name("fc2"), neurons[0])
        fc1, fc2 = pack.matrices[name("fc1")], pack.matrices[name("fc2")]
        row[P.FC1_TILES], row[P.RANK] = padded(fc1.rows, 16) // 16, padded(fc2.columns, 64)
        row[P.FC1_INPUT], row[P.FC2_INPUT] = inputs_of(first), inputs_of(second)


def _ranks(pack: Pack, config: ModelConfig) -> list[int]:
    matrices = (pack.matrices.get(f"{layer}.fc2") for layer in range(config.n_layers))
    return [padded(m.columns, 64) for m in matrices if m is not None]


def thread_sizes(pack: Pack, config: ModelConfig) -> dict[int, int]:
    """Bytes of a thread's own memory, by word, that a sparse FFN needs."""
    by_row = [m.format_id for m in pack.matrices.values() if m.layout == "rows"]
    layouts = [pack.matrices[f"{layer}.ffn_down"].down for layer in range(config.n_layers)]
    return {
        P.T_ROW: 4 * max(padded(config.hidden, 64), *_ranks(pack, config), 0),
        P.T_TILE: max((rows.scratch_bytes(format_id, config.hidden) for format_id in by_row), default=0),
        P.T_ROWS: 6 * 16 * 8,
        P.T_DOWN: max(down.scratch_bytes(layout) for layout in layouts),
    }


def take_sparse_memory(
    p: np.ndarray, layers: np.ndarray, pack: Pack, config: ModelConfig, plan: Plan, me: int, arena: Arena, n_threads: int, memory: Memory
) -> None:
    """A worker's memory for a sparse FFN: what is active, lists, the predictor's inputs and thresholds. Counters lie in the arena."""
    most = max(plan.shards[me].most_neurons, 64)
    units, wide, tall = most // P.UNIT, padded(config.hidden, 64), padded(config.hidden, 128)
    p[P.IS_SPARSE], p[P.TALL], p[P.GATHER_KERNEL] = 1, tall, rows.gather.address
    p[P.ACTIVE], p[P.ACTIVE_STRIDE] = memory.take(4 * P.SPARSE_BATCH * (most + 32)), 4 * (most + 32)  # NOTE not a power of two
    p[P.ACTIVE_LISTS], p[P.ACTIVE_COUNTS] = memory.take(4 * n_threads * most), memory.take(64 * n_threads)
    p[P.UNIT_LISTS] = memory.take(units * down.LIST_BYTES)
    p[P.DOWN_VALUES] = memory.take(units * P.SPARSE_BATCH * down.VALUE_BYTES)
    p[P.SUM] = memory.take(4 * P.SPARSE_BATCH * tall)
    if ranks := _ranks(pack, config):
        p[P.HAS_PREDICTOR] = 1
        p[P.PREDICTED8], p[P.PREDICTEDF] = take_input(memory, arena.max_rows, wide)
        p[P.HIDDEN8], p[P.HIDDENF] = take_input(memory, arena.max_rows, max(ranks))
    thresholds = np.array(plan.thresholds or (config.sparse_threshold if ranks else 0.0,) * config.n_layers, np.float32)
    if "0.ffn_signs" in pack.matrices:
        p[P.INPUT_SIGNS] = memory.take(arena.max_rows * wide // 8)
    threshold_at = memory.take(thresholds.nbytes)
    copy_to(threshold_at, thresholds)
    address = int(p[P.ARENA])
    assert arena.neurons == padded(config.ffn, 64) and arena.n_layers == config.n_layers
    p[P.HISTOGRAM_BYTES] = 8 * BINS if arena.has_histogram else 0
    for layer, row in enumerate(layers):
        first, last = plan.shards[me].neurons[layer]
        row[P.THRESHOLD] = threshold_at + 4 * layer
        row[P.COUNTS] = address + arena.layer_counts + LINE * (me * config.n_layers + layer)
        row[P.HISTOGRAM] = address + arena.histogram + (me * config.n_layers + layer) * p[P.HISTOGRAM_BYTES]
        row[P.REAL_NEURONS] = max(0, min(last, config.ffn) - first)
        at = 4 * (layer * arena.neurons + first)
        row[P.FIRES], row[P.ADDS] = address + arena.fires + at, address + arena.adds + at
