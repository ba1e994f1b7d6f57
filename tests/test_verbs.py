"""The verbs' own reckoning: perplexity's chunks, flags into numbers, chat's loop over a scripted engine."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotneuron.actors.messages import Chunk, Request, SamplingParams
from hotneuron.deploy import bench, chat, console, options, perplexity, plan
from hotneuron.deploy.console import one_line
from hotneuron.models.errors import RequestError


@given(st.lists(st.integers(0, 99), min_size=8, max_size=120), st.integers(8, 40), st.none() | st.just(100))
def test_perplexity_counts_as_llama_cpp(tokens: list[int], context: int, bos: int | None) -> None:
    def logprob(prefix: Sequence[int], token: int) -> float:
        return -1.0 - ((sum(prefix) * 31 + token * 7) % 64) / 16

    def score(chunk: Sequence[int], first: int) -> list[float]:
        return [logprob(chunk[:position], chunk[position]) for position in range(first + 1, len(chunk))]

    if len(tokens) < context:
        with pytest.raises(RequestError, match=f"{len(tokens)} tokens"):
            perplexity.measure(tokens, context, score, bos=bos)
        return
    result = perplexity.measure(tokens, context, score, bos=bos)
    losses = []
    for start in range(0, len(tokens) - context + 1, context):
        for position in range(context // 2, context - 1):  # predicts the token after it
            prefix = [tokens[start] if bos is None else bos, *tokens[start + 1 : start + position + 1]]
            losses.append(-logprob(prefix, tokens[start + position + 1]))
    assert result.chunks == len(tokens) // context and result.tokens == len(losses)
    assert result.ppl == pytest.approx(math.exp(sum(losses) / len(losses)))


def test_perplexity_of_even_odds_is_their_number() -> None:
    result = perplexity.measure([0] * 1024, 512, lambda chunk, first: [-math.log(50)] * (len(chunk) - first - 1))
    assert result.ppl == pytest.approx(50) and result.sd == pytest.approx(0, abs=1e-3)
    assert (result.chunks, result.tokens) == (2, 2 * 255)


@given(st.lists(st.floats(0, 1000), min_size=1, max_size=8))
def test_split_shares_add_to_one(shares: list[float]) -> None:
    text = "/".join(map(str, shares))
    if sum(shares) == 0:
        with pytest.raises(RequestError):
            options.parse_split(text)
        return
    parsed = options.parse_split(text)
    assert parsed is not None and len(parsed) == len(shares) and sum(parsed) == pytest.approx(1)


@pytest.mark.parametrize("text", ["", "a", "50/", "-1/2", "nan/1", "inf/1", "1//1"])
def test_impossible_splits(text: str) -> None:
    with pytest.raises(RequestError, match="--split"):
        options.parse_split(text)


@given(st.integers(0, 10**6), st.floats(-100, 100).map(lambda value: round(value, 3)))
def test_logit_bias_in_both_spellings(token: int, bias: float) -> None:
    assert options.parse_logit_bias([f"{token}={bias}"]) == ((token, bias),)
    assert options.parse_logit_bias([f"{token}{bias:+}"]) == ((token, bias),)


def test_bench_summary() -> None:
    assert bench.summary(8, []) is None
    row = bench.summary(8, [1.0, 2.0, 3.0])
    assert row is not None and (row["mean"], row["sd"], row["repetitions"]) == (2.0, 1.0, 3)
    single = bench.summary(8, [5.0])
    assert single is not None and single["sd"] == 0


def test_errors_cannot_write_to_the_terminal() -> None:
    assert one_line(ValueError("a\nb \x1b[31m c\tд")) == "a b ?[31m c д"


def test_steps_in_a_log_speak_of_slow_ones_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "_PATIENCE_S", 0.02)
    with console.Steps() as steps:
        for done in range(100):
            steps(f"quick {done}", 0, None)
        for done in range(1, 51):
            steps("slow", done * 100_000, 5_000_000)
            time.sleep(0.01)
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert output.out == "" and len(lines) == 1
    assert re.fullmatch(r"slow \d.* of 5\.0 MB \.\.\.", lines[0])


class ScriptedEngine:
    """Answers `<what was asked>!`; the message `interrupt` is stopped by Ctrl-C after its first piece."""

    def __init__(self) -> None:
        self.asked: list[list[dict[str, str]]] = []
        self.seeds: list[int] = []
        self.cancelled: list[str] = []
        self.chat_template = SimpleNamespace(render=self._render)
        self.tokenizer = SimpleNamespace(encode_prompt=lambda prompt: [len(prompt)])

    def _render(self, messages: list[dict[str, str]]) -> str:
        if messages[-1]["content"] == "too long":
            raise RequestError("the prompt does not fit")
        self.asked.append([dict(message) for message in messages])
        return messages[-1]["content"]

    def generate(self, request: Request) -> Iterator[Chunk]:
        self.seeds.append(request.sampling.seed)
        text = self.asked[-1][-1]["content"]
        yield Chunk(text, (1,))
        if text == "interrupt":
            raise KeyboardInterrupt
        yield Chunk("!", (2,), finish_reason="stop")

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def activity(self) -> Any:
        return SimpleNamespace(hot_work_share=lambda: 0.25)

    def replan(self, plan_path: Path | None, on_progress: Any) -> Any:
        if plan_path is not None:
            raise RequestError(f"{plan_path}: plan of another model")
        on_progress("moving neurons", 0, None)
        return SimpleNamespace(hot_work_share=0.75)


def converse(monkeypatch: pytest.MonkeyPatch, lines: list[Any]) -> ScriptedEngine:
    engine, typed = ScriptedEngine(), iter(lines)

    def answer(_: str = "") -> str:
        line = next(typed, EOFError())
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", answer)
    chat.Conversation(engine, SamplingParams(seed=7), -1, None, "Be brief.").loop()  # type: ignore[arg-type]
    return engine


def contents(messages: list[dict[str, str]]) -> list[str]:
    return [message["content"] for message in messages]


def test_chat_keeps_its_history(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    engine = converse(monkeypatch, ["one", "", "two", "/exit", "never read"])
    assert [contents(m) for m in engine.asked] == [["Be brief.", "one"], ["Be brief.", "one", "one!", "two"]]
    assert [message["role"] for message in engine.asked[1]] == ["system", "user", "assistant", "user"]
    assert capsys.readouterr().out == "one!\ntwo!\n"
    assert len(set(engine.seeds)) == 2


def test_ctrl_c_stops_the_answer_and_not_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = converse(monkeypatch, ["interrupt", KeyboardInterrupt(), "next"])
    assert len(engine.cancelled) == 1
    assert contents(engine.asked[-1]) == ["Be brief.", "interrupt", "interrupt", "next"]


def test_chat_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first = ["one", "/regen", "/reset", "two", "/system Rhyme.", "three", "/system", "four"]
    engine = converse(monkeypatch, [*first, "/help", "/what", "/replan", "/replan other.json"])
    assert [contents(m) for m in engine.asked] == [
        ["Be brief.", "one"],
        ["Be brief.", "one"],
        ["Be brief.", "two"],
        ["Rhyme.", "three"],
        ["four"],
    ]
    said = capsys.readouterr().err
    assert "/regen" in said and "/what is not a command" in said
    assert "75.0% of the neurons that fire; it had 25.0%" in said and "other.json: plan of another model" in said


def test_message_that_does_not_fit_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = converse(monkeypatch, ["one", "too long", "two"])
    assert contents(engine.asked[-1]) == ["Be brief.", "one", "one!", "two"]


def test_a_plan_from_live_is_compared_with_the_one_before() -> None:
    def placed(hot: list[int], order: list[list[int]]) -> Any:
        shard = SimpleNamespace(neurons=[(0, n) for n in hot])
        return SimpleNamespace(plan=SimpleNamespace(shards=[shard]), order=np.array(order))

    live = np.array([[0.0, 0.9, 0.1, 0.0], [0.5, 0.5, 0.0, 0.0]], np.float32)
    before = placed([2, 1], [[0, 1, 2, 3], [0, 1, 2, 3]])
    now = placed([2, 1], [[1, 2, 0, 3], [1, 0, 2, 3]])
    found = plan.compare(now, before, live)
    assert found["moved_neurons"] == 2 and found["kept_share"] == pytest.approx(1 / 3)
    assert found["before_hot_work_share"] == pytest.approx(1.4 / 2) and found["hot_work_share"] == pytest.approx(
        1.5 / 2
    )
