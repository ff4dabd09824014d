"""The data of small tensors: a few hundred bytes where a header is silent, never a weight."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import BinaryIO

from llamactl.checkpoint.containers import Stored
from llamactl.checkpoint.disk import open_regular
from llamactl.checkpoint.folder import FolderWeights
from llamactl.errors import InputRefused

MAX_BYTES = 4096  # a bitsandbytes quant_state has 100 to 300, a weight_shape 16
MAX_READS = 1 << 17


class SmallData:
    """Bytes of small tensors of `weights`, one file open at a time. Use as a context manager and call it."""

    def __init__(self, weights: FolderWeights) -> None:
        self._at = {t.name: (h, t) for h in weights.headers for t in h.tensors}
        self._folder = weights.folder
        self._open = ExitStack()
        self._path = ""
        self._file: BinaryIO | None = None
        self._reads = 0

    def __enter__(self) -> SmallData:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
                 ) -> None:
        self._open.close()

    def __call__(self, tensor: Stored) -> bytes | None:
        """The bytes of `tensor`; None where it is not small, or many were read already."""
        header, t = self._at[tensor.name]
        self._reads += 1
        if t.nbytes > MAX_BYTES or self._reads > MAX_READS:
            return None
        if header.path != self._path or self._file is None:
            self._open.close()
            self._file, _ = open_regular(header.path, inside=self._folder)
            self._open.enter_context(self._file)
            self._path = header.path
        try:
            self._file.seek(header.data_offset + t.begin)
            data = self._file.read(t.nbytes)
        except OSError as e:
            raise InputRefused("io-error", f"not readable: {e.strerror or e}", path=header.path) from None
        return data if len(data) == t.nbytes else None
