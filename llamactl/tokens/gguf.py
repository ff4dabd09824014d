"""The vocabulary in a GGUF file: tokenizer.ggml.*. Source: docs/gguf.md of ggml and llama-vocab.cpp of llama.cpp."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llamactl.checkpoint.gguf import GgufHeader
from llamactl.checkpoint.ggufarrays import read_numbers, read_strings
from llamactl.checkpoint.ggufparts import read_parts
from llamactl.errors import InputRefused, NotAvailable
from llamactl.tokens.bpe import byte_level, spaced
from llamactl.tokens.fast import Fast, style_of
from llamactl.tokens.files import MAX_TOKEN_CHARS
from llamactl.tokens.pieces import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Pieces, model_proto
from llamactl.tokens.splits import splits
from llamactl.tokens.tokenizer import KEEP, STRIP, Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine

_KEY = "tokenizer.ggml."
_BYTES = 256
# Control tokens by which a text ends though no *_token_id says so. Source: special_eog_ids in llama-vocab.cpp
_END_NAMES = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>",
              "<|eom_id|>", "<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>",
              "<｜end▁of▁sentence｜>")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The arrays and flags of one file. types: one of sentencepiece's for each token. named: bos -> id."""

    path: str
    tokens: tuple[str, ...]
    types: tuple[int, ...]
    named: dict[str, int]
    header: GgufHeader

    def flag(self, key: str, default: bool) -> bool:
        """A boolean of the metadata."""
        value = self.header.metadata.get(_KEY + key, default)
        if isinstance(value, bool):
            return value
        raise _refused(self.path, f"{_KEY}{key} must be a boolean, not {value!r}")

    def frame(self, *, bos: bool, always: bool = False) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What stands before and after a text. bos: the vocabulary's default; always: whatever the file says."""
        before = (always or self.flag("add_bos_token", bos)) and "bos" in self.named
        after = self.flag("add_eos_token", False) and "eos" in self.named
        return (self.named["bos"],) if before else (), (self.named["eos"],) if after else ()

    def of_types(self, *kinds: int) -> list[int]:
        """The ids of tokens of these types."""
        return [i for i, t in enumerate(self.types) if t in kinds]

    def ends(self) -> frozenset[int]:
        """eos, eot and eom, and the control tokens that everyone ends a text with."""
        control = {self.tokens[i]: i for i in self.of_types(CONTROL, USER_DEFINED)}
        ends = {i for name, i in control.items() if name in _END_NAMES}
        if {"<|return|>", "<|call|>"} <= control.keys():  # harmony: <|end|> ends one message of several
            ends.discard(control.get("<|end|>", -1))
        return frozenset(ends | {self.named[k] for k in ("eos", "eot", "eom") if k in self.named})

    def names(self) -> dict[str, str]:
        """bos_token and so on for templates."""
        words = (("bos", "bos_token"), ("eos", "eos_token"), ("unknown", "unk_token"), ("padding", "pad_token"),
                 ("seperator", "sep_token"), ("mask", "mask_token"))
        return {word: self.tokens[self.named[key]] for key, word in words if key in self.named}


def open_gguf(path: str, rows: int | None) -> Tokenizer:
    """The vocabulary of a GGUF file, or of the first part of the model it belongs to.

    Errors: InputRefused gguf-header, tokenizer-format, tokenizer-unknown; NotAvailable tokenizer-missing.
    """
    header = read_parts(path)
    kind = header.metadata.get(_KEY + "model")
    if kind is None or kind in ("none", "no_vocab"):
        raise missing(header.path, "no vocabulary in this GGUF file")
    reader = dict(_READERS).get(kind) if isinstance(kind, str) else None
    if reader is None:
        known = ", ".join(name for name, _ in _READERS)
        raise InputRefused("tokenizer-unknown", f"{_KEY}model is {kind!r}; known: {known}", path=header.path,
                           help="give token ids with --tokens")
    return reader(_stored(header), rows)


def missing(path: str, what: str) -> NotAvailable:
    """The error for a model without a vocabulary."""
    return NotAvailable("tokenizer-missing", what, path=path, help="give token ids with --tokens")


def _stored(header: GgufHeader) -> Stored:
    path = header.path
    tokens = read_strings(header, _KEY + "tokens")
    if not tokens:
        raise missing(path, f"{_KEY}tokens is missing or empty")
    types = read_numbers(header, _KEY + "token_type")
    if types is not None and len(types) != len(tokens):
        raise _refused(path, f"{len(tokens):,} tokens, but {len(types):,} types")
    names = [t or f"[EMPTY_{i}]" for i, t in enumerate(tokens)]  # as llama.cpp names them
    if len(set(names)) != len(names):
        raise _refused(path, f"{len(names) - len(set(names)):,} of {len(names):,} tokens stand there twice")
    if max(map(len, names)) > MAX_TOKEN_CHARS:
        raise _refused(path, f"a token of {max(map(len, names)):,} characters; at most {MAX_TOKEN_CHARS:,} are read")
    named = {}
    for key in ("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask"):
        id = header.metadata.get(f"{_KEY}{key}_token_id")
        if isinstance(id, int) and not isinstance(id, bool) and 0 <= id < len(names):  # others mean none
            named[key] = id
    return Stored(path=path, tokens=tuple(names), types=tuple(int(t) for t in types) if types else (1,) * len(names),
                  named=named, header=header)


def _byte_level(s: Stored, rows: int | None) -> Tokenizer:
    """A byte-level BPE, by its merges; tokenizer.ggml.pre says how a text is cut first."""
    name = s.header.metadata.get(_KEY + "pre", "default")
    split = splits().get(name) if isinstance(name, str) else None
    if split is None:
        raise InputRefused("tokenizer-unknown", f"{_KEY}pre is {name!r}: how it cuts a text is not known", path=s.path,
                           help="give token ids with --tokens")
    table = {t: i for i, t in enumerate(s.tokens)}
    engine = byte_level(s.path, table, _merges(s), split.patterns, ignore_merges=split.ignore_merges)
    return _finished(s, engine, bos=split.bos, rows=rows)


def _spaced(s: Stored, rows: int | None) -> Tokenizer:
    """A BPE on characters with ▁ for a space and <0x0A> for a byte no token covers; BOS always stands before a text."""
    engine = spaced(s.path, {t: i for i, t in enumerate(s.tokens)}, _merges(s), cut=r"[^\n]+|[\n]+")
    found = _finished(s, engine, bos=True, rows=rows)
    backend = Fast(engine, style_of(engine)[0], s.frame(bos=True, always=True))
    return replace(found, backend=backend)


def _merges(s: Stored) -> list[tuple[str, str]]:
    merges = read_strings(s.header, _KEY + "merges")
    if merges is None:
        raise _refused(s.path, f"{_KEY}merges is missing")
    pairs = []
    for n, merge in enumerate(merges):
        at = merge.find(" ", 1)
        if at < 0 or at + 1 == len(merge):
            raise _refused(s.path, f"merge {n:,}, {merge[:40]!r}, is not two parts with a space between them")
        pairs.append((merge[:at], merge[at + 1 :]))
    return pairs


def _finished(s: Stored, engine: Engine, *, bos: bool, rows: int | None) -> Tokenizer:
    from tokenizers import AddedToken

    special = s.of_types(CONTROL, UNKNOWN)
    engine.add_special_tokens([AddedToken(s.tokens[i], special=True, normalized=False) for i in special])
    engine.add_tokens([AddedToken(s.tokens[i], special=False, normalized=False) for i in s.of_types(USER_DEFINED)])
    style, lead = style_of(engine)
    backend = Fast(engine, style, s.frame(bos=bos))
    return Tokenizer(kind="gguf", size=len(s.tokens), backend=backend, path=s.path, lead=lead, vocab=rows,
                     skipped=frozenset(special), names=s.names(), ends=s.ends())


def _scored(s: Stored, rows: int | None) -> Tokenizer:
    """Scored pieces with <0x00> to <0xFF> for what they do not cover: the best bigram is merged first."""
    scores = read_numbers(s.header, _KEY + "scores", floats=True) or [0.0] * len(s.tokens)
    if len(scores) != len(s.tokens):
        raise _refused(s.path, f"{len(s.tokens):,} tokens, but {len(scores):,} scores")
    if len(bytes_ := s.of_types(BYTE)) not in (0, _BYTES):
        raise _refused(s.path, f"{len(bytes_):,} byte tokens; all {_BYTES} or none must be there")
    named = {"bos": 1, "eos": 2, "unknown": 0, **s.named}  # defaults of this kind
    s = Stored(path=s.path, tokens=s.tokens, types=s.types, header=s.header,
               named={k: i for k, i in named.items() if i < len(s.tokens)})
    outside = s.of_types(CONTROL, UNKNOWN, USER_DEFINED)
    prefix = s.flag("add_space_prefix", True)
    proto = model_proto(s.tokens, scores, _types(s), prefix=prefix, trim=s.flag("remove_extra_whitespaces", False))
    backend = Pieces(proto, s.path, {s.tokens[i]: i for i in outside}, once=False, frame=s.frame(bos=True))
    return Tokenizer(kind="gguf", size=len(s.tokens), backend=backend, path=s.path, lead=STRIP if prefix else KEEP,
                     vocab=rows, skipped=frozenset(s.of_types(CONTROL, UNKNOWN)), names=s.names(), ends=s.ends())


def _types(s: Stored) -> Sequence[int]:
    """The types as the engine wants them: exactly one unknown, and nothing it does not know."""
    unknown = next(iter(s.of_types(UNKNOWN)), s.named.get("unknown", 0))
    return [UNKNOWN if i == unknown else CONTROL if t in (UNKNOWN, USER_DEFINED) or not 0 < t <= BYTE else t
            for i, t in enumerate(s.types)]


# tokenizer.ggml.model -> its reader
_READERS = (("gpt2", _byte_level), ("llama", _scored), ("gemma4", _spaced))


def _refused(path: str, what: str) -> InputRefused:
    return InputRefused("tokenizer-format", what, path=path, help="download the file again")
