"""The step program: what the workers compute, against NumPy, and the same bits however prompts and teams are cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as T
from local_team import local_engine, logits_of
from reference_model import forward
from tiny_model import write_tiny_model

from hotneuron.kernels import formats
from hotneuron.kernels.activations import quantize_reference
from hotneuron.models.errors import RequestError
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig

YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
MIXED = {"attn_k": "F16", "attn_v": "Q6_K", "ffn_up": "Q5_1", "ffn_down": "BF16"}
WIDE: dict[str, Any] = {"hidden": 256, "ffn": 512, "n_heads": 8, "n_kv_heads": 2}  # for blocks of 256
FACTORS = np.linspace(1, 8, 16).astype(np.float32)
MODELS: dict[str, dict[str, Any]] = {
    **{type_.name: {"type": type_.name, **(WIDE if "_K" in type_.name else {})} for type_ in formats.FORMAT_OF},
    "mixed": {"type": "Q4_0", "types": MIXED, **WIDE},
    "untied": {"type": "Q8_0", "tied": False, "types": {"output": "Q6_K", "token_embd": "F16"}, **WIDE},
    "qwen2": {"arch": "qwen2", "type": "Q5_0"},
    "qwen3": {"arch": "qwen3", "type": "F16", "n_heads": 6, "n_kv_heads": 3, "head_dim": 64},
    "window": {"type": "F32", "sliding_window": 20},
    "yarn": {"arch": "qwen2", "type": "F32", "rope_scaling": YARN},
    "llama3": {"type": "F32", "rope_freqs": FACTORS},
    "linear": {"type": "F16", "rope_scaling": {"type": "linear", "factor": 4.0}},
    "half turned": {"type": "F16", "metadata": {"rope.dimension_count": 16}},
    "heads of 8": {"type": "Q4_1", "n_heads": 12, "n_kv_heads": 4, "head_dim": 8},
    "heads of 24": {"type": "Q8_0", "n_heads": 4, "n_kv_heads": 2, "head_dim": 24},
    # LayerNorm's biases, the two products of a slot, the table of positions, neurons turned round.
    "falcon-7B": {"arch": "falcon", "type": "Q8_0", "hidden": 192, "n_heads": 3, "n_kv_heads": 1, "head_dim": 64},
    "falcon-40B": {"arch": "falcon", "type": "F16", "attn_norm_2": True, "n_heads": 8, "n_kv_heads": 2, "tied": False},
    "falcon sparse": {
        "arch": "falcon",
        "type": "Q4_0",
        "attn_norm_2": True,
        "pwri": True,
        "types": {"attn_qkv": "F16"},
    },
    "falcon odd": {"arch": "falcon", "type": "F32", "hidden": 72, "n_heads": 5, "head_dim": 20, "ffn": 100},
    "opt": {"arch": "opt", "type": "Q8_0", "n_heads": 4, "n_kv_heads": 4, "head_dim": 80},
    "opt odd": {
        "arch": "opt",
        "type": "F32",
        "hidden": 72,
        "n_heads": 5,
        "n_kv_heads": 5,
        "head_dim": 20,
        "ffn": 100,
        "context_tokens": 1152,
    },
    "opt sparse": {"arch": "opt", "type": "Q8_0", "pwri": True, "n_heads": 3, "n_kv_heads": 3},
    "bamboo": {"arch": "bamboo", "type": "Q5_0", "n_heads": 4, "n_kv_heads": 2, "head_dim": 128},
    "bamboo sparse": {"arch": "bamboo", "type": "Q4_0", "pwri": True, "predictor_rank": (32, 64)},
    "relu": {"type": "F32", "metadata": {"hidden_activation": "relu"}},
    "relu sparse": {"type": "F16", "pwri": True},
    "gelu": {"type": "Q4_1", "metadata": {"hidden_activation": "gelu"}},
    "odd sizes": {"type": "F32", "hidden": 72, "n_heads": 5, "n_kv_heads": 5, "head_dim": 20, "ffn": 100, "vocab": 283},
}
TOKENS = [(7 * i * i + 3 * i + 1) % 273 for i in range(70)]
# Alone, four and eight to a group. Short, because one value that rounds the other way changes all that comes after it.
SHORT = [TOKENS[start : start + n] for start, n in zip(range(0, 60, 5), cycle((1, 3, 7)))]
QUANTA = 0.2  # what rounding of activations to int8 may change, in spreads of the logits; seen: 0.15


@dataclass(frozen=True, slots=True)
class Written:
    path: Path
    file: GGUFFile
    weights: dict[str, np.ndarray]  # as the file has them
    packed: dict[str, np.ndarray]  # as the pack has them: products of K-quants' scales rounded to f16


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Written]:
    @cache
    def write(name: str) -> Written:
        path = tmp_path_factory.mktemp("model") / "tiny.gguf"
        weights = write_tiny_model(path, **MODELS[name])
        file = GGUFFile.open(path)
        packed = dict(weights)
        for tensor, info in file.tensors.items():
            if len(info.shape) == 2:
                columns, rows = info.shape
                tiles = formats.pack(file.raw(tensor), T(info.type), rows, columns)
                packed[tensor] = formats.unpack(tiles, formats.FORMAT_OF[T(info.type)], rows, columns)
                if tensor.endswith("ffn_down_t.weight") and T(info.type) != T.F32:
                    packed[tensor] = weights[tensor].astype(np.float16).astype(np.float32)
        return Written(path, file, weights, packed)

    return write


def rounded_forward(config: ModelConfig, model: Written, tokens: Sequence[int]) -> np.ndarray:
    """The oracle's logits when it rounds where the engine does: inputs of integer products to int8, KV rows to f16."""

    def see(rows: np.ndarray, name: str) -> np.ndarray:
        is_float = formats.FORMAT_OF[T(model.file.tensors[name].type)] >= formats.HALF
        # The pack keeps the output projection of padded heads, and a down projection that it turns round, in floats.
        if is_float or (config.head_dim % 16 and name.endswith("attn_output.weight")) or "ffn_down_t" in name:
            return rows
        return quantize_reference(rows).astype(np.float64)

    return forward(config, model.packed, tokens, see, lambda rows: rows.astype(np.float16).astype(np.float64))


def is_float(name: str) -> bool:
    options = MODELS[name]
    return all(kind in ("F32", "F16", "BF16") for kind in (options["type"], *options.get("types", {}).values()))


def distances(got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> np.ndarray:
    """Per token, the largest difference of a logit, in spreads of the logits."""
    spread = np.concatenate(wanted).std()
    return np.concatenate([np.abs(a - b).max(axis=1) for a, b in zip(got, wanted, strict=True)]) / spread


def assert_close(name: str, got: Sequence[np.ndarray], wanted: Sequence[np.ndarray]) -> None:
    distance = distances(got, wanted)
    assert np.median(distance) < 1e-4  # but for values that f32 sums round the other way, to int8 or f16
    assert distance.max() < (1e-3 if is_float(name) else QUANTA)


@pytest.mark.parametrize("name", MODELS)
def test_logits(written: Callable[[str], Written], name: str) -> None:
    model = written(name)
    engine = local_engine(model.path)
    got = [logits_of(engine, tokens) for tokens in SHORT]
    assert_close(name, got, [rounded_forward(engine.config, model, tokens) for tokens in SHORT])
    long, exact = logits_of(engine, TOKENS), forward(engine.config, model.weights, TOKENS)
    assert np.all(np.isfinite(long))
    assert distances([long], [exact]).max() < (0.01 if is_float(name) else QUANTA)


@pytest.mark.parametrize("name", ["window", "llama3", "odd sizes", "falcon odd", "opt odd"])
def test_logits_of_a_long_context(written: Callable[[str], Written], name: str) -> None:
    model, tokens = written(name), (TOKENS * 16)[:1100]
    engine = local_engine(model.path, (1, 2), threads=2, context_tokens=1152)
    distance = distances([logits_of(engine, tokens)], [rounded_forward(engine.config, model, tokens)])
    assert np.median(distance) < 1e-3 and distance.max() < 0.01  # angles are f32: off by 1e-4 at position 1000


# Without "opt": a cut between heads of 80 falls into blocks of 32 columns, whose scales are then those of each side.
SPLIT = ("falcon-7B", "falcon-40B", "falcon odd", "opt odd", "opt sparse", "bamboo", "relu")
NEW = (*SPLIT, "opt")
SHARES: tuple[tuple[float, ...], ...] = ((1, 0), (0, 1), (1, 1), (1, 9), (9, 1), (3, 1, 2), (1,) * 8)


@pytest.mark.parametrize("name", ["F32", "Q4_0", "mixed", "qwen2", "qwen3", "heads of 8", "odd sizes", *SPLIT])
def test_logits_do_not_depend_on_the_split(written: Callable[[str], Written], name: str) -> None:
    path = written(name).path
    alone = [logits_of(local_engine(path), tokens) for tokens in SHORT]
    for shares in SHARES:
        split = local_engine(path, shares)
        assert_close(name, [logits_of(split, tokens) for tokens in SHORT], alone)


@pytest.mark.parametrize("name", ["F32", "mixed", "qwen2", "heads of 24", "window", *NEW])
@pytest.mark.parametrize("shares", [(1,), (2, 1)])
def test_logits_are_the_same_bits_with_any_threads_and_chunks(
    written: Callable[[str], Written], name: str, shares: tuple[float, ...]
) -> None:
    path = written(name).path
    wanted = logits_of(local_engine(path, shares), TOKENS)
    for threads, rows in ((1, 1), (1, 3), (2, 16), (3, 32), (16, 32)):
        found = logits_of(local_engine(path, shares, threads), TOKENS, rows)
        assert np.array_equal(found, wanted), f"{threads} threads, {rows} rows"


def test_workers_without_work_and_threads_without_rows(written: Callable[[str], Written]) -> None:
    """More workers than heads, neurons and cores, each with more threads than it has tiles."""
    path = written("odd sizes").path
    wanted = logits_of(local_engine(path), TOKENS[:9])
    found = logits_of(local_engine(path, (1,) * 16, 4), TOKENS[:9])
    assert distances([found], [wanted]).max() < 1e-3


@pytest.mark.parametrize("shares", [(1, 0), (0, 1), (0, 1, 0, 3), (1,) * 8])
def test_a_bias_is_added_once_whoever_has_heads(tmp_path: Path, shares: tuple[float, ...]) -> None:
    """Large biases, few heads: some workers have neurons alone, some nothing."""
    weights = write_tiny_model(tmp_path / "m.gguf", arch="opt", type="F32", n_heads=2, n_kv_heads=2, head_dim=48)
    raw = bytearray((tmp_path / "m.gguf").read_bytes())
    for name, values in weights.items():
        if name.endswith(("attn_output.bias", "ffn_down.bias")):
            at = raw.index(values.tobytes())
            values *= 20
            raw[at : at + values.nbytes] = values.tobytes()
    (tmp_path / "m.gguf").write_bytes(raw)
    engine = local_engine(tmp_path / "m.gguf", shares, threads=2)
    found = logits_of(engine, TOKENS[:20])
    keep = lambda rows: rows.astype(np.float16).astype(np.float64)  # noqa: E731
    expected = forward(engine.config, weights, TOKENS[:20], keep=keep)
    assert distances([found], [expected]).max() < 1e-3


def test_no_context_beyond_the_learned_positions(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m.gguf", arch="opt", context_tokens=48)
    assert len(logits_of(local_engine(tmp_path / "m.gguf", context_tokens=48), TOKENS[:48])) == 48
    with pytest.raises(RequestError, match="context_tokens=64: this model has learned 48 positions"):
        local_engine(tmp_path / "m.gguf", context_tokens=64)
