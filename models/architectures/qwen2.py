"""Qwen2 and Qwen2.5."""

from hotneuron.models.architectures.architecture import Architecture

QWEN2 = Architecture(name="qwen2", rope_style="half", qkv_bias="always", qk_norm="never")
