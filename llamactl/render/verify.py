"""The view of `llamactl verify`: the verdict and why, what explains it, where it begins, how far it goes."""

from __future__ import annotations

import math
import shutil
import textwrap
from collections.abc import Sequence
from typing import Any

from llamactl.analysis.selftest import SelftestReport
from llamactl.analysis.verification import VerifyReport
from llamactl.render import selftest
from llamactl.render.document import Block, Cell, Column, Document, Facts, Lines, Table
from llamactl.render.units import count
from llamactl.render.verdict import (
    Pairs,
    compared,
    decades,
    explained,
    finite,
    listed,
    located,
    measured,
    multiple,
    noticed,
    number,
    sentence,
    stretches,
)

FEW = 8  # findings of a level that are shown; -v and the JSON have them all
BARS = 16  # lines of a chart


def view(reports: Sequence[VerifyReport | SelftestReport], *, verbose: bool = False, every: bool = False,
         chart: bool = False, sources: Sequence[str] = (), **_: Any) -> Document:
    """Facts in the order in which they are asked for. every: all findings and layers, as verbose. chart: a terminal."""
    (r,) = reports
    full = verbose or every
    if isinstance(r, SelftestReport):
        return selftest.view([r], verbose=full)
    first = [("verdict", sentence(r)), *compared(r)]
    if r.tried:
        first.append(("tried", f"{count(r.tried)} hypotheses"))
    blocks: list[Block] = [Facts("", tuple(first)), *_explanations(r)]
    if r.first_difference is not None:
        blocks.append(Facts("where", tuple(located(r.first_difference))))
    if r.measures is not None:
        blocks.append(Facts("logits, the second against the first", tuple(measured(r.measures, r.floor))))
    if chart and (full or not r.passed):
        blocks += _charts(r)
    if full and r.layers:
        blocks.append(Table("relative error by layer, fed with the right input", (Column("layer", "count"), Column(
            "relative", "number")), tuple((x.layer, number(x.relative)) for x in r.layers)))
    if r.inventory:
        blocks.append(Facts("inventory", tuple(_inventory(r, full))))
    if r.limits:
        blocks.append(Facts("cannot see", tuple(("-", x) for x in r.limits)))
    if chart:
        blocks = [_wrapped(b) if isinstance(b, Facts) else b for b in blocks]
    return Document(tuple(blocks), _machine(r), (r.verdict,))


def _explanations(r: VerifyReport) -> list[Block]:
    several = len(r.explanations) > 1
    name = "explanation" if r.verdict == "explained" else "part of it"  # what is left is more than arithmetic
    return [Facts(f"{name} {n} of {len(r.explanations)}" if several else name, tuple(explained(e, r.floor, several)))
            for n, e in enumerate(r.explanations, 1)]


def _inventory(r: VerifyReport, full: bool) -> Pairs:
    out: Pairs = []
    for i in r.inventory:
        out.append(("files", listed(i)))
        for level in ("error", "warning", "note"):
            some = [f for f in i.findings if f.level == level]
            if level == "note" and not full:
                if some:
                    out.append(("notes", f"{count(len(some))}, with -v"))
                continue
            shown = some if full else some[:FEW]
            out += [(level, noticed(f)) for f in shown]
            if len(some) > len(shown):
                out.append((level, f"and {count(len(some) - len(shown))} more; -v and --json list them all"))
    return out


def _charts(r: VerifyReport) -> list[Block]:
    out: list[Block] = []
    if r.measures is not None and any(r.measures.kl_by_position):
        cut = stretches(r.measures.kl_by_position, BARS, alone=1)  # the first token attends to itself alone
        out.append(Lines("largest KL by position, nats, log scale", tuple(_bars(cut, "position"))))
    if any(x.relative is None or x.relative > 0 for x in r.layers):
        cut = [(r.layers[a].layer, r.layers[b].layer, x)
               for a, b, x in stretches([x.relative for x in r.layers], BARS)]
        out.append(Lines("largest relative error by layer, log scale", tuple(_bars(cut, "layer"))))
    return out


def _bars(cut: Sequence[tuple[int, int, float | None]], what: str, width: int = 40) -> list[str]:
    """A bar for each stretch; one that is not finite is as long as can be, in `!`."""
    low, high = decades([x for _, _, x in cut])
    labels = [f"{what} {a}" if a == b else f"{what} {a}-{b}" for a, b, _ in cut]
    wide = max(map(len, labels), default=0)
    return [f"{label.ljust(wide)}  {_bar(x, low, high, width).ljust(width)}  "
            f"{'not finite' if x is None else number(x)}" for label, (_, _, x) in zip(labels, cut, strict=True)]


def _bar(x: float | None, low: int, high: int, width: int) -> str:
    if x is None:
        return "!" * width
    if x <= 0:
        return ""
    return "#" * max(1, min(width, round(width * (math.log10(x) - low) / (high - low))))


def _wrapped(block: Facts) -> Facts:
    """Texts cut at spaces into as many lines as the terminal needs, for a table that is too wide becomes plain text."""
    wide = max((len(label) for label, _ in block.pairs), default=0)
    room = max(30, shutil.get_terminal_size().columns - wide - 6)
    return Facts(block.title, tuple(
        ("" if n else label, line) for label, text in block.pairs
        for n, line in enumerate(textwrap.wrap(text, room, break_long_words=False, break_on_hyphens=False) or [""])))


def _machine(r: VerifyReport) -> Table:
    """One row a measure; what does not exist is empty."""
    m, f = r.measures, r.floor
    p = r.first_difference
    rows: list[tuple[str, Cell]] = [
        ("verdict", r.verdict), ("why", r.why), ("explanations", " + ".join(e.edit for e in r.explanations) or None),
        ("first_difference", p.where if p else None)]
    if m is not None:
        rows += [(name, getattr(m, name)) for name in (
            "tokens", "max_kl", "mean_kl", "max_abs_dlogit", "max_relative", "top1_agreement", "top5_agreement",
            "kl_position_0")]
        rows += [(f"kl_quarter_{n}", x) for n, x in enumerate(m.kl_by_quarter, 1)]
        rows += [(name, getattr(m, name)) for name in ("columns", "columns_of", "first_column", "loss_first",
                                                       "loss_second")]
        rows += list(zip(("non_finite_first", "non_finite_second"), m.non_finite, strict=True))
    if f is not None:
        rows += [("floor_max_abs_dlogit", f.max_abs_dlogit), ("floor_max_kl", f.max_kl), ("limit", f.limit),
                 ("times_limit", multiple(m, f))]
    return Table("", (Column("measure"), Column("value", "number")), tuple(
        (name, finite(x) if isinstance(x, float) else x) for name, x in rows))
