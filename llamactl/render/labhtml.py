"""The page of `llamactl lab run --report`: every claim with what was found, curves drawn; one file without network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llamactl.analysis.experiment import Chart, Claim, Experiment, LabReport, Passage
from llamactl.render.lab import HEAD, cells, counted, notes, number, row, where
from llamactl.render.svg import lines
from llamactl.render.theme import page as whole
from llamactl.render.theme import pairs, table, text

TONE = {"holds": "good", "differs": "bad", "measured": "soft", "skipped": "warn"}
WORD = " class=\"word\""  # a cell that is not broken
POINTS = 240  # of a curve; each is the mean of what stands there


def page(r: LabReport) -> str:
    """The report as one HTML file."""
    body = [f"<header>\n<h1>llamactl lab: <span class=\"{TONE[r.verdict]}\">{text(r.verdict)}</span></h1>",
            "<p class=\"lead\">What is claimed, and what was measured here.</p>\n</header>"]
    body += [_experiment(e) for e in r.experiments]
    body.append(f"<footer>\n{pairs(where(r))}\n</footer>")
    return whole(f"llamactl lab: {r.verdict}", "\n".join(body))


def _experiment(e: Experiment) -> str:
    parts = [f"<section id=\"{text(e.name)}\">\n<h2>{text(e.name)}: {text(e.title)}</h2>",
             f"<p class=\"soft\">{text(e.source)}. Took {e.seconds:.1f} s.</p>",
             f"<p class=\"{TONE[e.verdict]}\">{text(counted(e))}</p>"]
    parts += [_claim(c) for c in e.claims]
    parts += [_chart(f"{e.name}: {c.title}", c) for c in e.charts]
    parts += [_folded(g.title, table(g.columns, cells(g))) for g in e.grids]
    parts += [_passage(p) for p in e.passages]
    if said := notes(e):
        parts.append(_folded("Notes", pairs(said)))
    return "\n".join([*parts, "</section>"])


def _claim(c: Claim) -> str:
    """The table of findings, each verdict in its colour."""
    top = "".join(f"<th scope=\"col\"{WORD * (x in HEAD[-2:])}>{text(x)}</th>" for x in HEAD)
    rows = "\n".join(_row(row(f)) for f in c.findings)
    return (f"<div class=\"card\">\n<h3>{text(c.claim)}</h3>\n<p><code>{text(c.formula)}</code></p>\n"
            f"<table class=\"wide\">\n<thead><tr>{top}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>\n</div>")


def _row(said: Sequence[str]) -> str:
    first, *middle, verdict = said
    inner = "".join(f"<td>{text(x)}</td>" for x in middle)
    last = f"<td class=\"{TONE[verdict]} word\">{text(verdict)}</td>"
    return f"<tr><th scope=\"row\">{text(first)}</th>{inner}{last}</tr>"


def _chart(name: str, c: Chart) -> str:
    """The curves, and behind a fold their numbers."""
    drawn, ends = [], []
    for line in c.lines:
        at, values = thinned(line.at, line.values)
        drawn.append((line.name, at, values))
        ends.append(f"{line.name} {number(line.values[0])} to {number(line.values[-1])}" if line.values else line.name)
    said = f"{c.title}, {c.up}: {'; '.join(ends)}"
    rows = [(number(at), *(number(x) for x in values)) for at, *values in zip(
        drawn[0][1], *(v for _, _, v in drawn), strict=False)] if drawn else []
    head = (c.across, *(n for n, _, _ in drawn))
    return (f"<figure>\n{lines(name, said, drawn, across=c.across)}\n<figcaption>{text(c.title)}, {text(c.up)}"
            f"</figcaption>\n</figure>\n{_folded('The numbers', table(head, rows))}")


def thinned(at: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Up to POINTS points: where each stretch ends, and the mean over it."""
    n = min(POINTS, len(values))
    edges = [round(k * len(values) / n) for k in range(n + 1)] if n else [0]
    stretches = list(zip(edges, edges[1:], strict=False))
    return [at[b - 1] for _, b in stretches], [sum(values[a:b]) / (b - a) for a, b in stretches]


def _passage(p: Passage) -> str:
    body = "<br>\n".join(text(x) for x in p.text.split("\n"))
    return f"<div class=\"card\">\n<h3>{text(p.title)}</h3>\n<p><code>{body}</code></p>\n</div>"


def _folded(title: str, body: str | Iterable[str]) -> str:
    return f"<details>\n<summary>{text(title)}</summary>\n{body}\n</details>"
