"""Tokenizers against llama.cpp's ids, a plain re-telling of its algorithms, and hostile metadata."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import unicodedata
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hotneuron.models.errors import ModelFileError, RequestError, UnsupportedError
from hotneuron.models.pretokenizers import PRE_TOKENIZERS
from hotneuron.models.tokenizer import Tokenizer
from hotneuron.models.vocabulary import BYTE_OF_CHAR

CHAR_OF_BYTE = {byte: char for char, byte in BYTE_OF_CHAR.items()}


def byte_level_metadata(pre: str = "gpt-2", merges: tuple[str, ...] = (), **extra: Any) -> dict[str, Any]:
    """A byte-level vocabulary of all bytes, what `merges` make, and three control tokens."""
    tokens = [*CHAR_OF_BYTE.values(), *(merge.replace(" ", "") for merge in merges), "<|bos|>", "<|end|>", "<|a|>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3] * 3,
        "tokenizer.ggml.merges": list(merges),
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    } | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}


def sentencepiece_metadata(words: dict[str, float], **extra: Any) -> dict[str, Any]:
    """<unk> <s> </s>, all bytes, then `words` with their scores."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + list(words.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * len(words),
    } | {f"tokenizer.ggml.{key}": value for key, value in extra.items()}


# The default model, token for token as llama.cpp.


@pytest.fixture(scope="module")
def smol(default_metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer.from_metadata(default_metadata)


def test_ids_equal_the_reference(smol: Tokenizer, reference: dict[str, Any]) -> None:
    assert len(reference["tokenize"]) == 17
    for case in reference["tokenize"]:
        assert smol.encode(case["text"]) == case["ids"], case["text"]


def test_greedy_texts_equal_the_reference(smol: Tokenizer, reference: dict[str, Any]) -> None:
    for case in reference["greedy"]:
        assert smol.decode(case["tokens"]) == case["text"]


def test_a_long_text_survives(smol: Tokenizer, text_a: str) -> None:
    assert smol.decode(smol.encode(text_a)) == text_a


def test_special_ids_of_the_default_model(smol: Tokenizer) -> None:
    assert (smol.bos, smol.eos, smol.eot, smol.vocab_size) == (1, 2, 2, 49152)
    assert smol.stop_ids == {0, 2, 4}  # <|endoftext|>, <|im_end|>, <reponame>, as llama.cpp prints them
    assert smol.decode([1, 2]) == "" and smol.decode([1, 2], special=True) == "<|im_start|><|im_end|>"


def test_special_text_is_plain_text_when_not_parsed(smol: Tokenizer) -> None:
    ids = smol.encode("<|im_start|>", parse_special=False)
    assert 1 not in ids and smol.decode(ids) == "<|im_start|>"


def test_building_is_fast(default_metadata: dict[str, Any]) -> None:
    seconds = []
    for _ in range(5):
        start = time.process_time()
        Tokenizer.from_metadata(default_metadata)
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.25


def test_importing_loads_no_library() -> None:
    code = "import sys, hotneuron.models.tokenizer; sys.exit('tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


# Byte-level BPE.

ANY_TEXT = st.text(st.characters(codec="utf-8"), max_size=60)
TRICKY_TEXT = st.text(
    st.sampled_from(list(" \t\n\r'sStTlLrRvVeE.,!()/_-aZzÉéßж日本語한ー１2345½🚀\u00a0\u3000\u0301")), max_size=40
)
BY_NAME = {name: Tokenizer.from_metadata(byte_level_metadata(name)) for name in PRE_TOKENIZERS}


@given(text=ANY_TEXT | TRICKY_TEXT, name=st.sampled_from(sorted(PRE_TOKENIZERS)))
@settings(max_examples=300, deadline=None)
def test_every_pre_tokenizer_keeps_the_text(text: str, name: str) -> None:
    tokenizer = BY_NAME[name]
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()
    assert tokenizer.decode(ids) == text


@given(text=ANY_TEXT)
@settings(max_examples=200, deadline=None)
def test_the_default_model_keeps_any_text(smol: Tokenizer, text: str) -> None:
    # Some rare bytes have no token in this vocabulary, and llama.cpp drops them too.
    present = {BYTE_OF_CHAR[char] for char in smol.vocabulary.texts if len(char) == 1 and char in BYTE_OF_CHAR}
    if set(text.encode()) <= present:
        assert smol.decode(smol.encode(text, parse_special=False)) == text


def words_of(name: str, text: str) -> list[str]:
    """How a pre-tokenizer cuts: read off the library, with the byte alphabet undone."""
    from tokenizers import Regex, pre_tokenizers

    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in PRE_TOKENIZERS[name].regexes]
    return [word for word, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(text)] if text else []


def _is(char: str, kind: str) -> bool:
    return char != "" and (char.isspace() if kind == "space" else unicodedata.category(char)[0] == kind)


def slow_words(text: str, digits: int, contractions: bool) -> list[str]:
    """llama.cpp's hand-written matcher for llama3 (digits=3) and qwen2 (digits=1), retold character by character."""
    words, at = [], 0

    def char(index: int) -> str:
        return text[index] if index < len(text) else ""

    while at < len(text):
        start, here = at, text[at]
        lower = text[at + 1 : at + 3].lower()
        if contractions and here == "'" and lower[:1] and lower[0] in "stmd" and char(at + 1).isascii():
            at += 2
        elif contractions and here == "'" and lower in ("re", "ve", "ll"):
            at += 3
        elif here not in "\r\n" and not _is(here, "N") and (_is(here, "L") or _is(char(at + 1), "L")):
            at += 1
            while _is(char(at), "L"):
                at += 1
        elif _is(here, "N"):
            while _is(char(at), "N") and at - start < digits:
                at += 1
        else:
            first = char(at + 1) if here == " " else here
            if first and not any(_is(first, kind) for kind in ("space", "L", "N")):
                at += here == " "
                while char(at) and not any(_is(char(at), kind) for kind in ("space", "L", "N")):
                    at += 1
                while char(at) and char(at) in "\r\n":
                    at += 1
            else:
                end = at
                while _is(char(end), "space"):
                    end += 1
                newline = max(text.rfind("\r", at, end), text.rfind("\n", at, end))
                at = newline + 1 if newline >= 0 else end - 1 if end - at > 1 and end < len(text) else end
        words.append(text[start:at])
    return words


@given(text=TRICKY_TEXT)
@settings(max_examples=400, deadline=None)
def test_llama3_and_qwen2_cut_as_the_slow_matcher(text: str) -> None:
    assert words_of("llama3", text) == slow_words(text, digits=3, contractions=True)
    assert words_of("qwen2", text) == slow_words(text, digits=1, contractions=True)
    assert words_of("ufakzeka", text) == slow_words(text, digits=1, contractions=False)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "it's  12ab!?\n\nx", ["it", "'s", " ", " 12", "ab", "!?", "\n", "\n", "x"]),
        ("smollm", "a 123 b", ["a", " ", "1", "2", "3", " b"]),
        ("default", "a1234.5", ["a", "123", "4", ".", "5"]),
        ("tekken", "HelloWorld ABC12", ["Hello", "World", " ABC", "1", "2"]),
        ("gpt-4o", "camelCase's 1234", ["camel", "Case's", " ", "123", "4"]),
        ("deepseek-llm", "hi 12中文\n", ["hi", " ", "12", "中文", "\n"]),
        ("deepseek-coder", "a.b 12", ["a", ".", "b", " ", "1", "2"]),
        ("deepseek-v3", "日本12345 a", ["日本", "123", "45", " a"]),
        ("bloom", "hello, world", ["hello", ",", " world"]),
        ("superbpe", "a1234567", ["a", "1", "234", "567"]),
    ],
)
def test_cuts_by_hand(name: str, text: str, words: list[str]) -> None:
    assert words_of(name, text) == words


MERGES = ("a b", "b c", "ab c", "Ġ a", "Ġa b", "c c", "cc c", "c cc", "a a", "aa aa")


def slow_bpe(word: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    pieces = list(word)
    while True:
        pairs = [(ranks[pair], at) for at, pair in enumerate(pairwise(pieces)) if pair in ranks]
        if not pairs:
            return pieces
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]


@given(text=st.text("abc ", max_size=24))
@settings(max_examples=300, deadline=None)
def test_bpe_merges_as_the_slow_one(text: str) -> None:
    md = byte_level_metadata("gpt-2", MERGES[:-3] + MERGES[-2:])
    tokenizer = Tokenizer.from_metadata(md)
    ranks = {tuple(merge.split()): rank for rank, merge in enumerate(md["tokenizer.ggml.merges"])}
    expected = [piece for word in words_of("gpt-2", text) for piece in slow_bpe(word.replace(" ", "Ġ"), ranks)]
    assert [tokenizer.token_text(index) for index in tokenizer.encode(text)] == expected


def test_llama3_takes_a_whole_word_whatever_the_merges_say() -> None:
    merges = ("b c", "a b", "ab c")
    llama3 = Tokenizer.from_metadata(byte_level_metadata("llama-bpe", merges))
    assert [llama3.token_text(index) for index in llama3.encode("abc")] == ["<|bos|>", "abc"]
    qwen2 = Tokenizer.from_metadata(byte_level_metadata("qwen2", merges))
    assert [qwen2.token_text(index) for index in qwen2.encode("abc")] == ["a", "bc"]


def test_bos_and_eos_follow_the_flags() -> None:
    md = byte_level_metadata("gpt-2", add_bos_token=True, add_eos_token=True)
    tokenizer = Tokenizer.from_metadata(md)
    bos, eos = md["tokenizer.ggml.bos_token_id"], md["tokenizer.ggml.eos_token_id"]
    assert tokenizer.encode("") == [bos, eos] and tokenizer.encode("", add_special=False) == []
    assert tokenizer.encode_prompt("<|bos|>") == [bos, eos] and tokenizer.encode("<|bos|>") == [bos, bos, eos]


def test_longer_special_tokens_win_wherever_they_stand() -> None:
    md = byte_level_metadata()
    md["tokenizer.ggml.tokens"] += ["xy", "yzz"]
    md["tokenizer.ggml.token_type"] += [4, 4]
    tokenizer = Tokenizer.from_metadata(md)
    for parse_special in (True, False):  # user-defined tokens are always parsed
        ids = tokenizer.encode("xyzzxy", parse_special=parse_special)
        assert [tokenizer.token_text(index) for index in ids] == ["x", "yzz", "xy"]


def test_end_of_turn_is_found_by_its_text() -> None:
    tokenizer = Tokenizer.from_metadata(byte_level_metadata())
    assert tokenizer.token_text(tokenizer.eot) == "<|end|>" and tokenizer.stop_ids == {tokenizer.eos}


def test_half_a_surrogate_pair_becomes_the_replacement_character() -> None:
    tokenizer = Tokenizer.from_metadata(byte_level_metadata())
    assert tokenizer.decode(tokenizer.encode("a\ud83d b")) == "a\ufffd b"
    assert tokenizer.decode(tokenizer.encode("\ud83d\ude80")) == "🚀"


def test_a_text_without_end_or_spaces_is_refused_and_not_a_panic() -> None:
    tokenizer = BY_NAME["llama-bpe"]
    for char in " a":
        with pytest.raises(RequestError, match=r"^text: holds a run"):
            tokenizer.encode(char * 12_000_000)


# SentencePiece.


def slow_sentencepiece(text: str, md: dict[str, Any]) -> list[int]:
    """llama.cpp's rule at its plainest: among all neighbours that make a token, merge the best, leftmost at a tie."""
    tokens, scores = md["tokenizer.ggml.tokens"], md["tokenizer.ggml.scores"]
    ids = {token: index for index, token in enumerate(tokens)}
    pieces = list(text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[ids[a + b]], at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in ids]
        if not pairs:
            break
        _, at = min(pairs)
        pieces[at : at + 2] = [pieces[at] + pieces[at + 1]]
    out = []
    for piece in pieces:
        out += [ids[piece]] if piece in ids else [ids[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return out


SCORES = st.sampled_from([0.0, -1.0, -2.0, -2.5, -7.0])
WORDS = st.dictionaries(st.text("ab▁é", min_size=1, max_size=5), SCORES, max_size=25)
WORDS = WORDS.map(lambda words: words | {"▁": -3.0})


@given(words=WORDS, text=st.text("ab éß", max_size=30), prefix=st.booleans())
@settings(max_examples=600, deadline=None)
def test_sentencepiece_merges_as_the_slow_one(words: dict[str, float], text: str, prefix: bool) -> None:
    md = sentencepiece_metadata(words, add_space_prefix=prefix, add_bos_token=False)
    tokenizer = Tokenizer.from_metadata(md)
    for _ in range(2):  # the second time words come from the cache
        expected = slow_sentencepiece((" " if prefix else "") + text, md) if text else []
        assert tokenizer.encode(text) == expected
    assert tokenizer.decode(tokenizer.encode(text)) == (" " + text if prefix and text else text)


def test_sentencepiece_on_dense_random_vocabularies() -> None:
    # Hypothesis likes small cases; scores that nearly tie only matter in crowded ones.
    random = Random(5)
    for _ in range(600):
        lengths = [random.randint(1, 4) for _ in range(random.randint(5, 40))]
        words = {
            "".join(random.choices("ab▁é", k=length)): random.choice([0.0, -1.0, -2.0, -2.5]) for length in lengths
        }
        text = "".join(random.choices("ab éß", k=30))
        md = sentencepiece_metadata(words, add_space_prefix=False, add_bos_token=False)
        assert Tokenizer.from_metadata(md).encode(text) == slow_sentencepiece(text, md)


@given(text=st.text("ab ", max_size=40))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_in_words_and_at_ties(text: str) -> None:
    # "aaa" can be made by two pairs of one score; no token crosses into the next word's spaces, so words are cached.
    words = {"a": -1.0, "b": -2.0, "▁": -3.0, "aa": -4.0, "aaa": -4.0, "▁▁": -5.0, "▁▁▁": -5.0, "▁a": -6.0, "ba": -4.0}
    md = sentencepiece_metadata(words)
    assert Tokenizer.from_metadata(md).encode(text) == [1, *(slow_sentencepiece(" " + text, md) if text else [])]


def test_sentencepiece_puts_a_space_after_special_tokens() -> None:
    md = sentencepiece_metadata({"▁": -1.0, "a": -2.0, "▁a": -3.0})
    tokenizer = Tokenizer.from_metadata(md)
    assert [tokenizer.token_text(index) for index in tokenizer.encode("a</s>a")] == ["<s>", "▁a", "</s>", "▁a"]
    assert tokenizer.stop_ids == {2}


def test_sentencepiece_without_bytes_uses_the_unknown_token() -> None:
    md = sentencepiece_metadata({})
    for key in ("tokens", "scores", "token_type"):
        md[f"tokenizer.ggml.{key}"] = md[f"tokenizer.ggml.{key}"][:3]
    assert Tokenizer.from_metadata(md).encode("é", add_special=False) == [0] * 5


def test_a_long_word_is_merged_quickly() -> None:
    md = sentencepiece_metadata({"a": 0.0} | {"a" * 2**n: float(-n) for n in range(1, 8)}, add_space_prefix=False)
    tokenizer = Tokenizer.from_metadata(md)
    start = time.process_time()
    assert tokenizer.decode(tokenizer.encode("a" * 50_000)) == "a" * 50_000
    assert time.process_time() - start < 5


# Hostile metadata and requests.


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"tokens": None}, "tokens"),
        ({"tokens": []}, "tokens"),
        ({"tokens": "abc"}, "tokens"),
        ({"tokens": ["a", 1]}, "tokens"),
        ({"tokens": ["a", "a"], "token_type": None}, "tokens"),
        ({"token_type": [1]}, "token_type"),
        ({"token_type": "x"}, "token_type"),
        ({"merges": None}, "merges"),
        ({"merges": ["ab"]}, "merges"),
        ({"merges": ["a zzz"]}, "merges"),
        ({"merges": ["a b"]}, "merges"),
        ({"merges": ["a b c"]}, "merges"),
        ({"merges": [7]}, "merges"),
        ({"bos_token_id": 10**6}, "bos_token_id"),
        ({"eos_token_id": -1}, "eos_token_id"),
        ({"eot_token_id": 2.5}, "eot_token_id"),
        ({"eot_token_id": True}, "eot_token_id"),
        ({"add_bos_token": "yes"}, "add_bos_token"),
        ({"model": 3}, "model"),
        ({"model": None}, "model"),
        ({"pre": ["x"]}, "pre"),
    ],
)
def test_bad_metadata_names_the_field(change: dict[str, Any], field: str) -> None:
    md = byte_level_metadata()
    for key, value in change.items():
        md[f"tokenizer.ggml.{key}"] = value
        if value is None:
            del md[f"tokenizer.ggml.{key}"]
    with pytest.raises(ModelFileError, match=rf"^x\.gguf: tokenizer\.ggml\.{field}") as caught:
        Tokenizer.from_metadata(md, "x.gguf")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"scores": [1.0]},
        {"scores": [float("nan")] * 259},
        {"scores": ["x"] * 259},
        {"scores": 5},
        {"token_type": [6] * 259},
    ],
)
def test_bad_sentencepiece_metadata_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ModelFileError):
        Tokenizer.from_metadata(sentencepiece_metadata({}, **change))


def test_unknown_kinds_name_what_is_supported() -> None:
    with pytest.raises(UnsupportedError, match=r"rwkv.*gpt2.*llama"):
        Tokenizer.from_metadata(byte_level_metadata(model="rwkv"))
    with pytest.raises(UnsupportedError, match=r"martian.*llama-bpe.*qwen2"):
        Tokenizer.from_metadata(byte_level_metadata("martian"))


JUNK = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
JUNK = JUNK | st.lists(JUNK, max_size=6) | st.dictionaries(st.text(max_size=3), JUNK, max_size=2)
KEYS = "model pre tokens token_type merges scores bos_token_id eos_token_id unknown_token_id add_bos_token".split()


@given(
    model=st.sampled_from(["gpt2", "llama"]),
    junk=st.dictionaries(st.sampled_from(KEYS), JUNK, min_size=1, max_size=4),
)
@settings(max_examples=400, deadline=None)
def test_junk_metadata_never_crashes(model: str, junk: dict[str, Any]) -> None:
    md = byte_level_metadata() if model == "gpt2" else sentencepiece_metadata({"a": -1.0})
    md |= {f"tokenizer.ggml.{key}": value for key, value in junk.items()}
    try:
        tokenizer = Tokenizer.from_metadata(md)
    except (ModelFileError, UnsupportedError) as error:
        assert "\n" not in re.sub(r"'[^']*'", "", str(error))
        return
    tokenizer.decode(tokenizer.encode("some text"))


def test_ids_outside_the_vocabulary_are_refused() -> None:
    tokenizer = Tokenizer.from_metadata(byte_level_metadata())
    for index in (-1, tokenizer.vocab_size):
        with pytest.raises(RequestError, match="outside the vocabulary"):
            tokenizer.decode([index])
