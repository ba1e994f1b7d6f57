"""The workers of one engine as Ray actors: started, watched by process id, replaced when they die."""

from __future__ import annotations

import contextlib
import os
import select
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hotneuron.actors.arena import Arena
from hotneuron.actors.exchange import Exchange
from hotneuron.models.errors import EngineError
from hotneuron.models.model_config import ModelConfig
from hotneuron.placement.plan import Plan

START_S = 120.0
LEAVE_S = 10.0


@ray.remote
class WorkerActor:
    """A `Worker` in a process of its own."""

    def __init__(self, pack_path: Path, config: ModelConfig, plan: Plan, me: int, n_threads: int):
        from hotneuron.actors.worker import Worker, compile_program, die_with_parent

        die_with_parent()
        compile_program()
        self._worker = Worker(pack_path, config, plan, me, n_threads)

    def start(self, memory: Any, arena: Arena, nonce: int) -> int:
        return self._worker.start(memory, arena, nonce)

    def join(self, timeout_s: float) -> bool:
        return self._worker.join(timeout_s)

    def describe(self) -> dict[str, int]:
        return self._worker.describe()


class RayTeam:
    """Implements `driver.Team`. Actors are owned by the driver's process: they go when it goes."""

    def __init__(self, pack_path: Path, config: ModelConfig, plan: Plan, n_threads: int, group: PlacementGroup):
        self._args = (pack_path, config, plan)
        self._n_threads, self._group = n_threads, group
        self._actors: list[Any] = [self._create(me) for me in range(plan.n_workers)]
        self._pidfds: list[int] = []
        self._started = False
        self._exchange: Exchange | None = None
        self._memory_ref: Any = None

    def connect(self, exchange: Exchange, memory_ref: Any) -> None:
        self._exchange, self._memory_ref = exchange, memory_ref

    def _create(self, me: int) -> Any:
        strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=me + 1)
        options = {"num_cpus": self._n_threads, "scheduling_strategy": strategy, "name": None, "max_concurrency": 2}
        return WorkerActor.options(**options).remote(*self._args, me, self._n_threads)  # type: ignore[attr-defined]

    def start(self) -> None:
        exchange = self._exchange
        assert exchange is not None
        if self._started:
            self._replace_lost()
        exchange.reset()
        try:
            calls = [a.start.remote(self._memory_ref, exchange.arena, exchange.nonce) for a in self._actors]
            pids = ray.get(calls, timeout=START_S)
        except ray.exceptions.RayTaskError as error:
            raise EngineError(f"a worker could not start: {error.cause}") from None
        except ray.exceptions.RayError as error:
            raise EngineError(f"a worker could not start: {str(error).splitlines()[0]}") from None
        self._close()
        self._pidfds = [os.pidfd_open(pid) for pid in pids]
        self._started = True

    def _replace_lost(self) -> None:
        """Everyone has left the step, or is replaced."""
        calls = [actor.join.remote(LEAVE_S) for actor in self._actors]
        for me, call in enumerate(calls):
            try:
                left = ray.get(call, timeout=2 * LEAVE_S)
            except ray.exceptions.RayError:
                left = False
            if not left:
                ray.kill(self._actors[me])
                self._actors[me] = self._create(me)

    def has_dead(self) -> bool:
        poll = select.poll()
        for fd in self._pidfds:
            poll.register(fd, select.POLLIN)
        return bool(poll.poll(0))

    def describe(self) -> list[dict[str, int]]:
        return ray.get([actor.describe.remote() for actor in self._actors], timeout=START_S)

    def stop(self) -> None:
        self._close()
        for actor in self._actors:
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(actor)

    def _close(self) -> None:
        for fd in self._pidfds:
            os.close(fd)
        self._pidfds = []
