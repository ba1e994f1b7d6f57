"""Whether signs pay as a predictor: what a profile says that they would miss, and how much would be read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotneuron.kernels.signs import SCORE_BINS, bin_edges
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack_table import matrices_of
from hotneuron.placement.cost import ModelBytes
from hotneuron.placement.statistics import Statistics

RECALL = 0.999  # of the neurons that fire, those that must pass
GAIN = 0.95  # of the FFN's bytes in exact mode, the most that may be read for signs to pay


@dataclass(frozen=True, slots=True)
class SignChoice:
    """Signs as the predictor of a model, at the highest dials that let RECALL of what fires pass."""

    dials: tuple[float, ...]  # of each layer
    recall: float
    share: float  # of the neurons that pass
    ffn_bytes: float  # read a token
    exact_ffn_bytes: float

    @property
    def pays(self) -> bool:
        return self.ffn_bytes <= GAIN * self.exact_ffn_bytes


def choose_signs(file: GGUFFile, config: ModelConfig, statistics: Statistics, recall: float = RECALL) -> SignChoice:
    """From a profile in which signs were measured."""
    assert len(statistics.signs) == config.n_layers
    fired, silent = statistics.signs[:, :SCORE_BINS], statistics.signs[:, SCORE_BINS:]
    passing = np.cumsum(fired[:, ::-1], axis=1)[:, ::-1]  # [layers, bins]: that score so or higher
    total = passing[:, :1]
    last = (passing >= recall * total).sum(axis=1) - 1  # bin 0 lets all pass, so one bin at least does
    layers = np.arange(config.n_layers)
    seen = np.maximum(fired.sum(axis=1) + silent.sum(axis=1), 1)
    passed = np.cumsum((fired + silent)[:, ::-1], axis=1)[:, ::-1][layers, last]
    shares = passed / seen
    edges = bin_edges()
    dials = tuple(float(edges[at]) if at else -1e30 for at in last)
    signed, exact = (ModelBytes.of(matrices_of(file, config, kind), config) for kind in ("signed", "gated"))
    fires = statistics.fires.mean(axis=1)
    return SignChoice(
        dials,
        float(passing[layers, last].sum() / max(1, total.sum())),
        float(shares.mean()),
        float((signed.always + shares * signed.listed).sum() * config.ffn),
        float((exact.always + fires * exact.listed).sum() * config.ffn),
    )
