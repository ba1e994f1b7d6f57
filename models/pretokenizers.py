"""Pre-tokenizers: how a byte-level BPE vocabulary cuts text into words before merging, by `tokenizer.ggml.pre`.

The names and regexes are those of llama.cpp (MIT). Case-insensitive groups are written out and letter classes of
mixed case are approximated as there, because equal token ids matter more than the wording of the original.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Regexes applied one after the other, each inside the pieces that the one before left; gaps are pieces too.

    ignore_merges: a word that is a token of its own is taken whole, whatever the merges would make of it.
    add_bos: what holds where `tokenizer.ggml.add_bos_token` is absent.
    """

    regexes: tuple[str, ...]
    ignore_merges: bool = False
    add_bos: bool = False


_SPACE_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _CONTRACTION + "|" + _WORD + r"|\p{N}{1,3}|" + _SYMBOLS + _SPACE_TAIL
_QWEN2 = _CONTRACTION + "|" + _WORD + r"|\p{N}|" + _SYMBOLS + _SPACE_TAIL

# Upper or lower case, or a letter outside ASCII: `(?=\p{L})[^a-z]` is a letter but no lower-case ASCII one.
_UPPER = r"(?:(?=\p{L})[^a-z])"
_LOWER = r"(?:(?=\p{L})[^A-Z])"
_EDGE = r"[^\r\n\p{L}\p{N}]?"
_CASED_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACE_TAIL

_CHINESE_JAPANESE = r"[一-龥぀-ゟ゠-ヿ]+"
_DEEPSEEK_CJK = r"[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACE_TAIL
)
_DEEPSEEK_LETTERS = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅ"
    "ὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-"
    "ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)

_FALCON = PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]"))
_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3_BOS = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_GPT4O = (
    f"{_EDGE}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_EDGE}{_UPPER}+{_LOWER}*{_CONTRACTION}?" r"|\p{N}{1,3}|" + _CASED_TAIL
)
_JAIS2_SPACES = "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))

DEFAULT = "default"
_TABLE: tuple[tuple[PreTokenizer, str], ...] = (
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")), DEFAULT),
    (
        PreTokenizer((_GPT2,)),
        "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert roberta-bpe "
        "jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code",
    ),
    (_DIGITS_GPT2, "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    (_LLAMA3_BOS, "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"),
    (PreTokenizer((_LLAMA3,)), "dbrx smaug-bpe chatglm-bpe"),
    (PreTokenizer((_LLAMA3,), ignore_merges=True), "glm4 glm5"),
    (
        PreTokenizer((_QWEN2,)),
        "qwen2 deepseek-r1-qwen megrez stablelm2 hunyuan solar-open grok-2 kormo f2llmv2",
    ),
    (
        PreTokenizer(
            (_CONTRACTION + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _SPACE_TAIL,)
        ),
        "qwen35",
    ),
    (
        PreTokenizer(
            (f"{_EDGE}{_UPPER}*{_LOWER}+|{_EDGE}{_UPPER}+{_LOWER}*" r"|\p{N}|" + _CASED_TAIL,),
            ignore_merges=True,
            add_bos=True,
        ),
        "tekken",
    ),
    (PreTokenizer((_GPT4O,)), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    (
        PreTokenizer(
            (
                r"[\r\n]",
                r"\s?[" + _DEEPSEEK_LETTERS + "]+",
                r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
                r"\s+$",
                _DEEPSEEK_CJK,
                r"\p{N}+",
            )
        ),
        "deepseek-llm",
    ),
    (PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")), "deepseek-coder"),
    (PreTokenizer((r"\p{N}{1,3}", _CHINESE_JAPANESE, _DEEPSEEK3)), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (_FALCON, "falcon"),
    (PreTokenizer((_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (PreTokenizer((_BLOOM, r"\p{N}")), "viking"),
    (
        PreTokenizer(
            (
                r"<sentinel:[0-9]+>",
                r"(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
                r"([\t\n]|    |  )",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            add_bos=True,
        ),
        "chameleon",
    ),
    (
        PreTokenizer(
            (
                r"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|"
                + _WORD
                + r"|\p{N}|"
                + _SYMBOLS
                + r"|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
        "bailingmoe bailingmoe2 llada-moe",
    ),
    (
        PreTokenizer((_CONTRACTION + "|" + _WORD + r"|\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACE_TAIL,)),
        "seed-coder",
    ),
    (PreTokenizer((_WORD + r"|\p{N}|" + _SYMBOLS + _SPACE_TAIL,)), "ufakzeka"),
    (PreTokenizer((r"[^\n]+|[\n]+", _QWEN2)), "laguna"),
    (
        PreTokenizer(
            (
                _CONTRACTION
                + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
                + r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+",
            )
        ),
        "exaone-moe",
    ),
    (
        PreTokenizer(
            (r"\p{N}{1,3}", _CONTRACTION + "|" + _WORD + r"|\p{N}+|" + _SYMBOLS + _SPACE_TAIL), ignore_merges=True
        ),
        "minicpm5",
    ),
    (
        PreTokenizer(
            (
                _CONTRACTION
                + "|"
                + _WORD
                + r"|\p{N}{1,3}|"
                + _SYMBOLS
                + r"|\s*[\r\n]+|"
                + _JAIS2_SPACES
                + r"|\s{1,2}(?!\S)|\s{1}",
            )
        ),
        "jais-2",
    ),
    (PreTokenizer((r"\p{N}+", r"(?=(\d{3})+(?!\d))")), "superbpe"),
)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {name: pre for pre, names in _TABLE for name in names.split()}
