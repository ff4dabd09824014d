"""The page that verify writes: one valid file without network or script, whatever the names in it are."""

from __future__ import annotations

import re
from collections.abc import Callable
from html.parser import HTMLParser

import pytest

from llamactl.analysis.verification import VerifyReport
from llamactl.render.svg import bars, curve
from llamactl.render.theme import text
from llamactl.render.verifyhtml import page

Named = Callable[[str], VerifyReport]
VOID = {"meta"}
KNOWN = {"html", "head", "meta", "title", "style", "body", "main", "header", "section", "footer", "h1", "h2", "h3",
         "p", "span", "strong", "code", "div", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "figure",
         "figcaption", "details", "summary", "svg", "desc", "line", "rect", "polyline", "text"}


class Read(HTMLParser):
    """Reads a page and fails at a tag that is unknown, left open or closed in the wrong order."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in KNOWN
        names = [k for k, _ in attrs]
        assert len(names) == len(set(names))
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for t, attrs in self.tags if t == tag]


def test_a_page_is_whole_and_stands_alone(each: tuple[str, VerifyReport]) -> None:
    source = page(each[1])
    read = Read(source)
    assert source.startswith("<!DOCTYPE html>\n<html lang=\"en\">")
    assert len(read.all("title")) >= 1
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in read.all("meta")
    assert "default-src 'none'" in next(m["content"] or "" for m in read.all("meta") if "http-equiv" in m)
    for _, attrs in read.tags:
        assert not {"src", "href", "style", "xlink:href"} & set(attrs)
        assert not any(name.startswith("on") for name in attrs)
    assert not re.search(r"url\(|@import|https?:", source)
    assert ("hypotheses tried" in read.text) is bool(each[1].tried)


def test_a_page_has_no_number_that_is_none(each: tuple[str, VerifyReport]) -> None:
    source = page(each[1])
    assert not re.search(r"\b(nan|inf|None)\b(?!-)", source)
    heights = re.findall(r" height=\"([^\"]*)\"", source)
    assert all(float(x) >= 0 for x in heights)


def test_ids_are_unique_and_every_picture_is_named(each: tuple[str, VerifyReport]) -> None:
    read = Read(page(each[1]))
    ids = [a["id"] for _, a in read.tags if "id" in a]
    assert len(ids) == len(set(ids))
    for svg in read.all("svg"):
        assert svg["role"] == "img"
        assert set((svg["aria-labelledby"] or "").split()) <= set(ids)
    assert len(read.all("details")) == len(read.all("svg"))  # the numbers behind each


@pytest.mark.parametrize(("name", "tone"), [
    ("equal", "good"), ("same", "good"), ("explained", "bad"), ("different", "bad"), ("cannot-judge", "warn"),
])
def test_the_verdict_stands_first(named: Named, name: str, tone: str) -> None:
    r = named(name)
    source = page(r)
    assert f"<h1>llamactl verify: <span class=\"{tone}\">{name.replace('-', ' ')}</span></h1>" in source
    assert r.why in Read(source).text


def test_what_the_page_says(named: Named) -> None:
    said = " ".join(Read(page(named("explained"))).text.split())
    for part in ("17,700 x", "rope-interleaved in all layers", "gelu in layer 7", "permute the rows of q and k by head",
                 "3.07e-06 (KL 2e-09 nats), floor 2.94e-05", "q-lanes + k-lanes",
                 "layer 3 attention: relative error 0.4",
                 "/models/right (checkpoint, family llama, layout hf, bf16)", "8 of 49,152 rows are zero [zero-rows]",
                 "eps of the norms within 1e-7", "152 hypotheses tried", "1,024 positions", "top-1 35.0%",
                 "wrong on their own: layers 3, 7", "floor 3.6e-07"):
        assert part in said
    assert "Part of the explanation" in page(named("partly"))
    assert "Part of the explanation" not in page(named("explained"))


def test_pictures_are_drawn_only_where_there_is_something(named: Named) -> None:
    def pictures(name: str) -> int:
        return len(Read(page(named(name))).all("svg"))

    assert [pictures(n) for n in ("different", "same", "equal", "cannot-judge", "bare", "empty")] == [2, 2, 0, 0, 0, 0]
    assert "Zero at all 64 positions." in page(named("equal"))
    assert "Zero in all 30 layers." in page(named("equal"))


def test_the_first_position_stands_alone_in_a_long_curve(named: Named) -> None:
    source = page(named("different"))
    (points,) = re.findall(r"points=\"([^\"]*)\"", source)
    heights = [float(p.split(",")[1]) for p in points.split()]
    assert len(heights) <= 480
    assert heights[0] > max(heights[1:])  # its zero lies on the ground
    assert "the largest of every 3 positions" in source


def test_wrong_layers_are_red_and_others_are_not(named: Named) -> None:
    kinds = re.findall(r"<rect class=\"(\w+)\"[^>]*><title>layer (\d+): ", page(named("different")))
    assert len(kinds) == 30
    assert {int(n) for kind, n in kinds if kind == "wrong"} == {3, 7}
    odd = re.findall(r"<rect class=\"(\w+)\"[^>]*><title>layer (\d+): ", page(named("nan")))
    assert odd == [("bar", "0"), ("wrong", "1")]


def test_an_enemy_writes_no_tag(named: Named, enemy: str) -> None:
    source = page(named("hostile"), (enemy,))
    assert "<script" not in source
    assert "&lt;script&gt;alert(1)&lt;/script&gt;&quot;&#x27;&amp;amp; \\x1b[31m \\u202e ]]&gt;" in source
    assert not {c for c in source if not (c.isprintable() or c == "\n")}


def test_no_character_that_unicode_forbids() -> None:
    assert text("a\ufffeb\ufdd0c\U0001ffff<") == "a\ufffdb\ufffdc\ufffd&lt;"


def test_a_curve_goes_up_with_its_values_and_breaks_where_there_are_none() -> None:
    drawn = curve("K", "said", [1e-6, 1e-3, None, 1.0, 0.0], across="position", numbers=[0, 1, 2, 3, 4], level=1e-7)
    runs = [[tuple(map(float, p.split(","))) for p in x.split()] for x in re.findall(r"points=\"([^\"]*)\"", drawn)]
    assert [len(r) for r in runs] == [2, 2]
    (a, b), (c, d) = runs
    assert a[0] < b[0] < c[0] < d[0]
    assert d[1] > a[1] > b[1] > c[1]  # zero on the ground, and up is less
    assert drawn.count("class=\"wrong\"") == 1
    assert "floor 1e-07" in drawn
    single = re.findall(r"points=\"([^\"]*)\"", curve("K", "", [1.0], across="x", numbers=[0]))
    assert len(single[0].split()) == 2  # a line of one point is a dot


def test_bars_are_as_high_as_their_values() -> None:
    drawn = bars("E", "said", [(0, 1e-6), (1, 1e-2), (2, 0.0), (5, None)], across="layer", level=None, wrong={1})
    found = re.findall(r"class=\"(\w+)\" x=\"[^\"]*\" y=\"[^\"]*\" width=\"[^\"]*\" height=\"([^\"]*)\"", drawn)
    assert [k for k, _ in found] == ["bar", "wrong", "bar", "wrong"]
    low, high, none, odd = (float(h) for _, h in found)
    assert odd >= high > low > none == 0
    assert "<title>layer 5: -</title>" in drawn
