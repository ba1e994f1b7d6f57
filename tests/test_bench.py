"""The benchmarks' own parts: a shape that loads, a requantized copy, and the arithmetic of the comparison."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from tiny_model import write_tiny_model

from hotneuron.models.dequantize import dequantize
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
import exchange
import make_shape
import peers
import requantize
import runs
import subjects
from bandwidth import read_gb_s

SHAPE = make_shape.Shape(layers=2, hidden=128, ffn=224, heads=4, kv_heads=2, vocab=300, context_tokens=256)


def test_a_shape_is_a_whole_model_with_sane_weights(tmp_path):
    path = tmp_path / "shape.gguf"
    make_shape.write_shape(path, SHAPE, "test")
    file = GGUFFile.open(path)
    assert {name: info.shape for name, info in file.tensors.items()} == {
        name: tuple(reversed(shape)) for name, shape in SHAPE.tensors()
    }
    weights = dequantize(file.raw("blk.1.ffn_down.weight"), GGMLQuantizationType.Q4_0, (224, 128))
    assert weights.std() * 224**0.5 == pytest.approx(1, abs=0.15)
    assert ModelConfig.from_file(file).hidden == SHAPE.hidden
    tokenizer = Tokenizer.from_metadata(file.metadata)
    assert tokenizer.decode(tokenizer.encode("Hé, 你好\n")).strip() == "Hé, 你好"  # byte pieces can write every text
    assert [p.name for p in tmp_path.iterdir()] == ["shape.gguf"]


def test_requantizing_changes_only_the_matrices_of_layers(tmp_path):
    source, copy = tmp_path / "in.gguf", tmp_path / "out.gguf"
    write_tiny_model(source, type="Q4_1", types={"token_embd": "Q8_0"})
    requantize.requantize(source, copy, "Q4_0")
    before, after = GGUFFile.open(source), GGUFFile.open(copy)
    assert after.metadata == before.metadata | {"general.file_type": 2}
    assert list(after.tensors) == list(before.tensors)
    for name, old in before.tensors.items():
        new = after.tensors[name]
        assert new.shape == old.shape
        if old.type is GGMLQuantizationType.Q4_1:
            assert new.type is GGMLQuantizationType.Q4_0
            one, other = (dequantize(f.raw(name), f.tensors[name].type, old.shape) for f in (before, after))
            assert np.abs(one - other).max() < np.abs(one).max() / 7  # at most one step of 16
        else:
            assert new.type is old.type
            assert np.array_equal(after.raw(name), before.raw(name))


@pytest.mark.parametrize("tied", [True, False])
def test_weight_bytes_leave_out_an_embedding_that_is_only_looked_up(tmp_path, tied):
    path = tmp_path / "m.gguf"
    write_tiny_model(path, tied=tied)
    tensors = GGUFFile.open(path).tensors
    total = sum(info.n_bytes for info in tensors.values())
    looked_up = 0 if tied else tensors["token_embd.weight"].n_bytes
    assert subjects.weight_bytes_per_token(path) == total - looked_up


def large(llama_cpp: float, hotneuron: float) -> peers.Row:
    """A decode test that moves 2 GB a token on a machine that reads 30 GB/s."""
    return peers.Row("3.5b", "tg32", 2_000_000_000, [llama_cpp], [hotneuron], [30.0])


@pytest.mark.parametrize(
    ("llama_cpp", "hotneuron", "target", "verdict"),
    [
        (7.0, 12.0, 1.5, "ok"),
        (7.0, 11.0, 1.5, "short"),  # 73 % of the read bandwidth
        (7.4, 11.1, 1.5, "short"),
        (14.0, 13.9, 1.0, "short"),  # nearly the whole bandwidth, but below llama.cpp
        (12.0, 12.1, 1.0, "ok"),
    ],
)
def test_large_decode_is_judged_by_its_peer_and_by_the_memory(llama_cpp, hotneuron, target, verdict):
    row = large(llama_cpp, hotneuron)
    assert (row.target("any"), row.verdict("any")) == (target, verdict)


def test_llama_bench_output_is_read_by_test(tmp_path):
    results = [
        {"n_prompt": 512, "n_gen": 0, "samples_ts": [600.0, 610.0]},
        {"n_prompt": 0, "n_gen": 128, "samples_ts": [100.0, 90.0]},
    ]
    build = {"build_commit": "abc", "build_number": 1, "backends": "CPU", "repack": True}
    binary = tmp_path / "llama-bench"
    # It answers only to the flags that were asked for.
    binary.write_text(
        f"#!{sys.executable}\nimport sys\n"
        "assert sys.argv[1:] == '-m m.gguf -t 2 -r 2 -o json -p 512 -n 128'.split(), sys.argv\n"
        f"print({json.dumps([r | build for r in results])!r})\n"
    )
    binary.chmod(0o755)
    rates, found = runs.llama_cpp(binary, Path("m.gguf"), ["tg128", "pp512"], 2, 2)
    assert rates == {"pp512": [600.0, 610.0], "tg128": [100.0, 90.0]}
    assert found == build


def test_a_peer_that_fails_ends_the_run_with_its_own_words(tmp_path):
    binary = tmp_path / "llama-bench"
    binary.write_text(f"#!{sys.executable}\nimport sys\nsys.exit('unknown model architecture')\n")
    binary.chmod(0o755)
    with pytest.raises(SystemExit, match="unknown model architecture"):
        runs.llama_cpp(binary, Path("m.gguf"), ["tg128"], 2, 1)


def test_bandwidth_is_one_rate_a_repetition():
    rates = read_gb_s(threads=2, size_bytes=16 << 20, repetitions=3)
    assert len(rates) == 3 and all(0.05 < rate < 5000 for rate in rates)


@pytest.mark.parametrize("width", [16, 576])
def test_the_measured_exchange_adds_right(width):
    assert (exchange.our_meetings_us(width, 300) > 0).all()  # it raises where a sum is wrong
