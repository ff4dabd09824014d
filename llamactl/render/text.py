"""Formats without colour: plain (aligned ASCII, never cut), Markdown, CSV with raw integers, an HTML fragment."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from llamactl.errors import printable
from llamactl.render.document import Document, Facts, Lines, Table
from llamactl.render.units import cell


def plain(doc: Document) -> str:
    """Blocks under each other, columns aligned with two spaces between them; lines are as long as they need to be."""
    return "\n\n".join(_plain(block) for block in doc.blocks) + "\n"


def _plain(block: Table | Facts | Lines) -> str:
    title = [printable(block.title)] if block.title else []
    if isinstance(block, Lines):
        return "\n".join([*title, *(printable(x) for x in block.lines)])
    if isinstance(block, Facts):
        pairs = [(printable(label), printable(text)) for label, text in block.pairs]
        wide = max((len(label) for label, _ in pairs), default=0)
        return "\n".join([*title, *(f"{label.ljust(wide)}  {text}" for label, text in pairs)])
    return "\n".join([*title, *_aligned(block)])


def texts(table: Table) -> list[list[str]]:
    """The table's cells as printable text."""
    return [[printable(cell(value, c.kind)) for value, c in zip(row, table.columns, strict=True)] for row in table.rows]


def _aligned(table: Table) -> Iterable[str]:
    rows = [[printable(c.name) for c in table.columns], *texts(table)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(table.columns))]
    for row in rows:
        parts = [text.ljust(w) if c.kind == "text" else text.rjust(w)
                 for text, w, c in zip(row, widths, table.columns, strict=True)]
        yield "  ".join(parts).rstrip()


def markdown(doc: Document) -> str:
    """GitHub-flavoured Markdown; facts become a two-column table."""
    out: list[str] = []
    for block in doc.blocks:
        if block.title:
            out.append(f"**{_md(block.title)}**\n")
        if isinstance(block, Lines):
            text = "\n".join(printable(x) for x in block.lines)
            fence = "`" * max(3, *(1 + len(run) for run in re.findall("`+", text)), 0)
            out.append(f"{fence}text\n{text}\n{fence}\n")
        elif isinstance(block, Facts):
            out.append(_md_table(["", ""], [[a, b] for a, b in block.pairs], ["text", "text"]))
        else:
            out.append(_md_table([c.name for c in block.columns], texts(block), [c.kind for c in block.columns]))
    return "\n".join(out)


def _md(text: str) -> str:
    return re.sub(r"([\\|*`\[])", r"\\\1", printable(text)).replace("<", "&lt;")


def _md_table(head: Sequence[str], rows: Sequence[Sequence[str]], kinds: Sequence[str]) -> str:
    rule = ["---" if k == "text" else "---:" for k in kinds]
    lines = [[_md(h) for h in head], rule, *([_md(x) for x in row] for row in rows)]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines) + "\n"


def csv(doc: Document) -> str:
    """The main table alone: one header line, raw integers, no units in the cells."""
    import csv as csvlib
    import io

    out = io.StringIO()
    writer = csvlib.writer(out, lineterminator="\n")
    writer.writerow([printable(c.name) for c in doc.main.columns])
    for row in doc.main.rows:
        writer.writerow(["" if v is None else printable(v) if isinstance(v, str) else v for v in row])
    return out.getvalue()


def html(doc: Document) -> str:
    """Tables and facts as plain HTML tables; every text is escaped."""
    from html import escape

    out = ["<div class=\"llamactl\">"]
    for block in doc.blocks:
        out.append(f"<p><b>{escape(printable(block.title))}</b></p>" if block.title else "")
        if isinstance(block, Lines):
            out.append("<pre>" + escape("\n".join(printable(x) for x in block.lines)) + "</pre>")
            continue
        if isinstance(block, Facts):
            head, rows, kinds = [], [list(p) for p in block.pairs], ["text", "text"]
        else:
            head, rows = [c.name for c in block.columns], texts(block)
            kinds = [c.kind for c in block.columns]
        out.append("<table>")
        if head:
            out.append("<tr>" + "".join(f"<th>{escape(printable(h))}</th>" for h in head) + "</tr>")
        for row in rows:
            cells = "".join(
                f"<td style=\"text-align:{'left' if k == 'text' else 'right'}\">{escape(printable(x))}</td>"
                for x, k in zip(row, kinds, strict=True))
            out.append(f"<tr>{cells}</tr>")
        out.append("</table>")
    return "".join([*out, "</div>"])
