"""The arena's layout: one shared-memory object with everything that the driver and the workers of an engine say.

    header      magic, version, nonce; the abort word, the command and done counters, each on its own cache line
    workers     a cache line each: meeting counter, process id
    command     the batch: numbers, one line a segment, one entry a row, block tables, sampling settings, histories
    results     tokens and logprobs of a lease, logits
    slots       two banks of [worker][row][width] f32 partial sums
    activity    what fired, where only active neurons are computed; where the time went, if that is traced

One writer per cache line. Offsets are in bytes from the arena's start, int64 words unless said.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hotneuron.kernels.formats import padded
from hotneuron.kernels.sampling import OUT_BYTES, SAMPLING_BYTES
from hotneuron.placement.histogram import BINS

MAGIC, VERSION = 0x686F746E6575726F, 1
LINE, PAGE = 64, 4096

# Header.
MAGIC_AT, VERSION_AT, NONCE_AT = 0, 8, 16
ABORT_AT = LINE  # OK, or why everyone must leave the step
COMMAND_AT = 2 * LINE  # number of commands given; its low half is the workers' futex
DONE_AT = 3 * LINE  # number of commands done; its low half is the driver's futex
STEPS_AT = 4 * LINE  # steps of the running lease that are complete
WORKERS_AT = PAGE  # line w: counter, process id

# Command, from `Arena.command`.
KIND, N_ROWS, N_SEGMENTS, LEASE_STEPS, N_LOGIT_ROWS, N_STOP = (8 * i for i in range(6))
RUN, EXIT = 0, 1
SEGMENT_WORDS = 8
SEGMENT_SLOT, SEGMENT_ROW, SEGMENT_COUNT, SEGMENT_HISTORY, SEGMENT_LAST, SEGMENT_IGNORE_STOP = (8 * i for i in range(6))

MAX_STOP_IDS = 64
MAX_LEASE = 32
HISTORY_TOKENS = 256
MAX_WORKERS = 16
COUNTED, LISTS, LISTED = (8 * i for i in range(3))  # rows seen, lists made for them, neurons in these lists
TRACED_PHASES = 16


@dataclass(frozen=True, slots=True)
class Arena:
    """Sizes of one engine's arena, and from them every offset. Sent to the workers rather than derived twice."""

    n_workers: int
    max_rows: int  # rows of a batch, a multiple of 8
    max_slots: int
    max_blocks: int  # KV blocks of one sequence
    max_logit_rows: int  # a multiple of 8
    width: int  # hidden size, padded to 16 floats
    vocab: int  # padded to 16
    n_layers: int = 0
    neurons: int = 0  # of a layer, whose activity is counted; 0: of none
    has_histogram: bool = False
    is_traced: bool = False
    command: int = field(init=False)
    segments: int = field(init=False)
    stop_ids: int = field(init=False)  # int32
    tokens: int = field(init=False)  # int32 [max_rows]
    positions: int = field(init=False)  # int32 [max_rows]
    row_slots: int = field(init=False)  # int32 [max_rows]
    logit_rows: int = field(init=False)  # int32 [max_logit_rows]: row
    logit_segments: int = field(init=False)  # int32 [max_logit_rows]: segment that draws from it, or -1
    tables: int = field(init=False)  # int32 [max_slots][max_blocks]
    sampling: int = field(init=False)  # [max_slots][SAMPLING_BYTES]
    history: int = field(init=False)  # int32 [max_slots][HISTORY_TOKENS + MAX_LEASE]
    drawn: int = field(init=False)  # int32 [MAX_LEASE][max_slots]
    logprobs: int = field(init=False)  # [MAX_LEASE][max_slots][OUT_BYTES]
    logits: int = field(init=False)  # f32 [max_logit_rows][vocab]
    slots: int = field(init=False)  # f32 [2][n_workers][max_rows][width]
    fires: int = field(init=False)  # int32 [n_layers][neurons], positions as in the pack
    adds: int = field(init=False)  # f32 [n_layers][neurons]
    layer_counts: int = field(init=False)  # a line for [worker][layer]
    histogram: int = field(init=False)  # int64 [worker][layer][BINS]
    trace: int = field(init=False)  # int64 [worker][TRACED_PHASES] ns
    n_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        assert 1 <= self.n_workers <= MAX_WORKERS and self.max_rows % 8 == 0 and self.max_logit_rows % 8 == 0
        sizes = {
            "command": LINE,
            "segments": self.max_slots * SEGMENT_WORDS * 8,
            "stop_ids": MAX_STOP_IDS * 4,
            "tokens": self.max_rows * 4,
            "positions": self.max_rows * 4,
            "row_slots": self.max_rows * 4,
            "logit_rows": self.max_logit_rows * 4,
            "logit_segments": self.max_logit_rows * 4,
            "tables": self.max_slots * self.max_blocks * 4,
            "sampling": self.max_slots * SAMPLING_BYTES,
            "history": self.max_slots * (HISTORY_TOKENS + MAX_LEASE) * 4,
            "drawn": MAX_LEASE * self.max_slots * 4,
            "logprobs": MAX_LEASE * self.max_slots * OUT_BYTES,
            "logits": self.max_logit_rows * self.vocab * 4,
            "slots": 2 * self.n_workers * self.max_rows * self.width * 4,
            "fires": self.n_layers * self.neurons * 4,
            "adds": self.n_layers * self.neurons * 4,
            "layer_counts": self.n_workers * self.n_layers * LINE if self.neurons else 0,
            "histogram": self.n_workers * self.n_layers * BINS * 8 if self.has_histogram else 0,
            "trace": self.n_workers * TRACED_PHASES * 8 if self.is_traced else 0,
        }
        at = WORKERS_AT + padded(MAX_WORKERS * LINE, PAGE)
        for name, size in sizes.items():
            object.__setattr__(self, name, at)
            at += padded(size, LINE)
        object.__setattr__(self, "n_bytes", padded(at, PAGE))

    def history_of(self, slot: int) -> int:
        return self.history + slot * (HISTORY_TOKENS + MAX_LEASE) * 4

    def bank_bytes(self) -> int:
        return self.n_workers * self.max_rows * self.width * 4
