"""The tokenizer of a model folder as the metadata of a GGUF file: tokenizer.ggml.* and tokenizer.chat_template.

Source: docs/gguf.md of ggml, llama-vocab.cpp and the converter of llama.cpp. What GGUF has no word for is refused where
it changes the tokens of ordinary text; what only bears on rare text is told. Before the fields are handed out they are
opened as any reader would, and must give the tokens of the folder's own tokenizer for a list of hard texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from llamactl.checkpoint.gguf import GgufHeader
from llamactl.errors import InputRefused, NotAvailable
from llamactl.tokens.chat import template_of
from llamactl.tokens.fast import Fast, byte_alphabet
from llamactl.tokens.files import MAX_TOKENIZER_BYTES, read_files, read_limited, read_object
from llamactl.tokens.gguf import _READERS, _stored
from llamactl.tokens.ggufspm import FIRST, KEY, LEADING, Fields, Vocabulary, cannot, kinds, parts, pieces, spaced
from llamactl.tokens.opening import open_tokenizer
from llamactl.tokens.pieces import CONTROL, UNUSED, USER_DEFINED, Pieces
from llamactl.tokens.settings import end_tokens
from llamactl.tokens.splits import GPT2, splits
from llamactl.tokens.tokenizer import Tokenizer

_PAD_SCORE = -10000.0  # as the converter of llama.cpp gives it; no piece of a text is ever one of these
_NAMED = (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("seperator", "sep_token"),
          ("padding", "pad_token"), ("mask", "mask_token"))
_NFC = "text is brought into the Unicode form NFC first; readers of GGUF take it as it is"
_BESIDE = ", which GGUF cannot say of a token"
_PROBED_TOKENS = 8
PROBES = (
    "Hello, world!", "it's 1234567 o'clock, they've 3.14159% of I'LL; don't", "a  b   c    d\n\n e\t\tf\r\n\r\n  g \n",
    "trail   ", "naïve Wörter Ünïcödé ßẞ Ελληνικά русский", "日本語のテキスト 한국어 中文，标点。", "🤖🎉🏳️‍🌈👨‍👩‍👧 ☃",
    "def f(x):\n    return x**2  # ----====\n\tif (a!=b)&&{c<=d}: [e]", "https://a.bc/d?e=f&g=%20 foo_bar--baz",
    "aaaaaaa", "".join(f"o{' ' * n}x{'-' * n}\n{'=' * n}" for n in (3, 7, 13, 19, 29, 37)), "ＡＢＣ ½²③ ١٢٣",
    "\x00\x1b\x7f", "\n", "",
)
LEADING_PROBES = (" lead", "   three", " ")


def gguf_tokenizer(folder: str, rows: int, notes: list[str] | None = None) -> Fields:
    """(key, kind, value) of every field that says the tokenizer of `folder`, for a model of `rows` rows.

    notes: takes a sentence for each thing that readers of GGUF do otherwise. A folder without a tokenizer: only
    tokenizer.ggml.model = "none". Errors: InputRefused tokenizer-format for what GGUF cannot say, token-range for more
    tokens than rows; those of open_tokenizer.
    """
    told: list[str] = []
    try:
        source = open_tokenizer(folder, vocab=rows)
    except NotAvailable as e:
        if e.code != "tokenizer-missing":
            raise
        fields: Fields = [(KEY + "model", "STRING", "none")]
        told.append(e.message)
    else:
        if source.size > rows:
            raise InputRefused("token-range", f"{source.size:,} tokens for a model of {rows:,} rows", path=source.path,
                               help="the tokenizer belongs to another model, or the model was not resized for it")
        found = _vocabulary(folder, source, told)
        fields = _arrays(found, rows, source.path) + found.more + _used(folder, source, rows)
        fields += _proven(fields, folder, source, found, told)
    if notes is not None:
        notes += told
    return fields


def first_difference(one: Tokenizer, other: Tokenizer, texts: Iterable[str]) -> str | None:
    """The first of `texts` that the two do not take for the same tokens, or do not write back alike."""
    for text in texts:
        for special in (True, False):
            ids = one.encode(text, special=special)
            if ids != other.encode(text, special=special):
                return text
            if any(one.decode(ids, skip_special=s) != other.decode(ids, skip_special=s) for s in (True, False)):
                return text
    return None


def _vocabulary(folder: str, source: Tokenizer, told: list[str]) -> Vocabulary:
    backend = source.backend
    if isinstance(backend, Fast):
        state = json.loads(backend.engine.to_str())
        model = state["model"]
        if model["type"] != "BPE":
            raise cannot(source.path, f"a vocabulary of type {model['type']}, for which GGUF has no kind that is read")
        for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"):
            if model.get(key):
                raise cannot(source.path, f"{key} is {model[key]!r}, which GGUF cannot say")
        _surroundings(state["added_tokens"], told)
        if backend.style == "bytes":
            return _byte_level(source, state, told)
        return spaced(folder, source, state, told)
    if isinstance(backend, Pieces):
        data = read_limited(folder, "tokenizer.model", MAX_TOKENIZER_BYTES) or b""
        return pieces(source, data, read_files(folder), told)
    raise cannot(source.path, f"a vocabulary of {source.kind}, for which GGUF has no kind")


def _surroundings(added: Sequence[Mapping[str, Any]], told: list[str]) -> None:
    """Tell of added tokens that take more or less than their own text."""
    for key, what in (("lstrip", "takes the spaces before it"), ("rstrip", "takes the spaces behind it"),
                      ("single_word", "is found only as a word of its own")):
        names = [t["content"] for t in added if t[key]]
        if names:
            also = f" (and {len(names) - 1:,} more)" if len(names) > 1 else ""
            told.append(f"the token {names[0]!r}{also} {what}{_BESIDE}")


def _byte_level(source: Tokenizer, state: Mapping[str, Any], told: list[str]) -> Vocabulary:
    """A byte-level BPE: tokenizer.ggml.pre must have a name for its cut."""
    model = state["model"]
    for part in parts(state["normalizer"], "normalizers"):
        if part["type"] != "NFC":
            raise cannot(source.path, f"text is normalized by {part['type']} first, which GGUF cannot say")
        told.append(_NFC)
    if model["unk_token"] is not None and not byte_alphabet().keys() <= model["vocab"].keys():
        raise cannot(source.path, f"{model['unk_token']!r} stands for bytes without a token, which GGUF cannot say")
    patterns = _cut(parts(state["pre_tokenizer"], "pretokenizers"))
    name = next((name for name, split in splits().items()
                 if (split.patterns, split.ignore_merges) == (patterns, model["ignore_merges"])), None)
    if name is None:
        said = json.dumps(state["pre_tokenizer"], ensure_ascii=False)[:400]
        flag = " with ignore_merges" if model["ignore_merges"] else ""
        raise cannot(source.path, f"tokenizer.ggml.pre has no name for the pre-tokenizer {said}{flag}")
    if any(" " in part for merge in model["merges"] for part in merge):
        raise cannot(source.path, "a merge has a part with a space in it, which GGUF cannot say")
    tokens, types = kinds(source, state)
    return Vocabulary("gpt2", tokens, types, [
        (KEY + "pre", "STRING", name),
        (KEY + "merges", "ARRAY:STRING", [" ".join(merge) for merge in model["merges"]]),
        (KEY + "add_space_prefix", "BOOL", False),
    ])


def _cut(steps: Sequence[Mapping[str, Any]]) -> tuple[str, ...] | None:
    """A pre-tokenizer in the words of `splits`; None for one that they cannot say."""
    out: list[str] = []
    for n, part in enumerate(steps, 1):
        pattern = part.get("pattern", {}).get("Regex")
        if part["type"] == "Split" and pattern and part["behavior"] == "Isolated" and not part["invert"]:
            out.append(pattern)
        elif part["type"] == "Digits":
            out.append(r"\p{N}" if part["individual_digits"] else r"\p{N}+")
        elif part["type"] == "ByteLevel" and n == len(steps) and not part["add_prefix_space"]:
            return (*out, *(GPT2 if part["use_regex"] else ()))
        else:
            return None
    return None


def _arrays(found: Vocabulary, rows: int, path: str) -> Fields:
    """The vocabulary by id; a row without a token is [PAD{id}], as the converter of llama.cpp names it."""
    tokens = [found.tokens.get(i, f"[PAD{i}]") for i in range(rows)]
    if len(set(tokens)) != rows:
        seen: set[str] = set()
        twice = next(t for t in tokens if t in seen or seen.add(t))  # type: ignore[func-returns-value]
        raise cannot(path, f"two tokens would be named {twice!r}")
    out: Fields = [(KEY + "model", "STRING", found.kind), (KEY + "tokens", "ARRAY:STRING", tokens)]
    if found.scores is not None:
        scores = [found.scores.get(i, _PAD_SCORE) for i in range(rows)]
        out.append((KEY + "scores", "ARRAY:FLOAT32", scores))
    return [*out, (KEY + "token_type", "ARRAY:INT32", [found.types.get(i, UNUSED) for i in range(rows)])]


def _used(folder: str, source: Tokenizer, rows: int) -> Fields:
    """The ids of special tokens, whether BOS and EOS stand around a text, and the chat template."""
    ids = {key: id for key, word in _NAMED
           if word in source.names and (id := source.id_of(source.names[word])) is not None}
    for key, word in (("bos", "bos_token_id"), ("eos", "eos_token_id"), ("padding", "pad_token_id")):
        said = _said(folder, word)
        if key not in ids and said is not None and said < rows:
            ids[key] = said
    before, after = _frame(source, ids)
    flags = (("bos", before), ("eos", after))
    for key, found in flags:
        if len(found) > 1 or (found and ids.setdefault(key, found[0]) != found[0]):
            raise cannot(source.path, f"a text gets the tokens {[*before]} before and {[*after]} behind it, GGUF has "
                         f"only {ids.get('bos')} before and {ids.get('eos')} behind")
    out: Fields = [(f"{KEY}{key}_token_id", "UINT32", id) for key, id in ids.items()]
    out += [(f"{KEY}add_{key}_token", "BOOL", bool(found)) for key, found in flags]
    try:
        out.append(("tokenizer.chat_template", "STRING", template_of(folder)[1]))
    except NotAvailable as e:
        if e.code != "chat-template-missing":
            raise
    return out


def _said(folder: str, key: str) -> int | None:
    """An id of generation_config.json, else of config.json; the first of a list."""
    for name in ("generation_config.json", "config.json"):
        value = (read_object(folder, name) or {}).get(key)
        value = value[0] if isinstance(value, list) and value else value
        if type(value) is int and value >= 0:
            return value
    return None


def _frame(source: Tokenizer, ids: Mapping[str, int]) -> tuple[Sequence[int], Sequence[int]]:
    """The ids that stand before and behind every text."""
    bare, framed = source.encode("a", special=False), source.encode("a")
    places = [n for n in range(len(framed) - len(bare) + 1) if framed[n : n + len(bare)] == bare]
    cuts = [(framed[:n], framed[n + len(bare) :]) for n in places] or [(framed, framed)]
    wanted = [cut for cut in cuts if all(x in ([], [ids.get(k)]) for x, k in zip(cut, ("bos", "eos"), strict=True))]
    return (wanted or cuts)[0]


def _proven(fields: Fields, folder: str, source: Tokenizer, found: Vocabulary, told: list[str]) -> Fields:
    """Open `fields` as a reader of GGUF does and hold them against `source`; the ends of a text that a reader would
    miss, as fields. Errors: tokenizer-format, with the text whose tokens would be others.
    """
    metadata = {key: tuple(value) if isinstance(value, list) else value for key, _, value in fields}
    header = GgufHeader(path=source.path, file_bytes=0, version=3, alignment=32, data_offset=0, metadata=metadata,
                        tensors=())
    again = dict(_READERS)[found.kind](_stored(header), source.vocab)
    texts = [*PROBES, *(LEADING_PROBES if LEADING not in told else ())]
    if FIRST not in told and not any(t.endswith(_BESIDE) for t in told):
        added = [found.tokens[i] for i, t in found.types.items() if t in (CONTROL, USER_DEFINED)]
        gap = "" if LEADING in told else " "  # the text behind a special token is a text of its own
        texts += [f"it{t}is {t}{gap}so{t}" for t in (*added[: _PROBED_TOKENS // 2], *added[-_PROBED_TOKENS // 2 :])]
    wrong = first_difference(source, again, texts)
    if wrong is not None:
        raise cannot(source.path, f"readers of GGUF would give the text {wrong!r} other tokens than this tokenizer")
    missing = sorted(end_tokens(folder, source) - again.ends)
    if len(missing) > 2:
        told.append(f"{len(missing):,} tokens end a text, GGUF has words for 2: {missing}")
    return [(f"{KEY}{key}_token_id", "UINT32", id) for key, id in zip(("eot", "eom"), missing, strict=False)]
