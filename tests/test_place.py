"""Placing tiny models: budgets are kept, plans survive their file, and what is placed computes the same."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_team import local_engine, logits_of
from tiny_model import write_tiny_model

from hotneuron.actors import tables
from hotneuron.models.errors import HotneuronError, ModelFileError, NotFoundError, RequestError
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Pack
from hotneuron.models.pack_sources import Kind
from hotneuron.models.pack_table import matrices_of
from hotneuron.models.pack_writer import ensure_pack
from hotneuron.placement.budget import process_bytes
from hotneuron.placement.gpu_index import GPUIndex
from hotneuron.placement.index_split import split_by_index
from hotneuron.placement.place import Demand, Placement, place
from hotneuron.placement.plan_file import PlanFile
from hotneuron.placement.probe import Probe
from hotneuron.placement.statistics import Statistics
from hotneuron.placement.worker_areas import BatchSizes, worker_areas

TOKENS = [(7 * i * i + 3 * i + 1) % 273 for i in range(40)]
PROBE = Probe(2, 20e9, 40e9, 15e9, 30e9, 0.5, 0.3)
DEMAND = Demand(2, 1, 64, 80, BatchSizes(64, 32), 1 << 20)
LAYERS, FFN = 3, 800


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    options: dict[str, Any] = {"n_layers": LAYERS, "ffn": FFN, "n_heads": 4, "n_kv_heads": 2}
    write_tiny_model(path, type="F32", pwri=True, **options)
    return path


def statistics_of(file: GGUFFile, seed: int = 0) -> Statistics:
    rng = np.random.default_rng(seed)
    fires = (rng.permuted(np.arange(1, FFN + 1)[None, :] ** -0.7 * np.ones((LAYERS, 1)), axis=1)).astype(np.float32)
    return Statistics(file.content_key(), 100, fires, fires, np.ones((LAYERS, 2048), np.int64))


def placed(model: Path, budget_bytes: int | None = None, kind: Kind = "predicted", **demanded: int) -> Placement:
    file = GGUFFile.open(model)
    config = ModelConfig.from_file(file)
    demand = replace(DEMAND, hot_budget_bytes=budget_bytes, **demanded)
    return place(matrices_of(file, config, kind), config, statistics_of(file), PROBE, demand)


@pytest.mark.parametrize("kind", ["dense", "gated", "predicted"])
def test_a_pack_is_known_before_it_is_made(model: Path, kind: Kind) -> None:
    file = GGUFFile.open(model)
    config = ModelConfig.from_file(file)
    pack = Pack(ensure_pack(file, config, folder=model.parent, kind=kind))
    known = matrices_of(file, config, kind)
    assert {role: replace(matrix, offset_bytes=0) for role, matrix in pack.matrices.items()} == known


def test_planned_memory_is_what_a_worker_takes(model: Path) -> None:
    engine = local_engine(model, (1, 2), threads=2, kind="predicted")
    arena, batch = (
        engine.exchange.arena,
        BatchSizes(engine.exchange.arena.max_rows, engine.exchange.arena.max_logit_rows),
    )
    for me in range(2):
        built = tables.build(engine.pack, engine.config, engine.plan, me, 2, arena, engine.exchange.address, 1)
        areas = worker_areas(engine.pack.matrices, engine.config, engine.plan, me, batch, 2)
        assert built.memory.n_bytes == sum(areas.values())


@pytest.mark.parametrize("n_workers", [2, 3])
def test_a_budget_is_kept_and_the_smallest_that_works_is_named(model: Path, n_workers: int) -> None:
    with pytest.raises(RequestError, match="smallest that works here is") as error:
        placed(model, 1 << 20, n_workers=n_workers)
    least = float(str(error.value).split("is ")[-1].split(" GiB")[0])
    for extra_bytes in (0, 100_000, 300_000, 10_000_000):
        budget = round(least * (1 << 30)) + extra_bytes
        found = placed(model, budget, n_workers=n_workers)
        assert found.n_bytes[0].total <= budget * 1.001
        for layer in range(LAYERS):
            ranges = [shard.neurons[layer] for shard in found.plan.shards]
            assert ranges[0][0] == 0 and ranges[-1][1] == 832  # whole units of 64
            assert all(a[1] == b[0] for a, b in pairwise(ranges))
    with pytest.raises(RequestError, match="smallest"):
        placed(model, round((least - 0.001) * (1 << 30)), n_workers=n_workers)


def test_hot_neurons_come_without_heads_where_these_do_not_fit(model: Path) -> None:
    """PowerInfer places no neurons until all attention is on the GPU."""
    long = {"kv_tokens": 160_000}  # so that the KV of one head takes more than all neurons
    with pytest.raises(RequestError) as error:
        placed(model, 1, **long)
    least = float(str(error.value).split("is ")[-1].split(" GiB")[0])
    found = placed(model, round(least * (1 << 30)) + 1_000_000, **long)
    hot = found.plan.shards[0]
    assert hot.heads == (0, 0) and hot.has_neurons


def test_what_is_placed_computes_the_same(model: Path) -> None:
    found = placed(model)
    assert found.order is not None and 0 < found.plan.shards[0].neurons[0][1] < 832
    plain = logits_of(local_engine(model, kind="predicted"), TOKENS)
    moved = logits_of(local_engine(model, kind="predicted", order=found.order, cuts=found.cuts), TOKENS)
    assert np.abs(moved - plain).max() < 1e-3 * plain.std()


def test_powerinfers_split_is_reused(model: Path, tmp_path: Path) -> None:
    rng, path = np.random.default_rng(2), tmp_path / "m.gguf.generated.gpuidx"
    hot = tuple(np.sort(rng.permutation(FFN)[:n]) for n in (256, 0, FFN))
    GPUIndex(1 << 30, hot).save(path, FFN)
    file = GGUFFile.open(model)
    config = ModelConfig.from_file(file)
    index = GPUIndex.load(path, LAYERS, FFN)
    matrices = matrices_of(file, config, "predicted")
    cuts, order = split_by_index(index, matrices, config, 3)
    assert [layer[0] for layer in cuts.neurons] == [(0, 256), (0, 0), (0, 832)]
    assert all(set(order[layer][: len(ids)]) == set(ids) for layer, ids in enumerate(hot))
    plain = logits_of(local_engine(model, kind="predicted"), TOKENS)
    moved = logits_of(local_engine(model, kind="predicted", order=order, cuts=cuts), TOKENS)
    distance = np.abs(moved - plain).max(axis=1) / plain.std()
    assert np.median(distance) < 1e-4 and distance.max() < 0.02  # a neuron at the predictor's border may turn
    with pytest.raises(RequestError, match="ffn_down_t"):
        split_by_index(index, matrices_of(file, config, "dense"), config, 2)
    with pytest.raises(RequestError, match="--workers 0"):
        split_by_index(index, matrices, config, 1)


def saved(model: Path, path: Path) -> tuple[GGUFFile, ModelConfig, Placement]:
    file = GGUFFile.open(model)
    found = placed(model)
    PlanFile(file.content_key(), "predictor", None, found.cuts).save(path, {"tokens_per_s": found.tokens_per_s})
    return file, ModelConfig.from_file(file), found


def test_a_plan_survives_its_file(model: Path, tmp_path: Path) -> None:
    file, config, found = saved(model, tmp_path / "p.json")
    assert PlanFile.load(tmp_path / "p.json", file, config, 2).cuts == found.cuts


def test_plans_of_other_models_and_workers_are_refused(model: Path, tmp_path: Path) -> None:
    path, other = tmp_path / "p.json", tmp_path / "other.gguf"
    file, config, _ = saved(model, path)
    write_tiny_model(other)
    with pytest.raises(RequestError, match="plan of another model"):
        PlanFile.load(path, GGUFFile.open(other), ModelConfig.from_file(GGUFFile.open(other)), 2)
    with pytest.raises(RequestError, match="a plan for 2 workers, but 3"):
        PlanFile.load(path, file, config, 3)
    with pytest.raises(NotFoundError, match=r"none\.json"):
        PlanFile.load(tmp_path / "none.json", file, config, 2)
    text = json.loads(path.read_text())
    for field, value in (("neurons_end", [[64, 832]]), ("heads_end", [3, 2]), ("vocab_tiles_end", [1, "2"])):
        path.write_text(json.dumps(text | {field: value}))
        with pytest.raises(ModelFileError, match=field):
            PlanFile.load(path, file, config, 2)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_plan_is_an_error_that_says_so(model: Path, data: st.DataObject) -> None:
    path = model.parent / "damaged.json"
    file, config, _ = saved(model, path)
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        PlanFile.load(path, file, config, 2)
    except HotneuronError as error:
        assert str(path) in str(error)


def test_memory_of_every_kind_is_counted(model: Path) -> None:
    found = placed(model)
    file = GGUFFile.open(model)
    config = ModelConfig.from_file(file)
    again = process_bytes(matrices_of(file, config, "predicted"), config, found.plan, 1, DEMAND.batch, 1, 1 << 20)
    assert again == found.n_bytes[1] and min(again.weights, again.kv, again.scratch) > 0
