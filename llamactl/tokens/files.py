"""The small files of a model folder that say how its tokens are used, each read once and checked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from llamactl.checkpoint.disk import check_regular
from llamactl.errors import InputRefused
from llamactl.spec.jsontext import read_bytes, read_json

MAX_TOKENIZER_BYTES = 64_000_000
MAX_TEMPLATE_BYTES = 1_000_000
MAX_ADDED = 1 << 17
MAX_TOKEN_CHARS = 1 << 12
MAX_ID = 1 << 28

# the names that templates know. Source: SPECIAL_TOKENS_ATTRIBUTES of transformers
NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def there(folder: str, name: str) -> str | None:
    """The path of a file of the folder, None where there is none of that name; a broken link is there, and refused."""
    path = os.path.join(folder, name)
    return path if os.path.lexists(path) else None


def read_object(folder: str, name: str) -> dict[str, Any] | None:
    """The JSON object in a file of the folder; None where there is no such file. Errors: those of read_json."""
    path = there(folder, name)
    if path is None:
        return None
    check_regular(path, inside=folder)
    data = read_json(path, finite=False)
    if not isinstance(data, dict):
        raise InputRefused("config-type", "must hold one JSON object", path=path)
    return data


def read_limited(folder: str, name: str, limit: int) -> bytes | None:
    """The bytes of a file of the folder, at most `limit`; None where there is no such file."""
    path = there(folder, name)
    if path is None:
        return None
    check_regular(path, inside=folder)
    return read_bytes(path, limit=limit)


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedToken:
    """A token that stands beside the vocabulary. special: decode leaves it out."""

    text: str
    id: int
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    single_word: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFiles:
    """What tokenizer_config.json, special_tokens_map.json and added_tokens.json of `folder` say.

    config: tokenizer_config.json as it is. names: bos_token and so on, as text. added: tokens with their ids.
    """

    folder: str
    config: Mapping[str, Any]
    names: Mapping[str, str]
    added: tuple[AddedToken, ...] = field(default=())

    def flag(self, key: str) -> bool | None:
        """A boolean of tokenizer_config.json; None where it is not said."""
        value = self.config.get(key)
        if value is None or isinstance(value, bool):
            return value
        raise _wrong(self.folder, "tokenizer_config.json", f"{key} must be true or false")


def read_files(folder: str) -> TokenFiles:
    """Read the three files. Errors: InputRefused config-type, config-range, and those of read_json."""
    config = read_object(folder, "tokenizer_config.json") or {}
    names: dict[str, str] = {}
    for file, data in (("special_tokens_map.json", read_object(folder, "special_tokens_map.json") or {}),
                       ("tokenizer_config.json", config)):
        for key in NAMED:
            value = data.get(key)
            value = value.get("content") if isinstance(value, dict) else value
            if value is not None:
                names[key] = _text(folder, file, key, value)
    return TokenFiles(folder=folder, config=config, names=names, added=_added(folder, config, set(names.values())))


def _added(folder: str, config: Mapping[str, Any], special: set[str]) -> tuple[AddedToken, ...]:
    entries = config.get("added_tokens_decoder")
    out: dict[int, AddedToken] = {}
    if entries is not None:
        file = "tokenizer_config.json"
        if not isinstance(entries, dict) or len(entries) > MAX_ADDED:
            raise _wrong(folder, file, f"added_tokens_decoder must be an object of at most {MAX_ADDED:,} tokens")
        for key, value in entries.items():
            if not key.isascii() or not key.isdigit() or len(key) > 9 or not isinstance(value, dict):
                raise _wrong(folder, file, f"added_tokens_decoder: {key[:20]!r} is no id with a token")
            flags = {k: value.get(k) is True for k in ("special", "lstrip", "rstrip", "normalized", "single_word")}
            id = _id(folder, file, int(key))
            out[id] = AddedToken(text=_text(folder, file, "added_tokens_decoder", value.get("content")), id=id, **flags)
        return tuple(out[i] for i in sorted(out))
    file = "added_tokens.json"
    old = read_object(folder, file) or {}
    if len(old) > MAX_ADDED:
        raise _wrong(folder, file, f"{len(old):,} tokens; at most {MAX_ADDED:,} are read")
    for text, value in old.items():
        id = _id(folder, file, value)
        out[id] = AddedToken(text=_text(folder, file, "a token", text), id=id, special=text in special)
    return tuple(out[i] for i in sorted(out))


def _text(folder: str, file: str, key: str, value: Any) -> str:
    if isinstance(value, str) and 0 < len(value) <= MAX_TOKEN_CHARS:
        return value
    raise _wrong(folder, file, f"{key} must be a token of 1 to {MAX_TOKEN_CHARS:,} characters")


def _id(folder: str, file: str, value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_ID:
        return value
    raise _wrong(folder, file, f"the id of a token must be 0 to {MAX_ID - 1:,}, not {value!r}")


def _wrong(folder: str, file: str, what: str) -> InputRefused:
    return InputRefused("config-type", what, path=os.path.join(folder, file))
