"""The values of a long GGUF array, which the header reader leaves on disk: a vocabulary, merges, scores, types."""

from __future__ import annotations

import math
import struct
from typing import Any, BinaryIO

from llamactl.checkpoint.disk import open_regular
from llamactl.checkpoint.gguf import GgufArray, GgufHeader
from llamactl.checkpoint.ggufcursor import MAX_HEADER_BYTES, refused
from llamactl.checkpoint.ggufparts import read_parts
from llamactl.checkpoint.safetensors import quote
from llamactl.errors import InputRefused

MAX_STRING = 1 << 16  # bytes of one token or merge
_CHUNK = 1 << 20
_U64 = struct.Struct("<Q")
_INTEGERS = {"UINT8": "B", "INT8": "b", "UINT16": "H", "INT16": "h", "UINT32": "I", "INT32": "i", "UINT64": "Q",
             "INT64": "q"}
_FLOATS = {"FLOAT32": "f", "FLOAT64": "d"}


def read_strings(header: GgufHeader, key: str) -> list[str] | None:
    """The strings of the array `key`; None where the file has no such key. Errors: InputRefused gguf-header."""
    value = header.metadata.get(key)
    if value is None:
        return None
    if isinstance(value, tuple) and all(isinstance(x, str) for x in value):
        return [str(x) for x in value]
    if not isinstance(value, GgufArray) or value.element_type != "STRING":
        raise refused(header.path, f"{quote(key)} must be an array of strings")
    file, _ = open_regular(header.path)
    with file:
        try:
            return _strings(file, value, header.path, key)
        except OSError as e:
            raise InputRefused("io-error", f"not readable: {e.strerror or e}", path=header.path) from None


def read_numbers(header: GgufHeader, key: str, *, floats: bool = False) -> list[float] | None:
    """The numbers of the array `key`, all finite; None where the file has no such key. floats: not only integers."""
    value = header.metadata.get(key)
    if value is None:
        return None
    letters = {**_INTEGERS, **(_FLOATS if floats else {})}
    kinds = (int, float) if floats else (int,)
    if isinstance(value, tuple):
        numbers = [x for x in value if isinstance(x, kinds) and not isinstance(x, bool)]
        if len(numbers) != len(value):
            raise refused(header.path, f"{quote(key)} must be an array of {'numbers' if floats else 'integers'}")
    elif isinstance(value, GgufArray) and value.element_type in letters:
        layout = f"<{value.length}{letters[value.element_type]}"
        numbers = list(struct.unpack(layout, _bytes(header.path, value.begin, struct.calcsize(layout), key)))
    else:
        raise refused(header.path, f"{quote(key)} must be an array of {'numbers' if floats else 'integers'}")
    if floats and not all(map(math.isfinite, numbers)):
        raise refused(header.path, f"{quote(key)} holds a number that is not finite")
    return numbers


def _bytes(path: str, begin: int, count: int, key: str) -> bytes:
    if count > MAX_HEADER_BYTES:  # held true by the header reader; the count is looked at again before allocating
        raise refused(path, f"the array {quote(key)} takes {count:,} bytes; at most {MAX_HEADER_BYTES:,} are read")
    file, _ = open_regular(path)
    with file:
        try:
            file.seek(begin)
            data = file.read(count)
        except OSError as e:
            raise InputRefused("io-error", f"not readable: {e.strerror or e}", path=path) from None
    if len(data) != count:
        raise refused(path, f"the file ends {count - len(data):,} bytes before {quote(key)} does")
    return data


def _strings(file: BinaryIO, array: GgufArray, path: str, key: str) -> list[str]:
    """`array.length` strings, each a u64 count of bytes and the bytes; read by chunks, since the end is not known."""
    out: list[str] = []
    file.seek(array.begin)
    window, at, spent = b"", 0, 0
    for n in range(array.length):
        if at + 8 > len(window):
            window, at, spent = window[at:] + file.read(_CHUNK), 0, spent + at
        if at + 8 > len(window):
            raise refused(path, f"the file ends inside {quote(key)}, at value {n:,}")
        size: int = _U64.unpack_from(window, at)[0]
        at += 8
        if size > MAX_STRING or spent + at + size > MAX_HEADER_BYTES:
            raise refused(path, f"value {n:,} of {quote(key)} claims {size:,} bytes; at most {MAX_STRING:,} are read")
        if at + size > len(window):
            window, at, spent = window[at:] + file.read(max(_CHUNK, size)), 0, spent + at
        if at + size > len(window):
            raise refused(path, f"the file ends inside {quote(key)}, at value {n:,}")
        try:
            out.append(window[at : at + size].decode("utf-8"))
        except UnicodeDecodeError:
            raise refused(path, f"value {n:,} of {quote(key)} is not UTF-8") from None
        at += size
    return out


def tokenizer_fields(path: str) -> list[tuple[str, str, Any]]:
    """(key, GGUF type word, value) of every tokenizer.* key, to be written again as it is.

    A short array and a number do not keep their type here: integers are taken for INT32 and UINT32, as they are for
    every key of this name. Errors: InputRefused gguf-header.
    """
    header = read_parts(path)
    found = {key: value for key, value in header.metadata.items() if key.startswith("tokenizer.")}
    return [(key, *_field(header, key, value)) for key, value in found.items()]


def _field(header: GgufHeader, key: str, value: Any) -> tuple[str, Any]:
    if isinstance(value, GgufArray):
        if value.element_type == "STRING":
            return "ARRAY:STRING", read_strings(header, key)
        return f"ARRAY:{value.element_type}", read_numbers(header, key, floats=True)
    words = {bool: "BOOL", int: "UINT32", float: "FLOAT32", str: "STRING"}
    if isinstance(value, tuple):
        kinds = {type(x) for x in value} or {str}
        if len(kinds) == 1 and (kind := kinds.pop()) in words:
            return f"ARRAY:{'INT32' if kind is int else words[kind]}", list(value)
    elif type(value) in words:
        return words[type(value)], value
    raise refused(header.path, f"{quote(key)} is of no type that can be written again")
