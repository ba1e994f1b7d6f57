"""A model's vocabulary, checked: token texts, kinds, special ids, and the bytes that each token stands for."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn

from hotneuron.models.errors import ModelFileError, UnsupportedError

PREFIX = "tokenizer.ggml."
BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"
SPACE = "\u2581"  # how SentencePiece writes a space

_END_OF_TURN = (
    "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT] "
    "<｜end▁of▁sentence｜> <end_of_utterance>"
).split()
_END_OF_GENERATION = [*_END_OF_TURN, *"<|return|> <|call|> </s> <|eom_id|> [EOS] <eos> <turn|>".split()]
# Padding and file separators of fill-in-the-middle models end an answer too (llama.cpp stops at them).
_FILL_IN_END = (
    "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame> <|file_sep|>"
).split()
_FILL_IN_END_KEYS = ("fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
_FILL_IN = (
    "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|fim_suffix|> <fim-suffix> <fim_suffix> "
    "<｜fim▁hole｜> <SUF> ▁<SUF> <|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID>"
).split()
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Kind(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_BYTES = frozenset({int(Kind.BYTE)})
_HIDDEN = frozenset({int(Kind.UNKNOWN), int(Kind.CONTROL)})
_SPECIAL = _HIDDEN | {int(Kind.USER_DEFINED)}


def _where(kinds: list[int], wanted: frozenset[int]) -> list[int]:
    return [index for index, kind in enumerate(kinds) if kind in wanted]


def _byte_of_char() -> dict[str, int]:
    """GPT-2's printable stand-in for every byte, inverted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(others)}


BYTE_OF_CHAR = _byte_of_char()


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Texts and kinds by id; special ids are None where the model has none. Made by `from_metadata`, which checks."""

    source: str
    model: str
    texts: list[str]
    kinds: list[int]
    ids: dict[str, int]
    bos: int | None
    eos: int | None
    eot: int | None
    unk: int | None
    stop_ids: frozenset[int]

    @classmethod
    def from_metadata(cls, md: Mapping[str, Any], source: str = "model") -> Vocabulary:
        """Reads `tokenizer.ggml.*`; `source` names the file in errors. Raises ModelFileError, UnsupportedError."""
        model = text_of(md, "model", source)
        if model not in (BYTE_LEVEL, SENTENCEPIECE):
            raise UnsupportedError(
                f"{source}: tokenizer model {model[:40]!r} is not supported; "
                f"supported are {BYTE_LEVEL} (byte-level BPE) and {SENTENCEPIECE} (SentencePiece)"
            )
        texts = list_of(md, "tokens", str, source)
        if not texts:
            fail(source, "tokens", "is empty")
        if "" in texts:
            texts = [text or f"[EMPTY_{index}]" for index, text in enumerate(texts)]
        ids = dict(zip(texts, range(len(texts)), strict=True))
        if len(ids) != len(texts):
            twice = next(text for index, text in enumerate(texts) if ids[text] != index)
            fail(source, "tokens", f"holds {twice[:40]!r} twice")
        kinds = [int(Kind.NORMAL)] * len(texts)
        if PREFIX + "token_type" in md:
            kinds = list_of(md, "token_type", int, source, length=len(texts))
        for text in (*_END_OF_GENERATION, *_FILL_IN_END, *_FILL_IN):
            if text in ids:
                kinds[ids[text]] = int(Kind.CONTROL)  # some converters leave them normal
        for index in _where(kinds, _BYTES):
            if not _BYTE_TOKEN.fullmatch(texts[index]):
                fail(source, f"tokens[{index}]", f"is a byte token, but reads {texts[index][:40]!r} and not <0x00>")

        def special(key: str, default: int | None = None) -> int | None:
            return _special_id(md, key, default, len(texts), source)

        sentencepiece = model == SENTENCEPIECE
        bos, eos = (
            special("bos_token_id", 1 if sentencepiece else None),
            special("eos_token_id", 2 if sentencepiece else None),
        )
        eot, eom = special("eot_token_id"), special("eom_token_id")
        if eot is None:
            eot = next((ids[text] for text in _END_OF_TURN if text in ids), None)
        fill_in = [_special_id(md, key, None, len(texts), source) for key in _FILL_IN_END_KEYS]
        by_text = [ids[text] for text in (*_END_OF_GENERATION, *_FILL_IN_END) if text in ids]
        stop_ids = frozenset(index for index in (eos, eot, eom, *fill_in, *by_text) if index is not None)
        unk = special("unknown_token_id", 0) if sentencepiece else None
        return cls(source, model, texts, kinds, ids, bos, eos, eot, unk, stop_ids)

    def specials(self) -> list[tuple[str, int, bool]]:
        """(text, id, whether it is only parsed when special tokens are parsed), longest text in bytes first."""
        found = [
            (self.texts[index], index, self.kinds[index] != Kind.USER_DEFINED) for index in _where(self.kinds, _SPECIAL)
        ]
        return sorted(found, key=lambda special: -len(special[0].encode()))

    def token_bytes(self, index: int, special: bool = False) -> bytes:
        """What the token stands for; control and unknown tokens are empty unless `special`."""
        kind, text = self.kinds[index], self.texts[index]
        if kind == Kind.UNUSED or (kind in _HIDDEN and not special):
            return b""
        if kind in _SPECIAL:
            return text.encode()
        if kind == Kind.BYTE:
            return bytes([int(text[3:5], 16)])
        if self.model == SENTENCEPIECE:
            return text.replace(SPACE, " ").encode()
        # NOTE: some converters mark added tokens as normal and write them plainly: a character that stands for no
        # byte stands for itself.
        return b"".join(
            bytes([BYTE_OF_CHAR[char]]) if char in BYTE_OF_CHAR else char.encode(errors="replace") for char in text
        )


def fail(source: str, key: str, problem: str) -> NoReturn:
    raise ModelFileError(source, PREFIX + key, problem)


def text_of(md: Mapping[str, Any], key: str, source: str, default: str | None = None) -> str:
    value = md.get(PREFIX + key, default)
    if not isinstance(value, str):
        fail(source, key, "is missing" if value is None else "is not a text")
    return value


def flag_of(md: Mapping[str, Any], key: str, source: str, default: bool) -> bool:
    value = md.get(PREFIX + key, default)
    if not isinstance(value, bool):
        fail(source, key, "is not true or false")
    return value


def list_of(md: Mapping[str, Any], key: str, kind: type, source: str, length: int | None = None) -> list[Any]:
    """A list of `kind` and nothing else, copied."""
    value = md.get(PREFIX + key)
    if value is None:
        fail(source, key, "is missing")
    if not isinstance(value, list):
        fail(source, key, "is not a list")
    if length is not None and len(value) != length:
        fail(source, key, f"has {len(value)} entries for {length} tokens")
    strangers = set(map(type, value)) - {kind}
    if strangers:
        fail(source, key, f"holds {strangers.pop().__name__} where {kind.__name__} is expected")
    return value.copy()


def _special_id(md: Mapping[str, Any], key: str, default: int | None, n_tokens: int, source: str) -> int | None:
    if PREFIX + key not in md:
        return default if default is not None and default < n_tokens else None
    value = md[PREFIX + key]
    if not isinstance(value, int) or isinstance(value, bool):
        fail(source, key, "is not a whole number")
    if not 0 <= value < n_tokens:
        fail(source, key, f"{value} is outside the vocabulary of {n_tokens} tokens")
    return value
