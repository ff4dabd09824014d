"""Which files go along with the weights, and which stay or are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from llamactl.checkpoint.beside import MAX_BESIDE_BYTES, carried, goes_along
from llamactl.errors import InputRefused, NotAvailable

ALONG = (
    "tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json "
    "merges.txt vocab.txt spiece.model sentencepiece.bpe.model tekken.json chat_template.jinja chat_template.json "
    "generation_config.json preprocessor_config.json video_preprocessor_config.json processor_config.json "
    "qwen.tiktoken README.md README LICENSE LICENSE.txt license.md LICENCE License-Llama2.pdf NOTICE "
    "NOTICE.txt COPYING USE_POLICY.md"
)
STAY = (
    "config.json model.safetensors model.safetensors.index.json pytorch_model.bin params.json consolidated.00.pth "
    "modeling_x.py .gitattributes ._tokenizer.json .x.tiktoken LICENSE.safetensors README.bin NOTICE-7b.gguf "
    "LICENSED READMEX.md old-tokenizer.json tokenizer.json.bak llamactl-manifest.json training_args.bin "
    "adapter_config.json"
)


@pytest.mark.parametrize("name", ALONG.split())
def test_these_go_along(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    assert carried(str(tmp_path)) == [name]


@pytest.mark.parametrize("name", STAY.split())
def test_these_stay(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x")
    assert carried(str(tmp_path)) == []
    assert not goes_along(name)


def test_sorted_and_folders_stay(tmp_path: Path) -> None:
    for name in ("vocab.json", "README.md", "merges.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "LICENSE").mkdir()
    assert carried(str(tmp_path)) == ["README.md", "merges.txt", "vocab.json"]


def test_a_link_inside_and_into_the_hub_cache(tmp_path: Path) -> None:
    blob = tmp_path / "models--a--b" / "blobs" / ("0" * 40)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "r"
    blob.parent.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    blob.write_text("x")
    os.symlink("../../blobs/" + "0" * 40, snapshot / "tokenizer.json")
    (snapshot / "real").write_text("x")
    os.symlink("real", snapshot / "LICENSE")
    assert carried(str(snapshot)) == ["LICENSE", "tokenizer.json"]


def test_what_cannot_be_copied_is_refused_not_left_out(tmp_path: Path) -> None:
    inside = tmp_path / "m"
    inside.mkdir()
    (tmp_path / "secret").write_text("x")
    for target, code in (("../secret", "link-outside"), ("gone", "dangling-link"), ("README.md", "link-loop"),
                         ("/dev/null", "not-a-file")):
        os.symlink(target, inside / "README.md")
        with pytest.raises(InputRefused) as caught:
            carried(str(inside))
        assert caught.value.code == code
        assert caught.value.path == str(inside / "README.md")
        os.unlink(inside / "README.md")
    os.symlink(tmp_path, inside / "README.md")
    assert carried(str(inside)) == [], "a link to a folder is a folder"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(InputRefused, match="named pipe"):
        carried(str(tmp_path))


def test_the_size_has_a_bound(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with open(path, "wb") as f:
        f.truncate(MAX_BESIDE_BYTES)
    assert carried(str(tmp_path)) == ["tokenizer.json"]
    with open(path, "wb") as f:
        f.truncate(MAX_BESIDE_BYTES + 1)
    with pytest.raises(InputRefused, match=r"256,000,001 bytes; at most 256,000,000") as caught:
        carried(str(tmp_path))
    assert caught.value.code == "beside-too-large"


def test_no_such_folder(tmp_path: Path) -> None:
    with pytest.raises(NotAvailable):
        carried(str(tmp_path / "no"))
