"""Writes tiny random models as GGUF files, for tests: every architecture, tensor type and option, in milliseconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from hotneuron.models.dequantize import dequantize

# Sane magnitudes for the f16 scales inside random K-quant blocks: byte offset of each, and its value.
_K_QUANT_SCALES = {
    "Q4_K": ((0, 2e-4), (2, 1e-3)),
    "Q5_K": ((0, 1e-4), (2, 1e-3)),
    "Q6_K": ((208, 5e-5),),
}
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = ("Ġ t", "h e", "Ġt he", "i n", "e r", "Ġ a", "o n", "r e", "Ġ w", "o r", "l d", "Ġw or", "Ġwor ld", "h i")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_tiny_model(
    path: str | Path,
    *,
    arch: str = "llama",
    type: str = "Q4_0",
    types: dict[str, str] | None = None,
    hidden: int = 96,
    n_layers: int = 2,
    n_heads: int = 3,
    n_kv_heads: int = 1,
    head_dim: int = 32,
    ffn: int = 160,
    vocab: int | None = None,
    context_tokens: int = 512,
    tied: bool = True,
    qkv_bias: bool | None = None,
    qk_norm: bool | None = None,
    rope_theta: float = 10000.0,
    rope_scaling: dict[str, Any] | None = None,
    rope_freqs: np.ndarray | None = None,
    sliding_window: int = 0,
    norm_eps: float = 1e-5,
    attn_norm_2: bool = False,
    pwri: bool = False,
    predictor_rank: int | Sequence[int] = 32,
    down_transposed: bool | None = None,
    seed: int = 0,
    metadata: dict[str, Any] | None = None,
    drop: tuple[str, ...] = (),
) -> dict[str, np.ndarray]:
    """Writes the model and returns what it holds: GGUF tensor name to f32 in C order ([rows, columns]).

    `type` is for all matrices; `types` overrides it by tensor name or by role (`token_embd`, `ffn_down` ...); norms and
    biases are F32. K-quants need hidden, ffn and n_heads * head_dim in multiples of 256. `rope_scaling` holds keys
    after `rope.scaling.`; `metadata` adds or replaces keys after the architecture's prefix; `drop` leaves out keys and
    tensors by name. The default vocabulary has 273 tokens (256 bytes, merges, specials); a larger one is padded.
    `pwri`: the magic, a random predictor of `predictor_rank` (one for all layers, or one each), and ffn_down_t unless
    `down_transposed` says otherwise. opt is always tied and falcon has what `attn_norm_2` says.
    """
    opt, falcon = arch == "opt", arch == "falcon"
    qkv_bias = arch in ("qwen2", "opt") if qkv_bias is None else qkv_bias
    down_transposed = pwri if down_transposed is None else down_transposed
    ranks = [predictor_rank] * n_layers if isinstance(predictor_rank, int) else predictor_rank
    qk_norm = arch == "qwen3" if qk_norm is None else qk_norm
    tokens, token_types = _vocabulary(vocab)
    rng = np.random.default_rng(seed)

    keys: dict[str, Any] = {
        "block_count": n_layers,
        "context_length": context_tokens,
        "embedding_length": hidden,
        "feed_forward_length": ffn,
        "attention.head_count": n_heads,
        "attention.head_count_kv": n_kv_heads,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_epsilon" if falcon else "attention.layer_norm_rms_epsilon": norm_eps,
        "rope.dimension_count": head_dim,
        "rope.freq_base": rope_theta,
        "vocab_size": len(tokens),
    }
    if opt:
        del keys["attention.layer_norm_rms_epsilon"]
    keys |= {f"rope.scaling.{key}": value for key, value in (rope_scaling or {}).items()}
    if sliding_window:
        keys["attention.sliding_window"] = sliding_window
    keys |= metadata or {}

    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_name("tiny")
    for key, value in keys.items():
        if key not in drop:
            _add(writer, f"{arch}.{key}", value)
    _add_tokenizer(writer, tokens, token_types)

    weights: dict[str, np.ndarray] = {}

    def matrix(role: str, columns: int, rows: int, prefix: str = "") -> None:
        name = f"{prefix}{role}.weight"
        if name in drop:
            return
        kind = GGMLQuantizationType[(types or {}).get(name) or (types or {}).get(role) or type]
        raw = random_blocks(rng, kind, rows, columns)
        writer.add_tensor(name, raw, raw_dtype=kind)
        weights[name] = dequantize(raw.reshape(-1).view(np.uint8), kind, (columns, rows))

    def vector(name: str, size: int, middle: float) -> None:
        if name in drop:
            return
        values = (middle + 0.2 * rng.standard_normal(size)).astype(np.float32)
        writer.add_tensor(name, values)
        weights[name] = values

    def norm(name: str) -> None:
        vector(f"{name}.weight", hidden, 1.0)
        if opt or falcon:
            vector(f"{name}.bias", hidden, 0.0)

    queries, keys_width = n_heads * head_dim, n_kv_heads * head_dim
    matrix("token_embd", hidden, len(tokens))
    if opt:
        matrix("position_embd", hidden, context_tokens + 2)
    norm("output_norm")
    if not tied and not opt:
        matrix("output", hidden, len(tokens))
    if rope_freqs is not None:
        weights["rope_freqs.weight"] = np.asarray(rope_freqs, np.float32)
        writer.add_tensor("rope_freqs.weight", weights["rope_freqs.weight"])
    for layer in range(n_layers):
        prefix = f"blk.{layer}."
        norm(f"{prefix}attn_norm")
        if attn_norm_2:
            norm(f"{prefix}attn_norm_2")
        if falcon:
            matrix("attn_qkv", hidden, queries + 2 * keys_width, prefix)
        else:
            for role, rows in (("attn_q", queries), ("attn_k", keys_width), ("attn_v", keys_width)):
                matrix(role, hidden, rows, prefix)
                if qkv_bias:
                    vector(f"{prefix}{role}.bias", rows, 0.0)
        if qk_norm:
            vector(f"{prefix}attn_q_norm.weight", head_dim, 1.0)
            vector(f"{prefix}attn_k_norm.weight", head_dim, 1.0)
        matrix("attn_output", queries, hidden, prefix)
        if opt:
            vector(f"{prefix}attn_output.bias", hidden, 0.0)
        if not falcon:
            norm(f"{prefix}ffn_norm")
        if not (opt or falcon):
            matrix("ffn_gate", hidden, ffn, prefix)
        matrix("ffn_up", hidden, ffn, prefix)
        down = "ffn_down_t" if down_transposed else "ffn_down"
        matrix(down, *((hidden, ffn) if down_transposed else (ffn, hidden)), prefix)
        if opt:
            vector(f"{prefix}ffn_up.bias", ffn, 0.0)
            vector(f"{prefix}{down}.bias", hidden, 0.0)
        if pwri:
            matrix("fc1", hidden, ranks[layer], prefix)
            matrix("fc2", ranks[layer], ffn, prefix)

    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    if pwri:
        with open(path, "r+b") as file:
            file.write(b"PWRI")
    return weights


def random_blocks(rng: np.random.Generator, kind: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """A random matrix as stored: f32 or f16 [rows, columns], or u8 [rows, bytes]; values near 1 / sqrt(columns)."""
    if kind.name not in _K_QUANT_SCALES:
        values = (rng.standard_normal((rows, columns)) / np.sqrt(columns)).astype(np.float32)
        return quants.quantize(values, kind)
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows, columns // block_elements, block_bytes), np.uint8)
    for offset, size in _K_QUANT_SCALES[kind.name]:
        scales = (size * rng.uniform(0.5, 1.5, blocks.shape[:2])).astype(np.float16)
        blocks[..., offset : offset + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def byte_characters() -> list[str]:
    """GPT-2's printable character for each of the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def _vocabulary(size: int | None) -> tuple[list[str], list[int]]:
    tokens = byte_characters() + [merge.replace(" ", "") for merge in MERGES]
    padding = (size or 0) - len(tokens) - len(SPECIAL_TOKENS)
    if size is not None and padding < 0:
        raise ValueError(f"vocab={size} is too small; give at least {size - padding}")
    unused = [f"<unused{n}>" for n in range(max(0, padding))]
    types = [gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.UNUSED] * len(unused)
    return [*tokens, *unused, *SPECIAL_TOKENS], [*types, *[gguf.TokenType.CONTROL] * len(SPECIAL_TOKENS)]


def _add_tokenizer(writer: gguf.GGUFWriter, tokens: list[str], token_types: list[int]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(token_types)
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(len(tokens) - 2)
    writer.add_eos_token_id(len(tokens) - 1)
    writer.add_unk_token_id(len(tokens) - 3)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    if isinstance(value, int) and value < 0:
        writer.add_int32(key, value)
    else:
        add.get(value.__class__, writer.add_array)(key, value)
