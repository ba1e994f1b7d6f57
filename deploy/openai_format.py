"""Chunks of an answer as OpenAI's objects: whole completions, and the events of a stream."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import Any, Literal

from hotneuron.actors.messages import Chunk, Timings, TokenLogprob
from hotneuron.models.tokenizer import Tokenizer

Kind = Literal["chat", "text"]
DONE, PING = b"data: [DONE]\n\n", b": ping\n\n"
_OBJECTS = {("chat", False): "chat.completion", ("chat", True): "chat.completion.chunk"}


@dataclass(slots=True)
class Choice:
    """One of the answers to a request, so far."""

    text: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    timings: Timings | None = None


class Formatter:
    """Of one request. Feed it every chunk by `push`; then `whole`, or `usage_event` after the events."""

    def __init__(
        self, kind: Kind, request_id: str, model_id: str, tokenizer: Tokenizer, n: int, with_logprobs: bool, echo: str
    ):
        self._kind, self._tokenizer, self._with_logprobs, self._echo = kind, tokenizer, with_logprobs, echo
        prefix = "chatcmpl" if kind == "chat" else "cmpl"
        self._head = {"id": f"{prefix}-{request_id}", "created": int(time.time()), "model": model_id}
        self.choices = [Choice() for _ in range(n)]

    def push(self, index: int, chunk: Chunk) -> None:
        choice = self.choices[index]
        choice.text.append(chunk.text)
        choice.logprobs += chunk.logprobs
        if chunk.finish_reason is not None:
            choice.finish_reason, choice.timings = _reason(chunk.finish_reason), chunk.timings

    def first_events(self) -> bytes:
        """What a stream begins with: the role, or the prompt where it is echoed."""
        if self._kind == "chat":
            deltas = ({"role": "assistant", "content": ""} for _ in self.choices)
            return b"".join(self._event(i, {"delta": delta}, None, None) for i, delta in enumerate(deltas))
        if not self._echo:
            return b""
        return b"".join(self._event(i, {"text": self._echo}, None, None) for i in range(len(self.choices)))

    def event(self, index: int, chunk: Chunk) -> bytes:
        """A chunk of a stream; nothing where it has no text and does not end."""
        reason = _reason(chunk.finish_reason) if chunk.finish_reason is not None else None
        if not chunk.text and reason is None and not chunk.logprobs:
            return b""
        content: dict[str, Any]
        if self._kind == "chat":
            content = {"delta": {"content": chunk.text} if chunk.text or reason is None else {}}
        else:
            content = {"text": chunk.text}
        if self._with_logprobs:
            content["logprobs"] = self._logprobs(list(chunk.logprobs))
        return self._event(index, content, reason, chunk.timings)

    def _event(self, index: int, content: dict[str, Any], reason: str | None, timings: Timings | None) -> bytes:
        choice = {"index": index, "logprobs": None, **content, "finish_reason": reason}
        body = self._object(True) | {"choices": [choice]}
        if timings is not None:
            body["timings"] = timings_of(timings)
        return sse(body)

    def usage_event(self) -> bytes:
        return sse(self._object(True) | {"choices": [], "usage": self._usage()})

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self.choices):
            text = "".join(choice.text)
            content: dict[str, Any]
            if self._kind == "chat":
                content = {"message": {"role": "assistant", "content": text, "refusal": None}}
            else:
                content = {"text": self._echo + text}
            logprobs = self._logprobs(choice.logprobs) if self._with_logprobs else None
            choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason})
        timings = self.choices[0].timings
        return self._object(False) | {
            "choices": choices,
            "usage": self._usage(),
            "timings": timings_of(timings) if timings is not None else None,
        }

    def _object(self, is_stream: bool) -> dict[str, Any]:
        return {**self._head, "object": _OBJECTS.get((self._kind, is_stream), "text_completion")}

    def _usage(self) -> dict[str, Any]:
        timings = [choice.timings for choice in self.choices if choice.timings is not None]
        prompt = timings[0].prompt_tokens if timings else 0
        completion = sum(t.generated_tokens for t in timings)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": timings[0].cached_tokens if timings else 0},
        }

    def _logprobs(self, entries: list[TokenLogprob]) -> dict[str, Any]:
        if self._kind == "chat":
            return {
                "content": [
                    self._token(e.token, e.logprob) | {"top_logprobs": [self._token(t, p) for t, p in e.top]}
                    for e in entries
                ]
            }
        texts = [self._piece(e.token) for e in entries]
        offsets, at = [], 0
        for text in texts:
            offsets.append(at)
            at += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [e.logprob for e in entries],
            "top_logprobs": [{self._piece(t): p for t, p in e.top} for e in entries],
            "text_offset": offsets,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._piece(token)
        return {"token": text, "logprob": max(logprob, -9999.0), "bytes": list(text.encode())}

    def _piece(self, token: int) -> str:
        return self._tokenizer.decode([token])


def timings_of(timings: Timings) -> dict[str, float]:
    """As llama-server names them."""
    prompt = timings.prompt_tokens - timings.cached_tokens
    return {
        "cache_n": timings.cached_tokens,
        "prompt_n": prompt,
        "prompt_ms": 1e3 * timings.prompt_s,
        "prompt_per_second": timings.prompt_per_s,
        "predicted_n": timings.generated_tokens,
        "predicted_ms": 1e3 * timings.generation_s,
        "predicted_per_second": timings.generation_per_s,
        "first_token_ms": 1e3 * timings.first_token_s,
    }


def sse(body: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _reason(reason: str) -> str:
    """What our driver says, in OpenAI's words: a cancelled answer is one that was cut."""
    return {"cancel": "stop"}.get(reason, reason)
