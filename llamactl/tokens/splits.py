"""How a text is cut into pieces before BPE, by the names that GGUF files give in tokenizer.ggml.pre.

Each entry is a list of regular expressions; one cuts the pieces of the one before into its matches and the rest.
Source: llm_tokenizer_bpe of llama.cpp, which has the expressions of the models' own tokenizer.json. Where its regex
engine needed a rewrite, the original stands here.
"""

from __future__ import annotations

from typing import NamedTuple

_CONTRACTED = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD_ENDS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_THREE_DIGITS = r"\p{N}{1,3}"
_LETTERS_DEEPSEEK = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


def _cased(ending: str, digits: str) -> str:
    """Words cut before a capital; `ending` belongs to the word before it."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    before = r"[^\r\n\p{L}\p{N}]?"
    return (f"{before}{upper}*{lower}+{ending}|{before}{upper}+{lower}*{ending}|{digits}"
            r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


GPT2 = (r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",)
LLAMA3 = (rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_WORD_ENDS}",)
QWEN2 = (rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_WORD_ENDS}",)
_DIGITS_GPT2 = (_DIGIT, *GPT2)
_TEKKEN = (_cased("", r"\p{N}"),)
_GPT4O = (_cased(f"{_CONTRACTED}?", _THREE_DIGITS),)
_QWEN35 = (rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+",)
_HAN_DEEPSEEK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_V3 = (
    _THREE_DIGITS, "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_DEEPSEEK = (
    r"[\r\n]", rf"\s?[{_LETTERS_DEEPSEEK}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+", r"\s+$", _HAN_DEEPSEEK, r"\p{N}+",
)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _HAN_DEEPSEEK, _DIGIT)
_FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", *GPT2, "[0-9][0-9][0-9]")
_DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", *GPT2, r"\p{N}+", "[0-9][0-9][0-9]")
_BLOOM = (r" ?[^(\s|.,!?" "\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c" ")]+",)
_BAILING = (r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]"
            r"|\s+(?!\S)|\s+",)
_SEED = (rf"{_CONTRACTED}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+",)


class Split(NamedTuple):
    """A way to cut a text. ignore_merges: a piece that is a token is taken as it is. bos: add_bos_token's default."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    bos: bool = False


# The names are values of tokenizer.ggml.pre, not names of models: several of them mean one and the same cut.
_NAMED: tuple[tuple[str, Split], ...] = (
    ("default", Split(_DEFAULT)),
    ("gpt-2 phi-2 gigachat a.x-4.0 mellum modern-bert mpt olmo jais trillion granite-docling exaone4", Split(GPT2)),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", Split(_DIGITS_GPT2)),
    ("llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2", Split(LLAMA3, True, True)),
    ("dbrx smaug-bpe chatglm-bpe", Split(LLAMA3)),
    ("glm4 glm5", Split(LLAMA3, True)),
    ("qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2", Split(QWEN2)),
    ("qwen35", Split(_QWEN35)),
    ("tekken", Split(_TEKKEN, True, True)),
    ("gpt-4o llama4 kanana2 minimax-m2", Split(_GPT4O)),
    ("deepseek-llm", Split(_DEEPSEEK)),
    ("deepseek-coder", Split(_DEEPSEEK_CODER)),
    ("deepseek-v3 hunyuan-dense joyai-llm", Split(_DEEPSEEK_V3)),
    ("falcon", Split(_FALCON)),
    ("bloom poro-chat gpt3-finnish", Split(_BLOOM)),
    ("viking", Split((*_BLOOM, _DIGIT))),
    ("bailingmoe bailingmoe2 llada-moe", Split(_BAILING)),
    ("seed-coder", Split(_SEED)),
)


def splits() -> dict[str, Split]:
    """Every name of tokenizer.ggml.pre that is known, with its cut."""
    return {name: split for names, split in _NAMED for name in names.split()}
