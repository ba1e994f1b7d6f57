"""Synthetic sparse models: one model in two files, whose predictor is right."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from local_team import local_engine, logits_of

from hotneuron.actors.activity import Activity
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.gguf_writer import ModelWriter
from hotneuron.models.model_config import ModelConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import activity_law
import q4_0
import synthetic
from shapes import SHAPES

TOKENS = [(37 * i * i + 11 * i + 5) % 400 for i in range(64)]


@pytest.mark.parametrize("name", ["tiny", "tiny-falcon", "tiny-opt"])
def test_both_files_are_one_model_and_the_predictor_is_right(tmp_path: Path, name: str) -> None:
    sparse, dense = tmp_path / "m.powerinfer.gguf", tmp_path / "m.gguf"
    synthetic.write_synthetic({"PWRI": sparse, "GGUF": dense}, SHAPES[name], name, active=0.11)
    assert ModelConfig.from_file(GGUFFile.open(sparse)).predictor_ranks == (96, 96)
    predicted, exact, plain = (
        local_engine(sparse, kind="predicted"),
        local_engine(dense, kind="gated"),
        local_engine(dense),
    )
    wanted = logits_of(plain, TOKENS, rows=1)
    assert logits_of(exact, TOKENS, rows=1).tobytes() == wanted.tobytes()
    got = logits_of(predicted, TOKENS, rows=1)
    assert np.median(np.abs(got - wanted)) < 0.02 * wanted.std()
    assert (got.argmax(axis=1) == wanted.argmax(axis=1)).mean() > 0.95
    marked, fired = (Activity.of(e.exchange.activity(), e.pack, e.plan, e.config.ffn) for e in (predicted, exact))
    assert 0.07 < fired.fires.mean() / len(TOKENS) < 0.16
    recall = np.minimum(marked.fires, fired.fires).sum() / fired.fires.sum()
    assert recall > 0.97  # a narrow model's predictor sees few dimensions, whose rounding counts more
    assert fired.fires.sum() / marked.listed.sum() > 0.9  # precision


def test_rates_follow_the_law_and_its_mean() -> None:
    rates = np.sort(activity_law.rates(np.random.default_rng(0), 11008, 0.11))[::-1]
    assert rates.mean() == pytest.approx(0.11, rel=1e-3)
    assert rates[: len(rates) * 26 // 100].sum() / rates.sum() == pytest.approx(0.8, abs=0.02)


def test_blocks_hold_integers_and_scales_exactly(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    integers, scales = q4_0.random_integers(rng, 5, 96), rng.standard_normal((5, 3)).astype(np.float16)
    from gguf import quants
    from gguf.constants import GGMLQuantizationType as T

    read = quants.dequantize(q4_0.pack(integers, scales), T.Q4_0)
    np.testing.assert_array_equal(read, q4_0.values(integers, scales))


def test_a_file_that_is_not_finished_does_not_appear(tmp_path: Path) -> None:
    from gguf.constants import GGMLQuantizationType as T

    with pytest.raises(AssertionError, match="never written"), ModelWriter(tmp_path / "m.gguf", "llama") as writer:
        writer.declare("a.weight", (32, 2), T.Q4_0)
    with pytest.raises(ZeroDivisionError), ModelWriter(tmp_path / "m.gguf", "llama") as writer:
        writer.declare("a.weight", (32, 2), T.F32)
        writer.write("a.weight", np.zeros((2, 32), np.float32))
        raise ZeroDivisionError
    assert not (tmp_path / "m.gguf").exists()
