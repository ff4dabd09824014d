"""What `llamactl verify` leaves for people and CI: a page, JUnit, annotations; and mistakes that are accepted."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

_SPEC = importlib.util.spec_from_file_location("llamactl_tests_verify", Path(__file__).with_name("test_verify.py"))
assert _SPEC is not None
assert _SPEC.loader is not None
base: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(base)
IDS, made, failed, verdict = base.IDS, base.made, base.failed, base.verdict
good, wrong, right, saved = base.good, base.wrong, base.right, base.saved


def test_reports_are_written_once(cli: Any, good: Path, wrong: Path, tmp_path: Path) -> None:
    html, xml = tmp_path / "out.html", tmp_path / "out.xml"
    args = ("verify", good, "--candidate", wrong, "--tokens", IDS, "--report", html, "--junit", xml)
    assert cli(*args).code == 1
    page = html.read_text(encoding="utf-8")
    assert "activation=gelu" in page
    assert not re.search(r"https?://", re.sub(r'xmlns="[^"]*"', "", page))  # it stands on its own
    suite = ElementTree.fromstring(xml.read_text(encoding="utf-8"))
    assert list(suite.iter("failure"))
    first = html.read_bytes(), xml.read_bytes()
    got = cli(*args[:-2], "--no-explain")
    failed(got, 5, "exists", "out.html")
    failed(cli(*args[:-4], "--junit", xml, "--no-explain"), 5, "exists", "out.xml")
    assert (html.read_bytes(), xml.read_bytes()) == first
    assert cli(*args, "--no-explain", "--force").code == 1
    assert "activation=gelu" not in html.read_text(encoding="utf-8")
    failed(cli(*args[:-4], "--report", tmp_path / "no" / "x.html", "--no-explain"), 5, r"\S+")


def test_a_pass_in_junit(cli: Any, good: Path, saved: Path, tmp_path: Path) -> None:
    xml = tmp_path / "out.xml"
    assert cli("verify", good, "--candidate", saved, "--tokens", IDS, "--junit", xml).code == 0
    suite = ElementTree.fromstring(xml.read_text(encoding="utf-8"))
    assert not list(suite.iter("failure"))
    assert list(suite.iter("testcase"))


def test_annotations_are_on_stderr(cli: Any, good: Path, wrong: Path) -> None:
    got = cli("verify", good, "--candidate", wrong, "--tokens", IDS, "--annotate", "--no-explain", "--json")
    assert any(line.startswith("::error") for line in got.err.splitlines())
    assert "::" not in got.json()["result"]["why"]
    assert "::error" not in cli("verify", good, "--candidate", good, "--tokens", IDS, "--annotate").err


def test_a_mistake_that_is_accepted(cli: Any, good: Path, wrong: Path, tmp_path: Path) -> None:
    args = ("verify", good, "--candidate", wrong, "--tokens", IDS, "--json")
    page, xml = tmp_path / "a.html", tmp_path / "a.xml"
    allowed = ("--accept", "weights=bf16", "--accept", "activation=gelu")
    got = cli(*args, *allowed, "--report", page, "--junit", xml)
    verdict(got, 0, "explained")
    assert got.err == ""
    assert not list(ElementTree.fromstring(xml.read_text(encoding="utf-8")).iter("failure"))
    assert "explained, accepted" in page.read_text(encoding="utf-8")
    assert "::notice title=llamactl verify%3A explained%2C accepted::" in cli(*args, *allowed, "--annotate").err
    verdict(cli(*args, "--accept", "activation=gelu", "--no-explain"), 1, "different")


def test_nothing_is_written_beside_the_checkpoint(cli: Any, good: Path, wrong: Path) -> None:
    before = made.tree(good), made.tree(wrong)
    cli("verify", good, "--candidate", wrong, "--tokens", IDS, "--no-explain")
    assert (made.tree(good), made.tree(wrong)) == before
