"""Which tensors a model needs: the GGUF name and shape of every role, and the check of a file against them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gguf.constants import GGMLQuantizationType

from hotneuron.models.errors import ModelFileError, UnsupportedError
from hotneuron.models.gguf_file import GGUFFile

if TYPE_CHECKING:
    from hotneuron.models.model_config import ModelConfig

Shape = tuple[int, ...]

SUPPORTED_TYPES = tuple(
    GGMLQuantizationType[name] for name in "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K Q6_K".split()
)
VECTOR_TYPES = SUPPORTED_TYPES[:3]  # norms and biases
ROPE_FACTORS = "rope_freqs.weight"
_HARMLESS = (ROPE_FACTORS, ".attn_rot_embd.weight", ".attn.rotary_emb.inv_freq", ".rope_freqs.weight")


def tensor_table(config: ModelConfig) -> dict[str, str]:
    """Role to GGUF tensor name. Roles: token_embd, output_norm, output (absent when tied), and `LAYER.role`, such as
    `0.attn_q`, for attn_norm, attn_q/k/v (and attn_q_bias ...), attn_q_norm, attn_k_norm, attn_output, ffn_norm,
    ffn_gate, ffn_up, ffn_down."""
    table = {role: f"{role}.weight" for role in _model_shapes(config)}
    for layer in range(config.n_layers):
        for role in _layer_shapes(config):
            table[f"{layer}.{role}"] = f"blk.{layer}.{_stored_name(role)}"
    return table


def check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    """Every tensor is there, with the right shape and a type that the kernels have, and there is none that they would
    ignore. Raises ModelFileError (missing, wrong shape) or UnsupportedError (type, unknown tensor)."""
    shapes = _model_shapes(config)
    layer_shapes = _layer_shapes(config)
    needed: set[str] = set()
    for role, name in tensor_table(config).items():
        layer, _, layer_role = role.partition(".")
        _check_one(file, name, layer_shapes[layer_role] if layer_role else shapes[layer])
        needed.add(name)
    for name in file.tensors:
        if name not in needed and not name.endswith(_HARMLESS):
            raise UnsupportedError(
                f"{file.path}: tensor {name!r} is not part of the {config.architecture} models that hotneuron runs"
            )


def _model_shapes(config: ModelConfig) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"token_embd": (config.hidden, config.vocab), "output_norm": (config.hidden,)}
    if not config.tied_embeddings:
        shapes["output"] = (config.hidden, config.vocab)
    return shapes


def _layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, head, ffn = config.hidden, config.head_dim, config.ffn
    queries, keys = config.n_heads * head, config.n_kv_heads * head
    shapes: dict[str, Shape] = {
        "attn_norm": (hidden,),
        "attn_q": (hidden, queries),
        "attn_k": (hidden, keys),
        "attn_v": (hidden, keys),
        "attn_output": (queries, hidden),
        "ffn_norm": (hidden,),
        "ffn_gate": (hidden, ffn),
        "ffn_up": (hidden, ffn),
        "ffn_down": (ffn, hidden),
    }
    if config.qkv_bias:
        shapes |= {"attn_q_bias": (queries,), "attn_k_bias": (keys,), "attn_v_bias": (keys,)}
    if config.qk_norm:
        shapes |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
    return shapes


def _stored_name(role: str) -> str:
    return f"{role.removesuffix('_bias')}.bias" if role.endswith("_bias") else f"{role}.weight"


def _check_one(file: GGUFFile, name: str, expected: Shape) -> None:
    info = file.tensors.get(name)
    if info is None:
        raise ModelFileError(file.path, f"tensor {name}", f"is missing; one of shape {expected} is expected")
    # Writers may keep trailing axes of length one.
    found = info.shape
    while len(found) > len(expected) and found[-1] == 1:
        found = found[:-1]
    if found != expected:
        raise ModelFileError(
            file.paths[info.part], f"tensor {name}", f"has shape {info.shape}, but the metadata ask for {expected}"
        )
    allowed = VECTOR_TYPES if len(expected) == 1 else SUPPORTED_TYPES
    if info.type not in allowed:
        names = " ".join(kind.name for kind in allowed)
        path = file.paths[info.part]
        raise UnsupportedError(f"{path}: tensor {name} has type {info.type.name}; supported are {names}")
