"""Writing what torch.save writes, without torch: a zip of one pickle and one stored entry a storage, tensor by tensor.

    {archive}/data.pkl | byteorder | data/0, data/1, ... | version | the zip's directory

A reader maps the file, so every entry's data starts at a multiple of 64 bytes, by padding in its local header's extra
field. The same tree and the same tensors give the same bytes: no dates, no random serialization_id.
Source: files of torch 2.13, and its reader; PKWARE's APPNOTE 6.3 for the zip; pickletools for the opcodes.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable
from typing import Any, BinaryIO, NamedTuple

from llamactl.checkpoint.safetensors import BITS


class TorchTensor(NamedTuple):
    """One contiguous tensor to write. The same object at two places of a tree is one storage there: tied weights.

    name: what errors call it. dtype: a safetensors word. shape: () is a scalar, an axis of 0 an empty tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


Blocks = Callable[[TorchTensor], Iterable[bytes | bytearray | memoryview]]


class _Entry(NamedTuple):
    """One entry of the zip. at, data: where its local header and its bytes start in the file. source: of its bytes."""

    name: bytes
    at: int
    data: int
    nbytes: int
    source: bytes | TorchTensor


_ALIGNMENT = 64
_LIMIT16, _LIMIT32 = 0xFFFF, 0xFFFFFFFF  # a count or size from here on stands in a zip64 field
_UTF8 = 0x800
_DATE = 0x21  # 1980-01-01, the first day a zip knows
_LOCAL, _CENTRAL = struct.Struct("<4s5H3I2H"), struct.Struct("<4s6H3I5H2I")
_END64, _LOCATOR64, _END = struct.Struct("<4sQ2H2I4Q"), struct.Struct("<4sIQI"), struct.Struct("<4s4H2IH")
_PADDED_BY = b"FB"  # the id of torch's own padding field

# safetensors dtype -> torch's storage class; those without one are of one byte each, and name their torch dtype
_STORAGES = {"F64": "DoubleStorage", "F32": "FloatStorage", "F16": "HalfStorage", "BF16": "BFloat16Storage",
             "I64": "LongStorage", "I32": "IntStorage", "I16": "ShortStorage", "I8": "CharStorage",
             "U8": "ByteStorage", "BOOL": "BoolStorage"}
_UNTYPED = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
_TUPLES = {0: b")", 1: b"\x85", 2: b"\x86", 3: b"\x87"}


def file_bytes(tree: Any, archive: str) -> int:
    """The exact size of the file that write() makes of the same tree. Raises ValueError as write() does."""
    entries, at = _layout(tree, archive)
    return at + sum(len(_central(e, 0)) for e in entries) + _END64.size + _LOCATOR64.size + _END.size


def write(file: BinaryIO, tree: Any, blocks: Blocks, *, archive: str) -> None:
    """Write `tree` to an empty, seekable `file`, so that torch.load gives it back, weights_only and mmap too.

    tree: dicts with str keys (their order is kept), lists, tuples, str, int, float, bool, None and TorchTensor.
    blocks: called once a TorchTensor object, in the order of the tree; the little-endian bytes of its elements, row by
    row, in pieces of any size. archive: the folder inside the zip; torch takes the file's name without its ending.
    In memory: one block, the pickle and the directory. Raises ValueError (a bug of the caller) for a tree or an archive
    that cannot be written, and for blocks that do not add up to the tensor; and whatever the file or `blocks` raise.
    """
    entries, at = _layout(tree, archive)
    if file.tell():
        raise ValueError(f"a torch file starts at byte 0, this one is at {file.tell():,}")
    directory = bytearray()
    for e in entries:
        _put(file, _local(e, 0))
        crc = _copy(file, e, blocks)
        file.seek(e.at)  # the checksum is known only now
        _put(file, _local(e, crc))
        file.seek(e.data + e.nbytes)
        directory += _central(e, crc)
    _put(file, directory)
    _put(file, _end(len(entries), len(directory), at))


def _copy(file: BinaryIO, e: _Entry, blocks: Blocks) -> int:
    """Write the bytes of one entry; their CRC-32. Nothing past the announced length is ever written."""
    crc, done = 0, 0
    for block in (e.source,) if isinstance(e.source, bytes) else blocks(e.source):
        view = memoryview(block)
        if not view.nbytes:  # such a view cannot be cast
            continue
        done += view.nbytes
        if done > e.nbytes:
            raise ValueError(f"{_said(e)}: the blocks have at least {done:,} bytes, the tensor {e.nbytes:,}")
        view = view.cast("B")
        crc = zlib.crc32(view, crc)
        _put(file, view)
    if done < e.nbytes:
        raise ValueError(f"{_said(e)}: the blocks have {done:,} bytes, the tensor {e.nbytes:,}")
    return crc


def _said(e: _Entry) -> str:
    return repr(e.source.name) if isinstance(e.source, TorchTensor) else repr(e.name)


def _put(file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
    """All of `data`: a file without a buffer may take less at a time."""
    with memoryview(data) as view:
        at = 0
        while at < len(view):
            at += file.write(view[at:])


def _layout(tree: Any, archive: str) -> tuple[list[_Entry], int]:
    """Every entry where it will lie, and where the last one ends.

    No .format_version and .storage_alignment: they promise torch's own distances, with 16 or 24 bytes after each entry,
    and its reader may then compute offsets instead of reading them.
    """
    folder = archive.encode()
    if not 0 < len(folder) <= 255 or b"/" in folder or b"\\" in folder or b"\0" in folder:
        raise ValueError(f"{archive!r} cannot be the folder inside a torch file")
    pickler = _Pickler()
    pickler.add(tree)
    files: list[tuple[bytes, int, bytes | TorchTensor]] = [
        (b"data.pkl", 0, b"\x80\x02" + b"".join(pickler.out) + b"."),
        (b"byteorder", 0, b"little"),
        *((b"data/%d" % key, nbytes, tensor) for key, nbytes, tensor in pickler.storages.values()),
        (b"version", 0, b"3\n"),
    ]
    entries, at = [], 0
    for name, nbytes, source in files:
        name = folder + b"/" + name
        nbytes = len(source) if isinstance(source, bytes) else nbytes
        least = at + _LOCAL.size + len(name) + (20 if nbytes >= _LIMIT32 else 0) + 4
        data = least + -least % _ALIGNMENT
        entries.append(_Entry(name, at, data, nbytes, source))
        at = data + nbytes
    return entries, at


def _local(e: _Entry, crc: int) -> bytes:
    """The header before an entry's data, padded up to it."""
    size = _clip32(e.nbytes)
    extra = _zip64(e.nbytes, e.nbytes) if e.nbytes >= _LIMIT32 else b""
    pad = e.data - e.at - _LOCAL.size - len(e.name) - len(extra) - 4
    extra += struct.pack("<2sH", _PADDED_BY, pad) + b"Z" * pad
    return _LOCAL.pack(b"PK\3\4", _version(e), _UTF8, 0, 0, _DATE, crc, size, size, len(e.name), len(extra)) \
        + e.name + extra


def _central(e: _Entry, crc: int) -> bytes:
    """An entry in the directory."""
    size, at = _clip32(e.nbytes), _clip32(e.at)
    long = [e.nbytes, e.nbytes] * (e.nbytes >= _LIMIT32) + [e.at] * (e.at >= _LIMIT32)
    extra = _zip64(*long) if long else b""
    version = _version(e)
    return _CENTRAL.pack(b"PK\1\2", version, version, _UTF8, 0, 0, _DATE, crc, size, size, len(e.name), len(extra),
                         0, 0, 0, 0, at) + e.name + extra


def _end(entries: int, directory: int, at: int) -> bytes:
    """The end of the file. torch writes the zip64 record whether it is needed or not, and so do we."""
    count = entries if entries < _LIMIT16 else 0xFFFF
    return (_END64.pack(b"PK\6\6", _END64.size - 12, 45, 45, 0, 0, entries, entries, directory, at)
            + _LOCATOR64.pack(b"PK\6\7", 0, at + directory, 1)
            + _END.pack(b"PK\5\6", 0, 0, count, count, _clip32(directory), _clip32(at), 0))


def _zip64(*values: int) -> bytes:
    return struct.pack(f"<2H{len(values)}Q", 1, 8 * len(values), *values)


def _clip32(n: int) -> int:
    return n if n < _LIMIT32 else 0xFFFFFFFF


def _version(e: _Entry) -> int:
    """The zip version that a reader of this entry needs: 4.5 for zip64."""
    return 45 if max(e.nbytes, e.at) >= _LIMIT32 else 20


class _Pickler:
    """Protocol 2, in the opcodes that torch's restricted unpickler reads.

    out: the opcodes so far. storages: id of a TorchTensor -> (key, bytes, the tensor), in the order of the keys.
    """

    __slots__ = ("_memo", "out", "storages")

    def __init__(self) -> None:
        self.out: list[bytes] = []
        self.storages: dict[int, tuple[int, int, TorchTensor]] = {}
        self._memo: dict[bytes, int] = {}  # of the words that every tensor repeats; fewer than 256

    def add(self, value: Any) -> None:
        kind = type(value)
        if kind is TorchTensor:
            self._tensor(value)
        elif kind is str:
            self.out.append(_text(value))
        elif kind is bool:
            self.out.append(b"\x88" if value else b"\x89")
        elif kind is int:
            self.out.append(_whole(value))
        elif kind is float:
            self.out.append(b"G" + struct.pack(">d", value))
        elif value is None:
            self.out.append(b"N")
        elif kind is dict:
            self._dict(value)
        elif kind is list:
            self.out.append(b"](" if value else b"]")
            for x in value:
                self.add(x)
            self.out.append(b"e" if value else b"")
        elif kind is tuple:
            self._tuple(value)
        else:
            raise ValueError(f"a torch file of plain values cannot hold a {kind.__name__}")

    def _dict(self, value: dict[Any, Any]) -> None:
        self.out.append(b"}(" if value else b"}")
        for key, x in value.items():
            if type(key) is not str:
                raise ValueError(f"a key must be a string, {key!r} is a {type(key).__name__}")
            self.out.append(_text(key))
            self.add(x)
        self.out.append(b"u" if value else b"")

    def _tuple(self, values: tuple[Any, ...]) -> None:
        if len(values) > 3:
            self.out.append(b"(")
        for x in values:
            self.add(x)
        self.out.append(_TUPLES.get(len(values), b"t"))

    def _tensor(self, t: TorchTensor) -> None:
        """_rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks); _v3 has a dtype behind them."""
        typed = _STORAGES.get(t.dtype)
        if typed is None and t.dtype not in _UNTYPED:
            raise ValueError(f"{t.name!r}: no torch storage for dtype {t.dtype!r}")
        elements, strides = 1, []
        for n in reversed(t.shape):
            if type(n) is not int or n < 0:
                raise ValueError(f"{t.name!r}: {t.shape!r} is no shape")
            strides.append(elements)
            elements *= max(n, 1)  # as torch strides an empty tensor
        if 0 in t.shape:
            elements = 0
        nbytes = elements * BITS[t.dtype] // 8
        key, _, _ = self.storages.setdefault(id(t), (len(self.storages), nbytes, t))
        self._word(b"ctorch._utils\n_rebuild_tensor_v%d\n" % (2 if typed else 3))
        self.out.append(b"((")
        self._word(_text("storage"))
        self._word(b"ctorch\n%s\n" % typed.encode() if typed else b"ctorch.storage\nUntypedStorage\n")
        self.out.append(_text(str(key)))
        self._word(_text("cpu"))
        self.out.append(_whole(elements) + b"tQK\0")
        self._tuple(t.shape)
        self._tuple(tuple(reversed(strides)))
        self.out.append(b"\x89")
        self._word(b"ccollections\nOrderedDict\n")
        self.out.append(b")R")
        if not typed:
            self._word(b"ctorch\n%s\n" % _UNTYPED[t.dtype].encode())
        self.out.append(b"tR")

    def _word(self, op: bytes) -> None:
        """An opcode that puts the same value on the stack each time; from the second time on, its number."""
        number = self._memo.get(op)
        if number is None:
            number = self._memo[op] = len(self._memo)
            self.out.append(op + b"q%c" % number)
        else:
            self.out.append(b"h%c" % number)


def _text(value: str) -> bytes:
    raw = value.encode("utf-8", "surrogatepass")  # as the unpickler decodes it
    return b"X" + struct.pack("<I", len(raw)) + raw


def _whole(n: int) -> bytes:
    """An int in the shortest opcode. Raises ValueError beyond 255 bytes of it."""
    if 0 <= n < 1 << 16:
        return b"K%c" % n if n < 256 else b"M" + struct.pack("<H", n)
    if -1 << 31 <= n < 1 << 31:
        return b"J" + struct.pack("<i", n)
    raw = n.to_bytes(n.bit_length() // 8 + 1, "little", signed=True)
    if len(raw) > 255:
        raise ValueError(f"an integer of {len(raw):,} bytes")
    return b"\x8a%c" % len(raw) + raw
