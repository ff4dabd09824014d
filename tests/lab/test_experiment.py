"""How a value is judged, how experiments are found, and what the list says."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import pytest

from llamactl import lab
from llamactl.analysis.experiment import RELATIONS, VERDICTS, found, overall, skipped
from llamactl.errors import UsageError

NAMES = ["blocks", "gqa", "norm", "rope-identity", "rope-stretch", "shift", "swiglu"]


@pytest.mark.parametrize(("value", "expected", "relation", "tolerance", "verdict"), [
    (1.76159, 1.7616, "=", 5e-5, "holds"), (1.7617, 1.7616, "=", 5e-5, "differs"), (9_216, 9_216, "=", 0, "holds"),
    (9_217, 9_216, "=", 0, "differs"), (2e-6, 2e-6, "<=", 0, "holds"), (2.1e-6, 2e-6, "<=", 0, "differs"),
    (1.0, 1.0, ">=", 0, "holds"), (0.99, 1.0, ">=", 0, "differs"), (5.0, None, "=", 0, "measured"),
])
def test_a_value_is_held_to_what_is_claimed(value: float, expected: float | None, relation: str, tolerance: float,
                                            verdict: str) -> None:
    f = found("x", value, of="y", expected=expected, relation=relation, tolerance=tolerance)
    assert (f.verdict, f.value) == (verdict, value)
    assert (f.relation is None) is (expected is None)


@pytest.mark.parametrize("relation", RELATIONS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_never_holds(value: float, relation: str) -> None:
    f = found("x", value, of="y", expected=0.0, relation=relation, spread=(1.0, math.nan, 3.0))
    assert (f.verdict, f.value, f.lowest, f.highest, f.samples) == ("differs", None, 1.0, 3.0, 3)
    assert str(value) in str(f.note)
    assert found("x", value, of="y").verdict == "measured"


def test_the_worst_verdict_is_that_of_all() -> None:
    assert [overall(VERDICTS[n:]) for n in range(4)] == list(VERDICTS)
    assert overall([]) == "skipped"
    assert skipped("x", "no weights").verdict == "skipped"


def test_the_seven_experiments_are_found() -> None:
    assert [c.name for c in lab.cards()] == NAMES
    for c in lab.cards():
        assert c.title.endswith("?") or len(c.title) > 20
        assert "arXiv:" in c.source
        assert "\n" not in c.title + c.source


def test_names_are_chosen_once_in_the_order_given() -> None:
    assert [c.name for c in lab.chosen(["shift", "gqa", "shift"])] == ["shift", "gqa"]
    assert [c.name for c in lab.chosen(["all"])] == NAMES
    assert [c.name for c in lab.chosen(["shift", "all"])] == ["shift", *(n for n in NAMES if n != "shift")]


@pytest.mark.parametrize(("word", "said"), [
    ("swigul", "did you mean 'swiglu'?"), ("rope_identity", "did you mean 'rope-identity'?"),
    ("Norm", "did you mean 'norm'?"), ("al", "did you mean 'all'?"), ("zzz", "known: blocks, gqa, norm, "),
])
def test_an_unknown_name_is_refused_with_the_nearest(word: str, said: str) -> None:
    with pytest.raises(UsageError, match="no experiment") as e:
        lab.chosen(["gqa", word])
    assert said in str(e.value.help)


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the room that cards() reads, for a newcomer to add a file to."""
    for file in Path(lab.__file__).parent.glob("*.py"):
        shutil.copy(file, tmp_path)
    monkeypatch.setattr(lab, "__file__", str(tmp_path / "__init__.py"))
    return tmp_path


def test_a_newcomers_file_is_found(copied: Path) -> None:
    (copied / "_piece.py").write_text("")
    (copied / "notes.txt").write_text("")
    doc = "Does it?\n\nSource: somebody, 2026,\npage 3.\n\nMore.\n"
    (copied / "a_new_one.py").write_text(f'"""{doc}"""\nimport no_such_thing\n')
    new = {c.name: c for c in lab.cards.__wrapped__()}["a-new-one"]
    assert (new.title, new.source) == ("Does it?", "somebody, 2026, page 3")


@pytest.mark.parametrize(("name", "text", "said"), [
    ("bare.py", '"""Does it?"""\n', "lab/bare.py names no source"), ("bare.py", "", "lab/bare.py names no source"),
    ("all.py", '"""Every.\n\nSource: x\n"""\n', "lab/all.py has the name that means every experiment"),
])
def test_a_file_without_a_source_is_refused(copied: Path, name: str, text: str, said: str) -> None:
    (copied / name).write_text(text)
    with pytest.raises(RuntimeError, match=said):
        lab.cards.__wrapped__()


def test_the_bundled_text_is_plain_and_of_a_size() -> None:
    text = lab.excerpt()
    assert 100_000 < len(text) < 200_000
    assert text.isascii()
    assert b"To be, or not to be,--that is the question:--" in text
    assert text.startswith(b"ACT I.")
