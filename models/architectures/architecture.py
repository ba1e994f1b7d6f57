"""What distinguishes one transformer architecture from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pairing = Literal["interleaved", "half"]  # RoPE turns pairs (2i, 2i+1), or (i, i + dims/2)
Presence = Literal["always", "optional", "never"]
Activation = Literal["silu", "gelu", "relu"]
UpActivation = Literal["none", "relu"]
Norm = Literal["rms", "layer"]
Positions = Literal["rope", "learned"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table. `name` is the file's general.architecture, which also prefixes its keys."""

    name: str
    rope_style: Pairing
    qkv_bias: Presence
    qk_norm: Presence  # RMS norm over each head of q and k, before RoPE
    activation: Activation = "silu"  # in a GGUF file that does not say; in a PWRI file it is always ReLU
    up_activation: UpActivation = "none"
    gated: bool = True
    norm: Norm = "rms"
    default_norm_eps: float | None = None  # None: the file must say
    positions: Positions = "rope"
    fused_qkv: bool = False
    parallel: bool = False  # attention and FFN both read the layer's input
    attn_norm_2: Presence = "never"
    linear_bias: bool = False  # of q, k, v, output, up and down
