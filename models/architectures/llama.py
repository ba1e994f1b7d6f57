"""Llama 2 and 3, SmolLM, Mistral, TinyLlama: their converters permute q and k rows, so RoPE pairs are neighbours."""

from hotneuron.models.architectures.architecture import Architecture

LLAMA = Architecture(name="llama", rope_style="interleaved", qkv_bias="optional", qk_norm="never")
