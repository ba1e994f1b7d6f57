"""One request on a running engine: its chunks shown as they come, gathered, and stopped by Ctrl-C."""

from __future__ import annotations

import sys
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hotneuron.models.errors import EngineError

if TYPE_CHECKING:
    from hotneuron.actors.engine import Engine
    from hotneuron.actors.messages import SamplingParams, Timings, TokenLogprob

_ALL_TOKENS = 1 << 24


@dataclass(slots=True)
class Answer:
    """What came back, whole or until it was stopped."""

    prompt_tokens: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: str | None = None
    timings: Timings | None = None
    interrupted: bool = False

    def as_json(self, with_logprobs: bool) -> dict[str, Any]:
        answer: dict[str, Any] = {
            "tokens": self.tokens,
            "text": self.text,
            "prompt_tokens": self.prompt_tokens,
            "finish_reason": self.finish_reason,
            "timings": timings_json(self.timings) if self.timings else None,
        }
        if with_logprobs:
            answer["logprobs"] = [
                {"id": p.token, "logprob": p.logprob, "top": [{"id": i, "logprob": v} for i, v in p.top]}
                for p in self.logprobs
            ]
        return answer

    def summary(self) -> str:
        """Tokens per second in one line."""
        if (t := self.timings) is None:
            return f"[{len(self.tokens)} tokens]"
        cached = f", {t.cached_tokens} from cache" if t.cached_tokens else ""
        return (
            f"[prompt {t.prompt_tokens} tokens{cached}, {t.prompt_per_s:.1f} tokens/s; "
            f"answer {t.generated_tokens} tokens, {t.generation_per_s:.1f} tokens/s; first in {t.first_token_s:.2f} s]"
        )


def timings_json(timings: Timings) -> dict[str, float]:
    return {
        "prompt_per_second": timings.prompt_per_s,
        "generation_per_second": timings.generation_per_s,
        "time_to_first_token_s": timings.first_token_s,
        "cached_tokens": timings.cached_tokens,
    }


def ask(
    engine: Engine,
    prompt: list[int],
    sampling: SamplingParams,
    *,
    max_tokens: int,
    stop: list[str] | None = None,
    ignore_eos: bool = False,
    show: bool = True,
) -> Answer:
    """Streams an answer to stdout when `show`; Ctrl-C ends it with what has come. max_tokens -1: until the end.

    Raises RequestError (a field, or a prompt that does not fit), EngineError.
    """
    from hotneuron.actors.messages import Request

    request = Request(
        request_id=uuid.uuid4().hex,
        prompt=tuple(prompt),
        max_tokens=_ALL_TOKENS if max_tokens == -1 else min(max_tokens, _ALL_TOKENS),
        sampling=sampling,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    answer = Answer(prompt_tokens=len(prompt))
    try:
        for chunk in engine.generate(request):
            answer.text += chunk.text
            answer.tokens += chunk.tokens
            answer.logprobs += chunk.logprobs
            if show and chunk.text:
                sys.stdout.write(chunk.text)
                sys.stdout.flush()
            if chunk.error is not None:
                raise EngineError(chunk.error)
            if chunk.finish_reason is not None:
                answer.finish_reason, answer.timings = chunk.finish_reason, chunk.timings
    except KeyboardInterrupt:
        engine.cancel(request.request_id)
        answer.finish_reason, answer.interrupted = "cancel", True
    return answer


def chat_tokens(engine: Engine, messages: list[dict[str, str]]) -> list[int]:
    """The ids of a conversation in the model's own template. Raises RequestError where the template refuses it."""
    return engine.tokenizer.encode_prompt(engine.chat_template.render(messages))
