"""Arrays that somebody saved: .safetensors, .npy and .npz, mapped where the file allows it. Never a pickle.

Headers are read and checked before any array is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import BinaryIO

import torch
from torch import Tensor

from llamactl.checkpoint.disk import looks_like, open_regular
from llamactl.checkpoint.safetensors import header_from
from llamactl.errors import InputRefused
from llamactl.verify.npy import MAGIC, Array, LazyFile, npy_header, refused
from llamactl.verify.npz import MAX_ARRAYS, npz_arrays

_ZIP = (b"PK\x03\x04", b"PK\x05\x06")
_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64, "I8": torch.int8,
           "I16": torch.int16, "I32": torch.int32, "I64": torch.int64, "U8": torch.uint8, "U16": torch.uint16,
           "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrays:
    """What one file holds, by name; the only array of an .npy is called "". metadata: of a safetensors file."""

    path: str
    by: dict[str, Array]
    metadata: dict[str, str] = field(default_factory=dict)


def open_arrays(path: str) -> Arrays:
    """The arrays of the file at `path`, told by what it holds and not by its name.

    Errors: InputRefused saved-format, and those of safetensors.read_header and disk.open_regular; NotAvailable.
    """
    file, size = open_regular(path)
    with file:
        try:
            head = file.read(512)
            file.seek(0)
            if head.startswith(MAGIC):
                h, mapped = npy_header(file, size, path), LazyFile(path, size)
                return Arrays(path=path, by={"": h.array("", lambda dtype, shape: mapped.tensor(h.offset, h.nbytes,
                                                                                                dtype, shape))})
            if head.startswith(_ZIP):
                return Arrays(path=path, by=npz_arrays(file, size, path))
            if re.match(rb"\x80[\x02-\x05]", head):
                raise refused(path, "a Python pickle, which could run any program and is never read")
            known = looks_like(head)
            if known:
                raise InputRefused(known[0] or "saved-format", known[1], path=path, help=known[2])
            return _safetensors(file, size, path)
        except OSError as e:
            raise InputRefused("io-error", f"not readable: {e.strerror or e}", path=path) from None


def _safetensors(file: BinaryIO, size: int, path: str) -> Arrays:
    header = header_from(file, size, path)
    if len(header.tensors) > MAX_ARRAYS:
        raise refused(path, f"{len(header.tensors):,} tensors; at most {MAX_ARRAYS:,} are read")
    mapped, by = LazyFile(path, size), {}
    for t in header.tensors:
        dtype = _DTYPES.get(t.dtype)

        def read(begin: int = header.data_offset + t.begin, nbytes: int = t.nbytes, dtype: torch.dtype | None = dtype,
                 shape: tuple[int, ...] = t.shape) -> Tensor:
            assert dtype is not None
            return mapped.tensor(begin, nbytes, dtype, shape)

        by[t.name] = Array(name=t.name, kind=t.dtype, dtype=dtype, shape=t.shape, read=read)
    return Arrays(path=path, by=by, metadata=header.metadata)
