"""Statistics of what fires: kept without pickle, tied to their model, and what is drawn from them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import write_tiny_model

from hotneuron.models.errors import HotneuronError, NotFoundError, RequestError
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.placement import histogram
from hotneuron.placement.down_norms import down_norms
from hotneuron.placement.figures import check_figure_path, draw_activity
from hotneuron.placement.statistics import Statistics

LAYERS, FFN = 2, 160


def made(key: str = "0" * 64, layers: int = LAYERS, ffn: int = FFN) -> Statistics:
    rng = np.random.default_rng(1)
    values = np.abs(rng.standard_normal((layers, 20_000)) * np.array([[1.0], [0.1]])[:layers]).astype(np.float32)
    counts = np.stack([np.bincount(v.view(np.uint32) >> histogram.SHIFT, minlength=histogram.BINS) for v in values])
    fires = rng.random((layers, ffn), np.float32)
    return Statistics(key, 7, fires, fires * 2, counts.astype(np.int64))


def test_they_survive_their_file(tmp_path: Path) -> None:
    before = made()
    before.save(tmp_path / "s.npz")
    after = Statistics.load(tmp_path / "s.npz")
    assert (after.model_key, after.tokens) == (before.model_key, before.tokens)
    for name in ("fires", "adds", "histogram"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damage_is_an_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("s") / "s.npz"
    made(layers=1, ffn=8).save(path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        found = Statistics.load(path)
    except HotneuronError:
        return
    assert np.all((found.fires >= 0) & (found.fires <= 1))


def test_statistics_of_another_model_are_refused(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m.gguf")
    write_tiny_model(tmp_path / "other.gguf", seed=1)
    write_tiny_model(tmp_path / "wide.gguf", ffn=192)
    file = GGUFFile.open(tmp_path / "m.gguf")
    made(file.content_key()).save(tmp_path / "s.npz")
    assert Statistics.of_model(file, ModelConfig.from_file(file), tmp_path / "s.npz").tokens == 7
    for name, said in (("other", "the model with key"), ("wide", "2 layers of 192 neurons are expected, 2 of 160")):
        other = GGUFFile.open(tmp_path / f"{name}.gguf")
        with pytest.raises(RequestError, match=f"statistics of another model: .*{said}.*hotneuron profile"):
            Statistics.of_model(other, ModelConfig.from_file(other), tmp_path / "s.npz")
    with pytest.raises(NotFoundError, match="hotneuron profile"):
        Statistics.of_model(file, ModelConfig.from_file(file), tmp_path / "none.npz")


def test_a_copy_is_the_same_model(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "m.gguf")
    (tmp_path / "copy.gguf").write_bytes((tmp_path / "m.gguf").read_bytes())
    assert GGUFFile.open(tmp_path / "m.gguf").content_key() == GGUFFile.open(tmp_path / "copy.gguf").content_key()


@pytest.mark.parametrize("sparsity", [0.1, 0.4, 0.9])
def test_thresholds_leave_out_the_share_asked_for(sparsity: float) -> None:
    found = made()
    limits = found.thresholds(sparsity)
    shares = [histogram.share_below(layer, limit) for layer, limit in zip(found.histogram, limits, strict=True)]
    assert np.mean(shares) == pytest.approx(sparsity, abs=0.01)
    assert limits[0] > limits[1] and shares[0] < shares[1]  # the second layer's activations are smaller


def test_quantiles_lie_within_their_bins() -> None:
    counts = made().histogram[0]
    for share in (0.01, 0.5, 0.99):
        assert histogram.share_below(counts, histogram.quantile(counts, share)) == pytest.approx(share, abs=1e-6)
    assert histogram.mean_square(counts) == pytest.approx(1, rel=0.05)


@given(st.sampled_from([1, 32]), st.integers(33, 200))
def test_an_order_is_a_permutation_most_active_first(unit: int, ffn: int) -> None:
    found = made(ffn=ffn)
    for layer, order in enumerate(found.order(unit)):
        assert sorted(order) == list(range(ffn))
        if unit == 1:
            assert np.all(np.diff(found.fires[layer, order]) <= 0)
        else:  # whole aligned blocks, as their shared scales need
            whole = order[: ffn // 32 * 32].reshape(-1, 32)
            assert np.all(whole == whole[:, :1] + np.arange(32)) and np.all(whole[:, 0] % 32 == 0)


def test_the_share_that_carries_most_activations() -> None:
    fires = np.array([[0.8, 0.1, 0.05, 0.05] + [0.0] * 6], np.float32)
    found = replace(made(layers=1, ffn=10), fires=fires)
    assert found.share_for(0.8) == pytest.approx([0.1])
    assert found.share_for(0.9) == pytest.approx([0.2])


@pytest.mark.parametrize("transposed", [False, True])
def test_norms_of_down_rows(tmp_path: Path, transposed: bool) -> None:
    weights = write_tiny_model(tmp_path / "m.gguf", type="F32", pwri=transposed)
    file = GGUFFile.open(tmp_path / "m.gguf")
    w = weights[f"blk.1.ffn_down{'_t' if transposed else ''}.weight"]
    norms = np.linalg.norm(w if transposed else w.T, axis=1)
    np.testing.assert_allclose(down_norms(file, ModelConfig.from_file(file), 1), norms, rtol=1e-5)


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_a_picture_is_drawn(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a.{suffix}"
    draw_activity(made(), path, "tiny")
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    with pytest.raises(RequestError, match=r"png or \.svg"):
        check_figure_path(tmp_path / "a.pdf")
