"""Byte-level BPE put together in memory: vocab.json with merges.txt, and the ranks of a tiktoken file."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from llamactl.errors import InputRefused
from llamactl.spec.jsontext import parse_json
from llamactl.tokens.fast import add_tokens, byte_alphabet, finish, framing, guarded
from llamactl.tokens.files import MAX_TOKEN_CHARS, AddedToken, TokenFiles
from llamactl.tokens.splits import LLAMA3, QWEN2
from llamactl.tokens.tokenizer import Tokenizer, extra_missing

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Engine

MAX_VOCAB = 1 << 21
LLAMA3_RANKS = 128_000
LLAMA3_SPECIAL = 256
# The named ones among the 256 special tokens behind the ranks, by place. Source: Tokenizer of Meta's llama-models.
_LLAMA3_NAMED = {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 4: "<|finetune_right_pad_id|>", 5: "<|step_id|>",
                 6: "<|start_header_id|>", 7: "<|end_header_id|>", 8: "<|eom_id|>", 9: "<|eot_id|>",
                 10: "<|python_tag|>"}
_LLAMA3_ENDS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")
_RANK = re.compile(rb"([A-Za-z0-9+/]+={0,2}) (\d{1,9})\r?\n?")


class _Cut(NamedTuple):
    """classes: values of tokenizer_class. types: of model_type, which stand for a class where none is named."""

    classes: str
    types: str
    split: Sequence[str] | None
    nfc: bool


# How a text is split before BPE stands in no file beside vocab.json, only in the class that the files name.
_CUTS = (
    _Cut("GPT2Tokenizer GPT2TokenizerFast", "gpt2 gpt_neo gptj", None, False),
    _Cut("Qwen2Tokenizer Qwen2TokenizerFast", "qwen2 qwen2_moe qwen3 qwen3_moe", QWEN2, True),
)


def byte_level(
    path: str, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], split: Sequence[str] | None, *,
    ignore_merges: bool = False, prefix_space: bool = False,
) -> Engine:
    """A byte-level BPE. split: regular expressions, each cutting the pieces of the one before it into matches and the
    rest; None: GPT-2's, which the engine has built in. prefix_space: a text begins with a space. ignore_merges: a piece
    that is a token is taken as it is. Errors: tokenizer-format, extra-missing.
    """
    try:
        from tokenizers import Regex, decoders, models, pre_tokenizers
        from tokenizers import Tokenizer as Engine
    except ImportError:
        raise extra_missing("tokenizers") from None

    def build() -> Engine:
        engine = Engine(models.BPE(vocab=dict(vocab), merges=list(merges), ignore_merges=ignore_merges))
        engine.pre_tokenizer = pre_tokenizers.Sequence([
            *(pre_tokenizers.Split(Regex(r), "isolated") for r in split or ()),
            pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=split is None),
        ])
        engine.decoder = decoders.ByteLevel()
        return engine

    return guarded(path, "a BPE vocabulary", build)


def spaced(path: str, vocab: Mapping[str, int], merges: Sequence[tuple[str, str]], *, cut: str) -> Engine:
    """A BPE on characters, with ▁ for a space and <0x0A> for a byte that no token covers. cut: a regular expression."""
    try:
        from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
        from tokenizers import Tokenizer as Engine
    except ImportError:
        raise extra_missing("tokenizers") from None

    def build() -> Engine:
        engine = Engine(models.BPE(vocab=dict(vocab), merges=list(merges), byte_fallback=True, fuse_unk=True))
        engine.normalizer = normalizers.Replace(" ", "▁")
        engine.pre_tokenizer = pre_tokenizers.Split(Regex(cut), "isolated")
        engine.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        return engine

    return guarded(path, "a BPE vocabulary", build)


def open_vocab_json(
    path: str, vocab: bytes, merges_path: str, merges: bytes, files: TokenFiles, model_type: str | None,
    rows: int | None,
) -> Tokenizer:
    """A vocab.json (token to id) with merges.txt (two parts a line, the most frequent first).

    Errors: InputRefused tokenizer-format; tokenizer-unknown where no file says how a text is split.
    """
    said = files.config.get("tokenizer_class")
    cuts = {name: cut for cut in _CUTS for name in (cut.types if said is None else cut.classes).split()}
    cut = cuts.get(str(said if said is not None else model_type))
    if cut is None:
        raise InputRefused("tokenizer-unknown", "vocab.json and merges.txt do not say how a text is split before BPE, "
                           f"and tokenizer_class is {said!r}", path=path,
                           help="add the tokenizer.json of the model (save_pretrained of its tokenizer writes it)")
    table = vocabulary(path, parse_json(vocab, path))
    engine = byte_level(path, table, merge_lines(merges_path, merges), cut.split,
                        prefix_space=bool(files.flag("add_prefix_space")))
    if cut.nfc:
        from tokenizers import normalizers

        engine.normalizer = normalizers.NFC()
    known = [AddedToken(text=t, id=table[t], special=True) for t in dict.fromkeys(files.names.values()) if t in table]
    add_tokens(path, engine, known)
    frame = framing(engine.token_to_id, files.names, bos=bool(files.flag("add_bos_token")),
                    eos=bool(files.flag("add_eos_token")))
    return finish("vocab.json", path, engine, files, vocab=rows, frame=frame)


def vocabulary(path: str, data: Any) -> dict[str, int]:
    """Token to id, checked: every id of 0..n-1 once or fewer, short names."""
    if not isinstance(data, dict) or not 0 < len(data) <= MAX_VOCAB:
        raise InputRefused("tokenizer-format", f"must be one object of 1 to {MAX_VOCAB:,} tokens", path=path)
    for token, id in data.items():
        if type(id) is not int or not 0 <= id < MAX_VOCAB or len(token) > MAX_TOKEN_CHARS:
            raise InputRefused("tokenizer-format", f"the token {token[:40]!r} has the id {id!r}; an id is 0 to "
                               f"{MAX_VOCAB - 1:,}", path=path)
    if len(set(data.values())) != len(data):
        raise InputRefused("tokenizer-format", "two tokens have the same id", path=path)
    return data


def merge_lines(path: str, data: bytes) -> list[tuple[str, str]]:
    """merges.txt: an optional line "#version: ...", then two parts with a space between them on each line."""
    try:
        lines = data.decode("utf-8-sig").split("\n")  # not splitlines: other line ends are parts of tokens
    except UnicodeDecodeError as e:
        raise InputRefused("tokenizer-format", f"not UTF-8 (byte {e.start:,})", path=path) from None
    lines = [line.removesuffix("\r") for line in lines]
    merges = []
    for n, line in enumerate(lines, 1):
        if not line or (n == 1 and line.startswith("#version")):
            continue
        parts = line.split(" ")
        if len(parts) != 2 or not all(parts):
            raise InputRefused("tokenizer-format", f"line {n:,} is not two parts with a space between them", path=path)
        merges.append((parts[0], parts[1]))
    return merges


def is_ranks(head: bytes) -> bool:
    """Whether a file begins as a tiktoken one does: a token in base64, a space, its rank."""
    line = head.split(b"\n", 1)[0]
    return _RANK.fullmatch(line) is not None


def read_ranks(path: str, data: bytes) -> dict[bytes, int]:
    """The tokens of a tiktoken file, by rank 0..n-1. Errors: InputRefused tokenizer-format."""
    ranks: dict[bytes, int] = {}
    for n, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        found = _RANK.fullmatch(line)
        try:
            token = base64.b64decode(found[1], validate=True) if found else b""
        except binascii.Error:
            token = b""
        if not found or not token or token in ranks:
            raise InputRefused("tokenizer-format", f"line {n:,} is not a new token in base64 and its rank", path=path)
        ranks[token] = int(found[2])
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise InputRefused("tokenizer-format", f"the ranks of {len(ranks):,} tokens are not 0 to {len(ranks) - 1:,}",
                           path=path)
    return ranks


def open_ranks(path: str, data: bytes, files: TokenFiles, rows: int | None) -> Tokenizer:
    """A tiktoken file. Only the ranks stand in it; split and special tokens are known for Llama 3 alone, which has
    128,000 ranks and a model of 128,256 rows. Errors: tokenizer-format; tokenizer-unknown for any other.
    """
    ranks = read_ranks(path, data)
    if len(ranks) != LLAMA3_RANKS or rows not in (None, LLAMA3_RANKS + LLAMA3_SPECIAL):
        given = f"{len(ranks):,} ranks of a tiktoken vocabulary" + (f" for a model of {rows:,} rows" if rows else "")
        raise InputRefused("tokenizer-unknown", f"{given}; how a text is split and which tokens are special is known "
                           f"for {LLAMA3_RANKS:,} ranks and {LLAMA3_RANKS + LLAMA3_SPECIAL:,} rows alone", path=path,
                           help="add the tokenizer.json of the model")
    letters = {b: c for c, b in byte_alphabet().items()}
    table = {"".join(letters[b] for b in token): rank for token, rank in ranks.items()}
    engine = byte_level(path, table, merges_of(table), LLAMA3, ignore_merges=True)
    special = []
    reserved = iter(range(LLAMA3_SPECIAL))
    for n in range(LLAMA3_SPECIAL):
        text = _LLAMA3_NAMED.get(n) or f"<|reserved_special_token_{next(reserved)}|>"
        special.append(AddedToken(text=text, id=LLAMA3_RANKS + n, special=True))
    add_tokens(path, engine, special)
    ids = {t.text: t.id for t in special}
    names = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>", **files.names}
    named = TokenFiles(folder=files.folder, config=files.config, names=names, added=files.added)
    bos, eos = files.flag("add_bos_token"), files.flag("add_eos_token")
    frame = framing(engine.token_to_id, names, bos=bos is not False, eos=bool(eos))
    ends = frozenset(ids[t] for t in _LLAMA3_ENDS)
    return finish("tiktoken", path, engine, named, vocab=rows, frame=frame, ends=ends)


def merges_of(table: Mapping[str, int]) -> list[tuple[str, str]]:
    """All ways to put a token together from two others, in the order of the whole, then of its left and right part."""
    merges = []
    for token in sorted(table, key=table.__getitem__):
        ways = [(table[token[:n]], table[token[n:]], n) for n in range(1, len(token))
                if token[:n] in table and token[n:] in table]
        merges += [(token[:n], token[n:]) for _, _, n in sorted(ways)]
    return merges
