"""The page of the lab: whole, without network or script, curves where their numbers say."""

from __future__ import annotations

import re
from html.parser import HTMLParser

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
from llamactl.render.lab import claimed, number, row, spread, view
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
    return LabReport(verdict="differs", seed=0, device=BAD, threads=2, torch=BAD, checkpoints=(BAD,), experiments=(e,))


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
    at, values = thinned(range(600), [float(n) for n in range(600)])
    assert len(at) == len(values) == POINTS
    assert at[-1] == 599
    assert sum(values) / POINTS == pytest.approx(299.5, abs=1)
    assert thinned([1, 2], [5.0, 6.0]) == ([1, 2], [5.0, 6.0])
    assert thinned([], []) == ([], [])


@pytest.mark.parametrize(("value", "said"), [
    (1_073_741_824, "1,073,741,824"), (0.0, "0"), (1.7615940570831299, "1.7616"), (0.9990233, "0.99902"),
    (1.43e-6, "1.4e-06"), (994_371.5, "994,372"), (-0.2384058, "-0.23841"), (None, "-"), (29, "29"),
])
def test_a_number_as_people_read_it(value: float | None, said: str) -> None:
    assert number(value) == said


def test_a_finding_in_words() -> None:
    f = found("x", 0.99902, of="y", unit="times", expected=0.999, tolerance=4.5e-5, spread=(0.998, 0.9991))
    assert row(f) == ("x", "y", "0.99902 times", "0.998 to 0.9991 (2)", "0.999 +- 5e-05", "holds")
    assert claimed(found("x", 1e-7, of="y", expected=2e-6, relation="<=")) == "<= 2e-06"
    assert spread(found("x", 1.0, of="y")) == "-"
