"""How far one run of a model is from another: KL divergence of the next token, and whether the likeliest agrees.

Source: llama.cpp tools/perplexity/perplexity.cpp (--kl-divergence), which keeps the base's distributions too.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hotneuron.models.arrays_file import load_arrays, save_arrays
from hotneuron.models.errors import ModelFileError

_ROWS = 64  # compared at once, in f64


@dataclass(frozen=True, slots=True)
class Base:
    """The run to compare with."""

    chunks: np.ndarray  # int32 [chunks, context tokens]
    logprobs: np.ndarray  # f32 [chunks, scored, vocab]: of the token after each of the last `scored`, the end's aside

    @classmethod
    def load(cls, path: Path) -> Base:
        """Raises NotFoundError, ModelFileError."""
        found = load_arrays(path, {"chunks": ("<i4", 2), "logprobs": ("<f4", 3)})
        chunks, logprobs = found["chunks"], found["logprobs"]
        scored = chunks.shape[1] - chunks.shape[1] // 2 - 1
        if not chunks.size or logprobs.shape[:2] != (len(chunks), scored) or not logprobs.shape[2]:
            raise ModelFileError(path, "logprobs", f"shape {logprobs.shape} for chunks of shape {chunks.shape}")
        if chunks.min() < 0 or chunks.max() >= logprobs.shape[2]:
            raise ModelFileError(path, "chunks", f"a token is outside 0 to {logprobs.shape[2] - 1}")
        return cls(chunks, logprobs)

    def save(self, path: Path) -> None:
        """Raises StorageError."""
        save_arrays(path, {"chunks": self.chunks.astype("<i4"), "logprobs": self.logprobs.astype("<f4")})


@dataclass(frozen=True, slots=True)
class Divergence:
    """Over all scored positions, in nats."""

    kld_mean: float
    kld_error: float  # standard error of the mean
    kld_median: float
    kld_p99: float
    kld_max: float
    same_top: float  # share of positions with the same likeliest token
    base_ppl: float
    ppl: float
    tokens: int


class Comparison:
    """Gathers the positions of one chunk after the other."""

    def __init__(self) -> None:
        self._kl: list[np.ndarray] = []
        self._same: list[np.ndarray] = []
        self._losses: list[np.ndarray] = []

    def add(self, base: np.ndarray, found: np.ndarray, targets: np.ndarray) -> None:
        """base, found: f32 [tokens, vocab] log-probabilities; targets: int [tokens]."""
        assert base.shape == found.shape and len(targets) == len(base)
        for at in range(0, len(base), _ROWS):
            p, q = base[at : at + _ROWS].astype(np.float64), found[at : at + _ROWS].astype(np.float64)
            self._kl.append((np.exp(p) * (p - q)).sum(axis=1))
            self._same.append(p.argmax(axis=1) == q.argmax(axis=1))
            rows = np.arange(len(p))
            self._losses.append(np.stack([-a[rows, targets[at : at + _ROWS]] for a in (p, q)]))

    def result(self) -> Divergence:
        kl, losses = np.concatenate(self._kl), np.concatenate(self._losses, axis=1)
        base_ppl, ppl = np.exp(losses.mean(axis=1))
        return Divergence(
            kld_mean=float(kl.mean()),
            kld_error=float(kl.std(ddof=1) / np.sqrt(len(kl))) if len(kl) > 1 else 0.0,
            kld_median=float(np.median(kl)),
            kld_p99=float(np.quantile(kl, 0.99)),
            kld_max=float(kl.max()),
            same_top=float(np.concatenate(self._same).mean()),
            base_ppl=float(base_ppl),
            ppl=float(ppl),
            tokens=len(kl),
        )
