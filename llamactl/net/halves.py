"""bf16 weights as fp16 without torch, whose import alone takes longer than the cast of a gigabyte; numpy's takes 0.1 s.

Within fp16's normal range the bits move: of the exponent 5 of 8 bits stay, the fraction gets three zeros. What is
smaller, and infinities and NaN, come out of a table of all 65,536 values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np

from llamactl.checkpoint.copying import BLOCK
from llamactl.checkpoint.files import Files, row_bytes
from llamactl.checkpoint.held import FLOATS
from llamactl.checkpoint.moves import NOTHING
from llamactl.checkpoint.plan import Output
from llamactl.checkpoint.rows import Source, rows
from llamactl.errors import InputRefused

_LARGEST, _INFINITE, _NORMAL, _ZERO = 0x477F, 0x7F80, 0x3880, 0x3300  # of bf16's bits without the sign
_ABS = 0x7FFF


def halved(o: Output) -> bool:
    """Whether an output is nothing but bf16 rows as fp16."""
    return (o.dtype == "F16" and len(o.terms) == 1 and {p.dtype for p in o.sources} == {"BF16"}
            and not any(r.turned or r.add or r.source == NOTHING for r in o.rects))


class Halves:
    """Computes such outputs; the same interface as values.Values. flushed: values that became zero, by output."""

    clamp = False

    def __init__(self, files: Files) -> None:
        self.files = files
        self.clamped: dict[str, int] = {}
        self.flushed: dict[str, int] = {}
        self._room = [np.empty(0, np.uint16), np.empty(0, np.uint16)]
        with np.errstate(over="ignore", invalid="ignore"):
            wide = (np.arange(1 << 16, dtype=np.uint32) << 16).view(np.float32)
            self._table = wide.astype(np.float16).view(np.uint16)

    def check(self, o: Output) -> None:
        """Raise InputRefused convert-overflow where a finite value does not fit."""
        for x in self._bits(o):
            code = np.bitwise_and(x, _ABS, out=self._scratch(x, 0))
            if int(code.max()) > _LARGEST and (over := code[(code > _LARGEST) & (code < _INFINITE)]).size:
                largest = float((over.max().astype(np.uint32) << np.uint32(16)).view(np.float32))
                raise InputRefused("convert-overflow", f"{o.name}: {largest:,g} is beyond what F16 holds (65,504)",
                                   help="choose bf16 or fp32, or --allow-overflow to clamp")
            if int(code.min()) <= _ZERO:
                lost = int(np.count_nonzero(code <= _ZERO)) - int(np.count_nonzero(code == 0))
                if lost:
                    self.flushed[o.name] = self.flushed.get(o.name, 0) + lost

    def blocks(self, o: Output) -> Iterator[memoryview]:
        """The bytes of an output, in order. A block is good until the next is asked for."""
        for x in self._bits(o):
            code = np.bitwise_and(x, _ABS, out=self._scratch(x, 0))
            if int(code.max()) > _LARGEST:
                yield memoryview(self._table[x]).cast("B")
                continue
            small = np.flatnonzero(code < _NORMAL) if int(code.min()) < _NORMAL else ()
            out = np.left_shift(x, 3, out=self._scratch(x, 1))
            np.bitwise_and(out, 0x3FFF, out=out)
            np.bitwise_or(out, np.bitwise_and(x, 0xC000, out=code), out=out)
            if len(small):
                out[small] = self._table[x[small]]
            yield memoryview(out).cast("B")

    def _scratch(self, x: Any, n: int) -> Any:
        """Room for a block, the same each time: fresh memory would cost more than the arithmetic."""
        if self._room[n].size < x.size:
            self._room[n] = np.empty(x.size, np.uint16)
        return self._room[n][: x.size]

    def _bits(self, o: Output) -> Iterator[Any]:
        """The source's values as they lie there, block by block."""
        with ExitStack() as stack:
            sources = [Source(stack.enter_context(self.files.view(p.key)), row_bytes(p.dtype, p.cols), FLOATS[p.dtype])
                       for p in o.sources]
            for block in rows(o.terms[0], sources, o.rows, row_bytes("BF16", o.cols), BLOCK):
                yield np.frombuffer(block, dtype=np.uint16)
            del sources
