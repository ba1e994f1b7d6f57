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
POSITION_OFFSET = 2  # learned positions begin at this row of their table
ROPE_FACTORS = "rope_freqs.weight"
_HARMLESS = (ROPE_FACTORS, ".attn_rot_embd.weight", ".attn.rotary_emb.inv_freq", ".rope_freqs.weight")


def tensor_table(config: ModelConfig) -> dict[str, str]:
    """Role to GGUF tensor name, as the model's file has them.

    Roles: token_embd, output_norm, output (absent when tied), position_embd (learned positions), and `LAYER.role`, such
    as `0.attn_q`, for attn_norm, attn_norm_2, attn_q/k/v or attn_qkv, attn_q_norm, attn_k_norm, attn_output, ffn_norm,
    ffn_gate, ffn_up, ffn_down or ffn_down_t, fc1, fc2; and `ROLE_bias` for the biases there are (ffn_down_bias also
    where the matrix is ffn_down_t).
    """
    return {role: _stored_name(role, config) for role in _shapes(config)}


def check_tensors(file: GGUFFile, config: ModelConfig) -> None:
    """Every tensor is there, with the right shape and a type that the kernels have, and there is none that they would
    ignore. Raises ModelFileError (missing, wrong shape) or UnsupportedError (type, unknown tensor)."""
    needed: set[str] = set()
    for role, expected in _shapes(config).items():
        name = _stored_name(role, config)
        _check_one(file, name, expected)
        needed.add(name)
    for name in file.tensors:
        if name not in needed and not name.endswith(_HARMLESS):
            raise UnsupportedError(
                f"{file.path}: tensor {name!r} is not part of the {config.architecture} models that hotneuron runs"
            )


def _shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden = config.hidden
    shapes: dict[str, Shape] = {"token_embd": (hidden, config.vocab), **_norm_shapes("output_norm", config)}
    if not config.tied_embeddings:
        shapes["output"] = (hidden, config.vocab)
    if config.positions == "learned":
        shapes["position_embd"] = (hidden, config.context_tokens + POSITION_OFFSET)
    layer_shapes = _attention_shapes(config) | _ffn_shapes(config)
    for layer in range(config.n_layers):
        shapes |= {f"{layer}.{role}": shape for role, shape in layer_shapes.items()}
        if config.predictor_ranks:
            rank = config.predictor_ranks[layer]
            shapes |= {f"{layer}.fc1": (hidden, rank), f"{layer}.fc2": (rank, config.ffn)}
    return shapes


def _norm_shapes(role: str, config: ModelConfig) -> dict[str, Shape]:
    roles = [role, f"{role}_bias"] if config.norm == "layer" else [role]
    return dict.fromkeys(roles, (config.hidden,))


def _attention_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, head = config.hidden, config.head_dim
    queries, keys = config.n_heads * head, config.n_kv_heads * head
    shapes: dict[str, Shape] = _norm_shapes("attn_norm", config)
    if config.attn_norm_2:
        shapes |= _norm_shapes("attn_norm_2", config)
    if config.fused_qkv:
        shapes["attn_qkv"] = (hidden, queries + 2 * keys)
    else:
        shapes |= {"attn_q": (hidden, queries), "attn_k": (hidden, keys), "attn_v": (hidden, keys)}
    if config.qkv_bias:
        shapes |= {"attn_q_bias": (queries,), "attn_k_bias": (keys,), "attn_v_bias": (keys,)}
    if config.qk_norm:
        shapes |= {"attn_q_norm": (head,), "attn_k_norm": (head,)}
    shapes["attn_output"] = (queries, hidden)
    if config.linear_bias:
        shapes["attn_output_bias"] = (hidden,)
    return shapes


def _ffn_shapes(config: ModelConfig) -> dict[str, Shape]:
    hidden, ffn = config.hidden, config.ffn
    shapes: dict[str, Shape] = {} if config.parallel else _norm_shapes("ffn_norm", config)
    if config.gated:
        shapes["ffn_gate"] = (hidden, ffn)
    shapes["ffn_up"] = (hidden, ffn)
    shapes |= {"ffn_down_t": (hidden, ffn)} if config.down_transposed else {"ffn_down": (ffn, hidden)}
    if config.linear_bias:
        shapes |= {"ffn_up_bias": (ffn,), "ffn_down_bias": (hidden,)}
    return shapes


def _stored_name(role: str, config: ModelConfig) -> str:
    layer, dot, role = role.rpartition(".")
    prefix = f"blk.{layer}." if dot else ""
    if role == "ffn_down_bias" and config.down_transposed:
        return f"{prefix}ffn_down_t.bias"
    return f"{prefix}{role.removesuffix('_bias')}.bias" if role.endswith("_bias") else f"{prefix}{role}.weight"


def _check_one(file: GGUFFile, name: str, expected: Shape) -> None:
    info = file.tensors.get(name)
    if info is None:
        raise ModelFileError(file.path, f"tensor {name}", f"is missing; one of shape {expected} is expected")
    # Writers may keep trailing axes of length one.
    found = info.shape
    while len(found) > len(expected) and found[-1] == 1:
        found = found[:-1]
    if found != expected:
        who = "fc1 and the metadata" if name.endswith(".fc2.weight") else "the metadata"
        problem = f"has shape {info.shape}, but {who} ask for {expected}"
        raise ModelFileError(file.paths[info.part], f"tensor {name}", problem)
    allowed = VECTOR_TYPES if len(expected) == 1 else SUPPORTED_TYPES
    if info.type not in allowed:
        names = " ".join(kind.name for kind in allowed)
        path = file.paths[info.part]
        raise UnsupportedError(f"{path}: tensor {name} has type {info.type.name}; supported are {names}")
