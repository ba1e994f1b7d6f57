"""The oracle itself: it agrees with llama.cpp, and keeps the laws that every causal model keeps."""

import dataclasses

import numpy as np
import pytest
from reference_model import forward, layer_norm, load_weights, rms_norm
from tiny_model import write_tiny_model

from hotneuron.models.architectures.registry import ARCHITECTURES
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig

YARN = {"type": "yarn", "factor": 8.0, "original_context_length": 128, "attn_factor": 0.9}
# Logits 0, 68, 136, 204, 272 after the last of TOKENS, that llama.cpp b11434 computed (F32 weights and KV, one thread)
# from the files that write_tiny_model(path, type="F32", seed=3, **options) wrote; all its other logits differed from
# this oracle's by at most 4e-6.
TOKENS = [(7 * i * i + 3 * i + 1) % 273 for i in range(50)]
FALCON_40B = {"arch": "falcon", "attn_norm_2": True, "tied": False, "n_heads": 6, "n_kv_heads": 2, "head_dim": 16}
GELU = 2e-3  # llama.cpp looks gelu up in a table of f16; seen: 1.2e-3
LLAMA_CPP = {
    "llama": ({}, [-0.4303, -0.9915, -1.6086, -0.4122, -0.4107]),
    "untied, biased": ({"tied": False, "qkv_bias": True}, [0.2675, 0.3779, -0.6495, 2.2759, -0.1494]),
    "qwen2": ({"arch": "qwen2"}, [2.7552, -1.2057, 1.2867, 1.805, -0.2866]),
    "qwen3": ({"arch": "qwen3", "head_dim": 64}, [-0.0027, 0.8073, 0.8094, -0.6443, -0.4516]),
    "linear": ({"rope_scaling": {"type": "linear", "factor": 4.0}}, [-0.4562, -0.9898, -1.3332, 0.6148, -0.342]),
    "yarn": ({"rope_scaling": YARN}, [0.0929, -1.2863, -1.4097, -0.2108, -0.4711]),
    "yarn, qwen2": ({"arch": "qwen2", "rope_scaling": YARN}, [2.9004, -1.5599, 0.7163, 1.9896, -0.2151]),
    "llama3": ({"rope_theta": 5e5, "rope_freqs": np.linspace(1, 8, 16)}, [-0.5852, -1.694, -2.5198, 1.5075, -0.5651]),
    "falcon-7B": ({"arch": "falcon"}, [0.3913, -1.0809, -0.1315, 0.8099, -0.4619]),
    "falcon-40B": (FALCON_40B, [-0.1888, -0.6484, -1.9692, -0.8972, -1.77]),
}


def load(path, **options):
    write_tiny_model(path, type="F32", seed=3, **options)
    file = GGUFFile.open(path)
    return ModelConfig.from_file(file), load_weights(file)


@pytest.mark.parametrize("case", LLAMA_CPP)
def test_agrees_with_llama_cpp(tmp_path, case):
    options, expected = LLAMA_CPP[case]
    logits = forward(*load(tmp_path / "m.gguf", **options), TOKENS)
    atol = GELU if options.get("arch") == "falcon" else 1e-4
    np.testing.assert_allclose(logits[-1, [0, 68, 136, 204, 272]], expected, atol=atol)


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
@pytest.mark.parametrize("sliding_window", [0, 5])
def test_later_tokens_change_nothing(tmp_path, arch, sliding_window):
    config, weights = load(tmp_path / "m.gguf", arch=arch, sliding_window=sliding_window)
    whole = forward(config, weights, TOKENS)
    for n in (1, 4, 5, 6, 33):
        np.testing.assert_allclose(forward(config, weights, TOKENS[:n]), whole[:n], atol=1e-9)


@pytest.mark.parametrize("arch", ["llama", "bamboo", "falcon", "opt"])
def test_down_turned_round_is_the_same_model(tmp_path, arch):
    config, weights = load(tmp_path / "m.gguf", arch=arch, pwri=True)
    expected = forward(config, weights, TOKENS)
    turned = {}
    for name, values in weights.items():
        turned[name.replace("ffn_down_t", "ffn_down")] = values.T if name.endswith("ffn_down_t.weight") else values
    found = forward(dataclasses.replace(config, down_transposed=False), turned, TOKENS)
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("arch", ["llama", "bamboo", "falcon", "opt"])
def test_neurons_that_do_not_fire_are_not_missed(tmp_path, arch):
    """With ReLU, the mask of all neurons that are above zero changes nothing, and any other mask does."""
    config, weights = load(tmp_path / "m.gguf", arch=arch, pwri=True)
    expected = forward(config, weights, TOKENS)
    seen = []

    def above_zero(layer, rows):
        seen.append((layer, rows.shape))
        norm = "attn_norm" if config.parallel else "ffn_norm"
        names = [f"blk.{layer}.{norm}.{kind}" for kind in ("weight", "bias")]
        given = [weights[name].astype(np.float64) for name in names if name in weights]
        normed = (layer_norm if config.norm == "layer" else rms_norm)(rows, *given, config.norm_eps)
        first = f"blk.{layer}.{'ffn_gate' if config.gated else 'ffn_up'}"
        return normed @ weights[f"{first}.weight"].astype(np.float64).T + weights.get(f"{first}.bias", 0) > 0

    np.testing.assert_allclose(forward(config, weights, TOKENS, active=above_zero), expected, atol=1e-9)
    assert seen == [(layer, (len(TOKENS), 96)) for layer in range(2)]
    none = forward(config, weights, TOKENS, active=lambda layer, rows: np.zeros((len(rows), 160), bool))
    assert np.abs(none - expected).max() > 0.1


def test_sliding_window_forgets(tmp_path):
    """One layer with a window of W sees the last W tokens only; positions are relative, so a shift is harmless."""
    config, weights = load(tmp_path / "m.gguf", n_layers=1, sliding_window=5)
    whole = forward(config, weights, TOKENS)
    np.testing.assert_allclose(whole[:5], forward(*load(tmp_path / "f.gguf", n_layers=1), TOKENS[:5]), atol=1e-9)
    np.testing.assert_allclose(forward(config, weights, TOKENS[-5:])[-1], whole[-1], atol=1e-5)
    assert np.abs(forward(config, weights, TOKENS[-4:])[-1] - whole[-1]).max() > 1e-2


def test_the_default_model_agrees_with_llama_cpp(default_model_path, default_metadata, reference):
    """llama.cpp rounds activations to 8 bits, so log probabilities differ by a few hundredths and ties may turn."""
    file = GGUFFile.open(default_model_path)
    config, weights = ModelConfig.from_file(file), load_weights(file)
    ids = {token: index for index, token in enumerate(default_metadata["tokenizer.ggml.tokens"])}
    answer = reference["greedy"][0]
    assert answer["prompt"] == "Once upon a time"
    prompt = [ids[token] for token in ("Once", "Ġupon", "Ġa", "Ġtime")]
    generated = answer["tokens"][:40]
    logits = forward(config, weights, prompt + generated)[len(prompt) - 1 : -1]
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    peer = np.array(answer["top5_logprobs"][:40])
    errors = np.abs(np.take_along_axis(logprobs, peer[..., 0].astype(int), axis=1) - peer[..., 1])
    assert errors.mean() < 0.15 and errors.max() < 1.0
    assert np.mean(logits.argmax(axis=-1) == generated) >= 0.9
