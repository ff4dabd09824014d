"""The files of a checkpoint as bytes: what is stored, where, and a way to each tensor's own bytes. No torch.

safetensors and GGUF say themselves where a tensor lies; pickles are opened by net.weights_bytes. A tensor may lie in
several files (Meta's ranks hold slices of it): then each of its parts has a key of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from llamactl.checkpoint.copying import Mapped
from llamactl.checkpoint.digest import Digest
from llamactl.checkpoint.folder import FolderWeights
from llamactl.checkpoint.gguf import GGML_TYPES
from llamactl.checkpoint.ggufparts import all_parts, joined
from llamactl.checkpoint.held import FLOATS, Held
from llamactl.errors import InputRefused

Notes = tuple[tuple[str, str], ...]


class Span(NamedTuple):
    """Bytes of a file that can be copied as they lie."""

    path: str
    offset: int
    nbytes: int


class Part(NamedTuple):
    """A tensor's part in one file: at (row, col) of the whole matrix."""

    key: str
    row: int
    col: int
    rows: int
    cols: int


class Files(Protocol):
    """One checkpoint. parts: None where a tensor lies in one piece, under its own name."""

    @property
    def tensors(self) -> Mapping[str, Held]: ...
    @property
    def warnings(self) -> Notes: ...

    def parts(self, name: str) -> tuple[Part, ...] | None: ...

    def span(self, key: str) -> Span | None:
        """Where the bytes of `key` lie as they are, None where only `view` gives them."""
        ...

    def copy(self, key: str, out_fd: int, seen: Callable[[int], None], digest: Digest | None = None) -> None:
        """Append the span of `key` to a file about as fast as the system can, digested in the same pass."""
        ...

    def view(self, key: str) -> AbstractContextManager[memoryview]:
        """The bytes of `key`, row by row, little-endian."""
        ...


class _Spans:
    """What safetensors and GGUF share: one span a tensor."""

    warnings: Notes
    tensors: dict[str, Held]

    def __init__(self, spans: dict[str, Span], sizes: dict[str, int], folder: str | None) -> None:
        self._spans = spans
        self._mapped = Mapped(sizes, inside=folder)

    def parts(self, name: str) -> None:
        return None

    def span(self, key: str) -> Span | None:
        return self._spans[key]

    def copy(self, key: str, out_fd: int, seen: Callable[[int], None], digest: Digest | None = None) -> None:
        self._mapped.copy(*self._spans[key], out_fd, seen, digest)

    def view(self, key: str) -> AbstractContextManager[memoryview]:
        return self._mapped.window(*self._spans[key])


class SafetensorsFiles(_Spans):
    """The tensors of one or many safetensors files, whose headers were read and checked before."""

    def __init__(self, weights: FolderWeights) -> None:
        self.warnings = weights.warnings
        self.tensors = {t.name: Held(name=t.name, dtype=t.dtype, shape=t.shape, nbytes=t.nbytes)
                        for t in weights.tensors.values()}
        super().__init__({t.name: Span(h.path, h.data_offset + t.begin, t.nbytes) for h in weights.headers
                          for t in h.tensors}, {h.path: h.file_bytes for h in weights.headers}, weights.folder)


class GgufFiles(_Spans):
    """The tensors of a GGUF file, or of all parts of a split one.

    Errors: those of gguf.read_header; InputRefused gguf-split where parts are missing.
    """

    def __init__(self, path: str) -> None:
        parts = all_parts(path)
        header = joined(parts)
        complete(header.metadata, len(header.tensors), path)
        self.warnings = header.notes
        self.tensors = {t.name: Held(name=t.name, dtype=t.type, shape=t.shape, nbytes=t.nbytes) for t in header.tensors}
        super().__init__({t.name: Span(p.path, p.data_offset + t.offset, t.nbytes) for p in parts for t in p.tensors},
                         {p.path: p.file_bytes for p in parts}, None)


def complete(metadata: Mapping[str, object], tensors: int, path: str) -> None:
    """Raise InputRefused gguf-split where a split model is not all here."""
    count, total = metadata.get("split.count", 0), metadata.get("split.tensors.count")
    if isinstance(count, int) and count > 1 and total != tensors:
        raise InputRefused("gguf-split", f"{tensors:,} of {total} tensors are here", path=path,
                           help=f"put all {count:,} parts in one folder under the names they came with")


def row_bytes(dtype: str, cols: int) -> int:
    """Bytes of a row of `cols` elements. Raises ValueError for a type or a width that has no whole number of them."""
    if dtype in FLOATS:
        return FLOATS[dtype] * cols
    kind = next((t for t in GGML_TYPES.values() if t.name == dtype), None)
    if kind is None or cols % kind.block:
        raise ValueError(f"rows of {cols:,} in {dtype}")
    return cols // kind.block * kind.block_bytes


def small_floats(path: str, name: str) -> tuple[float, ...]:
    """The values of a short float vector of the GGUF file at `path`, e.g. rope_freqs.weight; () where it has none.

    Raises InputRefused gguf-rope for anything else under that name.
    """
    files = GgufFiles(path)
    t = files.tensors.get(name)
    if t is None:
        return ()
    letter = {"F64": "d", "F32": "f", "F16": "e"}.get(t.dtype)
    if letter is None or len(t.shape) != 1 or t.elements > 1 << 16:
        raise InputRefused("gguf-rope", f"{name} is {t.dtype} {list(t.shape)}, not a short vector of floats",
                           path=path)
    with files.view(name) as view:
        return struct.unpack(f"<{t.elements}{letter}", bytes(view))
