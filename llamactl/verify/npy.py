"""One saved array, and the header of an .npy file, which is read without numpy.

Source: numpy's NEP 1 (the .npy format, versions 1 to 3).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import IO

import torch
from torch import Tensor

from llamactl.checkpoint.safetensors import quote
from llamactl.errors import InputRefused
from llamactl.net.weights_mapped import MappedFile

MAGIC = b"\x93NUMPY"
HELP = "save it with numpy.save, numpy.savez or safetensors"
_PLAIN = "save one plain float array"
_MAX_HEADER = 10_000  # as in numpy
_HEADER = re.compile(r"\s*\{\s*'descr'\s*:\s*'([^'\\]{1,16})'\s*,\s*'fortran_order'\s*:\s*(True|False)\s*,"
                     r"\s*'shape'\s*:\s*\(([0-9L,\s]{0,200})\)\s*,?\s*\}\s*")
_DTYPES = {"f2": torch.float16, "f4": torch.float32, "f8": torch.float64, "i1": torch.int8, "i2": torch.int16,
           "i4": torch.int32, "i8": torch.int64, "u1": torch.uint8, "u2": torch.uint16, "u4": torch.uint32,
           "u8": torch.uint64, "b1": torch.bool}
_MAX_AXES = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Array:
    """One saved array. kind: its type as the file says it; dtype: None where that is no plain number.

    read: gives it, as a view of the file where it can be; not to be written to.
    """

    name: str
    kind: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


class LazyFile:
    """A file that is mapped when its first array is read."""

    def __init__(self, path: str, size: int) -> None:
        self.path, self.size = path, size
        self._mapped: MappedFile | None = None

    def tensor(self, begin: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        if self._mapped is None:
            self._mapped = MappedFile(self.path, self.size)
        return self._mapped.tensor(begin, nbytes, dtype, shape)


Raw = Callable[[torch.dtype, tuple[int, ...]], Tensor]  # the data of an array in a dtype and a row-major shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Npy:
    """An .npy header. offset: where its data starts. kind: numpy's word, '<f4'. fortran: the first axis is innermost.

    dtype: None for text, dates and the like, which no one asks for.
    """

    kind: str
    dtype: torch.dtype | None
    shape: tuple[int, ...]
    offset: int
    fortran: bool

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * (self.dtype.itemsize if self.dtype else 0)

    def array(self, name: str, raw: Raw) -> Array:
        """The array, whose bytes `raw` gives."""
        def read() -> Tensor:
            assert self.dtype is not None
            lies = self.shape[::-1] if self.fortran else self.shape
            if self.kind.startswith(">"):
                found = raw(torch.uint8, (*lies, self.dtype.itemsize)).flip(-1).view(self.dtype).squeeze(-1)
            else:
                found = raw(self.dtype, lies)
            return found.permute(*reversed(range(len(lies)))) if self.fortran else found

        return Array(name=name, kind=self.kind, dtype=self.dtype, shape=self.shape, read=read)


def npy_header(file: IO[bytes], size: int, path: str, name: str = "") -> Npy:
    """The header at the start of `file`, whose `size` bytes it must account for. name: of a member of an .npz.

    Raises InputRefused saved-format, for objects too: they are pickles.
    """
    of = f"{quote(name)}: " if name else ""
    head = file.read(8)
    if len(head) < 8 or not head.startswith(MAGIC) or head[6] not in (1, 2, 3):
        raise refused(path, f"{of}no .npy header of versions 1 to 3")
    width = 2 if head[6] == 1 else 4
    length = int.from_bytes(file.read(width), "little")
    if length > _MAX_HEADER or 8 + width + length > size:
        raise refused(path, f"{of}a header of {length:,} bytes in {size:,}; at most {_MAX_HEADER:,} are read")
    text = file.read(length).decode("latin-1")
    found = _HEADER.fullmatch(text)
    numbers = [n.strip().removesuffix("L") for n in found[3].split(",") if n.strip()] if found else []
    if found is None or len(numbers) > _MAX_AXES or not all(re.fullmatch(r"[0-9]{1,18}", n) for n in numbers):
        raise refused(path, f"{of}a header that no plain array has: {quote(text.strip())}", _PLAIN)
    kind, shape = found[1], tuple(map(int, numbers))
    if "O" in kind:
        raise refused(path, f"{of}an array of objects: a pickle, which could run any program and is never read",
                      _PLAIN)
    h = Npy(kind=kind, dtype=_DTYPES.get(kind[1:]) if kind[0] in "<>|=" else None, shape=shape,
            offset=8 + width + length, fortran=found[2] == "True")
    if h.dtype is not None and h.offset + h.nbytes != size:
        what = "cut short" if h.offset + h.nbytes > size else "longer than its header says"
        raise refused(path, f"{of}{what}: {list(shape)} of {kind} takes {h.nbytes:,} bytes, {size - h.offset:,} are "
                      "there", "save it again, or copy it whole")
    return h


def refused(path: str, what: str, help: str = HELP) -> InputRefused:
    """The error for a file whose form is wrong."""
    return InputRefused("saved-format", what, path=path, help=help)
