"""Only active neurons: dense bits where the first product decides, the oracle's values where a predictor does."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from local_team import LocalEngine, ask_for, local_engine, logits_of
from reference_model import forward, load_weights
from tiny_model import write_tiny_model

from hotneuron.actors import fields
from hotneuron.actors.activity import Activity
from hotneuron.kernels.signs import scores_reference
from hotneuron.models.gguf_file import GGUFFile

RELU: dict[str, Any] = {"metadata": {"hidden_activation": "relu"}}
TOKENS = [(7 * i * i + 3 * i + 1) % 273 for i in range(45)]
WIDE: dict[str, Any] = {"hidden": 256, "ffn": 512, "n_heads": 8, "n_kv_heads": 2}
GATED: dict[str, dict[str, Any]] = {
    "Q4_0": {"type": "Q4_0", **RELU},
    "Q4_1": {"type": "Q4_1", **RELU},
    "Q8_0": {"type": "Q8_0", **RELU},
    "Q5_1": {"type": "Q5_1", **RELU},
    "Q4_K": {"type": "Q4_K", **WIDE, **RELU},
    "F16": {"type": "F16", **RELU},
    "F32, odd": {"type": "F32", "hidden": 72, "n_heads": 5, "n_kv_heads": 5, "head_dim": 20, "ffn": 100, **RELU},
    "mixed": {"type": "Q4_0", "types": {"ffn_up": "Q6_K", "ffn_gate": "BF16", "ffn_down": "Q8_0"}, **WIDE, **RELU},
    "silu": {"type": "Q4_0"},
    "bamboo": {"arch": "bamboo", "type": "Q4_0"},
    "falcon": {"arch": "falcon", "type": "Q8_0", "metadata": {"hidden_activation": "relu"}},
    "opt": {"arch": "opt", "type": "Q4_0", "n_heads": 3, "n_kv_heads": 3},
}
PREDICTED: dict[str, dict[str, Any]] = {
    "llama": {"types": {"fc1": "F32", "fc2": "F32"}, "type": "Q4_0"},
    "ranks": {"types": {"fc1": "F32", "fc2": "F16"}, "type": "F16", "predictor_rank": (20, 70)},
    "F32": {"type": "F32"},
    "F32 falcon": {"arch": "falcon", "type": "F32", "attn_norm_2": True},
    "F32 opt": {"arch": "opt", "type": "F32", "n_heads": 3, "n_kv_heads": 3},
    "F32 bamboo": {"arch": "bamboo", "type": "F32"},
    "Q8_0": {"types": {"fc1": "F32", "fc2": "F32"}, "type": "Q8_0"},
    "Q4_1": {"types": {"fc1": "F32", "fc2": "F32"}, "type": "Q4_1"},
    "Q6_K": {"types": {"ffn_down_t": "Q6_K"}, "type": "F32", **WIDE},
    "not turned": {"types": {"fc1": "F32", "fc2": "F32"}, "type": "Q4_0", "down_transposed": False},
    "bamboo": {"arch": "bamboo", "types": {"fc1": "F32", "fc2": "F32"}, "type": "Q4_0"},
    "falcon-7B": {"arch": "falcon", "types": {"fc1": "F32", "fc2": "F32"}, "type": "Q4_0"},
    "falcon-40B": {"arch": "falcon", "attn_norm_2": True, "types": {"fc1": "F32", "fc2": "F32"}, "type": "Q8_0"},
    "opt": {"arch": "opt", "n_heads": 3, "n_kv_heads": 3, "types": {"fc1": "F32", "fc2": "F32"}, "type": "Q4_0"},
}


@pytest.mark.parametrize("name", GATED)
def test_exact_mode_has_the_dense_bits(tmp_path: Path, name: str) -> None:
    write_tiny_model(tmp_path / "m.gguf", **GATED[name])
    for shares, threads in (((1,), 1), ((1, 2), 2)):
        dense = local_engine(tmp_path / "m.gguf", shares, threads)
        sparse = local_engine(tmp_path / "m.gguf", shares, threads, kind="gated")
        assert logits_of(sparse, TOKENS).tobytes() == logits_of(dense, TOKENS).tobytes()
        for rows in (1, 2):  # few rows list some neurons, many nearly all: both ways of computing them
            few = logits_of(sparse, TOKENS[:9], rows=rows)
            assert few.tobytes() == logits_of(dense, TOKENS[:9]).tobytes()


def oracle(engine: LocalEngine, path: Path, tokens: list[int], threshold: float) -> tuple[np.ndarray, float]:
    """Logits when the predictor decides, and the share of neurons that it lets fire."""
    weights = load_weights(GGUFFile.open(path))
    shares = []

    def active(layer: int, rows: np.ndarray) -> np.ndarray:
        hidden = np.maximum(rows @ weights[f"blk.{layer}.fc1.weight"].T, 0)
        marks = hidden @ weights[f"blk.{layer}.fc2.weight"].T >= threshold
        shares.append(marks.mean())
        return marks

    def keep(rows: np.ndarray) -> np.ndarray:
        return rows.astype(np.float16).astype(np.float64)

    return forward(engine.config, weights, tokens, keep=keep, active=active), float(np.mean(shares))


@pytest.mark.parametrize("name", PREDICTED)
def test_predicted_neurons_are_the_oracles(tmp_path: Path, name: str) -> None:
    path, is_float = tmp_path / "m.gguf", PREDICTED[name]["type"] in ("F32", "F16")
    write_tiny_model(path, pwri=True, **PREDICTED[name])
    for threshold in (-1e30, 0.0, 0.02 if "falcon" in name else 0.3):
        results = []
        for shares, threads in (((1,), 1), ((2, 1), 2), ((1, 0, 3), 1)):
            engine = local_engine(path, shares, threads, kind="predicted", thresholds=(threshold,) * 2)
            results.append(logits_of(engine, TOKENS))
            if len(shares) == 1:
                for rows in (1, 2):
                    assert logits_of(engine, TOKENS[:7], rows=rows).tobytes() == results[0][:7].tobytes()
        expected, share = oracle(engine, path, TOKENS, threshold)
        assert share == 1 if threshold < 0 else 0.1 < share < 0.9
        spread = expected.std()
        for got in results:
            distance = np.abs(got - expected).max(axis=1) / spread
            assert np.median(distance) < (1e-3 if is_float else 0.3)
    assert np.abs(oracle(engine, path, TOKENS, -1e30)[0] - expected).max() > 0.2 * spread  # or nothing was tested


def test_an_order_of_neurons_changes_no_more_than_rounding(tmp_path: Path) -> None:
    path, rng = tmp_path / "m.gguf", np.random.default_rng(5)
    write_tiny_model(path, pwri=True, type="F32", ffn=170)
    order = np.stack([rng.permutation(170) for _ in range(2)])
    plain = logits_of(local_engine(path, kind="predicted"), TOKENS)
    moved = local_engine(path, (1, 2), kind="predicted", order=order)
    assert np.abs(logits_of(moved, TOKENS) - plain).max() < 1e-3 * plain.std()
    np.testing.assert_array_equal(moved.pack.neuron_order(1, 170)[:170], order[1])

    write_tiny_model(tmp_path / "g.gguf", type="Q4_0", ffn=170 - 170 % 32, **RELU)
    blocks = np.stack([rng.permutation(5) for _ in range(2)])
    order = (32 * blocks[:, :, None] + np.arange(32)).reshape(2, 160)
    plain = logits_of(local_engine(tmp_path / "g.gguf", kind="gated"), TOKENS)
    moved = local_engine(tmp_path / "g.gguf", (1, 2), kind="gated", order=order)
    assert np.median(np.abs(logits_of(moved, TOKENS) - plain)) < 1e-3 * plain.std()


def test_counters_count_what_fires(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_model(path, type="F32", **RELU)
    weights = load_weights(GGUFFile.open(path))
    fired: list[np.ndarray] = []

    def watch(rows: np.ndarray, name: str) -> np.ndarray:
        if "ffn_down" in name:
            fired.append(rows)
        return rows

    orders = (None, np.stack([np.arange(160).reshape(5, 32)[::-1].ravel()] * 2))
    for shares, order in itertools.product(((1,), (1, 2)), orders):
        engine = local_engine(path, shares, 2, kind="gated", order=order, has_histogram=True)
        logits_of(engine, TOKENS)
        activity = Activity.of(engine.exchange.activity(), engine.pack, engine.plan, engine.config.ffn)
        fired.clear()
        forward(engine.config, weights, TOKENS, see=watch)
        for layer in range(2):
            expected = (fired[layer] != 0).sum(axis=0)
            assert np.abs(activity.fires[layer] - expected).max() <= 1  # a value at the border of 0
            np.testing.assert_allclose(activity.adds[layer], np.abs(fired[layer]).sum(axis=0), rtol=0.02, atol=0.02)
            assert activity.fires[layer].sum() > 1000
            assert activity.histogram[layer].sum() == 160 * len(TOKENS)
            above_0 = activity.histogram[layer][1:].sum()
            assert abs(above_0 - activity.fires[layer].sum()) <= 2
        assert activity.tokens.tolist() == [len(TOKENS)] * 2 and activity.lists.tolist() == [2, 2]
        assert 0.9 < activity.listed_share() <= 1


def test_a_trace_accounts_for_the_time(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_model(path, pwri=True, type="Q4_0")
    engine = local_engine(path, (1, 1), kind="predicted", is_traced=True)
    logits_of(engine, TOKENS)
    trace = dict(zip(fields.PHASES, engine.exchange.trace_ns().T.tolist(), strict=False))
    for phase in ("norm", "attention", "gate_up", "down", "predictor", "exchange"):
        assert min(trace[phase]) > 0


def decided_by_signs(engine: LocalEngine, path: Path, tokens: list[int], dial: float) -> tuple[np.ndarray, float]:
    """Logits when signs of the first matrix and of its input decide, and the share of neurons that they let pass."""
    weights, shares = load_weights(GGUFFile.open(path)), []
    first = "ffn_gate" if engine.config.gated else "ffn_up"

    def active(layer: int, rows: np.ndarray) -> np.ndarray:
        signs = np.where(weights[f"blk.{layer}.{first}.weight"] < 0, np.float32(-1), np.float32(1))
        marks = scores_reference(signs, rows) >= np.float32(dial)
        shares.append(marks.mean())
        return marks

    def keep(rows: np.ndarray) -> np.ndarray:
        return rows.astype(np.float16).astype(np.float64)

    logits = forward(engine.config, weights, tokens, keep=keep, active=active, active_sees="normed")
    return logits, float(np.mean(shares))


@pytest.mark.parametrize("arch", ["llama", "bamboo", "falcon", "opt"])
def test_signs_decide(tmp_path: Path, arch: str) -> None:
    path = tmp_path / "m.gguf"
    heads = {"n_heads": 3, "n_kv_heads": 3} if arch == "opt" else {}
    write_tiny_model(path, arch=arch, type="F32", **heads, **({} if arch in ("bamboo", "opt") else RELU))
    safe = local_engine(path, kind="signed", thresholds=(-1e30,) * 2)
    dense = local_engine(path)
    assert logits_of(safe, TOKENS).tobytes() == logits_of(dense, TOKENS).tobytes()
    for dial in (-0.5, 0.4):
        expected, share = decided_by_signs(safe, path, TOKENS, dial)
        assert 0.1 < share < 0.9
        for shares, threads in (((1,), 1), ((1, 2), 2)):
            got = logits_of(local_engine(path, shares, threads, kind="signed", thresholds=(dial,) * 2), TOKENS)
            assert np.median(np.abs(got - expected).max(axis=1)) < 0.02 * expected.std()


def test_same_tokens_alone_and_among_others(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_model(path, pwri=True, type="Q4_0")
    with local_engine(path, (1, 1), kind="predicted") as engine:
        requests = [ask_for(TOKENS[i : i + 3 + 5 * i], 12) for i in range(6)]
        alone = [engine.ask(request).tokens for request in requests]
        together = engine.ask_all([ask_for(request.prompt, 12) for request in requests])
        assert [answer.tokens for answer in together] == alone


def test_100_runs_with_two_workers_give_the_same_tokens(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_model(path, pwri=True, type="Q4_0")
    with local_engine(path, (1, 1), 2, kind="predicted") as engine:
        answers = {tuple(engine.ask(ask_for(TOKENS, 16)).tokens) for _ in range(100)}
    assert len(answers) == 1


def test_256_greedy_tokens_are_those_of_the_dense_run(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_model(path, type="Q4_0", **RELU)
    answers = []
    for kind in ("dense", "gated"):
        with local_engine(path, (1, 1), kind=kind) as engine:
            answers.append(engine.ask(ask_for(TOKENS, 256)).tokens)
    assert answers[0] == answers[1] and len(set(answers[0])) > 3
