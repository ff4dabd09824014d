"""The view of `llamactl diff`: both sides, the counts, what the descriptions say, and every tensor that differs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llamactl.analysis.diff import DIFFER, EXACT_ONLY, Change, DiffReport, Side, TensorDiff
from llamactl.render.document import Block, Cell, Column, Document, Facts, Table
from llamactl.render.units import count, layer_ranges

_WORDS = {"equal": "equal bit for bit", "dtype": "equal up to dtype", "rounding": "equal up to the rounding of a 1 "
          "that one layout adds", "different": "different", "shape": "of another shape", "missing": "on one side only"}
_SHORT = {"dtype": "dtype only", "rounding": "rounding only"}


def view(reports: Sequence[DiffReport], *, every: bool = False, verbose: bool = False, sources: Sequence[str] = (),
         **_: Any) -> Document:
    """Facts, the descriptions' differences, and the tensors: those that differ, or all."""
    (r,) = reports
    by = {status: getattr(r.counts, status) for status in _WORDS}
    pairs = [(name, _side(s)) for name, s in zip("AB", r.models, strict=True)]
    pairs.append(("tensors", f"{count(len(r.tensors))}: " + ", ".join(f"{count(n)} {_WORDS[status]}"
                                                                      for status, n in by.items() if n)))
    pairs += [("dtypes", f"A {a}, B {b}: {count(n)} equal in the other's type")
              for (a, b), n in _dtypes(r.tensors).items()]
    pairs.append(("verdict", _verdict(r)))
    blocks: list[Block] = [Facts("", tuple(pairs))]
    if r.descriptions:
        blocks.append(Table("descriptions", (Column("part"), Column("A"), Column("B")),
                            tuple((_where(c), *c.values) for c in r.descriptions)))
    listed = [t for t in r.tensors if every or t.status in DIFFER or (r.strict and t.status in EXACT_ONLY)]
    if listed:
        columns = ("tensor", "status", "dtype", "max |a-b|", "relative", "elements", "in A", "in B", "note")
        kinds = dict.fromkeys(columns[3:5], "number")
        blocks.append(Table("tensors", tuple(Column(c, kinds.get(c, "text")) for c in columns),
                            tuple(map(_row, listed))))
    return Document(tuple(blocks), _machine(r), (r.differing,))


def _side(s: Side) -> str:
    return f"{s.id} ({s.layout}, {s.family}, {'tied' if s.tied else 'untied'}): {count(s.tensors)} tensors, {s.path}"


def _verdict(r: DiffReport) -> str:
    words = []
    if r.differing:
        words.append(f"{count(r.differing)} of {count(len(r.tensors))} tensors differ")
    if r.descriptions:
        words.append("the descriptions differ")
    if words:
        return "; ".join(words)
    loose = [_WORDS[s].removeprefix("equal ") for s in EXACT_ONLY if getattr(r.counts, s)]
    return f"equal {' and '.join(loose)}" if loose else "equal"


def _dtypes(tensors: Sequence[TensorDiff]) -> dict[tuple[str | None, str | None], int]:
    """Pairs of types in which tensors are equal, and how many."""
    out: dict[tuple[str | None, str | None], int] = {}
    for t in tensors:
        if t.status == "dtype":
            out[t.dtypes] = out.get(t.dtypes, 0) + 1
    return out


def _where(c: Change) -> str:
    return f"{c.part}, layers {layer_ranges(c.layers)}" if c.layers else c.part


def _row(t: TensorDiff) -> tuple[Cell, ...]:
    n = t.numbers
    a, b = (_shape(s) for s in t.shapes)
    notes = [*([f"{a} against {b}"] if t.status == "shape" else []), *([t.note] if t.note else [])]
    if n is not None and (any(n.nans) or n.not_finite):
        notes.append(f"NaNs: {count(n.nans[0])} in A, {count(n.nans[1])} in B" if any(n.nans) else
                     f"{count(n.not_finite)} against an infinity")
    dtypes = [x for x in t.dtypes if x]
    return (t.name, _SHORT.get(t.status, t.status), " -> ".join(dict.fromkeys(dtypes)),
            *(_number(x) for x in ((n.max_abs, n.relative) if n else (None, None))),
            f"{count(n.differing)} of {count(n.elements)}" if n else "-",
            *(", ".join(x) or "-" for x in t.stored), "; ".join(notes))


def _shape(shape: tuple[int, ...] | None) -> str:
    return "-" if shape is None else "x".join(map(str, shape)) or "scalar"


def _number(x: float | None) -> str | None:
    return None if x is None else f"{x:.3g}"


def _machine(r: DiffReport) -> Table:
    names = ("tensor", "status", "dtype_a", "dtype_b", "shape_a", "shape_b", "max_abs", "relative", "differing",
             "elements", "nans_a", "nans_b", "not_finite", "stored_a", "stored_b", "note")
    rows = []
    for t in r.tensors:
        n = t.numbers
        figures = (n.max_abs, n.relative, n.differing, n.elements, *n.nans, n.not_finite) if n else (None,) * 7
        rows.append((t.name, t.status, *t.dtypes, *map(_shape, t.shapes), *figures, *(", ".join(x) for x in t.stored),
                     t.note))
    return Table("", tuple(Column(c) for c in names), tuple(rows))
