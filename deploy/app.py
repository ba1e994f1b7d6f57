"""The Serve application: a gateway, one deployment a model, and the budget that they share.

`import_path: hotneuron.deploy.app:build_app` for Serve's own tools; `hotneuron serve` uses the same.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import psutil
from ray import serve
from ray.exceptions import RayActorError
from ray.serve import Application
from ray.serve.handle import DeploymentHandle

from hotneuron.deploy.gateway import Gateway, routes
from hotneuron.deploy.guard import Guard, read_keys
from hotneuron.deploy.hosted_model import HostedModel
from hotneuron.deploy.model_budget import GIB, ModelBudget
from hotneuron.deploy.serve_config import ServiceConfig

BUDGET_SHARE = 0.8  # of this machine's memory, for all loaded models
MAX_ONGOING = 1024  # requests that one model takes at once; its slots are fewer, and the rest waits in its scheduler
_NO_CPUS = {"num_cpus": 0}


def build_app(args: dict[str, Any]) -> Application:
    """Args: the fields of `ServiceConfig`. Raises the errors of the files that they name."""
    config = ServiceConfig.model_validate(args)
    read_keys(config.api_keys_file)  # a file that cannot be read shall stop the start, not the first request
    n_bytes = config.ram_budget_gib * GIB if config.ram_budget_gib else BUDGET_SHARE * psutil.virtual_memory().total
    budget = _Budget.bind(  # type: ignore[attr-defined]
        round(n_bytes), config.max_waiting, config.wait_s
    )
    models = {}
    for hosted in config.hosted():
        options = {"max_ongoing_requests": MAX_ONGOING, "ray_actor_options": _NO_CPUS} | hosted.deployment_config
        deployment = serve.deployment(HostedModel).options(  # type: ignore[attr-defined]
            name=f"model-{hosted.model_id}", **options
        )
        models[hosted.model_id] = deployment.bind(hosted, budget)
    guard = config.api_keys_file, tuple(config.allowed_hosts), tuple(config.allowed_origins)
    return Ingress.bind(models, *guard)  # type: ignore[attr-defined]


@serve.deployment(name="gateway", max_ongoing_requests=10_000, ray_actor_options=_NO_CPUS)
@serve.ingress()
class Ingress:
    """The gateway behind its guard. Keys are read where they are needed: Serve keeps what a deployment is given."""

    def __init__(
        self,
        models: dict[str, DeploymentHandle],
        keys_file: Path | None,
        allowed_hosts: tuple[str, ...],
        allowed_origins: tuple[str, ...],
    ):
        self._gateway = Gateway(models)
        self._guard = read_keys(keys_file), allowed_hosts, allowed_origins

    def __serve_build_asgi_app__(self) -> Any:
        return Guard(routes(self._gateway), *self._guard)


@serve.deployment(name="budget", max_ongoing_requests=100_000, ray_actor_options=_NO_CPUS)
class _Budget:
    """`ModelBudget` behind a handle. One for all: Serve keeps one replica of it."""

    def __init__(self, budget_bytes: int, max_waiting: int, wait_s: float):
        self._budget = ModelBudget(budget_bytes, max_waiting, wait_s)

    async def reserve(self, holder_id: str, model_id: str, n_bytes: int, holder: Any) -> None:
        await self._budget.reserve(holder_id, model_id, n_bytes, lambda: _is_alive(holder))

    async def use(self, holder_id: str, in_flight: int) -> None:
        await self._budget.use(holder_id, in_flight)

    async def until_unwanted(self, holder_id: str) -> bool:
        return await self._budget.until_unwanted(holder_id)

    async def release(self, holder_id: str) -> None:
        await self._budget.release(holder_id)


async def _is_alive(actor: Any) -> bool:
    try:
        await asyncio.wait_for(actor.__ray_ready__.remote(), 2)
    except RayActorError:
        return False
    except TimeoutError:
        return True
    return True
