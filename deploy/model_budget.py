"""One budget of memory for all models of a node: who is loaded, who may go, who waits.

In-flight requests keep a model; of idle ones the least recently used goes first. Who finds no room waits in a bounded
queue.
Knows nothing of Ray: the service runs one of these as a deployment.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from hotneuron.models.errors import EngineError

GIB = 1 << 30


class NoRoomError(EngineError):
    """All memory is taken by models at work, and the queue or its patience has ended."""


@dataclass(slots=True)
class Holder:
    """A loaded model, or one that is loading."""

    model_id: str
    n_bytes: int
    is_alive: Callable[[], Awaitable[bool]]
    in_flight: int = 1  # it is wanted for a request
    used_at: float = field(default_factory=time.monotonic)
    must_go: asyncio.Event = field(default_factory=asyncio.Event)


class ModelBudget:
    """Bytes of one node. All methods are for one event loop; holder ids are unique."""

    def __init__(self, budget_bytes: int, max_waiting: int, wait_s: float):
        self.budget_bytes, self._max_waiting, self._wait_s = budget_bytes, max_waiting, wait_s
        self._holders: dict[str, Holder] = {}
        self._waiting: list[object] = []  # in the order of their coming
        self._changed = asyncio.Condition()

    @property
    def taken_bytes(self) -> int:
        return sum(holder.n_bytes for holder in self._holders.values())

    async def reserve(
        self, holder_id: str, model_id: str, n_bytes: int, is_alive: Callable[[], Awaitable[bool]]
    ) -> None:
        """Room for a model, when idle ones have gone if need be. Raises NoRoomError."""
        if n_bytes > self.budget_bytes:
            needs = f"{model_id} needs {n_bytes / GIB:.2f} GiB, and all models may take {self.budget_bytes / GIB:.2f}"
            raise NoRoomError(f"{needs}; give more by ram_budget_gib, or a shorter context or fewer slots")
        if self._waiting and len(self._waiting) >= self._max_waiting:
            raise NoRoomError(f"{len(self._waiting)} requests already wait for memory; try again later")
        assert holder_id not in self._holders, "a holder reserves once"
        me, deadline = object(), time.monotonic() + self._wait_s
        async with self._changed:
            self._waiting.append(me)
            try:
                while self._waiting[0] is not me or not self._has_room(n_bytes):
                    if self._waiting[0] is me:
                        await self._make_room(n_bytes)
                        if self._has_room(n_bytes):
                            break
                    left_s = deadline - time.monotonic()
                    if left_s <= 0:
                        raise NoRoomError(f"no memory for {model_id} came free within {self._wait_s:g} s; try later")
                    try:
                        await asyncio.wait_for(self._changed.wait(), min(left_s, 1.0))
                    except TimeoutError:
                        continue
                self._holders[holder_id] = Holder(model_id, n_bytes, is_alive)
            finally:
                self._waiting.remove(me)
                self._changed.notify_all()

    def _has_room(self, n_bytes: int) -> bool:
        return self.taken_bytes + n_bytes <= self.budget_bytes

    async def _make_room(self, n_bytes: int) -> None:
        """Forget the dead, and ask as many idle models to go as are needed, the least recently used first."""
        for holder_id, holder in list(self._holders.items()):
            if not await holder.is_alive():
                self._holders.pop(holder_id, None)
        wanted = self.taken_bytes + n_bytes - self.budget_bytes
        wanted -= sum(holder.n_bytes for holder in self._holders.values() if holder.must_go.is_set())
        for holder in sorted(self._holders.values(), key=lambda holder: holder.used_at):
            if wanted <= 0:
                return
            if holder.in_flight == 0 and not holder.must_go.is_set():
                holder.must_go.set()
                wanted -= holder.n_bytes

    async def use(self, holder_id: str, in_flight: int) -> None:
        """How many requests a model serves now."""
        if (holder := self._holders.get(holder_id)) is not None:
            holder.in_flight, holder.used_at = in_flight, time.monotonic()
            async with self._changed:
                self._changed.notify_all()

    async def until_unwanted(self, holder_id: str) -> bool:
        """Returns when a model should make room; False where it holds nothing."""
        holder = self._holders.get(holder_id)
        if holder is None:
            return False
        await holder.must_go.wait()
        return True

    def stay(self, holder_id: str) -> None:
        """A model that was asked to go has got a request meanwhile."""
        if (holder := self._holders.get(holder_id)) is not None:
            holder.must_go.clear()

    async def release(self, holder_id: str) -> None:
        """A model is unloaded."""
        if (holder := self._holders.pop(holder_id, None)) is not None:
            holder.must_go.set()
            async with self._changed:
                self._changed.notify_all()

    def check_integrity(self) -> None:
        assert self.taken_bytes <= self.budget_bytes, "more is held than there is"
        assert all(holder.in_flight >= 0 for holder in self._holders.values())
