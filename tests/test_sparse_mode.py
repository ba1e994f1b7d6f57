"""What a model runs as, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_tiny_model

from hotneuron.models.errors import RequestError
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.sparse_mode import sparse_mode


def config_of(tmp_path: Path, activation: str | None = None, **options: Any) -> ModelConfig:
    write_tiny_model(tmp_path / "m.gguf", **options)
    return ModelConfig.from_file(GGUFFile.open(tmp_path / "m.gguf"), activation)


def test_auto_computes_what_can_be_known(tmp_path: Path) -> None:
    assert sparse_mode(config_of(tmp_path, pwri=True)).name == "predictor"
    assert sparse_mode(config_of(tmp_path)).name == "dense"
    assert sparse_mode(config_of(tmp_path, "relu")).name == "exact"
    assert sparse_mode(config_of(tmp_path, arch="bamboo")).kind == "gated"
    assert sparse_mode(config_of(tmp_path, "relu"), "off").kind == "dense"
    assert sparse_mode(config_of(tmp_path, pwri=True), "exact").kind == "gated"
    assert sparse_mode(config_of(tmp_path, pwri=True), "sign").kind == "signed"
    assert sparse_mode(config_of(tmp_path), sparsity=0.4).name == "threshold"


@pytest.mark.parametrize(
    ("asked", "sparsity", "says"),
    [("exact", None, "silu"), ("sign", None, "silu"), ("predictor", None, "fc1"), ("of", None, "auto"),
     ("auto", 1.0, "0.4"), ("auto", float("nan"), "0.4"), ("off", 0.4, "give one")],
)  # fmt: skip
def test_what_a_model_cannot_do_is_refused(tmp_path: Path, asked: str, sparsity: float | None, says: str) -> None:
    with pytest.raises(RequestError, match=says):
        sparse_mode(config_of(tmp_path), asked, sparsity)
