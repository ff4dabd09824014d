"""A report as blocks that every format can print: facts, tables, lines. Cells stay raw numbers until the last step."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

Cell: TypeAlias = "str | int | float | None"


class Column(NamedTuple):
    """kind: text | count | number | bytes | share | ratio; how a cell is written, and on which side it stands."""

    name: str
    kind: str = "text"


class Table(NamedTuple):
    """Rows of raw cells under typed columns. machine names stand in CSV headers: lower case, with the unit."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]


class Facts(NamedTuple):
    """Labelled lines under a title."""

    title: str
    pairs: tuple[tuple[str, str], ...]


class Lines(NamedTuple):
    """Text as it is: a tree, a formula, a chart."""

    title: str
    lines: tuple[str, ...]


Block = Table | Facts | Lines


class Document(NamedTuple):
    """blocks: what people read. main: the one table that csv holds. primary: what -q prints, one value a line."""

    blocks: tuple[Block, ...]
    main: Table
    primary: tuple[int | float | str, ...]
