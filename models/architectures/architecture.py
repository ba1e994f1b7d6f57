"""What distinguishes one transformer architecture from another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Pairing = Literal["interleaved", "half"]  # RoPE turns pairs (2i, 2i+1), or (i, i + dims/2)
Presence = Literal["always", "optional", "never"]


@dataclass(frozen=True, slots=True)
class Architecture:
    """One row of the table. `name` is the file's general.architecture, which also prefixes its keys."""

    name: str
    rope_style: Pairing
    qkv_bias: Presence
    qk_norm: Presence  # RMS norm over each head of q and k, before RoPE
