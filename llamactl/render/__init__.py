"""Reports -> table | plain | json | csv | md | html. The only room with rich, imported only for a table."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from llamactl.render.document import Document


def document(command: str, reports: Sequence[Any], **options: Any) -> Document:
    """The blocks of a command's reports. options: what the command was asked to show (by, tree, verbose, ...)."""
    view = import_module(f"llamactl.render.{command.replace('-', '')}").view
    made: Document = view(reports, **options)
    return made


def render(doc: Document, format: str, *, color: bool | None = None) -> str:
    """`doc` as text in one of plain, md, csv; table needs a terminal's width and goes through `render.table`."""
    if format == "csv":
        from llamactl.render.text import csv

        return csv(doc)
    if format == "md":
        from llamactl.render.text import markdown

        return markdown(doc)
    if format == "table":
        from llamactl.render.table import table

        return table(doc, color=color)
    from llamactl.render.text import plain

    return plain(doc)


def html(command: str, reports: Sequence[Any]) -> str:
    """A report as an HTML fragment, for notebooks."""
    from llamactl.render.text import html as fragment

    return fragment(document(command, reports))
