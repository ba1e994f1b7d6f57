"""Bytes of a worker's process by kind, planned from what its tables will take."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Matrix
from hotneuron.placement.plan import Plan
from hotneuron.placement.worker_areas import BatchSizes, worker_areas

# A worker's process before it has a model: Python, Ray, Numba and the compiled program.
PROCESS_BYTES = 262 << 20


@dataclass(frozen=True, slots=True)
class ProcessBytes:
    """Of one worker, when all sequences are full and the largest batch has passed."""

    weights: int  # of its shard, mapped from the pack, which other processes may share
    kv: int
    scratch: int
    exchange: int  # the arena, which all processes of an engine share
    process: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.scratch + self.exchange + self.process


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
    return ProcessBytes(plan.shards[me].weight_bytes, kv, sum(areas.values()), exchange_bytes, PROCESS_BYTES)
