"""PowerInfer's statistics of a model, a folder `activation` beside it: how often each neuron fired on some text.

One file a layer, `activation_0.pt` and so on, each a torch.save of one tensor.
NOTE: sorted as texts, layer 10 comes before layer 2. PowerInfer's exporter does so, and from layer 2 on splits each
layer by another one's counts (https://github.com/SJTU-IPADS/PowerInfer/issues/247). Here a number asks for its file.
"""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from hotneuron.models.errors import ModelFileError, NotFoundError, UnsupportedError
from hotneuron.placement.side_file import read_side_file

_MOST_BYTES = 8  # of one count
_SLACK_BYTES = 1 << 20  # of a file, for what torch.save writes around the counts
_DAMAGE = (zipfile.BadZipFile, NotImplementedError, EOFError, RuntimeError, OSError, ValueError)


def load_activation_folder(folder: Path, n_layers: int, ffn: int) -> np.ndarray:
    """Counts, f64 [n_layers, ffn], of a model with so many layers of so many neurons.

    Raises NotFoundError (no folder, missing layers), ModelFileError (another model's, damaged, not only a tensor),
    UnsupportedError (torch, which it takes to read the files, is not installed).
    """
    paths = [folder / f"activation_{layer}.pt" for layer in range(n_layers)]
    if not folder.is_dir():
        raise NotFoundError(f"{folder}: there is no such folder; one with {_names(paths)} is expected")
    missing = [path for path in paths if not path.exists()]
    if missing:
        absent = f"{len(missing)} of {n_layers} layers are missing, first {missing[0].name}"
        raise NotFoundError(f"{folder}: {absent}; {_names(paths)} are expected")
    beyond = f"activation_{n_layers}.pt"
    if (folder / beyond).exists():
        raise ModelFileError(folder, beyond, f"is of another model; this one has {_names(paths)} alone")
    try:
        import torch
    except ImportError:
        problem = "these files are torch's, which is not installed; pip install 'hotneuron[train]'"
        raise UnsupportedError(f"{folder}: {problem}") from None
    return np.stack([_counts(torch, path, ffn) for path in paths])


def _names(paths: list[Path]) -> str:
    return f"{paths[0].name} to {paths[-1].name}"


def _counts(torch: Any, path: Path, ffn: int) -> np.ndarray:
    """f64 [ffn] of one file."""
    data = read_side_file(path, _MOST_BYTES * ffn + _SLACK_BYTES, f"a tensor of {ffn} activation counts")
    stored_bytes = _stored_bytes(path, data)
    try:
        tensor = torch.load(io.BytesIO(data), weights_only=True, map_location="cpu")
        problem = _problem(torch, tensor, ffn, stored_bytes)
        counts = np.empty(0) if problem else tensor.detach().to(torch.float64).numpy()
    except Exception as error:  # the readers inside raise whatever the damage leads to
        problem = f"holds more than numbers, or is damaged: torch.load with weights_only refuses it ({_kind(error)})"
    if problem:
        raise ModelFileError(path, "tensor", problem)
    odd = np.flatnonzero(~(np.isfinite(counts) & (counts >= 0)))
    if len(odd):
        raise ModelFileError(path, "tensor", f"neuron {odd[0]} has {counts[odd[0]]}; a finite count >= 0 is expected")
    return counts


def _problem(torch: Any, tensor: Any, ffn: int, stored_bytes: int) -> str | None:
    """Why this is not a row of numbers, all of them stored. Looks at no number yet."""
    if not isinstance(tensor, torch.Tensor):
        return f"is a {_kind(tensor)}; one tensor of {ffn} counts is expected"
    if tuple(tensor.shape) != (ffn,):
        return f"has shape {tuple(tensor.shape)}; ({ffn},) is expected"
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_complex() or tensor.is_quantized:
        return f"is {tensor.dtype}, {tensor.layout}, on {tensor.device}; real numbers, one by one, are expected"
    # torch 2.13 checks this itself; earlier ones are not known to, and would read on past what is there.
    claimed_bytes = tensor.untyped_storage().nbytes()
    if claimed_bytes > stored_bytes:
        return f"claims {claimed_bytes} bytes where {stored_bytes} are stored"
    return None


def _stored_bytes(path: Path, data: bytes) -> int:
    """Bytes of the numbers in a torch.save archive. Nothing in it may grow when it is read."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            entries = archive.infolist()
    except _DAMAGE:
        raise ModelFileError(
            path, "archive", "is damaged, or older than torch 1.6; save it again with torch.save"
        ) from None
    n_bytes = sum(entry.file_size for entry in entries)
    if n_bytes > len(data) or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        problem = f"is compressed, or holds {n_bytes} bytes in a file of {len(data)}; torch.save stores as it is"
        raise ModelFileError(path, "archive", problem)
    return sum(entry.file_size for entry in entries if "/data/" in entry.filename)


def _kind(value: object) -> str:
    return type(value).__name__
