"""Reports -> table | plain | json | csv | md | html. The only room with rich, imported only for a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamactl.render.document import Document


def document(command: str, reports: Sequence[Any], **options: Any) -> Document:
    """The blocks of a command's reports. options: what the command was asked to show (by, tree, verbose, ...)."""
    if command == "params":
        from llamactl.render.params import view as params_view

        return params_view(reports, **options)
    if command == "kv-cache":
        from llamactl.render.kvcache import view as kv_view

        return kv_view(reports, **options)
    raise ValueError(command)


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
