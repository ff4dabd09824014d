"""Outputs as bytes on their way to a file: copied, gathered or computed; counted and digested as they pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import BinaryIO, Protocol

from llamactl.checkpoint.digest import Digest
from llamactl.checkpoint.files import Files, row_bytes
from llamactl.checkpoint.held import FLOATS
from llamactl.checkpoint.plan import Output
from llamactl.checkpoint.rows import Source, rows

Block = bytes | bytearray | memoryview


class Computed(Protocol):
    """Outputs whose values change (net.values.Values)."""

    def blocks(self, o: Output) -> Iterator[Block]: ...


class Emitter:
    """Gives the bytes of outputs. digests: {output name: its digest}, filled where `digest` is on.

    seen: told the number of bytes after each block.
    """

    def __init__(self, files: Files, computed: Computed | None = None, *, digest: bool = True,
                 seen: Callable[[int], None] | None = None) -> None:
        self.files, self.computed, self.digest = files, computed, digest
        self.seen = seen or (lambda n: None)
        self.digests: dict[str, str] = {}

    def blocks(self, o: Output, key: str | None = None) -> Iterator[Block]:
        """The bytes of `o`, which is digested under `key` (its name). A block is good until the next is asked for."""
        digest = Digest() if self.digest else None
        for block in self._blocks(o):
            if digest is not None:
                digest.update(block)
            yield block
            self.seen(len(block))
        if digest is not None:
            self.digests[key or o.name] = digest.hexdigest()

    def write(self, o: Output, file: BinaryIO, key: str | None = None) -> None:
        """Append `o` to a file; what stays as it is goes from file to file inside the system."""
        if not self.copy(o, file, key):
            for block in self.blocks(o, key):
                file.write(block)

    def copy(self, o: Output, file: BinaryIO, key: str | None = None) -> bool:
        """Append `o` inside the system, where it stays as it is; False where it does not."""
        if o.how != "copy" or self.files.span(o.sources[0].key) is None:
            return False
        file.flush()
        digest = Digest() if self.digest else None
        self.files.copy(o.sources[0].key, file.fileno(), self.seen, digest)
        if digest is not None:
            self.digests[key or o.name] = digest.hexdigest()
        return True

    def _blocks(self, o: Output) -> Iterator[Block]:
        if o.data is not None:
            yield o.data
        elif o.how == "values":
            if self.computed is None:
                raise RuntimeError(f"{o.name} is to be computed, and nothing here can")
            yield from self.computed.blocks(o)
        elif o.how == "widen":
            yield from map(widened, self._rows(o, "BF16"))
        else:
            yield from self._rows(o, o.dtype)

    def _rows(self, o: Output, kind: str) -> Iterator[Block]:
        with ExitStack() as stack:
            sources = [Source(stack.enter_context(self.files.view(p.key)), row_bytes(p.dtype, p.cols),
                              FLOATS.get(p.dtype, 0)) for p in o.sources]
            yield from rows(o.terms[0] if o.terms else (), sources, o.rows, row_bytes(kind, o.cols))
            del sources


def widened(block: Block) -> bytearray:
    """bf16 as fp32: the upper halves of the same bits."""
    out = bytearray(2 * len(block))
    view = bytes(block) if isinstance(block, memoryview) else block
    out[2::4], out[3::4] = view[0::2], view[1::2]
    return out
