"""Budget files changed in place: the values alone, and all or nothing whatever stops the write."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from llamactl.errors import OutputError
from llamactl.source.budget import read
from llamactl.source.budgetwrite import rewrite

HERE = Path(__file__).parent
TOML = (HERE / "promises.toml").read_text(encoding="utf-8")
YAML = (HERE / "promises.yaml").read_text(encoding="utf-8")

LLAMA = "meta-llama/Meta-Llama-3-8B"


def written(tmp_path: Path, name: str, text: str | bytes) -> Any:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read(str(path))


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"])
def test_only_the_values_change(tmp_path: Path, ends: str, bom: bytes) -> None:
    raw = bom + TOML.replace("\n", ends).encode()
    file = written(tmp_path, "pyproject.toml", raw)
    rewrite(file, {(LLAMA, "params"): 9000000000, (LLAMA, "weights_bytes", "max"): 5,
                   (LLAMA, "active_params", 1, "exact"): 77, ("gpt2", "kv_cache_bytes", 1, "max"): 12345,
                   ("gpt2", "tied"): True, (LLAMA, "weights_bytes", "dtype"): 'a"\\b'})
    wanted = TOML.replace("8_030_261_248", "9_000_000_000").replace('"16.1GB"', "5").replace(
        "exact = 2", "exact = 77").replace("max = 2", "max = 12345").replace("tied = false", "tied = true").replace(
        "'bf16'", '"a\\"\\\\b"')
    assert Path(file.path).read_bytes() == bom + wanted.replace("\n", ends).encode()
    file = written(tmp_path, "b.yaml", bom + YAML.replace("\n", ends).encode())
    rewrite(file, {(LLAMA, "params"): 9, (LLAMA, "weights_bytes", "max"): 5, ("gpt2", "tied"): True,
                   ("gpt2", "kv_cache_bytes", 0, "max"): 10, ("gpt2", "family"): "llama"})
    wanted = YAML.replace("8030261248", "9").replace('"16.1GB"', "5").replace("max: 1\n", "max: 10\n").replace(
        "tied: false", "tied: true").replace("family: gpt2", 'family: "llama"')
    assert Path(file.path).read_bytes() == bom + wanted.replace("\n", ends).encode()
    assert sorted(os.listdir(tmp_path)) == ["b.yaml", "pyproject.toml"]


def test_mode_and_link_stay(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    file = written(tmp_path / "sub", "b.toml", "[gpt2]\nparams = 1\n")
    os.chmod(file.path, 0o640)
    (tmp_path / "link.toml").symlink_to("sub/b.toml")
    rewrite(read(str(tmp_path / "link.toml")), {("gpt2", "params"): 2})
    assert (tmp_path / "link.toml").is_symlink()
    assert Path(file.path).read_text() == "[gpt2]\nparams = 2\n"
    assert stat.S_IMODE(os.stat(file.path).st_mode) == 0o640


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["fsync", "replace", "chmod"])
def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str,
                                                  error: BaseException) -> None:
    file = written(tmp_path, "b.toml", "[gpt2]\nparams = 1\n")

    def stop(*args: Any, **kwargs: Any) -> None:
        raise error

    with monkeypatch.context() as m:
        m.setattr(os, step, stop)
        with pytest.raises(OutputError if isinstance(error, OSError) else KeyboardInterrupt):
            rewrite(file, {("gpt2", "params"): 2})
    assert Path(file.path).read_bytes() == file.raw
    assert os.listdir(tmp_path) == ["b.toml"]


KILLED = """
import os, signal, sys
from llamactl.source.budget import read
from llamactl.source.budgetwrite import rewrite
setattr(os, sys.argv[2], lambda *a: os.kill(os.getpid(), signal.SIGKILL))
rewrite(read(sys.argv[1]), {("gpt2", "params"): 2})
"""


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_killed_write_leaves_the_old_file(tmp_path: Path, step: str) -> None:
    file = written(tmp_path, "b.toml", "[gpt2]\nparams = 1\n")
    done = subprocess.run([sys.executable, "-c", KILLED, file.path, step], check=False, timeout=180,
                          env={**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])})
    assert done.returncode == -signal.SIGKILL
    assert Path(file.path).read_bytes() == file.raw


def unsafe(file: Any, changes: Any) -> OutputError:
    before = Path(file.path).read_bytes()
    with pytest.raises(OutputError) as caught:
        rewrite(file, changes)
    assert caught.value.exit_code == 5
    assert Path(file.path).read_bytes() == before
    assert len(os.listdir(os.path.dirname(file.path))) == 1
    return caught.value


def test_what_cannot_be_done_safely_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, "b.yaml", "gpt2:\n  family: >\n    gpt2\n")
    assert "not a value on its own" in unsafe(file, {("gpt2", "family"): "llama"}).message
    assert "not a value on its own" in unsafe(file, {("gpt2",): 1}).message
    Path(file.path).write_text("gpt2: {family: gpt2, params: 1}\n")
    assert "not a value on its own" in unsafe(file, {("gpt2", "family"): "llama"}).message
    file = read(file.path)
    Path(file.path).write_text("gpt2: {family: gpt2, params: 3}\n")
    assert "changed meanwhile" in unsafe(file, {("gpt2", "params"): 2}).message
    file = read(file.path)
    with monkeypatch.context() as m:
        m.setattr(os, "access", lambda *a: False)
        assert "read-only" in unsafe(file, {("gpt2", "params"): 2}).message
    file.spans["gpt2", "params"] = (0, 4)
    assert "would not say" in unsafe(file, {("gpt2", "params"): 2}).message
    file.spans["gpt2", "params"] = (4, 6)
    assert "would not say" in unsafe(file, {("gpt2", "params"): 2}).message
