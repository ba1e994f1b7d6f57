"""What fired: counters of the workers, and the same in the order of the model's file."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import numpy as np

from hotneuron.placement.statistics import Statistics

if TYPE_CHECKING:
    from hotneuron.models.pack import Pack
    from hotneuron.placement.plan import Plan

ENOUGH_TOKENS = 64  # from which on it says something about what fires


@dataclass(frozen=True, slots=True)
class ActivityCounts:
    """Counters of every layer; positions as in the pack."""

    tokens: np.ndarray  # int64 [layers]: rows seen
    lists: np.ndarray  # int64 [layers]: lists made for them, one a step and 32 rows
    listed: np.ndarray  # int64 [layers]: neurons on these lists, whose rows were read
    fires: np.ndarray  # int64 [layers, padded ffn]
    adds: np.ndarray  # f64 [layers, padded ffn]: sums of the activations' magnitudes
    histogram: np.ndarray  # int64 [layers, BINS]: activations of the first product, by the upper bits of their f32


@dataclass(frozen=True, slots=True)
class Activity:
    """The same by the neurons of the model's file, as `profile` and `plan --from-live` read it."""

    tokens: np.ndarray  # int64 [layers]
    lists: np.ndarray  # int64 [layers]
    listed: np.ndarray  # int64 [layers]
    fires: np.ndarray  # int64 [layers, ffn]
    adds: np.ndarray  # f64 [layers, ffn]
    histogram: np.ndarray  # int64 [layers, BINS]; zeros unless profiling
    worker_fires: np.ndarray  # int64 [layers, workers]: `fires` by the worker that held the neuron

    @classmethod
    def of(cls, counts: ActivityCounts, pack: Pack, plan: Plan, ffn: int) -> Activity:
        n_layers = len(counts.tokens)
        worker_fires = np.zeros((n_layers, plan.n_workers), np.int64)
        fires, adds = np.zeros((n_layers, ffn), np.int64), np.zeros((n_layers, ffn))
        for layer in range(n_layers):
            neurons = pack.neuron_order(layer, ffn)
            real = neurons >= 0
            fires[layer, neurons[real]] = counts.fires[layer, real]
            adds[layer, neurons[real]] = counts.adds[layer, real]
            for me, shard in enumerate(plan.shards):
                worker_fires[layer, me] = counts.fires[layer, slice(*shard.neurons[layer])].sum()
        return cls(counts.tokens, counts.lists, counts.listed, fires, adds, counts.histogram, worker_fires)

    def __add__(self, later: Activity) -> Activity:
        return Activity(*(getattr(self, field.name) + getattr(later, field.name) for field in fields(self)))

    @property
    def n_tokens(self) -> int:
        return int(self.tokens.max(initial=0))

    def hot_work_share(self) -> float:
        """Of the neurons that were computed, those on the hot worker."""
        return float(self.worker_fires[:, 0].sum() / max(1, self.worker_fires.sum()))

    def statistics(self, model_key: str) -> Statistics:
        """The same as shares of the tokens seen, of which there is one at least. `adds` knows no norms of down rows."""
        fires, adds = ((counts / self.n_tokens).astype(np.float32) for counts in (self.fires, self.adds))
        return Statistics(model_key, self.n_tokens, np.minimum(fires, 1), adds, self.histogram)

    def listed_share(self) -> float:
        """The mean share of a layer's neurons whose rows one list makes a step read."""
        lists = np.maximum(self.lists, 1)
        return float(np.mean(self.listed / lists / self.fires.shape[1]))
