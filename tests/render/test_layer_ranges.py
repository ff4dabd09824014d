"""Lists of layers: plain output says all of them, in full or by an even pattern that leaves nothing to guess."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llamactl.render.units import layer_ranges


def expand(text: str) -> tuple[tuple[int, int], ...]:
    """The runs that a reader of `text` understands."""
    words = [(int(a), int(b or a)) for a, b in re.findall(r"(\d+)(?:-(\d+))?", text)]
    if "..." not in text:
        return tuple(words)
    first, second, last = words
    starts = range(first[0], last[0] + 1, second[0] - first[0])
    return (*((a, a + first[1] - first[0]) for a in starts[:-1]), last)


@st.composite
def runs(draw: st.DrawFn) -> tuple[tuple[int, int], ...]:
    """Runs in order with a gap between them, often in an even pattern."""
    count = draw(st.integers(1, 40))
    even = st.just((draw(st.integers(1, 5)), draw(st.integers(1, 5))))
    at, out = draw(st.integers(0, 3)), []
    for length, gap in draw(st.lists(st.one_of(even, even, even, st.tuples(st.integers(1, 5), st.integers(1, 5))),
                                     min_size=count, max_size=count)):
        out.append((at, at + length - 1))
        at += length + gap
    return tuple(out)


@given(runs())
def test_nothing_is_left_to_guess(where: tuple[tuple[int, int], ...]) -> None:
    assert expand(layer_ranges(where)) == where
    assert "..." not in layer_ranges(where, whole=True)
    assert expand(layer_ranges(where, whole=True)) == where


@pytest.mark.parametrize(("where", "text"), [
    (((0, 31),), "0-31"),
    (tuple((i, i) for i in range(0, 42, 2)), "0, 2, ..., 40"),
    ((*((i, i + 4) for i in range(0, 42, 6)), (42, 43)), "0-4, 6-10, ..., 42-43"),
    ((*((i, i) for i in range(0, 14, 2)), (15, 15)), "0, 2, 4, 6, 8, 10, 12, 15"),
    ((*((i, i) for i in range(0, 14, 2)), (14, 15)), "0, 2, 4, 6, 8, 10, 12, 14-15"),
])
def test_forms(where: tuple[tuple[int, int], ...], text: str) -> None:
    assert layer_ranges(where) == text
