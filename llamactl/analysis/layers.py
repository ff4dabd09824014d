"""Layer indices as people write them: closed ranges."""

from __future__ import annotations

from collections.abc import Iterable

Ranges = tuple[tuple[int, int], ...]


def ranges(indices: Iterable[int]) -> Ranges:
    """Ascending indices as closed ranges: 0, 1, 2, 5 -> ((0, 2), (5, 5))."""
    out: list[tuple[int, int]] = []
    for i in indices:
        if out and out[-1][1] == i - 1:
            out[-1] = (out[-1][0], i)
        else:
            out.append((i, i))
    return tuple(out)
