"""The default model against llama.cpp on the same file: what it says next, and how well it predicts a text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_team import LocalEngine, ask_for, local_engine, logits_of

from hotneuron.deploy.perplexity import measure
from hotneuron.kernels.sampling_reference import logprobs_reference

CLEAR = 0.3  # log-probability by which the reference's first choice must lead, for ours to be bound to it


@pytest.fixture(scope="module")
def engine(default_model_path: Path) -> Iterator[LocalEngine]:
    with local_engine(default_model_path, (1, 1), context_tokens=1024, cache_pack=True) as started:
        yield started


def test_the_next_token_is_the_references(default_model_path: Path, reference: dict[str, Any]) -> None:
    """At every step of the reference's own answers, wherever its choice was clear; and as likely as it says."""
    n_clear, differences = 0, []
    idle = local_engine(default_model_path, (1, 1), context_tokens=1024, cache_pack=True)
    for case in reference["greedy"]:
        prompt = list(idle.tokenizer.encode(case["prompt"]))
        logits = logits_of(idle, [*prompt, *case["tokens"]][:-1])[len(prompt) - 1 :]
        for row, token, top in zip(logits, case["tokens"], case["top5_logprobs"], strict=True):
            assert top[0][0] == token
            logprobs = logprobs_reference(row)
            differences.append(logprobs[token] - top[0][1])
            if top[0][1] - top[1][1] > CLEAR:
                assert row.argmax() == token
                n_clear += 1
    assert n_clear > 100
    assert abs(np.mean(differences)) < 0.02 and np.abs(differences).max() < 0.5


def test_greedy_answers_follow_the_reference_until_a_close_call(engine: LocalEngine, reference: dict[str, Any]) -> None:
    n_same = 0
    for case in reference["greedy"]:
        found = engine.ask(ask_for(engine.tokenizer.encode(case["prompt"]), len(case["tokens"]))).tokens
        for token, wanted, top in zip(found, case["tokens"], case["top5_logprobs"], strict=True):
            if token != wanted:
                assert top[0][1] - top[1][1] <= CLEAR
                break
            n_same += 1
    assert n_same > 20


def test_a_chat_ends_by_itself(engine: LocalEngine, reference: dict[str, Any]) -> None:
    prompt = next(case["prompt"] for case in reference["chat"] if "2+2" in case["prompt"])
    answer = engine.ask(ask_for(engine.tokenizer.encode_prompt(prompt), 200, ignore_eos=False))
    assert answer.finish_reason == "stop" and 0 < len(answer.tokens) < 200
    assert answer.text.strip() and "<|im_end|>" not in answer.text


def test_perplexity(engine: LocalEngine, reference: dict[str, Any], text_a: str) -> None:
    wanted = reference["perplexity"]
    tokens = list(engine.tokenizer.encode(text_a))
    found = measure(tokens, wanted["ctx"], lambda chunk, first: engine.driver.score(chunk, first).result(100))
    assert found.chunks == wanted["chunks"]
    assert math.isclose(found.ppl, wanted["ppl"], rel_tol=0.005), found
    assert math.isclose(found.sd, wanted["sd"], rel_tol=0.05)
