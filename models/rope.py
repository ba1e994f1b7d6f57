"""Rotary position embedding: the angle per position of every pair of dimensions, with all context extensions.

Formulas are llama.cpp's (ggml rope_yarn and ggml_rope_yarn_corr_dims, b11434).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from hotneuron.models.architectures.architecture import Pairing

Scaling = Literal["none", "linear", "yarn", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    dims: int  # of each head, from its start; the rest is not turned
    theta: float
    style: Pairing
    scaling: Scaling = "none"
    factor: float = 1.0  # context extension; positions are divided by it
    original_context_tokens: int = 0
    ext_factor: float = 1.0  # YaRN: share of extrapolation
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    freq_factors: tuple[float, ...] = ()  # llama3: [dims / 2], each frequency is divided by its own

    def inverse_frequencies(self) -> tuple[np.ndarray, float]:
        """Radians per position, f32[dims / 2], and the factor by which cos and sin are multiplied (for q and for k)."""
        pair = np.arange(self.dims // 2, dtype=np.float64)
        frequencies = self.theta ** (-2.0 * pair / self.dims)
        if self.freq_factors:
            frequencies /= np.asarray(self.freq_factors, np.float64)
        scale = self.attn_factor
        if self.scaling == "linear":
            frequencies /= self.factor
        elif self.scaling == "yarn":
            low, high = self._yarn_bounds()
            ramp = 1.0 - np.clip((pair - low) / max(0.001, high - low), 0.0, 1.0)
            mix = ramp * self.ext_factor
            frequencies = frequencies / self.factor * (1.0 - mix) + frequencies * mix
            # A factor below one shortens the context, and then llama.cpp leaves the magnitude alone.
            if self.ext_factor and self.factor > 1.0:
                scale *= 1.0 + 0.1 * math.log(self.factor)
        return frequencies.astype(np.float32), scale

    def _yarn_bounds(self) -> tuple[float, float]:
        """The pairs between which YaRN passes from extrapolation to interpolation."""

        def pair_with(turns: float) -> float:
            positions_per_radian = self.original_context_tokens / (turns * 2 * math.pi)
            return self.dims * math.log(positions_per_radian) / (2 * math.log(self.theta))

        low, high = math.floor(pair_with(self.beta_fast)), math.ceil(pair_with(self.beta_slow))
        return max(0, low), min(self.dims - 1, high)
