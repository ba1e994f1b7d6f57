"""The workers of one engine as Ray actors: started, watched by process id, replaced when they die."""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hotneuron.actors import process
from hotneuron.models.errors import EngineError

if TYPE_CHECKING:
    from hotneuron.actors.arena import Arena
    from hotneuron.actors.exchange import Exchange
    from hotneuron.actors.worker import Worker
    from hotneuron.models.model_config import ModelConfig
    from hotneuron.placement.plan import Plan

    ShardOf = tuple[Path, ModelConfig, Plan]  # the pack, and what a worker takes its shard from

START_S = 120.0
LEAVE_S = 10.0


@ray.remote
class WorkerActor:
    """A `Worker` in a process of its own."""

    def __init__(self, me: int, n_threads: int):
        process.begin()
        from hotneuron.actors.worker import compile_program

        self._me, self._n_threads = me, n_threads
        self._worker: Worker | None = None
        self._shard_of: ShardOf | None = None
        compile_program()

    def start(self, shard_of: ShardOf, memory: Any, arena: Arena, nonce: int) -> dict[str, int]:
        from hotneuron.actors.worker import Worker

        if self._worker is not None and not self._worker.join(LEAVE_S):
            raise EngineError("a worker does not leave its step")
        if self._worker is None or self._shard_of != shard_of:
            self._worker = None  # its memory goes before the next one's is taken
            self._worker, self._shard_of = Worker(*shard_of, self._me, self._n_threads), shard_of
        self._worker.start(memory, arena, nonce)
        return self._worker.describe()

    def serve(self) -> None:
        """Returns when all threads have left the program.

        It keeps this process's main thread, which Ray would wake a hundred times a second to look for signals.
        """
        assert self._worker is not None
        self._worker.join(None)


class RayTeam:
    """Implements `driver.Team`. Actors are owned by the driver's process: they go when it goes."""

    def __init__(self, n_workers: int, n_threads: int, group: PlacementGroup, worker_cpus: float):
        self.n_workers = n_workers
        self._n_threads, self._group, self._worker_cpus = n_threads, group, worker_cpus
        self._actors: list[Any] = [self._create(me) for me in range(n_workers)]
        self._workers: list[dict[str, int]] = []
        self._pidfds: list[int] = []
        self._serving: list[Any] = []
        self._shard_of: ShardOf | None = None
        self._exchange: Exchange | None = None
        self._memory_ref: Any = None

    def connect(self, shard_of: ShardOf, exchange: Exchange, memory_ref: Any) -> None:
        """What the workers compute, and where they meet. Before `start`."""
        self._exchange, self._memory_ref = exchange, memory_ref
        self.hold(shard_of)

    def hold(self, shard_of: ShardOf) -> None:
        """From the next start on, the workers hold these shards."""
        self._shard_of = shard_of

    def _create(self, me: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=me + 1)
        options = {"num_cpus": self._worker_cpus, "scheduling_strategy": strategy}
        return WorkerActor.options(**options).remote(me, self._n_threads)  # type: ignore[attr-defined]

    def start(self) -> None:
        exchange = self._exchange
        assert exchange is not None
        self._replace_lost()
        exchange.reset()
        try:
            where = self._memory_ref, exchange.arena, exchange.nonce
            calls = [actor.start.remote(self._shard_of, *where) for actor in self._actors]
            self._workers = ray.get(calls, timeout=START_S)
        except ray.exceptions.RayTaskError as error:
            raise EngineError(f"a worker could not start: {error.cause}") from None
        except ray.exceptions.RayError as error:
            raise EngineError(f"a worker could not start: {str(error).splitlines()[0]}") from None
        self._close()
        self._pidfds = [os.pidfd_open(worker["pid"]) for worker in self._workers]
        self._serving = [actor.serve.remote() for actor in self._actors]

    def _replace_lost(self) -> None:
        """Everyone has left the step, or is replaced."""
        self.leave()
        dead = self._dead()
        for me, serving in enumerate(self._serving):
            try:
                ray.get(serving, timeout=0)
                has_left = self._pidfds[me] not in dead
            except ray.exceptions.RayError:
                has_left = False
            if not has_left:
                ray.kill(self._actors[me])
                self._actors[me] = self._create(me)

    def leave(self) -> None:
        if self._serving:
            ray.wait(self._serving, num_returns=len(self._serving), timeout=LEAVE_S)

    def has_dead(self) -> bool:
        return bool(self._dead())

    def _dead(self) -> set[int]:
        """Of `_pidfds`, those whose process has ended."""
        poll = select.poll()
        for fd in self._pidfds:
            poll.register(fd, select.POLLIN)
        return {fd for fd, _ in poll.poll(0)}

    def describe(self) -> list[dict[str, int]]:
        return self._workers

    def stop(self) -> None:
        self._close()
        for actor in self._actors:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)

    def _close(self) -> None:
        for fd in self._pidfds:
            os.close(fd)
        self._pidfds = []
