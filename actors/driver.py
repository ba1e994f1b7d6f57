"""The driver: takes requests, runs the token steps, gives back streams. Schedule, step, sample, emit.

Everything here runs on one thread, `run`; other threads only put things into its inbox. Knows nothing of Ray or HTTP.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

import numpy as np

from hotneuron.actors.arena import MAX_LEASE
from hotneuron.actors.batch import Batch, SequenceUpdate
from hotneuron.actors.exchange import Exchange
from hotneuron.actors.messages import Chunk, Request, TokenLogprob
from hotneuron.actors.scheduler import Scheduler
from hotneuron.actors.stream import Stream
from hotneuron.models.errors import EngineError, HotneuronError, RequestError
from hotneuron.models.tokenizer import Tokenizer

LEASE_S = 0.06  # how long the workers run without the driver: what a reader does not notice
MAX_RECOVERIES = 3  # in a row, without a token between them
IDLE_S = 1.0


class Team(Protocol):
    """The workers, as the driver sees them."""

    def start(self) -> None:
        """Bring every worker to its first command, replacing those that died. Raises EngineError."""

    def leave(self) -> None:
        """After an abort of the exchange: wait until no worker runs, but for lost ones."""

    def has_dead(self) -> bool:
        """Whether a worker's process has ended."""

    def stop(self) -> None: ...


class WorkerLost(Exception):
    """A worker died or is late; the batch under way is void."""


class Driver:
    """Runs one model. `submit`, `cancel`, `score` and `stop` may be called from any thread."""

    def __init__(self, exchange: Exchange, team: Team, scheduler: Scheduler, tokenizer: Tokenizer, vocab: int):
        self._exchange, self._team, self._scheduler, self._tokenizer = exchange, team, scheduler, tokenizer
        self._vocab = vocab
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._idle_jobs: list[Callable[[], None]] = []
        self._streams: dict[str, Stream] = {}
        self._max_lease = min(scheduler.lease_steps, MAX_LEASE)
        self._recoveries = 0
        self._failure: str | None = None  # why every request is refused from now on
        self._stopping = False
        self._checked = True
        self.n_steps, self.step_s, self.outside_s = 0, 0.0, 0.0
        self._thread = threading.Thread(target=self._run, name="hotneuron-driver", daemon=True)
        exchange.set_stop_ids(sorted(scheduler.stop_ids))

    def start(self) -> None:
        self._team.start()
        self._thread.start()

    def submit(self, request: Request, sink: Callable[[Chunk], None]) -> None:
        """Serve a request; `sink` gets its chunks on the driver's thread, the last one with a finish reason."""
        self._inbox.put(lambda: self._accept(request, sink))

    def cancel(self, request_id: str) -> None:
        self._inbox.put(lambda: self._cancel(request_id))

    def score(self, tokens: ListLike[int], first: int) -> Future[np.ndarray]:
        """Log-probabilities of tokens[first + 1:], each given all before it. Runs when nothing else does."""
        return self._when_idle(partial(self._score, tokens, first, _logprobs_of))

    def logprobs(self, tokens: ListLike[int], first: int) -> Future[np.ndarray]:
        """The same of the whole vocabulary: f32 [tokens after first + 1, vocab]."""
        return self._when_idle(partial(self._score, tokens, first, lambda logits, _: _all_logprobs(logits)))

    def _when_idle(self, compute: Callable[[], np.ndarray]) -> Future[np.ndarray]:
        future: Future[np.ndarray] = Future()
        job = partial(self._resolve, future, compute)
        self._inbox.put(lambda: self._idle_jobs.append(job))
        return future

    def replan(self, move: Callable[[], None], undo: Callable[[], None]) -> Future[None]:
        """Between two leases: let the workers leave, `move` what they hold, start them; streams go on where they were.

        If they do not start after it, `undo` and the start after that are as after a loss, and the future raises.
        """
        future: Future[None] = Future()
        self._inbox.put(partial(self._replan, move, undo, future))
        return future

    def stop(self) -> None:
        self._inbox.put(lambda: setattr(self, "_stopping", True))
        self._thread.join(10)
        self._team.stop()

    def stats(self) -> dict[str, Any]:
        return {
            "steps": self.n_steps,
            "step_s": self.step_s,
            "outside_s": self.outside_s,
            "recoveries": self._recoveries,
            "running": self._scheduler.n_running,
            "waiting": self._scheduler.n_waiting,
        }

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._turn()
            except WorkerLost:
                self._recover()
            except Exception as error:  # a defect, but nobody shall wait for ever
                logging.getLogger(__name__).exception("the driver failed")
                self._fail(f"the driver failed: {error!r}")
        self._fail("the engine was stopped")

    def _turn(self) -> None:
        self._take_inbox()
        began = time.perf_counter()
        batch = self._scheduler.schedule()
        if batch is None:
            return
        inside = self._step(batch)
        drawn = self._exchange.drawn(batch)
        logprobs = self._logprobs(batch, drawn)
        updates = self._scheduler.complete(batch, drawn)
        if updates:
            self._recoveries = 0
        self._emit(updates, logprobs)
        self._account(batch, drawn, inside, time.perf_counter() - began)

    def _take_inbox(self) -> None:
        """Handle everything that came in; with nothing to compute, sleep until something does."""
        while True:
            try:
                if self._scheduler.has_work or self._idle_jobs or self._stopping:
                    self._inbox.get_nowait()()
                else:
                    self._inbox.get(timeout=IDLE_S)()
                    self._checked = False
            except queue.Empty:
                if self._scheduler.has_work or self._stopping:
                    return
                if self._idle_jobs:
                    self._idle_jobs.pop(0)()
                elif not self._checked:
                    self._scheduler.check_integrity()
                    self._checked = True
                elif self._failure is None and self._team.has_dead():
                    self._recover()

    def _step(self, batch: Batch) -> float:
        """Run a batch on the workers; returns the seconds it took them."""
        began = time.perf_counter()
        self._exchange.command(batch)
        self._await_workers()
        return time.perf_counter() - began

    def _await_workers(self) -> None:
        while not self._exchange.wait():
            if self._exchange.aborted or self._team.has_dead():
                raise WorkerLost

    def _logprobs(self, batch: Batch, drawn: dict[int, list[int]]) -> dict[str, list[TokenLogprob]]:
        found = {}
        for segment in batch.segments:
            request = segment.sequence.request
            if segment.sample and request.sampling.logprobs is not None:
                found[request.request_id] = [
                    TokenLogprob(token, *self._exchange.logprobs(segment.slot, step))
                    for step, token in enumerate(drawn[segment.slot])
                ]
        return found

    def _emit(self, updates: list[SequenceUpdate], logprobs: dict[str, list[TokenLogprob]]) -> None:
        for update in updates:
            request_id = update.sequence.request_id
            finish = partial(self._scheduler.finish, request_id)
            found = logprobs.get(request_id, [])
            if self._streams[request_id].push(update.sequence, update.tokens, found, update.finish_reason, finish):
                del self._streams[request_id]

    def _account(self, batch: Batch, drawn: dict[int, list[int]], inside: float, whole: float) -> None:
        steps = max((len(tokens) for tokens in drawn.values()), default=1)
        self.n_steps += steps
        self.step_s += inside
        self.outside_s += whole - inside
        if all(segment.is_decode for segment in batch.segments):
            self._scheduler.lease_steps = max(1, min(self._max_lease, round(LEASE_S * steps / inside)))

    def _accept(self, request: Request, sink: Callable[[Chunk], None]) -> None:
        try:
            worst = max(max(request.prompt), max((token for token, _ in request.sampling.logit_bias), default=0))
            if self._failure is not None:
                raise EngineError(self._failure)
            if min(request.prompt) < 0 or worst >= self._vocab:
                raise RequestError(f"a token id is outside 0 to {self._vocab - 1}")
            self._scheduler.add(request)
        except HotneuronError as error:
            sink(Chunk("", (), finish_reason="error", error=str(error)))
            return
        self._streams[request.request_id] = Stream(request, self._tokenizer, sink)

    def _cancel(self, request_id: str) -> None:
        sequence = self._scheduler.cancel(request_id)
        if sequence is not None:
            self._streams.pop(request_id).end(sequence, "cancel")

    def _recover(self) -> None:
        """Replace what died and compute the unfinished sequences anew: streams go on where they were."""
        self._exchange.abort()
        self._recoveries += 1
        try:
            if self._recoveries > MAX_RECOVERIES:
                raise EngineError(f"the workers failed {MAX_RECOVERIES} times in a row; see their logs")
            self._team.start()
            self._scheduler.reset_after_loss()
        except EngineError as error:
            self._fail(str(error))

    def _replan(self, move: Callable[[], None], undo: Callable[[], None], future: Future[None]) -> None:
        if self._failure is not None:
            return future.set_exception(EngineError(self._failure))
        self._exchange.abort()
        self._team.leave()
        try:
            move()
            self._team.start()
        except HotneuronError as error:
            undo()
            self._recover()
            future.set_exception(error)
        else:
            self._scheduler.reset_after_loss()
            future.set_result(None)

    def _fail(self, why: str) -> None:
        """End every request, and refuse those that come."""
        self._failure = self._failure or why
        for request_id, stream in self._streams.items():
            self._scheduler.finish(request_id, "error")
            stream.fail(self._failure)
        self._streams.clear()

    def _resolve(self, future: Future[Any], compute: Callable[[], Any]) -> None:
        for _ in range(MAX_RECOVERIES):
            try:
                if self._failure is not None:
                    raise EngineError(self._failure)
                future.set_result(compute())
                return
            except WorkerLost:
                self._recover()
            except HotneuronError as error:
                future.set_exception(error)
                return
        future.set_exception(EngineError("the workers failed while scoring"))

    def _score(
        self, tokens: ListLike[int], first: int, read: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """`read` makes of logits, f32 [n, vocab], and the tokens that came next, [n], what is asked for."""
        if len(tokens) > self._scheduler.context_tokens:
            context = self._scheduler.context_tokens
            raise RequestError(f"{len(tokens)} tokens do not fit the context of {context}; give a larger -c")
        if not tokens or not 0 <= min(tokens) <= max(tokens) < self._vocab:
            raise RequestError(f"tokens to score must be ids from 0 to {self._vocab - 1}, at least one")
        kv, arena = self._scheduler.kv, self._exchange.arena
        kv.forget_all()  # nothing runs, so every block is free
        table = range(-(-len(tokens) // kv.block_tokens))
        found: list[np.ndarray] = []
        at = 0
        while at < len(tokens) - 1:
            scored = at >= first
            end = min(len(tokens) - 1, at + arena.max_logit_rows if scored else min(first, at + arena.max_rows))
            n_logits = end - at if scored else 0
            self._exchange.command_scored(tokens[at:end], at, table, n_logits)
            self._await_workers()
            if scored:
                targets = np.asarray(tokens[at + 1 : end + 1])
                found.append(read(self._exchange.logits(n_logits, self._vocab), targets))
            at = end
        return np.concatenate(found) if found else np.zeros(0, np.float32)


def _logprobs_of(logits: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """log softmax(logits)[targets], row by row."""
    return logits[np.arange(len(targets)), targets] - _log_sums(logits)


def _all_logprobs(logits: np.ndarray) -> np.ndarray:
    return logits - _log_sums(logits)[:, None]


def _log_sums(logits: np.ndarray) -> np.ndarray:
    """log of the sum of exp, f32 [rows]."""
    top = logits.max(axis=1)
    return (top + np.log(np.exp(logits - top[:, None]).sum(axis=1, dtype=np.float64))).astype(np.float32)
