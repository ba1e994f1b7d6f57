"""Falcon 7B (one norm, one key head) and 40B (two norms): attention and FFN side by side, no gate."""

from hotneuron.models.architectures.architecture import Architecture

FALCON = Architecture(
    name="falcon",
    rope_style="half",
    qkv_bias="never",
    qk_norm="never",
    activation="gelu",
    gated=False,
    norm="layer",
    fused_qkv=True,
    parallel=True,
    attn_norm_2="optional",
)
