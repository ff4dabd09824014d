"""The page of the lab: whole, without network or script, curves where their numbers say."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from llamactl.analysis.experiment import (
    Chart,
    Claim,
    Experiment,
    Grid,
    LabReport,
    Line,
    Passage,
    found,
    skipped,
)
from llamactl.render.lab import LEGEND, claimed, notes, number, row, spread, view, where
from llamactl.render.labhtml import POINTS, page, thinned
from llamactl.render.svg import lines
from llamactl.render.text import plain

VOID = {"meta", "br"}
BAD = "a\x1b[31m</td><script>\u202e"


class Read(HTMLParser):
    """Fails at a tag left open or closed in the wrong order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag


@pytest.fixture
def report() -> LabReport:
    """A report in which every text is an enemy's."""
    findings = (found(BAD, 1.0, of=BAD, unit=BAD, expected=1.0, note=BAD, spread=(0.5, 2.0)), skipped(BAD, BAD, of=BAD),
                found("x", 2.0, of=BAD, expected=1.0, tolerance=0.5))
    e = Experiment(name=BAD, title=BAD, source=BAD, verdict="differs", seconds=1.25,
                   claims=(Claim(claim=BAD, formula=BAD, findings=findings),),
                   grids=(Grid(title=BAD, columns=(BAD, "n"), rows=((BAD, 1.5), (None, 2))),),
                   charts=(Chart(title=BAD, across="step", up=BAD, lines=(
                       Line(name=BAD, at=tuple(range(600)), values=tuple(6.0 - n / 200 for n in range(600))),
                       Line(name="b", at=tuple(range(600)), values=(5.0,) * 600))),),
                   passages=(Passage(title=BAD, text=f"{BAD}\nnext"),))
    return LabReport(verdict="differs", seed=0, device=BAD, threads=2, torch=BAD, checkpoints=(BAD,), text=BAD,
                     experiments=(e,))


def test_a_page_is_whole_and_nothing_in_it_runs(report: LabReport) -> None:
    source = page(report)
    read = Read(source)
    assert "script" not in read.tags
    assert "\x1b" not in source
    assert "\u202e" not in source
    assert "https:" not in source
    assert source.count("<polyline") == 2
    assert '<td class="bad word">differs</td>' in source
    assert '<td class="good word">holds</td>' in source
    assert '<td class="warn word">skipped</td>' in source
    assert "next" in source


def test_a_limit_of_ours_is_marked_where_it_stands_and_explained(report: LabReport) -> None:
    (e,) = report.experiments
    findings = tuple(found(f"x{n}", 1.0, of="y", expected=2.0, relation="<=", ours=True, note=note)
                     for n, note in enumerate((None, "why")))
    shown = replace(report, experiments=(replace(e, claims=(Claim(claim="c", formula="f", findings=findings),)),))
    assert [f.note for f in findings] == ["limit of ours", "limit of ours; why"]
    assert notes(shown.experiments[0]) == (("x1 (y)", "why"),)
    said = plain(view([shown]))
    assert said.count("<= 2 (ours)") == 2
    assert "limit of ours" not in said
    assert page(shown).count("&lt;= 2 (ours)") == 2
    for whole in (said, page(shown)):
        assert "claim or limit" in whole
        for word, means in LEGEND:
            assert word in whole
            assert means in whole


def test_the_text_of_trained_weights_is_told(report: LabReport) -> None:
    told = replace(report, text="a passage that comes with llamactl: 1,024 tokens of smollm2")
    for whole in (plain(view([told])), page(told)):
        assert "a passage that comes with llamactl: 1,024 tokens of smollm2" in whole
    assert [k for k, _ in where(replace(report, text=None))] == ["device", "torch", "seed", "trained weights"]


# Words of the tables' cells that stand on more than one line; hyphens may part.
BROKEN = """() => { const out = []; document.querySelectorAll("th, td").forEach(cell => {
  const walk = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) for (const m of walk.currentNode.data.matchAll(/[\\w,.]+/g)) {
    const r = document.createRange();
    r.setStart(walk.currentNode, m.index); r.setEnd(walk.currentNode, m.index + m[0].length);
    if (r.getClientRects().length > 1) out.push(m[0]);
  } }); return out; }"""


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("width", [390, 1280])
def test_no_word_of_a_table_is_broken_and_no_page_is_too_wide(chromium: Any, report: LabReport, width: int) -> None:
    far = "w" * 300
    findings = (found("500 further on: largest change of a logit", 123_456.7, unit="nats per token",
                      of="smollm2-135m-instruct, 1,024 tokens", spread=[99_123.4, 234_567.8], expected=1e5,
                      relation=">=", note=f"in layers.0.attn_post_norm; {far}"),)
    (e,) = report.experiments
    wide = Grid(title="g", columns=tuple(f"parameters{n}" for n in range(9)), rows=((1_234_567_890,) * 9,))
    shown = replace(report, experiments=(replace(e, name="shift", claims=(
        Claim(claim="stays", formula="x", findings=findings),), grids=(wide,)),), device="cpu", checkpoints=())
    tab = chromium.new_page(viewport={"width": width, "height": 900})
    try:
        tab.set_content(page(shown))
        tab.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert set(tab.evaluate(BROKEN)) <= {far}
    finally:
        tab.close()


SEEN = """() => [...document.querySelectorAll(".found td:last-child")].map(cell => {
  const r = document.createRange(); r.selectNodeContents(cell);
  return {word: cell.innerText, right: r.getBoundingClientRect().right, left: r.getBoundingClientRect().left}; })"""
HEADS = """() => [...document.querySelectorAll(".found thead")].map(x => getComputedStyle(x).display)"""
NAMES = """() => [...document.querySelectorAll(".found tbody td")].filter(x => x.offsetParent !== null).map(
  x => getComputedStyle(x, "::before").content)"""


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_phone_shows_each_verdict_without_scrolling_sideways(chromium: Any, report: LabReport) -> None:
    what = "one pair of 0.56 rad a position, fp32: that spread / what rounding of the angles allows"
    findings = (found(what, 0.49688, of="200 drawn q and k", spread=[2.8e-6, 0.49688], expected=1.0, relation="<=",
                      ours=True),
                skipped("the loss rises by", "needs trained weights", of="a checkpoint"))
    (e,) = report.experiments
    shown = replace(report, experiments=(replace(e, claims=(Claim(claim="stays", formula="x", findings=findings),)),))
    tab = chromium.new_page(viewport={"width": 390, "height": 900})
    try:
        tab.set_content(page(shown))
        seen = tab.evaluate(SEEN)
        assert [x["word"] for x in seen] == ["holds", "skipped"]
        assert all(0 <= x["left"] < x["right"] <= 390 for x in seen)
        assert tab.evaluate(HEADS) == ["none"]
        named = [x for x in tab.evaluate(NAMES) if x != "none"]  # each value says what it is, and none is empty
        assert named == [f'"{w}: "' for w in ("on", "measured", "spread", "claim or limit", "on")]
        tab.set_viewport_size({"width": 1280, "height": 900})
        assert tab.evaluate(HEADS) == ["table-header-group"]
        assert {x for x in tab.evaluate(NAMES)} == {"none"}
    finally:
        tab.close()


def test_the_terminal_is_not_steered(report: LabReport) -> None:
    said = plain(view([report]))
    assert "\x1b" not in said
    assert "\u202e" not in said


def test_curves_stand_where_their_numbers_say() -> None:
    drawn = lines("x", "y", [("a", [0, 10], [1.0, 3.0]), ("b", [0, 10], [3.0, 2.0])], across="step")
    points = [[tuple(map(float, p.split(","))) for p in m.split()] for m in re.findall('polyline[^>]*points="([^"]*)"',
                                                                                       drawn)]
    (a0, a1), (b0, b1) = points
    assert a0[0] == b0[0] < a1[0] == b1[0]
    assert a1[1] == b0[1] < b1[1] < a0[1]  # a higher value stands higher, and y counts downwards
    assert b1[1] == pytest.approx((a0[1] + a1[1]) / 2, abs=0.1)
    assert ">0<" in drawn
    assert ">10<" in drawn
    flat = lines("x", "y", [("a", [0], [1.0]), ("none", [], [])], across="step")
    assert "nan" not in flat


def test_a_long_curve_is_thinned_to_means() -> None:
    stretches, values = thinned(range(600), [float(n) for n in range(600)])
    assert len(stretches) == len(values) == POINTS
    assert stretches[-1][-1] == 599
    assert [b - a for a, b in stretches].count(1) + [b - a for a, b in stretches].count(2) == POINTS
    assert sum(values) / POINTS == pytest.approx(299.5, abs=1)
    assert thinned([1, 2], [5.0, 6.0]) == ([(1, 1), (2, 2)], [5.0, 6.0])
    assert thinned([], []) == ([], [])


def test_every_step_of_a_usual_run_is_drawn(report: LabReport) -> None:
    """`blocks` takes 250 steps unless asked for others."""
    from llamactl.lab.blocks import STEPS

    at, values = thinned(range(STEPS), [float(n) for n in range(STEPS)])
    assert values == [float(n) for n in range(STEPS)]
    assert all(a == b for a, b in at)
    (e,) = report.experiments
    (c,) = e.charts
    usual = replace(c, lines=tuple(replace(x, at=x.at[:STEPS], values=x.values[:STEPS]) for x in c.lines))
    assert "means over" not in page(replace(report, experiments=(replace(e, charts=(usual,)),)))


def test_a_mean_over_steps_is_called_one(report: LabReport) -> None:
    source = page(report)
    assert "<summary>The numbers: means over each stretch</summary>" in source
    assert "; means over each of 300 stretches, drawn at its end</figcaption>" in source
    first, *_, last = re.findall(r'<th scope="row">(\d+-\d+)</th>', source)
    assert (first, last) == ("0-1", "598-599")
    (e,) = report.experiments
    (c,) = e.charts
    few = replace(c, lines=tuple(replace(x, at=x.at[:3], values=x.values[:3]) for x in c.lines))
    source = page(replace(report, experiments=(replace(e, charts=(few,)),)))
    assert "<summary>The numbers</summary>" in source
    assert "means over" not in source
    assert '<th scope="row">2</th>' in source


@pytest.mark.parametrize(("low", "high", "said"), [
    (1.963, 5.541, ["1", "2", "3", "4", "5", "6"]), (0.0, 10.0, ["0", "2", "4", "6", "8", "10"]),
    (5.0, 5.0, ["5", "10"]),
    (2.31, 2.36, ["2.31", "2.32", "2.33", "2.34", "2.35", "2.36"]),
])
def test_the_values_beside_a_curve_are_round(low: float, high: float, said: list[str]) -> None:
    drawn = lines("x", "y", [("a", [1, 125, 250], [high, low, low])], across="step")
    assert re.findall(r'text-anchor="end">([^<]*)<', drawn) == said
    assert re.findall(r'text-anchor="middle">(\d+)<', drawn) == ["50", "100", "150", "200", "250"]


@pytest.mark.parametrize(("value", "said"), [
    (1_073_741_824, "1,073,741,824"), (0.0, "0"), (1.7615940570831299, "1.7616"), (0.9990233, "0.99902"),
    (1.43e-6, "1.4e-06"), (994_371.5, "994,372"), (-0.2384058, "-0.23841"), (None, "-"), (29, "29"),
    (10_922.67, "10,922.67"), (21_845.33, "21,845.33"), (10_922.6667, "10,923"), (16_384.0, "16,384"),
])
def test_a_number_as_people_read_it(value: float | None, said: str) -> None:
    assert number(value) == said


def test_a_finding_in_words() -> None:
    f = found("x", 0.99902, of="y", unit="times", expected=0.999, tolerance=4.5e-5, spread=(0.998, 0.9991))
    assert row(f) == ("x", "y", "0.99902 times", "0.998 to 0.9991 (2)", "0.999 +- 5e-05", "holds")
    assert claimed(found("x", 1e-7, of="y", expected=2e-6, relation="<=")) == "<= 2e-06"
    assert claimed(found("x", 1e-7, of="y", expected=2e-6, relation="<=", ours=True)) == "<= 2e-06 (ours)"
    assert claimed(found("x", math.nan, of="y", expected=2e-6, relation="<=", ours=True, note="z")).endswith(" (ours)")
    assert spread(found("x", 1.0, of="y")) == "-"
