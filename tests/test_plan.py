"""Plans: what is dealt to whom, and that teams whose shards differ from layer to layer compute what one worker does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_team import local_engine, logits_of
from tiny_model import write_tiny_model

from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Pack
from hotneuron.models.pack_writer import ensure_pack
from hotneuron.placement.plan import NEURON_UNIT, Cuts, Plan, Shard, cut_by, deal, weigh

TOKENS = [(7 * i * i + 3 * i + 1) % 273 for i in range(40)]
FFN, LAYERS = 250, 3  # four units, the last one padded


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_model(path, type="F16", n_layers=LAYERS, ffn=FFN, n_heads=4, n_kv_heads=2)
    return path


@pytest.fixture(scope="module")
def packed(model: Path) -> tuple[Pack, ModelConfig]:
    file = GGUFFile.open(model)
    config = ModelConfig.from_file(file)
    return Pack(ensure_pack(file, config, folder=model.parent)), config


@given(st.integers(0, 1000), st.lists(st.floats(0, 10), min_size=1, max_size=6).filter(lambda s: sum(s) > 0.1))
def test_deal_covers_all_in_order(total: int, shares: list[float]) -> None:
    ranges = deal(total, tuple(shares))
    assert len(ranges) == len(shares)
    assert [n for low, high in ranges for n in range(low, high)] == list(range(total))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=5).filter(any))
def test_shards_cover_the_model_once(packed: tuple[Pack, ModelConfig], shares: list[int]) -> None:
    config = packed[1]
    shards = shares_of(packed, *shares).shards
    one = shares_of(packed, 1).shards[0]
    for layer in range(LAYERS):
        ranges = [shard.neurons[layer] for shard in shards]
        assert [n for low, high in ranges for n in range(low, high, NEURON_UNIT)] == list(range(0, FFN, NEURON_UNIT))
    assert sum(shard.heads[1] - shard.heads[0] for shard in shards) == config.n_heads
    # A KV head between two workers is computed by both.
    assert sum(shard.weight_bytes for shard in shards) >= one.weight_bytes - len(shards)


def shares_of(packed: tuple[Pack, ModelConfig], *shares: float) -> Plan:
    pack, config = packed
    return weigh(pack.matrices, config, cut_by(config, shares), 64, 64)


def uneven(config: ModelConfig) -> Cuts:
    """Two workers; what each has differs from layer to layer, down to nothing."""
    neurons = tuple(((0, cut), (cut, 4 * NEURON_UNIT)) for cut in (NEURON_UNIT, 4 * NEURON_UNIT, 0))
    return replace(cut_by(config, (1, 1)), neurons=neurons)


@pytest.mark.parametrize("is_reference", [False, True], ids=["compiled", "NumPy"])
def test_shards_may_differ_by_layer(model: Path, monkeypatch: pytest.MonkeyPatch, is_reference: bool) -> None:
    wanted = logits_of(local_engine(model), TOKENS)
    if is_reference:
        monkeypatch.setenv("HOTNEURON_REFERENCE", "1")
    engine = local_engine(model, threads=2, cuts=uneven(ModelConfig.from_file(GGUFFile.open(model))))
    assert [shard.most_neurons for shard in engine.plan.shards] == [4 * NEURON_UNIT, 4 * NEURON_UNIT]
    np.testing.assert_allclose(logits_of(engine, TOKENS), wanted, atol=2e-3)


def test_a_shard_knows_its_layers() -> None:
    shard = Shard((0, 0), ((0, 0), (64, 128)), (0, 0), 0)
    assert shard.has_neurons and not shard.has_heads
    assert [shard.has_neurons_in(layer) for layer in range(2)] == [False, True]
    assert shard.most_neurons == 64
