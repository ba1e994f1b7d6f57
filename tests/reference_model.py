"""The whole model, slowly and plainly, in float64 NumPy: the oracle for the engine. Weights are f32 by GGUF name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from hotneuron.models.dequantize import dequantize
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig


def load_weights(file: GGUFFile) -> dict[str, np.ndarray]:
    """Every tensor of the file as f32 in C order, by name."""
    return {name: dequantize(file.raw(name), info.type, info.shape) for name, info in file.tensors.items()}


def forward(config: ModelConfig, weights: Mapping[str, np.ndarray], tokens: Sequence[int]) -> np.ndarray:
    """Logits after each token, f64[n, vocab], of one sequence that starts at position 0."""
    n = len(tokens)
    embedding = weights["token_embd.weight"]
    x = embedding[list(tokens)].astype(np.float64)
    cos, sin = _angles(config, n)
    allowed = _mask(n, config.sliding_window)
    for layer in range(config.n_layers):

        def weight(name: str, prefix: str = f"blk.{layer}.") -> np.ndarray:
            return weights[prefix + name].astype(np.float64)

        normed = rms_norm(x, weight("attn_norm.weight"), config.norm_eps)
        projected = []
        for role, heads in (("attn_q", config.n_heads), ("attn_k", config.n_kv_heads), ("attn_v", config.n_kv_heads)):
            rows = normed @ weight(f"{role}.weight").T
            if config.qkv_bias:
                rows = rows + weight(f"{role}.bias")
            projected.append(rows.reshape(n, heads, config.head_dim))
        q, k, v = projected
        if config.qk_norm:
            q = rms_norm(q, weight("attn_q_norm.weight"), config.norm_eps)
            k = rms_norm(k, weight("attn_k_norm.weight"), config.norm_eps)
        q, k = rotate(config, q, cos, sin), rotate(config, k, cos, sin)
        x = x + _attention(q, k, v, allowed).reshape(n, -1) @ weight("attn_output.weight").T

        normed = rms_norm(x, weight("ffn_norm.weight"), config.norm_eps)
        gate = normed @ weight("ffn_gate.weight").T
        up = normed @ weight("ffn_up.weight").T
        x = x + (gate / (1.0 + np.exp(-gate)) * up) @ weight("ffn_down.weight").T
    x = rms_norm(x, weights["output_norm.weight"].astype(np.float64), config.norm_eps)
    output = embedding if config.tied_embeddings else weights["output.weight"]
    return x @ output.astype(np.float64).T


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
