"""Reading a safetensors header: names, dtypes, shapes and byte ranges, never the data.

    u64 little-endian N | N bytes of JSON {name: {dtype, shape, data_offsets: [begin, end]}} | data, without holes

Source: the format section of the safetensors README and its 0.8 library, whose every rule is held here. Stricter than
that library, on purpose: no key twice in any object (the format's own rule), no `__metadata__: null`, an entry is an
object and a dtype a string (serde also takes a list and {"F32": null}), axes and element counts below 2**63, JSON no
deeper than 64 and with at most 1.25 million commas (200,000 tensors), at most 4,096 blanks before the '{'.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from typing import Any, BinaryIO, Never

from llamactl.checkpoint.disk import looks_like, open_regular
from llamactl.errors import InputRefused
from llamactl.spec.jsontext import parse_json

MAX_HEADER_BYTES = 100_000_000
MAX_COMMAS = 1_250_000  # bounds what parsing costs: a tensor of two axes has 5 of them
BITS = {
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "BOOL": 8, "U8": 8, "I8": 8,
    "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
_BLANK = b" \t\r\n"
_PEEK = 4096
_AGAIN = "download the file again"
_JSON_CODES = {"json-duplicate": "st-duplicate", "json-encoding": "st-header-utf8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """One tensor as it lies in the file; `begin` and `end` are bytes, counted from the start of the data."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def elements(self) -> int:
        """Stored elements: the product of the shape, 1 for a scalar. Packed formats hold several weights in one."""
        count = 1
        for n in self.shape:
            count *= n
        return count

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class SafetensorsHeader:
    """What one safetensors file holds. tensors: in the order of the data. notes: (code, message) of odd but read."""

    path: str
    file_bytes: int
    header_bytes: int
    tensors: tuple[StoredTensor, ...]
    metadata: dict[str, str]
    notes: tuple[tuple[str, str], ...] = ()

    @property
    def data_offset(self) -> int:
        """Where the data starts in the file, in bytes."""
        return 8 + self.header_bytes


def read_header(path: str | os.PathLike[str], *, inside: str | os.PathLike[str] | None = None) -> SafetensorsHeader:
    """Read and check the header of the safetensors file at `path`; see the module for the rules.

    inside: the model folder that the file belongs to; a link may then not lead out of it (see disk.open_regular).
    Errors: InputRefused with a code st-…, lfs-pointer, or one of disk.open_regular; NotAvailable when not found.
    """
    path = os.fspath(path)
    file, size = open_regular(path, inside=None if inside is None else os.fspath(inside))
    with file:
        return header_from(file, size, path)


def header_from(file: BinaryIO, size: int, path: str) -> SafetensorsHeader:
    """The same from an open file, or from its first bytes. size: of the whole file. path: its name in errors."""
    try:
        text, blanks = _header_text(file, path, size)
    except OSError as e:
        raise InputRefused("io-error", f"not readable: {e.strerror or e}", path=path) from None
    notes = []
    if blanks:
        notes.append(("st-header-start", f"blanks before the header's '{{': {blanks:,}; the format allows none"))
    header_bytes = len(text)
    root = _parse(text, path)
    metadata = _metadata(root.pop("__metadata__", {}), path)
    tensors = sorted((_tensor(k, v, path) for k, v in root.items()), key=lambda t: (t.begin, t.end))
    _check_layout(tensors, size - 8 - header_bytes, path)
    return SafetensorsHeader(path=path, file_bytes=size, header_bytes=header_bytes, tensors=tuple(tensors),
                             metadata=metadata, notes=tuple(notes))


def _header_text(file: BinaryIO, path: str, size: int) -> tuple[bytes, int]:
    """The header's bytes and the number of blanks before its '{'. Nothing is read that is not known to be there."""
    head = file.read(8)
    n = int.from_bytes(head, "little")
    if len(head) < 8 or n == 0 or n > MAX_HEADER_BYTES or n > size - 8:
        _refuse_if_known(head + file.read(504), path)
        if len(head) < 8:
            _refuse("st-header-short", f"{size:,} bytes; the header's length alone takes 8", path)
        if n == 0:
            _refuse("st-header-json", "the header has 0 bytes", path)
        if n > MAX_HEADER_BYTES:
            _refuse("st-header-too-large", f"a header of {n:,} bytes; at most {MAX_HEADER_BYTES:,} are read", path,
                    "this is not a safetensors file, or it is damaged")
        _refuse("st-header-short", f"a header of {n:,} bytes, but {size - 8:,} bytes follow its length", path)
    text = file.read(min(n, _PEEK))
    blanks = len(text) - len(text.lstrip(_BLANK))
    if not text.startswith(b"{", blanks):
        _refuse_if_known(head + text[:504], path)
        if blanks < n:
            first = repr(text[blanks : blanks + 1])[1:] if blanks < len(text) else f"more than {_PEEK:,} blanks"
            _refuse("st-header-start", f"the header must start with '{{', here is {first}", path)
        _refuse("st-header-json", f"the header is {n:,} blanks", path)
    if n > len(text):
        text += file.read(n - len(text))
    if len(text) < n:  # cut short since it was measured
        _refuse("st-header-short", f"a header of {n:,} bytes, but only {len(text):,} could be read", path)
    return text, blanks


def _parse(text: bytes, path: str) -> dict[str, Any]:
    commas = text.count(b",")
    if commas > MAX_COMMAS:
        _refuse("st-header-too-large", f"a header with {commas:,} commas; at most {MAX_COMMAS:,} are read", path,
                "split the file into shards")
    try:
        root: dict[str, Any] = parse_json(text, path)
    except InputRefused as e:
        _refuse(_JSON_CODES.get(e.code, "st-header-json"), f"in the header: {e.message}", path)
    if _SURROGATE.search(text):  # only an escape can bring one in, and most headers have none
        try:
            json.dumps(root, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            _refuse("st-header-json", "a string in the header holds half of a surrogate pair", path)
    return root


def _metadata(value: Any, path: str) -> dict[str, str]:
    if not isinstance(value, dict):
        _refuse("st-metadata", f"__metadata__ must map strings to strings, it is {_word(value)}", path)
    for k, v in value.items():
        if not isinstance(v, str):
            _refuse("st-metadata", f"__metadata__ {quote(k)} must be a string, it is {_word(v)}", path)
    return value


def _tensor(name: str, entry: Any, path: str) -> StoredTensor:
    """One entry of the header, checked for itself: types, dtype, and shape against length."""
    if type(entry) is not dict:
        _refuse("st-header-json", f"tensor {quote(name)}: {_word(entry)} where an object belongs", path)
    try:
        dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    except KeyError as e:
        _refuse("st-header-json", f"tensor {quote(name)}: no {e.args[0]}", path)
    if type(dtype) is not str or type(shape) is not list or type(offsets) is not list or len(offsets) != 2:
        _refuse("st-header-json", f"tensor {quote(name)}: needs a string dtype, a list shape, two data_offsets", path)
    for n in (*shape, *offsets):
        if type(n) is not int or not 0 <= n < 1 << 64:
            what = _word(n) if isinstance(n, bool | str | list | dict) else n
            _refuse("st-header-json", f"tensor {quote(name)}: {what} in shape or data_offsets, no 64-bit count", path)
    bits = BITS.get(dtype)
    if bits is None:
        _refuse("st-dtype", f"tensor {quote(name)}: unknown dtype {quote(dtype)}", path,
                f"the format has {', '.join(BITS)}")
    elements = 1
    for n in shape:
        elements *= n
        if n >= 1 << 63 or elements >= 1 << 63:
            _refuse("st-shape", f"tensor {quote(name)}: shape {_short(shape)} reaches 2**63 elements", path)
    begin, end = offsets
    if end < begin:
        _refuse("st-offsets", f"tensor {quote(name)}: data_offsets [{begin}, {end}] end before they begin", path)
    if elements * bits != (end - begin) * 8:
        whole, rest = divmod(elements * bits, 8)
        takes = f"{whole:,} bytes" + (f" and {rest} bits" if rest else "")
        _refuse("st-shape", f"tensor {quote(name)}: {dtype} {_short(shape)} takes {takes}, "
                            f"its data_offsets span {end - begin:,}", path)
    return StoredTensor(name=name, dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _check_layout(tensors: list[StoredTensor], data_bytes: int, path: str) -> None:
    """Every byte of the data belongs to exactly one tensor."""
    at, last = 0, None
    for t in tensors:
        if t.begin != at:
            after = "the data starts at 0" if last is None else f"{quote(last.name)} ends at {last.end:,}"
            what = "an overlap" if t.begin < at else "a hole"
            _refuse("st-offsets", f"tensor {quote(t.name)} begins at byte {t.begin:,}, but {after}: "
                                  f"{what} of {abs(t.begin - at):,} bytes", path)
        at, last = t.end, t
    if at > data_bytes:
        name = quote(last.name) if last else ""
        _refuse("st-truncated", f"cut short: tensor {name} ends at byte {at:,} of the data, the file has "
                                f"{max(data_bytes, 0):,}; {at - data_bytes:,} bytes are missing", path)
    if at < data_bytes:
        _refuse("st-trailing", f"{data_bytes - at:,} bytes follow the last tensor; the format allows none", path)


def quote(name: str) -> str:
    """A name from the file for a message: in quotes, at most 120 characters."""
    return repr(name if len(name) <= 120 else name[:117] + "...")


def _word(value: object) -> str:
    """The JSON word for a value's type."""
    words = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return words.get(type(value), "null")


def _short(shape: list[int]) -> str:
    return str(shape) if len(shape) <= 8 else f"[{', '.join(map(str, shape[:8]))}, … {len(shape):,} axes]"


def _refuse_if_known(head: bytes, path: str) -> None:
    known = looks_like(head)
    if known:
        code, what, help = known
        raise InputRefused(code or "st-header", what, path=path, help=help)


def _refuse(code: str, message: str, path: str, help: str = _AGAIN) -> Never:
    raise InputRefused(code, message, path=path, help=help)
