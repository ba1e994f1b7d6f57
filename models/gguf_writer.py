"""Writing model files, GGUF and PWRI, tensor by tensor, so that no model has to fit into memory.

    with ModelWriter(path, "llama", magic="PWRI") as writer:
        writer.metadata.add_block_count(2)
        writer.declare("token_embd.weight", (4096, 32000), T.Q4_0)
        writer.write("token_embd.weight", blocks)

PWRI is GGUF v3 with another magic (PowerInfer's files; nothing else in the container differs).
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Literal

import gguf
import numpy as np
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as T

Magic = Literal["GGUF", "PWRI"]


def stored_bytes(shape: tuple[int, ...], type_: T) -> int:
    """Bytes of a tensor; shape as in the file, first the axis that lies together. ValueError: a block is cut."""
    elements, n_bytes = GGML_QUANT_SIZES[type_]
    if shape[0] % elements:
        raise ValueError(f"rows of {shape[0]} values are not whole blocks of {elements}, as {type_.name} needs")
    return int(np.prod(shape, dtype=np.int64)) // elements * n_bytes


class ModelWriter:
    """A file that appears under its name when it is complete. First metadata and declarations, then the data."""

    def __init__(self, path: Path, architecture: str, magic: Magic = "GGUF"):
        self._path, self._magic = path, magic
        self._partial = path.with_name(path.name + ".partial")
        self.metadata = gguf.GGUFWriter(self._partial, architecture)
        self._declared: dict[str, int] = {}  # bytes of each tensor that is still to come, in order
        self._has_begun = False

    def declare(self, name: str, shape: tuple[int, ...], type_: T) -> None:
        """Announce a tensor. shape: as in the file, the axis that lies together first."""
        assert not self._has_begun and name not in self._declared
        n_bytes = stored_bytes(shape, type_)
        rows = tuple(reversed(shape[1:]))
        if type_ is T.F32:
            self.metadata.add_tensor_info(name, (*rows, shape[0]), np.dtype(np.float32), n_bytes)
        else:
            row_bytes = n_bytes // int(np.prod(rows, dtype=np.int64))
            self.metadata.add_tensor_info(name, (*rows, row_bytes), np.dtype(np.uint8), n_bytes, type_)
        self._declared[name] = n_bytes

    def write(self, name: str, data: np.ndarray) -> None:
        """The bytes of the next tensor, in the order of the declarations."""
        if not self._has_begun:
            self._begin()
        expected = next(iter(self._declared))
        assert name == expected, f"tensor {name} is written where {expected} was declared"
        assert data.nbytes == self._declared.pop(name), name
        self.metadata.write_tensor_data(data)

    def _begin(self) -> None:
        self._has_begun = True
        self.metadata.write_header_to_file()
        self.metadata.write_kv_data_to_file()
        self.metadata.write_ti_data_to_file()
        assert self.metadata.fout is not None and len(self.metadata.fout) == 1
        file = self.metadata.fout[0]
        end = file.tell()
        file.seek(0)
        file.write(self._magic.encode())
        file.seek(end)

    def __enter__(self) -> ModelWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            assert not self._declared, f"tensor {next(iter(self._declared))} was declared and never written"
        self.metadata.close()
        if kind is None:
            self._partial.replace(self._path)
        else:
            self._partial.unlink(missing_ok=True)
