"""Neurons change their places in a running engine: streams go on, counters add up, a refused move changes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from local_team import LocalEngine, ask_for, local_engine
from tiny_model import write_tiny_model

from hotneuron.actors.engine import Engine, EngineConfig
from hotneuron.kernels.cpu import cache_folder
from hotneuron.models.errors import EngineError, RequestError
from hotneuron.models.pack import Pack
from hotneuron.models.pack_writer import ensure_pack
from hotneuron.placement.plan import Plan, cut_by, weigh

REQUESTS = [([(n * i + 3) % 270 for i in range(n)], tokens) for n, tokens in [(5, 400), (40, 200), (130, 150)]]


def answers_of(engine: LocalEngine) -> list[list[int]]:
    return [answer.tokens for answer in engine.ask_all([ask_for(*request) for request in REQUESTS])]


def moved(engine: LocalEngine, path: Path, shares: tuple[float, ...]) -> tuple[Path, Plan]:
    """Other neurons first, and other cuts."""
    order = np.stack([np.roll(np.arange(engine.config.ffn), 32)[::-1]] * engine.config.n_layers)
    file_pack = ensure_pack(engine.file, engine.config, folder=path.parent, kind="predicted", order=order)
    cuts = cut_by(engine.config, shares)
    sizes = engine.plan.context_tokens, engine.plan.kv_tokens
    return file_pack, weigh(Pack(file_pack).matrices, engine.config, cuts, *sizes)


def test_streams_go_on_where_they_were(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_model(path, pwri=True, type="F32")
    with local_engine(path, (1, 1), kind="predicted") as engine:
        wanted = answers_of(engine)
        there = moved(engine, path, (1, 3))
        answers = [engine.submit(ask_for(*request)) for request in REQUESTS]
        for n_seen, shard_of in ((20, there), (120, (engine.pack_path, engine.plan))):
            answers[0].until(lambda answer, n=n_seen: len(answer.tokens) >= n)
            engine.driver.replan(lambda s=shard_of: engine.team.hold(*s), lambda: None).result(60)
        assert [answer.wait().tokens for answer in answers] == wanted
        assert engine.team.n_starts == 3
        assert engine.team.workers[1].plan == engine.plan
    engine.scheduler.check_integrity()


def test_a_move_that_fails_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_model(path, pwri=True, type="F32")
    with local_engine(path, (1, 1), kind="predicted") as engine:
        wanted = answers_of(engine)
        answers = [engine.submit(ask_for(*request)) for request in REQUESTS]
        answers[0].until(lambda answer: len(answer.tokens) >= 20)
        start, undone = engine.team.start, []

        def refuse() -> None:
            monkeypatch.setattr(engine.team, "start", start)
            raise EngineError("no memory for these shards")

        monkeypatch.setattr(engine.team, "start", refuse)
        with pytest.raises(EngineError, match="no memory"):
            engine.driver.replan(lambda: None, lambda: undone.append(1)).result(60)
        assert undone == [1]
        assert [answer.wait().tokens for answer in answers] == wanted


@pytest.fixture
def relu_model(tmp_path: Path) -> Iterator[Path]:
    """What engines leave of it in the user's cache goes with it."""
    path = tmp_path / f"{tmp_path.name}-{os.getpid()}.gguf"
    write_tiny_model(path, type="F32", ffn=1024, metadata={"hidden_activation": "relu"})
    yield path
    for left in cache_folder().glob(f"*/{path.stem}-*"):
        left.unlink()


def test_an_engine_moves_what_fires_to_the_hot_worker(relu_model: Path) -> None:
    path = relu_model
    config = EngineConfig(path, workers=1, threads=1, context_tokens=512, max_slots=4, split=(1, 3), sparse="exact")
    with Engine.start(config) as engine:
        with pytest.raises(RequestError, match="tokens were computed"):
            engine.replan()
        wanted = _ask(engine)
        before = engine.activity()
        workers = [worker["pid"] for worker in engine.describe()["workers"]]
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(_ask, engine)
            placed = engine.replan()
            assert answer.result(60) == wanted
        assert [worker["pid"] for worker in engine.describe()["workers"]] == workers
        after = engine.activity()
        assert after.n_tokens > before.n_tokens and (after.fires >= before.fires).all()
        assert after.fires.sum() == after.worker_fires.sum()
        assert _ask(engine) == wanted
        later = engine.activity().worker_fires - after.worker_fires
        assert later[:, 0].sum() / later.sum() == pytest.approx(placed.hot_work_share, abs=0.1)
        assert placed.order is not None
        assert engine.describe()["plan"]["shards"][0]["neurons"] == placed.plan.shards[0].neurons


def _ask(engine: Engine) -> list[int]:
    prompt, n = REQUESTS[0]
    return [token for chunk in engine.generate(ask_for(prompt, n)) for token in chunk.tokens]
