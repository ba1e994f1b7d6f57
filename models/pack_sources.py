"""Which parts of a model's file go into a pack of a kind, and under which role."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Literal

from hotneuron.models.model_config import ModelConfig
from hotneuron.models.tensor_table import tensor_table

Kind = Literal["dense", "gated", "predicted", "signed"]
Layout = Literal["tiles", "rows", "down_shared", "down_own", "signs"]

FFN_MATRICES = ("ffn_gate", "ffn_up", "ffn_down", "ffn_down_t", "fc1", "fc2")


@dataclass(frozen=True, slots=True)
class Source:
    """What one entry of a pack is made of."""

    role: str  # in the pack
    name: str  # of the file's tensor
    rows: tuple[int, int] | None = None  # of it; None: all
    is_transposed: bool = False
    layout: Layout = "tiles"

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

    Dense: all as tiles and no predictor; tiles of the down projection hold its rows, so a transposed one is turned
    round. Gated: the first product is computed whole and decides, the others are read by neuron. Predicted: all are
    read by neuron, and the predictor is tiles. Signed: all are read by neuron, and the first one's signs decide.
    """
    first = "ffn_gate" if "ffn_gate" in names else "ffn_up"
    by_neuron: set[str] = {"ffn_gate", "ffn_up"}
    if kind in ("dense", "gated"):
        by_neuron = {"ffn_up"} - {first} if kind == "gated" else set()
    sources = []
    for role in ("ffn_gate", "ffn_up"):
        if role in names:
            layout: Layout = "rows" if role in by_neuron else "tiles"
            sources.append(Source(f"{layer}.{role}", names[role], layout=layout))
    is_transposed = "ffn_down_t" in names
    name = names["ffn_down_t" if is_transposed else "ffn_down"]
    if kind == "dense":
        return [*sources, Source(f"{layer}.ffn_down", name, is_transposed=is_transposed)]
    sources.append(Source(f"{layer}.ffn_down", name, layout="down_own" if is_transposed else "down_shared"))
    if kind == "signed":
        sources.append(Source(f"{layer}.ffn_signs", names[first], layout="signs"))
    if kind == "predicted":
        sources += [Source(f"{layer}.{role}", names[role]) for role in ("fc1", "fc2")]
    return sources
