"""The driver as a Ray actor: owns the arena and the workers of one engine, and speaks in streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import ray

from hotneuron.actors.arena import Arena
from hotneuron.actors.messages import Chunk, Request
from hotneuron.models.model_config import ModelConfig
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

    def __init__(self, model_path: Path, pack_path: Path, config: ModelConfig, plan: Plan, n_threads: int, arena: Arena,
                 scheduling: dict[str, Any], group: Any):  # fmt: skip
        # The workers' processes start while this one still imports.
        from hotneuron.actors.team import RayTeam

        team = RayTeam(pack_path, config, plan, n_threads, group)
        from hotneuron.actors.driver import Driver
        from hotneuron.actors.exchange import Exchange
        from hotneuron.actors.kv_blocks import KVBlocks
        from hotneuron.actors.scheduler import Scheduler
        from hotneuron.actors.worker import die_with_parent
        from hotneuron.models.gguf_file import GGUFFile
        from hotneuron.models.tokenizer import Tokenizer

        die_with_parent()
        self._team, self._plan = team, plan
        self._clients: dict[str, _Client] = {}
        tokenizer = Tokenizer.from_metadata(GGUFFile.open(model_path).metadata, str(model_path))
        self._arena_ref = ray.put(np.zeros(arena.n_bytes, np.uint8))
        exchange = Exchange(ray.get(self._arena_ref), arena)
        team.connect(exchange, self._arena_ref)
        kv = KVBlocks(plan.kv_tokens // 16)
        stop_ids = frozenset(tokenizer.stop_ids)
        scheduler = Scheduler(kv, context_tokens=plan.context_tokens, stop_ids=stop_ids, **scheduling)
        self._driver = Driver(exchange, team, scheduler, tokenizer, config.vocab)

    async def start(self) -> None:
        await asyncio.to_thread(self._driver.start)

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

        self._driver.submit(request, lambda chunk: loop.call_soon_threadsafe(deliver, chunk))

    async def cancel(self, request_id: str) -> None:
        self._driver.cancel(request_id)

    async def score(self, tokens: list[int], first: int) -> np.ndarray:
        return await asyncio.wrap_future(self._driver.score(tokens, first))

    async def stats(self) -> dict[str, Any]:
        return self._driver.stats()

    async def describe(self) -> dict[str, Any]:
        workers = await asyncio.to_thread(self._team.describe)
        return {"workers": workers, "plan": asdict(self._plan), "stats": self._driver.stats()}

    async def stop(self) -> None:
        await asyncio.to_thread(self._driver.stop)
