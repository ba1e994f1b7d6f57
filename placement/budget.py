"""Bytes of a worker's process by kind, planned from what its tables will take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Matrix
from hotneuron.placement.plan import Plan, Shard
from hotneuron.placement.worker_areas import BatchSizes, worker_areas

# A worker's process before it has a model: Python, Ray, Numba and the compiled program.
PROCESS_BYTES = 220 << 20


@dataclass(frozen=True, slots=True)
class ProcessBytes:
    """Of one worker, when all sequences are full and the largest batch has passed."""

    weights: int  # of its shard
    embedding: int  # whose rows all workers read, besides what of it is in the shard
    kv: int
    scratch: int
    exchange: int  # the arena, which all processes of an engine share
    process: int

    @property
    def total(self) -> int:
        return self.weights + self.embedding + self.kv + self.scratch + self.exchange + self.process


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
    shard = plan.shards[me]
    embedding = _embedding_bytes(matrices, config, shard)
    return ProcessBytes(shard.weight_bytes, embedding, kv, sum(areas.values()), exchange_bytes, PROCESS_BYTES)


def _embedding_bytes(matrices: Mapping[str, Matrix], config: ModelConfig, shard: Shard) -> int:
    embedding = matrices["token_embd"]
    own_tiles = shard.vocab_tiles[1] - shard.vocab_tiles[0] if config.tied_embeddings else 0
    return embedding.n_bytes - own_tiles * embedding.tile_bytes
