"""`sampling.sample` in plain NumPy and double precision: slow, and the oracle of its tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

_MASK = (1 << 64) - 1


def uniform_reference(seed: int, position: int) -> float:
    """splitmix64 of seed and position, as a number in [0, 1)."""

    def mix(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        x = (x ^ x >> 27) * 0x94D049BB133111EB & _MASK
        return x ^ x >> 31

    return (mix(mix(seed) + 0x9E3779B97F4A7C15 * (position + 1) & _MASK) >> 11) * 2.0**-53


def penalized_reference(
    logits: np.ndarray,
    history: Sequence[int] = (),
    *,
    repeat_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Sequence[tuple[int, float]] = (),
    **_: object,
) -> np.ndarray:
    """Logits f32 [vocab] after bias and penalties, with NaN and infinities replaced as the kernels see them."""
    out = logits.astype(np.float32)
    f32 = np.float32
    for token, bias in logit_bias:
        if token < len(out):
            out[token] += f32(bias)
    for token, count in Counter(history).items():
        if token < len(out):
            value = out[token]
            value = value * f32(repeat_penalty) if value <= 0 else value / f32(repeat_penalty)
            out[token] = value - (f32(count) * f32(frequency_penalty) + f32(presence_penalty))
    return np.nan_to_num(out, nan=-np.inf, posinf=np.finfo(np.float32).max, neginf=-np.inf)


def distribution_reference(
    logits: np.ndarray,
    history: Sequence[int] = (),
    *,
    temperature: float = 0.8,
    top_k: int = 40,
    top_p: float = 0.95,
    min_p: float = 0.05,
    typical_p: float = 1.0,
    **other: object,
) -> tuple[np.ndarray, np.ndarray]:
    """The candidates' ids and probabilities [n], in the order in which the kernel goes through them."""
    x = penalized_reference(logits, history, **other)
    temperature, top_p, min_p, typical_p = (float(np.float32(v)) for v in (temperature, top_p, min_p, typical_p))
    if temperature <= 0 or x.max() == -np.inf:
        return np.array([x.argmax()]), np.ones(1)
    by_k = 0 < top_k < len(x)
    ids = np.argsort(-x, kind="stable")
    if by_k:
        ids = ids[:top_k]
    if typical_p < 1:
        mass = _mass(x[ids])
        p = mass / mass.sum()
        with np.errstate(divide="ignore", invalid="ignore"):
            surprise = -np.log(p)
            entropy = np.where(p > 0, p * surprise, 0).sum()
        order = np.argsort(np.abs(surprise - entropy).astype(np.float32), kind="stable")
        kept = order[: _first(np.cumsum(mass[order]) / mass.sum() > typical_p)]
        ids = ids[np.sort(kept)]
    if top_p < 1:
        mass = _mass(x[ids])
        ids = ids[: _first(np.cumsum(mass) >= top_p * mass.sum())]
    if min_p > 0:
        ids = ids[x[ids] >= x[ids[0]] + np.float32(np.log(min_p))]
    elif not by_k and top_p >= 1 and typical_p >= 1:
        ids = np.arange(len(x))
    mass = _mass(x[ids], temperature)
    return ids, mass / mass.sum()


def sample_reference(logits: np.ndarray, history: Sequence[int], position: int, *, seed: int, **params: object) -> int:
    """The token that `sampling.sample` draws, but for rounding."""
    ids, p = distribution_reference(logits, history, **params)
    return int(ids[min(np.searchsorted(np.cumsum(p), uniform_reference(seed, position), side="right"), len(ids) - 1)])


def logprobs_reference(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities f64 [vocab] of the model's own distribution."""
    x = penalized_reference(logits).astype(np.float64)
    if x.max() == -np.inf:
        return x
    return x - x.max() - np.log(np.exp(x - x.max()).sum())


def _mass(x: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    return np.exp((x.astype(np.float64) - x.max()) / temperature)


def _first(found: np.ndarray) -> int:
    """How many entries there are up to the first true one, all if there is none."""
    return int(found.argmax()) + 1 if found.any() else len(found)
