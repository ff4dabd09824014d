"""Where each canonical tensor lies in the tensor that stores it, as positions: the naming rules run on no data.

`naming.read` is run on a Traced, which keeps positions instead of values. From two such maps, one of each layout, a
conversion follows by itself (checkpoint.moves), so that no rule is ever inverted by hand.

A stored tensor is seen as a matrix: (n,) as n rows of one, more axes as rows of all but the first; of a stacked one the
entries lie below one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

from llamactl.spec.model import Model
from llamactl.spec.naming import Shape, Stored, read, read_expert

At = Sequence[int]


class Window(NamedTuple):
    """A canonical matrix inside a stored one: its element (r, c) stands at (rows[r], cols[c]), turned at
    (rows[c], cols[r]). add: what is added to a canonical value to get the stored one.
    """

    rows: At
    cols: At
    turned: bool = False
    add: float = 0.0


class Traced:
    """Positions of the elements of an array, under the operations that naming.py uses."""

    __slots__ = ("add", "cols", "rows", "turned")

    def __init__(self, rows: At, cols: At, turned: bool = False, add: float = 0.0) -> None:
        self.rows, self.cols, self.turned, self.add = rows, cols, turned, add

    def __getitem__(self, key: slice | list[int]) -> Traced:
        if self.turned:
            return Traced(self.rows, _picked(self.cols, key), True, self.add)
        return Traced(_picked(self.rows, key), self.cols, False, self.add)

    def swapaxes(self, a: int, b: int) -> Traced:
        return Traced(self.rows, self.cols, not self.turned, self.add)

    def __sub__(self, by: float) -> Traced:
        return Traced(self.rows, self.cols, self.turned, self.add + by)


def matrix(shape: Shape) -> tuple[int, int]:
    """A tensor's shape as (rows, columns)."""
    return (shape[0], prod(shape[1:])) if shape else (1, 1)


def grid(stored: Stored) -> tuple[int, int]:
    """A stored tensor as the matrix that windows count in: (rows, columns)."""
    if not stored.rule.stacked:
        return matrix(stored.shape)
    rows, cols = matrix(stored.shape[1:])
    return stored.shape[0] * rows, cols


def windows(stored: Stored, model: Model) -> dict[str, Window]:
    """{canonical name: where it lies} of every canonical tensor in one stored tensor."""
    if not stored.rule.stacked:
        rows, cols = matrix(stored.shape)
        return _windows(read(stored, Traced(range(rows), range(cols)), model))
    entries = sorted({t.e for t in stored.of})
    rows, cols = matrix(stored.shape[1:])
    out: dict[str, Window] = {}
    for n, e in enumerate(entries):
        entry = Traced(range(n * rows, (n + 1) * rows), range(cols))
        out |= _windows(read_expert(stored, e, entry, model))
    return out


def _windows(found: dict[str, Any]) -> dict[str, Window]:
    return {name: Window(t.rows, t.cols, t.turned, t.add) for name, t in found.items()}


def _picked(at: At, key: slice | list[int]) -> At:
    if isinstance(key, slice):
        return at[key]
    if isinstance(at, range) and at == range(len(at)):
        return key  # the list itself: one for all layers
    return runs_as_range([at[i] for i in key])


def runs_as_range(at: At) -> At:
    """`at` as a range where it counts up by one."""
    if isinstance(at, range) or not at or at[-1] - at[0] != len(at) - 1:
        return at
    whole = range(at[0], at[-1] + 1)
    return whole if all(a == b for a, b in zip(at, whole, strict=True)) else at


def pick(at: At, key: Iterable[int]) -> At:
    """at[k] for each k of `key`; a range where that comes out."""
    if isinstance(key, range) and key.step == 1 and isinstance(at, range):
        return at[key.start : key.stop]
    return runs_as_range([at[k] for k in key])
