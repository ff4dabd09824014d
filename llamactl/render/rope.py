"""The view of `llamactl rope`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from llamactl.analysis.rope import RopeReport, Rotation
from llamactl.render.document import Block, Cell, Column, Document, Facts, Lines, Table
from llamactl.render.units import count, layer_ranges


def view(reports: Sequence[RopeReport], *, sources: Sequence[str] = (), chart: bool = False, **_: Any) -> Document:
    """Facts and pairs of each rotation; on a terminal a plot of wavelengths against the contexts."""
    blocks: list[Block] = []
    for n, r in enumerate(reports):
        if not r.rotations:
            blocks.append(Facts(f"{r.id} ({', '.join([f'family {r.family}', *sources[n:n + 1]])})",
                                (("positions", r.positions), ("rotations", "none: nothing is rotated"))))
        for rotation in r.rotations:
            blocks.append(Facts(f"{r.id} ({', '.join([f'family {r.family}', *sources[n:n + 1]])})",
                                tuple(_facts(r, rotation))))
            blocks.append(_pairs(rotation))
            if chart:
                blocks.append(Lines("wavelength of each pair, in positions (o unstretched, x stretched, log scale)",
                                    tuple(_plot(rotation))))
    return Document(tuple(blocks), _csv(reports), tuple(x.untouched for r in reports for x in r.rotations))


def _facts(r: RopeReport, x: Rotation) -> list[tuple[str, str]]:
    where = "every layer"
    if x.layers != r.layers:
        where = f"{x.layers} of {r.layers} layers: {layer_ranges(x.layer_ranges)}"
    out = [("layers", where), ("base", f"{x.theta:,.10g}"),
           ("rotated", f"{x.rotated} of {x.head_dim} dimensions of each head, {x.pairing} pairs"),
           ("scheme", x.scheme + "".join(f", {k} {_short(v)}" for k, v in x.parameters.items()))]
    if x.attention_factor != 1.0:
        out.append(("attention factor", f"{x.attention_factor:.10g} on cos and sin"))
    trained = f"trained for {count(x.trained_context)}" if x.trained_context else "trained length not stated"
    usable = f", usable to {count(x.usable_context)}" if x.usable_context not in (None, x.trained_context) else ""
    out.append(("context", trained + usable + (f", judged at {count(x.target_context)}" if x.target_context else "")))
    out.append(("pairs", f"{len(x.pairs)}: {x.untouched} untouched, {x.blended} blended, {x.slowed} slowed"))
    if x.trained_context:
        far = f"{x.unseen} pairs go further than they did in unstretched training"
        out.append(("unseen angles", far if x.unseen else "none"))
    return out


def _short(value: Any) -> str:
    if isinstance(value, tuple | list):
        return f"[{len(value)} values]"
    return f"{value:,.10g}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def _pairs(x: Rotation) -> Table:
    """turns: inside the trained context. Narrow enough for a terminal of 100 columns; csv and json have every digit."""
    stretched = x.blended or x.slowed
    head = [Column("pair", "count"), *(Column(c, "number") for c in ("frequency", "wavelength", "turns"))]
    if stretched:
        head += [Column(c, "number") for c in ("stretched", "its wavelength", "slowed")]
    head.append(Column("kind"))
    rows: list[tuple[Cell, ...]] = []
    for p in x.pairs:
        row: list[Cell] = [p.j, f"{p.frequency:.6e}", _long(p.wavelength), _long(p.turns)]
        if stretched:
            row += [f"{p.stretched_frequency:.6e}", _long(p.stretched_wavelength), f"{p.slowed:.4g}x"]
        rows.append((*row, p.kind + (", unseen" if p.unseen else "")))
    return Table("", tuple(head), tuple(rows))


def _long(value: float) -> str:
    return f"{value:,.4f}" if value < 10_000 else f"{value:,.0f}"


def _plot(x: Rotation, width: int = 64) -> list[str]:
    """One line a pair, up to 32 of them; | marks the contexts."""
    marks = [m for m in (x.trained_context, x.target_context or x.usable_context) if m]
    top = math.log10(max(*(p.stretched_wavelength for p in x.pairs), *marks, 10.0) * 1.05)

    def at(value: float) -> int:
        return min(width - 1, round((width - 1) * math.log10(max(value, 1.0)) / top))

    every = -(-len(x.pairs) // 32)
    out = []
    for p in x.pairs[::every]:
        line = [" "] * width
        for m in marks:
            line[at(m)] = "|"
        line[at(p.stretched_wavelength)] = "x"
        line[at(p.wavelength)] = "o"
        out.append(f"{p.j:>4}  {''.join(line).rstrip()}")
    return [*out, "      " + ", ".join(f"| {count(m)}" for m in dict.fromkeys(marks))]


def _csv(reports: Sequence[RopeReport]) -> Table:
    names = ("model", "layers", "pair", "frequency", "wavelength", "stretched_frequency", "stretched_wavelength",
             "turns", "slowed", "kind", "unseen")
    return Table("", tuple(Column(n) for n in names), tuple(
        (r.id, layer_ranges(x.layer_ranges, whole=True), p.j, p.frequency, p.wavelength, p.stretched_frequency,
         p.stretched_wavelength, p.turns, p.slowed, p.kind, str(p.unseen).lower())
        for r in reports for x in r.rotations for p in x.pairs))
