"""Which of a model's neurons are computed: what decides, and the kind of pack that this needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hotneuron.models.errors import RequestError, UnsupportedError
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack_sources import Kind

Asked = Literal["auto", "exact", "predictor", "sign", "off"]
ASKED: tuple[Asked, ...] = ("auto", "exact", "predictor", "sign", "off")
Name = Literal["dense", "exact", "predictor", "sign", "threshold"]
_KINDS: dict[Name, Kind] = {
    "dense": "dense",
    "exact": "gated",
    "threshold": "gated",
    "predictor": "predicted",
    "sign": "signed",
}


@dataclass(frozen=True, slots=True)
class SparseMode:
    """What decides which neurons are computed.

    dense: all are; exact: the first product decides; predictor: the file's fc1 and fc2; sign: the signs of the first
    matrix and of the input; threshold: as exact, with activations below a threshold taken for 0.
    """

    name: Name

    @property
    def kind(self) -> Kind:
        return _KINDS[self.name]


def sparse_mode(config: ModelConfig, asked: str = "auto", sparsity: float | None = None) -> SparseMode:
    """What a model runs as. sparsity: the share of neurons to leave out, for models whose activation is never 0.

    auto: by the predictor if the file has one, exactly if the activation is ReLU, else dense. Raises RequestError.
    """
    if asked not in ASKED:
        raise RequestError(f"sparse={asked!r}: give one of {', '.join(ASKED)}")
    is_relu = config.activation == "relu"
    if sparsity is not None:
        if not 0 < sparsity < 1:
            raise RequestError(f"sparsity={sparsity}: give the share of neurons to leave out, between 0 and 1, as 0.4")
        if asked not in ("auto", "exact"):
            raise RequestError(f"sparsity={sparsity} puts thresholds on the gate, sparse={asked} does not; give one")
        return SparseMode("threshold")
    if asked == "predictor" and not config.predictor_ranks:
        raise RequestError("sparse=predictor: this file has no predictor (tensors fc1 and fc2); give auto or exact")
    if asked in ("exact", "sign") and not is_relu:
        other = "leave neurons out by --sparsity, or say --activation relu if the file is wrong"
        raise RequestError(f"sparse={asked}: this model's {config.activation} is never exactly 0; {other}")
    if asked == "auto":
        asked = "predictor" if config.predictor_ranks else "exact" if is_relu else "off"
    if asked == "predictor" and max(config.predictor_ranks) > config.hidden:
        ranks = f"a predictor of rank {max(config.predictor_ranks)}, above the hidden size {config.hidden}"
        raise UnsupportedError(f"{config.name}: {ranks}, is not supported; give --sparse exact or off")
    names: dict[str, Name] = {"off": "dense", "exact": "exact", "sign": "sign", "predictor": "predictor"}
    return SparseMode(names[asked])
