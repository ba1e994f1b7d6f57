"""An engine: one model on this machine, as a placement group of one driver, one hot worker and some cold workers."""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from hotneuron.actors.client import Client
from hotneuron.actors.messages import Chunk, Request, SamplingParams
from hotneuron.actors.reaper import Reaper, ray_processes
from hotneuron.models.chat_template import ChatTemplate
from hotneuron.models.errors import EngineError, RequestError
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.tokenizer import Tokenizer

Progress = Callable[[str, int, int | None], None]

DEFAULT_CONTEXT_TOKENS = 8192
KV_BUDGET_BYTES = 2 << 30  # what the default number of sequences may take; one sequence's context is always given
LOGIT_ROWS = 32


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to run a model. None lets the machine decide."""

    model_path: Path
    workers: int | None = None  # cold workers, beside the hot one
    threads: int | None = None  # of each worker
    context_tokens: int | None = None
    max_slots: int = 8
    split: tuple[float, ...] | None = None  # share of each worker, the hot one first
    lease_steps: int = 8
    chunk_tokens: int = 512

    def __post_init__(self) -> None:
        for name, low, high in (("workers", 0, 15), ("threads", 1, 256), ("context_tokens", 16, 1 << 24),
                                ("max_slots", 1, 256), ("lease_steps", 1, 32), ("chunk_tokens", 64, 8192)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise RequestError(f"{name}={value} is out of range; give a number from {low} to {high}")

    def team(self) -> tuple[int, int]:
        """Workers and threads of each: by default one hot and one cold worker that share this machine's cores."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        n_workers = 1 + (self.workers if self.workers is not None else (1 if cores > 1 else 0))
        if self.split is not None and len(self.split) != n_workers:
            if self.workers is not None:
                shares = f"split has {len(self.split)} shares for {n_workers} workers"
                raise RequestError(f"{shares}; give one a worker, the hot one first")
            n_workers = len(self.split)
        return n_workers, self.threads or max(1, cores // n_workers)


class Engine:
    """A running model. Use as a context manager, or call `stop`."""

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        driver: Any,
        group: Any,
        owns_ray: bool,
    ):
        self.config, self.tokenizer, self.chat_template = config, tokenizer, chat_template
        self._driver, self._group, self._owns_ray = driver, group, owns_ray
        self._client = Client(driver)
        self._reaper = Reaper(ray_processes()) if owns_ray else None

    @classmethod
    def start(cls, engine_config: EngineConfig, on_progress: Progress | None = None) -> Engine:
        """Pack the weights, compile the kernels (both only once a machine), start Ray and the actors.

        Raises the errors of models/errors.py; what was started is gone then.
        """
        progress = on_progress or (lambda *_: None)
        file = GGUFFile.open(engine_config.model_path)
        config = ModelConfig.from_file(file)
        n_workers, n_threads = engine_config.team()
        # Building a tokenizer of 50,000 tokens and starting Ray take a second each, and wait for different things.
        built: dict[str, Any] = {}
        builder = threading.Thread(target=_build_texts, args=(file, built), daemon=True)
        builder.start()
        from hotneuron.actors.warm import ensure_kernels
        from hotneuron.models.pack import Pack, ensure_pack

        pack_path = ensure_pack(file, config, progress)
        pack = Pack(pack_path)
        ensure_kernels((m.format_id for m in pack.matrices.values()), progress)
        plan = _plan(pack, config, engine_config, n_workers)
        arena = _arena(config, plan, engine_config)
        progress("starting actors", 0, None)
        owns_ray = _start_ray(n_workers * n_threads + 1, arena.n_bytes)
        try:
            driver, group = _start_actors(engine_config, config, pack_path, plan, arena, n_threads)
            builder.join()
            if "error" in built:
                raise built["error"]
        except BaseException:
            if owns_ray:
                _stop_ray()
            raise
        return cls(config, built["tokenizer"], built["chat_template"], driver, group, owns_ray)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def generate(self, request: Request) -> Iterator[Chunk]:
        """Chunks as they come. Raises EngineError if the engine dies; a refused request raises RequestError."""
        inbox = self._client.submit(request)
        finished = False
        try:
            while not finished:
                item = inbox.get()
                if isinstance(item, BaseException):
                    raise item
                finished = item.finish_reason is not None
                if item.finish_reason == "error":
                    raise RequestError(item.error)
                yield item
        finally:
            if not finished:
                self._client.cancel(request.request_id)

    def cancel(self, request_id: str) -> None:
        """End a request; its last chunk has the reason "cancel"."""
        self._client.cancel(request_id)

    def score(self, tokens: ListLike[int], first: int) -> Any:
        """Log-probabilities of tokens[first + 1:], f32, each given all tokens before it."""
        return self._get(self._driver.score.remote(list(tokens), first))

    def describe(self) -> dict[str, Any]:
        return self._get(self._driver.describe.remote())

    def stats(self) -> dict[str, Any]:
        return self._get(self._driver.stats.remote())

    def bench(self, prompt_tokens: int, generate_tokens: int, repetitions: int) -> dict[str, list[float]]:
        """Tokens per second, as llama-bench counts: a prompt of random tokens; tokens drawn from an empty context."""
        from random import Random

        random = Random(0)
        found: dict[str, list[float]] = {"pp": [], "tg": []}
        for repetition in range(-1, repetitions):  # one to warm up
            if prompt_tokens:
                t = self._bench_one([random.randrange(self.config.vocab) for _ in range(prompt_tokens)], 1)
                found["pp"].append(prompt_tokens / t.prompt_s)
            if generate_tokens:
                t = self._bench_one([random.randrange(self.config.vocab)], generate_tokens)
                found["tg"].append(generate_tokens / (t.prompt_s + t.generation_s))
            if repetition < 0:
                found = {"pp": [], "tg": []}
        return found

    def _bench_one(self, prompt: list[int], n: int) -> Any:
        request = Request(uuid.uuid4().hex, tuple(prompt), n, SamplingParams(temperature=0), ignore_eos=True)
        return [*self.generate(request)][-1].timings

    def _get(self, ref: Any) -> Any:
        import ray

        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None
        except ray.exceptions.RayError as error:
            raise EngineError(f"the driver failed: {str(error).splitlines()[0]}") from None

    def stop(self) -> None:
        """End the actors, and Ray if this engine started it."""
        import ray

        self._client.close()
        if self._owns_ray:
            _stop_ray()
            if self._reaper is not None:
                self._reaper.stop()
            return
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._driver.stop.remote(), timeout=20)
            ray.kill(self._driver)
            ray.util.remove_placement_group(self._group)


def _build_texts(file: GGUFFile, built: dict[str, Any]) -> None:
    try:
        built["tokenizer"] = Tokenizer.from_metadata(file.metadata, str(file.path))
        built["chat_template"] = ChatTemplate.from_metadata(file.metadata, str(file.path))
    except Exception as error:
        built["error"] = error


def _plan(pack: Any, config: ModelConfig, engine_config: EngineConfig, n_workers: int) -> Any:
    from hotneuron.placement import plan as placement

    context = engine_config.context_tokens or min(config.context_tokens, DEFAULT_CONTEXT_TOKENS)
    context = -(-context // 16) * 16
    affordable = KV_BUDGET_BYTES // placement.kv_token_bytes(config) // 16 * 16
    kv_tokens = max(context, min(context * engine_config.max_slots, affordable)) + 16
    return placement.solve(pack, config, engine_config.split or (1.0,) * n_workers, context, kv_tokens)


def _arena(config: ModelConfig, plan: Any, engine_config: EngineConfig) -> Any:
    from hotneuron.actors.arena import Arena
    from hotneuron.kernels.formats import padded

    rows = padded(max(engine_config.chunk_tokens, engine_config.max_slots + 16), 8)
    logit_rows = padded(max(LOGIT_ROWS, engine_config.max_slots), 8)
    blocks = plan.context_tokens // 16 + 2
    width, vocab = padded(config.hidden, 16), padded(config.vocab, 16)
    return Arena(plan.n_workers, rows, engine_config.max_slots, blocks, logit_rows, width, vocab)


def _start_ray(n_cpus: int, arena_bytes: int) -> bool:
    """Join the running Ray if this process or RAY_ADDRESS names one, else start a private one; whether we did."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")  # no call may start a second Ray behind our back
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    if ray.is_initialized():
        return False
    quiet: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": False}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
        return True
    store = max(arena_bytes + (32 << 20), 80 << 20)
    ray.init(address="local", num_cpus=n_cpus, object_store_memory=store, include_dashboard=False, **quiet)
    return True


def _stop_ray() -> None:
    import ray

    ray.shutdown()


def _start_actors(
    engine_config: EngineConfig, config: ModelConfig, pack_path: Path, plan: Any, arena: Any, n_threads: int
) -> tuple[Any, Any]:
    import ray
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from hotneuron.actors.driver_actor import DriverActor

    group = placement_group([{"CPU": 1}, *({"CPU": n_threads} for _ in range(plan.n_workers))], strategy="STRICT_PACK")
    scheduling = {
        "max_slots": engine_config.max_slots,
        "chunk_tokens": min(arena.max_rows, max(engine_config.chunk_tokens, engine_config.max_slots + 16)),
        "lease_steps": engine_config.lease_steps,
    }
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    driver = DriverActor.options(num_cpus=1, scheduling_strategy=strategy, max_concurrency=1000).remote(  # type: ignore[attr-defined]
        engine_config.model_path, pack_path, config, plan, n_threads, arena, scheduling, group
    )
    try:
        ray.get(driver.start.remote(), timeout=300)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise EngineError(f"the engine could not start: {str(error).splitlines()[0]}") from None
    return driver, group
