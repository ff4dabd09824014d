"""The index alone: its JSON, and names that must not leave the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from llamactl.checkpoint.folder import read_folder
from llamactl.checkpoint.index import INDEX, MAX_SHARDS, read_index
from llamactl.errors import InputRefused


def refusal(folder: Path) -> InputRefused:
    with pytest.raises(InputRefused) as caught:
        read_folder(folder)
    assert str(folder / INDEX) in caught.value.line()
    assert caught.value.line().isprintable()
    return caught.value


def test_what_it_says(tmp_path: Path) -> None:
    weight_map = {"a": "2.safetensors", "b": "sub/1.safetensors", "c": "2.safetensors"}
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {"total_size": 8}, "weight_map": weight_map, "tool": [1]}))
    index = read_index(str(tmp_path))
    assert (index.weight_map, index.total_size, index.warnings) == (weight_map, 8, ())
    assert index.shards == ("2.safetensors", "sub/1.safetensors")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("../x.safetensors", "leaves the folder"),
        ("a/../../x.safetensors", "leaves the folder"),
        ("a//x.safetensors", "not plain"),
        ("./x.safetensors", "not plain"),
        ("x.safetensors/", "not plain"),
        ("", "not plain"),
        ("/etc/x.safetensors", "absolute"),
        ("..\\x.safetensors", "Windows"),
        ("C:x.safetensors", "Windows"),
        ("x\0.safetensors", "NUL"),
        ("pytorch_model.bin", "not a .safetensors"),
        ("x.json", "not a .safetensors"),
        ("x\ud800.safetensors", "not a file name"),
    ],
)
def test_a_name_that_leaves_the_folder_opens_nothing(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": name}}))
    looked_at: list[str] = []
    real_stat, real_open = os.stat, os.open

    def stat(path: Any, **options: Any) -> os.stat_result:
        looked_at.append(str(path))
        return real_stat(path, **options)

    def open_(path: Any, *rest: Any) -> int:
        looked_at.append(str(path))
        return real_open(path, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat)
        patch.setattr(os, "open", open_)
        error = refusal(tmp_path)
    assert (error.code, why in error.message) == ("index-path", True)
    assert error.help
    assert [p for p in looked_at if p != str(tmp_path / INDEX)] == []


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("index-schema", "[1]"),
        ("index-schema", "{}"),
        ("index-schema", '{"weight_map": ["a"]}'),
        ("index-schema", '{"weight_map": {}}'),
        ("index-schema", '{"weight_map": null}'),
        ("index-schema", '{"weight_map": {"t": null}}'),
        ("index-schema", '{"weight_map": {"t": "a.safetensors"}, "metadata": [1]}'),
        ("index-schema", json.dumps({"weight_map": {f"t{n}": f"{n}.safetensors" for n in range(MAX_SHARDS + 1)}})),
        ("json-duplicate", '{"weight_map": {"t": "a.safetensors", "t": "b.safetensors"}}'),
        ("json-empty", " "),
        ("json-syntax", "{"),
        ("json-too-large", "[" + "0," * 4_000_000 + "0,0]"),
        ("lfs-pointer", "version https://git-lfs.github.com/spec/v1\n"),
    ],
    ids=str.__len__,
)
def test_broken(code: str, text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(text)
    assert refusal(tmp_path).code == code


@pytest.mark.parametrize("metadata", [{}, {"metadata": None}])
def test_no_metadata_is_noted(metadata: dict[str, None], tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"t": "a.safetensors"}, **metadata}))
    assert [code for code, _ in read_index(str(tmp_path)).warnings] == ["index-no-metadata"]


def test_behind_a_link_away(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("{}")
    (tmp_path / "m").mkdir()
    os.symlink("../secret", tmp_path / "m" / INDEX)
    assert refusal(tmp_path / "m").code == "link-outside"
