"""The view of `llamactl evolve`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamactl.analysis.compare import EvolveReport
from llamactl.render.document import Cell, Column, Document, Table


def view(reports: Sequence[EvolveReport], **_: Any) -> Document:
    """One line a step: what changed, and what the model costs then."""
    (r,) = reports
    head = (Column("step", "count"), Column("edit"), Column("parameters", "count"),
            Column("feed-forward share", "share"), Column("cache per token", "count"),
            Column("bytes in bf16", "count"), Column("--set"))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (n, s.title, s.total, s.ffn_share_blocks, s.kv_elements_per_token, s.kv_bytes_per_token_bf16, " ".join(s.edits))
        for n, s in enumerate(r.steps))
    main = Table("", tuple(Column(c) for c in ("step", "title", "edits", "total", "ffn_share_blocks",
                                               "kv_elements_per_token", "kv_bytes_per_token_bf16")),
                 tuple((n, s.title, " ".join(s.edits), s.total, s.ffn_share_blocks, s.kv_elements_per_token,
                        s.kv_bytes_per_token_bf16) for n, s in enumerate(r.steps)))
    return Document((Table(f"{r.start} -> {r.goal}", head, rows),), main, (r.steps[-1].total,))
