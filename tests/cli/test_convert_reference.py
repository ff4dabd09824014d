"""`llamactl convert --reference`: what the source answered lies beside the output, and verify needs no source."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

made: Any = sys.modules["llamactl_tests_checkpoints"]  # loaded by conftest.py

torch: Any = pytest.importorskip("torch")
NAME = "llamactl-reference.safetensors"
TENSOR = "model.layers.1.self_attn.o_proj.weight"
WITHOUT_TORCH = "import sys; sys.modules['torch'] = None; from llamactl.__main__ import main; sys.exit(main())"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    made.llama(tmp_path / "tiny", "F32")
    return tmp_path / "tiny"


def failed(got: Any, code: int, word: str, *parts: str) -> None:
    """One error line, at most one line of help, nothing on stdout."""
    assert (got.code, got.out) == (code, ""), got.err
    assert re.fullmatch(rf"error\[{word}\]: [^\n]*\S\n(help: [^\n]*\S\n)?", got.err), got.err
    for part in parts:
        assert part in got.err


@pytest.mark.parametrize("to", ["hf", "meta", "lesson", "gguf"])
def test_the_output_is_verified_without_its_source(cli: Any, source: Path, tmp_path: Path, to: str) -> None:
    assert cli("convert", source, "out", "--to", to, "--reference").code == 0
    shutil.rmtree(source)
    got = cli("verify", "out", "--json")
    assert got.code == 0, got.err
    r = got.json()["result"]
    assert r["verdict"] in ("equal", "same")
    assert {s["kind"] for s in r["sides"]} == {"recorded", "checkpoint"}


def test_a_damaged_copy_of_the_output_is_found(cli: Any, source: Path, tmp_path: Path) -> None:
    assert cli("convert", source, "out", "--reference").code == 0
    assert cli("verify", "out").code == 0
    shutil.copytree(tmp_path / "out", tmp_path / "copy")
    file = tmp_path / "copy" / "model.safetensors"
    tensors = made.read(file)
    rows = tensors[TENSOR].rows
    tensors[TENSOR] = tensors[TENSOR]._replace(data=b"".join([rows[1], rows[0], *rows[2:]]))  # two rows changed places
    made.write(file, tensors)
    got = cli("verify", "copy", "--no-explain", "--json")
    assert got.code == 1, got.err
    assert got.json()["result"]["verdict"] == "different"


@pytest.mark.parametrize(("args", "code", "told"), [
    (("--dtype", "bf16"), 4, True), (("--to", "gguf", "--dtype", "q8_0"), 1, True), (("--dtype", "fp32"), 0, False),
    (("--kv-heads", "8"), 0, False), (("--vocab-pad-to", "128"), 0, False)], ids=str)
def test_rounding_on_the_way_is_told_and_found(cli: Any, source: Path, args: tuple[str, ...], code: int, told: bool
                                               ) -> None:
    """The reference is the source's answer, not the output's: of weights in 16 bits no more than that can be said."""
    done = cli("convert", source, "out", *args, "--reference", "--json")
    assert ("reference-exact" in [w["code"] for w in done.json()["warnings"]]) is told
    assert cli("verify", "out", "--no-explain").code == code
    assert "reference-exact" not in cli("convert", source, "plain", *args).err


def test_it_is_what_the_command_reference_records(cli: Any, source: Path, tmp_path: Path) -> None:
    assert cli("convert", source, "out", "--to", "meta", "--reference").code == 0
    assert cli("reference", source, "-o", tmp_path / "ref.safetensors").code == 0
    assert (tmp_path / "out" / NAME).read_bytes() == (tmp_path / "ref.safetensors").read_bytes()


def test_it_is_counted_and_listed(cli: Any, source: Path, tmp_path: Path) -> None:
    planned = cli("convert", source, "out", "--reference", "--dry-run", "--json").json()
    assert not (tmp_path / "out").exists()
    body = cli("convert", source, "out", "--reference", "--json").json()
    files = {f["name"]: f["nbytes"] for f in body["result"]["files"]}
    assert files[NAME] == (tmp_path / "out" / NAME).stat().st_size
    assert body["result"]["total_bytes"] == sum(files.values())
    assert body["inputs"]["reference"] is True
    assert planned["result"]["files"] == body["result"]["files"]
    plain = cli("convert", source, "plain", "--json").json()
    assert plain["inputs"]["reference"] is False
    assert NAME not in {f["name"] for f in plain["result"]["files"]}
    assert NAME not in os.listdir(tmp_path / "plain")


def test_what_the_probe_cannot_see_is_told(cli: Any, tmp_path: Path) -> None:
    made.llama(tmp_path / "wide", "F32", model_type="mistral", sliding_window=9000, max_position_embeddings=20000)
    got = cli("convert", "wide", "out", "--reference", "--json")
    assert [w["code"] for w in got.json()["warnings"]] == ["probe"]


def test_it_needs_room_too(cli: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    r = cli("convert", source, "out", "--reference", "--dry-run", "--json").json()["result"]
    size = {f["name"]: f["nbytes"] for f in r["files"]}[NAME]
    free = r["total_bytes"] - size // 2
    monkeypatch.setattr(shutil, "disk_usage", lambda _: namedtuple("Usage", "total used free")(10**12, 0, free))
    failed(cli("convert", source, "out", "--reference"), 5, "no-space", f"{r['total_bytes']:,} bytes")
    assert cli("convert", source, "out").code == 0


def test_an_old_output_is_replaced_with_its_reference(cli: Any, source: Path, tmp_path: Path) -> None:
    assert cli("convert", source, "out", "--reference").code == 0
    made.llama(source, "F32", change={TENSOR: made.noise("F32", (64, 64), "another")})
    assert cli("convert", source, "out", "--reference", "--force").code == 0
    assert cli("verify", "out", "-q").code == 0
    assert cli("convert", source, "out", "--force").code == 0
    assert NAME not in os.listdir(tmp_path / "out")  # one of other weights would accuse these


@pytest.mark.parametrize("args", [("x.gguf", "--to", "gguf"), ("x.gguf", "--to", "gguf", "--dry-run")], ids=len)
def test_beside_a_single_file_there_is_no_place(cli: Any, source: Path, tmp_path: Path, args: tuple[str, ...]) -> None:
    failed(cli("convert", source, *args, "--reference"), 2, "usage", "x.gguf", "llamactl reference")
    assert os.listdir(tmp_path) == ["tiny"]


def test_without_torch_nothing_is_written(environment: Any, source: Path, tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, "convert", source, "out", "--reference"], cwd=tmp_path,
                          env=environment(tmp_path), capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.startswith("error[extra-missing]: recording a reference needs torch")
    assert os.listdir(tmp_path) == ["tiny"]


def test_weights_that_give_no_numbers_leave_nothing(cli: Any, tmp_path: Path) -> None:
    made.llama(tmp_path / "bad", "F32", change={"model.norm.weight": made.Tensor(
        "F32", (64,), made.pack("F32", [float("nan")] * 64))})
    failed(cli("convert", "bad", "out", "--reference", "--no-proof"), 3, "not-finite")
    assert os.listdir(tmp_path) == ["bad"]


def test_no_memory_is_one_line(cli: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from llamactl.verify import recording

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried "
                           "to allocate 10 bytes.")

    monkeypatch.setattr(recording, "record", fail)
    failed(cli("convert", source, "out", "--reference"), 5, "memory", "out of memory with 128 tokens")
    assert os.listdir(tmp_path) == ["tiny"]


def test_a_model_that_does_not_run_is_refused_before_the_writing(cli: Any, tmp_path: Path,
                                                                monkeypatch: pytest.MonkeyPatch) -> None:
    from llamactl.checkpoint.weightfiles import WeightFile

    golden = Path(__file__).parents[1] / "golden" / "mamba"
    (tmp_path / "mamba").mkdir()
    shutil.copy(golden / "config.json", tmp_path / "mamba")
    names = json.loads((golden / "header.json").read_text())["tensors"]
    tensors = {n: made.noise("F32", t["shape"], n) for n, t in names.items()}
    made.write(tmp_path / "mamba" / "model.safetensors", tensors)
    monkeypatch.setattr(WeightFile, "write", lambda *_: pytest.fail("written before the source was run"))
    failed(cli("convert", "mamba", "out", "--reference"), 3, "not-runnable")
    assert os.listdir(tmp_path) == ["mamba"]
