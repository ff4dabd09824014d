"""Where a text ends and how the model's own files want tokens drawn."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from llamactl.checkpoint.ggufparts import read_parts
from llamactl.errors import InputRefused
from llamactl.tokens.files import MAX_ID, read_object
from llamactl.tokens.tokenizer import Tokenizer

# key of generation_config.json -> (its type, whether a value makes sense, how that is said)
_Check = Callable[[Any], bool]
_SAMPLING: dict[str, tuple[type, _Check, str]] = {
    "do_sample": (bool, lambda x: True, "true or false"),
    "temperature": (float, lambda x: x >= 0, "0 or more"),
    "top_k": (int, lambda x: x >= 0, "0 or more"),
    "top_p": (float, lambda x: 0 < x <= 1, "above 0, at most 1"),
    "min_p": (float, lambda x: 0 <= x < 1, "0 or more, below 1"),
    "repetition_penalty": (float, lambda x: x > 0, "above 0"),
    "max_new_tokens": (int, lambda x: x >= 1, "1 or more"),
}
# Source: docs/gguf.md, general.sampling.*
_GGUF_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
                  "penalty_repeat": "repetition_penalty"}


def sampling_defaults(path: str) -> dict[str, int | float | bool]:
    """What generation_config.json (or general.sampling.* of a GGUF file) says of do_sample, temperature, top_k, top_p,
    min_p, repetition_penalty, max_new_tokens; only what is there. Errors: InputRefused config-type, config-range.
    """
    if os.path.isdir(path):
        data: Mapping[str, Any] = read_object(path, "generation_config.json") or {}
        path = os.path.join(path, "generation_config.json")
    else:
        meta = read_parts(path).metadata
        data = {word: meta.get(f"general.sampling.{key}") for key, word in _GGUF_SAMPLING.items()}
    out: dict[str, int | float | bool] = {}
    for key, (kind, sensible, said) in _SAMPLING.items():
        value = data.get(key)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and math.isfinite(value) if kind is float else type(value) is kind):
            raise InputRefused("config-type", f"{key} must be {said}, not {value!r}", path=path)
        if not sensible(value):
            raise InputRefused("config-range", f"{key} must be {said}, it is {value!r}", path=path)
        out[key] = float(value) if kind is float else value
    return out


def end_tokens(path: str, tokenizer: Tokenizer | None) -> frozenset[int]:
    """The ids that end a text: eos_token_id of generation_config.json, else of config.json, else the eos_token of
    tokenizer_config.json, else what the vocabulary says; of a GGUF file eos, eot, eom and the usual control tokens.
    Empty where nothing says. Errors: InputRefused config-type, config-range.
    """
    if os.path.isdir(path):
        for ids in _said(path):
            if ids is not None:
                return ids
        if tokenizer is not None and "eos_token" in tokenizer.names:
            eos = tokenizer.id_of(tokenizer.names["eos_token"])
            if eos is not None:
                return tokenizer.ends | {eos}
    elif tokenizer is None:
        meta = read_parts(path).metadata
        found = (meta.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom"))
        return frozenset(i for i in found if isinstance(i, int) and not isinstance(i, bool) and 0 <= i < MAX_ID)
    return frozenset() if tokenizer is None else tokenizer.ends


def _said(folder: str) -> Iterator[frozenset[int] | None]:
    yield _ids(read_object(folder, "generation_config.json") or {}, os.path.join(folder, "generation_config.json"))
    path = os.path.join(folder, "config.json")
    config = read_object(folder, "config.json") or {}
    yield _ids(config, path)
    text = config.get("text_config")
    yield _ids(text, path) if isinstance(text, dict) else None


def _ids(data: Mapping[str, Any], path: str) -> frozenset[int] | None:
    """eos_token_id as a set; None where it is not said. -1 means none."""
    value = data.get("eos_token_id")
    if value is None:
        return None
    ids = value if isinstance(value, list) else [value]
    for id in ids:
        if type(id) is not int:
            raise InputRefused("config-type", f"eos_token_id must be an id or a list of ids, not {id!r}", path=path)
        if not -1 <= id < MAX_ID:
            raise InputRefused("config-range", f"eos_token_id must be 0 to {MAX_ID - 1:,}, it is {id!r}", path=path)
    return frozenset(i for i in ids if i >= 0)
