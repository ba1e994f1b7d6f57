"""How often each neuron of a synthetic layer fires: a power law, as in ReLU models, where a quarter carries 80 %."""

from __future__ import annotations

import numpy as np

EXPONENT = 1.3  # with which, clipped, 26 % of the neurons carry 80 % of the activations (PowerInfer, section 3.1)
MOST, LEAST = 0.97, 1e-4


def rates(rng: np.random.Generator, neurons: int, mean: float) -> np.ndarray:
    """f64 [neurons] in random order: shares of tokens, whose mean is the one wanted."""
    law = ((np.arange(neurons) + 0.5) / neurons) ** -EXPONENT
    low, high = 0.0, 1.0
    for _ in range(60):  # the clipping moves the mean, so the factor is searched
        factor = (low + high) / 2
        low, high = (factor, high) if np.clip(factor * law, LEAST, MOST).mean() < mean else (low, factor)
    return rng.permutation(np.clip(low * law, LEAST, MOST))


def thresholds(rates: np.ndarray) -> np.ndarray:
    """What a standard normal value exceeds at these rates."""
    from scipy.special import ndtri

    return -ndtri(rates)
