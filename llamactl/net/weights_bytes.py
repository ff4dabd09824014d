"""PyTorch pickles as bytes: the mapped tensors that the restricted unpickler gave, seen row by row."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod

from torch import Tensor

from llamactl.checkpoint.files import Part
from llamactl.checkpoint.held import Held
from llamactl.net.weights_mapped import Reader
from llamactl.net.weights_meta import MergedReader


class PickleFiles:
    """The tensors of a reader of pickles, also of Meta's ranks, whose slices are parts of one tensor."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.warnings = reader.warnings
        self.tensors: Mapping[str, Held] = reader.tensors
        self._ranks: dict[str, tuple[Reader, str]] = {}
        self._parts: dict[str, tuple[Part, ...]] = {}
        if isinstance(reader, MergedReader):
            for name in reader.tensors:
                self._split(reader, name)

    def _split(self, reader: MergedReader, name: str) -> None:
        axis = reader.axis(name)
        parts = []
        for n, rank in enumerate(reader.ranks if axis is not None else reader.ranks[:1]):
            shape = rank.tensors[name].shape
            rows, cols = (shape[0], prod(shape[1:])) if shape else (1, 1)
            key = f"{n}:{name}"
            self._ranks[key] = (rank, name)
            parts.append(Part(key, n * rows if axis == 0 else 0, n * cols if axis == 1 else 0, rows, cols))
        self._parts[name] = tuple(parts)

    def parts(self, name: str) -> tuple[Part, ...] | None:
        return self._parts.get(name)

    def span(self, key: str) -> None:
        return None

    def copy(self, key: str, out_fd: int, seen: Callable[[int], None], digest: object = None) -> None:
        raise NotImplementedError("no span, so nothing is copied")

    @contextmanager
    def view(self, key: str) -> Iterator[memoryview]:
        reader, name = self._ranks.get(key, (self._reader, key))
        tensor = reader.get(name).contiguous()  # a copy only where the pickle holds a turned or cut view
        yield buffer(tensor)


def buffer(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, as long as it lives. (numpy() would need numpy, and knows no bfloat16.)"""
    nbytes = tensor.numel() * tensor.element_size()
    if not nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * nbytes).from_address(tensor.data_ptr())).cast("B")
