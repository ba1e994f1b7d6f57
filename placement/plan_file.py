"""A plan as a file that people can read and edit: JSON with a line a layer, checked when it is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hotneuron.kernels.formats import TILE_ROWS, padded
from hotneuron.models.errors import ModelFileError, NotFoundError, RequestError, StorageError
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.placement.plan import NEURON_UNIT, Cuts, Range

_VERSION = 1
_MOST_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class PlanFile:
    """Cuts, and what they were made for."""

    model_key: str  # GGUFFile.content_key
    mode: str  # of the model's sparse modes, see models/sparse_mode.py
    statistics: str | None  # the file whose neurons, most active first, the cuts count; None: neurons as in the model
    cuts: Cuts

    def save(self, path: Path, facts: dict[str, Any]) -> None:
        """facts: what people may want to read, and nothing else reads. Raises StorageError."""
        ends = [[last for _, last in layer] for layer in self.cuts.neurons]
        layers = ",\n  ".join(json.dumps(row) for row in ends)
        head = {
            "version": _VERSION,
            "model_key": self.model_key,
            "mode": self.mode,
            "statistics": self.statistics,
            "facts": facts,
            "heads_end": [last for _, last in self.cuts.heads],
            "vocab_tiles_end": [last for _, last in self.cuts.vocab_tiles],
        }
        text = json.dumps(head, indent=1)[:-2] + f',\n "neurons_end": [\n  {layers}\n ]\n}}\n'
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise StorageError(f"{path} cannot be written: {error.strerror or error}") from error

    @classmethod
    def load(cls, path: Path, file: GGUFFile, config: ModelConfig, n_workers: int) -> PlanFile:
        """Raises NotFoundError, ModelFileError (damaged), RequestError (another model's, or other workers')."""
        try:
            if path.stat().st_size > _MOST_BYTES:
                raise ModelFileError(path, "plan", f"is larger than {_MOST_BYTES >> 20} MiB")
            found = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise NotFoundError(f"{path}: the plan cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise ModelFileError(path, "plan", f"is not JSON ({error}); `hotneuron plan -o` writes one") from None
        if not isinstance(found, dict) or found.get("version") != _VERSION:
            raise ModelFileError(path, "version", f"a plan of version {_VERSION} is expected")
        key, expected = str(found.get("model_key"))[:64], file.content_key()
        if key != expected:
            made = f"`hotneuron plan -m {file.path} -o {path}` makes its own"
            raise RequestError(
                f"{path}: plan of another model: key {expected[:12]} is expected, {key[:12]} is there; {made}"
            )
        workers = len(found["heads_end"]) if isinstance(found.get("heads_end"), list) else 0
        if workers != n_workers:
            raise RequestError(f"{path}: a plan for {workers} workers, but {n_workers} are asked for; see --workers")
        units = padded(config.ffn, NEURON_UNIT)
        layers = found.get("neurons_end")
        if not isinstance(layers, list) or len(layers) != config.n_layers:
            raise ModelFileError(path, "neurons_end", f"one row for each of {config.n_layers} layers is expected")
        neurons = tuple(
            _ranges(path, f"neurons_end of layer {layer}", row, units, n_workers, NEURON_UNIT)
            for layer, row in enumerate(layers)
        )
        tiles = padded(config.vocab, TILE_ROWS) // TILE_ROWS
        cuts = Cuts(
            _ranges(path, "heads_end", found.get("heads_end"), config.n_heads, n_workers, 1),
            neurons,
            _ranges(path, "vocab_tiles_end", found.get("vocab_tiles_end"), tiles, n_workers, 1),
        )
        statistics = found.get("statistics")
        return cls(key, str(found.get("mode")), None if statistics is None else str(statistics), cuts)


def _ranges(path: Path, field: str, ends: Any, total: int, n_workers: int, unit: int) -> tuple[Range, ...]:
    """Consecutive ranges from where each worker's part ends."""
    good = isinstance(ends, list) and len(ends) == n_workers and all(type(end) is int for end in ends)
    if not good or sorted(ends) != ends or ends[0] < 0 or ends[-1] != total or any(end % unit for end in ends):
        steps = f" in multiples of {unit}" if unit > 1 else ""
        expected = f"{n_workers} numbers that do not fall, the last one {total},{steps or ' one a worker'}"
        raise ModelFileError(path, field, f"{str(ends)[:60]} is there; {expected} are expected")
    return tuple(zip([0, *ends[:-1]], ends, strict=True))
