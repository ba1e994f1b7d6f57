"""Model configurations: read right, refused with a line that helps, and RoPE against the papers' formulas."""

import dataclasses
import math

import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_model import write_tiny_model

from hotneuron.models.architectures.registry import ARCHITECTURES
from hotneuron.models.errors import ModelFileError, UnsupportedError
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.rope import RopeConfig
from hotneuron.models.tensor_table import SUPPORTED_TYPES, tensor_table


@pytest.fixture
def load(tmp_path):
    def load(**options) -> ModelConfig:
        write_tiny_model(tmp_path / "m.gguf", **options)
        return ModelConfig.from_file(GGUFFile.open(tmp_path / "m.gguf"))

    return load


# What is not as Llama has it.
OTHERS = {
    "bamboo": {"activation": "relu", "up_activation": "relu"},
    "falcon": {"activation": "gelu", "gated": False, "norm": "layer", "fused_qkv": True, "parallel": True},
    "opt": {"activation": "relu", "gated": False, "norm": "layer", "positions": "learned", "linear_bias": True},
}


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
@pytest.mark.parametrize("tied", [True, False])
def test_every_field(load, tmp_path, arch, tied):
    config = load(
        arch=arch, tied=tied, hidden=64, n_layers=3, n_heads=6, n_kv_heads=2, head_dim=16, ffn=96, vocab=301,
        context_tokens=777, rope_theta=5e5, norm_eps=1e-6, sliding_window=33,
    )  # fmt: skip
    assert config == ModelConfig(
        architecture=arch, name="tiny", n_layers=3, hidden=64, n_heads=6, n_kv_heads=2, head_dim=16, ffn=96, vocab=301,
        context_tokens=777, norm_eps=1e-5 if arch == "opt" else float(np.float32(1e-6)), sliding_window=33,
        tied_embeddings=tied or arch == "opt", qkv_bias=arch in ("qwen2", "opt"), qk_norm=arch == "qwen3",
        rope=RopeConfig(
            dims=16, theta=5e5, style="interleaved" if arch in ("llama", "bamboo") else "half", ext_factor=0.0,
            original_context_tokens=777,
        ),
        **OTHERS.get(arch, {}),
    )  # fmt: skip
    tensors = GGUFFile.open(tmp_path / "m.gguf").tensors
    table = tensor_table(config)
    assert sorted(table.values()) == sorted(tensors)
    assert table["token_embd"] == "token_embd.weight" and ("output" in table) is not config.tied_embeddings
    assert table["2.ffn_down"] == "blk.2.ffn_down.weight"
    assert table.get("1.attn_q_bias") == ("blk.1.attn_q.bias" if arch in ("qwen2", "opt") else None)
    assert table.get("1.attn_k_norm") == ("blk.1.attn_k_norm.weight" if arch == "qwen3" else None)


def test_absent_keys_have_the_formats_defaults(load):
    drop = ("attention.head_count_kv", "attention.key_length", "attention.value_length")
    drop += ("rope.dimension_count", "rope.freq_base", "vocab_size")
    config = load(hidden=96, n_heads=3, n_kv_heads=3, head_dim=32, drop=drop)
    assert (config.n_kv_heads, config.head_dim, config.vocab) == (3, 32, 273)
    assert (config.rope.dims, config.rope.theta, config.rope.scaling) == (32, 10000.0, "none")


def test_optional_biases_are_found(load):
    assert load(arch="llama", qkv_bias=True).qkv_bias
    assert not load(arch="llama").qkv_bias


def test_a_number_for_each_layer_is_accepted_when_they_agree(load):
    assert load(metadata={"attention.head_count": [3, 3], "feed_forward_length": [160, 160]}).n_heads == 3
    with pytest.raises(ModelFileError, match=r"llama\.attention\.head_count: \[3, 1\] is not a whole number"):
        load(metadata={"attention.head_count": [3, 1]})


def test_the_token_list_decides_over_vocab_size(load):
    assert load(metadata={"vocab_size": 99}).vocab == 273


def test_the_default_model(default_model_path):
    config = ModelConfig.from_file(GGUFFile.open(default_model_path))
    assert config == ModelConfig(
        architecture="llama", name="Smollm2 135M 8k Lc100K Mix1 Ep2", n_layers=30, hidden=576, n_heads=9, n_kv_heads=3,
        head_dim=64, ffn=1536, vocab=49152, context_tokens=8192, norm_eps=float(np.float32(1e-5)), sliding_window=0,
        qkv_bias=False, qk_norm=False, tied_embeddings=True,
        rope=RopeConfig(64, 1e5, "interleaved", ext_factor=0.0, original_context_tokens=8192),
    )  # fmt: skip


REQUIRED = (
    "block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count",
    "attention.layer_norm_rms_epsilon",
)  # fmt: skip
NUMBERS = (*REQUIRED, "attention.head_count_kv", "attention.key_length", "rope.freq_base", "rope.dimension_count")
REALS = ("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.scaling.factor", "rope.scaling.attn_factor")


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key(load, key):
    with pytest.raises(ModelFileError, match=rf"m\.gguf: llama\.{key}: is missing"):
        load(drop=(key,))


@pytest.mark.parametrize("value", ["12", [1.5], True, -1, [1, 2]], ids=str)
@pytest.mark.parametrize("key", NUMBERS)
def test_wrong_type_or_negative(load, key, value):
    with pytest.raises(ModelFileError, match=rf"m\.gguf: llama\.{key}: "):
        load(metadata={key: value})


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -1.0, 3e38])
@pytest.mark.parametrize("key", REALS)
def test_not_a_usable_real_number(load, key, value):
    with pytest.raises(ModelFileError, match=rf"m\.gguf: llama\.{key}: .* is out of range"):
        load(rope_scaling={"type": "yarn", "factor": 2.0}, metadata={key: value})


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("block_count", 0, "0 is out of range"),
        ("block_count", 2**31, "is out of range; 1 to"),
        ("embedding_length", 2**31, "is out of range"),
        ("feed_forward_length", 2**31, "is out of range"),
        ("context_length", 0, "is out of range"),
        ("context_length", 2**31, "is out of range"),
        ("attention.head_count", 0, "is out of range"),
        ("attention.head_count_kv", 2, "2 does not divide the 3 heads"),
        ("attention.head_count_kv", 6, "6 does not divide"),
        ("attention.key_length", 31, "the head size 31 is odd"),
        ("attention.sliding_window", -1, "is out of range"),
        ("rope.dimension_count", 34, "is out of range; 2 to 32"),
        ("rope.dimension_count", 7, "7 is odd"),
        ("rope.freq_base", 1.0, "is out of range"),
        ("attention.layer_norm_rms_epsilon", 0.0, "is out of range"),
        ("rope.scaling.type", 3, "is not a text"),
        ("rope.scaling.factor", 1e-30, "is out of range; 0 (none) or"),
        ("rope.scale_linear", 1e-30, "is out of range; 0 (none) or"),
    ],
)
def test_contradictory_metadata(load, key, value, problem):
    with pytest.raises(ModelFileError) as error:
        load(metadata={key: value})
    assert f"m.gguf: llama.{key}: " in str(error.value) and problem in str(error.value)


def test_heads_must_divide_hidden_without_a_head_size(load):
    with pytest.raises(ModelFileError, match="5 heads do not divide the hidden size 96"):
        load(n_kv_heads=1, metadata={"attention.head_count": 5}, drop=("attention.key_length",))


def test_unsupported_variants(load):
    with pytest.raises(
        UnsupportedError, match=r"architecture 'mamba'; supported are llama, qwen2, qwen3, bamboo, falcon, opt"
    ):
        load(arch="mamba")
    with pytest.raises(UnsupportedError, match="mixtures of experts"):
        load(metadata={"expert_count": 8})
    with pytest.raises(UnsupportedError, match="keys of 32 and values of 16"):
        load(metadata={"attention.value_length": 16})
    with pytest.raises(UnsupportedError, match="RoPE scaling 'longrope'; supported are none, linear, yarn"):
        load(rope_scaling={"type": "longrope"})
    # A tensor that would be ignored changes the answers: better none than wrong ones.
    with pytest.raises(UnsupportedError, match=r"tensor 'blk\.0\.attn_q_norm\.weight' is not part of the llama"):
        load(arch="llama", qk_norm=True)


def test_unsupported_tensor_type(tmp_path):
    write_tiny_model(tmp_path / "sound.gguf", hidden=256, n_heads=4, n_kv_heads=2, head_dim=64, ffn=256)
    file = GGUFFile.open(tmp_path / "sound.gguf")
    info = file.tensors["blk.1.ffn_down.weight"]
    file.tensors[info.name] = dataclasses.replace(info, type=GGMLQuantizationType.IQ4_XS)
    with pytest.raises(UnsupportedError) as error:
        ModelConfig.from_file(file)
    names = " ".join(kind.name for kind in SUPPORTED_TYPES)
    assert names == "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K"
    assert f"tensor blk.1.ffn_down.weight has type IQ4_XS; supported are {names}" in str(error.value)


def test_norms_are_plain_numbers(load, tmp_path):
    load()
    file = GGUFFile.open(tmp_path / "m.gguf")
    info = file.tensors["output_norm.weight"]
    file.tensors[info.name] = dataclasses.replace(info, type=GGMLQuantizationType.Q8_0)
    with pytest.raises(UnsupportedError, match=r"output_norm\.weight has type Q8_0; supported are F32 F16 BF16$"):
        ModelConfig.from_file(file)


def all_tensors(arch: str) -> list[str]:
    roles = "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down".split()
    names = ["token_embd.weight", "output_norm.weight", *(f"blk.1.{role}.weight" for role in roles)]
    if arch in ("falcon", "opt"):
        names += ["output_norm.bias", "blk.1.attn_norm.bias"]
        names.remove("blk.1.ffn_gate.weight")
    if arch == "falcon":
        names = [
            name for name in names if not name.endswith(("_q.weight", "_k.weight", "_v.weight", "ffn_norm.weight"))
        ]
        names.append("blk.0.attn_qkv.weight")
    if arch == "opt":
        names += [f"blk.1.{role}.bias" for role in ("ffn_norm", "attn_output", "ffn_up", "ffn_down")]
        names.append("position_embd.weight")
    if arch == "qwen3":
        names += ["blk.1.attn_q_norm.weight", "blk.1.attn_k_norm.weight"]
    if arch in ("qwen2", "opt"):
        names += [f"blk.0.attn_{role}.bias" for role in "qkv"]
    return names


@pytest.mark.parametrize("arch", sorted(ARCHITECTURES))
def test_every_tensor_is_needed_and_has_its_shape(tmp_path, arch):
    write_tiny_model(tmp_path / "m.gguf", arch=arch)
    for name in all_tensors(arch):
        file = GGUFFile.open(tmp_path / "m.gguf")
        info = file.tensors.pop(name)
        with pytest.raises(ModelFileError) as error:
            ModelConfig.from_file(file)
        assert f"tensor {name}: is missing; one of shape {info.shape} is expected" in str(error.value)
        wrong = (*info.shape[:-1], info.shape[-1] + 1)
        for shape in (wrong, (*info.shape, 2), ()):
            file.tensors[name] = dataclasses.replace(info, shape=shape)
            with pytest.raises(ModelFileError) as error:
                ModelConfig.from_file(file)
            message = f"tensor {name}: has shape {shape}, but the metadata ask for {info.shape}"
            assert message in str(error.value)
        file.tensors[name] = dataclasses.replace(info, shape=(*info.shape, 1))
        ModelConfig.from_file(file)


@pytest.mark.parametrize("arch", ["llama", "bamboo", "falcon", "opt"])
@pytest.mark.parametrize("down_transposed", [True, False])
def test_sparse_files(load, tmp_path, arch, down_transposed):
    keys = {"arch": arch, "pwri": True, "predictor_rank": (32, 64), "down_transposed": down_transposed}
    config = load(**keys)
    assert (config.predictor_ranks, config.down_transposed, config.activation) == ((32, 64), down_transposed, "relu")
    assert config.sparse_threshold == 0.0
    tensors, table = GGUFFile.open(tmp_path / "m.gguf").tensors, tensor_table(config)
    assert sorted(table.values()) == sorted(tensors)
    assert tensors[table["0.fc1"]].shape == (96, 32) and tensors[table["1.fc2"]].shape == (64, 160)
    down = "ffn_down_t" if down_transposed else "ffn_down"
    assert tensors[table[f"1.{down}"]].shape == ((96, 160) if down_transposed else (160, 96))
    assert table.get("1.ffn_down_bias") == (f"blk.1.{down}.bias" if arch == "opt" else None)


def test_a_predictor_is_as_good_in_a_gguf_file(load, tmp_path):
    load(pwri=True)
    with open(tmp_path / "m.gguf", "r+b") as file:
        file.write(b"GGUF")
    config = ModelConfig.from_file(GGUFFile.open(tmp_path / "m.gguf"))
    assert config.predictor_ranks == (32, 32) and config.activation == "silu"


def test_two_norms_of_falcon(load, tmp_path):
    assert load(arch="falcon", attn_norm_2=True).attn_norm_2
    file = GGUFFile.open(tmp_path / "m.gguf")
    del file.tensors["blk.1.attn_norm_2.bias"]
    with pytest.raises(ModelFileError, match=r"tensor blk\.1\.attn_norm_2\.bias: is missing"):
        ModelConfig.from_file(file)


ACTIVATIONS = [
    ({}, None, "silu"),
    ({"pwri": True}, None, "relu"),
    ({"metadata": {"hidden_activation": "relu"}}, None, "relu"),
    ({"pwri": True, "metadata": {"hidden_activation": "silu"}}, None, "silu"),
    ({"arch": "falcon"}, None, "gelu"),
    ({"arch": "falcon", "pwri": True}, None, "relu"),
    ({"arch": "opt"}, None, "relu"),
    ({"metadata": {"hidden_activation": "gelu"}}, "relu", "relu"),
]


@pytest.mark.parametrize(("options", "asked", "expected"), ACTIVATIONS)
def test_activation(load, tmp_path, options, asked, expected):
    load(**options)
    assert ModelConfig.from_file(GGUFFile.open(tmp_path / "m.gguf"), asked).activation == expected


def test_unknown_activation(load, tmp_path):
    with pytest.raises(UnsupportedError, match=r"m\.gguf: activation 'gelu_new'; supported are silu, gelu, relu"):
        load(metadata={"hidden_activation": "gelu_new"})
    with pytest.raises(ModelFileError, match=r"llama\.hidden_activation: 3 is not a text"):
        load(metadata={"hidden_activation": 3})
    load()
    with pytest.raises(UnsupportedError, match="activation 'swish'; supported are silu, gelu, relu"):
        ModelConfig.from_file(GGUFFile.open(tmp_path / "m.gguf"), "swish")


@pytest.mark.parametrize("value", [-2.5, 0.25])
def test_threshold(load, tmp_path, value):
    load(pwri=True)
    file = GGUFFile.open(tmp_path / "m.gguf")
    file.metadata["powerinfer.sparse_threshold"] = value
    assert ModelConfig.from_file(file).sparse_threshold == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, "0", True])
def test_a_threshold_that_is_no_number(load, tmp_path, value):
    load(pwri=True)
    file = GGUFFile.open(tmp_path / "m.gguf")
    file.metadata["powerinfer.sparse_threshold"] = value
    with pytest.raises(ModelFileError, match=r"powerinfer\.sparse_threshold: "):
        ModelConfig.from_file(file)


PREDICTORS = [  # tensor, its shape (None: it is not there), message
    ("blk.0.fc1", None, "is missing; one of shape (96, rank) is expected in a PWRI file"),
    ("blk.1.fc1", None, "is missing; one of shape (96, rank) is expected in a PWRI file"),
    ("blk.1.fc1", (64, 32), "has shape (64, 32); one of shape (96, rank) is expected"),
    ("blk.1.fc1", (96,), "has shape (96,); one of shape (96, rank) is expected"),
    ("blk.1.fc1", (96, 0), "with a rank of 1 to 65536"),
    ("blk.1.fc1", (96, 1 << 40), "with a rank of 1 to 65536"),
    ("blk.1.fc2", None, "is missing; one of shape (32, 160) is expected"),
    ("blk.1.fc2", (64, 160), "has shape (64, 160), but fc1 and the metadata ask for (32, 160)"),
    ("blk.1.fc2", (32, 128), "has shape (32, 128), but fc1 and the metadata ask for (32, 160)"),
    ("blk.1.ffn_down_t", (160, 96), "has shape (160, 96), but the metadata ask for (96, 160)"),
    ("blk.1.ffn_down_t", None, "is missing; one of shape (96, 160) is expected"),
]


@pytest.mark.parametrize(("name", "shape", "problem"), PREDICTORS)
def test_damaged_predictors(load, tmp_path, name, shape, problem):
    load(pwri=True)
    file = GGUFFile.open(tmp_path / "m.gguf")
    info = file.tensors.pop(f"{name}.weight")
    if shape is not None:
        file.tensors[info.name] = dataclasses.replace(info, shape=shape)
    with pytest.raises(ModelFileError) as error:
        ModelConfig.from_file(file)
    assert f"m.gguf: tensor {name}.weight: " in str(error.value) and problem in str(error.value)


def test_half_a_predictor_in_a_gguf_file(load, tmp_path):
    load(pwri=True)
    with open(tmp_path / "m.gguf", "r+b") as opened:
        opened.write(b"GGUF")
    file = GGUFFile.open(tmp_path / "m.gguf")
    del file.tensors["blk.1.fc1.weight"]
    with pytest.raises(
        ModelFileError, match=r"blk\.1\.fc1\.weight: is missing; .* where other layers have a predictor"
    ):
        ModelConfig.from_file(file)


def test_a_position_table_that_is_too_short(load):
    with pytest.raises(ModelFileError) as error:
        load(arch="opt", metadata={"context_length": 513})
    assert "position_embd.weight: has shape (96, 514), but the metadata ask for (96, 515)" in str(error.value)


def test_more_layers_than_tensors(load):
    with pytest.raises(ModelFileError, match=r"tensor blk\.2\.attn_norm\.weight: is missing"):
        load(metadata={"block_count": 1000})


@pytest.mark.parametrize(
    ("scaling", "kind", "factor"),
    [
        (None, "none", 1.0),
        ({"type": "none", "factor": 4.0}, "none", 1.0),
        ({"type": "linear", "factor": 4.0}, "linear", 4.0),
        ({"factor": 4.0}, "linear", 4.0),
        ({"type": "linear", "factor": 0.0}, "none", 1.0),
        ({"type": "yarn", "factor": 4.0}, "yarn", 4.0),
    ],
)
def test_rope_scaling_keys(load, scaling, kind, factor):
    rope = load(rope_scaling=scaling).rope
    assert (rope.scaling, rope.factor) == (kind, factor)


def test_rope_yarn_keys(load):
    keys = {"attn_factor": 0.5, "yarn_ext_factor": 0.75, "yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0}
    rope = load(rope_scaling={"type": "yarn", "factor": 8.0, "original_context_length": 64, **keys}).rope
    assert (rope.attn_factor, rope.ext_factor, rope.beta_fast, rope.beta_slow) == (0.5, 0.75, 16.0, 2.0)
    assert (rope.factor, rope.original_context_tokens) == (8.0, 64)


def test_old_name_of_the_linear_factor(load):
    rope = load(metadata={"rope.scale_linear": 2.0}).rope
    assert (rope.scaling, rope.factor) == ("linear", 2.0)


@pytest.mark.parametrize("bad", [np.ones(15), *(np.full(16, value) for value in (0, -1, np.nan, np.inf, 1e-30))])
def test_bad_frequency_factors(load, bad):
    with pytest.raises(ModelFileError, match=r"tensor rope_freqs\.weight"):
        load(rope_freqs=bad)


def llama3_factor(frequency: float, factor=8.0, low=1.0, high=4.0, original=8192) -> float:
    """What llama.cpp's converter writes to rope_freqs.weight for one frequency."""
    wavelength = 2 * math.pi / frequency
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return factor
    smooth = (original / wavelength - low) / (high - low)
    return 1 / ((1 - smooth) / factor + smooth)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_llama3_frequencies(load, head_dim):
    plain = [5e5 ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    rope = load(head_dim=head_dim, rope_theta=5e5, rope_freqs=np.array([llama3_factor(f) for f in plain])).rope
    assert rope.scaling == "llama3"
    frequencies, scale = rope.inverse_frequencies()
    # transformers' _compute_llama3_parameters
    expected = []
    for inverse in plain:
        wavelength = 2 * math.pi / inverse
        smooth = (8192 / wavelength - 1) / 3
        mixed = (1 - smooth) * inverse / 8 + smooth * inverse
        expected.append(inverse / 8 if wavelength > 8192 else inverse if wavelength < 2048 else mixed)
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    assert scale == 1.0 and frequencies.dtype == np.float32


dims = st.integers(1, 128).map(lambda n: 2 * n)
thetas = st.floats(100.0, 1e7)
factors = st.floats(1.0, 64.0)
contexts = st.integers(16, 1 << 20)


@given(dims=dims, theta=thetas, factor=factors)
def test_plain_and_linear_frequencies(dims, theta, factor):
    plain = np.array([1 / theta ** (2 * i / dims) for i in range(dims // 2)])
    for rope, expected in (
        (RopeConfig(dims, theta, "half"), plain),
        (RopeConfig(dims, theta, "half", "linear", factor), plain / factor),
    ):
        frequencies, scale = rope.inverse_frequencies()
        np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
        assert scale == 1.0


@settings(max_examples=200)
@given(dims=dims, theta=thetas, factor=factors, context=contexts)
def test_yarn_like_transformers(dims, theta, factor, context):
    """transformers' _compute_yarn_parameters, vectorised, with its own treatment of equal bounds."""

    def correction(rotations):
        return dims * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(correction(32)), 0), min(math.ceil(correction(1)), dims - 1)
    if low >= high:
        return  # there transformers and llama.cpp differ; the next test holds llama.cpp's
    ramp = np.clip((np.arange(dims // 2) - low) / (high - low), 0, 1)
    powers = theta ** (np.arange(0, dims, 2) / dims)
    expected = 1 / (factor * powers) * ramp + 1 / powers * (1 - ramp)
    rope = RopeConfig(dims, theta, "half", "yarn", factor, context)
    frequencies, scale = rope.inverse_frequencies()
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    assert scale == pytest.approx(0.1 * math.log(factor) + 1)


@settings(max_examples=200)
@given(
    dims=dims, theta=thetas, factor=factors, context=contexts,
    ext=st.floats(0.0, 1.0), attn=st.floats(0.1, 2.0), fast=st.floats(2.0, 64.0), slow=st.floats(0.1, 2.0),
)  # fmt: skip
def test_yarn_like_llama_cpp(dims, theta, factor, context, ext, attn, fast, slow):
    """ggml's rope_yarn, rope_yarn_ramp and ggml_rope_yarn_corr_dims, one pair at a time."""

    def corr_dim(n_rot):
        return dims * math.log(context / (n_rot * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(0, math.floor(corr_dim(fast))), min(dims - 1, math.ceil(corr_dim(slow)))
    freq_scale, expected = 1 / factor, []
    for i0 in range(0, dims, 2):
        extrapolated = theta ** (-i0 / dims)
        angle = freq_scale * extrapolated
        if ext != 0:
            y = (i0 // 2 - low) / max(0.001, high - low)
            mix = (1 - min(1, max(0, y))) * ext
            angle = angle * (1 - mix) + extrapolated * mix
        expected.append(angle)
    rope = RopeConfig(dims, theta, "half", "yarn", factor, context, ext, attn, fast, slow)
    frequencies, scale = rope.inverse_frequencies()
    np.testing.assert_allclose(frequencies, expected, rtol=1e-6)
    assert scale == pytest.approx(attn * (1 + 0.1 * math.log(1 / freq_scale)) if ext else attn)
