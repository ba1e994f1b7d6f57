"""An engine in this process: the driver, and workers as threads over a NumPy arena. No Ray, so it starts at once."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from kernel_arrays import aligned

from hotneuron.actors import fields
from hotneuron.actors.arena import LINE, MAX_WORKERS, Arena
from hotneuron.actors.driver import Driver
from hotneuron.actors.exchange import Exchange
from hotneuron.actors.kv_blocks import KVBlocks
from hotneuron.actors.messages import Chunk, Request, SamplingParams, TokenLogprob
from hotneuron.actors.scheduler import Scheduler
from hotneuron.actors.worker import Worker
from hotneuron.kernels.formats import padded
from hotneuron.models.errors import EngineError, RequestError
from hotneuron.models.gguf_file import GGUFFile
from hotneuron.models.model_config import ModelConfig
from hotneuron.models.pack import Pack
from hotneuron.models.pack_sources import Kind
from hotneuron.models.pack_writer import ensure_pack
from hotneuron.models.tokenizer import Tokenizer
from hotneuron.placement.plan import Cuts, Plan, cut_by, weigh

GREEDY = SamplingParams(temperature=0)
LEAVE_S, ANSWER_S = 20.0, 120.0
_numbers = itertools.count()


def ask_for(prompt: Sequence[int], n: int, sampling: SamplingParams = GREEDY, **options: object) -> Request:
    """A request with an id of its own that does not stop before `n` tokens, unless told to."""
    return Request(f"r{next(_numbers)}", tuple(prompt), n, sampling, **{"ignore_eos": True} | options)  # type: ignore[arg-type]


class LocalTeam:
    """Implements `driver.Team`."""

    def __init__(self, pack_path: Path, config: ModelConfig, plan: Plan, n_threads: int):
        self._config, self._n_threads = config, n_threads
        self.hold(pack_path, plan)
        self._silent: dict[int, np.ndarray] = {}
        self._dead: set[int] = set()
        self.n_starts = 0

    def hold(self, pack_path: Path, plan: Plan) -> None:
        self._create = lambda me: Worker(pack_path, self._config, plan, me, self._n_threads)
        self.workers = [self._create(me) for me in range(plan.n_workers)]

    def leave(self) -> None:
        for worker in self.workers:
            worker.join(LEAVE_S)

    def connect(self, exchange: Exchange, memory: np.ndarray) -> None:
        self._exchange, self._memory = exchange, memory

    def start(self) -> None:
        for me, worker in enumerate(self.workers):
            if not worker.join(LEAVE_S):
                raise EngineError(f"worker {me} did not leave its step")
            if me in self._silent:
                self.workers[me] = self._create(me)
        self._silent, self._dead = {}, set()
        self._exchange.reset()
        for worker in self.workers:
            worker.start(self._memory, self._exchange.arena, self._exchange.nonce)
        self.n_starts += 1

    def has_dead(self) -> bool:
        return bool(self._dead)

    def stop(self) -> None:
        self._exchange.abort()
        for me, worker in enumerate(self.workers):
            assert worker.join(LEAVE_S), f"worker {me} did not leave its step"

    def silence(self, me: int) -> None:
        """From now on, in the middle of whatever it does, worker `me` counts itself in at no meeting: it hangs."""
        nowhere = self._silent.setdefault(me, aligned(LINE * MAX_WORKERS))
        tables = self.workers[me]._tables
        assert tables is not None
        tables.p[fields.COUNTERS] = nowhere.ctypes.data

    def kill(self, me: int) -> None:
        """As the driver sees a worker whose process has ended."""
        self.silence(me)
        self._dead.add(me)

    def codes(self) -> list[int]:
        """Why each thread that has left its program left it."""
        return [code for worker in self.workers for code in worker.codes]


@dataclass(slots=True)
class Answer:
    """One request's chunks as they come."""

    request: Request
    chunks: list[Chunk] = field(default_factory=list)
    coming: queue.SimpleQueue[Chunk] = field(default_factory=queue.SimpleQueue)

    def until(self, enough: Callable[[Answer], bool]) -> Answer:
        while not enough(self) and not self.is_finished:
            self.chunks.append(self.coming.get(timeout=ANSWER_S))
        return self

    def wait(self) -> Answer:
        """Wait for the last chunk. Raises RequestError for a refused request."""
        self.until(lambda _: False)
        if self.finish_reason == "error":
            raise RequestError(self.chunks[-1].error or "")
        return self

    @property
    def is_finished(self) -> bool:
        return bool(self.chunks) and self.chunks[-1].finish_reason is not None

    @property
    def finish_reason(self) -> str | None:
        return self.chunks[-1].finish_reason

    @property
    def tokens(self) -> list[int]:
        return [token for chunk in self.chunks for token in chunk.tokens]

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for chunk in self.chunks for entry in chunk.logprobs]


@dataclass(frozen=True, slots=True)
class LocalEngine:
    driver: Driver
    team: LocalTeam
    exchange: Exchange
    scheduler: Scheduler
    tokenizer: Tokenizer
    config: ModelConfig
    file: GGUFFile
    pack_path: Path
    pack: Pack
    plan: Plan

    def __enter__(self) -> LocalEngine:
        self.driver.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.stop()

    def submit(self, request: Request) -> Answer:
        answer = Answer(request)
        self.driver.submit(request, answer.coming.put)
        return answer

    def ask(self, request: Request) -> Answer:
        return self.submit(request).wait()

    def ask_all(self, requests: Sequence[Request]) -> list[Answer]:
        return [answer.wait() for answer in [self.submit(request) for request in requests]]


def local_engine(
    model_path: Path,
    shares: tuple[float, ...] = (1,),
    threads: int = 1,
    *,
    context_tokens: int = 512,
    kv_tokens: int | None = None,
    max_slots: int = 8,
    chunk_tokens: int = 512,
    lease_steps: int = 8,
    cache_pack: bool = False,
    kind: Kind = "dense",
    order: np.ndarray | None = None,
    cuts: Cuts | None = None,
    thresholds: tuple[float, ...] = (),
    activation: str | None = None,
    has_histogram: bool = False,
    is_traced: bool = False,
) -> LocalEngine:
    """An engine to be started by `with`. Tokens are computed in `shares`, or as `cuts` says.

    `cache_pack`: keep the pack in the user's cache, not beside the model.
    """
    file = GGUFFile.open(model_path)
    config = ModelConfig.from_file(file, activation)
    folder = None if cache_pack else model_path.parent
    pack_path = ensure_pack(file, config, folder=folder, kind=kind, order=order)
    pack = Pack(pack_path)
    cuts = cuts or cut_by(config, shares)
    plan = weigh(pack.matrices, config, cuts, context_tokens, kv_tokens or 4 * context_tokens)
    plan = replace(plan, thresholds=thresholds)
    rows = padded(max(chunk_tokens, max_slots + 16), 8)
    blocks, logit_rows = context_tokens // 16 + 2, padded(max(32, max_slots), 8)
    widths = padded(config.hidden, 16), padded(config.vocab, 16)
    neurons = 0 if kind == "dense" else padded(config.ffn, 64)
    arena = Arena(
        plan.n_workers, rows, max_slots, blocks, logit_rows, *widths, config.n_layers, neurons, has_histogram, is_traced
    )
    memory = aligned(arena.n_bytes)
    exchange = Exchange(memory, arena)
    team = LocalTeam(pack_path, config, plan, threads)
    team.connect(exchange, memory)
    tokenizer = Tokenizer.from_metadata(file.metadata, str(model_path))
    scheduler = Scheduler(
        KVBlocks(plan.kv_tokens // 16),
        context_tokens=context_tokens,
        stop_ids=frozenset(tokenizer.stop_ids),
        max_slots=max_slots,
        chunk_tokens=chunk_tokens,
        lease_steps=lease_steps,
    )
    driver = Driver(exchange, team, scheduler, tokenizer, config.vocab)
    return LocalEngine(driver, team, exchange, scheduler, tokenizer, config, file, pack_path, pack, plan)


def logits_of(engine: LocalEngine, tokens: Sequence[int], rows: int = 32) -> np.ndarray:
    """Logits after each token, f32 [n, vocab], from the workers of an engine that is not started; `rows` at once."""
    engine.team.start()
    found = []
    table = range(-(-len(tokens) // 16))
    for start in range(0, len(tokens), rows):
        part = tokens[start : start + rows]
        engine.exchange.command_scored(part, start, table, len(part))
        while not engine.exchange.wait():
            assert not engine.exchange.aborted, f"the workers left with {engine.team.codes()}"
        found.append(engine.exchange.logits(len(part), engine.config.vocab).copy())
    engine.exchange.exit()
    for worker in engine.team.workers:
        assert worker.join(LEAVE_S)
    assert set(engine.team.codes()) == {0}
    return np.concatenate(found)
