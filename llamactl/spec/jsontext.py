"""Strict JSON for untrusted files: no duplicate keys, no NaN, bounded depth, utf-8 with or without a BOM.

`json` alone accepts NaN, keeps the last of two equal keys and raises RecursionError on deep nesting; each of these
has let a wrong number through somewhere, so they are refused here, once, for every file that llamactl reads.
"""

from __future__ import annotations

import math
import os
import stat
from typing import Any

from llamactl.errors import InputRefused, NotAvailable

MAX_DEPTH = 64
MAX_JSON_BYTES = 64 * 1000 * 1000  # config and index files
MAX_COMMAS = 4_000_000  # a value costs tens of bytes once parsed: 100 MB of "1,1,1" would take seconds and gigabytes
MAX_DIGITS = 300  # of an integer that is taken as a float


def read_bytes(path: str, *, limit: int = MAX_JSON_BYTES) -> bytes:
    """The bytes of a regular file of at most `limit` bytes. Never blocks on a FIFO, never reads a device."""
    try:
        info = os.stat(path)
    except FileNotFoundError:
        if os.path.islink(path):
            target = os.readlink(path)
            raise InputRefused("dangling-link", f"a link to nothing: it points to {target}", path=path,
                               help="download the file again, or repair the link") from None
        raise NotAvailable("not-found", "no such file", path=path) from None
    except (OSError, ValueError) as e:
        raise _unreadable(path, e) from None
    if not stat.S_ISREG(info.st_mode):
        raise InputRefused("not-a-file", "not a regular file", path=path)
    if info.st_size > limit:
        raise InputRefused("json-too-large", f"{info.st_size:,} bytes; at most {limit:,} are read", path=path)
    try:
        with open(path, "rb") as f:
            data = f.read(limit + 1)
    except OSError as e:
        raise _unreadable(path, e) from None
    if len(data) > limit:  # the file grew after stat
        raise InputRefused("json-too-large", f"more than {limit:,} bytes", path=path)
    return data


def _unreadable(path: str, e: Exception) -> InputRefused:
    code = "io-permission" if isinstance(e, PermissionError) else "io-error"
    reason = getattr(e, "strerror", None) or str(e)
    return InputRefused(code, f"cannot be read: {reason}", path=path)


def read_json(path: str, *, finite: bool = True) -> Any:
    """Parse the JSON file at `path`; see `parse_json`."""
    return parse_json(read_bytes(path), path, finite=finite)


def parse_json(data: bytes, path: str, *, finite: bool = True) -> Any:
    """Parse untrusted JSON bytes; `path` names the file in errors. Raises InputRefused, never anything else.

    finite=False lets NaN and Infinity through as floats, and integers of more than 20 digits, for a reader that checks
    every value it uses: published files hold them under keys that nobody counts with (Mamba's time_step_limit,
    model_max_length in tokenizer_config.json).
    """
    import json  # here, because a bundled preset needs none

    if not data or data.isspace():
        raise InputRefused("json-empty", "empty file", path=path, help="download the file again")
    if data.startswith(b"version https://git-lfs"):
        raise InputRefused("lfs-pointer", "a Git LFS pointer, not the file itself", path=path,
                           help="run 'git lfs pull'")
    if data.count(b",") > MAX_COMMAS:
        raise InputRefused("json-too-large", f"more than {MAX_COMMAS:,} values", path=path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as e:
        raise InputRefused("json-encoding", f"not UTF-8 (byte {e.start})", path=path,
                           help="save the file as UTF-8") from None

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(items)
        if len(out) != len(items):
            seen: set[str] = set()
            twice = next(k for k, _ in items if k in seen or seen.add(k))  # type: ignore[func-returns-value]
            raise InputRefused("json-duplicate", f"the key {twice!r} stands twice in one object", path=path)
        return out

    def constant(word: str) -> float:
        if not finite:
            return float(word)
        raise InputRefused("config-type", "holds a number that is not finite, which JSON does not have", path=path)

    def integer(digits: str) -> int | float:
        if not finite and 20 < len(digits) <= MAX_DIGITS:
            return float(digits)  # transformers' model_max_length of 10**30: "no limit"
        if len(digits) > 20:
            raise InputRefused("config-range", f"an integer of {len(digits)} digits", path=path)
        return int(digits) if digits != "-0" else -0.0  # a float, as serde and JavaScript read it

    def real(digits: str) -> float:
        value = float(digits)
        if math.isinf(value):
            raise InputRefused("config-range", "a number beyond the range of a 64-bit float", path=path)
        return value

    deep = InputRefused("json-depth", f"nested deeper than {MAX_DEPTH} levels", path=path)
    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant, parse_int=integer,
                           parse_float=real)
    except RecursionError:
        raise deep from None
    except json.JSONDecodeError as e:
        raise InputRefused("json-syntax", f"not JSON: line {e.lineno}, column {e.colno}: {e.msg}", path=path) from None
    if isinstance(value, dict | list) and too_deep(value):
        raise deep
    return value


def too_deep(value: Any) -> bool:
    """Whether containers nest deeper than MAX_DEPTH; breadth first, so that no input can exhaust the stack."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            for child in (node.values() if isinstance(node, dict) else node)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
