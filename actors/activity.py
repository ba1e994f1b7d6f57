"""What fired: counters of the workers, and the same in the order of the model's file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from hotneuron.models.pack import Pack


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

    @classmethod
    def of(cls, counts: ActivityCounts, pack: Pack, ffn: int) -> Activity:
        n_layers = len(counts.tokens)
        fires, adds = np.zeros((n_layers, ffn), np.int64), np.zeros((n_layers, ffn))
        for layer in range(n_layers):
            neurons = pack.neuron_order(layer, ffn)
            real = neurons >= 0
            fires[layer, neurons[real]] = counts.fires[layer, real]
            adds[layer, neurons[real]] = counts.adds[layer, real]
        return cls(counts.tokens, counts.lists, counts.listed, fires, adds, counts.histogram)

    def listed_share(self) -> float:
        """The mean share of a layer's neurons whose rows one list makes a step read."""
        lists = np.maximum(self.lists, 1)
        return float(np.mean(self.listed / lists / self.fires.shape[1]))
