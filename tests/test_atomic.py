"""llamactl.atomic: the old file or the new one, whole, and nothing beside them."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest

from llamactl.atomic import create, put
from llamactl.errors import OutputError


def stop(error: BaseException) -> Any:
    def raises(*_: object) -> None:
        raise error

    return raises


@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
@pytest.mark.parametrize("there", [False, True])
def test_a_failing_write_leaves_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str,
                                         there: bool) -> None:
    file = tmp_path / "x.svg"
    if there:
        file.write_text("old")
    monkeypatch.setattr(f"os.{step}", stop(OSError(28, "No space left on device")))
    with pytest.raises(OutputError) as caught:
        create(str(file), b"new", force=True)
    monkeypatch.undo()
    assert caught.value.exit_code == 5
    assert "No space left" in caught.value.message
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == ([("x.svg", "old")] if there else [])


def test_an_interrupt_leaves_what_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.svg"
    file.write_text("old")
    monkeypatch.setattr("os.fsync", stop(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        create(str(file), b"new", force=True)
    monkeypatch.undo()
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x.svg", "old")]


def test_the_last_look_can_still_say_no(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_text("old")
    with pytest.raises(ValueError, match="changed"):
        put(str(file), b"new", 0o600, stop(ValueError("changed")))
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("x", "old")]


def test_a_link_keeps_pointing_where_it_did(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(OutputError):
        create(str(tmp_path / "link"), b"new")
    create(str(tmp_path / "link"), b"new", force=True)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


@pytest.mark.parametrize("force", [False, True])
def test_neither_folders_nor_pipes_are_replaced(tmp_path: Path, force: bool) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name in ("folder", "pipe"):
        with pytest.raises(OutputError):
            create(str(tmp_path / name), b"new", force=force)
    assert (tmp_path / "folder").is_dir()
    assert (tmp_path / "pipe").is_fifo()
    assert len(list(tmp_path.iterdir())) == 2


def test_permissions_are_those_of_any_new_file(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        create(str(tmp_path / "x"), b"new")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o640
