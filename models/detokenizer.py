"""Token ids to text as they arrive: whole characters only, and nothing that may turn out to be a stop string."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from hotneuron.models.errors import RequestError
from hotneuron.models.tokenizer import Tokenizer

MAX_STOPS = 64
MAX_STOP_CHARS = 1024


class StreamDecoder:
    """Text of one answer, piece by piece; all pieces joined are `tokenizer.decode` of all ids, however they are split.

    An unfinished UTF-8 character is held until its last byte arrives; invalid bytes become U+FFFD. Costs O(1) a token.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False):
        self._tokenizer = tokenizer
        self._special = special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        token_bytes, special = self._tokenizer.token_bytes, self._special
        return self._decoder.decode(b"".join(token_bytes(index, special) for index in ids))

    def finish(self) -> str:
        """What is left of a character that never ended."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Lets text through up to the first stop string, and holds back what may be the beginning of one.

    The stop string that is complete first ends the text, the longer one if two end together; so the outcome does not
    depend on how the text was split. `stopped` is that string, or None. Raises RequestError for unusable stops.
    """

    def __init__(self, stops: Sequence[str]):
        if len(stops) > MAX_STOPS:
            raise RequestError(f"stop: {len(stops)} strings given; at most {MAX_STOPS} are allowed")
        for stop in stops:
            if not isinstance(stop, str) or not 1 <= len(stop) <= MAX_STOP_CHARS:
                raise RequestError(f"stop: {str(stop)[:40]!r} is not a text of 1 to {MAX_STOP_CHARS} characters")
        self.stopped: str | None = None
        self._stops = tuple(stops)
        self._held = ""

    def push(self, text: str) -> str:
        """The text that is now safe to show; empty for good once `stopped`."""
        if self.stopped is not None:
            return ""
        text = self._held + text
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, at, self.stopped = min(found)
            self._held = ""
            return text[:at]
        safe = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[safe:]
        return text[:safe]

    def finish(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins the stop string."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text[-n] == stop[0] and stop.startswith(text[-n:])), 0)
