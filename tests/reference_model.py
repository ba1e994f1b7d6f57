"""The whole model, slowly and plainly, in float64 NumPy: the oracle for the engine. Weights are f32 by GGUF name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from hotneuron.models.dequantize import dequantize
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig


def load_weights(file: GGUFFile) -> dict[str, np.ndarray]:
    """Every tensor of the file as f32 in C order, by name."""
    return {name: dequantize(file.raw(name), info.type, info.shape) for name, info in file.tensors.items()}


def forward(
    config: ModelConfig,
    weights: Mapping[str, np.ndarray],
    tokens: Sequence[int],
    see: Callable[[np.ndarray, str], np.ndarray] = lambda rows, name: rows,
    keep: Callable[[np.ndarray], np.ndarray] = lambda rows: rows,
) -> np.ndarray:
    """Logits after each token, f64[n, vocab], of one sequence that starts at position 0.

    `see` is what the product with the matrix of that name makes of its input, and `keep` what the KV cache makes of its
    rows: an engine rounds there.
    """
    n = len(tokens)
    wide = {name: values.astype(np.float64) for name, values in weights.items()}

    def product(rows: np.ndarray, name: str) -> np.ndarray:
        return see(rows, name) @ wide[name].T

    x = wide["token_embd.weight"][list(tokens)]
    cos, sin = _angles(config, n)
    allowed = _mask(n, config.sliding_window)
    for layer in range(config.n_layers):
        name = f"blk.{layer}.".__add__
        normed = rms_norm(x, wide[name("attn_norm.weight")], config.norm_eps)
        projected = []
        for role, heads in (("attn_q", config.n_heads), ("attn_k", config.n_kv_heads), ("attn_v", config.n_kv_heads)):
            rows = product(normed, name(f"{role}.weight"))
            if config.qkv_bias:
                rows = rows + wide[name(f"{role}.bias")]
            projected.append(rows.reshape(n, heads, config.head_dim))
        q, k, v = projected
        if config.qk_norm:
            q = rms_norm(q, wide[name("attn_q_norm.weight")], config.norm_eps)
            k = rms_norm(k, wide[name("attn_k_norm.weight")], config.norm_eps)
        q, k = rotate(config, q, cos, sin), rotate(config, k, cos, sin)
        x = x + product(_attention(q, keep(k), keep(v), allowed).reshape(n, -1), name("attn_output.weight"))

        normed = rms_norm(x, wide[name("ffn_norm.weight")], config.norm_eps)
        gate, up = product(normed, name("ffn_gate.weight")), product(normed, name("ffn_up.weight"))
        x = x + product(gate / (1.0 + np.exp(-gate)) * up, name("ffn_down.weight"))
    x = rms_norm(x, wide["output_norm.weight"], config.norm_eps)
    return product(x, "token_embd.weight" if config.tied_embeddings else "output.weight")


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(config: ModelConfig, x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """RoPE of [n, heads, head_dim]; cos and sin are [n, dims / 2]."""
    half = config.rope.dims // 2
    pair = np.arange(half)
    first, second = (2 * pair, 2 * pair + 1) if config.rope.style == "interleaved" else (pair, pair + half)
    cos, sin = cos[:, None, :], sin[:, None, :]
    out = x.copy()
    out[..., first] = x[..., first] * cos - x[..., second] * sin
    out[..., second] = x[..., first] * sin + x[..., second] * cos
    return out


def _angles(config: ModelConfig, n: int) -> tuple[np.ndarray, np.ndarray]:
    frequencies, scale = config.rope.inverse_frequencies()
    angles = np.arange(n)[:, None] * frequencies.astype(np.float64)
    return np.cos(angles) * scale, np.sin(angles) * scale


def _mask(n: int, sliding_window: int) -> np.ndarray:
    """[query, key]: true where the query may look; a window of W is the W newest tokens, its own included."""
    age = np.arange(n)[:, None] - np.arange(n)[None, :]
    return (age >= 0) & ((age < sliding_window) if sliding_window else True)


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    shared = q.shape[1] // k.shape[1]  # query heads h * shared ... use key head h
    k, v = np.repeat(k, shared, axis=1), np.repeat(v, shared, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(allowed, scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hqk,khd->qhd", scores / scores.sum(axis=-1, keepdims=True), v)
