"""One answer on its way out: tokens to text, stop strings, chunks to whoever listens."""

from __future__ import annotations

from collections.abc import Callable

from hotneuron.actors.messages import Chunk, Request, TokenLogprob
from hotneuron.actors.sequence import Sequence
from hotneuron.models.detokenizer import StopMatcher, StreamDecoder
from hotneuron.models.tokenizer import Tokenizer


class Stream:
    """Any prefix of what the sink gets is valid: whole characters, no part of a stop string, tokens in order, once."""

    def __init__(self, request: Request, tokenizer: Tokenizer, sink: Callable[[Chunk], None]):
        self._request, self._sink = request, sink
        self._stop_ids = () if request.ignore_eos else tokenizer.stop_ids
        self._decoder = StreamDecoder(tokenizer)
        self._matcher = StopMatcher(request.stop)

    def push(
        self,
        sequence: Sequence,
        tokens: tuple[int, ...],
        logprobs: list[TokenLogprob],
        finish_reason: str | None,
        finish: Callable[[str], object],
    ) -> bool:
        """Take a lease's tokens and send what may be shown; whether the answer has ended.

        `finish` is told why it ends before its timings are read: a stop string is found only here.
        """
        if finish_reason == "stop" and tokens and tokens[-1] in self._stop_ids:
            tokens = tokens[:-1]
        text, used = "", len(tokens)
        if self._request.stop:
            for index, token in enumerate(tokens):
                text += self._matcher.push(self._decoder.push((token,)))
                if self._matcher.stopped is not None:
                    used, finish_reason = index + 1, "stop"
                    break
        else:
            text = self._decoder.push(tokens)
        if finish_reason is not None and self._matcher.stopped is None:
            text += self._matcher.push(self._decoder.finish())
            text += self._matcher.finish()
            if self._matcher.stopped is not None:
                finish_reason = "stop"
        timings = None
        if finish_reason is not None:
            finish(finish_reason)
            timings = sequence.timings()
        if text or used or finish_reason is not None:
            self._sink(Chunk(text, tuple(tokens[:used]), tuple(logprobs[:used]), finish_reason, timings))
        return finish_reason is not None

    def end(self, sequence: Sequence, reason: str) -> None:
        """End without further tokens."""
        self._sink(Chunk("", (), finish_reason=reason, timings=sequence.timings()))

    def fail(self, error: str) -> None:
        self._sink(Chunk("", (), finish_reason="error", error=error))
