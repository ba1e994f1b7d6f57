"""What a decode step of one token costs: bytes that each worker reads in each phase, and from them seconds.

A phase ends when its slowest worker is done, and no sooner than the memory that all share can deliver what they read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from hotneuron.kernels.formats import padded
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Matrix
from hotneuron.placement.plan import BY_NEURON, NEURON_UNIT, Plan, Shard
from hotneuron.placement.probe import Probe

# Of the step program, one row: barriers of a worker's threads and meetings, which cost about the same.
_DENSE_BARRIERS, _SPARSE_BARRIERS, _PREDICTOR_BARRIERS = 9, 13, 3
_REACHED = 0.93  # of the probe's rates, by phases that begin and end: measured over models and modes
_NORMED_ROWS = 2.5  # rows of the hidden size that a layer norms, adds and quantizes


@dataclass(frozen=True, slots=True, eq=False)
class ModelBytes:
    """Bytes of a model's matrices by what decides whether a token reads them."""

    attention: np.ndarray  # f64 [layers]: of all heads
    predictor: np.ndarray  # f64 [layers]: first matrices, which the workers share evenly
    always: np.ndarray  # f64 [layers]: of one neuron, for every token
    listed: np.ndarray  # f64 [layers]: of one neuron, for tokens that it is computed for
    head: float  # of the vocabulary

    @classmethod
    def of(cls, matrices: Mapping[str, Matrix], config: ModelConfig) -> ModelBytes:
        sums = np.zeros((4, config.n_layers))
        for role, matrix in matrices.items():
            layer, _, name = role.partition(".")
            if name:
                row = 0 if name.startswith("attn") else 1 if name == "fc1" else 3 if matrix.layout in BY_NEURON else 2
                sums[row, int(layer)] += matrix.n_bytes
        neurons = padded(config.ffn, NEURON_UNIT)
        head = matrices["token_embd" if config.tied_embeddings else "output"].n_bytes
        return cls(sums[0], sums[1], sums[2] / neurons, sums[3] / neurons, float(head))


@dataclass(frozen=True, slots=True)
class StepCost:
    """Seconds of one token, and what they consist of."""

    attention_s: float
    predictor_s: float
    neurons_s: float
    head_s: float
    between_s: float  # norms, barriers, meetings
    touched_bytes: float

    @property
    def total_s(self) -> float:
        return self.attention_s + self.predictor_s + self.neurons_s + self.head_s + self.between_s


def unit_fires(fires: np.ndarray) -> np.ndarray:
    """Neurons of each unit that are computed for a token: f64 [layers, units], of shares f32 [layers, ffn], ordered."""
    layers, ffn = fires.shape
    width = padded(ffn, NEURON_UNIT)
    filled = np.pad(fires.astype(np.float64), ((0, 0), (0, width - ffn)))
    return filled.reshape(layers, -1, NEURON_UNIT).sum(axis=2)


def step_cost(
    plan: Plan, config: ModelConfig, n_bytes: ModelBytes, fires: np.ndarray, probe: Probe, threads: int
) -> StepCost:
    """Of a plan whose workers have so many threads each. fires: f64 [layers, units], as `unit_fires` gives them."""
    shards, n_workers = plan.shards, plan.n_workers
    heads = [_share(shard.heads, config.n_heads) for shard in shards]
    attention = sum(_phase([(share * b, 0.0) for share in heads], probe, threads) for b in n_bytes.attention)
    predictor = sum(_phase([(b / n_workers, 0.0)] * n_workers, probe, threads) for b in n_bytes.predictor if b)
    neurons, touched = 0.0, float(n_bytes.attention.sum() + n_bytes.predictor.sum() + n_bytes.head)
    for layer in range(config.n_layers):
        work = [_neuron_bytes(shard, layer, n_bytes, fires) for shard in shards]
        neurons += _phase(work, probe, threads)
        touched += sum(map(sum, work))
    vocabulary = sum(shard.vocab_tiles[1] - shard.vocab_tiles[0] for shard in shards)
    tiles = [_share(shard.vocab_tiles, vocabulary) for shard in shards]
    head = _phase([(share * n_bytes.head, 0.0) for share in tiles], probe, threads)
    barriers = _SPARSE_BARRIERS if n_bytes.listed.any() else _DENSE_BARRIERS
    barriers += _PREDICTOR_BARRIERS if n_bytes.predictor.any() else 0
    layer_s = barriers * probe.barrier_us * 1e-6 + _NORMED_ROWS * config.hidden * probe.norm_ns_per_float * 1e-9
    return StepCost(attention, predictor, neurons, head, config.n_layers * layer_s, touched)


def _share(range_: tuple[int, int], whole: int) -> float:
    return (range_[1] - range_[0]) / whole


def _neuron_bytes(shard: Shard, layer: int, n_bytes: ModelBytes, fires: np.ndarray) -> tuple[float, float]:
    first, last = shard.neurons[layer]
    active = fires[layer, first // NEURON_UNIT : last // NEURON_UNIT].sum()
    return n_bytes.always[layer] * (last - first), n_bytes.listed[layer] * float(active)


def _phase(work: list[tuple[float, float]], probe: Probe, threads: int) -> float:
    """Seconds. work: of each worker, bytes read in order and bytes read by list."""
    rates = probe.tiles_bytes_per_s(threads), probe.rows_bytes_per_s(threads)
    slowest = max(tiles / rates[0] + rows / rates[1] for tiles, rows in work)
    tiles, rows = (sum(part) for part in zip(*work, strict=True))
    together = tiles / probe.tiles_together_bytes_per_s + rows / probe.rows_together_bytes_per_s
    return max(slowest, together) / _REACHED
