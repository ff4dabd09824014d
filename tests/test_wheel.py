"""What is installed is what was checked out: the wheel with its presets in a fresh venv, without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[1]
PRESETS = {p.name for p in (ROOT / "presets" / "models").glob("*.yaml")}


def call(*args: str | Path, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command without this process's Python settings."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "LLAMACTL_", "HF_", "VIRTUAL_ENV"))}
    return subprocess.run([str(a) for a in args], cwd=cwd, env=clean | env, capture_output=True, text=True, check=False,
                          timeout=600)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    done = call(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", out, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    (path,) = out.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def bin_(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs of a fresh venv."""
    path = tmp_path_factory.mktemp("venv") / "v"
    venv.create(path, with_pip=True)
    return path / ("Scripts" if os.name == "nt" else "bin")


@pytest.fixture(scope="module")
def cut_off() -> Sequence[str]:
    """The words before a command that take its network away."""
    for words in (("unshare", "-n"), ("unshare", "-rn")):
        if shutil.which(words[0]) and not subprocess.run([*words, "true"], capture_output=True, check=False).returncode:
            return words
    return ()


def test_the_wheel_holds_the_presets_and_no_tests(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as z:
        names = z.namelist()
        metadata = z.read(next(n for n in names if n.endswith(".dist-info/METADATA"))).decode()
    assert {Path(n).name for n in names if n.startswith("llamactl/_presets/models/")} == PRESETS
    tops = {n.split("/")[0] for n in names}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"llamactl"}
    tests = [n for n in names if n.startswith("tests") or "/test" in n.lower() or "conftest" in n]
    assert not tests
    assert not [n for n in names if "__pycache__" in n or n.endswith(".pyc")]
    assert "Requires-Dist: typer<0.29" in metadata
    assert "torch" not in "".join(line for line in metadata.splitlines() if "Requires-Dist" in line
                                  and "extra ==" not in line)


def test_the_installed_program_answers_without_a_network(wheel: Path, bin_: Path, cut_off: Sequence[str],
                                                         tmp_path: Path) -> None:
    done = call(bin_ / "python", "-m", "pip", "install", "-q", wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    where = tmp_path / "empty"
    where.mkdir()
    for args, out in (
        (("kv-cache", "meta-llama/Meta-Llama-3-8B", "--ctx", "131072", "-q"), "17179869184\n"),
        (("params", "meta-llama/Meta-Llama-3-8B", "-q"), "8030261248\n"),
        (("params", "deepseek-v3", "-q"), "671026404352\n"),
        (("presets", "-q"), "".join(f"{n}\n" for n in sorted(p.removesuffix(".yaml") for p in PRESETS))),
    ):
        for words in (cut_off, ()):
            done = call(*words, bin_ / "llamactl", *args, cwd=where, HOME=str(where))
            assert done.returncode == 0, done.stderr
            assert done.stdout == out
    text = call(*cut_off, bin_ / "llamactl", "kv-cache", "meta-llama/Meta-Llama-3-8B", "--ctx", "131072", cwd=where)
    assert "17,179,869,184 B (17.18 GB, 16.00 GiB)" in text.stdout
    assert "source: preset" in text.stdout
    done = call(*cut_off, bin_ / "llamactl", "explore", "gpt2", "llama-3-8b", "-o", tmp_path / "page.html", cwd=where)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").stat().st_size > 100_000  # the page's own files are in the wheel
    if cut_off:
        done = call(*cut_off, bin_ / "llamactl", "params", "acme/none", cwd=where, HOME=str(where))
        assert done.returncode == 4
        assert done.stderr.startswith("error[hub-unreachable]: acme/none: ")
        assert len(done.stderr.splitlines()) <= 2
    assert {p.name for p in where.iterdir()} <= {".cache"}


def test_an_editable_install_finds_the_presets_of_the_checkout(bin_: Path, tmp_path: Path) -> None:
    done = call(bin_ / "python", "-m", "pip", "install", "-q", "-e", ROOT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = call(bin_ / "python", "-c", "import llamactl.source.presets as p; print(p.folder())", cwd=tmp_path)
    assert Path(done.stdout.strip()) == ROOT / "presets" / "models"
    assert call(bin_ / "llamactl", "params", "llama-3-8b", "-q", cwd=tmp_path).stdout == "8030261248\n"
    assert call(bin_ / "llamactl", "--version", cwd=tmp_path).stdout.startswith("llamactl ")
