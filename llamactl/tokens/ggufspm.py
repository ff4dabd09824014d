"""SentencePiece vocabularies as GGUF has them: pieces with scores, from a tokenizer.model or from merges."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from llamactl.errors import InputRefused
from llamactl.tokens.bpe import is_ranks, merges_of
from llamactl.tokens.fast import Fast
from llamactl.tokens.files import MAX_TOKENIZER_BYTES, TokenFiles, read_limited
from llamactl.tokens.pieces import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED
from llamactl.tokens.tokenizer import KEEP, STRIP, Tokenizer

Fields = list[tuple[str, str, Any]]

KEY = "tokenizer.ggml."
FIRST = ("only the start of a text gets a space before it; readers of GGUF give one to the text behind each special "
         "token too")
LEADING = "a text that begins with a space gets no second one; readers of GGUF give it one"
TRIMMED = "spaces in a row become one; some readers of GGUF keep them"
BYTES = tuple(f"<0x{b:02X}>" for b in range(256))
_BPE = 2  # TrainerSpec.ModelType; 1, the default, is Unigram


class Vocabulary(NamedTuple):
    """kind: tokenizer.ggml.model. tokens: names by id; types and scores likewise. more: what this kind alone has."""

    kind: str
    tokens: dict[int, str]
    types: dict[int, int]
    more: Fields
    scores: dict[int, float] | None = None


class Piece(NamedTuple):
    """One piece of a SentencePiece model; type as in tokenizer.ggml.token_type."""

    text: str
    score: float
    type: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Proto:
    """A SentencePiece model. bpe: merged by score, else Unigram. prefix, trim, escape, charsmap: what is done to a text
    first (a space before it, spaces in a row to one, ▁ for a space, a table of characters). suffix: ▁ behind a word.
    """

    pieces: tuple[Piece, ...]
    bpe: bool
    prefix: bool
    trim: bool
    escape: bool
    charsmap: bool
    suffix: bool


def cannot(path: str, what: str) -> InputRefused:
    """The refusal of a tokenizer that the other layout has no words for."""
    return InputRefused("tokenizer-format", what, path=path, help="convert the weights without the tokenizer")


def parts(state: Mapping[str, Any] | None, inner: str) -> list[Mapping[str, Any]]:
    """A normalizer or pre-tokenizer of a tokenizer.json as the list of what it does in turn."""
    if state is None:
        return []
    return [p for s in state[inner] for p in parts(s, inner)] if state["type"] == "Sequence" else [state]


def kinds(source: Tokenizer, state: Mapping[str, Any]) -> tuple[dict[int, str], dict[int, int]]:
    """Names and types by id, of the vocabulary of a tokenizer.json and of the tokens added to it."""
    tokens = {id: name for name, id in state["model"]["vocab"].items()}
    types = dict.fromkeys(tokens, NORMAL)
    for t in state["added_tokens"]:
        tokens[t["id"]] = t["content"]
        types[t["id"]] = CONTROL if t["id"] in source.skipped else USER_DEFINED
    return tokens, types


def spaced(folder: str, source: Tokenizer, state: Mapping[str, Any], told: list[str]) -> Vocabulary:
    """A tokenizer.json made from a SentencePiece model: merges of characters with ▁ for a space. Scores
    follow the order of the merges, else they are those of the tokenizer.model beside it. Errors: tokenizer-format.
    """
    model, path = state["model"], source.path
    prefix = _prefix(path, state, told)
    if not model["byte_fallback"] or not set(BYTES) <= model["vocab"].keys() or model["ignore_merges"]:
        raise cannot(path, "a BPE on characters that is none of SentencePiece: all 256 bytes must be tokens, "
                     "byte_fallback true and ignore_merges false")
    if source.lead != (STRIP if prefix else KEEP) or not isinstance(source.backend, Fast) or not source.backend.style:
        raise cannot(path, "text is put together from tokens in a way that GGUF cannot say")
    tokens, types = kinds(source, state)
    types.update({model["vocab"][b]: BYTE for b in BYTES})
    if model["unk_token"] in model["vocab"]:
        types[model["vocab"][model["unk_token"]]] = UNKNOWN
    scores = _scores(model, {tokens[i]: i for i, t in types.items() if t == NORMAL})
    if scores is None:
        scores = _from_model(folder, path, tokens, types)
    return _scored(tokens, types, scores, prefix=prefix, trim=False)


def _prefix(path: str, state: Mapping[str, Any], told: list[str]) -> bool:
    """Whether a text gets a space before it. Errors: tokenizer-format for what no SentencePiece model does."""
    steps = parts(state["normalizer"], "normalizers"), parts(state["pre_tokenizer"], "pretokenizers")
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    nothing = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    if steps == ([{"type": "Prepend", "prepend": "▁"}, space], []):
        return True
    if steps in (([space], []), ([space], [nothing])):  # the split finds no space any more
        return False
    if not steps[0] and len(steps[1]) == 1:
        meta = steps[1][0]
        if (meta["type"], meta.get("replacement"), meta.get("split")) == ("Metaspace", "▁", False):
            if meta["prepend_scheme"] != "never":
                told += [LEADING] + ([FIRST] if meta["prepend_scheme"] == "first" else [])
            return bool(meta["prepend_scheme"] != "never")
    said = json.dumps([state["normalizer"], state["pre_tokenizer"]], ensure_ascii=False)[:300]
    raise cannot(path, f"the normalizer and pre-tokenizer {said} are none of a SentencePiece model")


def _scores(model: Mapping[str, Any], normal: Mapping[str, int]) -> dict[int, float] | None:
    """A score for each piece that puts the merges into their order: those two are merged whose whole scores best.
    None where no scores can. normal: the ids of ordinary pieces by their names.
    """
    merges = [(a, b) for a, b in model["merges"] if a in normal and b in normal and a + b in normal]
    order = {whole: n for n, whole in enumerate(dict.fromkeys(a + b for a, b in merges))}
    ranks = [order[a + b] for a, b in merges]
    order |= {t: len(order) + n for n, t in enumerate([t for t in normal if t not in order])}
    if ranks != sorted(ranks) or set(merges) != set(merges_of(order)):
        return None
    return {normal[t]: -float(n) for t, n in order.items()}


def _from_model(folder: str, path: str, tokens: Mapping[int, str], types: Mapping[int, int]) -> dict[int, float]:
    """The scores of the tokenizer.model beside a tokenizer.json, which must have the same pieces."""
    data = read_limited(folder, "tokenizer.model", MAX_TOKENIZER_BYTES)
    if data is None or is_ranks(data[:4096]):
        raise cannot(path, "the merges are not those of pieces with scores, and GGUF has only scores for this kind; "
                     "there is no SentencePiece model tokenizer.model to take them from")
    own = read_model(data, path).pieces
    wrong = [i for i, t in types.items() if t == NORMAL and not (i < len(own) and own[i].text == tokens[i])]
    if wrong:
        raise cannot(path, f"the token {wrong[0]:,} is {tokens[wrong[0]]!r}, which is not what tokenizer.model has "
                     f"there, and {len(wrong) - 1:,} more")
    return {i: p.score for i, p in enumerate(own)}


def _scored(
    tokens: dict[int, str], types: dict[int, int], scores: Mapping[int, float], *, prefix: bool, trim: bool
) -> Vocabulary:
    # a reader finds these tokens in the text as it is given, where a space is no ▁ yet
    tokens |= {i: tokens[i].replace("▁", " ") for i, t in types.items() if t == USER_DEFINED}
    more: Fields = [(KEY + "add_space_prefix", "BOOL", prefix)]
    more += [(KEY + "remove_extra_whitespaces", "BOOL", True)] if trim else []
    return Vocabulary("llama", tokens, types, more, {i: scores.get(i, 0.0) for i in tokens})


def pieces(source: Tokenizer, data: bytes, files: TokenFiles, told: list[str]) -> Vocabulary:
    """A SentencePiece model itself, with the tokens that the folder's files add. Errors: tokenizer-format."""
    proto = read_model(data, source.path)
    if not proto.bpe:
        raise cannot(source.path, "a SentencePiece model whose type is not BPE (Unigram, words, characters); "
                     "GGUF has no kind for it that is read")
    if proto.charsmap or proto.suffix or not proto.escape:
        raise cannot(source.path, "a SentencePiece model that changes the text before it cuts it, or has its spaces "
                     "behind the words, which GGUF cannot say")
    own = len(proto.pieces)
    tokens = {i: p.text for i, p in enumerate(proto.pieces)}
    types = {i: p.type for i, p in enumerate(proto.pieces)}
    for i in range(source.size):
        name = source.backend.token(i)
        if name is not None and (i >= own or (i in source.skipped and types[i] != UNKNOWN)):
            tokens[i], types[i] = name, CONTROL if i in source.skipped else USER_DEFINED
    if proto.prefix and (files.flag("legacy") is False or USER_DEFINED in types.values()):
        told.append(FIRST)
    told += [TRIMMED] if proto.trim else []
    return _scored(tokens, types, {i: p.score for i, p in enumerate(proto.pieces)}, prefix=proto.prefix,
                   trim=proto.trim)


def read_model(data: bytes, path: str) -> Proto:
    """The pieces and rules of a serialized ModelProto. Errors: tokenizer-format. Source: sentencepiece_model.proto."""
    found: list[Piece] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    try:
        for field, value in _wire(data):
            if field == 1:
                piece = dict(_wire(value))
                score = struct.unpack("<f", piece.get(2, b"\0\0\0\0"))[0]
                found.append(Piece(bytes(piece.get(1, b"")).decode("utf-8"), score, piece.get(3, NORMAL)))
            elif field in (2, 3):
                (trainer if field == 2 else normalizer).update(_wire(value))
    except (ValueError, TypeError, IndexError, struct.error) as e:
        raise cannot(path, f"not a SentencePiece model: {e}") from None
    return Proto(pieces=tuple(found), bpe=trainer.get(3) == _BPE, suffix=bool(trainer.get(24)),
                 prefix=bool(normalizer.get(3, True)), trim=bool(normalizer.get(4, True)),
                 escape=bool(normalizer.get(5, True)), charsmap=bool(normalizer.get(2)))


def _wire(data: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of one protobuf message: an integer, or the bytes of a string, a message or a fixed number."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    while at < len(data):
        key = varint()
        wire = key & 7
        if wire == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 2: -1, 5: 4}.get(wire)
        if size is None:
            raise ValueError(f"a field of the unknown wire type {wire}")
        size = varint() if size < 0 else size
        if at + size > len(data):
            raise ValueError(f"a field of {size:,} bytes where {len(data) - at:,} are left")
        yield key >> 3, data[at : at + size]
        at += size
