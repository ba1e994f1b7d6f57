"""Histograms of magnitudes by the upper bits of their f32: eight bins an octave, so no range need be known before."""

from __future__ import annotations

import numpy as np

BINS = 2048
SHIFT = 20  # of a non-negative f32's bits, to its bin


def edges() -> np.ndarray:
    """f64 [BINS + 1]: where bins begin; those of infinity and NaN have no width."""
    bits = np.minimum(np.arange(BINS + 1, dtype=np.int64) << SHIFT, 0x7F7FFFFF)
    return bits.astype(np.uint32).view(np.float32).astype(np.float64)


def share_below(histogram: np.ndarray, value: float) -> float:
    """Share of the magnitudes counted in int64 [BINS] that lie below a value, even within a bin."""
    at, total = edges(), histogram.sum()
    counted = np.concatenate([[0], np.cumsum(histogram)])
    return float(np.interp(value, at, counted) / total) if total else 0.0


def quantile(histogram: np.ndarray, share: float) -> float:
    """The value that this share of the magnitudes lies below."""
    counted = np.concatenate([[0], np.cumsum(histogram)])
    wanted = share * counted[-1]
    bin_ = min(int(np.searchsorted(counted, wanted, side="right")) - 1, BINS - 1)
    low, high = edges()[bin_ : bin_ + 2]
    inside = (wanted - counted[bin_]) / max(1, histogram[bin_])
    return float(low + (high - low) * min(max(inside, 0.0), 1.0))


def mean_square(histogram: np.ndarray) -> float:
    """Of the magnitudes, each taken for the middle of its bin."""
    at = edges()
    middles = (at[:-1] + at[1:]) / 2
    finite = histogram * (at[1:] > at[:-1])
    return float((finite * middles**2).sum() / max(1, finite.sum()))
