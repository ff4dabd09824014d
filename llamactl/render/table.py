"""Tables for a terminal, with rich. Where it is too narrow for whole numbers, plain text is printed instead."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console, Group
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from llamactl.errors import printable
from llamactl.render.document import Document, Facts, Lines, Table
from llamactl.render.text import plain, texts


def table(doc: Document, *, color: bool | None = None) -> str:
    """`doc` drawn for the terminal on stdout. color: force on (True), off (False), or as the terminal has it (None)."""
    # Without colours rich still sends bold and dim; only a console without a colour system sends no escape at all.
    console = Console(file=sys.stdout, force_terminal=color or None, color_system=None if color is False else "auto",
                      highlight=False, legacy_windows=False)
    utf8 = (console.encoding or "").lower().replace("-", "").startswith("utf")
    blocks = [_block(b, utf8) for b in doc.blocks]
    room = console.width
    if any(Measurement.get(console, console.options.update(width=10_000), b).maximum > room for b in blocks):
        return plain(doc)
    spaced: list[RichTable | Text | Group] = []
    for n, b in enumerate(blocks):
        spaced += [Text(""), b] if n else [b]
    with console.capture() as got:
        console.print(Group(*spaced))
    return got.get()


def _block(block: Table | Facts | Lines, utf8: bool) -> RichTable | Text | Group:
    title = Text(printable(block.title), style="bold") if block.title else None
    body: RichTable | Text
    if isinstance(block, Lines):
        body = Text("\n".join(printable(x) for x in block.lines), no_wrap=True)
    elif isinstance(block, Facts):
        body = RichTable.grid(padding=(0, 2))
        for label, text in block.pairs:
            body.add_row(Text(printable(label), style="dim"), Text(printable(text)))
    else:
        body = RichTable(box=box.SIMPLE_HEAD if utf8 else box.ASCII2, pad_edge=False, header_style="bold")
        for c in block.columns:
            body.add_column(Text(printable(c.name)), justify="left" if c.kind == "text" else "right", no_wrap=True)
        for row in texts(block):
            body.add_row(*(Text(x) for x in row))
    return Group(title, body) if title else body
