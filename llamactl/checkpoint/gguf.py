"""Reading a GGUF header: metadata and tensor infos, never the data, and the sizes of all GGML types.

    "GGUF" | u32 version | u64 tensors | u64 pairs | pairs: key, u32 type, value | infos: name, u32 n, n x u64 dims,
    u32 GGML type, u64 offset | padding to general.alignment (32) | data; offsets count from its start

Source: docs/gguf.md of ggml and the checks of its gguf.cpp. Every count is held against the bytes that are left before
anything is allocated or looped over. Bounds of our own, so that no header takes more than a second: 100 MB, 131,072
tensors, 65,536 pairs, 4 million strings or 200,000 arrays inside arrays, arrays nested 4 deep.
"""

from __future__ import annotations

import math
import os
import struct
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from llamactl.checkpoint.disk import looks_like, open_regular
from llamactl.checkpoint.ggufcursor import Cursor, refused
from llamactl.checkpoint.safetensors import quote

KEEP = 4096  # arrays of this many elements or more stay on disk (tokenizer.ggml.tokens has 10^5)
MAX_KEPT = 1 << 18  # values of all short arrays together
MAX_WALKED = 4_000_000
MAX_TENSORS = 1 << 17
MAX_PAIRS = 1 << 16
MAX_NESTING = 4
MAX_DIMS = 4  # GGML_MAX_DIMS


class GgmlType(NamedTuple):
    """A GGML tensor type: every `block` elements of a row take `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int


# ggml.h (ids) and ggml-common.h (the size of each block struct). Q8_1 and Q8_K exist while computing, not in files.
GGML_TYPES = {
    0: GgmlType("F32", 1, 4), 1: GgmlType("F16", 1, 2), 2: GgmlType("Q4_0", 32, 18), 3: GgmlType("Q4_1", 32, 20),
    6: GgmlType("Q5_0", 32, 22), 7: GgmlType("Q5_1", 32, 24), 8: GgmlType("Q8_0", 32, 34), 9: GgmlType("Q8_1", 32, 36),
    10: GgmlType("Q2_K", 256, 84), 11: GgmlType("Q3_K", 256, 110), 12: GgmlType("Q4_K", 256, 144),
    13: GgmlType("Q5_K", 256, 176), 14: GgmlType("Q6_K", 256, 210), 15: GgmlType("Q8_K", 256, 292),
    16: GgmlType("IQ2_XXS", 256, 66), 17: GgmlType("IQ2_XS", 256, 74), 18: GgmlType("IQ3_XXS", 256, 98),
    19: GgmlType("IQ1_S", 256, 50), 20: GgmlType("IQ4_NL", 32, 18), 21: GgmlType("IQ3_S", 256, 110),
    22: GgmlType("IQ2_S", 256, 82), 23: GgmlType("IQ4_XS", 256, 136), 24: GgmlType("I8", 1, 1),
    25: GgmlType("I16", 1, 2), 26: GgmlType("I32", 1, 4), 27: GgmlType("I64", 1, 8), 28: GgmlType("F64", 1, 8),
    29: GgmlType("IQ1_M", 256, 56), 30: GgmlType("BF16", 1, 2), 34: GgmlType("TQ1_0", 256, 54),
    35: GgmlType("TQ2_0", 256, 66), 39: GgmlType("MXFP4", 32, 17), 40: GgmlType("NVFP4", 64, 36),
    41: GgmlType("Q1_0", 128, 18), 42: GgmlType("Q2_0", 64, 18),
}
REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
           38: "IQ4_NL_8_8"}

_SCALARS = {0: ("UINT8", "B"), 1: ("INT8", "b"), 2: ("UINT16", "H"), 3: ("INT16", "h"), 4: ("UINT32", "I"),
            5: ("INT32", "i"), 6: ("FLOAT32", "f"), 7: ("BOOL", "B"), 10: ("UINT64", "Q"), 11: ("INT64", "q"),
            12: ("FLOAT64", "d")}
_UINT32, _BOOL, _STRING, _ARRAY = 4, 7, 8, 9


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArray:
    """An array left on disk: `length` values of type `element_type`, the first at byte `begin` of the file."""

    element_type: str
    length: int
    begin: int


GgufValue: TypeAlias = "bool | int | float | str | GgufArray | tuple[GgufValue, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """One tensor. dims: GGUF order, the row length first. offset: bytes from the start of the data."""

    name: str
    dims: tuple[int, ...]
    type: str
    offset: int
    nbytes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The dims in the order of torch: (out, in) for a linear weight."""
        return self.dims[::-1]

    @property
    def elements(self) -> int:
        return math.prod(self.dims)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufHeader:
    """What one GGUF file holds. tensors: in file order. notes: (code, message) of what is odd but read."""

    path: str
    file_bytes: int
    version: int
    alignment: int
    data_offset: int
    metadata: dict[str, GgufValue]
    tensors: tuple[GgufTensor, ...]
    notes: tuple[tuple[str, str], ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors, without header and padding."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def elements(self) -> int:
        return sum(t.elements for t in self.tensors)


def read_header(path: str | os.PathLike[str], *, inside: str | os.PathLike[str] | None = None) -> GgufHeader:
    """Read and check the header of the GGUF file at `path`, version 2 or 3, little-endian.

    inside: as for safetensors.read_header. Errors: InputRefused gguf-header, lfs-pointer, and those of
    disk.open_regular; NotAvailable when not found.
    """
    path = os.fspath(path)
    file, size = open_regular(path, inside=None if inside is None else os.fspath(inside))
    with file:
        return _Reader(Cursor(path, file, size)).header()


class _Reader:
    """The grammar of the header, over a cursor that never reads past the file."""

    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.path = cursor.path
        self.kept = 0
        self.walked = 0

    def header(self) -> GgufHeader:
        cursor = self.cursor
        version, n_tensors, n_pairs = self._start()
        metadata: dict[str, GgufValue] = {}
        alignment_type = _UINT32
        for _ in range(n_pairs):
            key = cursor.string("a key", limit=65535)
            if key in metadata:
                raise refused(self.path, f"the key {quote(key)} stands twice in the metadata")
            kind = cursor.u32(quote(key))
            if key == "general.alignment":
                alignment_type = kind
            metadata[key] = self._value(kind, key, 0)
        alignment = metadata.get("general.alignment", 32)
        if alignment_type != _UINT32 or not isinstance(alignment, int) or alignment.bit_count() != 1:
            raise refused(self.path, f"general.alignment must be a power of two (UINT32), it is {alignment!r}")
        infos = self._infos(n_tensors)
        data = -(-cursor.position // alignment) * alignment
        notes = _check_layout(infos, data, alignment, cursor)
        return GgufHeader(path=self.path, file_bytes=cursor.size, version=version, alignment=alignment,
                          data_offset=data, metadata=metadata, tensors=infos, notes=notes)

    def _start(self) -> tuple[int, int, int]:
        """Version, number of tensors, number of pairs."""
        cursor, path = self.cursor, self.path
        head = cursor.peek(512)
        if not head.startswith(b"GGUF"):
            unknown = f"not GGUF: it starts with {head[:4]!r}" if head else "an empty file"
            code, what, help = looks_like(head) or (None, unknown, None)
            raise refused(path, what, help=help, code=code)
        if cursor.size < 24:
            raise refused(path, f"{cursor.size} bytes; the counts at its start alone take 24")
        _, version, n_tensors, n_pairs = cursor.unpack("<4sIQQ", "the first 24 bytes")
        if version & 0xFFFF == 0 and version:
            raise refused(path, "a big-endian GGUF file; only little-endian files are read",
                          help="convert it with gguf-convert-endian of the gguf package")
        if version not in (2, 3):
            raise refused(path, f"GGUF version {version}; versions 2 and 3 are read",
                          help="convert the model again with a current converter" if version < 2 else None)
        counts = ((n_tensors, "tensors", 24, MAX_TENSORS), (n_pairs, "metadata pairs", 13, MAX_PAIRS))
        for n, what, least, most in counts:
            if n > most:
                raise refused(path, f"it claims {n:,} {what}; at most {most:,} are read")
            if n * least > cursor.left:
                raise refused(path, f"it claims {n:,} {what}, but only {cursor.left:,} bytes follow")
        return version, n_tensors, n_pairs

    def _value(self, kind: int, key: str, depth: int) -> GgufValue:
        cursor = self.cursor
        if kind == _STRING:
            return cursor.string(f"the value of {quote(key)}")
        if kind == _ARRAY:
            return self._array(key, depth + 1)
        values = cursor.unpack("<" + self._scalar(kind, key)[1], quote(key))
        value: int | float = self._bools(values, key)[0] if kind == _BOOL else values[0]
        return value

    def _array(self, key: str, depth: int) -> GgufValue:
        cursor = self.cursor
        if depth > MAX_NESTING:
            raise refused(self.path, f"the array {quote(key)} is nested deeper than {MAX_NESTING} levels")
        kind, length = cursor.unpack("<IQ", quote(key))
        name, letter = {_STRING: ("STRING", ""), _ARRAY: ("ARRAY", "")}.get(kind) or self._scalar(kind, key)
        least = struct.calcsize(letter) if letter else (8 if kind == _STRING else 12)
        if length * least > cursor.left:
            raise refused(self.path, f"the array {quote(key)} claims {length:,} values, {cursor.left:,} bytes are left")
        left_on_disk = GgufArray(element_type=name, length=length, begin=cursor.position)
        keep = length < KEEP and self.kept + length <= MAX_KEPT
        if letter and not keep:
            cursor.skip(length * least)
            return left_on_disk
        if letter:
            self.kept += length
            values = cursor.unpack(f"<{length}{letter}", quote(key))
            return self._bools(values, key) if kind == _BOOL else values
        self.walked += length * (20 if kind == _ARRAY else 1)  # the cost of an array over that of a string
        if self.walked > MAX_WALKED:
            raise refused(self.path, f"too many strings or arrays inside arrays, at {quote(key)}: {length:,} more")
        if not keep and kind == _STRING:
            cursor.skip_strings(length, quote(key))
            return left_on_disk
        if not keep:
            for _ in range(length):
                self._array(key, depth + 1)
            return left_on_disk
        self.kept += length
        return tuple(self._value(kind, key, depth) for _ in range(length))

    def _scalar(self, kind: int, key: str) -> tuple[str, str]:
        if kind not in _SCALARS:
            raise refused(self.path, f"{quote(key)} has the unknown value type {kind}")
        return _SCALARS[kind]

    def _bools(self, values: tuple[int, ...], key: str) -> tuple[bool, ...]:
        if any(v > 1 for v in values):
            raise refused(self.path, f"{quote(key)}: a boolean must be 0 or 1, here is {max(values)}")
        return tuple(v == 1 for v in values)

    def _infos(self, count: int) -> tuple[GgufTensor, ...]:
        cursor, path = self.cursor, self.path
        infos: dict[str, GgufTensor] = {}
        for _ in range(count):
            name = cursor.string("a tensor name", limit=65535)
            if name in infos:
                raise refused(path, f"two tensors are named {quote(name)}")
            n_dims = cursor.u32(quote(name))
            if n_dims > MAX_DIMS:
                raise refused(path, f"tensor {quote(name)} claims {n_dims:,} dimensions; at most {MAX_DIMS}")
            *dims, type_id, offset = cursor.unpack(f"<{n_dims}QIQ", quote(name))
            kind = GGML_TYPES.get(type_id)
            if kind is None:
                what = f"the removed type {REMOVED[type_id]}" if type_id in REMOVED else "an unknown type"
                raise refused(path, f"tensor {quote(name)} has {what} (GGML type {type_id})",
                              help="quantise the model again" if type_id in REMOVED else None)
            elements = 1
            for n in dims:
                elements *= n
                if n >= 1 << 63 or elements >= 1 << 63:
                    raise refused(path, f"tensor {quote(name)}: dimensions {dims} reach 2**63 elements")
            row = dims[0] if dims else 1
            if row % kind.block:
                raise refused(path, f"tensor {quote(name)}: rows of {row:,} are no multiple of a {kind.name} block "
                                    f"({kind.block})")
            infos[name] = GgufTensor(name=name, dims=tuple(dims), type=kind.name, offset=offset,
                                     nbytes=elements // kind.block * kind.block_bytes)
        return tuple(infos.values())


def _check_layout(
    infos: tuple[GgufTensor, ...], data: int, alignment: int, cursor: Cursor
) -> tuple[tuple[str, str], ...]:
    """Every tensor aligned, inside the file and apart from the others; a note when llama.cpp would not load it."""
    end, last = 0, ""
    holes = 0
    for t in sorted(infos, key=lambda t: (t.offset, t.nbytes)):
        if t.offset % alignment:
            raise refused(cursor.path, f"tensor {quote(t.name)} begins at {t.offset:,}, no multiple of {alignment:,}")
        if t.offset < end:
            raise refused(cursor.path, f"tensors {quote(last)} and {quote(t.name)} overlap by {end - t.offset:,} bytes")
        if data + t.offset + t.nbytes > cursor.size:
            raise refused(cursor.path, f"tensor {quote(t.name)} ends at byte {data + t.offset + t.nbytes:,}, the file "
                                       f"has {cursor.size:,}: cut short or damaged")
        holes += t.offset > -(-end // alignment) * alignment
        end, last = t.offset + t.nbytes, t.name
    in_order = all(a.offset <= b.offset for a, b in zip(infos, infos[1:], strict=False))
    if holes or not in_order:
        return (("gguf-layout", "tensors do not follow one another without gaps, in order; llama.cpp refuses this"),)
    return ()
