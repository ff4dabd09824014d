"""The views of `llamactl lab`: the list of experiments, and what was found beside what is claimed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from llamactl.analysis.experiment import OURS, Claim, Experiment, Finding, LabList, LabReport
from llamactl.analysis.experiment import Grid as Numbers
from llamactl.render.document import Block, Column, Document, Facts, Lines, Table
from llamactl.render.units import count

SIGNS = {"=": "", "<=": "<= ", ">=": ">= "}
HEAD = ("what", "on", "measured", "spread", "claim or limit", "verdict")
LEGEND = (("spread", "lowest to highest of the (N) values that a value sums up: draws, layers, windows or repetitions"),
          ("(ours)", "a limit that the lab draws; what has no such mark is claimed"))
_COLUMNS = ("experiment", "claim", "formula", "what", "of", "value", "unit", "lowest", "highest", "samples", "relation",
            "expected", "tolerance", "verdict", "note")


def view(reports: Sequence[LabReport | LabList], *, verbose: bool = False, **_: Any) -> Document:
    """The list as one table; a run as facts, claims, numbers and notes of each experiment. verbose: times too."""
    (r,) = reports
    if isinstance(r, LabList):
        table = Table("", (Column("name"), Column("what it asks"), Column("source")),
                      tuple((x.name, x.title, x.source) for x in r.experiments))
        return Document((table,), table, tuple(x.name for x in r.experiments))
    blocks: list[Block] = []
    for e in r.experiments:
        blocks += _experiment(e, verbose)
    blocks.append(Facts("where it was measured", tuple(where(r))))
    blocks.append(Facts("how to read it", LEGEND))
    rows = tuple(_flat(e, c, f) for e in r.experiments for c in e.claims for f in c.findings)
    return Document(tuple(blocks), Table("", tuple(map(Column, _COLUMNS)), rows), (r.verdict,))


def where(r: LabReport) -> Iterator[tuple[str, str]]:
    """The device and what else decides the numbers."""
    yield "device", r.device if r.device.startswith("cpu") else f"{r.device}, beside {r.threads} CPU threads"
    yield "torch", r.torch
    yield "seed", str(r.seed)
    yield "trained weights", ", ".join(r.checkpoints) or "none given"
    if r.text is not None:
        yield "run on", r.text


def counted(e: Experiment) -> str:
    """The verdict and of how many findings: holds: 12 hold, 2 are measured, 1 is skipped."""
    all_ = [f.verdict for c in e.claims for f in c.findings]
    words = (("differs", "differs", "differ"), ("holds", "holds", "hold"), ("measured", "is measured", "are measured"),
             ("skipped", "is skipped", "are skipped"))
    said = [f"{n} {one if n == 1 else many}" for word, one, many in words if (n := all_.count(word))]
    return f"{e.verdict}: {', '.join(said)}"


def number(x: float | None, unit: str = "") -> str:
    """1,073,741,824 bytes; 0.99902; 1.4e-06."""
    if x is None:
        return "-"
    if isinstance(x, int) or (x == int(x) and abs(x) < 1e15):
        said = count(int(x))
    else:
        said = f"{x:,.5g}" if 1e-3 <= abs(x) < 1e5 else f"{x:,.0f}" if abs(x) >= 1e5 else f"{x:.2g}"
    if isinstance(x, float) and 1e4 <= abs(x) < 1e5 and x == round(x, 2) != int(x):
        said = f"{x:,.2f}"  # what was rounded to two decimals keeps them
    return f"{said} {unit}".rstrip()


def claimed(f: Finding) -> str:
    """What is said of the value, or where its limit is: <= 3e-04 (ours), 0.99902 +- 5e-05."""
    if f.expected is None or f.relation is None:
        return "-"
    room = f" +- {f.tolerance:.1g}" if f.tolerance else ""
    return f"{SIGNS[f.relation]}{number(f.expected)}{room}{' (ours)' if OURS in _said(f) else ''}"


def _said(f: Finding) -> list[str]:
    return (f.note or "").split("; ")


def spread(f: Finding) -> str:
    """Lowest to highest of how many."""
    if f.samples < 2 or f.lowest is None:
        return "-"
    return f"{number(f.lowest)} to {number(f.highest)} ({count(f.samples)})"


def row(f: Finding) -> tuple[str, str, str, str, str, str]:
    """A finding under HEAD."""
    return f.what, f.of, number(f.value, f.unit), spread(f), claimed(f), f.verdict


def notes(e: Experiment) -> tuple[tuple[str, str], ...]:
    """Of the findings that have one, what they are of and the note; the same one once. A limit of ours is called so
    where it stands.
    """
    said = ((f"{f.what} ({f.of})", "; ".join(x for x in _said(f) if x not in ("", OURS)))
            for c in e.claims for f in c.findings)
    return tuple(dict.fromkeys((what, note) for what, note in said if note))


def cells(grid: Numbers) -> list[tuple[str, ...]]:
    """A grid's rows as text."""
    return [tuple("-" if x is None else x if isinstance(x, str) else number(x) for x in r) for r in grid.rows]


def _experiment(e: Experiment, verbose: bool) -> Iterator[Block]:
    facts = [("source", e.source), ("verdict", counted(e))]
    if verbose:
        facts.append(("took", f"{e.seconds:.1f} s"))
    yield Facts(f"{e.name}: {e.title}", tuple(facts))
    for c in e.claims:
        yield Table(f"{c.claim}   [{c.formula}]", tuple(map(Column, HEAD)), tuple(row(f) for f in c.findings))
    for g in e.grids:
        yield Table(g.title, tuple(map(Column, g.columns)), tuple(cells(g)))
    for p in e.passages:
        yield Lines(p.title, tuple(p.text.split("\n")))
    if said := notes(e):
        yield Facts("notes", said)


def _flat(e: Experiment, c: Claim, f: Finding) -> tuple[Any, ...]:
    return (e.name, c.claim, c.formula, f.what, f.of, f.value, f.unit, f.lowest, f.highest, f.samples, f.relation,
            f.expected, f.tolerance, f.verdict, f.note)
