"""The page of `llamactl lab run --report`: every claim with what was found, curves drawn; one file without network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from llamactl.analysis.experiment import Chart, Claim, Experiment, LabReport, Passage
from llamactl.render.lab import HEAD, LEGEND, cells, counted, notes, number, row, where
from llamactl.render.svg import lines
from llamactl.render.theme import page as whole
from llamactl.render.theme import pairs, table, text

TONE = {"holds": "good", "differs": "bad", "measured": "soft", "skipped": "warn"}
WORD = " class=\"word\""  # a cell that is not broken
POINTS = 300  # of a curve; each is the mean of what stands there
# A word is broken only where it is longer than a cell may be: a table too wide for its place is scrolled.
CSS = """.scroll { overflow-x: auto; }
.scroll th, .scroll td { overflow-wrap: break-word; max-width: 22rem; }
.scroll tbody th { width: auto; }
.scroll .wide tbody th, .scroll .found tbody th { min-width: 7rem; border-bottom: 1px solid var(--line); }
.verbatim { white-space: pre-wrap; }
@media (max-width: 34rem) { .found thead, .found .none { display: none; }
  .found tr { display: block; padding: .4rem 0; border-bottom: 1px solid var(--line); }
  .scroll .found tbody th, .scroll .found td { border: 0; max-width: none; padding: .05rem 0; white-space: normal; }
  .found td[data-name]::before { content: attr(data-name) ": "; color: var(--soft); } }
@media (min-width: 60rem) { main { max-width: 72rem; } }
@media print { .scroll { overflow: visible; } }
"""


def page(r: LabReport) -> str:
    """The report as one HTML file."""
    body = [f"<header>\n<h1>llamactl lab: <span class=\"{TONE[r.verdict]}\">{text(r.verdict)}</span></h1>",
            "<p class=\"lead\">What is claimed, and what was measured here.</p>\n</header>"]
    body += [_experiment(e) for e in r.experiments]
    body.append(f"<footer>\n{_scrolled('where it was measured', pairs([*where(r), *LEGEND]))}\n</footer>")
    return whole(f"llamactl lab: {r.verdict}", "\n".join(body), css=CSS)


def _scrolled(name: str, body: str) -> str:
    """A table that is scrolled where it is wider than the page, by keys too."""
    return f"<div class=\"scroll\" role=\"region\" tabindex=\"0\" aria-label=\"{text(name)}\">\n{body}\n</div>"


def _experiment(e: Experiment) -> str:
    parts = [f"<section id=\"{text(e.name)}\">\n<h2>{text(e.name)}: {text(e.title)}</h2>",
             f"<p class=\"soft\">{text(e.source)}. Took {e.seconds:.1f} s.</p>",
             f"<p class=\"{TONE[e.verdict]}\">{text(counted(e))}</p>"]
    parts += [_claim(c) for c in e.claims]
    parts += [_chart(f"{e.name}: {c.title}", c) for c in e.charts]
    parts += [_folded(g.title, _scrolled(g.title, table(g.columns, cells(g)))) for g in e.grids]
    parts += [_passage(p) for p in e.passages]
    if said := notes(e):
        parts.append(_folded("Notes", _scrolled("notes", pairs(said))))
    return "\n".join([*parts, "</section>"])


def _claim(c: Claim) -> str:
    """The table of findings, each verdict in its colour. On a phone a finding is a block, so that all of it is seen."""
    top = "".join(f"<th scope=\"col\"{WORD * (x in HEAD[-2:])}>{text(x)}</th>" for x in HEAD)
    rows = "\n".join(_row(row(f)) for f in c.findings)
    body = f"<table class=\"found\">\n<thead><tr>{top}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table>"
    return (f"<div class=\"card\">\n<h3>{text(c.claim)}</h3>\n<p><code>{text(c.formula)}</code></p>\n"
            f"{_scrolled(c.claim, body)}\n</div>")


def _row(said: Sequence[str]) -> str:
    first, *middle, verdict = said
    inner = "".join(f"<td data-name=\"{text(name)}\" class=\"{_kind(name, x)}\">{text(x)}</td>"
                    for name, x in zip(HEAD[1:], middle, strict=False))
    last = f"<td class=\"{TONE[verdict]} word\">{text(verdict)}</td>"
    return f"<tr><th scope=\"row\">{text(first)}</th>{inner}{last}</tr>"


def _kind(name: str, said: str) -> str:
    """Classes of a cell: one that says nothing is left out where there is no room."""
    return "none" if said == "-" else "word" if name == HEAD[-2] else "cell"


def _chart(name: str, c: Chart) -> str:
    """The curves, and behind a fold their numbers."""
    drawn, ends, spans, means = [], [], list[str](), False
    for line in c.lines:
        stretches, values = thinned(line.at, line.values)
        drawn.append((line.name, [b for _, b in stretches], values))
        spans = spans or [f"{a:,}" if a == b else f"{a:,}-{b:,}" for a, b in stretches]
        means = means or len(values) < len(line.values)
        ends.append(f"{line.name} {number(line.values[0])} to {number(line.values[-1])}" if line.values else line.name)
    said = f"{c.title}, {c.up}: {'; '.join(ends)}"
    rows = [(span, *(number(x) for x in values)) for span, *values in zip(
        spans, *(v for _, _, v in drawn), strict=False)]
    numbers = table((c.across, *(n for n, _, _ in drawn)), rows)
    caption = f"{c.title}, {c.up}" + (f"; means over each of {len(spans)} stretches, drawn at its end" if means else "")
    fold = "The numbers: means over each stretch" if means else "The numbers"
    return (f"<figure>\n{lines(name, said, drawn, across=c.across)}\n<figcaption>{text(caption)}"
            f"</figcaption>\n</figure>\n{_folded(fold, _scrolled(f'{c.title}: the numbers', numbers))}")


def thinned(at: Sequence[int], values: Sequence[float]) -> tuple[list[tuple[int, int]], list[float]]:
    """Up to POINTS stretches: the first and last number of each, and the mean over it."""
    n = min(POINTS, len(values))
    edges = [round(k * len(values) / n) for k in range(n + 1)] if n else [0]
    stretches = list(zip(edges, edges[1:], strict=False))
    return [(at[a], at[b - 1]) for a, b in stretches], [sum(values[a:b]) / (b - a) for a, b in stretches]


def _passage(p: Passage) -> str:
    body = "<br>".join(text(x) for x in p.text.split("\n"))
    return f"<div class=\"card\">\n<h3>{text(p.title)}</h3>\n<p><code class=\"verbatim\">{body}</code></p>\n</div>"


def _folded(title: str, body: str | Iterable[str]) -> str:
    return f"<details>\n<summary>{text(title)}</summary>\n{body}\n</details>"
