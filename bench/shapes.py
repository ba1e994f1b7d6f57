"""Shapes of models whose FFNs are sparse: sizes, architecture, and the tensors of their dense and PWRI files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

ROLE_SHAPES = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class SparseShape:
    """Sizes of a model and of its predictor; matrices Q4_0, norms and biases F32."""

    architecture: str  # llama (with ReLU), bamboo, falcon (as 40B: two norms), opt
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    context_tokens: int
    rank: int

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def is_gated(self) -> bool:
        return self.architecture in ("llama", "bamboo")

    @property
    def first(self) -> str:
        """The FFN's matrix whose sign decides."""
        return "ffn_gate" if self.is_gated else "ffn_up"

    def layer_matrices(self, is_pwri: bool) -> ROLE_SHAPES:
        """Role to shape as in the file (the axis that lies together first)."""
        kv = self.head_dim * self.kv_heads
        shapes: ROLE_SHAPES
        if self.architecture == "falcon":
            shapes = {"attn_qkv": (self.hidden, self.hidden + 2 * kv)}
        else:
            shapes = {"attn_q": (self.hidden, self.hidden), "attn_k": (self.hidden, kv), "attn_v": (self.hidden, kv)}
        shapes["attn_output"] = (self.hidden, self.hidden)
        if self.is_gated:
            shapes["ffn_gate"] = (self.hidden, self.ffn)
        shapes["ffn_up"] = (self.hidden, self.ffn)
        if not is_pwri:
            return shapes | {"ffn_down": (self.ffn, self.hidden)}
        predictor = {"fc1": (self.hidden, self.rank), "fc2": (self.rank, self.ffn)}
        return shapes | {"ffn_down_t": (self.hidden, self.ffn)} | predictor

    def layer_vectors(self, is_pwri: bool) -> dict[str, float]:
        """Name after the layer's prefix to the value that it is filled with."""
        norms = ("attn_norm", "attn_norm_2" if self.architecture == "falcon" else "ffn_norm")
        vectors = {f"{norm}.weight": 1.0 for norm in norms}
        if self.architecture in ("opt", "falcon"):
            vectors |= {f"{norm}.bias": 0.0 for norm in norms}
        if self.architecture == "opt":
            down = "ffn_down_t" if is_pwri else "ffn_down"
            linear = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", down)
            vectors |= {f"{role}.bias": 0.0 for role in linear}
        return vectors

    def outer_matrices(self) -> Iterator[tuple[str, tuple[int, int]]]:
        yield "token_embd.weight", (self.hidden, self.vocab)
        if self.architecture == "opt":
            yield "position_embd.weight", (self.hidden, self.context_tokens + 2)
        else:
            yield "output.weight", (self.hidden, self.vocab)


RELU_7B = SparseShape("llama", 32, 4096, 11008, 32, 32, 32000, 4096, 1536)
FALCON_40B = SparseShape("falcon", 60, 8192, 32768, 128, 8, 65024, 2048, 1536)
OPT_6_7B = SparseShape("opt", 32, 4096, 16384, 32, 32, 50272, 2048, 1024)
BAMBOO_7B = SparseShape("bamboo", 32, 4096, 14336, 32, 8, 32000, 4096, 1536)
SHAPES = {
    "relu-7b": RELU_7B,
    "relu-7b-half": replace(RELU_7B, layers=16),
    "relu-7b-quarter": replace(RELU_7B, layers=8),
    "falcon-40b-layer": replace(FALCON_40B, layers=4),
    "opt-6.7b": OPT_6_7B,
    "opt-6.7b-quarter": replace(OPT_6_7B, layers=8),
    "bamboo-7b": BAMBOO_7B,
    "bamboo-7b-quarter": replace(BAMBOO_7B, layers=8),
    "tiny": SparseShape("llama", 2, 256, 512, 8, 2, 400, 512, 96),  # for tests
    "tiny-falcon": SparseShape("falcon", 2, 256, 512, 8, 2, 400, 512, 96),
    "tiny-opt": SparseShape("opt", 2, 256, 512, 8, 8, 400, 512, 96),
}
