"""How a page looks: one file without network or script, light or dark, readable on paper and phone."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Sequence
from hashlib import sha256
from html import escape

from llamactl.errors import printable

CSS = """
:root { color-scheme: light dark; --back: #ffffff; --card: #f6f7f9; --text: #1c2024; --soft: #5b6570; --line: #d9dee4;
  --mark: #0b6e99; --good: #19703b; --bad: #b3261e; --warn: #8a5a00; --on: #ffffff; --c0: #0b6e99; --c1: #a65200;
  --c2: #3f7a5b; --c3: #8557a6; --c4: #b83f7d; --c5: #6b6a67; }
@media (prefers-color-scheme: dark) { :root { --back: #14171a; --card: #1d2226; --text: #e6e9ec; --soft: #9aa5b1;
  --line: #353c43; --mark: #5cb8e0; --good: #6fcf97; --bad: #ff8a80; --warn: #e5b454; --on: #14171a; --c0: #5cb8e0;
  --c1: #f0a35e; --c2: #7fc8a0; --c3: #c3a0e0; --c4: #ee8fbd; --c5: #a9a9a6; } }
@media print { :root { color-scheme: light; --back: #ffffff; --card: #ffffff; --text: #000000; --soft: #444444;
  --line: #bbbbbb; --mark: #0b6e99; --good: #19703b; --bad: #b3261e; --warn: #8a5a00; --on: #ffffff; --c0: #0b6e99;
  --c1: #a65200; --c2: #3f7a5b; --c3: #8557a6; --c4: #b83f7d; --c5: #6b6a67; }
  section, figure, table { break-inside: avoid; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
main { max-width: 52rem; margin: 0 auto; padding: 1.5rem 1rem 3rem; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.125rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .25rem; }
p { margin: .25rem 0 .75rem; }
h1, h2, h3, p, li, dd, td, th, figcaption, summary { overflow-wrap: anywhere; }
.lead { font-size: 1.125rem; }
.soft, figcaption, footer { color: var(--soft); font-size: .875rem; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.word { white-space: nowrap; }
.card { background: var(--card); border: 1px solid var(--line); border-left: 4px solid var(--mark); border-radius: 6px;
  padding: .75rem 1rem; margin: .75rem 0; }
.card.bad { border-left-color: var(--bad); color: inherit; }
.card.warn { border-left-color: var(--warn); color: inherit; }
code { font: .9em/1.4 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
table { border-collapse: collapse; width: 100%; font-size: .9375rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; vertical-align: top; padding: .3rem .75rem .3rem 0; border-bottom: 1px solid var(--line); }
th { font-weight: 600; } tbody th { font-weight: 400; color: var(--soft); width: 9.5rem; }
figure { margin: .5rem 0 1rem; max-width: 44rem; }
svg { display: block; width: 100%; height: auto; }
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--soft); }
svg .axis { stroke: var(--line); stroke-width: 1; }
svg .line { fill: none; stroke: var(--mark); stroke-width: 1.5; stroke-linecap: round; }
svg .line.other { stroke: var(--c1); stroke-dasharray: 5 2; }
svg .bar { fill: var(--mark); } svg .wrong { fill: var(--bad); }
svg .limit { stroke: var(--warn); stroke-dasharray: 4 3; }
svg .limit-text { fill: var(--warn); stroke: var(--back); stroke-width: 4px; paint-order: stroke; }
details { margin: .25rem 0 1rem; font-size: .875rem; } summary { cursor: pointer; color: var(--soft); }
ul { padding-left: 1.25rem; margin: .25rem 0; }
@media (max-width: 34rem) { tbody th { width: auto; display: block; border-bottom: 0; padding-bottom: 0; }
  .wide tbody th { display: table-cell; } tbody td { display: block; } .wide tbody td { display: table-cell; } }
"""
COLOURS = ("#0b6e99", "#a65200", "#3f7a5b", "#8557a6", "#b83f7d", "#6b6a67")  # --c0 to --c5 on paper
INK = {"#1c2024": "--text", "#5b6570": "--soft", "#d9dee4": "--line", "#ffffff": "--back",
       **{c: f"--c{n}" for n, c in enumerate(COLOURS)}}
# Nothing is fetched and nothing runs, whatever a report holds; of scripts, the page's own alone.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def text(value: str) -> str:
    """Untrusted text for a page: control and bidi characters escaped, then what HTML would read."""
    return escape("".join("\ufffd" if _no_character(ord(c)) else c for c in printable(value)))


def _no_character(code: int) -> bool:
    """Whether Unicode keeps `code` from ever being a character, for which a page would not be valid."""
    return code & 0xFFFE == 0xFFFE or 0xFDD0 <= code <= 0xFDEF


def page(title: str, body: str, *, css: str = "", data: str = "", script: str = "") -> str:
    """A whole HTML document. title: text; body: HTML that stands in <main>.

    css: after the theme's. script: the one program that may run, which finds `data` (JSON) in the element #data.
    """
    policy = _POLICY
    ends = ""
    if script:
        digest = b64encode(sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
        ends = f"<script type=\"application/json\" id=\"data\">{data}</script>\n<script>{script}</script>\n"
    return ("<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
            f"<meta http-equiv=\"Content-Security-Policy\" content=\"{policy}\">\n"
            "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
            f"<title>{text(title)}</title>\n<style>{CSS}{css}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n{ends}"
            "</body>\n</html>\n")


def section(title: str, body: str) -> str:
    """A titled part of a page; nothing where its body is empty."""
    return f"<section>\n<h2>{text(title)}</h2>\n{body}\n</section>" if body else ""


def pairs(rows: Iterable[tuple[str, str]]) -> str:
    """Labelled texts as a table of two columns; nothing without any."""
    body = "\n".join(f"<tr><th scope=\"row\">{text(a)}</th><td>{text(b)}</td></tr>" for a, b in rows)
    return f"<table>\n<tbody>\n{body}\n</tbody>\n</table>" if body else ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of texts under named columns, the first of which names the row."""
    top = "".join(f"<th scope=\"col\">{text(x)}</th>" for x in head)
    body = "\n".join(f"<tr><th scope=\"row\">{text(a)}</th>" + "".join(f"<td>{text(x)}</td>" for x in rest) + "</tr>"
                     for a, *rest in rows)
    return f"<table class=\"wide\">\n<thead><tr>{top}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def bullets(items: Iterable[str]) -> str:
    """Texts as a list; nothing without any."""
    body = "\n".join(f"<li>{text(x)}</li>" for x in items)
    return f"<ul>\n{body}\n</ul>" if body else ""
