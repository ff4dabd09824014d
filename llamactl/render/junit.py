"""A verify report as JUnit XML, which CI systems show as tests: the files of each side, the logits, each place."""

from __future__ import annotations

import re
from xml.etree import ElementTree as ET

from llamactl.analysis.verification import VerifyReport
from llamactl.errors import printable
from llamactl.render.verdict import (
    Pairs,
    compared,
    explained,
    faulty,
    layer_of,
    located,
    measured,
    multiple,
    noticed,
    number,
    sentence,
    times,
    word,
)

_NOT_XML = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")


def junit(r: VerifyReport, accepted: bool = False) -> str:
    """The report as one <testsuite>: failed where something is wrong, skipped where nothing could be judged.

    accepted: what explains the difference may be so; it is told, and no case of the logits or of a place fails.
    """
    suite = ET.Element("testsuite", name="llamactl verify")
    _properties(suite, r, accepted)
    for i in r.inventory:
        case = _case(suite, "inventory", i.path)
        errors = [noticed(f) for f in i.findings if f.level == "error"]
        if errors:
            _fail(case, "failure", errors[0], errors)
        if rest := [f"{f.level}: {noticed(f)}" for f in i.findings if f.level != "error"]:
            ET.SubElement(case, "system-out").text = _clean("\n".join(map(printable, rest)))
    case = _case(suite, "logits", "logits")
    if r.verdict == "cannot-judge":
        ET.SubElement(case, "skipped", message=_clean(printable(r.why)))
    elif accepted:
        ET.SubElement(case, "system-out").text = _clean("\n".join(map(printable, [f"accepted: {r.why}", *_story(r)])))
    elif not r.passed:
        _fail(case, "failure", sentence(r), _story(r))
    _places(suite, r, accepted)
    cases = suite.findall("testcase")
    for name, found in (("tests", len(cases)), ("failures", sum(c.find("failure") is not None for c in cases)),
                        ("errors", 0), ("skipped", sum(c.find("skipped") is not None for c in cases))):
        suite.set(name, str(found))
    ET.indent(suite)
    return f"<?xml version=\"1.0\" encoding=\"utf-8\"?>\n{ET.tostring(suite, encoding='unicode')}\n"


def _properties(suite: ET.Element, r: VerifyReport, accepted: bool) -> None:
    far = multiple(r.measures, r.floor)
    held = ET.SubElement(suite, "properties")
    words = [("verdict", word(r, accepted)), *compared(r), *([("of the limit", times(far))] if far is not None else []),
             *(("cannot see", x) for x in r.limits)]
    for name, value in words:
        ET.SubElement(held, "property", name=_clean(printable(name)), value=_clean(printable(value)))


def _places(suite: ET.Element, r: VerifyReport, accepted: bool) -> None:
    """A case for each layer that was judged, and for each wrong place that is none of them."""
    wrong = [] if accepted else faulty(r)
    judged = {x.layer for x in r.layers}
    p = r.first_difference
    for place in wrong:
        if layer_of(place) not in judged:
            first = p is not None and place == p.where
            _fail(_case(suite, "place", place), "failure", _wrong(place, number(p.relative) if p and first else None))
    for x in r.layers:
        case = _case(suite, "place", f"layer {x.layer}")
        here = [place for place in wrong if layer_of(place) == x.layer]
        if here or (x.relative is None and not r.passed and not accepted):
            error = "not finite" if x.relative is None else number(x.relative)
            _fail(case, "failure", _wrong("; ".join(here) or f"layer {x.layer}", error))


def _wrong(place: str, error: str | None) -> str:
    return f"{place} differs" + (f": relative error {error}" if error else "")


def _story(r: VerifyReport) -> list[str]:
    lines: Pairs = []
    for e in r.explanations:
        lines += explained(e, r.floor, len(r.explanations) > 1)
    if r.first_difference is not None:
        lines += located(r.first_difference)
    if r.measures is not None:
        lines += measured(r.measures, r.floor)
    return [f"{label}: {text}" for label, text in lines]


def _case(suite: ET.Element, group: str, name: str) -> ET.Element:
    return ET.SubElement(suite, "testcase", classname=f"llamactl.verify.{group}", name=_clean(printable(name)))


def _fail(case: ET.Element, kind: str, message: str, lines: list[str] | None = None) -> None:
    said = ET.SubElement(case, kind, message=_clean(printable(message)), type=kind)
    said.text = _clean("\n".join(map(printable, lines or [message])))


def _clean(text: str) -> str:
    """`text` without the characters that no XML may hold, in any form."""
    return _NOT_XML.sub("", text)
