"""The view of `llamactl compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamactl.analysis.compare import CompareReport
from llamactl.render.document import Block, Cell, Column, Document, Lines, Table
from llamactl.render.units import ratio, share


def view(reports: Sequence[CompareReport], *, sources: Sequence[str] = (), **_: Any) -> Document:
    """Features and numbers in a column each, then the difference as edits."""
    (r,) = reports
    ids = [m.id for m in r.models]
    marks = {d.feature for d in r.differences}
    rows: list[tuple[Cell, ...]] = [
        ("*" if name in marks else "", name, *(m.features[name] for m in r.models)) for name in r.told()]
    numbers: list[tuple[Cell, ...]] = [
        ("parameters", *(m.total for m in r.models)),
        ("  against the first", *(ratio(m.total_ratio) for m in r.models)),
        ("active per token", *(m.active for m in r.models)),
        ("feed-forward share of blocks", *(share(m.ffn_share_blocks) for m in r.models)),
        ("weights, bytes", *(m.weights_bytes for m in r.models)),
        ("  dtype", *(m.dtype for m in r.models)),
        ("cache per token, elements", *(m.kv_elements_per_token for m in r.models)),
        ("  bytes in bf16", *(m.kv_bytes_per_token_bf16 for m in r.models)),
        ("  against the first", *(ratio(m.kv_ratio) for m in r.models)),
    ]
    if not any(m.active for m in r.models):
        numbers = [row for row in numbers if row[0] != "active per token"]
    blocks: list[Block] = [
        Table("", (Column(""), Column("part"), *(Column(i) for i in ids)), tuple(rows)),
        Table("", (Column("number"), *(Column(i, "count") for i in ids)), tuple(numbers)),
        Lines("as edits" if r.differences else "", tuple(_edits(r, ids)) or ("nothing differs",)),
    ]
    main = Table("", (Column("feature"), *(Column(i) for i in ids), Column("differs")), tuple(
        (name, *(m.features[name] for m in r.models), str(name in marks).lower()) for name in r.models[0].features))
    return Document(tuple(blocks), main, (len(r.differences),))


def _edits(r: CompareReport, ids: Sequence[str]) -> list[str]:
    """"positions: learned table -> RoPE", for each model after the first."""
    out = []
    for n in range(1, len(ids)):
        if len(ids) > 2:
            out.append(f"{ids[0]} -> {ids[n]}")
        out += [f"{'  ' if len(ids) > 2 else ''}{d.feature}: {d.values[0]} -> {d.values[n]}" for d in r.differences
                if d.values[n] != d.values[0]]
    return out
