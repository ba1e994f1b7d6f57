"""Making a pack from a model's file: where each weight goes, once a machine."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from gguf import quants
from gguf.constants import GGMLQuantizationType as T

from hotneuron.kernels import cpu, formats
from hotneuron.kernels.down_layout import OWN, UNIT, pack_down
from hotneuron.kernels.rows import pack_rows
from hotneuron.kernels.signs import pack_signs
from hotneuron.models.dequantize import dequantize
from hotneuron.models.errors import StorageError
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import LAYOUT_VERSION, MAGIC, Matrix, Vector, head_width
from hotneuron.models.pack_sources import Kind, Source, sources_of
from hotneuron.models.pack_table import matrix_of
from hotneuron.models.tensor_table import VECTOR_TYPES

PAGE = 4096
Progress = Callable[[str, int, int | None], None]


def ensure_pack(
    file: GGUFFile,
    config: ModelConfig,
    progress: Progress | None = None,
    folder: Path | None = None,
    kind: Kind = "dense",
    order: np.ndarray | None = None,
) -> Path:
    """The pack of a model, made now if it is not in `folder` (default: in the cache).

    order: int [layers, ffn], the neurons of the file at each position of the pack, for kinds that read by neuron; where
    the file has `ffn_down`, whose scales 32 neighbours share, whole blocks of 32 have moved.

    Raises StorageError; leaves no half-written file.
    """
    folder = folder or cpu.cache_folder() / "packs"
    variant = "" if kind == "dense" else f"-{kind}"
    if order is not None:
        assert kind != "dense" and order.shape == (config.n_layers, config.ffn)
        variant += "-" + hashlib.sha256(order.astype(np.int32).tobytes()).hexdigest()[:8]
    path = folder / f"{file.path.stem[:60]}-{file.sha_key()[:20]}{variant}-{LAYOUT_VERSION}.pack"
    if path.exists():
        return path
    part = path.with_suffix(f".{os.getpid()}.part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write(part, file, config, kind, order, progress or (lambda *_: None))
        os.replace(part, path)
    except OSError as error:
        problem = f"cannot write the pack: {error.strerror}; free space there or set HOTNEURON_CACHE"
        raise StorageError(f"{path}: {problem}") from None
    finally:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
    return path


def _head_rows(config: ModelConfig, n_heads: int, paired: bool) -> np.ndarray:
    """For each padded row of n_heads heads, the row of the file it comes from; -1 is a row of zeros."""
    order = np.arange(config.head_dim)
    if paired and config.rope.style == "interleaved":
        turned = order[: config.rope.dims]
        order = np.concatenate([turned[0::2], turned[1::2], order[config.rope.dims :]])
    padded = np.full(head_width(config), -1)
    padded[: config.head_dim] = order
    rows = np.arange(n_heads)[:, None] * config.head_dim + padded
    return np.where(padded < 0, -1, rows).ravel()


def _neurons(config: ModelConfig, order: np.ndarray | None) -> np.ndarray:
    """The file's neuron at each position of a layer; -1 past the last."""
    wide = np.full(formats.padded(config.ffn, 64), -1)
    wide[: config.ffn] = np.arange(config.ffn) if order is None else order
    return wide


def _row_order(role: str, config: ModelConfig, order: np.ndarray | None) -> np.ndarray | None:
    match role.split(".")[-1]:
        case "attn_q" | "attn_q_bias":
            return _head_rows(config, config.n_heads, True)
        case "attn_k" | "attn_k_bias":
            return _head_rows(config, config.n_kv_heads, True)
        case "attn_v" | "attn_v_bias":
            return _head_rows(config, config.n_kv_heads, False)
        case "attn_q_norm" | "attn_k_norm":
            return _head_rows(config, 1, True)
        case "ffn_gate" | "ffn_up" | "ffn_up_bias" | "ffn_signs" | "fc2":
            return _neurons(config, order)
    return None


def _gather(rows: np.ndarray, order: np.ndarray | None) -> np.ndarray:
    """rows[order], zeros for -1."""
    if order is None:
        return rows
    out = rows[order]
    out[order < 0] = 0
    return out


def _down(file: GGUFFile, source: Source, config: ModelConfig, order: np.ndarray | None) -> tuple[Matrix, np.ndarray]:
    """The down projection by neuron."""
    info = file.tensors[source.name]
    raw, type_ = file.raw(source.name), T(info.type)
    entry = matrix_of(file, source, config)
    layout = entry.down
    if layout.format_id != formats.FORMAT_OF[type_]:
        values = dequantize(raw, type_, info.shape)
        raw, type_ = quants.quantize(values, T.F16).view(np.uint8).reshape(-1), T.F16
    neurons = _neurons(config, order)
    if layout.scaling == OWN:
        rows = _gather(raw.reshape(config.ffn, -1), neurons)
        units = pack_down(np.ascontiguousarray(rows).reshape(-1), type_, len(rows), layout)
    else:
        units = pack_down(raw, type_, config.ffn, layout)
        first = neurons.reshape(-1, UNIT)[:, 0]
        assert order is None or _moves_units(neurons)
        units = units[np.where(first < 0, len(units) - 1, first // UNIT)]
    return entry, units.reshape(-1)


def _moves_units(neurons: np.ndarray) -> bool:
    """Whether every unit of 32 positions holds one aligned block of the file's neurons, in order."""
    units = neurons.reshape(-1, UNIT)
    first = units[:, :1]
    return bool(np.all((units == first + np.arange(UNIT)) & (first % UNIT == 0) | (units < 0)))


def _tiles(file: GGUFFile, source: Source, config: ModelConfig, order: np.ndarray | None) -> tuple[Matrix, np.ndarray]:
    """A matrix as tiles, or its rows one by one."""
    info, entry = file.tensors[source.name], matrix_of(file, source, config)
    rows = info.shape[1]
    raw, type_ = file.raw(source.name).reshape(rows, -1), T(info.type)
    if source.rows is not None:
        raw = raw[slice(*source.rows)]
    if source.is_transposed:
        values = np.ascontiguousarray(dequantize(raw.reshape(-1), type_, info.shape).T)
        type_ = type_ if type_ in VECTOR_TYPES else T.F16
        raw = quants.quantize(values, type_).view(np.uint8)
    if source.role.endswith("attn_output") and head_width(config) != config.head_dim:
        heads = dequantize(raw.reshape(-1), type_, info.shape).reshape(rows, config.n_heads, config.head_dim)
        values = np.pad(heads, ((0, 0), (0, 0), (0, head_width(config) - config.head_dim))).reshape(rows, -1)
        raw, type_ = np.ascontiguousarray(values).view(np.uint8), T.F32
    # NOTE a row of zero bytes has scale 0 in every block format, so it is a row of zeros.
    raw = _gather(raw, _row_order(source.role, config, order))
    if source.layout == "signs":
        values = dequantize(np.ascontiguousarray(raw).reshape(-1), type_, (entry.columns, len(raw)))
        return entry, pack_signs(values).reshape(-1)
    pack_as = pack_rows if source.layout == "rows" else formats.pack
    return entry, pack_as(np.ascontiguousarray(raw).reshape(-1), type_, len(raw), entry.columns).reshape(-1)


def _vector(file: GGUFFile, source: Source, config: ModelConfig, order: np.ndarray | None) -> tuple[Vector, np.ndarray]:
    info = file.tensors[source.name]
    values = dequantize(file.raw(source.name), info.type, info.shape).astype(np.float32).reshape(-1)
    return _floats(_gather(values, _row_order(source.role, config, order)))


def _floats(values: np.ndarray) -> tuple[Vector, np.ndarray]:
    padded = np.zeros(formats.padded(len(values), 64), np.float32)
    padded[: len(values)] = values
    return Vector(0, len(padded)), padded.view(np.uint8)


def _source_bytes(file: GGUFFile, source: Source) -> int:
    info = file.tensors[source.name]
    if source.rows is None:
        return info.n_bytes
    return info.n_bytes // info.shape[1] * (source.rows[1] - source.rows[0])


def _entries(
    file: GGUFFile, config: ModelConfig, kind: Kind, order: np.ndarray | None
) -> Iterator[tuple[str, Matrix | Vector, np.ndarray, int]]:
    """Role, entry, data, and bytes of the file that are done with it."""
    for source in sources_of(config, kind):
        layer = source.role.partition(".")[0]
        of_layer = order[int(layer)] if order is not None and layer.isdigit() else None
        make = _vector if source.is_vector else _down if source.layout.startswith("down") else _tiles
        yield source.role, *make(file, source, config, of_layer), _source_bytes(file, source)
    if order is not None:
        for index, neurons in enumerate(order):
            yield f"{index}.neuron_order", *_floats(_neurons(config, neurons).astype(np.float32)), 0


def _write(
    path: Path, file: GGUFFile, config: ModelConfig, kind: Kind, order: np.ndarray | None, progress: Progress
) -> None:
    sources = sources_of(config, kind)
    total = sum(_source_bytes(file, source) for source in sources)
    matrices: dict[str, dict[str, Any]] = {}
    vectors: dict[str, dict[str, Any]] = {}
    room = formats.padded(4096 + 200 * (len(sources) + config.n_layers), PAGE)
    done, offset = 0, room
    with path.open("wb") as out:
        out.seek(room)
        for role, entry, data, n_bytes in _entries(file, config, kind, order):
            table = matrices if isinstance(entry, Matrix) else vectors
            table[role] = asdict(entry) | {"offset_bytes": offset}
            out.write(data.data)
            offset = formats.padded(offset + data.nbytes, PAGE)
            out.seek(offset)
            done += n_bytes
            progress("packing weights", done, total)
        out.truncate(offset)
        header = json.dumps({"matrices": matrices, "vectors": vectors}).encode()
        assert 16 + len(header) <= room
        out.seek(0)
        out.write(struct.pack("<4sIQ", MAGIC, LAYOUT_VERSION, len(header)) + header)
        out.flush()
        os.fsync(out.fileno())
