"""Writes a model of a named shape with random weights: what speed depends on, without the download.

python bench/make_shape.py 3.5b OUT.gguf
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from rich.console import Console
from rich.progress import track

_Q4_0 = GGMLQuantizationType.Q4_0
_BLOCK_ELEMENTS, _BLOCK_BYTES = GGML_QUANT_SIZES[_Q4_0]
_NIBBLE_SD = 4.61  # of the integers -8 to 7


@dataclass(frozen=True, slots=True)
class Shape:
    """A llama model's sizes; matrices Q4_0, norms F32, output not tied to the embedding."""

    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocab: int
    context_tokens: int

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """GGUF name and shape, rows first, in file order."""
        kv = self.hidden // self.heads * self.kv_heads
        yield "token_embd.weight", (self.vocab, self.hidden)
        for layer in range(self.layers):
            for name, shape in (
                ("attn_norm", (self.hidden,)),
                ("attn_q", (self.hidden, self.hidden)),
                ("attn_k", (kv, self.hidden)),
                ("attn_v", (kv, self.hidden)),
                ("attn_output", (self.hidden, self.hidden)),
                ("ffn_norm", (self.hidden,)),
                ("ffn_gate", (self.ffn, self.hidden)),
                ("ffn_up", (self.ffn, self.hidden)),
                ("ffn_down", (self.hidden, self.ffn)),
            ):
                yield f"blk.{layer}.{name}.weight", shape
        yield "output_norm.weight", (self.hidden,)
        yield "output.weight", (self.vocab, self.hidden)


SHAPES = {
    "3.5b": Shape(layers=16, hidden=4096, ffn=11008, heads=32, kv_heads=32, vocab=32000, context_tokens=4096),
}


def write_shape(path: Path, shape: Shape, name: str, seed: int = 0) -> None:
    """Writes the file at once under its own name, so that a broken run leaves none."""
    rng = np.random.Generator(np.random.SFC64(seed))
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    writer.add_name(f"random {name}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_0)
    writer.add_block_count(shape.layers)
    writer.add_context_length(shape.context_tokens)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.ffn)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.hidden // shape.heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(shape.vocab)
    add_tokenizer(writer, shape.vocab)
    tensors = list(shape.tensors())
    for tensor, size in tensors:
        if len(size) == 1:
            writer.add_tensor_info(tensor, size, np.dtype(np.float32), 4 * size[0])
        else:
            stored = (size[0], size[1] // _BLOCK_ELEMENTS * _BLOCK_BYTES)
            writer.add_tensor_info(tensor, stored, np.dtype(np.uint8), stored[0] * stored[1], _Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _, size in track(tensors, f"writing {path.name}", console=Console(stderr=True), transient=True):
        writer.write_tensor_data(np.ones(size, np.float32) if len(size) == 1 else _random_blocks(rng, *size))
    writer.close()
    partial.replace(path)


def _random_blocks(rng: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """u8[rows, bytes]: Q4_0 blocks whose values have a deviation near 1 / sqrt(columns)."""
    blocks = rng.integers(0, 256, (rows, columns // _BLOCK_ELEMENTS, _BLOCK_BYTES), np.uint8)
    scales = rng.random(blocks.shape[:2], np.float32) + np.float32(0.5)
    scales /= _NIBBLE_SD * columns**0.5
    blocks[..., :2] = scales.astype("<f2")[..., None].view(np.uint8)
    return blocks.reshape(rows, -1)


def add_tokenizer(writer: gguf.GGUFWriter, vocab: int) -> None:
    """A SentencePiece vocabulary with all bytes; the other pieces are only there to be counted."""
    kind = gguf.TokenType
    tokens = [("<unk>", kind.UNKNOWN), ("<s>", kind.CONTROL), ("</s>", kind.CONTROL)]
    tokens += [(f"<0x{byte:02X}>", kind.BYTE) for byte in range(256)]
    tokens += [("▁", kind.NORMAL)]
    tokens += [(f"▁{n:x}", kind.NORMAL) for n in range(vocab - len(tokens))]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([text for text, _ in tokens])
    writer.add_token_scores([0.0 if type is not kind.NORMAL else -float(n) for n, (_, type) in enumerate(tokens)])
    writer.add_token_types([type for _, type in tokens])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    write_shape(arguments.out, SHAPES[arguments.shape], arguments.shape)
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes")
