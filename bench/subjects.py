"""The models that benchmarks measure: the default, its Q4_0 copy and the 3.5 B shape, made where they are missing."""

from __future__ import annotations

from pathlib import Path

from make_shape import SHAPES, write_shape
from requantize import requantize

from hotneuron.deploy.console import Steps
from hotneuron.kernels.cpu import cache_folder
from hotneuron.models import catalog
from hotneuron.models.gguf_file import GGUFFile

Q4_0_COPY = f"{catalog.DEFAULT_MODEL}-q4_0"
DEFAULT = ("3.5b", catalog.DEFAULT_MODEL, Q4_0_COPY)
HELP = f"{', '.join(DEFAULT)}, anything that `hotneuron -m` takes, or NAME=PATH"


def find(spec: str) -> tuple[str, Path]:
    """A model's name in the tables and its file. Raises the catalog's errors."""
    name, equals, path = spec.partition("=")
    if equals:
        return name, catalog.resolve(path)
    made = cache_folder() / "bench" / f"{spec}.gguf"
    if spec in SHAPES or spec == Q4_0_COPY:
        if not made.exists():
            made.parent.mkdir(parents=True, exist_ok=True)
            if spec in SHAPES:
                write_shape(made, SHAPES[spec], spec)
            else:
                requantize(find(catalog.DEFAULT_MODEL)[1], made, "Q4_0")
        return spec, made
    with Steps() as steps:
        found = catalog.resolve(spec, steps)
    return (spec if spec in catalog.PACKAGED else found.stem), found


def weight_bytes_per_token(path: Path) -> int:
    """The file's bytes that one decoded token needs: all tensors, of an untied embedding only a row (left out)."""
    tensors = GGUFFile.open(path).tensors
    return sum(
        tensor.n_bytes
        for name, tensor in tensors.items()
        if name != "token_embd.weight" or "output.weight" not in tensors
    )
