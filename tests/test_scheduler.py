"""The scheduler against workers that remember what lies in every KV row, and so notice any row that is wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from hotneuron.actors.batch import Batch
from hotneuron.actors.kv_blocks import KVBlocks
from hotneuron.actors.messages import Request
from hotneuron.actors.scheduler import Scheduler
from hotneuron.actors.sequence import Sequence, Status
from hotneuron.models.errors import RequestError

STOP = 9


def grown(state: int, token: int) -> int:
    """What a KV row holds: a digest of its token and of all rows before it."""
    return hash((state, token))


def drawn_after(state: int) -> int:
    """The fake model's next token: 0 to 3, and the stop id once in about 40."""
    return STOP if state // 64 % 40 == 0 else state // 7 % 4


def answer(sequence: Sequence) -> tuple[list[int], str]:
    """The answer that an undisturbed request gets, and why it ends."""
    state = 0
    for token in sequence.request.prompt:
        state = grown(state, token)
    tokens: list[int] = []
    while len(sequence.request.prompt) + len(tokens) < sequence.limit_tokens:
        tokens.append(drawn_after(state))
        if tokens[-1] == STOP and not sequence.request.ignore_eos:
            return tokens, "stop"
        state = grown(state, tokens[-1])
    return tokens, "length"


@dataclass
class Row:
    slot: int
    start: int
    tokens: tuple[int, ...]
    sample: bool
    before: list[int]  # the tokens that precede `tokens`
    table: list[int]
    ignore_eos: bool


@dataclass
class FakeWorkers:
    """Runs batches from a snapshot, as real workers do, and checks each prefix row that a segment would attend to."""

    block_tokens: int
    states: dict[tuple[int, int], int] = field(default_factory=dict)  # (block, offset) -> row

    def take(self, batch: Batch) -> None:
        self.lease_steps = batch.lease_steps
        self.rows = [
            Row(s.slot, s.start, s.tokens, s.sample, s.sequence.tokens[: s.start], list(s.sequence.block_table),
                s.sequence.request.ignore_eos)
            for s in batch.segments
        ]  # fmt: skip

    def place(self, row: Row, position: int) -> tuple[int, int]:
        return row.table[position // self.block_tokens], position % self.block_tokens

    def run(self, overshoot: bool = False) -> dict[int, list[int]]:
        """The tokens drawn per sampled slot; `overshoot` goes on after a stop id."""
        sampled: dict[int, list[int]] = {}
        written: set[tuple[int, int]] = set()
        for row in self.rows:
            state = 0
            for position, token in enumerate(row.before):
                state = grown(state, token)
                assert self.states.get(self.place(row, position)) == state, f"row {position} is not this sequence's"
            feed, position, drawn = list(row.tokens), row.start, []
            for _ in range(self.lease_steps):
                for token in feed:
                    state = grown(state, token)
                    place = self.place(row, position)
                    assert place not in written, "two rows of one batch in one place"
                    written.add(place)
                    self.states[place] = state
                    position += 1
                if not row.sample:
                    break
                drawn.append(drawn_after(state))
                if drawn[-1] == STOP and not row.ignore_eos and not overshoot:
                    break
                feed = drawn[-1:]
            if row.sample:
                sampled[row.slot] = drawn
        return sampled


class Bench:
    """A scheduler, its fake workers, and every sequence ever added."""

    def __init__(self, n_blocks: int = 64, block_tokens: int = 4, **options):
        self.kv = KVBlocks(n_blocks, block_tokens)
        options = {"context_tokens": 128, "stop_ids": frozenset({STOP}), "chunk_tokens": 24, "max_slots": 4} | options
        self.scheduler = Scheduler(self.kv, **options)
        self.workers = FakeWorkers(block_tokens)
        self.sequences: list[Sequence] = []
        self.streams: dict[int, list[int]] = {}
        self.batches: list[Batch] = []
        self.fed: list[tuple[tuple[int, int, int, tuple[int, ...], bool], ...]] = []

    def add(self, prompt, max_tokens: int = 10, **options) -> Sequence:
        request = Request(str(len(self.sequences)), tuple(prompt), max_tokens, **options)
        sequence = self.scheduler.add(request)
        self.sequences.append(sequence)
        self.streams[sequence.order] = []
        return sequence

    def schedule(self) -> Batch | None:
        alive = [sequence for sequence in self.sequences if sequence.status is not Status.FINISHED]
        batch = self.scheduler.schedule()
        self.scheduler.check_integrity()
        if batch is None:
            assert not alive
            return None
        self.batches.append(batch)
        self.fed.append(tuple((s.slot, s.sequence.order, s.start, s.tokens, s.sample) for s in batch.segments))
        segments = batch.segments
        assert segments and batch.n_rows == sum(len(s.tokens) for s in segments) <= self.scheduler.chunk_tokens
        assert len({s.slot for s in segments}) == len(segments) <= self.scheduler.max_slots
        decode = [s.is_decode for s in segments]
        assert decode == sorted(decode, reverse=True), "decode rows come first"
        assert 1 <= batch.lease_steps <= (self.scheduler.lease_steps if all(decode) else 1)
        assert min(alive, key=lambda s: s.order) in [s.sequence for s in segments], "the oldest request waits"
        for s in segments:
            end = s.start + len(s.tokens)
            assert s.tokens == tuple(s.sequence.tokens[s.start : end]) and s.tokens
            assert s.sample == (end == s.sequence.n_tokens)
            assert end + batch.lease_steps - 1 <= len(s.sequence.block_table) * self.kv.block_tokens
            assert end + batch.lease_steps <= s.sequence.limit_tokens
        self.workers.take(batch)
        return batch

    def complete(self, batch: Batch, sampled) -> None:
        for update in self.scheduler.complete(batch, sampled):
            self.streams[update.sequence.order] += update.tokens
            assert update.tokens and update.finish_reason == update.sequence.finish_reason
        self.scheduler.check_integrity()

    def step(self, overshoot: bool = False) -> Batch | None:
        batch = self.schedule()
        if batch is not None:
            self.complete(batch, self.workers.run(overshoot))
        return batch

    def drain(self) -> None:
        for _ in range(20_000):
            if self.step() is None:
                break
        else:
            raise AssertionError("never done")
        self.check_all_done()

    def check_all_done(self) -> None:
        """Every answer is the undisturbed one, and every block and slot is back."""
        for sequence in self.sequences:
            tokens, reason = answer(sequence)
            assert sequence.status is Status.FINISHED and not sequence.block_table and sequence.slot is None
            assert sequence.generated == self.streams[sequence.order]
            if sequence.finish_reason in ("stop", "length"):
                assert (sequence.generated, sequence.finish_reason) == (tokens, reason)
            else:
                assert sequence.generated == tokens[: sequence.n_generated_tokens]
        self.scheduler.check_integrity()
        self.kv.check_integrity()
        assert self.kv.n_available_blocks == self.kv.n_blocks and not self.scheduler.has_work


class TestAdd:
    def test_prompt_must_leave_room_for_an_answer(self):
        """One token below the context is served; at the context is refused, naming both and the remedy."""
        bench = Bench(context_tokens=32)
        bench.add([1] * 31)
        with pytest.raises(RequestError, match=r"32 tokens.*context of 32.*-c"):
            bench.add([1] * 32)
        bench.drain()

    def test_prompt_must_fit_the_blocks(self):
        """A prompt that all blocks together cannot hold is refused at once instead of waiting for ever."""
        bench = Bench(n_blocks=3, block_tokens=4)
        bench.add([1] * 11)
        with pytest.raises(RequestError, match=r"12 tokens.*KV cache of 12"):
            bench.add([1] * 12)
        bench.drain()

    def test_queue_is_bounded(self):
        """The request beyond max_queue is refused and leaves no trace; running ones do not count."""
        bench = Bench(max_queue=3)
        for _ in range(3):
            bench.add([1])
        with pytest.raises(RequestError, match="queue is full"):
            bench.add([1])
        bench.schedule()
        assert bench.scheduler.n_waiting == 0 and bench.scheduler.n_running == 3
        for _ in range(3):
            bench.add([1])

    def test_request_id_is_unique_among_the_living(self):
        """An id is refused while its request lives and free again afterwards."""
        scheduler = Bench().scheduler
        request = Request("same", (1, 2), 1)
        scheduler.add(request)
        with pytest.raises(RequestError, match="'same'"):
            scheduler.add(request)
        (update,) = scheduler.complete(scheduler.schedule(), {0: [5]})
        assert update.finish_reason == "length"
        scheduler.add(request)

    @pytest.mark.parametrize("name", ["context_tokens", "max_slots", "chunk_tokens", "lease_steps", "max_queue"])
    def test_options_are_validated(self, name):
        with pytest.raises(RequestError, match=f"{name}=0"):
            Bench(**{name: 0})


class TestChunks:
    @pytest.mark.parametrize("n_prompt", [1, 2, 3, 4, 5, 23, 24, 25, 47, 48, 49, 100, 119])
    @pytest.mark.parametrize("block_tokens", [1, 4, 16])
    def test_each_prompt_token_is_fed_exactly_once(self, n_prompt, block_tokens):
        """Chunks cover the prompt without gap or overlap, and only the last row is sampled."""
        bench = Bench(n_blocks=128, block_tokens=block_tokens)
        sequence = bench.add([i % 7 for i in range(n_prompt)])
        fed: list[int] = []
        while len(fed) < n_prompt:
            (segment,) = bench.step().segments
            assert segment.start == len(fed)
            fed += segment.tokens
            assert segment.sample == (len(fed) == n_prompt)
        assert tuple(fed) == sequence.request.prompt
        bench.drain()

    def test_unfinished_chunks_end_with_a_block(self):
        """So the next chunk can take over blocks that somebody else has computed meanwhile."""
        bench = Bench(chunk_tokens=23, block_tokens=8)
        bench.add(range(100))
        bench.add(range(100, 190))
        bench.drain()
        ends = [start + len(tokens) for fed in bench.fed for _, _, start, tokens, sample in fed if not sample]
        assert ends and all(end % 8 == 0 for end in ends)

    def test_decoding_goes_on_beside_a_long_prompt(self):
        """A running request draws a token in every batch while another's prompt is read in chunks."""
        bench = Bench()
        runner = bench.add([1, 2, 3], max_tokens=40, ignore_eos=True)
        bench.step()
        bench.add(range(20, 120))
        n_batches = 0
        while bench.sequences[1].n_generated_tokens == 0:
            n_before = runner.n_generated_tokens
            batch = bench.step()
            assert batch.lease_steps == 1 and runner.n_generated_tokens == n_before + 1
            n_batches += 1
        assert n_batches == 5  # 100 tokens, 20 of 24 rows each: one row decodes and 23 hold five blocks of four
        bench.drain()

    def test_prompts_are_read_first_come_first_served(self):
        """First tokens come in the order of arrival when prompts are equally long."""
        bench = Bench(max_slots=3)
        for i in range(8):
            bench.add([i * 50 + j for j in range(40)], max_tokens=3, ignore_eos=True)
        order: list[int] = []
        while bench.step():
            order += [s.order for s in bench.sequences if s.n_generated_tokens and s.order not in order]
        assert order == list(range(8))


class TestLease:
    @pytest.mark.parametrize("max_tokens", [1, 2, 7, 8, 9, 17, 40])
    def test_lease_never_passes_the_budget(self, max_tokens):
        """Pure decoding takes full leases, and the last one is as short as what is left."""
        bench = Bench()
        bench.add([1, 2, 3], max_tokens=max_tokens, ignore_eos=True)
        bench.drain()
        leases = [batch.lease_steps for batch in bench.batches[1:]]
        assert sum(leases) == max_tokens - 1 and all(lease == 8 for lease in leases[:-1])

    def test_lease_is_as_short_as_the_shortest_request(self):
        """No slot of a lease would run past its request's limit."""
        bench = Bench()
        bench.add([1, 2, 3], max_tokens=4, ignore_eos=True)
        bench.add([4, 5, 6], max_tokens=30, ignore_eos=True)
        assert [bench.step().lease_steps for _ in range(4)] == [1, 3, 8, 8]

    def test_lease_shrinks_before_anyone_is_preempted(self):
        """With room for a few more rows only, the lease is cut to them."""
        bench = Bench(n_blocks=6, block_tokens=4)
        bench.add(range(7), max_tokens=20, ignore_eos=True)
        bench.add(range(10, 17), max_tokens=3, ignore_eos=True)
        bench.step()
        bench.scheduler.check_integrity()
        assert bench.kv.n_available_blocks == 2
        bench.sequences[1].limit_tokens = 24  # as if it had asked for more
        assert bench.step().lease_steps == 5 and bench.scheduler.n_preemptions == 0
        bench.drain()

    def test_kv_is_computed_up_to_the_newest_token(self):
        """After a lease of n steps from position p, rows p to p + n - 1 exist and one token is pending."""
        bench = Bench()
        sequence = bench.add([1, 2, 3], max_tokens=40, ignore_eos=True)
        bench.step()
        assert (sequence.n_tokens, sequence.n_computed_tokens) == (4, 3)
        bench.step()
        assert (sequence.n_tokens, sequence.n_computed_tokens) == (12, 11)

    def test_first_token_is_not_held_back_by_a_lease(self):
        """A prompt of one pending token is a decode row, but who waits for a first token gets it after one step."""
        bench = Bench()
        bench.add([1], max_tokens=20, ignore_eos=True)
        assert bench.step().lease_steps == 1
        assert bench.step().lease_steps == 8
        bench.drain()


class TestEnd:
    def prompt_that_stops(self, low: int, high: int) -> list[int]:
        """A prompt whose answer ends by itself after `low` to `high` tokens."""
        for first in range(10_000):
            sequence = Sequence(Request("r", (first, 1, 2), 100), 0, 103, 0.0)
            tokens, reason = answer(sequence)
            if reason == "stop" and low <= len(tokens) <= high:
                return [first, 1, 2]
        raise AssertionError

    @pytest.mark.parametrize("overshoot", [False, True])
    def test_stop_id_ends_the_answer_and_what_follows_is_dropped(self, overshoot):
        """Also when workers went on after the stop id, which itself stays as the last token."""
        bench = Bench()
        sequence = bench.add(self.prompt_that_stops(4, 7), max_tokens=100)
        while bench.step(overshoot):
            pass
        bench.check_all_done()
        assert sequence.finish_reason == "stop" and sequence.generated[-1] == STOP
        assert sequence.generated.count(STOP) == 1

    def test_ignore_eos_goes_on(self):
        """With ignore_eos a stop id is a token like any other."""
        bench = Bench()
        sequence = bench.add(self.prompt_that_stops(1, 10), max_tokens=50, ignore_eos=True)
        bench.drain()
        assert sequence.finish_reason == "length" and sequence.n_generated_tokens == 50 and STOP in sequence.generated

    def test_stop_id_as_the_last_allowed_token_counts_as_stop(self):
        """The model's own end wins over the limit."""
        prompt = self.prompt_that_stops(4, 7)
        n_tokens = len(answer(Sequence(Request("r", tuple(prompt), 100), 0, 103, 0.0))[0])
        bench = Bench()
        sequence = bench.add(prompt, max_tokens=n_tokens)
        bench.drain()
        assert sequence.finish_reason == "stop" and sequence.n_remaining_tokens == 0

    @pytest.mark.parametrize(("context", "n_blocks", "n_answer"), [(20, 64, 17), (128, 4, 13)])
    def test_full_context_or_cache_ends_with_length(self, context, n_blocks, n_answer):
        """Prompt and answer together fill the smaller of context and KV cache, and no more."""
        bench = Bench(context_tokens=context, n_blocks=n_blocks)
        sequence = bench.add([1, 2, 3], max_tokens=1000, ignore_eos=True)
        bench.drain()
        assert sequence.finish_reason == "length" and sequence.n_generated_tokens == n_answer

    @pytest.mark.parametrize("when", ["waiting", "between", "under way"])
    def test_cancel_gives_everything_back(self, when):
        """A request can be cancelled at any time; drawn tokens that arrive later are passed over."""
        bench = Bench(max_slots=1)
        other, victim = (bench.add([i, 1, 2, 3, 4], max_tokens=30, ignore_eos=True) for i in (1, 2))
        if when == "waiting":
            bench.step()
        else:
            other, victim = victim, other
            bench.step()
        batch = bench.schedule() if when == "under way" else None
        n_before = victim.n_generated_tokens
        assert bench.scheduler.cancel(victim.request_id) is victim
        assert bench.scheduler.cancel(victim.request_id) is None
        if batch:
            bench.complete(batch, bench.workers.run())
        assert victim.finish_reason == "cancel" and victim.n_generated_tokens == n_before
        bench.drain()
        assert other.finish_reason == "length"

    def test_finish_keeps_the_drivers_reason(self):
        """A stop string found by the driver ends the request as `stop`, and its prefix stays in the cache."""
        bench = Bench()
        sequence = bench.add(range(20), max_tokens=90, ignore_eos=True)
        bench.step()
        assert bench.scheduler.finish("0", "stop").finish_reason == "stop" and sequence.finished_s is not None
        assert bench.scheduler.schedule() is None
        again = bench.add(range(20))
        bench.step()
        assert again.n_cached_tokens == 16

    def test_timings_follow_the_clock(self):
        """Waiting, prompt and answer are told apart."""
        now = [100.0]
        bench = Bench(clock=lambda: now[0])
        sequence = bench.add([1, 2, 3], max_tokens=9, ignore_eos=True)
        now[0] += 1
        batch = bench.schedule()
        now[0] += 2
        bench.complete(batch, bench.workers.run())
        now[0] += 4
        bench.drain()
        timings = sequence.timings()
        assert (timings.first_token_s, timings.prompt_s, timings.generation_s) == (3, 2, 4)
        assert (timings.prompt_tokens, timings.cached_tokens, timings.generated_tokens) == (3, 0, 9)
        assert timings.generation_per_s == 2


class TestPrefixReuse:
    def test_second_request_skips_the_shared_prefix(self):
        """Only what differs is fed, the answer is the same as without the cache, and the count is exact."""
        bench = Bench()
        bench.add([*range(50), 60, 61])
        bench.drain()
        second = bench.add([*range(50), 70, 71])
        bench.drain()
        assert second.n_cached_tokens == 48
        fed = [(start, tokens) for fed in bench.fed for _, order, start, tokens, _ in fed if order == second.order]
        assert fed[0] == (48, (48, 49, 70, 71))

    def test_follow_up_turn_reuses_the_answer_too(self):
        """A chat's next prompt contains the last answer, whose rows are in the cache already."""
        bench = Bench()
        first = bench.add(range(10), max_tokens=30, ignore_eos=True)
        bench.drain()
        second = bench.add([*first.tokens, 50, 51])
        bench.drain()
        assert second.n_cached_tokens == 36  # of 40, whose last was drawn but never fed

    def test_requests_that_come_together_share_as_soon_as_rows_exist(self):
        """Eight equal long prompts at once are read little more than once."""
        bench = Bench(n_blocks=400, max_slots=8, chunk_tokens=32)
        for i in range(8):
            bench.add([*range(1000, 1100), i], max_tokens=4, ignore_eos=True)
        bench.drain()
        n_fed = sum(len(tokens) for fed in bench.fed for _, _, start, tokens, _ in fed if start < 101)
        assert n_fed < 8 * 101 / 3

    def test_table_only_grows_while_running(self):
        """Workers may be sent the new blocks alone: those already in a table stay where they are."""
        bench = Bench(n_blocks=400, max_slots=8, chunk_tokens=32)
        for i in range(8):
            bench.add([*range(1000, 1100), i], max_tokens=12, ignore_eos=True)
        tables: dict[int, list[int]] = {}
        while batch := bench.schedule():
            for segment in batch.segments:
                table = segment.sequence.block_table
                before = tables.get(segment.sequence.order, [])
                assert table[: len(before)] == before
                tables[segment.sequence.order] = list(table)
            bench.complete(batch, bench.workers.run())
        assert bench.scheduler.n_preemptions == 0
        bench.check_all_done()


class TestPreemption:
    @pytest.mark.parametrize("n_blocks", [8, 9, 12, 17])
    @pytest.mark.parametrize("seed", range(3))
    def test_storm_with_tiny_kv_ends_with_the_right_answers(self, n_blocks, seed):
        """Far too many requests for the blocks: some are thrown out again and again, all end, none is wrong."""
        dice = random.Random(seed)
        bench = Bench(n_blocks=n_blocks, max_slots=6, chunk_tokens=16)
        for _ in range(25):
            prompt = dice.choices(range(3), k=dice.randint(1, 9))
            bench.add(prompt, max_tokens=dice.randint(1, 40), ignore_eos=True)
        bench.drain()
        assert bench.scheduler.n_preemptions > 0

    def test_the_youngest_makes_way_and_is_next_in_line(self):
        """Older requests never pay for younger ones, and who was thrown out comes before who never ran."""
        bench = Bench(n_blocks=8, max_slots=3)
        for i in range(4):
            bench.add([i, 1, 2], max_tokens=29, ignore_eos=True)
        ends: list[int] = []
        while bench.step():
            ends += [s.order for s in bench.sequences if s.finished_s is not None and s.order not in ends]
        assert ends == [0, 1, 2, 3] and bench.scheduler.n_preemptions > 0
        bench.check_all_done()

    def test_prompts_that_do_not_fit_together_are_read_one_after_the_other(self):
        """Blocks that a prompt will need are spoken for: a second one is not started only to be thrown out."""
        bench = Bench(n_blocks=20, block_tokens=4, chunk_tokens=28)
        for i in range(3):
            bench.add(range(i * 100, i * 100 + 40), max_tokens=8, ignore_eos=True)
        bench.drain()
        assert bench.scheduler.n_preemptions == 0

    def test_drawn_tokens_survive(self):
        """A preempted request keeps its tokens: its stream has no repetition and no gap."""
        bench = Bench(n_blocks=8, max_slots=2)
        bench.add([1, 2, 3], max_tokens=29, ignore_eos=True)
        young = bench.add([4, 5, 6], max_tokens=20, ignore_eos=True)
        while bench.scheduler.n_preemptions == 0:
            n_before = young.n_generated_tokens
            bench.step()
        assert young.n_generated_tokens == n_before > 0 and young.n_computed_tokens == 0
        bench.drain()


class TestFairness:
    def test_nobody_starves_under_a_flood(self):
        """With newcomers in every step, each request waits only for those that came before it."""
        dice = random.Random(1)
        bench = Bench(n_blocks=12, max_slots=3, max_queue=10_000)
        big = None
        for step in range(600):
            bench.add(dice.choices(range(3), k=dice.randint(1, 5)), max_tokens=5)
            if step == 20:
                big = bench.add(range(10, 40), max_tokens=15, ignore_eos=True)
            bench.step()
        assert big is not None and big.status is Status.FINISHED
        started = [s.order for s in sorted(bench.sequences, key=lambda s: s.order) if s.started_s is not None]
        assert started == list(range(len(started))), "somebody overtook"
        bench.drain()

    def test_same_input_gives_the_same_batches(self):
        """Nothing depends on time, hash seeds or chance."""

        def trace():
            dice = random.Random(3)
            bench = Bench(n_blocks=12, max_slots=3)
            for _ in range(40):
                bench.add(dice.choices(range(3), k=dice.randint(1, 20)), max_tokens=dice.randint(1, 20))
                bench.step()
            bench.drain()
            return bench.fed

        assert trace() == trace()


class TestLoss:
    def test_answers_are_as_if_nothing_had_happened(self):
        """After a loss all running requests are computed anew from their tokens, in the old order."""
        bench = Bench()
        for i in range(6):
            bench.add([i, 1, 2, 3, 4, 5], max_tokens=40, ignore_eos=True)
        for _ in range(5):
            bench.step()
        running = [s.order for s in bench.sequences if s.status is Status.RUNNING]
        assert len(running) == 4
        bench.schedule()
        bench.workers.states.clear()
        bench.scheduler.reset_after_loss()
        bench.scheduler.check_integrity()
        assert bench.scheduler.n_running == 0 and bench.kv.n_available_blocks == bench.kv.n_blocks
        batch = bench.step()
        assert [s.sequence.order for s in batch.segments] == running[: len(batch.segments)]
        assert all(s.start == 0 for s in batch.segments)
        bench.drain()

    def test_tokens_drained_before_the_loss_count(self):
        """Completing with the part that arrived and then resetting neither loses nor repeats a token."""
        bench = Bench()
        sequence = bench.add([1, 2, 3], max_tokens=40, ignore_eos=True)
        bench.step()
        batch = bench.schedule()
        sampled = {slot: tokens[:3] for slot, tokens in bench.workers.run().items()}
        bench.complete(batch, sampled)
        assert sequence.n_generated_tokens == 4
        bench.workers.states.clear()
        bench.scheduler.reset_after_loss()
        bench.drain()

    def test_lost_rows_do_not_count_as_cached(self):
        """A prompt whose cached prefix is lost while it is read is computed in full, and its timings say so."""
        bench = Bench()
        bench.add(range(50))
        bench.drain()
        second = bench.add(range(100))
        bench.step()
        assert second.n_cached_tokens == 48 and second.n_generated_tokens == 0
        bench.workers.states.clear()
        bench.scheduler.reset_after_loss()
        bench.drain()
        assert second.timings().cached_tokens == 0

    def test_void_batch_cannot_be_completed(self):
        """After a reset, late results must not be taken in."""
        bench = Bench()
        bench.add([1, 2, 3])
        batch = bench.schedule()
        bench.scheduler.reset_after_loss()
        with pytest.raises(AssertionError, match="not under way"):
            bench.scheduler.complete(batch, bench.workers.run())

    def test_one_batch_at_a_time(self):
        bench = Bench()
        bench.add([1, 2, 3])
        bench.schedule()
        with pytest.raises(AssertionError, match="under way"):
            bench.scheduler.schedule()


class TestRandomLife:
    @pytest.mark.parametrize(
        ("n_steps", "n_blocks", "block_tokens", "max_slots"), [(10_000, 10, 4, 3), (4_000, 40, 4, 8), (3_000, 90, 1, 5)]
    )
    def test_random_steps(self, n_steps, n_blocks, block_tokens, max_slots):
        """Submit, cancel, finish, partial leases and losses in any order: every row right, nothing leaked."""
        dice = random.Random(n_blocks)
        bench = Bench(n_blocks, block_tokens, max_slots=max_slots, chunk_tokens=16, context_tokens=80, max_queue=20)
        stems = [dice.choices(range(3), k=20) for _ in range(3)]
        counts = dict.fromkeys(["full", "lost", "cut", "cancel"], 0)

        def disturb() -> None:
            if dice.random() < 0.35:
                prompt = dice.choice(stems)[: dice.randint(1, 20)] + dice.choices(range(3), k=dice.randint(0, 5))
                try:
                    bench.add(prompt, max_tokens=dice.randint(1, 50), ignore_eos=dice.random() < 0.3)
                except RequestError:
                    counts["full"] += 1
            if dice.random() < 0.03 and bench.sequences:
                victim = dice.choice(bench.sequences[-20:])
                was_alive = victim.status is not Status.FINISHED
                verb = dice.choice([bench.scheduler.cancel, lambda i: bench.scheduler.finish(i, "stop string")])
                assert (verb(victim.request_id) is victim) == was_alive
                counts["cancel"] += was_alive

        for _ in range(n_steps):
            disturb()
            batch = bench.schedule()
            if batch is None:
                continue
            sampled = bench.workers.run(overshoot=dice.random() < 0.3)
            disturb()
            if dice.random() < 0.03:  # results get lost on the way, wholly or in part
                sampled = {slot: tokens[: dice.randint(0, len(tokens))] for slot, tokens in sampled.items()}
                counts["cut"] += 1
            lost = dice.random() < 0.01
            if not lost or dice.random() < 0.5:
                bench.complete(batch, sampled)
            if lost:
                bench.workers.states.clear()
                bench.scheduler.reset_after_loss()
                counts["lost"] += 1
        bench.drain()
        reasons = {sequence.finish_reason for sequence in bench.sequences}
        assert reasons == {"stop", "length", "cancel", "stop string"}
        assert min(counts.values()) > 10 and bench.kv.n_hit_blocks > 100, counts
        if n_blocks == 10:
            assert bench.scheduler.n_preemptions > 100
