"""What a model is, read from its file and checked as a whole before anything is allocated for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hotneuron.models.architectures.architecture import (
    Activation,
    Architecture,
    Norm,
    Positions,
    Presence,
    UpActivation,
)
from hotneuron.models.architectures.registry import ARCHITECTURES
from hotneuron.models.dequantize import dequantize
from hotneuron.models.errors import ModelFileError, UnsupportedError
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.metadata import Metadata
from hotneuron.models.rope import RopeConfig, Scaling
from hotneuron.models.tensor_table import ROPE_FACTORS, VECTOR_TYPES, check_tensors

MAX_LAYERS = 1024
MAX_HIDDEN = 1 << 17
MAX_HEADS = 2048
MAX_HEAD_DIM = 1024
MAX_FFN = 1 << 20
MAX_VOCAB = 1 << 22
MAX_CONTEXT_TOKENS = 1 << 24
MAX_RANK = 1 << 16  # of an activation predictor
MIN_ROPE_FACTOR, MAX_ROPE_FACTOR = 1e-3, 1e6
_SCALINGS: dict[str, Scaling] = {"none": "none", "linear": "linear", "yarn": "yarn"}
_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "gelu": "gelu", "relu": "relu"}
_F32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    architecture: str
    name: str
    n_layers: int
    hidden: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context_tokens: int  # that the model was trained for
    norm_eps: float
    rope: RopeConfig
    sliding_window: int  # tokens, itself included, that each token attends to; 0: all
    qkv_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    activation: Activation = "silu"  # of the gate, or of up where there is no gate; gelu is the tanh approximation
    up_activation: UpActivation = "none"
    gated: bool = True  # False: down(activation(up(x)))
    norm: Norm = "rms"  # layer: LayerNorm with bias
    positions: Positions = "rope"  # learned: rows of position_embd are added to the embedding, and `rope` is not used
    fused_qkv: bool = False  # the file has one attn_qkv: rows of all q heads, then k heads, then v heads
    parallel: bool = False  # x + attention(norm(x)) + ffn(norm(x))
    attn_norm_2: bool = False  # parallel: attention has this norm of its own, and attn_norm is the FFN's
    linear_bias: bool = False  # of q, k, v, output, up and down
    predictor_ranks: tuple[int, ...] = ()  # one a layer; empty: the file has no predictor
    down_transposed: bool = False  # the file has ffn_down_t (row n: output column of neuron n), not ffn_down
    sparse_threshold: float = 0.0  # a neuron whose predicted logit is at least this is active

    @classmethod
    def from_file(cls, file: GGUFFile, activation: str | None = None) -> ModelConfig:
        """Reads metadata and checks every tensor against them. activation: the user's word against the file's.

        Raises ModelFileError (missing, wrong or contradictory) or UnsupportedError (architecture, variant, type).
        """
        metadata = Metadata(file)
        name = metadata.text("general.architecture")
        architecture = ARCHITECTURES.get(name)
        if architecture is None:
            raise UnsupportedError(f"{file.path}: architecture {name[:60]!r}; supported are {', '.join(ARCHITECTURES)}")
        if metadata.integer(".expert_count", 0, 1 << 16, default=0):
            raise UnsupportedError(f"{file.path}: mixtures of experts are not supported, only dense models are")
        config = _read(metadata, architecture, activation)
        check_tensors(file, config)
        return config


def _read(metadata: Metadata, architecture: Architecture, activation: str | None) -> ModelConfig:
    file = metadata.file
    n_layers = metadata.integer(".block_count", 1, MAX_LAYERS)
    hidden = metadata.integer(".embedding_length", 1, MAX_HIDDEN)
    n_heads = metadata.integer(".attention.head_count", 1, MAX_HEADS)
    n_kv_heads = metadata.integer(".attention.head_count_kv", 1, MAX_HEADS, default=n_heads)
    if n_heads % n_kv_heads:
        metadata.fail(".attention.head_count_kv", f"{n_kv_heads} does not divide the {n_heads} heads")
    if not metadata.has(".attention.key_length") and hidden % n_heads:
        metadata.fail(".attention.head_count", f"{n_heads} heads do not divide the hidden size {hidden}")
    head_dim = metadata.integer(".attention.key_length", 2, MAX_HEAD_DIM, default=hidden // n_heads)
    if head_dim % 2:
        metadata.fail(".attention.key_length", f"the head size {head_dim} is odd; RoPE needs pairs")
    value_dim = metadata.integer(".attention.value_length", 1, MAX_HEAD_DIM, default=head_dim)
    if value_dim != head_dim:
        raise UnsupportedError(f"{file.path}: keys of {head_dim} and values of {value_dim}; equal sizes are supported")
    context_tokens = metadata.integer(".context_length", 1, MAX_CONTEXT_TOKENS)
    eps_key = f".attention.layer_norm_{'rms_' if architecture.norm == 'rms' else ''}epsilon"
    return ModelConfig(
        architecture=architecture.name,
        name=metadata.text("general.name", default=file.path.stem),
        n_layers=n_layers,
        hidden=hidden,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        ffn=metadata.integer(".feed_forward_length", 1, MAX_FFN),
        vocab=_vocab(metadata),
        context_tokens=context_tokens,
        norm_eps=metadata.real(eps_key, 1e-12, 1.0, default=architecture.default_norm_eps),
        rope=_rope(metadata, architecture, head_dim, context_tokens),
        sliding_window=metadata.integer(".attention.sliding_window", 0, MAX_CONTEXT_TOKENS, default=0),
        qkv_bias=_present(architecture.qkv_bias, file, "blk.0.attn_q.bias"),
        qk_norm=_present(architecture.qk_norm, file, "blk.0.attn_q_norm.weight"),
        tied_embeddings="output.weight" not in file.tensors,
        activation=_activation(metadata, architecture, activation),
        up_activation=architecture.up_activation,
        gated=architecture.gated,
        norm=architecture.norm,
        positions=architecture.positions,
        fused_qkv=architecture.fused_qkv,
        parallel=architecture.parallel,
        attn_norm_2=_present(architecture.attn_norm_2, file, "blk.0.attn_norm_2.weight"),
        linear_bias=architecture.linear_bias,
        predictor_ranks=_predictor_ranks(file, n_layers, hidden),
        down_transposed="blk.0.ffn_down_t.weight" in file.tensors,
        sparse_threshold=metadata.real("powerinfer.sparse_threshold", -_F32_MAX, _F32_MAX, default=0.0),
    )


def _present(presence: Presence, file: GGUFFile, tensor: str) -> bool:
    return presence == "always" or (presence == "optional" and tensor in file.tensors)


def _activation(metadata: Metadata, architecture: Architecture, asked: str | None) -> Activation:
    """What the user asks for, else what the file says, else ReLU for a sparse file and the architecture's own."""
    default = "relu" if metadata.file.magic == "PWRI" else architecture.activation
    name = asked or metadata.text(".hidden_activation", default=default)
    if name not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        raise UnsupportedError(f"{metadata.file.path}: activation {name[:60]!r}; supported are {supported}")
    return _ACTIVATIONS[name]


def _predictor_ranks(file: GGUFFile, n_layers: int, hidden: int) -> tuple[int, ...]:
    """The rank of each layer's predictor, which is the number of its fc1's rows; empty where there is none.

    The magic decides nothing: a complete predictor in a GGUF file is as good.
    """
    if file.magic != "PWRI" and not any(name.endswith((".fc1.weight", ".fc2.weight")) for name in file.tensors):
        return ()
    ranks = []
    for layer in range(n_layers):
        name = f"blk.{layer}.fc1.weight"
        info, expected = file.tensors.get(name), f"one of shape ({hidden}, rank) is expected"
        if info is None:
            why = "in a PWRI file" if file.magic == "PWRI" else "where other layers have a predictor"
            raise ModelFileError(file.path, f"tensor {name}", f"is missing; {expected} {why}")
        if len(info.shape) != 2 or info.shape[0] != hidden or not 1 <= info.shape[1] <= MAX_RANK:
            problem = f"has shape {info.shape}; {expected}, with a rank of 1 to {MAX_RANK}"
            raise ModelFileError(file.paths[info.part], f"tensor {name}", problem)
        ranks.append(info.shape[1])
    return tuple(ranks)


def _vocab(metadata: Metadata) -> int:
    """The number of tokens: the tokenizer's list decides, since files exist whose vocab_size is not its length."""
    tokens = metadata.file.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return metadata.integer(".vocab_size", 1, MAX_VOCAB)
    if not isinstance(tokens, list) or not 1 <= len(tokens) <= MAX_VOCAB:
        metadata.fail("tokenizer.ggml.tokens", f"is not a list of 1 to {MAX_VOCAB} tokens")
    return len(tokens)


def _rope(metadata: Metadata, architecture: Architecture, head_dim: int, context_tokens: int) -> RopeConfig:
    file = metadata.file
    dims = metadata.integer(".rope.dimension_count", 2, head_dim, default=head_dim)
    if dims % 2:
        metadata.fail(".rope.dimension_count", f"{dims} is odd; RoPE needs pairs")
    freq_factors = _freq_factors(metadata, dims)
    # Without a type, llama.cpp takes the factor as linear; `rope.scale_linear` is the factor's old name. 0 is none.
    named = metadata.text(".rope.scaling.type", default="linear")
    scaling = _SCALINGS.get(named)
    if scaling is None:
        raise UnsupportedError(f"{file.path}: RoPE scaling {named[:60]!r}; supported are {', '.join(_SCALINGS)}")
    factor_key = ".rope.scaling.factor" if metadata.has(".rope.scaling.factor") else ".rope.scale_linear"
    factor = metadata.real(factor_key, 0.0, MAX_ROPE_FACTOR, default=0.0) or 1.0
    if factor < MIN_ROPE_FACTOR:
        metadata.fail(factor_key, f"{factor} is out of range; 0 (none) or {MIN_ROPE_FACTOR:g} and more are supported")
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        scaling, factor = "llama3" if freq_factors else "none", 1.0
    original = metadata.integer(".rope.scaling.original_context_length", 1, MAX_CONTEXT_TOKENS, default=context_tokens)
    yarn = scaling == "yarn"
    return RopeConfig(
        dims=dims,
        theta=metadata.real(".rope.freq_base", 1.001, 1e15, default=10000.0),
        style=architecture.rope_style,
        scaling=scaling,
        factor=factor,
        original_context_tokens=original,
        ext_factor=metadata.real(".rope.scaling.yarn_ext_factor", 0.0, 1.0, default=1.0) if yarn else 0.0,
        attn_factor=metadata.real(".rope.scaling.attn_factor", 1e-3, 1e3, default=1.0),
        beta_fast=metadata.real(".rope.scaling.yarn_beta_fast", 1e-3, 1e6, default=32.0),
        beta_slow=metadata.real(".rope.scaling.yarn_beta_slow", 1e-3, 1e6, default=1.0),
        freq_factors=freq_factors,
    )


def _freq_factors(metadata: Metadata, dims: int) -> tuple[float, ...]:
    info = metadata.file.tensors.get(ROPE_FACTORS)
    if info is None:
        return ()
    field = f"tensor {ROPE_FACTORS}"
    if info.shape != (dims // 2,) or info.type not in VECTOR_TYPES:
        metadata.fail(field, f"is {info.type.name} of shape {info.shape}; F32 of shape {(dims // 2,)} is expected")
    factors = dequantize(metadata.file.raw(ROPE_FACTORS), info.type, info.shape)
    if not np.all((factors >= MIN_ROPE_FACTOR) & (factors <= MAX_ROPE_FACTOR)):
        metadata.fail(field, f"holds a factor outside {MIN_ROPE_FACTOR:g} to {MAX_ROPE_FACTOR:g}")
    return tuple(factors.tolist())
