"""What fires in a model, measured by `hotneuron profile`: how often each neuron, and how much it then adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hotneuron.kernels.cpu import cache_folder
from hotneuron.kernels.signs import SCORE_BINS
from hotneuron.models.arrays_file import load_arrays, save_arrays
from hotneuron.models.errors import ModelFileError, NotFoundError, RequestError
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.placement import histogram as histograms

_STORED = {
    "model_key": ("u1", 1),
    "tokens": ("<i8", 1),
    "fires": ("<f4", 2),
    "adds": ("<f4", 2),
    "histogram": ("<i8", 2),
    "signs": ("<i8", 2),
}
_HALVINGS = 60


@dataclass(frozen=True, slots=True, eq=False)
class Statistics:
    """Of one model; neurons as in its file."""

    model_key: str  # GGUFFile.content_key
    tokens: int  # that were seen
    fires: np.ndarray  # f32 [layers, ffn]: share of the tokens that each neuron was computed for
    adds: np.ndarray  # f32 [layers, ffn]: mean over all tokens of |activation| times the norm of its down row
    histogram: np.ndarray  # int64 [layers, BINS]: of the first product's activations, see placement/histogram.py
    # int64 [layers, 2 * SCORE_BINS]: scores by signs, of neurons that fire and of others; no rows: not measured
    signs: np.ndarray = field(default_factory=lambda: np.zeros((0, 2 * SCORE_BINS), np.int64))

    def save(self, path: Path) -> None:
        """Raises StorageError."""
        values: dict[str, np.ndarray] = {
            "model_key": np.frombuffer(self.model_key.encode(), np.uint8),
            "tokens": np.array([self.tokens]),
            "fires": self.fires,
            "adds": self.adds,
            "histogram": self.histogram,
            "signs": self.signs,
        }
        save_arrays(path, {name: values[name].astype(dtype) for name, (dtype, _) in _STORED.items()})

    @classmethod
    def load(cls, path: Path) -> Statistics:
        """Raises NotFoundError, ModelFileError."""
        found = load_arrays(path, _STORED)
        fires, adds, histogram = found["fires"], found["adds"], found["histogram"]
        if not fires.size or adds.shape != fires.shape:
            raise ModelFileError(path, "adds", f"shape {adds.shape} beside fires of shape {fires.shape}")
        if not (np.all((fires >= 0) & (fires <= 1)) and np.all((adds >= 0) & np.isfinite(adds))):
            raise ModelFileError(path, "fires", "a share is outside 0 to 1, or a sum is negative or not finite")
        if histogram.shape != (len(fires), histograms.BINS) or histogram.min() < 0:
            expected = f"counts of shape {(len(fires), histograms.BINS)}"
            raise ModelFileError(path, "histogram", f"shape {histogram.shape}, or a count below 0; expected {expected}")
        signs = found["signs"]
        if len(signs) not in (0, len(fires)) or signs.shape[1] != 2 * SCORE_BINS or signs.min(initial=0) < 0:
            expected = f"none, or counts of shape {(len(fires), 2 * SCORE_BINS)}"
            raise ModelFileError(path, "signs", f"shape {signs.shape}, or a count below 0; expected {expected}")
        if found["model_key"].shape != (64,) or found["tokens"].shape != (1,) or found["tokens"][0] < 1:
            raise ModelFileError(path, "model_key", "64 characters and a number of tokens are expected")
        key = found["model_key"].tobytes().decode("ascii", "replace")
        return cls(key, int(found["tokens"][0]), fires, adds, histogram, signs)

    @classmethod
    def of_model(cls, file: GGUFFile, config: ModelConfig, path: Path | None = None) -> Statistics:
        """Those of a model: what `profile` wrote, at `path` or where it leaves it; or a PowerInfer `activation` folder.

        Raises NotFoundError (there are none), RequestError (another model's), ModelFileError (damaged).
        """
        beside = file.path.with_name("activation")
        if path is None:
            path = default_path(file)
            if not path.exists() and beside.is_dir():
                path = beside
        if path.is_dir():
            return _from_folder(file, config, path)
        if not path.exists():
            made = f"`hotneuron profile -m {file.path} -f TEXT` makes them"
            raise NotFoundError(f"{path}: there are no statistics of this model; {made}")
        found = cls.load(path)
        found.check(file, config, path)
        return found

    def check(self, file: GGUFFile, config: ModelConfig, path: Path) -> None:
        """Raises RequestError where they are another model's."""
        remedy = f"make its own by `hotneuron profile -m {file.path} -f TEXT`"
        expected, found = (config.n_layers, config.ffn), self.fires.shape
        if found != expected:
            sizes = f"{expected[0]} layers of {expected[1]} neurons are expected, {found[0]} of {found[1]} are there"
            raise RequestError(f"{path}: statistics of another model: {sizes}; {remedy}")
        if self.model_key != (key := file.content_key()):
            keys = f"of the model with key {key[:12]} are expected, of {self.model_key[:12]} are there"
            raise RequestError(f"{path}: statistics of another model: {keys}; {remedy}")

    def thresholds(self, sparsity: float) -> tuple[float, ...]:
        """From which magnitude of the first product's activation a neuron of each layer is computed.

        Leaves out `sparsity` of all neurons. Each layer's threshold is one multiple of the root of its activations'
        root mean square: layers whose activations are mostly tiny leave out more, but not as much more as if all shared
        one threshold (a cheap stand-in for TEAL's searched budgets, arXiv 2408.14690). Of SmolLM2-135M at 40 %, the KL
        divergence is 0.119 so; 0.141 with one threshold for all, 0.137 with the same share left out of each layer.
        """
        assert 0 < sparsity < 1
        sizes = [max(histograms.mean_square(layer) ** 0.25, 1e-15) for layer in self.histogram]
        low, high = 1e-15, 1e15
        for _ in range(_HALVINGS):
            middle = (low * high) ** 0.5
            shares = [
                histograms.share_below(layer, middle * size) for layer, size in zip(self.histogram, sizes, strict=True)
            ]
            low, high = (middle, high) if np.mean(shares) < sparsity else (low, middle)
        return tuple(low * size for size in sizes)

    def order(self, unit: int = 1) -> np.ndarray:
        """int64 [layers, ffn]: neurons by how often they fire, then by how much they add, often first.

        unit: neurons that stay together, in aligned blocks; 32 where a file keeps one scale for them in `ffn_down`.
        """
        layers, ffn = self.fires.shape
        n_units = -(-ffn // unit)
        width = n_units * unit
        orders = []
        for fires, adds in zip(self.fires, self.adds, strict=True):
            sums = [np.pad(values.astype(np.float64), (0, width - ffn)).reshape(n_units, unit).sum(axis=1)
                    for values in (fires, adds)]  # fmt: skip
            units = np.lexsort((np.arange(n_units), -sums[1], -sums[0]))
            if ffn % unit:  # the block that is cut short stays last
                units = np.concatenate([units[units != n_units - 1], [n_units - 1]])
            orders.append((units[:, None] * unit + np.arange(unit)).reshape(-1)[:ffn])
        return np.array(orders, np.int64).reshape(layers, ffn)

    def share_for(self, activations: float = 0.8) -> np.ndarray:
        """f64 [layers]: the least share of neurons that carries this share of all activations."""
        sorted_fires = -np.sort(-self.fires.astype(np.float64), axis=1)
        carried = np.cumsum(sorted_fires, axis=1)
        wanted = activations * carried[:, -1:]
        return (1 + (carried < wanted - 1e-12).sum(axis=1)) / self.fires.shape[1]


def default_path(file: GGUFFile) -> Path:
    """Where `profile` leaves a model's statistics: in the cache, by what the file holds and not by where it lies."""
    return cache_folder() / "statistics" / f"{file.path.stem[:60]}-{file.content_key()[:20]}.npz"


def live_path(file: GGUFFile) -> Path:
    """Where an engine leaves what fired in its last run, for `plan --from-live`."""
    usual = default_path(file)
    return usual.with_name(f"{usual.stem}.live.npz")


def _from_folder(file: GGUFFile, config: ModelConfig, folder: Path) -> Statistics:
    """PowerInfer's counts. It does not say of how many tokens: the most frequent neuron is taken to fire for all."""
    from hotneuron.placement.activation_folder import load_activation_folder

    counts = load_activation_folder(folder, config.n_layers, config.ffn)
    tokens = max(1.0, float(counts.max()))
    fires = (counts / tokens).astype(np.float32)
    histogram = np.zeros((config.n_layers, histograms.BINS), np.int64)
    return Statistics(file.content_key(), int(tokens), fires, fires, histogram)
