"""Which parts of a model's file go into a pack of a kind, and under which role."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from hotneuron.models.model_config import ModelConfig
from hotneuron.models.tensor_table import tensor_table

Kind = Literal["dense"]

FFN_MATRICES = ("ffn_gate", "ffn_up", "ffn_down", "ffn_down_t", "fc1", "fc2")


@dataclass(frozen=True, slots=True)
class Source:
    """What one entry of a pack is made of."""

    role: str  # in the pack
    name: str  # of the file's tensor
    rows: tuple[int, int] | None = None  # of it; None: all
    is_transposed: bool = False

    @property
    def is_vector(self) -> bool:
        """Norms and biases are; by role, since a file may give a vector a second axis of length one."""
        return "norm" in self.role or self.role.endswith("_bias")


def sources_of(config: ModelConfig, kind: Kind) -> list[Source]:
    """Everything that a pack holds, in its order."""
    sources = []
    for prefix, part in groupby(tensor_table(config).items(), key=lambda item: item[0].rpartition(".")[0]):
        names = {role.rpartition(".")[2]: name for role, name in part}
        if not prefix:
            sources += [Source(role, name) for role, name in names.items()]
            continue
        ffn = {role: names.pop(role) for role in FFN_MATRICES if role in names}
        if config.fused_qkv:
            sources += _qkv_sources(config, int(prefix), names.pop("attn_qkv"))
        sources += [Source(f"{prefix}.{role}", name) for role, name in names.items()]
        sources += _ffn_sources(kind, int(prefix), ffn)
    return sources


def _qkv_sources(config: ModelConfig, layer: int, name: str) -> list[Source]:
    queries, keys = config.head_dim * config.n_heads, config.head_dim * config.n_kv_heads
    cuts = {"q": (0, queries), "k": (queries, queries + keys), "v": (queries + keys, queries + 2 * keys)}
    return [Source(f"{layer}.attn_{letter}", name, rows) for letter, rows in cuts.items()]


def _ffn_sources(kind: Kind, layer: int, names: dict[str, str]) -> list[Source]:
    """The FFN's matrices of one layer. names: those that the file has, role to tensor name.

    Dense: all as tiles and no predictor. Tiles of the down projection hold its rows, so a transposed one is turned
    round.
    """
    assert kind == "dense"
    sources = [Source(f"{layer}.{role}", names[role]) for role in ("ffn_gate", "ffn_up", "ffn_down") if role in names]
    if "ffn_down_t" in names:
        sources.append(Source(f"{layer}.ffn_down", names["ffn_down_t"], is_transposed=True))
    return sources
