"""No text of a document steers a terminal, whatever it is: a label, a title, a cell, a line."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llamactl.render.document import Column, Document, Facts, Lines, Table
from llamactl.render.table import table
from llamactl.render.text import csv, html, markdown, plain

EVIL = "a\x1b[31mb\u202ec"
SAFE = r"a\x1b[31mb\u202ec"


def evil() -> Document:
    """Every place of a document where a text can stand."""
    main = Table(EVIL, (Column(EVIL, "text"), Column("n", "count")), ((EVIL, 1),))
    return Document(blocks=(main, Facts(EVIL, ((EVIL, EVIL), ("short", "x"))), Lines(EVIL, (EVIL,))), main=main,
                    primary=(1,))


@pytest.mark.parametrize(("form", "places"), [(plain, 8), (markdown, 8), (csv, 2), (html, 8), (table, 8)])
def test_a_text_is_escaped_wherever_it_stands(form: Callable[[Document], str], places: int,
                                              monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    got = form(evil()).replace("\\[", "[").replace("\\\\", "\\")
    assert not {"\x1b", "\u202e"} & set(got)
    assert got.count(SAFE) == places


def test_values_stand_in_one_column_after_an_escaped_label() -> None:
    label, short = plain(evil()).split("\n\n")[1].splitlines()[1:]
    assert label.index(SAFE, len(SAFE)) == short.index("x")
