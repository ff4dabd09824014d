"""From where every element of an output tensor comes: rectangles of the stored tensors that hold it now.

Two windows of one canonical tensor, where it lies in the source and where it will lie in the output, give the move
between them. Moves become rectangles, runs of rows by runs of columns, which are copied as they are, and joined where
they touch: what is unchanged ends as one rectangle over the whole tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from llamactl.spec.windows import At, Window, pick

NOTHING = -1  # the source of rows that are filled with zeros


class Rect(NamedTuple):
    """`rows` x `cols` at (row, col) of the output, taken at (from_row, from_col) of source number `source`.

    turned: of the source's transpose, from_row and from_col counted there. add: added to each value on the way.
    """

    row: int
    col: int
    rows: int
    cols: int
    source: int
    from_row: int = 0
    from_col: int = 0
    turned: bool = False
    add: float = 0.0


Band = tuple[int, int, tuple[Rect, ...]]  # first column, columns, rectangles that fill them from top to bottom


def rectangles(source: int, held: Window, wanted: Window, rows: At, to: At) -> Iterator[Rect]:
    """The move of one canonical tensor. held: in source number `source`; wanted: in the output.

    rows, to: row `rows[n]` of the canonical matrix becomes row `to[n]` of the output's canonical matrix.
    """
    from_rows, from_cols = (held.cols, held.rows) if held.turned else (held.rows, held.cols)
    to_rows, to_cols = (wanted.cols, wanted.rows) if wanted.turned else (wanted.rows, wanted.cols)
    from_rows, to_rows = pick(from_rows, rows), pick(to_rows, to)
    if wanted.turned:  # now in the order of the output's own axes
        from_rows, from_cols, to_rows, to_cols = from_cols, from_rows, to_cols, to_rows
    turned, add = held.turned != wanted.turned, wanted.add - held.add
    columns = list(_runs(to_cols, from_cols))
    for row, from_row, n in _runs(to_rows, from_rows):
        for col, from_col, wide in columns:
            yield Rect(row, col, n, wide, source, from_row, from_col, turned, add)


def _runs(to: At, at: At) -> Iterator[tuple[int, int, int]]:
    """(first of `to`, first of `at`, how many) of the stretches in which both count up by one, by `to`."""
    if isinstance(to, range) and isinstance(at, range) and to.step == at.step == 1:
        if to:
            yield to.start, at.start, len(to)
        return
    pairs = sorted(zip(to, at, strict=True))
    start = 0
    for n in range(1, len(pairs) + 1):
        if n == len(pairs) or (pairs[n][0] - pairs[n - 1][0], pairs[n][1] - pairs[n - 1][1]) != (1, 1):
            yield *pairs[start], n - start
            start = n


def joined(rects: Iterable[Rect]) -> tuple[Rect, ...]:
    """The same with rectangles that touch, in the source as in the output, made one; from top left on."""
    wide = _joined(rects, lambda r: (r.source, r.turned, r.add, r.row, r.rows, r.from_row, r.col), _beside)
    tall = _joined(wide, lambda r: (r.source, r.turned, r.add, r.col, r.cols, r.from_col, r.row), _below)
    return tuple(sorted(tall))


def _joined(rects, key, join) -> list[Rect]:  # type: ignore[no-untyped-def]
    out: list[Rect] = []
    for r in sorted(rects, key=key):
        both = join(out[-1], r) if out else None
        if both is None:
            out.append(r)
        else:
            out[-1] = both
    return out


def _beside(a: Rect, b: Rect) -> Rect | None:
    same = a[4] == b[4] and a[7:] == b[7:] and (a.row, a.rows, a.from_row) == (b.row, b.rows, b.from_row)
    if same and a.col + a.cols == b.col and a.from_col + a.cols == b.from_col:
        return a._replace(cols=a.cols + b.cols)
    return None


def _below(a: Rect, b: Rect) -> Rect | None:
    same = a[4] == b[4] and a[7:] == b[7:] and (a.col, a.cols, a.from_col) == (b.col, b.cols, b.from_col)
    if same and a.row + a.rows == b.row and a.from_row + a.rows == b.from_row:
        return a._replace(rows=a.rows + b.rows)
    return None


def cut(rects: Iterable[Rect], row: int, col: int, rows: int, cols: int) -> Iterator[Rect]:
    """What of an output lies in a part of it, counted from the part's own corner."""
    for r in rects:
        top, left = max(r.row, row), max(r.col, col)
        tall, wide = min(r.row + r.rows, row + rows) - top, min(r.col + r.cols, col + cols) - left
        if tall > 0 and wide > 0:
            yield r._replace(row=top - row, col=left - col, rows=tall, cols=wide,
                             from_row=r.from_row + top - r.row, from_col=r.from_col + left - r.col)


def among(rects: Iterable[Rect], parts: Sequence[Sequence[tuple[int, int, int, int]]], first: Sequence[int]
          ) -> Iterator[Rect]:
    """The same rectangles with sources that lie in several files cut up among them.

    parts: of each source, (row, col, rows, cols) of every part in the whole. first: the number of its first part.
    """
    for r in rects:
        if r.source == NOTHING:
            yield r
            continue
        for n, (row, col, rows, cols) in enumerate(parts[r.source]):
            if r.turned:
                row, col, rows, cols = col, row, cols, rows
            top, left = max(r.from_row, row), max(r.from_col, col)
            tall, wide = min(r.from_row + r.rows, row + rows) - top, min(r.from_col + r.cols, col + cols) - left
            if tall > 0 and wide > 0:
                yield r._replace(row=r.row + top - r.from_row, col=r.col + left - r.from_col, rows=tall, cols=wide,
                                 source=first[r.source] + n, from_row=top - row, from_col=left - col)


def bands(rects: Iterable[Rect], rows: int, cols: int) -> tuple[Band, ...]:
    """The rectangles by columns. Raises ValueError where they do not fill `rows` x `cols` exactly once."""
    rects = tuple(rects)
    if not rows * cols:
        return ()
    if max((r.col + r.cols for r in rects), default=0) > cols:
        raise ValueError(f"more than {cols} columns are filled")
    edges = sorted({0, cols, *(r.col for r in rects), *(r.col + r.cols for r in rects)})
    out: list[Band] = []
    for left, right in zip(edges, edges[1:], strict=False):
        column = tuple(sorted(r if (r.col, r.cols) == (left, right - left) else _slice(r, left, right)
                              for r in rects if r.col < right and r.col + r.cols > left))
        at = 0
        for r in column:
            if r.row != at:
                raise ValueError(f"columns {left}..{right - 1}: row {min(at, r.row)} is "
                                 f"{'filled twice' if r.row < at else 'not filled'}")
            at += r.rows
        if at != rows:
            raise ValueError(f"columns {left}..{right - 1}: {at} of {rows} rows are filled")
        out.append((left, right - left, column))
    return tuple(out)


def _slice(r: Rect, left: int, right: int) -> Rect:
    return r._replace(col=left, cols=right - left, from_col=r.from_col + left - r.col)
