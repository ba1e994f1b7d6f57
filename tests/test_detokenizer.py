"""Streaming: however ids or text are split, the outcome is the same, and every piece is whole characters."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotneuron.models.detokenizer import StopMatcher, StreamDecoder
from hotneuron.models.errors import RequestError
from hotneuron.models.tokenizer import Tokenizer
from hotneuron.models.vocabulary import BYTE_OF_CHAR

# Token id = byte, then a two-character token whose bytes cut a character in half, then a control token.
HALVES = "".join({byte: char for char, byte in BYTE_OF_CHAR.items()}[byte] for byte in b"a\xf0\x9f")
TOKENS = [char for char, _ in sorted(BYTE_OF_CHAR.items(), key=lambda item: item[1])] + [HALVES, "<|end|>"]
TOKENIZER = Tokenizer.from_metadata(
    {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": [1] * 257 + [3],
        "tokenizer.ggml.merges": [],
    }
)
IDS = st.lists(st.integers(0, 257), max_size=40) | st.text(max_size=20).map(
    lambda text: list(text.encode("utf-8", "replace"))
)


def split(items: Any, cuts: list[int]) -> list[Any]:
    edges = sorted({0, len(items), *(cut % (len(items) + 1) for cut in cuts)})
    return [items[start:end] for start, end in pairwise(edges)]


@given(ids=IDS, cuts=st.lists(st.integers(0, 100)), special=st.booleans())
@settings(max_examples=500, deadline=None)
def test_any_split_gives_the_text_of_decode(ids: list[int], cuts: list[int], special: bool) -> None:
    decoder = StreamDecoder(TOKENIZER, special)
    pieces = [decoder.push(part) for part in split(ids, cuts)]
    assert "".join(pieces) + decoder.finish() == TOKENIZER.decode(ids, special)


@given(text=st.text(st.characters(codec="utf-8"), max_size=20))
@settings(max_examples=200, deadline=None)
def test_no_half_character_is_ever_shown(text: str) -> None:
    decoder, shown = StreamDecoder(TOKENIZER), ""
    for byte in text.encode():
        shown += decoder.push([byte])
        assert text.startswith(shown)
    assert shown == text and decoder.finish() == ""


def test_a_token_that_ends_inside_a_character() -> None:
    decoder = StreamDecoder(TOKENIZER)
    assert [decoder.push([256]), decoder.push([0x9A]), decoder.push([0x80])] == ["a", "", "🚀"]
    assert decoder.push([0xF0]) == "" and decoder.push([0x41]) == "\ufffdA"
    assert decoder.push([0xE2, 0x82]) == "" and decoder.finish() == "\ufffd"


def plain_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Character by character: the text before the first stop string that is complete, the longer one at a tie."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    text=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 60)),
)
@settings(max_examples=800, deadline=None)
def test_stops_do_not_depend_on_the_split(text: str, stops: list[str], cuts: list[int]) -> None:
    expected, stop = plain_stop(text, stops)
    matcher, shown = StopMatcher(stops), ""
    for part in split(text, cuts):
        shown += matcher.push(part)
        assert expected.startswith(shown)
    assert (shown + matcher.finish(), matcher.stopped) == (expected, stop)


@given(text=st.text("abc", max_size=20), stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3))
@settings(max_examples=300, deadline=None)
def test_no_more_is_held_back_than_may_become_a_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = matcher.push(text)
    if matcher.stopped is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_text_flows_again_when_a_stop_does_not_come() -> None:
    matcher = StopMatcher(["###", "\nUser:"])
    assert [matcher.push("Hi #"), matcher.push("#!"), matcher.push("\nUs"), matcher.push("er: x")] == [
        "Hi ",
        "##!",
        "",
        "",
    ]
    assert matcher.stopped == "\nUser:" and matcher.push("more") == "" and matcher.finish() == ""


@pytest.mark.parametrize("stops", [[""], ["x" * 1025], ["x"] * 65, [3]])
def test_unusable_stops_are_refused(stops: list[Any]) -> None:
    with pytest.raises(RequestError, match=r"^stop: "):
        StopMatcher(stops)
