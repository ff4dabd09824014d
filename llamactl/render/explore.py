"""The page of `llamactl explore`: one file that holds its data, its look and the program that looks things up."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from llamactl.analysis.explore import WEIGHTS, ExploreReport, PageReport
from llamactl.render.document import Column, Document, Facts, Table
from llamactl.render.parts import PARTS
from llamactl.render.theme import page as themed
from llamactl.render.theme import text
from llamactl.render.units import count, size

SCRIPTS = ("tables", "state", "words", "controls", "numbers", "blocks", "charts", "rope", "main")


def view(reports: Sequence[PageReport], **_: Any) -> Document:
    """Where the page is and what it holds."""
    (r,) = reports
    where = r.path or r.url or ""
    facts = [("models", " and ".join(x for x in (r.start, r.goal) if x)), *([("page", r.path)] if r.path else []),
             ("size", size(r.page_bytes)), ("costed", f"{count(r.states)} model{'' if r.states == 1 else 's'}"),
             *([("switches", "; ".join(title for _, title in r.switches))] if r.switches else []),
             *(("no edit makes", f"{name}: {before} -> {after}") for name, before, after in r.rest),
             *([("served at", r.url)] if r.url else [])]
    columns = tuple(Column(n) for n in ("start", "goal", "path", "url", "page_bytes", "states"))
    row = (r.start, r.goal, r.path, r.url, r.page_bytes, r.states)
    return Document((Facts("", tuple(facts)),), Table("", columns, (row,)), (where,))


def page(report: ExploreReport, devices: Sequence[Mapping[str, Any]]) -> str:
    """The whole page. devices: name, title and memory_bytes of each that the memory picture may show."""
    told = report.to_dict()
    kinds = {p.kind for w in report.worlds for t in w.parts.values() for p in t.values.values() if p is not None}
    data = {**told, "texts": {k: PARTS[k] for k in sorted(kinds)}, "devices": list(devices),
            "weight_dtypes": WEIGHTS}
    title = " and ".join(e.id for e in (report.start, report.goal) if e is not None)
    return themed(title, _body(report, title), css=_read("explore.css"), data=_json(data), script=_script())


def _script() -> str:
    """The page's program: its files one after the other, in a scope of their own."""
    return '"use strict";\n(() => {\n' + "\n".join(_read(f"{name}.js") for name in SCRIPTS) + "\n})();\n"


def _read(name: str) -> str:
    return (files("llamactl.render") / "page" / name).read_text(encoding="utf-8")


def _json(data: Mapping[str, Any]) -> str:
    """JSON that cannot end the element it stands in, whatever a file called itself."""
    body = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=True)
    return body.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _body(report: ExploreReport, title: str) -> str:
    return _BODY.replace("{title}", text(title)).replace("{definition}", text(report.definition)).replace(
        "{lead}", text(_lead(report)))


def _lead(report: ExploreReport) -> str:
    if report.goal is None:
        return ("What it is made of and what it costs. Every number here is one that llamactl computed; change the KV "
                "heads, the context, the batch and the dtypes.")
    return (f"The way from {report.start.id} to {report.goal.id}, one edit at a time. Throw a switch and read what it "
            "costs. Every number here is one that llamactl computed for exactly that model.")


_BODY = """<header>
<h1>{title}</h1>
<p class="lead">{lead}</p>
<noscript>
<p class="card warn">This page looks its numbers up with a script of its own, and scripts are off.</p>
</noscript>
</header>
<div class="play" id="play">
<section class="controls" id="edits" aria-labelledby="controls-title">
<h2 id="controls-title">Change it</h2>
<fieldset><legend>Edits</legend>
<div class="inline"><button type="button" id="all-off"></button><button type="button" id="all-on"></button></div>
<ul id="switches"></ul></fieldset>
</section>
<div class="shown">
<section aria-labelledby="costs-title">
<h2 id="costs-title">What it costs</h2>
<fieldset class="controls sizes"><legend>Sizes</legend>
<div>
<label class="stacked" for="kv-heads">KV heads</label>
<input type="range" id="kv-heads" min="0" step="1" aria-describedby="kv-heads-said">
<p class="soft" id="kv-heads-said"></p>
</div>
<div>
<label class="stacked" for="ctx">Context, tokens</label>
<div class="beside"><input type="number" id="ctx" min="1" step="1" inputmode="numeric">
<input type="range" id="ctx-slider" min="0" max="24" step="1" aria-label="Context, powers of two"></div>
</div>
<div>
<label class="stacked" for="batch">Batch, sequences</label>
<div class="beside"><input type="number" id="batch" min="1" step="1" inputmode="numeric">
<input type="range" id="batch-slider" min="0" max="10" step="1" aria-label="Batch, powers of two"></div>
</div>
<div class="inline"><label>Cache in <select id="kv-dtype"></select></label>
<label>Weights in <select id="weights-dtype"></select></label></div>
</fieldset>
<div id="numbers" class="scroll" aria-live="polite"></div>
<ul id="read"></ul>
<ul id="warnings" class="warn"></ul>
<p class="soft">The same in a terminal:</p>
<pre id="command" tabindex="0" role="region" aria-label="Commands that print these numbers"></pre>
</section>
<div class="reader" id="reader">
<section aria-labelledby="blocks-title">
<h2 id="blocks-title">The block</h2>
<p class="soft">A token enters at the top. Choose a part to read what it does and what it costs.</p>
<div id="blocks" class="two-columns"></div>
<details><summary>The same in words</summary><div id="features"></div></details>
</section>
<section id="part-section" aria-labelledby="part-title" tabindex="0">
<h2 id="part-title">The part you chose</h2>
<div id="part" class="two-columns text" aria-live="polite"></div>
</section>
</div>
</div>
</div>
<section id="steps-section" aria-labelledby="steps-title">
<h2 id="steps-title">One at a time</h2>
<p class="soft">Each row is a model. Choose one to look at it.</p>
<div id="ladder" class="scroll"></div>
<div id="taken-back">
<h3>And one alone taken back</h3>
<div id="without" class="scroll"></div>
</div>
</section>
<section aria-labelledby="bars-title">
<h2 id="bars-title">Where the parameters live</h2>
<p class="soft">Norms inside attention count as norms here.</p>
<div id="bars"></div>
<div id="bars-table" class="scroll"></div>
</section>
<section aria-labelledby="cache-title-h">
<h2 id="cache-title-h">Memory against context</h2>
<p class="soft">Grey: weights, and the state of recurrent mixers where there are some. Above it each group of layers.
Dashed: if every query head kept its own K and V. The cache is {definition}. A device needs some memory beside:
<code>llamactl fit</code> counts that too.</p>
<label class="no-print"><input type="checkbox" id="loaded" checked> with the weights</label>
<figure id="cache"></figure>
<p class="soft" id="cache-said"></p>
<div class="two-columns text"><div id="groups" class="scroll"></div>
<details><summary>Devices, and the context that fills them</summary><div id="devices" class="scroll"></div></details>
</div>
</section>
<section aria-labelledby="rope-title">
<h2 id="rope-title">Rotary positions</h2>
<p id="rope-none" class="soft"></p>
<div id="rope-body">
<p class="soft">q and k are turned in pairs of dimensions as the position grows, each pair at its own speed.
Move the key: the share of the score moves. Shift both: it stays.</p>
<div class="inline no-print"><label>Rotation <select id="turn"></select></label>
<label>Scheme <select id="way"></select></label></div>
<div class="two-columns text">
<div>
<div class="controls">
<label class="stacked" for="pair">Pair</label>
<div class="beside"><input type="number" id="pair-exact" min="0" step="1" aria-label="Pair, exactly">
<input type="range" id="pair" min="0" step="1"></div>
<label class="stacked" for="q">Query at</label>
<div class="beside"><input type="number" id="q-exact" min="0" step="1" aria-label="Query at, exactly">
<input type="range" id="q" min="0" step="1"></div>
<label class="stacked" for="k">Key at</label>
<div class="beside"><input type="number" id="k-exact" min="0" step="1" aria-label="Key at, exactly">
<input type="range" id="k" min="0" step="1"></div>
<label class="stacked" for="shift">Shift both by</label>
<div class="beside"><input type="number" id="shift-exact" min="0" step="1" aria-label="Shift both by, exactly">
<input type="range" id="shift" min="0" step="1"></div>
</div>
<figure id="score"></figure>
<p class="soft" id="score-said"></p>
</div>
<div><div id="dial"></div><div id="rope-numbers" aria-live="polite"></div></div>
</div>
<h3>Wavelengths of all pairs</h3>
<figure id="waves"></figure>
<p class="soft" id="waves-said"></p>
<details><summary>All pairs as numbers</summary><div id="waves-table" class="scroll"></div></details>
</div>
</section>
<footer><p>Made by llamactl; this file needs no network. <span id="proof"></span></p></footer>
"""
