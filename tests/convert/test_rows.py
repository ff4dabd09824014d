"""Rows of an output out of the bytes of its sources: every kind of plan, in blocks of every size."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest

from llamactl.checkpoint.moves import NOTHING, Band, Rect, bands
from llamactl.checkpoint.rows import Source, rows


def view(height: int, width: int, start: int = 0) -> Source:
    """A matrix of bytes that all differ, one byte an element."""
    return Source(memoryview(bytes((start + i) % 251 for i in range(height * width))), width, 1)


def laid(found: Sequence[Band], sources: Sequence[Source], size: tuple[int, int]) -> bytes:
    """The output, element by element."""
    out = bytearray(size[0] * size[1])
    for _, _, column in found:
        for r in column:
            for y, x in product(range(r.rows), range(r.cols)):
                at = (r.from_row + y) * sources[r.source].row_bytes + r.from_col + x if r.source != NOTHING else -1
                out[(r.row + y) * size[1] + r.col + x] = sources[r.source].view[at] if at >= 0 else 0
    return bytes(out)


SOURCES = [view(9, 6), view(9, 8, 100), view(4, 6, 200)]
PLANS: dict[str, list[Rect]] = {
    "as it is": [Rect(0, 0, 9, 6, 0)],
    "some rows": [Rect(0, 0, 3, 6, 0, 4)],
    "runs": [Rect(0, 0, 2, 6, 0, 3), Rect(2, 0, 3, 6, 0, 0), Rect(5, 0, 1, 6, 2, 3)],
    "every row elsewhere": [Rect(n, 0, 1, 6, 0, 8 - n) for n in range(9)],
    "zero rows after": [Rect(0, 0, 4, 6, 2), Rect(4, 0, 3, 6, NOTHING)],
    "zero rows before": [Rect(0, 0, 5, 6, NOTHING), Rect(5, 0, 4, 6, 2)],
    "some columns": [Rect(0, 0, 9, 3, 1, 0, 5)],
    "some columns, some rows": [Rect(0, 0, 2, 3, 1, 7, 2), Rect(2, 0, 4, 3, 1, 0, 1)],
    "side by side": [Rect(0, 0, 9, 6, 0), Rect(0, 6, 9, 8, 1)],
    "side by side in runs": [Rect(0, 0, 5, 6, 0, 4), Rect(5, 0, 4, 6, 2), Rect(0, 6, 3, 2, 1, 1, 3),
                             Rect(3, 6, 6, 2, 1)],
    "zeros beside": [Rect(0, 0, 4, 6, 2), Rect(0, 6, 4, 2, NOTHING)],
    "columns exchanged": [Rect(0, 0, 9, 3, 0, 0, 3), Rect(0, 3, 9, 3, 0, 0, 0)],
}


@pytest.mark.parametrize("block", [1, 6, 13, 20, 1000])
@pytest.mark.parametrize("plan", PLANS)
def test_rows_of_every_plan(plan: str, block: int) -> None:
    """The same bytes whatever the block, in blocks of whole rows, none above a block and a row."""
    rects = PLANS[plan]
    size = max(r.row + r.rows for r in rects), max(r.col + r.cols for r in rects)
    found = bands(rects, *size)
    got = [bytes(b) for b in rows(found, SOURCES, size[0], size[1], block)]
    assert b"".join(got) == laid(found, SOURCES, size)
    assert all(b and len(b) % size[1] == 0 for b in got)
    assert max(map(len, got)) < max(2 * block, block + size[1]) + size[1]
    if len(found) == 1:
        assert all(len(b) >= block for b in got[:-1])


def test_rows_in_elements_of_several_bytes() -> None:
    source = Source(memoryview(bytes(range(48))), 12, 2)  # 4 x 6 of two bytes each
    found = bands([Rect(0, 0, 4, 2, 0, 0, 4), Rect(0, 2, 4, 1, 0, 0, 1)], 4, 3)
    want = b"".join(bytes((r * 12 + 8, r * 12 + 9, r * 12 + 10, r * 12 + 11, r * 12 + 2, r * 12 + 3)) for r in range(4))
    assert b"".join(rows(found, [source], 4, 6)) == want


def test_whole_rows_are_a_view_of_the_source() -> None:
    (block,) = rows(bands([Rect(0, 0, 9, 6, 0)], 9, 6), SOURCES, 9, 6)
    assert isinstance(block, memoryview)
    assert block.obj is SOURCES[0].view.obj


def test_whole_rows_of_quantised_blocks() -> None:
    """A row of 64 in Q8_0 is 68 bytes; rows can be chosen, parts of one cannot."""
    data = bytes(i % 251 for i in range(5 * 68))
    source = Source(memoryview(data), 68, 0)
    found = bands([Rect(0, 0, 2, 64, 0, 3), Rect(2, 0, 1, 64, 0, 0)], 3, 64)
    assert b"".join(rows(found, [source], 3, 68)) == data[3 * 68 :] + data[:68]
    with pytest.raises(ValueError, match="a part of the columns of a quantised tensor"):
        list(rows(bands([Rect(0, 0, 5, 32, 0)], 5, 32), [source], 5, 34))
    with pytest.raises(ValueError, match="a part of the columns of a quantised tensor"):
        list(rows(bands([Rect(0, 0, 5, 32, 0, 0, 32), Rect(0, 32, 5, 32, 0)], 5, 64), [source], 5, 68))


def test_no_bands_have_no_rows() -> None:
    assert list(rows((), SOURCES, 0, 0)) == []
