"""The FFN's words in the step program's tables: its matrices, dense or by neuron, and what computing only active neurons needs."""

from __future__ import annotations

import numpy as np

from hotneuron.actors import fields as P
from hotneuron.actors.arena import LINE, Arena
from hotneuron.actors.held_weights import HeldWeights, put_columns, put_rows
from hotneuron.actors.worker_memory import copy_to, inputs_of
from hotneuron.kernels import down, rows, signs
from hotneuron.kernels.formats import padded
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Pack
from hotneuron.placement.histogram import BINS
from hotneuron.placement.plan import Plan
from hotneuron.placement.worker_areas import active_stride, is_sparse, ranks


def put_ffn(row: np.ndarray, held: HeldWeights, layer: int, neurons: tuple[int, int], fc1_tiles: tuple[int, int]) -> None:
    """A shard's part of one layer's FFN, whichever way its matrices lie. fc1_tiles: of the predictor's first layer, my part."""
    name, pack = f"{layer}.".__add__, held.pack
    read = [pack.matrices[name(role)].format_id for role in ("ffn_gate", "ffn_up") if name(role) in pack.matrices]
    row[P.FFN_INPUT] = inputs_of(*read)
    for role, at in (("ffn_gate", P.GATE), ("ffn_up", P.UP)):
        matrix = pack.matrices.get(name(role))
        if matrix is None:
            continue
        if matrix.layout == "tiles":
            put_rows(row, at, held, name(role), neurons)
            continue
        rows_at, format_at = (P.GATE_ROWS, P.GATE_FORMAT) if role == "ffn_gate" else (P.UP_ROWS, P.UP_FORMAT)
        row[rows_at : rows_at + 2] = held.mapped(name(role), *(n * matrix.row_bytes for n in neurons)), matrix.row_bytes
        row[format_at] = matrix.format_id
    if (bias := held.vector(name("ffn_up_bias"))) != 0:
        row[P.UP_BIAS] = bias + 4 * neurons[0]
    if not is_sparse(pack.matrices):
        row[P.DOWN_INPUT] = inputs_of(put_columns(row, P.DOWN, held, name("ffn_down"), neurons))
        return
    layout = pack.matrices[name("ffn_down")].down
    row[P.DOWN_KERNEL] = down.down_address(layout.format_id, layout.scaling)
    row[P.DOWN_ROWS] = held.mapped(name("ffn_down"), *(n // P.UNIT * layout.unit_bytes for n in neurons))
    row[P.DOWN_UNIT_BYTES], row[P.DOWN_ROW_BYTES] = layout.unit_bytes, layout.row_bytes
    row[P.DOWN_SCALES_AT], row[P.DOWN_MINIMUMS_AT] = layout.scales_at, layout.minimums_at
    row[P.DOWN_OFFSET], row[P.DOWN_STRIPE_LINES] = down.down_offset(layout.format_id), 128 // layout.line_outputs
    if name("ffn_signs") in pack.matrices:
        tile_bytes = signs.tile_bytes(pack.matrices[name("ffn_signs")].columns)
        row[P.SIGNS_TILE], row[P.SIGNS] = tile_bytes, held.mapped(name("ffn_signs"), *(n // 16 * tile_bytes for n in neurons))
    if name("fc1") in pack.matrices:
        fc1, fc2 = pack.matrices[name("fc1")], pack.matrices[name("fc2")]
        first = put_rows(row, P.FC1, held, name("fc1"), (16 * fc1_tiles[0], 16 * fc1_tiles[1]))
        row[P.FC1] -= fc1_tiles[0] * fc1.tile_bytes  # the program counts all workers' tiles
        second = put_rows(row, P.FC2, held, name("fc2"), neurons)
        row[P.FC1_TILES], row[P.RANK] = padded(fc1.rows, 16) // 16, padded(fc2.columns, 64)
        row[P.FC1_INPUT], row[P.FC2_INPUT] = inputs_of(first), inputs_of(second)


def put_sparse_memory(
    p: np.ndarray, layers: np.ndarray, pack: Pack, config: ModelConfig, plan: Plan, me: int, arena: Arena, at_area: dict[str, int]
) -> None:
    """What a sparse FFN needs, in the worker's areas by name: active neurons, lists, predictor, thresholds. Counters lie in the arena."""
    shard, tall = plan.shards[me], padded(config.hidden, 128)
    p[P.IS_SPARSE], p[P.TALL], p[P.GATHER_KERNEL] = 1, tall, rows.gather.address
    p[P.ACTIVE], p[P.ACTIVE_STRIDE] = at_area["active"], active_stride(shard)
    p[P.ACTIVE_LISTS], p[P.ACTIVE_COUNTS] = at_area["active_lists"], at_area["active_counts"]
    p[P.UNIT_LISTS], p[P.DOWN_VALUES], p[P.SUM] = at_area["unit_lists"], at_area["down_values"], at_area["sum"]
    has_predictor = bool(ranks(pack.matrices))
    if has_predictor:
        p[P.HAS_PREDICTOR] = 1
        p[P.PREDICTED8], p[P.PREDICTEDF] = at_area["predicted8"], at_area["predictedf"]
        p[P.HIDDEN8], p[P.HIDDENF] = at_area["hidden8"], at_area["hiddenf"]
    thresholds = np.array(plan.thresholds or (config.sparse_threshold if has_predictor else 0.0,) * config.n_layers, np.float32)
    if "0.ffn_signs" in pack.matrices:
        p[P.INPUT_SIGNS] = at_area["input_signs"]
    copy_to(at_area["thresholds"], thresholds)
    address = int(p[P.ARENA])
    assert arena.neurons == padded(config.ffn, 64) and arena.n_layers == config.n_layers
    p[P.HISTOGRAM_BYTES] = 8 * BINS if arena.has_histogram else 0
    for layer, row in enumerate(layers):
        first, last = plan.shards[me].neurons[layer]
        row[P.THRESHOLD] = at_area["thresholds"] + 4 * layer
        row[P.COUNTS] = address + arena.layer_counts + LINE * (me * config.n_layers + layer)
        row[P.HISTOGRAM] = address + arena.histogram + (me * config.n_layers + layer) * p[P.HISTOGRAM_BYTES]
        row[P.REAL_NEURONS] = max(0, min(last, config.ffn) - first)
        at = 4 * (layer * arena.neurons + first)
        row[P.FIRES], row[P.ADDS] = address + arena.fires + at, address + arena.adds + at
