"""The driver as a Ray actor: owns the arena and the workers of one engine, and speaks in streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import ray

from hotneuron.actors.arena import Arena
from hotneuron.actors.messages import Chunk, Request
from hotneuron.models.model_config import ModelConfig
from hotneuron.placement.plan import Plan


@ray.remote
class DriverActor:
    """Everything but `generate` answers once; `generate` streams chunks."""

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

    async def generate(self, request: Request) -> AsyncIterator[Chunk]:
        chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def hand_over(chunk: Chunk) -> None:
            loop.call_soon_threadsafe(chunks.put_nowait, chunk)

        self._driver.submit(request, hand_over)
        finished = False
        try:
            while not finished:
                chunk = await chunks.get()
                finished = chunk.finish_reason is not None
                yield chunk
        finally:
            if not finished:
                self._driver.cancel(request.request_id)

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
