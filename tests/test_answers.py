"""Whole answers from an engine in this process: the same in any company, and as every sampling setting asks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_team import GREEDY, Answer, LocalEngine, ask_for, local_engine, logits_of
from tiny_model import write_tiny_model

from hotneuron.actors.messages import SamplingParams
from hotneuron.kernels.sampling_reference import logprobs_reference, sample_reference
from hotneuron.models.errors import RequestError

VOCAB = 273
LOGPROBS = SamplingParams(temperature=0, logprobs=5)
WARM = SamplingParams(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=11, logprobs=3)
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def prompt_of(n: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB - 3, n).tolist()


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_model(path, type="Q4_0", types={"ffn_down": "Q8_0", "attn_v": "F16"})
    return path


@pytest.fixture(scope="module")
def engine(model_path: Path) -> Any:
    """For tests that do not care what else it did; each leaves it idle."""
    with local_engine(model_path, (1, 1), lease_steps=5) as started:
        yield started
        started.scheduler.check_integrity()


def said(answer: Answer) -> tuple[list[int], str, list[Any], str | None]:
    return answer.tokens, answer.text, answer.logprobs, answer.finish_reason


# Answers do not depend on anything but the request.


@pytest.mark.parametrize("sampling", [LOGPROBS, WARM])
def test_an_answer_is_the_same_in_any_company_chunk_and_cache(model_path: Path, sampling: SamplingParams) -> None:
    prompt = prompt_of(150)

    def ask() -> Any:
        return ask_for(prompt, 40, sampling)

    with local_engine(model_path) as alone:
        wanted = said(alone.ask(ask()))
        assert len(wanted[0]) == 40 and len(wanted[2]) == 40
        for _ in range(3):
            cached = alone.ask(ask())
            assert said(cached) == wanted
            assert cached.chunks[-1].timings.cached_tokens == 144
    for shares, threads, chunk_tokens, lease_steps in (((1,), 1, 64, 32), ((1,), 2, 128, 1), ((1,), 16, 512, 8)):
        with local_engine(model_path, shares, threads, chunk_tokens=chunk_tokens, lease_steps=lease_steps) as other:
            company = [ask_for(prompt_of(n, n), n, WARM) for n in (1, 3, 60, 200, 17)]
            twins = [ask_for(prompt[:100], 30), ask_for(prompt, 3)]
            answers = other.ask_all([*company[:3], ask(), *company[3:], *twins])
            assert said(answers[3]) == wanted, f"{threads} threads, chunks of {chunk_tokens}"
            assert said(other.ask(ask())) == wanted


def test_an_answer_is_the_same_after_preemption(model_path: Path) -> None:
    requests = [(prompt_of(20 + n, n), 90) for n in range(6)]
    with local_engine(model_path) as roomy:
        wanted = [said(roomy.ask(ask_for(prompt, n, WARM))) for prompt, n in requests]
    with local_engine(model_path, context_tokens=128, kv_tokens=256) as tight:
        answers = tight.ask_all([ask_for(prompt, n, WARM) for prompt, n in requests])
        assert tight.scheduler.n_preemptions > 0
    assert [said(answer) for answer in answers] == wanted


def test_twenty_times_the_same(model_path: Path) -> None:
    with local_engine(model_path, (1, 2), threads=2) as engine:
        answers = engine.ask_all([ask_for(prompt_of(30), 20, WARM) for _ in range(20)])
    assert len({str(said(answer)) for answer in answers}) == 1


@pytest.mark.parametrize("shares", [(1, 1), (1, 9), (1, 0, 3)])
def test_greedy_tokens_do_not_depend_on_the_split(model_path: Path, shares: tuple[float, ...]) -> None:
    prompt = prompt_of(20)
    with local_engine(model_path) as alone, local_engine(model_path, shares) as split:
        wanted, found = (e.ask(ask_for(prompt, 60, SamplingParams(temperature=0, logprobs=2))) for e in (alone, split))
    for a, b in zip(wanted.logprobs, found.logprobs, strict=True):
        if a.token != b.token:
            (_, first), (_, second) = a.top
            assert first - second < 0.2  # rounding may decide only what was close
            break


# What the sampling settings do, checked against NumPy on the engine's own logits.

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1.3, **OFF},
    "top-k": {"temperature": 2.0, **OFF, "top_k": 3},
    "top-p": {"temperature": 2.0, **OFF, "top_p": 0.5},
    "min-p": {"temperature": 2.0, **OFF, "min_p": 0.2},
    "typical": {"temperature": 2.0, **OFF, "typical_p": 0.4},
    "repeat": {"temperature": 0, "repeat_penalty": 1.8},
    "presence": {"temperature": 0, "presence_penalty": 1.5},
    "frequency": {"temperature": 0, "frequency_penalty": 0.7, "penalty_last_tokens": 256},
    "short memory": {"temperature": 0, "repeat_penalty": 1.8, "penalty_last_tokens": 2},
    "no memory": {"temperature": 0, "repeat_penalty": 1.8, "penalty_last_tokens": 0},
    "bias": {"temperature": 0, "logit_bias": ((7, 5.0), (9, 4.5), (200, -100.0))},
    "seed": {"temperature": 1.5, "seed": 2**62 + 12345},
    "all": {"temperature": 1.1, "top_k": 50, "top_p": 0.9, "min_p": 0.01, "typical_p": 0.9, "repeat_penalty": 1.2,
            "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": ((3, 1.0),), "seed": 5},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_sampling(engine: LocalEngine, model_path: Path, name: str) -> None:
    sampling = SamplingParams(**SETTINGS[name], logprobs=4)
    prompt = prompt_of(21, seed=len(name))
    answer = engine.ask(ask_for(prompt, 24, sampling))
    tokens = [*prompt, *answer.tokens]
    logits = logits_of(local_engine(model_path, (1, 1)), tokens[:-1])[len(prompt) - 1 :]
    fields = {field: getattr(sampling, field) for field in sampling.__slots__}
    n_last = fields.pop("penalty_last_tokens")
    fields.pop("logprobs")
    for index, (row, token) in enumerate(zip(logits, answer.tokens, strict=True)):
        position = len(prompt) + index
        history = tokens[max(0, position - n_last) : position] if n_last else []
        assert sample_reference(row, history, position, **fields) == token, f"token {index}"
        wanted, entry = logprobs_reference(row), answer.logprobs[index]
        assert entry.token == token and entry.logprob == pytest.approx(wanted[token], abs=1e-4)
        assert [t for t, _ in entry.top] == np.argsort(-wanted, kind="stable")[:4].tolist()


def test_seeds_differ(engine: LocalEngine) -> None:
    prompt = prompt_of(9)
    answers = engine.ask_all([ask_for(prompt, 12, SamplingParams(temperature=1.5, seed=seed)) for seed in range(4)])
    assert len({tuple(answer.tokens) for answer in answers}) == 4


# How answers end.


def test_max_tokens_and_text(engine: LocalEngine) -> None:
    for n in (1, 2, 5, 6, 33):
        answer = engine.ask(ask_for(prompt_of(5), n, GREEDY))
        assert len(answer.tokens) == n and answer.finish_reason == "length"
        assert answer.text == engine.tokenizer.decode(answer.tokens)
        timings = answer.chunks[-1].timings
        assert (timings.prompt_tokens, timings.generated_tokens) == (5, n)


def test_a_stop_token_ends_the_answer_unless_ignored(engine: LocalEngine) -> None:
    stop = min(engine.tokenizer.stop_ids)
    wanted = SamplingParams(temperature=0, logit_bias=((stop, 1000.0),), logprobs=0)
    answer = engine.ask(ask_for(prompt_of(5), 9, wanted, ignore_eos=False))
    assert (answer.tokens, answer.text, answer.finish_reason) == ([], "", "stop")
    answer = engine.ask(ask_for(prompt_of(5), 9, wanted))
    assert answer.tokens == [stop] * 9 and answer.finish_reason == "length" and len(answer.logprobs) == 9
    # In the middle of a lease, beside one that goes on.
    likely = SamplingParams(temperature=1, logit_bias=((stop, 4.0),), seed=3, **OFF)
    other = ask_for(prompt_of(5), 64)
    ended, went_on = engine.ask_all([ask_for(prompt_of(8), 64, likely, ignore_eos=False), other])
    assert ended.finish_reason == "stop" and 0 < len(ended.tokens) < 64 and stop not in ended.tokens
    assert went_on.tokens == engine.ask(ask_for(prompt_of(5), 64)).tokens and len(went_on.tokens) == 64


def test_stop_strings(engine: LocalEngine) -> None:
    # Letters only, so that the text has characters to stop at.
    letters = SamplingParams(temperature=1, seed=1, **OFF, logit_bias=tuple((t, 100.0) for t in range(64, 90)))
    whole = engine.ask(ask_for(prompt_of(5), 60, letters))
    assert len(whole.text) >= 60
    for cut in (3, 17, 40):
        stop = whole.text[cut : cut + 3]
        end = whole.text.index(stop)
        answer = engine.ask(ask_for(prompt_of(5), 60, letters, stop=("never", stop)))
        assert answer.text == whole.text[:end] and answer.finish_reason == "stop"
        assert answer.tokens == whole.tokens[: len(answer.tokens)]
        assert engine.tokenizer.decode(answer.tokens).startswith(answer.text + stop)
        assert not any(stop in "".join(chunk.text for chunk in answer.chunks[:n]) for n in range(len(answer.chunks)))


def test_a_full_context_ends_the_answer(engine: LocalEngine) -> None:
    answer = engine.ask(ask_for(prompt_of(500), 100))
    assert len(answer.tokens) == 12 and answer.finish_reason == "length"


def test_cancel(engine: LocalEngine) -> None:
    answers = [engine.submit(ask_for(prompt_of(10, n), 500)) for n in range(10)]  # two more than slots
    answers[0].until(lambda answer: len(answer.tokens) > 0)
    for answer in (answers[0], answers[9]):
        engine.driver.cancel(answer.request.request_id)
    assert [answer.wait().finish_reason for answer in answers] == ["cancel", *["length"] * 8, "cancel"]
    assert 0 < len(answers[0].tokens) < 500 and answers[9].tokens == []
    engine.driver.cancel("nobody")


@pytest.mark.parametrize(
    ("prompt", "sampling", "message"),
    [
        ([1] * 512, GREEDY, "512"),
        ([VOCAB], GREEDY, "token id"),
        ([-1], GREEDY, "token id"),
        ([2**40], GREEDY, "token id"),
        ([1], SamplingParams(logit_bias=((VOCAB, 1.0),)), "token id"),
    ],
)
def test_refused_requests(engine: LocalEngine, prompt: list[int], sampling: SamplingParams, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.ask(ask_for(prompt, 1, sampling))
    assert len(engine.ask(ask_for([1], 2)).tokens) == 2


def test_a_request_id_twice(engine: LocalEngine) -> None:
    request = ask_for(prompt_of(5), 400)
    first, second = engine.submit(request), engine.submit(request)
    with pytest.raises(RequestError, match="already"):
        second.wait()
    assert len(first.wait().tokens) == 400


def test_score(engine: LocalEngine, model_path: Path) -> None:
    tokens = prompt_of(100)
    logits = logits_of(local_engine(model_path, (1, 1)), tokens)
    wanted = [logprobs_reference(row)[token] for row, token in zip(logits[:-1], tokens[1:], strict=True)]
    busy = engine.submit(ask_for(prompt_of(40), 20))
    for first in (0, 50, 98):
        assert engine.driver.score(tokens, first).result(60) == pytest.approx(wanted[first:], abs=1e-4)
    assert busy.wait().tokens == engine.ask(ask_for(prompt_of(40), 20)).tokens
    for wrong in ([], [VOCAB, 1], [1] * 600):
        with pytest.raises(RequestError):
            engine.driver.score(wrong, 0).result(60)


def test_a_random_life(model_path: Path) -> None:
    """Thousands of requests come, are cancelled, run into each other; nothing is lost, and each is answered as ever."""
    rng = random.Random(4)
    shapes = [(prompt_of(rng.randrange(1, 60), seed), rng.randrange(1, 90)) for seed in range(25)]
    wanted: dict[int, list[int]] = {}
    with local_engine(model_path, context_tokens=160, kv_tokens=256, max_slots=6) as engine:
        for index, (prompt, n) in enumerate(shapes):
            wanted[index] = engine.ask(ask_for(prompt, n, WARM)).tokens
        open_answers: list[tuple[int, Answer]] = []
        n_whole = 0
        for _ in range(2000):
            action = rng.random()
            if action < 0.4:
                index = rng.randrange(len(shapes))
                prompt, n = shapes[index]
                open_answers.append((index, engine.submit(ask_for(prompt, n, WARM))))
            elif open_answers and action < 0.55:
                engine.driver.cancel(rng.choice(open_answers)[1].request.request_id)
            elif open_answers:
                index, answer = open_answers.pop(rng.randrange(len(open_answers)))
                reason = answer.wait().finish_reason
                assert reason in ("length", "cancel")
                assert answer.tokens == wanted[index][: len(answer.tokens)]
                if reason == "length":
                    assert answer.tokens == wanted[index]
                    n_whole += 1
        for _, answer in open_answers:
            answer.wait()
        assert n_whole > 200 and engine.scheduler.n_preemptions > 0
    engine.scheduler.check_integrity()
    assert engine.scheduler.n_running == engine.scheduler.n_waiting == 0
    assert engine.scheduler.kv.n_available_blocks == engine.scheduler.kv.n_blocks
