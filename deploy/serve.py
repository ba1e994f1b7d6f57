"""`hotneuron serve`: every model of this machine behind the OpenAI API, in the foreground; Ctrl-C stops everything."""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from hotneuron.deploy.console import Steps, note
from hotneuron.deploy.guard import is_loopback, read_keys
from hotneuron.models.errors import EngineError, RequestError

_STORE_BYTES = 1 << 30


def serve(
    models: Annotated[
        list[str] | None, typer.Option("-m", "--model", help="As `run -m` takes it, repeatable; default: all of `ls`.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="A YAML file of models and limits, as deploy/service.yaml.")
    ] = None,
    host: Annotated[str, typer.Option("--host", help="Other than loopback only with an API key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535)] = 8000,
    context: Annotated[int | None, typer.Option("-c", "--ctx-size", min=16, help="Context of each model.")] = None,
    slots: Annotated[int, typer.Option("--slots", "-np", min=1, max=256, help="Sequences at once of each model.")] = 8,
    keep_alive: Annotated[str, typer.Option("--keep-alive", help="How long an idle model stays: 10m, 0, -1.")] = "5m",
    ram_budget: Annotated[
        float | None, typer.Option("--ram-budget", help="GiB for all loaded models; default: 0.8 of the memory.")
    ] = None,
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", help="A key a line; HOTNEURON_API_KEY adds one.")
    ] = None,
) -> None:
    """Serve models at http://127.0.0.1:8000/v1, loaded when first used."""
    keys = read_keys(api_key_file)
    if not is_loopback(host) and not keys:
        raise RequestError(f"--host {host} is open to others: give --api-key-file or HOTNEURON_API_KEY besides")
    if config is not None and models:
        raise RequestError("--config names the models; give no -m besides")
    arguments = _from_file(config) if config is not None else _from_flags(models, context, slots, keep_alive)
    if ram_budget is not None:
        arguments["ram_budget_gib"] = ram_budget
    if api_key_file is not None:
        arguments["api_keys_file"] = str(api_key_file.absolute())
    if not is_loopback(host):
        arguments.setdefault("allowed_hosts", ["127.0.0.1", "localhost", "::1", host, socket.gethostname()])
    _check_port(host, port)
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with Steps() as steps:
        steps("starting Ray", 0, None)
        release = _start_ray()
        try:
            steps("starting the service", 0, None)
            _start_app(arguments, host, port)
        except BaseException:
            release()
            raise
    try:
        shown = f"[{host}]" if ":" in host else host
        note(f"hotneuron serves {', '.join(_names(arguments))} at http://{shown}:{port}/v1; Ctrl-C stops it")
        stop.wait()
    finally:
        note("stopping ...")
        release()


def _from_file(path: Path) -> dict[str, Any]:
    from hotneuron.deploy.serve_config import ServiceConfig, read_config

    found = read_config(path, ServiceConfig)
    found.hosted()
    values = found.model_dump(mode="json")
    values["llm_configs"] = [hosted.model_dump(mode="json") for hosted in found.hosted()]
    return values


def _from_flags(models: list[str] | None, context: int | None, slots: int, keep_alive: str) -> dict[str, Any]:
    from hotneuron.deploy.serve_config import HostedConfig
    from hotneuron.models import catalog

    sources = models or [entry.name for entry in catalog.entries()]
    configs = []
    for source in sources:
        hosted = {
            "model_loading_config": {"model_id": _name_for(source), "model_source": source},
            "engine_kwargs": {"context_tokens": context, "max_slots": slots},
            "keep_alive": keep_alive,
        }
        configs.append(HostedConfig.model_validate(hosted).model_dump(mode="json"))
    return {"llm_configs": configs}


def _name_for(source: str) -> str:
    """What a model is called by clients: a name of `ls` as it is, a file by its stem, a repository by its last part."""
    from hotneuron.models import hub

    word = source.removeprefix(hub.PREFIX).rstrip("/").rpartition("/")[2].removesuffix(".gguf")
    cleaned = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in word).lstrip("._-")
    if not cleaned:
        raise RequestError(f"-m {source}: no name can be made of it; use --config, which gives a model_id")
    return cleaned[:128]


def _names(arguments: dict[str, Any]) -> list[str]:
    return [config["model_loading_config"]["model_id"] for config in arguments["llm_configs"]]


def _check_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise RequestError(f"port {port} of {host} cannot be had: {error.strerror}; give another --port") from None


def _start_ray() -> Any:
    """Starts or joins Ray; returns what ends it."""
    from hotneuron.actors import private_ray

    private_ray.load()
    import ray

    hold = private_ray.start_service(_STORE_BYTES)

    def release() -> None:
        from ray import serve as ray_serve

        try:
            if not hold.is_private and ray.is_initialized():
                ray_serve.delete("hotneuron")
        finally:
            hold.release()  # a Ray of our own takes everything with it

    return release


def _start_app(arguments: dict[str, Any], host: str, port: int) -> None:
    from ray import serve as ray_serve

    from hotneuron.deploy.app import build_app

    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    ray_serve.start(proxy_location="HeadOnly", http_options={"host": host, "port": port})
    try:
        ray_serve.run(build_app(arguments), name="hotneuron", route_prefix="/")
    except RuntimeError as error:
        raise EngineError(f"the service could not start: {str(error).splitlines()[0]}") from error
