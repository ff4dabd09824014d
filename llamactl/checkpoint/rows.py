"""Rows of an output tensor out of the bytes that hold them now, in the order and the type in which they lie there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from llamactl.checkpoint.copying import BLOCK
from llamactl.checkpoint.moves import NOTHING, Band, Rect


class Source(NamedTuple):
    """The bytes of one source matrix. row_bytes: of all its columns; element_bytes: 0 where only whole rows can be had
    (a quantised type).
    """

    view: memoryview
    row_bytes: int
    element_bytes: int


def rows(bands: Sequence[Band], sources: Sequence[Source], count: int, row_bytes: int, block: int = BLOCK
         ) -> Iterator[bytes | memoryview]:
    """The `count` rows of the output, in blocks of whole rows, about `block` bytes each.

    row_bytes: of the output, in the type of the sources. A block is a view of the source where that holds the rows as
    they are wanted. No rectangle may be turned.
    """
    if len(bands) == 1:
        yield from _by_runs(bands[0][2], sources, row_bytes, block)
    elif bands:
        yield from _by_rows(bands, sources, count, row_bytes, block)


def _by_runs(rects: Sequence[Rect], sources: Sequence[Source], row_bytes: int, block: int
             ) -> Iterator[bytes | memoryview]:
    """One band of full width: run after run of whole rows."""
    at_once = max(1, block // max(1, row_bytes))
    waiting: list[bytes | memoryview] = []
    held = 0
    for r in rects:
        for start in range(0, r.rows, at_once):
            n = min(at_once, r.rows - start)
            waiting += _pieces(r, start, n, sources, row_bytes)
            held += n * row_bytes
            if held >= block:
                yield waiting[0] if len(waiting) == 1 else b"".join(waiting)
                waiting, held = [], 0
    if waiting:
        yield waiting[0] if len(waiting) == 1 else b"".join(waiting)


def _by_rows(bands: Sequence[Band], sources: Sequence[Source], count: int, row_bytes: int, block: int
             ) -> Iterator[bytes]:
    """Several bands side by side: every row is put together from its pieces."""
    each = [_each_row(band, sources, row_bytes, count, sum(b[1] for b in bands)) for band in bands]
    at_once = max(1, block // max(1, row_bytes))
    for start in range(0, count, at_once):
        pieces = [next(band) for _ in range(min(at_once, count - start)) for band in each]
        yield b"".join(pieces)


def _each_row(band: Band, sources: Sequence[Source], row_bytes: int, count: int, cols: int
              ) -> Iterator[bytes | memoryview]:
    _, wide, rects = band
    for r in rects:
        for n in range(r.rows):
            yield from _pieces(r, n, 1, sources, row_bytes * wide // cols)


def _pieces(r: Rect, start: int, n: int, sources: Sequence[Source], nbytes: int) -> list[bytes | memoryview]:
    """Rows start .. start + n - 1 of a rectangle; nbytes: of one row of it."""
    if r.source == NOTHING:
        return [bytes(n * nbytes)]
    view, whole, element = sources[r.source]
    if nbytes == whole:
        return [view[(r.from_row + start) * whole : (r.from_row + start + n) * whole]]
    if not element:
        raise ValueError("a part of the columns of a quantised tensor")
    first = (r.from_row + start) * whole + r.from_col * element
    return [view[at : at + nbytes] for at in range(first, first + n * whole, whole)]
