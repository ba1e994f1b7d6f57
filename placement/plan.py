"""A plan: which heads, neurons and vocabulary rows each worker holds, and what that costs in bytes.

Pure data, made from a model's sizes and from where to cut. Worker 0 is the hot worker, the others are cold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

from hotneuron.kernels.attention import head_block_bytes
from hotneuron.kernels.formats import TILE_ROWS, padded
from hotneuron.models.errors import RequestError
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Matrix, head_width

BY_NEURON = ("rows", "down_shared", "down_own")  # layouts of which only active neurons are read
NEURON_UNIT = 64  # neurons are dealt out in blocks of the down product's columns
Range = tuple[int, int]  # half open


@dataclass(frozen=True, slots=True)
class Shard:
    """What one worker holds, as half-open ranges; its heads are the same in every layer."""

    heads: Range
    neurons: tuple[Range, ...]  # of each layer: positions in the pack's order, in multiples of NEURON_UNIT
    vocab_tiles: Range
    weight_bytes: int
    sparse_bytes: int = 0  # of these, what is read only for neurons that are active

    @property
    def has_heads(self) -> bool:
        return self.heads[1] > self.heads[0]

    @property
    def has_neurons(self) -> bool:
        """In any layer."""
        return self.most_neurons > 0

    @property
    def most_neurons(self) -> int:
        """Of one layer: what the worker's rows must have room for."""
        return max(last - first for first, last in self.neurons)

    def has_neurons_in(self, layer: int) -> bool:
        first, last = self.neurons[layer]
        return last > first

    def kv_heads(self, config: ModelConfig) -> tuple[int, int]:
        """The KV heads that this shard's heads read. One whose heads are on two workers is computed by both."""
        if not self.has_heads:
            return 0, 0
        group = config.n_heads // config.n_kv_heads
        return self.heads[0] // group, -(-self.heads[1] // group)


@dataclass(frozen=True, slots=True)
class Plan:
    shards: tuple[Shard, ...]
    kv_tokens: int  # positions that the KV caches hold, all sequences together
    context_tokens: int  # positions of one sequence
    kv_bytes: int  # over all workers
    thresholds: tuple[float, ...] = ()  # one a layer: from which a neuron is active; empty: as the model says

    @property
    def n_workers(self) -> int:
        return len(self.shards)


@dataclass(frozen=True, slots=True)
class Cuts:
    """Where a model is cut, a range a worker; before anything is weighed."""

    heads: tuple[Range, ...]
    neurons: tuple[tuple[Range, ...], ...]  # of each layer: a range a worker
    vocab_tiles: tuple[Range, ...]


def deal(total: int, shares: tuple[float, ...]) -> list[Range]:
    """Cut 0..total into consecutive ranges in the given proportions, each cut to the nearest whole."""
    whole, cuts, so_far = sum(shares), [0], 0.0
    for share in shares:
        so_far += share
        cuts.append(round(total * so_far / whole))
    cuts[-1] = total
    return list(pairwise(cuts))


def kv_token_bytes(config: ModelConfig, shards: tuple[Shard, ...] | None = None) -> int:
    """Bytes of KV that one position takes over all workers."""
    per_head = config.n_layers * head_block_bytes(head_width(config)) // 16
    if shards is None:
        return per_head * config.n_kv_heads
    spans = (shard.kv_heads(config) for shard in shards)
    return per_head * sum(high - low for low, high in spans)


def matrix_share(shard: Shard, config: ModelConfig, layer: int, name: str, n_workers: int) -> float:
    """Share of a layer's matrix that a shard holds."""
    if name in ("attn_k", "attn_v"):
        low, high = shard.kv_heads(config)
        return (high - low) / config.n_kv_heads
    if name in ("attn_q", "attn_output"):
        return (shard.heads[1] - shard.heads[0]) / config.n_heads
    if name == "fc1":  # whoever has the neurons
        return 1 / n_workers
    first, last = shard.neurons[layer]
    return (last - first) / padded(config.ffn, NEURON_UNIT)


def _weighed(matrices: Mapping[str, Matrix], config: ModelConfig, shard: Shard, n_workers: int) -> Shard:
    """A shard with the bytes of its matrices (the embedding, of which a token reads a row, aside)."""
    total = sparse = 0.0
    for role, matrix in matrices.items():
        layer, _, name = role.partition(".")
        if name:
            n_bytes = matrix.n_bytes * matrix_share(shard, config, int(layer), name, n_workers)
            total += n_bytes
            sparse += n_bytes if matrix.layout in BY_NEURON else 0
    output = matrices["token_embd" if config.tied_embeddings else "output"]
    total += output.tile_bytes * (shard.vocab_tiles[1] - shard.vocab_tiles[0])
    return replace(shard, weight_bytes=round(total), sparse_bytes=round(sparse))


def cut_by(config: ModelConfig, shares: tuple[float, ...]) -> Cuts:
    """Everything in the same proportions. Raises RequestError for senseless shares."""
    if not shares or any(not (0 <= s < float("inf")) for s in shares) or sum(shares) <= 0:
        raise RequestError(f"split={'/'.join(map(str, shares))}: give one number of at least 0 a worker, not all 0")
    units = padded(config.ffn, NEURON_UNIT) // NEURON_UNIT
    neurons = tuple((a * NEURON_UNIT, b * NEURON_UNIT) for a, b in deal(units, shares))
    tiles = deal(padded(config.vocab, TILE_ROWS) // TILE_ROWS, shares)
    return Cuts(tuple(deal(config.n_heads, shares)), (neurons,) * config.n_layers, tuple(tiles))


def weigh(matrices: Mapping[str, Matrix], config: ModelConfig, cuts: Cuts, context_tokens: int, kv_tokens: int) -> Plan:
    """The plan that these cuts make of a model's matrices.

    Raises RequestError for a context beyond the positions that the model has learned.
    """
    if config.positions == "learned" and context_tokens > config.context_tokens:
        known = f"this model has learned {config.context_tokens} positions"
        raise RequestError(f"context_tokens={context_tokens}: {known}; ask for no more, in multiples of 16")
    by_worker = zip(*cuts.neurons, strict=True)
    parts = zip(cuts.heads, by_worker, cuts.vocab_tiles, strict=True)
    shards = tuple(
        _weighed(matrices, config, Shard(heads, neurons, tiles, 0), len(cuts.heads)) for heads, neurons, tiles in parts
    )
    return Plan(shards, kv_tokens, context_tokens, kv_tokens * kv_token_bytes(config, shards))
