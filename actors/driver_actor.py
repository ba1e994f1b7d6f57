"""The driver as a Ray actor: owns the arena and the workers of one engine, and speaks in streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
from ray.util.placement_group import PlacementGroup

from hotneuron.actors import process
from hotneuron.actors.messages import Chunk, Request
from hotneuron.actors.team import RayTeam

if TYPE_CHECKING:
    from pathlib import Path

    from hotneuron.actors.activity import Activity
    from hotneuron.actors.preparation import Launch
    from hotneuron.models.pack import Pack
    from hotneuron.placement.plan import Plan


@dataclass(slots=True)
class _Client:
    """What waits to be sent to one client. Touched by the event loop only."""

    chunks: list[tuple[str, Chunk]] = field(default_factory=list)
    unfinished: set[str] = field(default_factory=set)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    closed: bool = False


@ray.remote
class DriverActor:
    """Everything but `chunks` answers once; `chunks` streams."""

    def __init__(self, n_workers: int, n_threads: int, group: PlacementGroup, worker_cpus: float):
        process.begin()
        # The workers' processes start while this one still imports.
        self._team = RayTeam(n_workers, n_threads, group, worker_cpus)
        self._clients: dict[str, _Client] = {}
        self._activity_before: Activity | None = None  # what fired before the last replanning

    async def start(self, launch: Launch) -> None:
        """Brings every worker to its first command. Raises EngineError, and the errors of the model's file."""
        await asyncio.to_thread(self._start, launch)

    def _start(self, launch: Launch) -> None:
        from hotneuron.actors.driver import Driver
        from hotneuron.actors.exchange import Exchange
        from hotneuron.actors.kv_blocks import KVBlocks
        from hotneuron.actors.preparation import lay_out
        from hotneuron.actors.scheduler import Scheduler
        from hotneuron.models.gguf_file import GGUFFile
        from hotneuron.models.pack import Pack
        from hotneuron.models.tokenizer import Tokenizer

        engine_config, config = launch.engine_config, launch.config
        self._path, self._pack, self._config = launch.pack_path, Pack(launch.pack_path), config
        self._plan, arena = lay_out(self._pack, launch, self._team.n_workers)
        memory_ref = ray.put(np.zeros(arena.n_bytes, np.uint8))
        self._exchange = exchange = Exchange(ray.get(memory_ref), arena)
        self._team.connect((launch.pack_path, config, self._plan), exchange, memory_ref)
        file = GGUFFile.open(engine_config.model_path)
        tokenizer = Tokenizer.from_metadata(file.metadata, str(file.path), decode_only=True)
        scheduler = Scheduler(
            KVBlocks(self._plan.kv_tokens // 16),
            context_tokens=self._plan.context_tokens,
            stop_ids=frozenset(tokenizer.stop_ids),
            max_slots=engine_config.max_slots,
            chunk_tokens=min(arena.max_rows, max(engine_config.chunk_tokens, engine_config.max_slots + 16)),
            lease_steps=engine_config.lease_steps,
        )
        self._driver = Driver(exchange, self._team, scheduler, tokenizer, config.vocab)
        self._driver.start()

    async def chunks(self, client_id: str) -> AsyncIterator[list[tuple[str, Chunk]]]:
        """All chunks of one client's requests, those of a lease in one item: an item costs Ray a millisecond.

        When the stream is closed or dropped, the client's unfinished requests are cancelled.
        """
        client = self._clients[client_id] = _Client()
        try:
            while not client.closed:
                await client.arrived.wait()
                client.arrived.clear()
                chunks, client.chunks = client.chunks, []
                yield chunks
        finally:
            del self._clients[client_id]
            for request_id in client.unfinished:
                self._driver.cancel(request_id)

    async def close(self, client_id: str) -> None:
        """End a client's stream."""
        if (client := self._clients.get(client_id)) is not None:
            client.closed = True
            client.arrived.set()

    async def submit(self, client_id: str, request: Request) -> None:
        """Serve a request; its chunks go to the client's stream."""
        client, loop = self._clients[client_id], asyncio.get_running_loop()
        client.unfinished.add(request.request_id)

        def deliver(chunk: Chunk) -> None:
            client.chunks.append((request.request_id, chunk))
            if chunk.finish_reason is not None:
                client.unfinished.discard(request.request_id)
            client.arrived.set()

        def hand_over(chunk: Chunk) -> None:
            loop.call_soon_threadsafe(deliver, chunk)

        self._driver.submit(request, hand_over)

    async def cancel(self, request_id: str) -> None:
        self._driver.cancel(request_id)

    async def score(self, tokens: list[int], first: int) -> np.ndarray:
        return await asyncio.wrap_future(self._driver.score(tokens, first))

    async def logprobs(self, tokens: list[int], first: int) -> np.ndarray:
        return await asyncio.wrap_future(self._driver.logprobs(tokens, first))

    async def stats(self) -> dict[str, Any]:
        return self._driver.stats()

    async def describe(self) -> dict[str, Any]:
        import psutil

        workers = [
            worker | {"resident_bytes": psutil.Process(worker["pid"]).memory_info().rss}
            for worker in self._team.describe()
        ]
        return {"workers": workers, "plan": asdict(self._plan), "stats": self._driver.stats()}

    async def replan(self, launch: Launch) -> None:
        """Give the workers the shards of another pack and other cuts; streams go on where they were.

        Raises EngineError where the workers cannot start with them: then they hold what they held before.
        """
        await asyncio.wrap_future(await asyncio.to_thread(self._replan, launch))

    def _replan(self, launch: Launch) -> Future[None]:
        from hotneuron.actors.preparation import lay_out
        from hotneuron.models.pack import Pack

        pack = Pack(launch.pack_path)
        plan, arena = lay_out(pack, launch, self._team.n_workers)
        assert arena == self._exchange.arena
        before = self._path, self._pack, self._plan

        def move() -> None:
            if arena.neurons:
                self._activity_before = self._activity()
                self._exchange.clear_activity()
            self._hold(launch.pack_path, pack, plan)

        return self._driver.replan(move, lambda: self._hold(*before))

    def _hold(self, path: Path, pack: Pack, plan: Plan) -> None:
        self._path, self._pack, self._plan = path, pack, plan
        self._team.hold((path, self._config, plan))

    async def activity(self) -> Activity:
        """What has fired so far, by the neurons of the model's file. Raises RequestError where all are computed."""
        return self._activity()

    def _activity(self) -> Activity:
        from hotneuron.actors.activity import Activity
        from hotneuron.models.errors import RequestError

        if not self._exchange.arena.neurons:
            raise RequestError("all neurons of this model are computed, so nothing is counted; see --sparse")
        now = Activity.of(self._exchange.activity(), self._pack, self._plan, self._config.ffn)
        return now if self._activity_before is None else self._activity_before + now

    async def breakdown(self) -> list[dict[str, float]]:
        """Seconds that each worker's first thread spent in each phase."""
        from hotneuron.actors.fields import PHASES

        return [dict(zip(PHASES, (ns / 1e9).tolist(), strict=False)) for ns in self._exchange.trace_ns()]

    async def stop(self) -> None:
        await asyncio.to_thread(self._driver.stop)
