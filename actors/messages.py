"""Every message between front ends, driver and workers: frozen, validated once, where it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hotneuron.models.errors import RequestError


def _check(name: str, value: float, low: float, high: float) -> None:
    if not (isinstance(value, (int, float)) and math.isfinite(value) and low <= value <= high):
        raise RequestError(f"{name}={value!r} is out of range; give a number from {low:g} to {high:g}")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn. Names and meaning are llama.cpp's; temperature 0 is greedy."""

    temperature: float = 0.8
    top_k: int = 40  # 0: all
    top_p: float = 0.95  # 1: off
    min_p: float = 0.05  # 0: off
    typical_p: float = 1.0  # 1: off
    repeat_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_last_tokens: int = 64
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    logprobs: int | None = None  # None: none; n: of the drawn token and the n most likely

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0, 100)
        _check("top_k", self.top_k, 0, 1 << 20)
        _check("top_p", self.top_p, 0, 1)
        _check("min_p", self.min_p, 0, 1)
        _check("typical_p", self.typical_p, 0, 1)
        _check("repeat_penalty", self.repeat_penalty, 0.01, 100)
        _check("presence_penalty", self.presence_penalty, -100, 100)
        _check("frequency_penalty", self.frequency_penalty, -100, 100)
        _check("penalty_last_tokens", self.penalty_last_tokens, 0, 256)
        _check("seed", self.seed, 0, 2**63 - 1)
        if len(self.logit_bias) > 256:
            raise RequestError(f"logit_bias has {len(self.logit_bias)} entries; at most 256")
        for token, bias in self.logit_bias:
            _check("logit_bias token", token, 0, 2**31 - 1)
            _check(f"logit_bias of token {token}", bias, -1e9, 1e9)
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0, 20)


@dataclass(frozen=True, slots=True)
class Request:
    """One answer to compute: token ids in, text and ids out."""

    request_id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not self.prompt:
            raise RequestError("the prompt has no tokens; give at least one")
        _check("max_tokens", self.max_tokens, 1, 1 << 24)
        if len(self.stop) > 16 or any(not s or len(s) > 256 for s in self.stop):
            raise RequestError("stop: at most 16 strings of 1 to 256 characters")


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Timings:
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    first_token_s: float  # from submission to the first token
    prompt_s: float
    generation_s: float  # from the first token to the last

    @property
    def prompt_per_s(self) -> float:
        return (self.prompt_tokens - self.cached_tokens) / self.prompt_s if self.prompt_s > 0 else 0.0

    @property
    def generation_per_s(self) -> float:
        return (self.generated_tokens - 1) / self.generation_s if self.generation_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Chunk:
    """What a stream carries: the text and tokens since the last chunk; the last one says why it ended."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None  # "stop" | "length" | "cancel" | "error"
    timings: Timings | None = None
    error: str | None = None
