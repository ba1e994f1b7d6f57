"""What `hotneuron serve` and Serve's own tools are told: one file for the service, one for each model.

The names of a model's file are those of ray.serve.llm (`model_loading_config`, `deployment_config`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from hotneuron.deploy import keep_alive
from hotneuron.models.errors import NotFoundError, RequestError

_MOST_BYTES = 1 << 20
ModelId = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$")]
C = TypeVar("C", bound=BaseModel)
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelLoading(_Strict):
    model_id: ModelId
    model_source: str = Field(max_length=4096)  # as -m takes it


class EngineKwargs(_Strict):
    """`EngineConfig`'s fields that a file may set."""

    context_tokens: Annotated[int, Field(ge=16, le=1 << 24)] | None = None
    max_slots: Annotated[int, Field(ge=1, le=256)] = 8
    workers: Annotated[int, Field(ge=0, le=15)] | None = None
    threads: Annotated[int, Field(ge=1, le=256)] | None = None
    activation: Literal["silu", "gelu", "relu"] | None = None
    sparse: Literal["auto", "exact", "predictor", "sign", "off"] = "auto"
    sparsity: Annotated[float, Field(gt=0, lt=1)] | None = None
    hot_budget_gib: Annotated[float, Field(gt=0, lt=1 << 20)] | None = None
    plan_path: Path | None = None
    statistics_path: Path | None = None


class HostedConfig(_Strict):
    """One model's file."""

    model_loading_config: ModelLoading
    engine_kwargs: EngineKwargs = EngineKwargs()
    deployment_config: dict[str, Any] = {}  # Serve's own options
    keep_alive: str | float = keep_alive.DEFAULT

    @field_validator("keep_alive")
    @classmethod
    def _parses(cls, value: str | float) -> str | float:
        try:
            keep_alive.parse_keep_alive(value)
        except RequestError as error:
            raise ValueError(str(error)) from None
        return value

    @property
    def model_id(self) -> str:
        return self.model_loading_config.model_id


class ServiceConfig(_Strict):
    """The arguments of `hotneuron.deploy.app:build_app`."""

    llm_configs: list[str | HostedConfig] = Field(min_length=1)  # files, or what would be in them
    ram_budget_gib: Annotated[float, Field(gt=0, lt=1 << 20)] | None = None  # of all loaded models; None: 0.8 of memory
    max_waiting: Annotated[int, Field(ge=0, le=100_000)] = 512  # requests that wait for room
    wait_s: Annotated[float, Field(gt=0, le=86_400)] = 120.0
    api_keys_file: Path | None = None  # a key a line; HOTNEURON_API_KEY adds one
    allowed_hosts: list[str] = list(LOOPBACK)  # names that a request may call this server by
    allowed_origins: list[str] = []  # web pages of other origins that may use it

    def hosted(self) -> list[HostedConfig]:
        """Every model's configuration. Raises NotFoundError, RequestError (a file, or two models of one name)."""
        found = [c if isinstance(c, HostedConfig) else read_config(Path(c), HostedConfig) for c in self.llm_configs]
        names = [c.model_id for c in found]
        for name in names:
            if names.count(name) > 1:
                raise RequestError(f"model_id={name!r} is configured twice; give each model its own")
        return found


def read_config(path: Path, kind: type[C]) -> C:
    """A YAML file as `kind`. Raises NotFoundError, RequestError naming file, field and problem."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise RequestError(f"{path}: larger than {_MOST_BYTES >> 20} MiB; is it a configuration?")
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise NotFoundError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: not YAML: {' '.join(str(error).split())[:200]}") from None
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        raise RequestError(f"{path}: {field}: {first['msg']}") from None
