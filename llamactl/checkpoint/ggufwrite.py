"""Writing a GGUF file, version 3, little-endian: its header from fields and tensor infos, then the data as it comes.

    "GGUF" | u32 3 | u64 tensors | u64 pairs | pairs | infos | padding | tensor, padding, tensor, padding, ...

Everything behind the header begins at a multiple of 32 bytes. The same fields and tensors give the same bytes, those
that the gguf package's writer gives. That package is not asked to: it opens files by path, where a staged one is open
already, and brings numpy, which a copy of tensors does without.
Source: docs/gguf.md of ggml, and what its gguf.cpp refuses.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any, BinaryIO, NamedTuple

from llamactl.checkpoint.gguf import GGML_TYPES, MAX_DIMS

ALIGNMENT = 32  # what a file without general.alignment has
MAX_NAME = 63  # GGML_MAX_NAME without its NUL
_MAX_KEY = 65535
_VERSION = 3

# type word -> (id, struct's letter); STRING and ARRAY have a shape of their own
_NUMBERS = {"UINT8": (0, "B"), "INT8": (1, "b"), "UINT16": (2, "H"), "INT16": (3, "h"), "UINT32": (4, "I"),
            "INT32": (5, "i"), "FLOAT32": (6, "f"), "BOOL": (7, "?"), "UINT64": (10, "Q"), "INT64": (11, "q"),
            "FLOAT64": (12, "d")}
_STRING, _ARRAY = 8, 9
_TYPES = {t.name: (id, t) for id, t in GGML_TYPES.items()}


class Field(NamedTuple):
    """One metadata pair. kind: a GGUF type word, "UINT32", or "ARRAY:" and the type of the elements, "ARRAY:STRING"."""

    key: str
    kind: str
    value: Any


class GgufOut(NamedTuple):
    """One tensor to write. type: GGML's name, e.g. Q8_0. shape: as torch has it, (out, in); the file turns it round."""

    name: str
    type: str
    shape: tuple[int, ...]


Blocks = Callable[[GgufOut], Iterable[bytes | bytearray | memoryview]]


def nbytes(type: str, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor. Raises ValueError for an unknown type and for rows that no whole number of blocks makes."""
    if type not in _TYPES:
        raise ValueError(f"{type!r} is no GGML type")
    block, block_bytes = _TYPES[type][1][1:]
    if shape and shape[-1] % block or not shape and block > 1:
        raise ValueError(f"rows of {shape[-1:] or 1} are no multiple of a {type} block ({block})")
    return math.prod(shape) // block * block_bytes


def file_bytes(fields: Sequence[Field], tensors: Sequence[GgufOut]) -> int:
    """The exact size of the file that write() makes of the same fields and tensors. Raises ValueError as write()."""
    return len(_header(fields, tensors)) + sum(_padded(nbytes(t.type, t.shape)) for t in tensors)


def write(file: BinaryIO, fields: Sequence[Field], tensors: Sequence[GgufOut], blocks: Blocks,
          copied: Callable[[GgufOut], bool] = lambda t: False) -> None:
    """Write a whole file to `file`, which is empty, from its start on; it is never sought in.

    blocks: called once a tensor, in their order; the little-endian bytes of its rows, in pieces of any size.
    copied: appends a tensor to the file by itself where it can, and says whether it did.
    In memory: the header and one piece. Raises ValueError (a bug of the caller) for fields or tensors that GGUF cannot
    hold or llama.cpp does not load, and for blocks that do not add up to the tensor; and whatever `file` and `blocks`
    raise.
    """
    file.write(_header(fields, tensors))
    for t in tensors:
        whole, given = nbytes(t.type, t.shape), 0
        if copied(t):
            file.write(bytes(_padded(whole) - whole))
            continue
        for piece in blocks(t):
            given += memoryview(piece).nbytes
            if given > whole:
                break
            file.write(piece)
        if given != whole:
            more = "more than " if given > whole else ""
            raise ValueError(f"{t.name}: {more}{min(given, whole):,} bytes for a tensor of {whole:,}")
        file.write(bytes(_padded(whole) - whole))


def _padded(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def _header(fields: Sequence[Field], tensors: Sequence[GgufOut]) -> bytes:
    """All before the data, padded."""
    _unique("the key", (f.key for f in fields))
    _unique("the tensor name", (t.name for t in tensors))
    out = bytearray(struct.pack("<4sIQQ", b"GGUF", _VERSION, len(tensors), len(fields)))
    for f in fields:
        _put_field(out, f)
    offset = 0
    for t in tensors:
        offset = _put_info(out, t, offset)
    return bytes(out).ljust(_padded(len(out)), b"\0")


def _unique(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"{what} {name!r} stands there twice")
        seen.add(name)


def _put_field(out: bytearray, f: Field) -> None:
    if not 0 < len(f.key.encode()) <= _MAX_KEY:
        raise ValueError(f"a key of {len(f.key.encode()):,} bytes; GGUF takes 1 to {_MAX_KEY:,}")
    if f.key == "general.alignment" and f.value != ALIGNMENT:
        raise ValueError(f"general.alignment is {f.value!r}, but files are written with {ALIGNMENT}")
    array, _, element = f.kind.partition(":")
    kind = element if array == "ARRAY" else f.kind
    if kind not in _NUMBERS and kind != "STRING":
        raise ValueError(f"{f.key}: {f.kind!r} is no type of a GGUF value")
    id = _STRING if kind == "STRING" else _NUMBERS[kind][0]
    _put_string(out, f.key)
    if array == "ARRAY":
        out += struct.pack("<IIQ", _ARRAY, id, len(f.value))
        _put_values(out, f.key, kind, f.value)
    else:
        out += struct.pack("<I", id)
        _put_values(out, f.key, kind, (f.value,))


def _put_values(out: bytearray, key: str, kind: str, values: Sequence[Any]) -> None:
    wanted: type | tuple[type, ...] = str if kind == "STRING" else bool if kind == "BOOL" else (
        (int, float) if kind.startswith("FLOAT") else int)
    for v in values:
        if not isinstance(v, wanted) or isinstance(v, bool) != (kind == "BOOL"):
            raise ValueError(f"{key}: {v!r} is no {kind}")
    if kind == "STRING":
        for v in values:
            _put_string(out, v)
        return
    letter = _NUMBERS[kind][1]
    if kind.startswith("FLOAT") and not all(map(math.isfinite, values)):
        raise ValueError(f"{key}: a number that is not finite")
    try:
        out += struct.pack(f"<{len(values)}{letter}", *values)
    except (struct.error, OverflowError):
        raise ValueError(f"{key}: {values[0] if len(values) == 1 else 'a number'} is outside {kind}") from None


def _put_string(out: bytearray, text: str) -> None:
    raw = text.encode()
    out += struct.pack("<Q", len(raw))
    out += raw


def _put_info(out: bytearray, t: GgufOut, offset: int) -> int:
    """The info of a tensor whose data begins at `offset`; where the next one's does."""
    length = len(t.name.encode())
    if not 0 < length <= MAX_NAME:
        raise ValueError(f"{t.name}: a name of {length:,} bytes; llama.cpp takes 1 to {MAX_NAME}")
    if len(t.shape) > MAX_DIMS or any(n < 0 for n in t.shape):
        raise ValueError(f"{t.name}: the shape {t.shape}; GGUF takes up to {MAX_DIMS} axes")
    size = nbytes(t.type, t.shape)
    _put_string(out, t.name)
    out += struct.pack(f"<I{len(t.shape)}QIQ", len(t.shape), *reversed(t.shape), _TYPES[t.type][0], offset)
    return offset + _padded(size)
