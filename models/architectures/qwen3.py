"""Qwen3 (dense)."""

from hotneuron.models.architectures.architecture import Architecture

QWEN3 = Architecture(name="qwen3", rope_style="half", qkv_bias="optional", qk_norm="always")
