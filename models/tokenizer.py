"""Text to token ids and back, from a model file's own metadata."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from hotneuron.models.errors import RequestError, UnsupportedError
from hotneuron.models.pretokenizers import DEFAULT, PRE_TOKENIZERS, PreTokenizer
from hotneuron.models.sentencepiece import SentencePieceMerger
from hotneuron.models.vocabulary import PREFIX, SENTENCEPIECE, Vocabulary, fail, flag_of, list_of, text_of

# NOTE: the library's regex engine gives up within a word of ten million steps, and the library then panics.
_LONGEST_RUN = 1 << 21
_RUN = re.compile(r"\s+|\S+")


class Tokenizer:
    """Encodes as llama.cpp does for the same file. Made by `from_metadata`; safe to share between threads.

    bos, eos, eot: ids or None. stop_ids: ids that end an answer. add_bos, add_eos: what the model wants added.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        encode_plain: Callable[[str], list[int]],
        *,
        add_bos: bool,
        add_eos: bool,
        add_space_prefix: bool,
    ):
        self.vocabulary = vocabulary
        self.bos, self.eos, self.eot = vocabulary.bos, vocabulary.eos, vocabulary.eot
        self.stop_ids = vocabulary.stop_ids
        self.vocab_size = len(vocabulary.texts)
        self.add_bos, self.add_eos = add_bos and self.bos is not None, add_eos and self.eos is not None
        self._add_space_prefix = add_space_prefix
        self._encode_plain = encode_plain
        self._specials = vocabulary.specials()
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def from_metadata(cls, md: Mapping[str, Any], source: str = "model", *, decode_only: bool = False) -> Tokenizer:
        """Builds from the keys `tokenizer.ggml.*`; `source` names the file in errors.

        decode_only: without the part that encodes, which is most of the work.
        Raises ModelFileError (missing, mistyped or contradictory keys) and UnsupportedError (an unknown tokenizer
        model or pre-tokenizer, naming those there are).
        """
        vocabulary = Vocabulary.from_metadata(md, source)
        sentencepiece = vocabulary.model == SENTENCEPIECE
        encode_plain: Callable[[str], list[int]]
        if sentencepiece:
            encode_plain, add_bos = SentencePieceMerger(vocabulary, _scores(md, vocabulary)).encode, True
        else:
            pre = _pre_tokenizer(md, source)
            add_bos = pre.add_bos
            encode_plain = _cannot_encode if decode_only else _byte_level(md, vocabulary, pre)
        return cls(
            vocabulary,
            encode_plain,
            add_bos=flag_of(md, "add_bos_token", source, add_bos),
            add_eos=flag_of(md, "add_eos_token", source, False),
            add_space_prefix=sentencepiece and flag_of(md, "add_space_prefix", source, True),
        )

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> list[int]:
        """Ids of a text.

        add_special: BOS and EOS where the model wants them. parse_special: control tokens written in the text become
        these tokens; without it they are plain text (user-defined tokens are always parsed). Raises RequestError for
        a single word of millions of characters.
        """
        out = [self.bos] if add_special and self.add_bos and self.bos is not None else []
        after_special = True
        for part in self._partition(_without_surrogates(text), parse_special):
            if isinstance(part, int):
                out.append(part)
                after_special = True
            else:
                out += self._encode_plain(" " + part if self._add_space_prefix and after_special else part)
                after_special = False
        if add_special and self.add_eos and self.eos is not None:
            out.append(self.eos)
        return out

    def encode_prompt(self, prompt: str) -> list[int]:
        """Ids of a rendered chat prompt: BOS is added only where the template has not already written it."""
        ids = self.encode(prompt)
        return ids[1:] if self.add_bos and ids[1:2] == [self.bos] else ids

    def decode(self, ids: Iterable[int], special: bool = False) -> str:
        """The text of ids; invalid UTF-8 becomes U+FFFD. Control tokens are shown only if `special`.

        The space that a SentencePiece model puts before a text stays, so that a prompt and its continuation can be
        joined. Raises RequestError for an id outside the vocabulary.
        """
        return b"".join(self.token_bytes(index, special) for index in ids).decode(errors="replace")

    def token_bytes(self, index: int, special: bool = False) -> bytes:
        """The bytes that a token adds to the text; may be part of a character. Raises RequestError if out of range."""
        if not special and (piece := self._pieces.get(index)) is not None:
            return piece
        if not 0 <= index < self.vocab_size:
            raise RequestError(f"token id {index} is outside the vocabulary (0 to {self.vocab_size - 1})")
        piece = self.vocabulary.token_bytes(index, special)
        if not special:
            self._pieces[index] = piece
        return piece

    def token_text(self, index: int | None) -> str:
        """The token as the vocabulary writes it, such as `<|im_end|>`; empty for None."""
        return "" if index is None else self.vocabulary.texts[index]

    def _partition(self, text: str, parse_special: bool) -> list[str | int]:
        """The text cut at its special tokens: longer ones first, wherever they stand (llama.cpp's order)."""
        parts: list[str | int] = [text] if text else []
        for special, index, needs_parsing in self._specials:
            if (needs_parsing and not parse_special) or special not in text:
                continue
            cut: list[str | int] = []
            for part in parts:
                if isinstance(part, int):
                    cut.append(part)
                    continue
                first, *rest = part.split(special)
                cut += [first] if first else []
                for piece in rest:
                    cut += [index, piece] if piece else [index]
            parts = cut
        return parts


def _cannot_encode(text: str) -> list[int]:
    raise AssertionError("this tokenizer was made to decode only")


def _without_surrogates(text: str) -> str:
    """JSON can carry half a surrogate pair, which no UTF-8 text may hold: it becomes U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _pre_tokenizer(md: Mapping[str, Any], source: str) -> PreTokenizer:
    name = text_of(md, "pre", source, DEFAULT) or DEFAULT
    if name not in PRE_TOKENIZERS:
        raise UnsupportedError(
            f"{source}: pre-tokenizer {name[:40]!r} is not supported; supported are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]


def _byte_level(md: Mapping[str, Any], vocabulary: Vocabulary, pre: PreTokenizer) -> Callable[[str], list[int]]:
    # Imported here: other parts of the package use this module's types and not the library.
    from tokenizers import Regex, models, pre_tokenizers
    from tokenizers import Tokenizer as Library

    # The first of equal merges counts; the library would take the last.
    texts = list(dict.fromkeys(list_of(md, "merges", str, vocabulary.source)))
    merges = [tuple(text.split(" ", 1)) for text in texts]
    if set(map(len, merges)) - {2}:
        bad = next(text for text, merge in zip(texts, merges, strict=True) if len(merge) != 2)
        fail(vocabulary.source, "merges", f"holds {bad[:40]!r}, which is not two tokens with a space between")
    try:
        model = models.BPE(vocabulary.ids, merges, ignore_merges=pre.ignore_merges)
    except Exception as error:  # the library raises plain Exception
        fail(vocabulary.source, "merges", f"does not fit the tokens: {error}")
    library = Library(model)
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in pre.regexes]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])

    def encode(text: str) -> list[int]:
        if len(text) > _LONGEST_RUN and any(len(run[0]) > _LONGEST_RUN for run in _RUN.finditer(text)):
            raise RequestError(f"text: holds a run of more than {_LONGEST_RUN} characters all space or without a space")
        return library.encode(text, add_special_tokens=False).ids

    return encode


def _scores(md: Mapping[str, Any], vocabulary: Vocabulary) -> list[float]:
    if PREFIX + "scores" not in md:
        return [0.0] * len(vocabulary.texts)
    value = md[PREFIX + "scores"]
    kind = int if isinstance(value, list) and value and type(value[0]) is int else float
    try:
        scores = np.array(list_of(md, "scores", kind, vocabulary.source, len(vocabulary.texts)), np.float32)
    except OverflowError:
        fail(vocabulary.source, "scores", "holds a value out of range")
    if not np.isfinite(scores).all():
        fail(vocabulary.source, "scores", "holds a value that is not finite")
    return scores.tolist()
