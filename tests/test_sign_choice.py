"""Signs as a predictor are used where a profile shows that they pay, and only there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_team import local_engine, logits_of
from reference_model import forward, load_weights
from tiny_model import write_tiny_model

from hotneuron.actors.activity import Activity
from hotneuron.actors.engine import EngineConfig
from hotneuron.actors.preparation import Launch, lay_out, mode_of
from hotneuron.kernels.signs import SCORE_BINS, bin_edges, scores_reference
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Pack
from hotneuron.models.pack_writer import ensure_pack
from hotneuron.models.sparse_mode import SparseMode
from hotneuron.placement.histogram import BINS
from hotneuron.placement.sign_choice import choose_signs
from hotneuron.placement.statistics import Statistics

RELU: dict[str, Any] = {"metadata": {"hidden_activation": "relu"}}
TOKENS = [(7 * i * i + 3 * i + 1) % 273 for i in range(45)]


def test_scores_are_counted_by_whether_the_neuron_fires(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_model(path, type="F32", **RELU)
    weights, counts = load_weights(GGUFFile.open(path)), []

    def see(layer: int, rows: np.ndarray) -> np.ndarray:
        gate = weights[f"blk.{layer}.ffn_gate.weight"]
        scores, fires = scores_reference(np.where(gate < 0, np.float32(-1), np.float32(1)), rows), rows @ gate.T > 0
        bins = np.clip(np.floor(scores * 64).astype(int) + SCORE_BINS // 2, 0, SCORE_BINS - 1) + SCORE_BINS * ~fires
        counts.append(np.bincount(bins.ravel(), minlength=2 * SCORE_BINS))
        return np.ones_like(fires)

    for shares, threads in (((1,), 1), ((1, 2), 2)):
        engine = local_engine(path, shares, threads, kind="signed", thresholds=(-1e30,) * 2, has_histogram=True)
        logits_of(engine, TOKENS)
        found = Activity.of(engine.exchange.activity(), engine.pack, engine.plan, engine.config.ffn).histogram
        counts.clear()
        forward(engine.config, weights, TOKENS, active=see, active_sees="normed")
        for layer in range(2):
            assert found[layer].sum() == engine.config.ffn * len(TOKENS)
            # An input that rounds to the other side of 0 moves the scores of all neurons of its row by one step.
            assert np.abs(found[layer] - counts[layer]).sum() <= 2 * engine.config.ffn
            assert found[layer, :SCORE_BINS].sum() > 1000 < found[layer, SCORE_BINS:].sum()


def measured(file: GGUFFile, config: ModelConfig, silent_score: float) -> Statistics:
    """A tenth of the neurons fires, at scores from 1 to 2; the others are silent, at one score."""
    signs = np.zeros((config.n_layers, 2 * SCORE_BINS), np.int64)
    signs[:, SCORE_BINS // 2 + 64 : SCORE_BINS // 2 + 128] = 100
    signs[:, SCORE_BINS + np.searchsorted(bin_edges(), silent_score, side="right") - 1] = 9 * 6400
    fires = np.full((config.n_layers, config.ffn), 0.1, np.float32)
    return Statistics(file.content_key(), 1000, fires, fires, np.zeros((config.n_layers, BINS), np.int64), signs)


def test_signs_are_chosen_where_they_pay(tmp_path: Path) -> None:
    path, kept = tmp_path / "m.gguf", tmp_path / "statistics.npz"
    write_tiny_model(path, type="Q4_0", **RELU)
    file = GGUFFile.open(path)
    config, wanted = ModelConfig.from_file(file), EngineConfig(path, context_tokens=64)
    assert mode_of(file, config, wanted).name == "exact"  # nobody has measured anything
    wanted = replace(wanted, statistics_path=kept)

    good, bad = measured(file, config, 0.0), measured(file, config, 1.5)
    choice = choose_signs(file, config, good)
    assert choice.dials == (1.0, 1.0) and choice.recall == 1 and choice.share == pytest.approx(0.1)
    assert choice.pays and choice.ffn_bytes < 0.8 * choice.exact_ffn_bytes
    lossy = choose_signs(file, config, good, recall=0.5)
    assert lossy.dials == (1.5, 1.5) and lossy.recall == 0.5 and lossy.share == pytest.approx(0.05)
    assert choose_signs(file, config, bad).share == pytest.approx(1) and not choose_signs(file, config, bad).pays

    for statistics, name in ((bad, "exact"), (replace(good, signs=good.signs[:0]), "exact"), (good, "sign")):
        statistics.save(kept)
        assert mode_of(file, config, wanted).name == name
    assert mode_of(file, config, replace(wanted, sparse="exact")).name == "exact"
    assert mode_of(file, config, replace(wanted, is_profiling=True)).name == "exact"
    pack = Pack(ensure_pack(file, config, folder=tmp_path, kind="signed"))
    for engine_config, dials in (
        (wanted, (1.0, 1.0)),
        (replace(wanted, sparse="sign", sparse_threshold=-0.5), (-0.5,) * 2),
    ):
        plan, _ = lay_out(pack, Launch(engine_config, config, SparseMode("sign"), pack.path, None), 1)
        assert plan.thresholds == dials
