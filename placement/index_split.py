"""A plan from PowerInfer's own split of a model: its neurons are hot, and all else is dealt in equal shares."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from hotneuron.kernels.formats import padded
from hotneuron.models.errors import RequestError
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Matrix
from hotneuron.placement.gpu_index import GPUIndex
from hotneuron.placement.place import order_unit
from hotneuron.placement.plan import NEURON_UNIT, Cuts, cut_by, deal
from hotneuron.placement.worker_areas import is_sparse


def split_by_index(
    index: GPUIndex, matrices: Mapping[str, Matrix], config: ModelConfig, n_workers: int
) -> tuple[Cuts, np.ndarray]:
    """The cuts, and the order of the neurons, int64 [layers, ffn]: those of the index first.

    Of each layer whole units of neurons are hot: an index whose number is not a multiple of 64 is rounded down.
    Raises RequestError where neurons cannot be moved one by one, or there is no cold worker.
    """
    if not is_sparse(matrices) or order_unit(matrices) > 1:
        raise RequestError(
            "a GPU index moves single neurons; this needs a file with ffn_down_t that does not run dense"
        )
    if n_workers < 2:
        raise RequestError("a GPU index splits neurons between a hot and cold workers; --workers 0 leaves no cold one")
    units, orders, neurons = padded(config.ffn, NEURON_UNIT) // NEURON_UNIT, [], []
    for hot in index.hot:
        is_hot = np.zeros(config.ffn, bool)
        is_hot[hot] = True
        orders.append(np.concatenate([hot, np.flatnonzero(~is_hot)]))
        n_hot = units if len(hot) == config.ffn else len(hot) // NEURON_UNIT
        rest = [(n_hot + a, n_hot + b) for a, b in deal(units - n_hot, (1.0,) * (n_workers - 1))]
        neurons.append(tuple((a * NEURON_UNIT, b * NEURON_UNIT) for a, b in [(0, n_hot), *rest]))
    return replace(cut_by(config, (1.0,) * n_workers), neurons=tuple(neurons)), np.array(orders, np.int64)
