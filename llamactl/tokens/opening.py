"""Which vocabulary a model has, from the files that lie there."""

from __future__ import annotations

import os

from llamactl.checkpoint.disk import unreadable
from llamactl.errors import InputRefused
from llamactl.spec.jsontext import MAX_JSON_BYTES
from llamactl.tokens.bpe import is_ranks, open_ranks, open_vocab_json
from llamactl.tokens.fast import open_json
from llamactl.tokens.files import MAX_TOKENIZER_BYTES, read_files, read_limited, read_object
from llamactl.tokens.gguf import missing, open_gguf
from llamactl.tokens.pieces import open_model
from llamactl.tokens.raw import byt5_tokenizer
from llamactl.tokens.tokenizer import Tokenizer

_OTHERS = ("tekken.json", "spiece.model", "sentencepiece.bpe.model", "vocab.txt")  # seen, named, not read


def open_tokenizer(path: str, *, model_type: str | None = None, vocab: int | None = None) -> Tokenizer:
    """The tokenizer of the model folder or the GGUF file at `path`.

    A folder: tokenizer.json, else tokenizer.model (SentencePiece or tiktoken, by content), else vocab.json with
    merges.txt, else bytes where tokenizer_config.json says ByT5. model_type: the config's, which stands in for the
    tokenizer class of vocab.json where none is named. vocab: the rows of the model's embedding, else config.json's.
    Errors: NotAvailable tokenizer-missing, extra-missing, not-found; InputRefused tokenizer-format,
    tokenizer-unknown, token-range and those of the readers of JSON and GGUF.
    """
    try:
        is_folder = os.path.isdir(path) or (os.stat(path) and False)
    except (OSError, ValueError) as e:
        raise unreadable(path, e) from None
    if not is_folder:
        return open_gguf(path, vocab)
    said = _config(path)
    model_type, vocab = model_type or said[0], vocab or said[1]
    files = read_files(path)
    data = read_limited(path, "tokenizer.json", MAX_TOKENIZER_BYTES)
    if data is not None:
        return open_json(os.path.join(path, "tokenizer.json"), data, files, vocab)
    data = read_limited(path, "tokenizer.model", MAX_TOKENIZER_BYTES)
    if data is not None:
        name = os.path.join(path, "tokenizer.model")
        return open_ranks(name, data, files, vocab) if is_ranks(data[:4096]) else open_model(name, data, files, vocab)
    data = read_limited(path, "vocab.json", MAX_JSON_BYTES)
    merges = read_limited(path, "merges.txt", MAX_TOKENIZER_BYTES)
    if data is not None and merges is not None:
        return open_vocab_json(os.path.join(path, "vocab.json"), data, os.path.join(path, "merges.txt"), merges, files,
                               model_type, vocab)
    if files.config.get("tokenizer_class") == "ByT5Tokenizer":
        return byt5_tokenizer(path, vocab=vocab)
    other = [name for name in _OTHERS if os.path.exists(os.path.join(path, name))]
    raise missing(path, f"no tokenizer that is read, only {other[0]}" if other else
                  "no tokenizer.json, tokenizer.model or vocab.json with merges.txt in this folder")


def _config(folder: str) -> tuple[str | None, int | None]:
    """model_type and vocab_size of config.json, of the text model inside where there is one."""
    data = read_object(folder, "config.json") or {}
    inner = data.get("text_config")
    text = inner if isinstance(inner, dict) else {}
    model_type, vocab = data.get("model_type"), text.get("vocab_size", data.get("vocab_size"))
    if vocab is not None and (type(vocab) is not int or vocab < 1):
        raise InputRefused("config-range", f"vocab_size is {vocab!r}", path=os.path.join(folder, "config.json"))
    return model_type if isinstance(model_type, str) else None, vocab
