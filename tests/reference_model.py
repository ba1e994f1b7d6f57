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
    active: Callable[[int, np.ndarray], np.ndarray] | None = None,
    active_sees: str = "residual",
) -> np.ndarray:
    """Logits after each token, f64[n, vocab], of one sequence that starts at position 0.

    `see` is what the product with the matrix of that name makes of its input, and `keep` what the KV cache makes of its
    rows: an engine rounds there. `active(layer, rows)` says which neurons count, bool[n, ffn]; rows, f64[n, hidden], is
    what a predictor looks at: the residual stream, after attention or (parallel) before the layer, or the FFN's input.
    """
    n = len(tokens)
    wide = {name: values.astype(np.float64) for name, values in weights.items()}

    def product(rows: np.ndarray, name: str) -> np.ndarray:
        return see(rows, f"{name}.weight") @ wide[f"{name}.weight"].T + wide.get(f"{name}.bias", 0.0)

    def norm(rows: np.ndarray, name: str) -> np.ndarray:
        if config.norm == "layer":
            return layer_norm(rows, wide[f"{name}.weight"], wide[f"{name}.bias"], config.norm_eps)
        return rms_norm(rows, wide[f"{name}.weight"], config.norm_eps)

    def attention(layer: int, normed: np.ndarray) -> np.ndarray:
        name = f"blk.{layer}.".__add__
        sizes = config.n_heads, config.n_kv_heads, config.n_kv_heads
        if config.fused_qkv:
            cuts = np.cumsum(sizes)[:2] * config.head_dim
            parts = np.split(product(normed, name("attn_qkv")), cuts, axis=1)
        else:
            parts = [product(normed, name(f"attn_{letter}")) for letter in "qkv"]
        q, k, v = (part.reshape(n, heads, config.head_dim) for part, heads in zip(parts, sizes, strict=True))
        if config.qk_norm:
            q = rms_norm(q, wide[name("attn_q_norm.weight")], config.norm_eps)
            k = rms_norm(k, wide[name("attn_k_norm.weight")], config.norm_eps)
        if config.positions == "rope":
            q, k = rotate(config, q, cos, sin), rotate(config, k, cos, sin)
        return product(_attention(q, keep(k), keep(v), allowed).reshape(n, -1), name("attn_output"))

    def neurons(layer: int, normed: np.ndarray, predicting: np.ndarray) -> np.ndarray:
        name = f"blk.{layer}.".__add__
        up = product(normed, name("ffn_up"))
        fired = activation(config, product(normed, name("ffn_gate")) if config.gated else up)
        if config.gated:
            fired = fired * (np.maximum(up, 0) if config.up_activation == "relu" else up)
        if active is not None:
            fired = np.where(active(layer, normed if active_sees == "normed" else predicting), fired, 0.0)
        if not config.down_transposed:
            return product(fired, name("ffn_down"))
        seen = see(fired, name("ffn_down_t.weight"))
        return seen @ wide[name("ffn_down_t.weight")] + wide.get(name("ffn_down_t.bias"), 0.0)

    x = wide["token_embd.weight"][list(tokens)]
    if config.positions == "learned":
        x = x + wide["position_embd.weight"][2 : n + 2]
    cos, sin = _angles(config, n)
    allowed = _mask(n, config.sliding_window)
    for layer in range(config.n_layers):
        name = f"blk.{layer}.".__add__
        if config.parallel:
            attended = attention(layer, norm(x, name("attn_norm_2" if config.attn_norm_2 else "attn_norm")))
            x = x + attended + neurons(layer, norm(x, name("attn_norm")), x)
        else:
            x = x + attention(layer, norm(x, name("attn_norm")))
            x = x + neurons(layer, norm(x, name("ffn_norm")), x)
    return product(norm(x, "output_norm"), "token_embd" if config.tied_embeddings else "output")


def activation(config: ModelConfig, x: np.ndarray) -> np.ndarray:
    if config.activation == "relu":
        return np.maximum(x, 0)
    if config.activation == "gelu":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    return x / (1.0 + np.exp(-x))


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    x = x - x.mean(axis=-1, keepdims=True)
    return rms_norm(x, weight, eps) + bias


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
