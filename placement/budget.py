"""Bytes of a worker's process by kind, planned from what its tables will take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Matrix
from hotneuron.placement.plan import Plan, matrix_share
from hotneuron.placement.worker_areas import BatchSizes, worker_areas

# A worker's process before it has a model: Python, Ray, Numba and the compiled program.
PROCESS_BYTES = 232 << 20

# A fault maps not a page but the whole folio of the page cache that holds it, and with it others' parts. Where a part
# ends inside a matrix, so much of the next is mapped, measured on Linux 6.18 (whose folios are as large as the writes
# that made them, up to 2 MiB).
_OVERHANG_SHARE, _OVERHANG_BYTES = 1 / 8, 1 << 20


@dataclass(frozen=True, slots=True)
class ProcessBytes:
    """Of one worker, when all sequences are full and the largest batch has passed."""

    weights: int  # of its shard, mapped from the pack, which other processes may share
    neighbours: int  # of others' shards, that are mapped along with it; and the embedding, whose rows all read
    kv: int
    scratch: int
    exchange: int  # the arena, which all processes of an engine share
    process: int

    @property
    def total(self) -> int:
        return self.weights + self.neighbours + self.kv + self.scratch + self.exchange + self.process


def process_bytes(
    matrices: Mapping[str, Matrix],
    config: ModelConfig,
    plan: Plan,
    me: int,
    batch: BatchSizes,
    n_threads: int,
    exchange_bytes: int,
) -> ProcessBytes:
    """Of worker `me`."""
    areas = worker_areas(matrices, config, plan, me, batch, n_threads)
    kv = areas.pop("kv")
    neighbours = _neighbour_bytes(matrices, config, plan, me)
    weights = plan.shards[me].weight_bytes
    return ProcessBytes(weights, neighbours, kv, sum(areas.values()), exchange_bytes, PROCESS_BYTES)


def _neighbour_bytes(matrices: Mapping[str, Matrix], config: ModelConfig, plan: Plan, me: int) -> int:
    shard = plan.shards[me]
    total = 0.0 if config.tied_embeddings else float(matrices["token_embd"].n_bytes)
    for role, matrix in matrices.items():
        layer, _, name = role.partition(".")
        if not name:
            continue
        share = matrix_share(shard, config, int(layer), name, plan.n_workers)
        is_cut_by_columns = name == "attn_output" or (name == "ffn_down" and matrix.layout == "tiles")
        others = (1 - share) * matrix.n_bytes
        if share > 0:  # a tile's columns lie closer together than a folio is large
            overhang = min(_OVERHANG_BYTES, matrix.n_bytes * _OVERHANG_SHARE)
            total += others if is_cut_by_columns else min(others, overhang)
    return round(total)
