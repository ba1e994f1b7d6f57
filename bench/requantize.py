"""Copies a model with the matrices of its layers in another type; embedding and output stay as they are.

python bench/requantize.py IN.gguf OUT.gguf --type Q4_0
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType, GGUFValueType
from rich.console import Console
from rich.progress import track

FILE_TYPES = {
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
}


def requantize(source: Path, path: Path, type: str) -> None:
    """Writes `path` with all metadata of `source`, a file that is trusted: this is gguf-py's reader, not ours."""
    reader = gguf.GGUFReader(source)
    kind = GGMLQuantizationType[type]
    partial = path.with_name(path.name + ".partial")
    writer = gguf.GGUFWriter(partial, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            sub_type = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)
    writer.add_file_type(FILE_TYPES[type])

    def is_layer_matrix(tensor: gguf.ReaderTensor) -> bool:
        return len(tensor.shape) == 2 and tensor.name.startswith("blk.")

    for tensor in reader.tensors:
        if is_layer_matrix(tensor):
            rows, columns = int(tensor.shape[1]), int(tensor.shape[0])
            shape = quants.quant_shape_to_byte_shape((rows, columns), kind)
            writer.add_tensor_info(tensor.name, shape, np.dtype(np.uint8), shape[0] * shape[1], kind)
        else:
            writer.add_tensor_info(
                tensor.name, tensor.data.shape, tensor.data.dtype, tensor.data.nbytes, tensor.tensor_type
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in track(reader.tensors, f"writing {path.name}", console=Console(stderr=True), transient=True):
        data = tensor.data
        if is_layer_matrix(tensor):
            data = quants.quantize(quants.dequantize(data, tensor.tensor_type), kind)
        writer.write_tensor_data(data)
    writer.close()
    partial.replace(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--type", choices=FILE_TYPES, default="Q4_0")
    arguments = parser.parse_args()
    requantize(arguments.source, arguments.out, arguments.type)
    print(f"{arguments.out}: {arguments.out.stat().st_size:,} bytes")
