"""The tokenizer of a GGUF file as the files of a model folder, which transformers and everyone else reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llamactl.checkpoint.ggufarrays import read_numbers
from llamactl.checkpoint.ggufparts import read_parts
from llamactl.errors import NotAvailable
from llamactl.tokens.bpe import merges_of
from llamactl.tokens.chat import template_of
from llamactl.tokens.fast import Fast, open_json
from llamactl.tokens.files import TokenFiles
from llamactl.tokens.gguf import Stored, _stored, _types, open_gguf
from llamactl.tokens.ggufspm import KEY, cannot
from llamactl.tokens.pieces import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Pieces,
    _field,
    model_proto,
    open_model,
)
from llamactl.tokens.settings import sampling_defaults
from llamactl.tokens.togguf import LEADING_PROBES, PROBES, first_difference
from llamactl.tokens.tokenizer import STRIP, Tokenizer

_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PIECES = (("unk_token", 45), ("bos_token", 46), ("eos_token", 47), ("pad_token", 48))  # fields of TrainerSpec


def hf_tokenizer(path: str) -> dict[str, bytes] | None:
    """The files by name: tokenizer.json, tokenizer_config.json, generation_config.json, and for scored pieces the
    SentencePiece model as tokenizer.model; scored pieces that no order of merges can say come without a tokenizer.json.
    None for a file without a vocabulary. Rows that no token has ([PAD{id}], unused, at the end) are no tokens here.
    Errors: those of open_gguf; InputRefused tokenizer-format where the files would not give the same tokens.
    """
    try:
        source = open_gguf(path, None)
    except NotAvailable as e:
        if e.code != "tokenizer-missing":
            raise
        return None
    s = _stored(read_parts(path))
    own = len(s.tokens)
    while own and s.types[own - 1] == UNUSED and s.tokens[own - 1] == f"[PAD{own - 1}]":
        own -= 1
    assert isinstance(source.backend, Fast | Pieces)
    frame = source.backend.frame or ((), ())
    config = _config(path, s, source, frame)
    files = {"generation_config.json": _bytes(_generation(path, source))}
    again: list[tuple[str, Tokenizer]] = []
    given = TokenFiles(folder=path, config=config, names=source.names)
    if isinstance(source.backend, Fast):
        state: dict[str, Any] | None = json.loads(source.backend.engine.to_str())
        assert state is not None
        state["model"]["vocab"] = {t: i for t, i in state["model"]["vocab"].items() if i < own}
    else:
        state = _pieces(s, source, own)
        files["tokenizer.model"] = _proto(s, source, own)
        if state is None:
            config |= {"tokenizer_class": "LlamaTokenizer", "legacy": True, "add_prefix_space": source.lead == STRIP}
            again.append(("tokenizer.model", open_model(path, files["tokenizer.model"], given, None)))
    if state is not None:
        state["post_processor"] = _around(s, *frame)
        files["tokenizer.json"] = json.dumps(state, ensure_ascii=False).encode("utf-8")
        again.append(("tokenizer.json", open_json(path, files["tokenizer.json"], given, None)))
    files["tokenizer_config.json"] = _bytes(config)
    special = [s.tokens[i] for i in s.of_types(CONTROL, USER_DEFINED)]
    texts = [*PROBES, *LEADING_PROBES, *(f"it{t}is {t} so{t}" for t in (*special[:4], *special[-4:]))]
    for name, other in again:
        wrong = first_difference(source, other, texts)
        if wrong is not None:
            raise cannot(path, f"a {name} would give the text {wrong!r} other tokens than this vocabulary")
    return files


def _bytes(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, ensure_ascii=False, indent=2) + "\n").encode("utf-8")


def _around(s: Stored, before: Sequence[int], after: Sequence[int]) -> dict[str, Any]:
    """The post-processor that puts these ids around a text."""
    def steps(name: str, kind: int) -> list[dict[str, Any]]:
        def tokens(ids: Sequence[int]) -> list[dict[str, Any]]:
            return [{"SpecialToken": {"id": s.tokens[i], "type_id": kind}} for i in ids]
        return [*tokens(before), {"Sequence": {"id": name, "type_id": kind}}, *tokens(after)]

    special = {s.tokens[i]: {"id": s.tokens[i], "ids": [i], "tokens": [s.tokens[i]]} for i in (*before, *after)}
    return {"type": "TemplateProcessing", "single": steps("A", 0), "pair": steps("A", 0) + steps("B", 1),
            "special_tokens": special}


def _pieces(s: Stored, source: Tokenizer, own: int) -> dict[str, Any] | None:
    """Scored pieces as merges: all ways to put a piece together, the best piece first. None where that is not the same.

    Readers of GGUF merge the leftmost of equal scores. Runs of one character, as Llama 2 has them of spaces, come out
    alike with the longest first; for other pieces of one score no order of merges says it.
    """
    types, scores = _kinds(s, own), _scores(s)
    normal = [i for i, t in enumerate(types) if t == NORMAL]
    ranked = sorted(normal, key=lambda i: (-scores[i], -len(s.tokens[i]), i))
    merges = merges_of({s.tokens[i]: n for n, i in enumerate(ranked)})
    wholes = {a + b for a, b in merges}
    alike: dict[float, list[str]] = {}
    for i in ranked:
        if s.tokens[i] in wholes:
            alike.setdefault(scores[i], []).append(s.tokens[i])
    if s.flag("remove_extra_whitespaces", False) or any(
        len(names) > 1 and len(set("".join(names))) > 1 for names in alike.values()
    ):
        return None
    prefix = source.lead == STRIP
    unknown = next((s.tokens[i] for i, t in enumerate(types) if t == UNKNOWN), None)
    decoders: list[dict[str, Any]] = [{"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                                      {"type": "ByteFallback"}, {"type": "Fuse"}]
    decoders += [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    added = [{"id": i, "content": s.tokens[i], "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": t != USER_DEFINED}
             for i, t in enumerate(types) if t in (CONTROL, UNKNOWN, USER_DEFINED)]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _SPACE]}
        if prefix else _SPACE,
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": decoders},
        "model": {"type": "BPE", "dropout": None, "unk_token": unknown, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": BYTE in types, "ignore_merges": False,
                  "vocab": {t: i for i, t in enumerate(s.tokens[:own])}, "merges": [[a, b] for a, b in merges]},
    }


def _scores(s: Stored) -> list[float]:
    return read_numbers(s.header, KEY + "scores", floats=True) or [0.0] * len(s.tokens)


def _kinds(s: Stored, own: int) -> list[int]:
    """The types as the reader takes them, but for user-defined tokens, which no decoder leaves out."""
    return [USER_DEFINED if s.types[i] == USER_DEFINED and t != UNKNOWN else t
            for i, t in enumerate(list(_types(s))[:own])]


def _proto(s: Stored, source: Tokenizer, own: int) -> bytes:
    """The SentencePiece model of scored pieces, with the names of BOS, EOS and so on."""
    types = _kinds(s, own)
    tokens = [t.replace(" ", "▁") if kind == USER_DEFINED else t
              for t, kind in zip(s.tokens[:own], types, strict=True)]
    proto = model_proto(tokens, _scores(s)[:own], types, prefix=source.lead == STRIP,
                        trim=s.flag("remove_extra_whitespaces", False))
    named = {**source.names, "unk_token": next((s.tokens[i] for i, t in enumerate(types) if t == UNKNOWN), "<unk>")}
    # a message that comes again is merged into the first
    return proto + _field(2, b"".join(_field(n, named[word].encode()) for word, n in _PIECES if word in named))


def _config(path: str, s: Stored, source: Tokenizer, frame: tuple[Sequence[int], Sequence[int]]) -> dict[str, Any]:
    """tokenizer_config.json. The class is the one that takes a tokenizer.json as it stands."""
    arch = s.header.metadata.get("general.architecture")
    length = s.header.metadata.get(f"{arch}.context_length")
    out: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast", **source.names, "add_bos_token": bool(frame[0]),
        "add_eos_token": bool(frame[1]), "clean_up_tokenization_spaces": False,
    }
    if type(length) is int and length > 0:
        out["model_max_length"] = length
    try:
        out["chat_template"] = template_of(path)[1]
    except NotAvailable as e:
        if e.code != "chat-template-missing":
            raise
    return out


def _generation(path: str, source: Tokenizer) -> dict[str, Any]:
    """generation_config.json: the ids, with every token that ends a text, and how tokens are drawn."""
    ids = {f"{word}_id": source.id_of(source.names[word]) for word in ("bos_token", "pad_token")
           if word in source.names}
    ends = sorted(source.ends)
    end: dict[str, Any] = {"eos_token_id": ends[0] if len(ends) == 1 else ends} if ends else {}
    return {**ids, **end, **sampling_defaults(path)}
