"""Packs: what they hold of every architecture, and that it is what the file holds."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import write_tiny_model

from hotneuron.kernels import formats
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Pack
from hotneuron.models.pack_writer import ensure_pack


def packed(path: Path, **options: Any) -> tuple[Pack, dict[str, np.ndarray]]:
    """A model's pack and its weights."""
    weights = write_tiny_model(path, **options)
    file = GGUFFile.open(path)
    return Pack(ensure_pack(file, ModelConfig.from_file(file), folder=path.parent)), weights


@pytest.mark.parametrize("type_", ["Q4_0", "Q8_0", "F16"])
def test_fused_queries_keys_and_values_become_three_matrices(tmp_path: Path, type_: str) -> None:
    options: dict[str, Any] = {"n_heads": 6, "n_kv_heads": 2, "head_dim": 16}
    pack, weights = packed(tmp_path / "m.gguf", arch="falcon", type=type_, **options)
    for layer in range(2):
        q, k, v = (pack.values(f"{layer}.attn_{letter}") for letter in "qkv")
        assert (len(q), len(k), len(v)) == (96, 32, 32)
        np.testing.assert_array_equal(np.concatenate([q, k, v]), weights[f"blk.{layer}.attn_qkv.weight"])
    assert not [role for role in pack.matrices if role.endswith("attn_qkv")]


@pytest.mark.parametrize(
    ("type_", "kept_as"),
    [("Q4_0", formats.HALF), ("F16", formats.HALF), ("BF16", formats.BFLOAT), ("F32", formats.FLOAT)],
)
def test_down_turned_round_is_kept_in_floats(tmp_path: Path, type_: str, kept_as: int) -> None:
    pack, weights = packed(tmp_path / "m.gguf", pwri=True, type=type_, ffn=96 + 64)
    found = pack.matrices["1.ffn_down"]
    assert (found.rows, found.columns, found.format_id) == (96, 160, kept_as)
    expected = weights["blk.1.ffn_down_t.weight"].T
    np.testing.assert_allclose(pack.values("1.ffn_down"), expected, rtol=2**-11 if type_ == "Q4_0" else 0)


@pytest.mark.parametrize("arch", ["llama", "bamboo", "falcon", "opt"])
def test_a_dense_pack_has_no_predictor(tmp_path: Path, arch: str) -> None:
    dense, _ = packed(tmp_path / "dense.gguf", arch=arch)
    sparse, _ = packed(tmp_path / "sparse.gguf", arch=arch, pwri=True)
    assert list(sparse.matrices) == list(dense.matrices) and list(sparse.vectors) == list(dense.vectors)


def test_biases_and_positions(tmp_path: Path) -> None:
    pack, weights = packed(tmp_path / "m.gguf", arch="opt", ffn=160, hidden=96)
    for role in ("attn_norm", "attn_output", "attn_q", "ffn_norm", "ffn_up", "ffn_down"):
        stored = pack.vector(f"1.{role}_bias")
        values = weights[f"blk.1.{role}.bias"]
        np.testing.assert_array_equal(stored[: len(values)], values)
        assert len(stored) % 64 == 0 and not stored[len(values) :].any()
    np.testing.assert_array_equal(pack.values("position_embd"), weights["position_embd.weight"])


def test_a_vector_with_a_second_axis_of_length_one(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m.gguf", arch="opt")
    file = GGUFFile.open(tmp_path / "m.gguf")
    names = ("blk.0.attn_norm.weight", "blk.1.ffn_up.bias")
    for name in names:
        info = file.tensors[name]
        file.tensors[name] = dataclasses.replace(info, shape=(*info.shape, 1))
    pack = Pack(ensure_pack(file, ModelConfig.from_file(file), folder=tmp_path))
    assert {"0.attn_norm", "1.ffn_up_bias"} <= set(pack.vectors)
