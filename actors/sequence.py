"""One request on its way through the engine: its tokens, how far they are computed, and where its KV rows lie."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from hotneuron.actors.messages import Request, Timings


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request's state in the scheduler; positions are absolute, from the prompt's first token.

    `tokens` is prompt + generated (a drawn stop id included). The KV rows of the first `n_computed_tokens` exist; the
    rest are still to be fed, so a sequence that is decoding has exactly one pending token, the newest.
    """

    request: Request
    order: int  # arrival number: smaller is older
    limit_tokens: int  # prompt + generated may not grow past this
    submitted_s: float
    tokens: list[int] = field(default_factory=list)
    n_computed_tokens: int = 0
    n_cached_tokens: int = 0  # prompt tokens that came from the prefix cache, as it was for the first token
    block_table: list[int] = field(default_factory=list)  # NOTE: only grows between admission and release
    n_hashed_blocks: int = 0  # leading blocks that KVBlocks has looked at for sharing
    slot: int | None = None
    status: Status = Status.WAITING
    finish_reason: str | None = None
    started_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None

    def __post_init__(self) -> None:
        if not self.tokens:
            self.tokens = list(self.request.prompt)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def n_tokens(self) -> int:
        return len(self.tokens)

    @property
    def n_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def n_generated_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def generated(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    @property
    def n_pending_tokens(self) -> int:
        return len(self.tokens) - self.n_computed_tokens

    @property
    def n_remaining_tokens(self) -> int:
        """How many tokens may still be drawn."""
        return self.limit_tokens - len(self.tokens)

    def timings(self) -> Timings:
        """The request's timings, as far as it has come; what has not happened yet counts 0 s."""
        started_s = self.submitted_s if self.started_s is None else self.started_s
        first_s = started_s if self.first_token_s is None else self.first_token_s
        return Timings(
            prompt_tokens=self.n_prompt_tokens,
            cached_tokens=self.n_cached_tokens,
            generated_tokens=self.n_generated_tokens,
            first_token_s=0.0 if self.first_token_s is None else first_s - self.submitted_s,
            prompt_s=first_s - started_s,
            generation_s=0.0 if self.finished_s is None else self.finished_s - first_s,
        )
