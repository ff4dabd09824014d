"""What CI systems read of verify: JUnit XML and GitHub's workflow commands."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from xml.etree import ElementTree as ET

import pytest

from llamactl.analysis.verification import VerifyReport
from llamactl.render.annotations import annotations
from llamactl.render.junit import junit

Named = Callable[[str], VerifyReport]


def read(r: VerifyReport) -> ET.Element:
    return ET.fromstring(junit(r).encode())


def outcome(case: ET.Element) -> str:
    return next((c.tag for c in case if c.tag in ("failure", "skipped", "error")), "passed")


def test_counts_are_those_of_the_cases(each: tuple[str, VerifyReport]) -> None:
    suite = read(each[1])
    found = [outcome(c) for c in suite.findall("testcase")]
    assert suite.tag == "testsuite"
    assert suite.get("name") == "llamactl verify"
    assert {k: int(suite.get(k) or -1) for k in ("tests", "failures", "skipped", "errors")} == {
        "tests": len(found), "failures": found.count("failure"), "skipped": found.count("skipped"), "errors": 0}
    assert not re.search(r"\b(nan|inf|None)\b(?!-)", junit(each[1]))


@pytest.mark.parametrize(("name", "logits", "places"), [
    ("equal", "passed", []), ("same", "passed", []), ("cannot-judge", "skipped", []), ("bare", "failure", []),
    ("explained", "failure", ["layer 3", "layer 7"]), ("different", "failure", ["layer 3", "layer 7"]),
    ("nan", "failure", ["layer 1"]), ("empty", "failure", ["layer 3 attention", "layer 7"]),
])
def test_what_fails(named: Named, name: str, logits: str, places: list[str]) -> None:
    suite = read(named(name))
    by = {kind: [c for c in suite.findall("testcase") if c.get("classname") == f"llamactl.verify.{kind}"]
          for kind in ("inventory", "logits", "place")}
    assert [outcome(c) for c in by["logits"]] == [logits]
    assert [c.get("name") for c in by["place"] if outcome(c) == "failure"] == places
    judged = {f"layer {x.layer}" for x in named(name).layers}
    assert {c.get("name") for c in by["place"]} == judged | set(places)
    assert len(by["inventory"]) == len(named(name).inventory)
    assert [outcome(c) for c in by["inventory"]] == [
        "failure" if any(f.level == "error" for f in i.findings) else "passed" for i in named(name).inventory]


def test_a_failure_says_what_the_verdict_is_and_what_explains_it(named: Named) -> None:
    (failure,) = [f for c in read(named("explained")).findall("testcase") if c.get("name") == "logits" for f in c]
    assert failure.get("message") == "explained: rope-interleaved explains it"
    lines = (failure.text or "").splitlines()
    assert "edit: rope-interleaved" in lines
    assert "fix: permute the rows of q and k by head, biases too" in lines
    assert "max |dlogit|: 8.31, 17,700 x the limit" in lines
    (skipped,) = [f for c in read(named("cannot-judge")).findall("testcase") if c.get("name") == "logits" for f in c]
    assert skipped.get("message") == "one token is no text"


def test_a_place_fails_only_where_the_verdict_does(named: Named) -> None:
    r = replace(named("same"), first_difference=named("different").first_difference)
    assert read(r).get("failures") == "0"


def test_what_was_accepted_is_told_and_does_not_fail(named: Named) -> None:
    r = named("explained")
    suite = ET.fromstring(junit(r, accepted=True).encode())
    assert {outcome(c) for c in suite.findall("testcase") if c.get("classname") != "llamactl.verify.inventory"} == {
        "passed"}
    (said,) = [c.findtext("system-out") or "" for c in suite.findall("testcase") if c.get("name") == "logits"]
    assert said.splitlines()[:2] == [f"accepted: {r.why}", "edit: rope-interleaved"]
    assert [p.get("value") for p in suite.iter("property") if p.get("name") == "verdict"] == ["explained, accepted"]
    first = annotations(r, accepted=True)[0]
    assert first.startswith(f"::notice title=llamactl verify%3A explained%2C accepted::{r.why}")


def test_warnings_and_notes_do_not_fail(named: Named) -> None:
    first = read(named("same")).findall("testcase")[0]
    assert outcome(first) == "passed"
    assert (first.findtext("system-out") or "").splitlines() == [
        "warning: the config says bf16, most of the weights are fp32 [dtype-differs]",
        "note: model.embed.weight: 8 of 49,152 rows are zero [zero-rows]"]


def test_an_enemy_breaks_no_xml(named: Named) -> None:
    source = junit(named("hostile"))
    assert "<script" not in source
    assert not {c for c in source if not (c.isprintable() or c == "\n")} | ({"\ufffe"} & set(source))
    suite = ET.fromstring(source.encode())
    assert len(suite.findall("testcase")) == 1 + 1 + 1 + 30
    held = [f.get("message") or "" for f in suite.iter("failure")]
    assert any("<script>alert(1)</script>\"'&amp; \\x1b[31m \\u202e ]]> --> %0A" in m for m in held)


# --- GitHub


@pytest.mark.parametrize(("name", "level"), [("equal", "notice"), ("same", "notice"), ("explained", "error"),
                                             ("different", "error"), ("cannot-judge", "warning"), ("nan", "error")])
def test_the_verdict_is_the_first_annotation(named: Named, name: str, level: str) -> None:
    r = named(name)
    first = annotations(r)[0]
    word = r.verdict.replace("-", " ")
    assert first.startswith(f"::{level} title=llamactl verify%3A {word}::{r.why}")


def test_an_explanation_is_annotated_with_its_fix(named: Named) -> None:
    lines = annotations(named("explained"))[0].split("%0A")
    assert "edit: rope-interleaved" in lines
    assert "fix: permute the rows of q and k by head, biases too" in lines
    assert "max |dlogit| is 17,700 x the limit" in lines
    assert "cannot see: eps of the norms within 1e-7: the change is below arithmetic" in lines
    assert "first difference" not in annotations(named("same"))[0]


def test_findings_are_annotated_and_notes_are_not(named: Named) -> None:
    rest = annotations(named("different"))[1:]
    assert rest == ["::warning title=llamactl verify%3A dtype-differs::/models/port: the config says bf16, most of the "
                    "weights are fp32 [dtype-differs]"]


def test_there_are_no_more_than_are_shown(named: Named) -> None:
    found = [x for x in annotations(named("nan")) if x.startswith("::error")]
    assert len(found) == 10
    assert found[-1] == "::error title=llamactl verify%3A inventory::and 4 more; see the report"


def test_every_annotation_is_one_command(each: tuple[str, VerifyReport]) -> None:
    for line in annotations(each[1]):
        assert "\n" not in line
        assert "\r" not in line
        found = re.fullmatch(r"::(error|warning|notice) title=([^:,]*)::(.*)", line)
        assert found, line
        assert not re.search(r"%(?!25|0A|0D|3A|2C)", found[2] + found[3])


def test_an_enemy_starts_no_command(named: Named) -> None:
    for line in annotations(named("hostile")):
        assert "%250A" in line  # a %0A in a text is no new line
        assert r"\x1b[31m \u202e" in line
        assert "\x1b" not in line
