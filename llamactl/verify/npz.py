"""The arrays of an .npz: a zip of .npy files, mapped where they are stored as they are, unpacked where they are not."""

from __future__ import annotations

import mmap
import zipfile
import zlib
from typing import IO, Any, BinaryIO

import torch
from torch import Tensor

from llamactl.checkpoint.disk import open_regular
from llamactl.checkpoint.pickles import MAX_DIRECTORY_BYTES, _directory_bytes
from llamactl.checkpoint.safetensors import quote
from llamactl.verify.npy import Array, LazyFile, Npy, Raw, npy_header, refused

MAX_ARRAYS = 10_000
MAX_UNPACKED = 4 << 30  # bytes of one packed array: it is unpacked into memory
_BLOCK = 1 << 20
_AGAIN = "save it again, or copy it whole"
_DAMAGED = (zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, EOFError, RuntimeError)


def npz_arrays(file: BinaryIO, size: int, path: str) -> dict[str, Array]:
    """The arrays of the opened .npz of `size` bytes, by name. Raises InputRefused saved-format."""
    directory = _directory_bytes(file, size)
    if directory is None or directory > MAX_DIRECTORY_BYTES:
        raise refused(path, "a zip without its end: cut short" if directory is None else
                      f"a zip directory of {directory:,} bytes; at most {MAX_DIRECTORY_BYTES:,} are read", _AGAIN)
    mapped, by = LazyFile(path, size), {}
    try:
        with zipfile.ZipFile(file) as z:
            _check(z.infolist(), size, path)
            for e in z.infolist():
                with z.open(e) as f:
                    h = npy_header(f, e.file_size, path, e.filename)
                stored = e.compress_type == zipfile.ZIP_STORED
                raw = _stored(mapped, _start(file, e, size, path), h, e) if stored else _packed(path, h, e)
                name = e.filename.removesuffix(".npy")
                by[name] = h.array(name, raw)
    except _DAMAGED as e:
        raise refused(path, f"a damaged zip: {e}", _AGAIN) from None
    return by


def _check(entries: list[zipfile.ZipInfo], size: int, path: str) -> None:
    """Refuse what is no .npz, and what would take more to unpack than anyone needs."""
    names = [e.filename for e in entries]
    if any(n.endswith("data.pkl") for n in names):
        raise refused(path, "a file of torch.save, which holds a pickle and is never read")
    if len(names) > MAX_ARRAYS or len(set(names)) < len(names):
        what = "a name twice" if len(names) <= MAX_ARRAYS else f"{len(names):,} arrays; at most {MAX_ARRAYS:,} are read"
        raise refused(path, f"a zip with {what}")
    for e in entries:
        stored, name = e.compress_type == zipfile.ZIP_STORED, quote(e.filename)
        if not e.filename.endswith(".npy"):
            raise refused(path, f"a zip that holds {name}, which is no .npy array")
        if e.flag_bits & 1 or not (stored or e.compress_type == zipfile.ZIP_DEFLATED):
            raise refused(path, f"{name} is encrypted, or packed in another way than numpy packs")
        if e.compress_size > size or (stored and e.file_size != e.compress_size):
            raise refused(path, f"{name} is said to take {e.compress_size:,} bytes and to have {e.file_size:,}, in a "
                          f"file of {size:,}", _AGAIN)
        if e.file_size > MAX_UNPACKED and not stored:
            raise refused(path, f"{name} unpacks to {e.file_size:,} bytes; at most {MAX_UNPACKED:,} are unpacked",
                          "save it with numpy.savez, which does not pack")


def _start(file: BinaryIO, e: zipfile.ZipInfo, size: int, path: str) -> int:
    """Where the bytes of a stored entry begin."""
    file.seek(e.header_offset)
    local = file.read(30)
    start = e.header_offset + 30 + int.from_bytes(local[26:28], "little") + int.from_bytes(local[28:30], "little")
    if len(local) < 30 or start + e.file_size > size:
        raise refused(path, f"{quote(e.filename)} does not lie in the file", _AGAIN)
    return start


def _stored(mapped: LazyFile, start: int, h: Npy, e: zipfile.ZipInfo) -> Raw:
    def raw(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        file, _ = open_regular(mapped.path)
        with file:
            file.seek(start)
            crc, left = 0, e.file_size
            while left and (block := file.read(min(_BLOCK, left))):
                crc, left = zlib.crc32(block, crc), left - len(block)
        if left or crc != e.CRC:
            raise refused(mapped.path, f"{quote(e.filename)} is damaged: its checksum differs", _AGAIN)
        return mapped.tensor(start + h.offset, h.nbytes, dtype, shape)

    return raw


def _packed(path: str, h: Npy, e: zipfile.ZipInfo) -> Raw:
    def raw(dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        if not h.nbytes:
            return torch.empty(shape, dtype=dtype)
        memory = mmap.mmap(-1, h.nbytes)  # no page of it is used before it is written to
        file, _ = open_regular(path)
        try:
            with file, zipfile.ZipFile(file) as z, z.open(e) as f, memoryview(memory) as view:
                f.read(h.offset)
                at = _fill(f, view)
                f.read(1)  # the checksum is compared at the end
        except _DAMAGED as x:
            raise refused(path, f"{quote(e.filename)} is damaged: {x}", _AGAIN) from None
        if at < h.nbytes:
            raise refused(path, f"{quote(e.filename)} unpacks to {at:,} bytes, not {h.nbytes:,}", _AGAIN)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).view(shape)

    return raw


def _fill(file: IO[bytes], view: memoryview) -> int:
    """Read as much as there is room for; how much it was."""
    at, source = 0, file
    reader: Any = source  # zipfile's has readinto
    while at < len(view) and (n := reader.readinto(view[at : at + _BLOCK])):
        at += n
    return at
