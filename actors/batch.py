"""What the scheduler asks of the workers in one lease, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from hotneuron.actors.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows of one sequence in a batch: `tokens` are fed at positions `start`, `start` + 1, ..."""

    slot: int
    sequence: Sequence
    start: int
    tokens: tuple[int, ...]
    sample: bool  # the last row's logits are sampled; otherwise no row's are

    @property
    def is_decode(self) -> bool:
        """One row whose logits are sampled; anything else is a prompt chunk."""
        return self.sample and len(self.tokens) == 1


@dataclass(frozen=True, slots=True)
class Batch:
    """One lease. With `lease_steps` > 1 every segment is one row, and each step feeds the token drawn by the last."""

    segments: tuple[Segment, ...]  # decode rows, then prompt chunks, each oldest request first
    lease_steps: int
    n_rows: int


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What a lease added to a sequence; the last token may be the stop id that ended it."""

    sequence: Sequence
    tokens: tuple[int, ...]
    finish_reason: str | None
