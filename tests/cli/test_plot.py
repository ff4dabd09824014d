"""--plot: the picture says what the report says, arrives whole or not at all, and replaces nothing unasked."""

from __future__ import annotations

import os
import re
import stat
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where the picture goes: not the home folder, in which matplotlib keeps its list of fonts."""
    (tmp_path / "pictures").mkdir()
    return tmp_path / "pictures"


COMMANDS = (["rope", "llama-3.1-8b"], ["kv-cache", "llama-3-8b", "gemma-3-4b", "--sweep", "ctx=1k..8k"])


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c[0])
@pytest.mark.parametrize("form", ["png", "svg", "html"])
def test_each_format(cli: Any, folder: Path, command: list[str], form: str) -> None:
    file = folder / f"picture.{form}"
    done = cli(*command, "--plot", str(file))
    assert done.code == 0, done.err
    assert done.out == cli(*command).out, "the answer is printed all the same"
    data = file.read_bytes()
    if form == "png":
        assert data.startswith(b"\x89PNG\r\n")
    elif form == "svg":
        assert ET.fromstring(data).tag == "{http://www.w3.org/2000/svg}svg"
    else:
        text = data.decode()
        assert text.startswith("<!DOCTYPE html>")
        assert "<svg" in text
        assert "src=" not in text, "one file, nothing fetched"
        assert "default-src 'none'" in text
        assert "fill: var(--text)" in text, "light and dark, as every page"
        assert not set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", text)), "no colour that does not follow"
    assert stat.S_IMODE(file.stat().st_mode) & 0o077 == 0o077 & ~_umask() & 0o666
    assert os.listdir(folder) == [file.name]


def test_the_same_picture_twice(cli: Any, folder: Path) -> None:
    for name in ("a.svg", "b.svg"):
        assert cli("rope", "llama-3.1-8b", "--plot", str(folder / name)).code == 0
    assert (folder / "a.svg").read_bytes() == (folder / "b.svg").read_bytes()


def test_what_is_drawn() -> None:
    from matplotlib.figure import Figure

    from llamactl import kv_cache, load
    from llamactl.analysis.rope import rope as read
    from llamactl.render.plot import _cache, _rope

    axes = Figure().add_subplot()
    report = kv_cache("llama-3-8b", ctx=[1024, 2048])
    _cache(axes, [report])
    curve, weights = axes.get_lines()
    assert list(curve.get_xdata()) == [1024, 2048]
    assert [y * 2**30 for y in curve.get_ydata()] == [a.kv_cache_bytes for a in report.at]
    assert weights.get_ydata()[0] * 2**30 == report.weights_bytes

    axes = Figure().add_subplot()
    rope = read(load("llama-3.1-8b").model, id="llama-3.1-8b")
    _rope(axes, [rope])
    before, after, unseen, *_ = axes.get_lines()
    pairs = rope.rotations[0].pairs
    assert list(before.get_ydata()) == [p.wavelength for p in pairs]
    assert list(after.get_ydata()) == [p.stretched_wavelength for p in pairs]
    assert list(unseen.get_xdata()) == [p.j for p in pairs if p.unseen]
    assert len(unseen.get_xdata()) == 29


def test_an_existing_file_stays(cli: Any, folder: Path) -> None:
    file = folder / "mine.svg"
    file.write_text("mine")
    done = cli("rope", "llama-3.1-8b", "--plot", str(file))
    assert (done.code, done.out, file.read_text()) == (5, "", "mine")
    assert "--force" in done.err
    assert cli("rope", "llama-3.1-8b", "--plot", str(file), "--force").code == 0
    assert "<svg" in file.read_text()


@pytest.mark.parametrize(("name", "code"), [("picture.pdf", 2), ("picture", 2), ("no/such/folder.svg", 5)])
def test_refused(cli: Any, folder: Path, name: str, code: int) -> None:
    done = cli("rope", "llama-3.1-8b", "--plot", str(folder / name))
    assert (done.code, done.out) == (code, "")
    assert os.listdir(folder) == []


def test_nothing_to_draw(cli: Any, folder: Path) -> None:
    done = cli("rope", "gpt2", "--plot", str(folder / "x.svg"))
    assert (done.code, done.out, os.listdir(folder)) == (2, "", [])


def test_without_matplotlib(cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = cli("rope", "llama-3.1-8b", "--plot", str(folder / "x.svg"))
    assert (done.code, done.out, os.listdir(folder)) == (4, "", [])
    assert "pip install 'llamactl[plot]'" in done.err


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
