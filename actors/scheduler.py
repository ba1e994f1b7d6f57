"""Which tokens the workers compute next. Knows requests and blocks; never sees a tensor or a worker.

Running sequences are always older than waiting ones, blocks are given to the oldest first, and only the youngest is
ever preempted. So the oldest request advances in every batch, and nothing starves or deadlocks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListLike
from itertools import pairwise

from hotneuron.actors.batch import Batch, Segment, SequenceUpdate
from hotneuron.actors.kv_blocks import KVBlocks
from hotneuron.actors.messages import Request
from hotneuron.actors.sequence import Sequence, Status
from hotneuron.models.errors import RequestError


class Scheduler:
    """Continuous batching with chunked prompts: schedule, run the batch, complete, again.

    At most one batch is under way. `add`, `cancel` and `finish` may be called meanwhile: blocks given back then are not
    given out before the next `schedule`, so workers that still write to them harm nobody.
    """

    def __init__(
        self,
        kv: KVBlocks,
        *,
        context_tokens: int,
        stop_ids: frozenset[int],
        max_slots: int = 8,
        chunk_tokens: int = 512,
        lease_steps: int = 8,
        max_queue: int = 512,
        clock: Callable[[], float] = time.monotonic,
    ):
        for name, value, low in (
            ("context_tokens", context_tokens, 2),
            ("max_slots", max_slots, 1),
            # One block is left for a prompt when all other slots decode.
            ("chunk_tokens", chunk_tokens, max_slots - 1 + kv.block_tokens),
            ("lease_steps", lease_steps, 1),
            ("max_queue", max_queue, 1),
        ):
            if value < low:
                raise RequestError(f"{name}={value} is too small; give at least {low}")
        self.kv = kv
        self.context_tokens = context_tokens
        self.stop_ids = stop_ids
        self.max_slots = max_slots
        self.chunk_tokens = chunk_tokens
        self.lease_steps = lease_steps
        self.max_queue = max_queue
        self.n_preemptions = 0
        self._clock = clock
        self._n_arrivals = 0
        self._by_id: dict[str, Sequence] = {}
        self._waiting: deque[Sequence] = deque()  # oldest first
        self._running: list[Sequence] = []  # oldest first
        self._free_slots: list[int] = list(range(max_slots - 1, -1, -1))
        self._batch: Batch | None = None  # under way

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    @property
    def n_running(self) -> int:
        return len(self._running)

    @property
    def n_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> Sequence:
        """Queues a request. Raises RequestError if it can never be served, or not now because the queue is full."""
        n_prompt = len(request.prompt)
        if n_prompt >= self.context_tokens:
            raise RequestError(
                f"the prompt has {n_prompt} tokens, and the context of {self.context_tokens} must hold it and at least "
                "one token of the answer; shorten the prompt or give a larger context (-c)"
            )
        if n_prompt >= self.kv.n_tokens:
            raise RequestError(
                f"the prompt has {n_prompt} tokens, and the KV cache of {self.kv.n_tokens} must hold it and at least "
                "one token of the answer; shorten the prompt or give the KV cache more memory"
            )
        if request.request_id in self._by_id:
            raise RequestError(f"request_id={request.request_id!r} is already being served; give each request its own")
        if len(self._waiting) >= self.max_queue:
            raise RequestError(f"the queue is full ({self.max_queue} requests wait); try again later")
        limit_tokens = min(n_prompt + request.max_tokens, self.context_tokens, self.kv.n_tokens)
        sequence = Sequence(request, self._n_arrivals, limit_tokens, self._clock())
        self._n_arrivals += 1
        self._by_id[request.request_id] = sequence
        self._waiting.append(sequence)
        return sequence

    def cancel(self, request_id: str) -> Sequence | None:
        """Ends a request wherever it is. None if it is not there (any more)."""
        return self.finish(request_id, "cancel")

    def finish(self, request_id: str, reason: str) -> Sequence | None:
        """Ends a request for a reason only the driver knows, such as a stop string. None if it is not there."""
        sequence = self._by_id.get(request_id)
        if sequence is not None:
            self._end(sequence, reason)
        return sequence

    def schedule(self) -> Batch | None:
        """The next batch, its KV blocks allocated; None if there is nothing to do."""
        assert self._batch is None, "schedule while a batch is under way"
        if not self._by_id:
            return None
        segments: list[Segment] = []
        n_rows_left = self.chunk_tokens - sum(sequence.n_pending_tokens == 1 for sequence in self._running)
        index = 0
        while index < len(self._running):  # preempting shortens the list from its young end
            sequence = self._running[index]
            index += 1
            n_rows = 1
            if sequence.n_pending_tokens > 1:
                self._reuse_prefix(sequence)
                n_rows = self._chunk_rows(sequence, n_rows_left)
                n_rows_left -= n_rows
            if n_rows and self._make_room(sequence, n_rows):
                segments.append(_segment(sequence, n_rows))
        while n_rows_left >= self.kv.block_tokens and (admitted := self._admit()) is not None:
            n_rows = self._chunk_rows(admitted, n_rows_left)
            n_rows_left -= n_rows
            has_room = self.kv.extend(admitted, admitted.n_computed_tokens + n_rows)
            assert has_room, "admitted without room"
            segments.append(_segment(admitted, n_rows))
        assert segments, "requests, but nothing to compute"
        n_steps = 1
        if all(segment.is_decode for segment in segments):
            n_steps = self._lease(segments)
        else:
            segments.sort(key=lambda segment: not segment.is_decode)  # stable: both kinds stay in order of age
        self._batch = Batch(tuple(segments), n_steps, sum(len(segment.tokens) for segment in segments))
        return self._batch

    def complete(self, batch: Batch, sampled: Mapping[int, ListLike[int]]) -> list[SequenceUpdate]:
        """Takes in what the workers drew: per sampled slot 1 to `lease_steps` tokens, oldest first.

        Tokens after a stop id or past the request's limit are dropped. A slot that is left out counts as not run: its
        rows are fed again. Requests that ended meanwhile are passed over.
        """
        assert self._batch is not None and batch is self._batch, "complete for a batch that is not under way"
        self._batch = None
        updates: list[SequenceUpdate] = []
        for segment in batch.segments:
            sequence = segment.sequence
            if sequence.status is not Status.RUNNING:
                continue
            n_computed = segment.start + len(segment.tokens)
            if not segment.sample:
                sequence.n_computed_tokens = n_computed
                self.kv.mark_computed(sequence)
                continue
            drawn = sampled.get(segment.slot, ())
            if not drawn:
                continue
            assert len(drawn) <= batch.lease_steps, "more tokens than steps"
            tokens, reason = self._accept(sequence, drawn)
            sequence.tokens += tokens
            sequence.n_computed_tokens = n_computed + len(tokens) - 1  # the newest token has not been fed
            if sequence.first_token_s is None:
                sequence.first_token_s = self._clock()
            self.kv.mark_computed(sequence)
            if reason is not None:
                self._end(sequence, reason)
            updates.append(SequenceUpdate(sequence, tokens, reason))
        return updates

    def reset_after_loss(self) -> None:
        """Workers lost their KV: every running request goes back to the queue, to be computed anew from its tokens.

        Ages, and so the order of service, stay. A batch under way is void: it must not be completed any more.
        """
        self._batch = None
        while self._running:
            self._withdraw(self._running[-1])
        self.kv.forget_all()

    def check_integrity(self) -> None:
        """Asserts that each request, slot and block is in exactly one place."""
        self.kv.check_integrity(self._running)
        by_age = [*self._running, *self._waiting]
        assert all(a.order < b.order for a, b in pairwise(by_age)), "ages out of order"
        assert set(by_age) == set(self._by_id.values()), "a request is lost"
        slots = [sequence.slot for sequence in self._running if sequence.slot is not None]
        assert sorted([*slots, *self._free_slots]) == list(range(self.max_slots)), "a slot is lost or held twice"
        for sequence in self._running:
            assert sequence.status is Status.RUNNING and sequence.n_pending_tokens >= 1
            n_odd_rows = sequence.n_computed_tokens % self.kv.block_tokens
            assert sequence.n_pending_tokens == 1 or n_odd_rows == 0, "a prompt chunk ended inside a block"
            assert self.kv.n_missing_blocks(sequence, sequence.n_computed_tokens) == 0, "rows without a block"
        for sequence in self._waiting:
            assert sequence.status is Status.WAITING and sequence.slot is None and sequence.n_computed_tokens == 0
        for sequence in by_age:
            assert sequence.n_remaining_tokens > 0, "a finished request is still here"

    def _chunk_rows(self, sequence: Sequence, n_rows_left: int) -> int:
        """Rows of the next chunk. All but the last are whole blocks, so that others can share them at once."""
        if sequence.n_pending_tokens <= n_rows_left:
            return sequence.n_pending_tokens
        return n_rows_left - n_rows_left % self.kv.block_tokens

    def _reuse_prefix(self, sequence: Sequence) -> None:
        n_cached = self.kv.allocate(sequence)
        if sequence.first_token_s is None:
            sequence.n_cached_tokens += n_cached

    def _make_room(self, sequence: Sequence, n_rows: int) -> bool:
        """Blocks for the sequence's next rows, at the cost of younger ones; False if it is itself the youngest."""
        while not self.kv.extend(sequence, sequence.n_computed_tokens + n_rows):
            youngest = self._running[-1]
            self.n_preemptions += 1
            self._withdraw(youngest)
            if youngest is sequence:
                return False
        return True

    def _admit(self) -> Sequence | None:
        """Starts the oldest waiting request if a slot and blocks for all its tokens are there; none overtakes it."""
        if not self._waiting or not self._free_slots:
            return None
        sequence = self._waiting[0]
        size = self.kv.block_tokens
        n_reserved = sum(
            self.kv.n_missing_blocks(other, min(other.n_tokens + size, other.limit_tokens)) for other in self._running
        )
        if not self.kv.can_allocate(sequence, n_reserved):
            return None
        self._waiting.popleft()
        self._running.append(sequence)
        sequence.slot = self._free_slots.pop()
        sequence.status = Status.RUNNING
        if sequence.started_s is None:
            sequence.started_s = self._clock()
        self._reuse_prefix(sequence)
        return sequence

    def _lease(self, segments: list[Segment]) -> int:
        """How many steps all sequences can take before the driver must look again; allocates their blocks."""
        sequences = [segment.sequence for segment in segments]
        n_steps = min(self.lease_steps, min(sequence.n_remaining_tokens for sequence in sequences))
        if any(sequence.n_generated_tokens == 0 for sequence in sequences):
            n_steps = 1  # somebody waits for a first token
        while n_steps > 1 and self.kv.n_available_blocks < sum(
            self.kv.n_missing_blocks(sequence, sequence.n_computed_tokens + n_steps) for sequence in sequences
        ):
            n_steps -= 1
        for sequence in sequences:
            has_room = self.kv.extend(sequence, sequence.n_computed_tokens + n_steps)
            assert has_room, "leased without room"
        return n_steps

    def _accept(self, sequence: Sequence, drawn: ListLike[int]) -> tuple[tuple[int, ...], str | None]:
        n_remaining = sequence.n_remaining_tokens
        tokens = tuple(drawn[:n_remaining])
        if not sequence.request.ignore_eos:
            for index, token in enumerate(tokens):
                if token in self.stop_ids:
                    return tokens[: index + 1], "stop"
        return tokens, "length" if len(tokens) == n_remaining else None

    def _withdraw(self, sequence: Sequence) -> None:
        """Puts the youngest running sequence back at the head of the queue, keeping its tokens."""
        assert sequence is self._running[-1], "only the youngest may be withdrawn"
        self._running.pop()
        self._vacate(sequence)
        sequence.status = Status.WAITING
        if sequence.first_token_s is None:
            sequence.n_cached_tokens = 0
        self._waiting.appendleft(sequence)

    def _end(self, sequence: Sequence, reason: str) -> None:
        if sequence.status is Status.RUNNING:
            self._running.remove(sequence)
            self._vacate(sequence)
        else:
            self._waiting.remove(sequence)
        del self._by_id[sequence.request_id]
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        sequence.finished_s = self._clock()

    def _vacate(self, sequence: Sequence) -> None:
        assert sequence.slot is not None
        self._free_slots.append(sequence.slot)
        sequence.slot = None
        self.kv.release(sequence)


def _segment(sequence: Sequence, n_rows: int) -> Segment:
    assert sequence.slot is not None
    start = sequence.n_computed_tokens
    end = start + n_rows
    return Segment(sequence.slot, sequence, start, tuple(sequence.tokens[start:end]), end == sequence.n_tokens)
