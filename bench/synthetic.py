"""Writes a sparse model of a named shape: a PWRI file with its predictor, and the dense GGUF of the same weights.

    python bench/synthetic.py relu-7b-half OUT.powerinfer.gguf --dense OUT.gguf [--active 0.11]

The sign of an FFN's first product follows a chosen law: its rows look at few dimensions of the residual stream, one of
which (the last) is constant and carries each neuron's threshold. The predictor looks at the same dimensions, through
relu(x) and relu(-x), so it is right but for rounding. Every matrix is integers times scales that Q4_0 holds exactly, so
that both files are one model. Layers are calibrated one after the other with tokens that pass through them.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import gguf
import numpy as np
import q4_0
from activity_law import rates, thresholds
from gguf.constants import GGMLQuantizationType as T
from make_shape import add_tokenizer
from q4_0 import BLOCK, NIBBLE_SD
from rich.console import Console
from rich.progress import track
from shapes import SHAPES, SparseShape

from hotneuron.models.gguf_writer import ModelWriter

CONSTANT = 8.0  # the last dimension of the residual stream, at every token
OUTPUT_RMS = 0.3  # what attention and FFN each add to a stream that begins with 1
THRESHOLD = -0.05  # below which a neuron is predicted not to fire: rounding moves few logits by more
CALIBRATION_TOKENS = 192


@dataclass(slots=True)
class Layer:
    """Blocks of one layer's matrices, u8 [rows, bytes] by role, and what the calibration tokens become."""

    blocks: dict[str, np.ndarray]
    x: np.ndarray  # f32 [tokens, hidden]
    active_share: float


def _normed(shape: SparseShape, x: np.ndarray) -> np.ndarray:
    if shape.architecture in ("opt", "falcon"):
        x = x - x.mean(axis=1, keepdims=True)
    return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + 1e-5)


def _random(rng: np.random.Generator, rows: int, columns: int, sd: float) -> tuple[np.ndarray, np.float16]:
    """Integers and the one scale of a matrix whose values deviate by `sd`."""
    return q4_0.random_integers(rng, rows, columns), np.float16(sd / NIBBLE_SD)


def _looked_at(rng: np.random.Generator, shape: SparseShape) -> np.ndarray:
    """The dimensions that decide, as many as the predictor has room for; the constant's block is not among them."""
    return np.sort(rng.permutation(shape.hidden - BLOCK)[: (shape.rank - BLOCK) // 2])


def make_layer(rng: np.random.Generator, shape: SparseShape, x: np.ndarray, active: float) -> Layer:
    """x: f32 [tokens, hidden] before the layer, some sequences one after the other."""
    hidden, ffn, blocks = shape.hidden, shape.ffn, {}
    attended = _attention(rng, shape, _normed(shape, x), blocks)
    seen = x if shape.architecture == "falcon" else x + attended
    z = _normed(shape, seen)

    dims = _looked_at(rng, shape)
    integers = np.zeros((ffn, hidden), np.int8)
    integers[:, dims] = q4_0.random_integers(rng, ffn, len(dims))
    scale = np.float16(1 / np.sqrt((z[:, dims] ** 2).mean() * len(dims)) / NIBBLE_SD)
    first = z[:, dims] @ (integers[:, dims].astype(np.float32) * np.float32(scale)).T  # [tokens, ffn]
    wanted = thresholds(rates(rng, ffn, active)) * first.std(axis=0) - first.mean(axis=0)
    constant, shift = float(z[:, -1].mean()), _shift(first, wanted, z[:, -1:], active)
    bias_scales = (-(wanted + shift) / constant / 7).astype(np.float16)
    scales = np.full((ffn, hidden // BLOCK), scale, np.float16)
    integers[:, -1], scales[:, -1] = 7, bias_scales
    first += z[:, -1:] * (7 * bias_scales.astype(np.float32))
    blocks[shape.first] = q4_0.pack(integers, scales)
    _predictor(shape, dims, integers, scale, bias_scales, blocks)

    h = np.maximum(first, 0)
    if shape.is_gated:
        up, up_scale = _random(rng, ffn, hidden, 1 / np.sqrt(hidden))
        blocks["ffn_up"] = q4_0.pack(up, up_scale)
        raised = z @ q4_0.values(up, up_scale).T
        h *= np.maximum(raised, 0) if shape.architecture == "bamboo" else raised
    down, down_scale = _random(rng, ffn, hidden, OUTPUT_RMS / np.sqrt((h * h).sum(axis=1).mean()))
    down[:, -1] = 0
    blocks["ffn_down_t"] = q4_0.pack(down, down_scale)
    blocks["ffn_down"] = q4_0.pack(np.ascontiguousarray(down.T), down_scale)
    after = x + attended + h @ q4_0.values(down, down_scale)
    return Layer(blocks, after, float((first > 0).mean()))


def _shift(first: np.ndarray, wanted: np.ndarray, constant: np.ndarray, active: float) -> float:
    """What all thresholds have to move by, so that the calibration tokens activate the wanted share."""
    low, high, relative = -4.0, 4.0, constant / constant.mean()
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if (first > (wanted + middle) * relative).mean() > active else (low, middle)
    return low


def _predictor(
    shape: SparseShape,
    dims: np.ndarray,
    integers: np.ndarray,
    scale: np.float16,
    bias_scales: np.ndarray,
    blocks: dict[str, np.ndarray],
) -> None:
    """fc1: x and -x of each dimension in turn, then the constant; fc2: the first matrix's weights for them."""
    hidden, ffn, rank = shape.hidden, shape.ffn, shape.rank
    fc1, fc2 = np.zeros((rank, hidden), np.int8), np.zeros((ffn, rank), np.int8)
    pairs = np.arange(len(dims))
    fc1[2 * pairs, dims] = fc1[2 * pairs + 1, dims] = -8
    fc1_scales = np.full((rank, hidden // BLOCK), np.float16(-1 / 8))
    fc1_scales[2 * pairs + 1] = np.float16(1 / 8)
    at = rank - BLOCK
    fc1[at, -1] = -8
    fc2[:, 2 * pairs], fc2[:, 2 * pairs + 1] = integers[:, dims], -integers[:, dims]
    fc2[:, at] = 7
    fc2_scales = np.full((ffn, rank // BLOCK), scale, np.float16)
    fc2_scales[:, -1] = bias_scales
    blocks["fc1"], blocks["fc2"] = q4_0.pack(fc1, fc1_scales), q4_0.pack(fc2, fc2_scales)


def _attention(
    rng: np.random.Generator, shape: SparseShape, z: np.ndarray, blocks: dict[str, np.ndarray]
) -> np.ndarray:
    """Random attention, and what it adds to the calibration tokens (positions left out, which changes no size)."""
    hidden, head, sd = shape.hidden, shape.head_dim, 1 / np.sqrt(shape.hidden)
    kv = head * shape.kv_heads
    parts = {role: _random(rng, rows, hidden, sd) for role, rows in (("q", hidden), ("k", kv), ("v", kv))}
    if shape.architecture == "falcon":
        scale = parts["q"][1]
        blocks["attn_qkv"] = q4_0.pack(np.concatenate([integers for integers, _ in parts.values()]), scale)
    else:
        blocks |= {f"attn_{role}": q4_0.pack(*part) for role, part in parts.items()}
    q, k, v = ((z @ q4_0.values(*part).T).reshape(len(z), -1, head) for part in parts.values())
    half, group, found = len(z) // 4, shape.heads // shape.kv_heads, []
    for start in range(0, len(z), half):  # four sequences
        rows = slice(start, start + half)
        keys, values = (np.repeat(a[rows], group, axis=1) for a in (k, v))
        scores = np.einsum("qhd,khd->hqk", q[rows], keys, optimize=True) / np.sqrt(head)
        scores = np.where(np.tri(len(keys), dtype=bool), scores, -np.inf)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        scores /= scores.sum(axis=-1, keepdims=True)
        found.append(np.einsum("hqk,khd->qhd", scores, values, optimize=True).reshape(-1, hidden))
    mixed = np.concatenate(found)
    integers, scale = _random(rng, hidden, hidden, OUTPUT_RMS / np.sqrt((mixed * mixed).sum(axis=1).mean()))
    integers[-1] = 0
    blocks["attn_output"] = q4_0.pack(integers, scale)
    return mixed @ q4_0.values(integers, scale).T


def _embedding(rng: np.random.Generator, shape: SparseShape) -> tuple[np.ndarray, np.ndarray]:
    """Integers and scales of an embedding whose last dimension is the constant, alone in its block."""
    integers = q4_0.random_integers(rng, shape.vocab, shape.hidden)
    scales = np.full((1, shape.hidden // BLOCK), np.float16(1 / NIBBLE_SD))
    integers[:, -BLOCK:] = 0
    integers[:, -1], scales[:, -1] = 7, np.float16(CONSTANT / 7)
    return integers, scales


def _add_metadata(writer: ModelWriter, shape: SparseShape, name: str, is_pwri: bool) -> None:
    m = writer.metadata
    m.add_name(f"synthetic {name}")
    m.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    m.add_block_count(shape.layers)
    m.add_context_length(shape.context_tokens)
    m.add_embedding_length(shape.hidden)
    m.add_feed_forward_length(shape.ffn)
    m.add_head_count(shape.heads)
    m.add_head_count_kv(shape.kv_heads)
    if shape.is_gated:
        m.add_layer_norm_rms_eps(1e-5)
    else:
        m.add_layer_norm_eps(1e-5)
    if shape.architecture != "opt":
        m.add_rope_dimension_count(shape.head_dim)
        m.add_rope_freq_base(10000.0)
    m.add_vocab_size(shape.vocab)
    m.add_string(f"{shape.architecture}.hidden_activation", "relu")
    if is_pwri:
        m.add_float32("powerinfer.sparse_threshold", THRESHOLD)
    add_tokenizer(m, shape.vocab)


def _declare(writer: ModelWriter, shape: SparseShape, is_pwri: bool) -> None:
    for name, size in shape.outer_matrices():
        writer.declare(name, size, T.Q4_0)
    for name in _outer_vectors(shape):
        writer.declare(name, (shape.hidden,), T.F32)
    for layer in range(shape.layers):
        for name in shape.layer_vectors(is_pwri):
            writer.declare(f"blk.{layer}.{name}", (_length(shape, name),), T.F32)
        for role, size in shape.layer_matrices(is_pwri).items():
            writer.declare(f"blk.{layer}.{role}.weight", size, T.Q4_0)


def _length(shape: SparseShape, name: str) -> int:
    if name == "ffn_up.bias":
        return shape.ffn
    return shape.head_dim * shape.kv_heads if name in ("attn_k.bias", "attn_v.bias") else shape.hidden


def _outer_vectors(shape: SparseShape) -> dict[str, float]:
    weight = {"output_norm.weight": 1.0}
    return weight if shape.is_gated else weight | {"output_norm.bias": 0.0}


def write_synthetic(
    paths: dict[Literal["PWRI", "GGUF"], Path], shape: SparseShape, name: str, active: float = 0.115, seed: int = 0
) -> list[float]:
    """Writes one model as a PWRI file, a dense one, or both; returns each layer's share of active neurons."""
    rng = np.random.Generator(np.random.SFC64(seed))
    with contextlib.ExitStack() as stack:
        writers = {
            magic == "PWRI": stack.enter_context(ModelWriter(path, shape.architecture, magic))
            for magic, path in paths.items()
        }
        for is_pwri, writer in writers.items():
            _add_metadata(writer, shape, name, is_pwri)
            _declare(writer, shape, is_pwri)
        integers, scales = _embedding(rng, shape)
        outer = {"token_embd.weight": q4_0.pack(integers, scales)}
        sample = rng.integers(0, shape.vocab, CALIBRATION_TOKENS)
        x = q4_0.values(integers[sample], scales)
        for tensor, size in shape.outer_matrices():
            if tensor not in outer:
                sd = 0.0 if tensor.startswith("position") else 1 / np.sqrt(shape.hidden)
                outer[tensor] = q4_0.pack(*_random(rng, size[1], size[0], sd))
        for writer in writers.values():
            for tensor, data in outer.items():
                writer.write(tensor, data)
            for tensor, value in _outer_vectors(shape).items():
                writer.write(tensor, np.full(shape.hidden, value, np.float32))
        shares = []
        console = Console(stderr=True)
        for index in track(range(shape.layers), f"writing {name}", console=console, transient=True):
            layer = make_layer(rng, shape, x, active)
            x = layer.x
            shares.append(layer.active_share)
            for is_pwri, writer in writers.items():
                for tensor, value in shape.layer_vectors(is_pwri).items():
                    writer.write(f"blk.{index}.{tensor}", np.full(_length(shape, tensor), value, np.float32))
                for role in shape.layer_matrices(is_pwri):
                    writer.write(f"blk.{index}.{role}.weight", layer.blocks[role])
    return shares


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path, help="the PWRI file")
    parser.add_argument("--dense", type=Path, help="the dense GGUF of the same model")
    parser.add_argument("--active", type=float, default=0.115, help="mean share of neurons that fire (default: 0.115)")
    arguments = parser.parse_args()
    files: dict[Literal["PWRI", "GGUF"], Path] = {"PWRI": arguments.out}
    if arguments.dense is not None:
        files["GGUF"] = arguments.dense
    found = write_synthetic(files, SHAPES[arguments.shape], arguments.shape, arguments.active)
    print(f"active: {np.mean(found):.1%} of the neurons, {min(found):.1%} to {max(found):.1%} in a layer")
