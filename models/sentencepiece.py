"""SentencePiece merging by score: of all neighbours that together are a token, the best score first, leftmost at a tie.

The `tokenizers` library cannot express it exactly: its merges are pairs, each with a rank of its own, so two tokens of
equal score, or one token made by two overlapping pairs ("a"+"aa", "aa"+"a"), are not taken leftmost first.
"""

from __future__ import annotations

import heapq
import re
from functools import lru_cache

from hotneuron.models.vocabulary import SPACE, Vocabulary, fail

_WORD = re.compile(f"{SPACE}+[^{SPACE}]*|[^{SPACE}]+")
_WORD_END = re.compile(f"[^{SPACE}]{SPACE}")
_LONGEST_CACHED_WORD = 48


class SentencePieceMerger:
    """Turns text into ids as llama.cpp does; what is no token becomes its bytes, or the unknown token without these."""

    def __init__(self, vocabulary: Vocabulary, scores: list[float]):
        self._ids = vocabulary.ids
        self._scores = scores
        self._byte_ids = _byte_ids(vocabulary)
        self._by_words = _words_are_separate(vocabulary.ids)
        self._merge_cached = lru_cache(maxsize=1 << 15)(self._merge)

    def encode(self, text: str) -> list[int]:
        escaped = text.replace(" ", SPACE)
        out: list[int] = []
        for word in _WORD.findall(escaped) if self._by_words else [escaped]:
            out += self._merge_cached(word) if len(word) <= _LONGEST_CACHED_WORD else self._merge(word)
        return out

    def _merge(self, word: str) -> list[int]:
        pieces: list[str] = list(word)  # piece 0 is never absorbed; an absorbed one is ""
        after = [*range(1, len(pieces)), -1]
        before = list(range(-1, len(pieces) - 1))
        heap: list[tuple[float, int, int]] = []  # (-score, left piece, length of the pair)

        def offer(left: int, right: int) -> None:
            if left >= 0 and right >= 0:
                index = self._ids.get(pieces[left] + pieces[right])
                if index is not None:
                    heapq.heappush(heap, (-self._scores[index], left, len(pieces[left]) + len(pieces[right])))

        for left in range(len(pieces) - 1):
            offer(left, left + 1)
        while heap:
            _, left, length = heapq.heappop(heap)
            right = after[left]
            # An offer is out of date if either side has grown or gone since.
            if right < 0 or not pieces[left] or len(pieces[left]) + len(pieces[right]) != length:
                continue
            pieces[left] += pieces[right]
            pieces[right] = ""
            after[left] = after[right]
            if after[left] >= 0:
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])

        out: list[int] = []
        for piece in filter(None, pieces):
            index = self._ids.get(piece)
            out += [index] if index is not None else [self._byte_ids[byte] for byte in piece.encode()]
        return out


def _byte_ids(vocabulary: Vocabulary) -> list[int]:
    ids = vocabulary.ids
    found = [ids.get(f"<0x{byte:02X}>", ids.get(chr(byte)) if byte < 128 else None) for byte in range(256)]
    unk = vocabulary.unk
    if unk is None and None in found:
        fail(vocabulary.source, "tokens", f"has neither <0x{found.index(None):02X}> nor an unknown token")
    return [found_id for index in found if (found_id := unk if index is None else index) is not None]


def _words_are_separate(ids: dict[str, int]) -> bool:
    """Whether no merge can cross from a word into the next one's leading spaces, so that words can be merged alone."""
    if not _WORD_END.search("\n".join(ids)):
        return True
    crossing = [text for text in ids if _WORD_END.search(text)]

    def is_mergeable(text: str) -> bool:
        cuts = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        return any(all(len(part) == 1 or part in ids for part in cut) for cut in cuts)

    return not any(map(is_mergeable, crossing))
