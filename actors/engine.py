"""An engine: one model on this machine, as a placement group of one driver, one hot worker and some cold workers."""

from __future__ import annotations

import contextlib
import queue
import threading
import uuid
from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hotneuron.actors import private_ray
from hotneuron.actors.activity import Activity
from hotneuron.actors.adaptation import adapt
from hotneuron.actors.client import Client, Inbox, Item
from hotneuron.actors.messages import Chunk, Request, SamplingParams
from hotneuron.actors.preparation import Launch, ensure, kind_of, mode_of, place_model, store_bytes
from hotneuron.kernels import cpu
from hotneuron.models.chat_template import ChatTemplate
from hotneuron.models.errors import EngineError, RequestError
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.sparse_mode import SparseMode
from hotneuron.models.tokenizer import Tokenizer

if TYPE_CHECKING:
    from hotneuron.placement.place import Placement

_NO_CPUS = 0.001  # Ray makes no bundle of nothing
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How to run a model. None lets the machine decide."""

    model_path: Path
    workers: int | None = None  # cold workers, beside the hot one
    threads: int | None = None  # of each worker
    context_tokens: int | None = None
    max_slots: int = 8
    split: tuple[float, ...] | None = None  # share of each worker, the hot one first
    lease_steps: int = 24
    chunk_tokens: int = 512
    activation: str | None = None  # the user's word against the file's
    sparse: str = "auto"  # what decides which neurons are computed, see `models.sparse_mode`
    sparsity: float | None = None  # share of neurons to leave out, by thresholds from the model's statistics
    sparse_threshold: float | None = None  # from which score a predicted neuron is computed; None: the file's, or safe
    thresholds: tuple[float, ...] = ()  # the same of each layer, for whom wants to set them one by one
    statistics_path: Path | None = None  # None: where `profile` leaves them
    hot_budget_bytes: int | None = None  # of the hot worker's process; None: work is dealt in equal shares
    plan_path: Path | None = None  # what `hotneuron plan` wrote, instead of a budget
    is_profiling: bool = False  # the first product decides, nothing predicts, and histograms are kept
    is_traced: bool = False  # the time of each phase of a step is kept
    reserves_cpus: bool = True  # of Ray's count; several models on one machine share its cores by turns instead

    def __post_init__(self) -> None:
        for name, low, high in (("workers", 0, 15), ("threads", 1, 256), ("context_tokens", 16, 1 << 24),
                                ("max_slots", 1, 256), ("lease_steps", 1, 32), ("chunk_tokens", 64, 8192)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise RequestError(f"{name}={value} is out of range; give a number from {low} to {high}")
        if self.hot_budget_bytes is not None and not 0 < self.hot_budget_bytes < 1 << 50:
            raise RequestError(f"hot_budget_bytes={self.hot_budget_bytes}: give a number of bytes above 0")
        if self.hot_budget_bytes is not None and self.plan_path is not None:
            raise RequestError("a plan was made for its own budget; give a plan or a hot budget")
        if self.sparse_threshold is not None and not abs(self.sparse_threshold) < 1e30:
            raise RequestError(f"sparse_threshold={self.sparse_threshold}: give a number, as 0 or -0.5")

    def team(self) -> tuple[int, int]:
        """Workers and threads of each: by default one hot and one cold worker that share this machine's cores."""
        cores = cpu.usable_cores()
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
        engine_config: EngineConfig,
        config: ModelConfig,
        mode: SparseMode,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate,
        driver: Any,
        group: Any,
        hold: private_ray.Hold,
    ):
        self._engine_config = engine_config
        self.config, self.mode, self.tokenizer, self.chat_template = config, mode, tokenizer, chat_template
        self._driver, self._group, self._hold = driver, group, hold
        self._client = Client(driver)

    @classmethod
    def start(cls, engine_config: EngineConfig, on_progress: Progress | None = None) -> Engine:
        """Pack the weights, compile the kernels (both only once a machine), start Ray and the actors.

        Raises the errors of models/errors.py; what was started is gone then.
        """
        progress = on_progress or (lambda *_: None)
        file = GGUFFile.open(engine_config.model_path)
        config = ModelConfig.from_file(file, engine_config.activation)
        mode = mode_of(file, config, engine_config)
        n_workers, n_threads = engine_config.team()
        placed = place_model(file, config, mode, engine_config, n_workers, n_threads, progress)
        cuts, order = (placed.cuts, placed.order) if placed is not None else (None, None)
        progress("starting Ray", 0, None)
        private_ray.load()  # before the threads, whose imports it would wait for

        # While Ray starts, this process would mostly wait.
        pack_path = _in_background(lambda: ensure(file, config, kind_of(mode, engine_config), progress, order))
        texts = _in_background(lambda: _texts(file))
        hold = private_ray.start(n_workers + 1, store_bytes(config, engine_config, n_workers))
        try:
            packed = pack_path.result()
            progress("starting actors", 0, None)
            cpus = _cpus(hold.is_private, n_threads) if engine_config.reserves_cpus else (_NO_CPUS, _NO_CPUS)
            driver, group = _create_driver(n_workers, n_threads, *cpus)
            _start_driver(driver, Launch(engine_config, config, mode, packed, cuts))
            tokenizer, chat_template = texts.result()
        except BaseException:
            hold.release()
            raise
        return cls(engine_config, config, mode, tokenizer, chat_template, driver, group, hold)

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def generate(self, request: Request) -> Iterator[Chunk]:
        """Chunks as they come. Raises EngineError if the engine dies; a refused request raises RequestError."""
        inbox: queue.SimpleQueue[Item] = queue.SimpleQueue()
        self._client.submit(request, inbox)
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

    def submit(self, request: Request, inbox: Inbox) -> None:
        """As `generate`, for who cannot wait: chunks, and an EngineError if the engine dies, are put into the inbox.

        A refused request ends with a chunk that says why. Raises EngineError, RequestError (an id in use).
        """
        self._client.submit(request, inbox)

    def cancel(self, request_id: str) -> None:
        """End a request; its last chunk has the reason "cancel"."""
        self._client.cancel(request_id)

    def score(self, tokens: ListLike[int], first: int) -> Any:
        """Log-probabilities of tokens[first + 1:], f32, each given all tokens before it."""
        return self._get(self._driver.score.remote(list(tokens), first))

    def logprobs(self, tokens: ListLike[int], first: int) -> Any:
        """The same of the whole vocabulary: f32 [len(tokens) - first - 1, vocab]."""
        return self._get(self._driver.logprobs.remote(list(tokens), first))

    def describe(self) -> dict[str, Any]:
        return self._get(self._driver.describe.remote())

    def stats(self) -> dict[str, Any]:
        return self._get(self._driver.stats.remote())

    def activity(self) -> Activity:
        """What has fired since the engine began. Raises RequestError where all neurons are computed."""
        return self._get(self._driver.activity.remote())

    def replan(self, plan_path: Path | None = None, on_progress: Progress | None = None) -> Placement:
        """Deal neurons anew among the running workers, by what has fired so far or by a plan; streams go on.

        Raises RequestError (too little was seen, a plan of another model), EngineError (all is as it was then).
        """
        progress = on_progress or (lambda *_: None)
        adaptation = adapt(self.config, self.mode, self._engine_config, self.activity, plan_path, progress)
        progress("moving neurons", 0, None)
        self._get(self._driver.replan.remote(adaptation.launch))
        return adaptation.placement

    def breakdown(self) -> list[dict[str, float]]:
        """Seconds that the first thread of each worker spent in each phase so far; needs `is_traced`."""
        return self._get(self._driver.breakdown.remote())

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
        if self._hold.connected:
            self._hold.release()
            return
        with contextlib.suppress(ray.exceptions.RayError):
            ray.get(self._driver.stop.remote(), timeout=20)
            ray.kill(self._driver)
            ray.util.remove_placement_group(self._group)


def _in_background(work: Callable[[], Any]) -> Future[Any]:
    """Run on a thread that does not keep the process from ending."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def _texts(file: GGUFFile) -> tuple[Tokenizer, ChatTemplate]:
    source = str(file.path)
    return Tokenizer.from_metadata(file.metadata, source), ChatTemplate.from_metadata(file.metadata, source)


def _cpus(is_private: bool, n_threads: int) -> tuple[float, float]:
    """That the driver and each worker count for; a private Ray has as many as there are actors."""
    return 1, 1 if is_private else n_threads


def _create_driver(n_workers: int, n_threads: int, driver_cpus: float, worker_cpus: float) -> tuple[Any, Any]:
    """The driver, which creates its workers, and the placement group of all."""
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    from hotneuron.actors.driver_actor import DriverActor

    bundles = [{"CPU": driver_cpus}, *({"CPU": worker_cpus} for _ in range(n_workers))]
    group = placement_group(bundles, strategy="STRICT_PACK")
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    options = {"num_cpus": driver_cpus, "scheduling_strategy": strategy, "max_concurrency": 1000}
    driver = DriverActor.options(**options).remote(n_workers, n_threads, group, worker_cpus)  # type: ignore[attr-defined]
    return driver, group


def _start_driver(driver: Any, launch: Launch) -> None:
    import ray

    try:
        ray.get(driver.start.remote(launch), timeout=300)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        raise EngineError(f"the engine could not start: {str(error).splitlines()[0]}") from None
