"""Bamboo: Mistral with ReLU on gate and up alike, trained to be sparse."""

from hotneuron.models.architectures.architecture import Architecture

BAMBOO = Architecture(
    name="bamboo",
    rope_style="interleaved",
    qkv_bias="never",
    qk_norm="never",
    activation="relu",
    up_activation="relu",
)
