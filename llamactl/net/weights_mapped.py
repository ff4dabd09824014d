"""Files mapped into memory, and safetensors read through them: a tensor is a view of its file, not a copy."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

from llamactl.checkpoint.disk import open_regular
from llamactl.checkpoint.folder import FolderWeights
from llamactl.checkpoint.held import Held
from llamactl.errors import InputRefused

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class Reader(Protocol):
    """One checkpoint of any format: what it stores, and each tensor as it is stored."""

    @property
    def tensors(self) -> Mapping[str, Held]: ...
    @property
    def warnings(self) -> tuple[tuple[str, str], ...]: ...

    def get(self, name: str) -> Tensor: ...

    def part(self, name: str, index: int) -> Tensor:
        """Entry `index` along axis 0, without reading the others."""
        ...


class MappedFile:
    """The bytes of one file, mapped once. Private: what is written to a view never reaches the file."""

    def __init__(self, path: str, size: int, *, inside: str | None = None) -> None:
        """size: as it was when the header was read; InputRefused file-changed if it has another now."""
        file, now = open_regular(path, inside=inside)
        with file:
            if now != size:
                raise InputRefused("file-changed", f"{now:,} bytes now, {size:,} when its header was read", path=path,
                                   help="wait until the file is written, then run again")
            try:
                # A read-only map would do, but torch warns of each buffer that cannot be written.
                self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY)
            except (OSError, ValueError) as e:
                raise InputRefused("io-error", f"cannot be mapped into memory: {e}", path=path) from None
        self.bytes = torch.frombuffer(self._map, dtype=torch.uint8)

    def tensor(self, begin: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """`nbytes` from byte `begin` on; a copy only where `begin` is no multiple of the element size."""
        if not nbytes:
            return torch.empty(shape, dtype=dtype)
        raw = self.bytes[begin : begin + nbytes]
        if begin % dtype.itemsize:
            raw = raw.clone()
        return raw.view(dtype).view(shape)


class SafetensorsReader:
    """The tensors of one or many safetensors files, whose headers were read and checked before."""

    def __init__(self, weights: FolderWeights) -> None:
        self.warnings = weights.warnings
        self.tensors = {t.name: Held(name=t.name, dtype=t.dtype, shape=t.shape, nbytes=t.nbytes)
                        for t in weights.tensors.values()}
        self._at = {t.name: (h, t) for h in weights.headers for t in h.tensors}
        self._folder = weights.folder
        self._files: dict[str, MappedFile] = {}

    def get(self, name: str) -> Tensor:
        header, t = self._at[name]
        if header.path not in self._files:
            self._files[header.path] = MappedFile(header.path, header.file_bytes, inside=self._folder)
        return self._files[header.path].tensor(header.data_offset + t.begin, t.nbytes, DTYPES[t.dtype], t.shape)

    def part(self, name: str, index: int) -> Tensor:
        return self.get(name)[index]
