"""The step program in NumPy (HOTNEURON_REFERENCE=1) and the compiled one say the same, also as each other's peers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_team import LocalEngine, ask_for, local_engine, logits_of
from test_answers import SETTINGS, prompt_of
from test_program import MODELS, SHORT, Written, assert_close, written  # noqa: F401  (a fixture)
from tiny_model import write_tiny_model

from hotneuron.actors.messages import SamplingParams
from hotneuron.actors.reference_program import ReferenceProgram
from hotneuron.actors.worker import Worker


@pytest.fixture
def reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOTNEURON_REFERENCE", "1")


def is_reference(engine: LocalEngine) -> list[bool]:
    return [worker._is_reference for worker in engine.team.workers]


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_model(path, type="F16", n_heads=6, n_kv_heads=2, head_dim=16)
    return path


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shares", [(1,), (2, 0, 1)])
def test_logits(written, name: str, shares: tuple[float, ...], monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    path = written(name).path
    wanted = [logits_of(local_engine(path, shares), tokens) for tokens in SHORT]
    monkeypatch.setenv("HOTNEURON_REFERENCE", "1")
    engine = local_engine(path, shares, threads=3)
    assert all(is_reference(engine))
    assert_close(name, [logits_of(engine, tokens) for tokens in SHORT], wanted)


SPARSE: dict[str, dict[str, Any]] = {
    "gated": {"kind": "gated", "activation": "relu"},
    "silu above a threshold": {"kind": "gated", "thresholds": (0.1, 0.05)},
    "signed": {"kind": "signed", "activation": "relu", "thresholds": (0.2, -0.3)},
    "predicted": {"kind": "predicted", "pwri": True, "thresholds": (0.1, 0.0)},
    "predicted falcon": {"kind": "predicted", "pwri": True, "arch": "falcon", "attn_norm_2": True},
    "signed opt": {"kind": "signed", "arch": "opt", "n_heads": 3, "n_kv_heads": 3},
}


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    engine_options = {k: v for k, v in SPARSE[name].items() if k in ("kind", "activation", "thresholds")}
    model = {k: v for k, v in SPARSE[name].items() if k not in engine_options}
    for type_ in ("F32", "Q4_0"):
        path = tmp_path / f"{type_}.gguf"
        write_tiny_model(path, type=type_, **model)
        wanted = logits_of(local_engine(path, (2, 1), **engine_options), SHORT[0])
        monkeypatch.setenv("HOTNEURON_REFERENCE", "1")
        got = logits_of(local_engine(path, (2, 1), **engine_options), SHORT[0])
        monkeypatch.delenv("HOTNEURON_REFERENCE")
        # A neuron at the border of being active falls on either side, so some rows may differ by it.
        assert np.median(np.abs(got - wanted)) < (1e-4 if type_ == "F32" else 0.03) * wanted.std()


@pytest.mark.parametrize("compiled", [(), (0,), (1,)], ids=["all NumPy", "hot compiled", "cold compiled"])
def test_answers(model_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: tuple[int, ...]) -> None:
    """Batches, chunks, leases, stop tokens, log-probabilities and every sampling setting."""

    def ask(engine: LocalEngine) -> list[tuple[object, ...]]:
        stop = min(engine.tokenizer.stop_ids)
        likely = SamplingParams(temperature=1, logit_bias=((stop, 3.0),), seed=3, top_k=0)
        requests = [ask_for(prompt_of(150), 12), ask_for(prompt_of(8), 60, likely, ignore_eos=False)]
        requests += [ask_for(prompt_of(9), 12, SamplingParams(**options, logprobs=3)) for options in SETTINGS.values()]
        answers = engine.ask_all(requests)
        assert answers[1].finish_reason == "stop"
        for answer in answers:
            found.append([x for entry in answer.logprobs for x in (entry.logprob, *(top for _, top in entry.top))])
        return [(a.tokens, a.text, a.finish_reason, [[t for t, _ in e.top] for e in a.logprobs]) for a in answers]

    found: list[list[float]] = []
    with local_engine(model_path, (1, 2), chunk_tokens=64) as engine:
        wanted = ask(engine)
    wanted_logprobs, found = found, []
    monkeypatch.setenv("HOTNEURON_REFERENCE", "1")
    engine = local_engine(model_path, (1, 2), chunk_tokens=64)
    monkeypatch.delenv("HOTNEURON_REFERENCE")
    for me in compiled:
        worker = engine.team.workers[me]
        engine.team.workers[me] = Worker(worker.pack.path, worker.config, worker.plan, me, 1)
    assert is_reference(engine) == [me not in compiled for me in range(2)]
    with engine:
        assert ask(engine) == wanted
    for a, b in zip(found, wanted_logprobs, strict=True):
        assert a == pytest.approx(b, abs=1e-3)


def test_an_error_ends_the_answer(model_path: Path, reference: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with local_engine(model_path, (1, 1)) as engine:
        assert len(engine.ask(ask_for([1, 2], 3)).tokens) == 3
        monkeypatch.setattr(ReferenceProgram, "_neurons", fail)
        monkeypatch.setattr("threading.excepthook", lambda _: None)
        answer = engine.submit(ask_for([1, 2], 3)).until(lambda _: False)
        assert answer.finish_reason == "error" and "in a row" in (answer.chunks[-1].error or "")
