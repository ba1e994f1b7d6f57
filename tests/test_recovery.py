"""Lost workers, in this process: every stream goes on as if nothing had happened, or ends with an error; none hangs."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from local_team import LocalEngine, ask_for, local_engine
from tiny_model import write_tiny_model

from hotneuron.actors.batch import Batch
from hotneuron.actors.messages import SamplingParams
from hotneuron.kernels.sync import ABORTED, LATE, OK
from hotneuron.models.errors import EngineError, RequestError

SAMPLED = SamplingParams(temperature=1.2, top_k=0, top_p=1, min_p=0, seed=5, logprobs=2, repeat_penalty=1.1)
SHAPES = [(5, 480), (40, 200), (130, 250), (1, 300), (77, 120)]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_model(path, type="Q4_0")
    return path


@pytest.fixture(scope="module")
def undisturbed(model_path: Path) -> list[object]:
    with local_engine(model_path, (1, 1)) as engine:
        return answers_of(engine)


def answers_of(engine: LocalEngine) -> list[object]:
    requests = [ask_for([(n * i + 3) % 270 for i in range(n)], tokens, SAMPLED) for n, tokens in SHAPES]
    return [(answer.tokens, answer.text, answer.logprobs, answer.finish_reason) for answer in engine.ask_all(requests)]


@pytest.mark.parametrize("seed", range(5))
def test_workers_leave_at_random_moments(model_path: Path, undisturbed: list[object], seed: int) -> None:
    rng = random.Random(seed)
    with local_engine(model_path, (1, 1), lease_steps=rng.choice((1, 8, 32))) as engine:
        requests = [ask_for([(n * i + 3) % 270 for i in range(n)], tokens, SAMPLED) for n, tokens in SHAPES]
        answers = [engine.submit(request) for request in requests]
        for nth in range(5):
            n_starts, n_seen = engine.team.n_starts, len(answers[0].tokens)
            if nth < 2:  # each of these ends in a restart of its own; the later ones may fall into one
                answers[0].until(lambda answer, n=n_seen: len(answer.tokens) > n)
                engine.exchange.abort()
                answers[0].until(lambda _, n=n_starts: engine.team.n_starts > n)
            else:
                time.sleep(rng.random() * 0.01)
                engine.exchange.abort()
        for answer in answers:
            answer.wait()
        assert engine.team.n_starts > 2
        found = [(answer.tokens, answer.text, answer.logprobs, answer.finish_reason) for answer in answers]
    assert found == undisturbed
    engine.scheduler.check_integrity()


@pytest.mark.parametrize("me", [0, 1])
@pytest.mark.parametrize("loss", ["killed", "silent"])
def test_a_worker_is_lost(
    model_path: Path, undisturbed: list[object], monkeypatch: pytest.MonkeyPatch, loss: str, me: int
) -> None:
    """The other finds out by the death of its process at once, or by its silence after the deadline."""
    deadline_ms = 400
    monkeypatch.setenv("HOTNEURON_DEADLINE_MS", str(deadline_ms if loss == "silent" else 60_000))
    with local_engine(model_path, (1, 1), threads=2) as engine:
        prompt, n = [(5 * i + 3) % 270 for i in range(5)], SHAPES[0][1]
        answer = engine.submit(ask_for(prompt, n, SAMPLED))
        answer.until(lambda answer: len(answer.tokens) >= 50)
        began = time.perf_counter()
        engine.team.kill(me) if loss == "killed" else engine.team.silence(me)
        n_seen = len(answer.tokens)
        answer.until(lambda answer: engine.team.n_starts == 2 and len(answer.tokens) > n_seen)
        took_s = time.perf_counter() - began
        answer.wait()
        assert (answer.tokens, answer.text, answer.logprobs, answer.finish_reason) == undisturbed[0]
        assert engine.team.n_starts == 2
        assert took_s < 5 and (loss == "killed" or took_s > deadline_ms / 1000)
        assert answers_of(engine) == undisturbed
    engine.scheduler.check_integrity()


def test_everyone_leaves_a_late_step(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTNEURON_DEADLINE_MS", "200")
    engine = local_engine(model_path, (1, 1, 1), threads=3)
    engine.team.start()
    engine.team.silence(1)
    engine.exchange.command_scored([1, 2, 3], 0, [0], 3)
    began = time.perf_counter()
    while not engine.exchange.aborted:
        assert not engine.exchange.wait()
    for worker in engine.team.workers:
        assert worker.join(5)
    assert 0.2 < time.perf_counter() - began < 2
    codes = engine.team.codes()
    assert len(codes) == 9 and LATE in codes and set(codes) <= {LATE, ABORTED}
    assert OK not in codes


def test_a_loss_while_idle_and_while_scoring(model_path: Path) -> None:
    tokens = [(7 * i) % 270 for i in range(90)]
    with local_engine(model_path, (1, 1)) as engine:
        first = engine.ask(ask_for(tokens, 30, SAMPLED))
        wanted = engine.driver.score(tokens, 10).result(60)
        engine.team.kill(1)
        for _ in range(100):
            if engine.team.n_starts == 2:
                break
            time.sleep(0.05)
        assert engine.team.n_starts == 2  # noticed with nothing to do
        again = engine.ask(ask_for(tokens, 30, SAMPLED))
        assert (again.tokens, again.logprobs) == (first.tokens, first.logprobs)
        engine.team.kill(0)
        assert (engine.driver.score(tokens, 10).result(60) == wanted).all()
        assert engine.team.n_starts == 3


def test_a_team_that_never_comes_back_ends_every_stream(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = local_engine(model_path, (1, 1))
    with engine:
        answers = [engine.submit(ask_for([1, 2, n], 400)) for n in range(12)]
        answers[0].until(lambda answer: len(answer.tokens) > 0)

        def fail() -> None:
            raise EngineError("no worker left")

        monkeypatch.setattr(engine.team, "start", fail)
        engine.team.kill(1)
        for answer in answers:
            if answer.until(lambda _: False).finish_reason == "error":
                assert answer.chunks[-1].error == "no worker left"
        assert answers[-1].finish_reason == "error"
        # Whoever comes later is told, too.
        with pytest.raises(RequestError, match="no worker left"):
            engine.ask(ask_for([1], 3))
        with pytest.raises(EngineError):
            engine.driver.score([1, 2, 3], 0).result(5)


def test_a_team_that_fails_again_and_again_ends_every_stream(model_path: Path) -> None:
    with local_engine(model_path, (1, 1)) as engine:
        start = engine.team.start

        def start_and_fail() -> None:
            start()
            engine.team.kill(0)

        engine.team.start = start_and_fail  # type: ignore[method-assign]
        answer = engine.submit(ask_for([1, 2, 3], 400))
        answer.until(lambda answer: len(answer.tokens) > 0)
        engine.team.kill(0)
        assert answer.until(lambda _: False).finish_reason == "error"
        assert "in a row" in (answer.chunks[-1].error or "")


def test_progress_in_the_prompt_does_not_count_as_recovery(model_path: Path) -> None:
    """A worker that dies of every second chunk of a prompt must not be replaced for ever."""
    with local_engine(model_path, (1, 1), chunk_tokens=64) as engine:
        command, n_commands = engine.exchange.command, 0

        def command_and_kill(batch: Batch) -> None:
            nonlocal n_commands
            n_commands += 1
            if batch.segments[0].start > 0:
                engine.team.kill(1)
            command(batch)

        engine.exchange.command = command_and_kill  # type: ignore[method-assign]
        answer = engine.submit(ask_for([n % 270 for n in range(200)], 3)).until(lambda _: n_commands > 20)
        assert n_commands <= 20 and answer.finish_reason == "error"
