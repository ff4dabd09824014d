"""Whether two outputs are the same bytes: without values, in the form in which both are stored. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from llamactl.checkpoint.emit import Block
from llamactl.checkpoint.files import Files, row_bytes
from llamactl.checkpoint.held import FLOATS
from llamactl.checkpoint.moves import NOTHING, bands
from llamactl.checkpoint.plan import Output

_PIECE = 64 << 10  # bytes copied at once to be compared: memoryviews by themselves are compared one by one


class Form(NamedTuple):
    """An output in the type, the orientation and with the offset in which it is stored, so that nothing is computed."""

    output: Output
    turned: bool
    add: float


def stored_forms(a: Output, b: Output) -> tuple[Output, Output] | None:
    """Both as bytes of the files in one order, None where only values can be compared."""
    one, other = stored_form(a), stored_form(b)
    if one is None or other is None or one[1:] != other[1:] or one.output.dtype != other.output.dtype:
        return None
    return one.output, other.output


def stored_form(o: Output) -> Form | None:
    """How an output lies in the files, None where it is put together of unlike pieces."""
    kinds, ways = {p.dtype for p in o.sources}, {(r.turned, r.add) for r in o.rects}
    if len(o.terms) != 1 or len(kinds) != 1 or len(ways) != 1 or any(r.source == NOTHING for r in o.rects):
        return None
    (kind,), ((turned, add),) = kinds, ways
    rects, rows, cols = o.rects, o.rows, o.cols
    if turned:
        rows, cols = cols, rows
        rects = tuple(r._replace(row=r.col, col=r.row, rows=r.cols, cols=r.rows, from_row=r.from_col,
                                 from_col=r.from_row, turned=False) for r in rects)
    if kind not in FLOATS and (turned or any(r.from_col or r.cols != o.sources[r.source].cols for r in rects)):
        return None  # blocks of a quantised type cannot be cut
    made = replace(o, dtype=kind, rows=rows, cols=cols, terms=(bands(rects, rows, cols),), how="rows",
                   nbytes=rows * row_bytes(kind, cols))
    return Form(made, turned, add)


def same_bytes(a: Iterator[Block], b: Iterator[Block]) -> bool:
    """Whether two streams hold the same bytes, however they are cut into blocks."""
    x = y = memoryview(b"")
    while True:
        x, y = x or _next(a), y or _next(b)
        n = min(len(x), len(y))
        if not n:
            return len(x) == len(y)
        for at in range(0, n, _PIECE):
            end = min(n, at + _PIECE)
            if bytes(x[at:end]) != bytes(y[at:end]):
                return False
        x, y = x[n:], y[n:]


def _next(blocks: Iterator[Block]) -> memoryview:
    return memoryview(next((block for block in blocks if len(block)), b""))


def same_stored(a: Files, b: Files, name: str) -> bool:
    """The same of a tensor that no model computes with, as it lies in the files."""

    def stored(files: Files) -> Iterator[Block]:
        for part in files.parts(name) or ():
            with files.view(part.key) as view:
                yield view
        if not files.parts(name):
            with files.view(name) as view:
                yield view

    cuts = [[p[1:] for p in files.parts(name) or ()] for files in (a, b)]
    return cuts[0] == cuts[1] and same_bytes(stored(a), stored(b))
